"""The last pipeline stage's embedding for drafts as integers: it changes drafts alone."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtpkit.engine.loading import round_embedding
from mtpkit.errors import UserError
from mtpkit.kernels.integer_rows import IntegerRows
from mtpkit.model import build_model, mtp
from mtpkit.model.layers.embedding import IntegerEmbedding
from tests.engine.law import check_second_tokens
from tests.engine.rank_cases import PROMPTS, VOCAB, Case, config, decode, split_model
from tests.engine.tiny import make_llm, record_drafts, tiny_model
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects, made_once

BITS = {"int8": 8, "int4": 4}
SEEDED = Case("mamba2", 2)
DRAWN = Case("mamba2", 3, guided=False, settings=dict(draft_sampling=True))
TIED = config("mamba2").replace(tie_word_embeddings=True)


def drafts_of(model, **settings) -> list:
    """The heads' own drafts; none on a rank that has no heads."""
    llm = make_llm(model, 3, async_scheduling=False, **settings)
    recorded = record_drafts(llm, PROMPTS[:3], max_tokens=6, guided=False)
    return sorted([list(known), list(drafts)] for known, drafts in recorded.items())


def two_stages(rank: int, wanted: dict, out: Path) -> None:
    look_at_new_objects()
    found = {}
    for dtype in BITS:
        model = split_model(config("mamba2"), ranks=1, stages=2)
        settings = dict(draft_embedding_dtype=dtype)
        tokens, llm = decode(model, Case("mamba2", 2, settings=settings), wanted["seeded"])
        found[dtype] = dict(
            tokens=tokens,
            drafts=drafts_of(model, **settings),
            drawn=decode(model, DRAWN)[0],
            planned=llm.memory_plan.draft_embedding,
            plan=str(llm.memory_plan),
        )
    if rank == 1:
        with pytest.raises(
            UserError,
            match=(
                "the draft embedding of this model is already int4, not int8: load the model again"
            ),
        ):
            round_embedding(model, "int8", 3, 2)
    model = split_model(TIED, ranks=1, stages=2)
    tokens, llm = decode(
        model, Case("mamba2", 3, settings=dict(draft_embedding_dtype="int8")), wanted["tied"]
    )
    found["tied"] = dict(tokens=tokens, planned=llm.memory_plan.draft_embedding)
    check_a_split_table()
    (out / f"{rank}.json").write_text(json.dumps(found))


def check_a_split_table() -> None:
    """Of two tensor-parallel ranks, each of which has the rows of its tokens."""
    table = split_model(config("mamba2")).embedding.word_embeddings
    ids = torch.arange(VOCAB).view(2, -1)
    with torch.no_grad():
        want = IntegerRows.of(table(ids.flatten()), 4).at(ids, torch.float32)
        assert len(table.weight) == VOCAB // 2 and IntegerEmbedding(table, 4)(ids).equal(want)


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """What one rank decodes, with an embedding of plain numbers, and what each of two stages
    does."""

    def make(path: Path) -> None:
        model = build_model(config("mamba2"), device="cpu", seed=1)
        tied = decode(build_model(TIED, device="cpu", seed=1), Case("mamba2", 0))[0]
        wanted = dict(seeded=decode(model, SEEDED)[0], drawn=decode(model, DRAWN)[0], tied=tied)
        (path / "wanted.json").write_text(json.dumps(wanted))
        run_ranks(two_stages, wanted, path)

    path = made_once(tmp_path_factory, "embedding_of_integers", make)
    return [json.loads((path / f"{name}.json").read_text()) for name in ("wanted", 0, 1)]


def let_heads_read_integers(patch: pytest.MonkeyPatch, bits: int) -> None:
    """On one rank, too, where the base reads the embedding as it is."""
    whole = mtp.mtp_input
    patch.setattr(
        mtp,
        "mtp_input",
        lambda ids, x, table, *rest: whole(ids, x, IntegerRows.of(table, bits), *rest),
    )


@pytest.mark.parametrize("dtype", BITS)
def test_drafts_alone_change(decoded, dtype, monkeypatch):
    """Greedy tokens and those of a seed are the same. Drafts, and the tokens that drawn drafts lead
    to, are those of one rank whose heads read the same numbers."""
    wanted, *stages = decoded
    model = build_model(config("mamba2"), device="cpu", seed=1)
    plain = drafts_of(model)
    let_heads_read_integers(monkeypatch, BITS[dtype])
    drafts = drafts_of(model)
    drawn = decode(model, DRAWN)[0]
    table = model.embedding.word_embeddings.weight
    for stage in stages:
        assert stage[dtype]["tokens"] == wanted["seeded"] and stage[dtype]["drawn"] == drawn
        assert stage[dtype]["planned"] == len(table) * (table.shape[1] * BITS[dtype] // 8 + 4)
        assert "of it a draft embedding of 0.0 MB on the last stage" in stage[dtype]["plan"]
    assert [stage[dtype]["drafts"] for stage in stages] == [[], drafts]
    assert dtype == "int8" or (drafts != plain and drawn != wanted["drawn"])


def test_a_tied_embedding_is_the_lm_head(decoded):
    """Of which there is no copy to round."""
    wanted, *stages = decoded
    assert [stage["tied"] for stage in stages] == [dict(tokens=wanted["tied"], planned=0)] * 2


def test_drawn_drafts_keep_the_law(monkeypatch):
    let_heads_read_integers(monkeypatch, 4)
    check_second_tokens(tiny_model())


@pytest.mark.parametrize(
    ("depths", "stages", "tied", "why"),
    [
        (0, 2, False, "num_speculative_tokens is 0"),
        (2, 1, False, "with one pipeline stage the heads read the embedding of the base"),
        (2, 2, True, "the heads read the lm_head"),
    ],
)
def test_what_has_no_effect_is_said(depths, stages, tied, why, caplog):
    model = SimpleNamespace(mtpkit_config=config("mamba2").replace(tie_word_embeddings=tied))
    with caplog.at_level(logging.WARNING):
        round_embedding(model, "int8", depths, stages)
        round_embedding(model, "auto", depths, stages)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"draft_embedding_dtype has no effect: {why}")


def test_pairs_of_numbers_need_an_even_size():
    model = SimpleNamespace(mtpkit_config=SimpleNamespace(hidden_size=63))
    with pytest.raises(UserError, match="int4 stores pairs of numbers, hidden_size 63 is odd"):
        round_embedding(model, "int4", 2, 2)
