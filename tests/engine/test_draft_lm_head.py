"""An lm_head in fp8 for drafts alone: drafts are chosen by it, and the output stays the base's."""

import logging

import pytest
import torch

from mtpkit.engine import LLM, SamplingParams, loading
from mtpkit.errors import UserError
from mtpkit.model import build_model, draft_output_weight, mtp, output_weight
from mtpkit.model.formats import Nvfp4, Quantized
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.quantized import for_drafts, online, replace_weight
from tests.engine.law import check_second_tokens
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    make_llm,
    make_prompts,
    record_drafts,
    teacher_forced_drafts,
    tiny_config,
    tiny_model,
)
from tests.kernels.recurrence import relative

FP8 = dict(draft_lm_head_dtype="fp8_e4m3")
BOTH = ("fp8_e4m3", "nvfp4")
PROMPTS = make_prompts()
SOME = [60, 3, 17, 22, 41, 8, 30]
SEEDED = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)


def rounded(model, dtype: str = "fp8_e4m3") -> torch.Tensor:
    """The lm_head as fp8 with a scale per row, or NVFP4, has it."""
    weight = output_weight(model)
    if dtype == "nvfp4":
        kind = Nvfp4()
        return Quantized(kind, tuple(weight.shape), kind.quantize(weight.detach())).widen()
    return online(weight).widen()


def by_rounded(heads: str, dtype: str):
    """The `tiny_model` of some heads with the rounded lm_head for the base, too."""
    model = build_model(tiny_config(heads), device="cpu", seed=1)
    with torch.no_grad():
        output_weight(model).copy_(rounded(model, dtype))
    return model


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_drafts_are_those_of_the_rounded_lm_head(heads, dtype):
    model = tiny_model(heads)
    recorded = record_drafts(make_llm(model, 2, draft_lm_head_dtype=dtype), PROMPTS)
    other = by_rounded(heads, dtype)
    for known, drafts in recorded.items():
        assert list(drafts) == teacher_forced_drafts(other, tuple(known), 2)
    plain = record_drafts(make_llm(model, 2), PROMPTS)
    assert recorded.keys() == plain.keys() and recorded != plain


@pytest.mark.parametrize(
    ("heads", "settings"),
    [
        ("repeated", {}),
        ("distinct", {}),
        ("repeated", dict(draft_vocab=SOME)),
        ("repeated", dict(draft_lm_head_dtype="nvfp4", draft_vocab=SOME)),
        ("distinct", dict(draft_lm_head_dtype="nvfp4", speculative_token_tree="[3, 2]")),
        ("repeated", dict(num_speculative_tokens="auto")),
        ("repeated", dict(speculative_token_tree="[3, 2]")),
        ("distinct", dict(speculative_token_tree="[2, 1]", draft_vocab=SOME)),
        ("repeated", dict(speculative_eagle_topk=2, speculative_num_draft_tokens=4)),
    ],
    ids=str,
)
def test_the_output_is_the_bases_own(heads, settings):
    model = tiny_model(heads)
    k = settings.pop("num_speculative_tokens", 2)
    settings = FP8 | settings
    assert generate(make_llm(model, k, **settings), PROMPTS) == [
        decode(model, prompt, 20) for prompt in PROMPTS
    ]
    want = generate(make_llm(model, 0), PROMPTS, SEEDED)
    assert generate(make_llm(model, k, **settings), PROMPTS, SEEDED) == want


def test_rows_of_an_odd_width_are_refused():
    model = build_model(tiny_config().replace(hidden_size=40), device="cpu")
    make_llm(model, 2, **FP8)
    with pytest.raises(UserError, match="draft_lm_head_dtype is nvfp4, but the lm_head's rows"):
        make_llm(model, 2, draft_lm_head_dtype="nvfp4")


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_logits_are_those_of_the_format(tied, dtype):
    """The base's own stay as they are, also where the embedding is the lm_head."""
    model = build_model(tiny_config().replace(tie_word_embeddings=tied), device="cpu", seed=1)
    before = output_weight(model).clone()
    x = torch.randn(5, model.mtpkit_config.hidden_size)
    for tokens in (None, torch.tensor(sorted(SOME))):
        vocab = None if tokens is None else SOME
        llm = make_llm(model, 2, draft_lm_head_dtype=dtype, draft_vocab=vocab)
        chosen = output_weight(model).detach() if tokens is None else before[tokens]
        rows = for_drafts(chosen, dtype).widened()
        if dtype == "fp8_e4m3":  # in NVFP4 the scale of a matrix depends on all its rows
            assert torch.equal(rows, rounded(model) if tokens is None else rounded(model)[tokens])
        drafter = llm.engine.executor.drafter
        assert relative(drafter.logits(x), (x @ rows.t()).double()) < 1e-6
        copied, held = draft_output_weight(model, tokens, dtype)
        assert isinstance(copied, QuantizedWeight) and torch.equal(copied.widened(), rows)
        best = mtp.greedy_tokens(model, x, copied, held)
        want = (x @ rows.t()).argmax(-1)
        assert torch.equal(best, want if tokens is None else tokens[want])
        # A byte for each number, and four for a row; or half of one, and one for each 16 numbers.
        per_number = 1 if dtype == "fp8_e4m3" else 0.5 + 1 / 16
        assert drafter.head_bytes == per_number * rows.numel() + 4 * len(rows)
        assert llm.memory_plan.draft_head == drafter.head_bytes
        assert "of it an lm_head for drafts of 0.0 MB" in str(llm.memory_plan)
    assert torch.equal(output_weight(model), before)


@pytest.mark.parametrize(("damaged", "dtype"), [(False, BOTH[0]), (True, BOTH[0]), (True, BOTH[1])])
def test_drawn_drafts_keep_the_law(damaged, dtype, monkeypatch):
    """Also by a copy whose rows are halved or half as large again, so that verification by the
    probabilities of the lm_head itself would be seen."""
    if damaged:
        monkeypatch.setattr(
            mtp,
            "for_drafts",
            lambda rows, dtype: for_drafts(
                rows * (0.5 + torch.arange(len(rows)) % 2)[:, None], dtype
            ),
        )
    check_second_tokens(tiny_model(), draft_lm_head_dtype=dtype)


def test_a_rank_may_hold_none_of_the_tokens():
    model = tiny_model()
    rows, tokens = draft_output_weight(model, torch.tensor([999]), "fp8_e4m3")
    assert rows.shape == (0, model.mtpkit_config.hidden_size) and not len(tokens)


def test_without_drafts_there_is_no_copy(caplog, monkeypatch):
    monkeypatch.setattr(mtp, "for_drafts", None)
    with caplog.at_level(logging.WARNING):
        llm = make_llm(tiny_model(), 0, **FP8)
    assert llm.engine.executor.drafter.head_bytes == llm.memory_plan.draft_head == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "draft_lm_head_dtype has no effect: num_speculative_tokens is 0"


def test_a_quantised_lm_head_is_read_as_it_is(caplog, monkeypatch):
    monkeypatch.setattr(mtp, "for_drafts", None)
    model = build_model(tiny_config(), device="cpu", seed=1)
    weight = output_weight(model)
    replace_weight(model.output_layer, QuantizedWeight([online(weight)], weight.dtype))
    with caplog.at_level(logging.WARNING):
        llm = make_llm(model, 2, **FP8)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("draft_lm_head_dtype has no effect: the lm_head of this model is")
    assert llm.memory_plan.draft_head == 0
    found = generate(llm, PROMPTS, greedy(8))
    assert found == [decode(model, prompt, 8) for prompt in PROMPTS]


def test_gpus_without_fp8_are_refused(monkeypatch):
    monkeypatch.setattr(loading, "_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    with pytest.raises(UserError, match="draft_lm_head_dtype is fp8_e4m3, but an A100 cannot"):
        LLM(tiny_model(), 2, device="cuda", **FP8)
