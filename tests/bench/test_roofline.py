"""The roofline against published limits, against models that are really built, and against sums by
hand."""

import pytest
import torch

from mtpkit.bench.roofline import (
    Cost,
    Roofline,
    Work,
    expected_length,
    tabulate_limits,
)
from mtpkit.bench.settings import RooflineConfig, depth_rates
from mtpkit.bench.sizes import DEEPSEEK_V3, NEMOTRON_H_8B
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.errors import UserError
from mtpkit.kernels.ring import ring_capacity, ring_length
from mtpkit.model import build_model
from mtpkit.model.kinds import KINDS
from mtpkit.model.state import ReplaySpec
from tests.engine.fakes import state_sizes
from tests.shared import each
from tests.toy_config import toy_config

H200 = (RooflineConfig().bandwidth * 1e12, RooflineConfig().matrix_rate * 1e12)
RATES = [0.85, 0.85, 0.85]


def works(cost: Cost, phase: str) -> dict[str, Work]:
    return {work.name: work for work in cost.phases[phase]}


@each(
    ("batch_size", "limit"),
    [(1, 723), (4, 2828), (16, 10371), (32, 18676), (64, 25711), (128, 27175)],
)
def test_the_limits_beside_the_figures_of_the_field(batch_size, limit):
    # as those figures were computed with
    cost = Roofline(NEMOTRON_H_8B, ring_entries=8).decode(batch_size, RATES)
    assert cost.limit_tokens_per_s(*H200) == pytest.approx(limit, rel=0.02)


def test_the_sizes_that_the_field_knows():
    roofline = Roofline(NEMOTRON_H_8B)
    plain = works(
        Roofline(NEMOTRON_H_8B, state_rollback="snapshot").decode(1, context_len=1), "verify"
    )
    assert plain["state"].bytes / 2 == pytest.approx(100.7e6, rel=1e-3)  # read once, written once
    assert plain["attention"].bytes == 16384
    cost = roofline.decode(1, RATES)
    assert works(cost, "verify")["matrices"].bytes == pytest.approx(15.1e9, rel=2e-3)
    head = 2 * NEMOTRON_H_8B.vocab_size * NEMOTRON_H_8B.hidden_size
    assert head / works(cost, "draft 2")["matrices"].bytes == pytest.approx(0.88, abs=0.005)


@each(
    "changes",
    [
        {},
        {"activation": "swiglu"},
        {"tie_word_embeddings": True},
        {"mtp_use_repeated_layer": False},
    ],
)
def test_weights_are_those_of_the_model_that_is_built(changes):
    config = toy_config(pattern="MM*--*", mtp_pattern="*-", **changes)
    names = dict(build_model(config).named_parameters())
    matrices = {n: p.numel() for n, p in names.items() if p.dim() == 2}
    heads = sum(size for name, size in matrices.items() if name.startswith("mtp."))
    output = config.vocab_size * config.hidden_size
    # the embedding is looked up, not read
    tables = output * (1 if config.tie_word_embeddings else 2)
    cost = Roofline(config, torch.float32).decode(1, RATES)
    base = sum(matrices.values()) - heads - tables + output
    assert works(cost, "verify")["matrices"].bytes == 4 * base
    physical = len({name.split(".")[2] for name in matrices if name.startswith("mtp.")})
    assert works(cost, "draft 1")["matrices"].bytes == 4 * (heads / physical + output)


@pytest.mark.parametrize("latent", [0, 16])
def test_experts_are_those_of_the_model_that_is_built(latent):
    config = toy_config(
        pattern="E",
        mtp_pattern="",
        mtp_num_depths=0,
        num_moe_experts=4,
        moe_ffn_hidden_size=24,
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=latent,
    )
    parameters = build_model(config).named_parameters()
    built = sum(p.numel() for name, p in parameters if p.dim() > 1 and ".mlp." in name)
    matrices = KINDS["E"].matrices(config)
    always = matrices.always
    expert = matrices.expert
    assert built == always + 4 * expert
    # One token reads what it uses; many read everything.
    one, many = (works(Roofline(config).decode(size), "verify")["matrices"] for size in (1, 1000))
    output = config.vocab_size * config.hidden_size
    assert one.bytes == pytest.approx(2 * (always + 2 * expert + output))
    assert one.flops == 2 * (always + 2 * expert + output) and many.flops == 1000 * one.flops
    assert many.bytes == pytest.approx(2 * (built + output))


def test_state_is_read_once_and_written_as_the_rollback_does():
    config = toy_config(pattern="M", mtp_pattern="M*")
    state = 4 * 4 * 8 * 8
    for rollback, moved in (("replay", 1 + expected_length(RATES) / 16), ("snapshot", 1 + 4)):
        cost = Roofline(config, state_rollback=rollback, ring_entries=16).decode(3, RATES)
        assert works(cost, "verify")["state"].bytes == pytest.approx(3 * state * moved)
        assert works(cost, "draft 1")["state"].bytes == pytest.approx(3 * state * moved)
        # a copy, which is forgotten
        assert works(cost, "draft 2")["state"].bytes == pytest.approx(3 * state)
    half = Roofline(config, state_dtype=torch.bfloat16, ring_entries=16).decode(3, RATES)
    whole = Roofline(config, ring_entries=16).decode(3, RATES)
    assert 2 * works(half, "verify")["state"].bytes == works(whole, "verify")["state"].bytes


def test_keys_and_values_are_counted_in_their_own_dtype():
    """And nothing else is."""
    config = toy_config(pattern="M*", mtp_pattern="*")
    whole, half = (
        Roofline(config, kv_dtype=dtype).decode(3, RATES) for dtype in (None, torch.float8_e4m3fn)
    )
    for phase in whole.phases:
        own = works(whole, phase)
        other = works(half, phase)
        assert own["attention"].bytes == 2 * other["attention"].bytes > 0
        assert all(own[name] == other[name] for name in own if name != "attention")
    config = NEMOTRON_H_8B
    bytes_of = [
        tabulate_limits(config, RooflineConfig(engine=EngineOptions(kv_cache_dtype=dtype)))[0]
        for dtype in ("auto", "fp8_e4m3")
    ]
    assert all(a.bytes > b.bytes for a, b in zip(*(one.rows for one in bytes_of), strict=True))


def test_each_distinct_head_has_a_state_whose_ring_holds_the_positions_it_feeds_again():
    config = toy_config(pattern="M", mtp_pattern="M*", mtp_use_repeated_layer=False)
    width = 1 + len(RATES) + len(RATES) - 1
    held = ring_capacity(ring_length(width))
    for rollback, moved in (("replay", 1 + expected_length(RATES) / held), ("snapshot", 1 + width)):
        cost = Roofline(config, state_rollback=rollback).decode(3, RATES)
        for depth in range(1, 1 + len(RATES)):
            assert works(cost, f"draft {depth}")["state"].bytes == pytest.approx(
                3 * 4 * 4 * 8 * 8 * moved
            )


@each("k", [0, 3, 4, 8, 20])
def test_the_ring_is_the_engines(k):
    config = EngineConfig(max_model_len=64, num_speculative_tokens=k)
    held = ring_capacity(ReplaySpec((1,), {}).ring(state_sizes(config)).length)
    assert (
        Roofline(toy_config()).entries(k) == held
        and Roofline(toy_config(), ring_entries=8).entries(k) == 8
    )
    state = works(Roofline(toy_config(pattern="M")).decode(1, [1.0] * k), "verify")["state"].bytes
    assert state == pytest.approx(4 * 4 * 8 * 8 * (1 + (1 + k) / held))


def test_keys_and_values_grow_with_the_context():
    config = toy_config(pattern="**", mtp_pattern="*")
    cost = Roofline(config).decode(5, RATES, context_len=100)
    assert works(cost, "verify")["attention"].bytes == 5 * 100 * 2 * (2 * 2 * 8 * 2)
    assert works(cost, "verify")["attention"].flops == 5 * 4 * 2 * (4 * 4 * 8 * 100)
    assert works(cost, "draft 3")["attention"].bytes == 5 * 100 * (2 * 2 * 8 * 2)


def test_a_pruned_vocabulary_makes_drafts_alone_cheaper():
    whole = Roofline(NEMOTRON_H_8B).decode(1, RATES)
    pruned = Roofline(NEMOTRON_H_8B, draft_vocab_size=32768).decode(1, RATES)
    saved = 2 * (131072 - 32768) * 4096
    assert [
        w.bytes - p.bytes
        for w, p in zip(whole.works, pruned.works, strict=True)
        if w.name == "matrices"
    ] == [
        0,
        saved,
        saved,
        saved,
    ]


def test_work_takes_the_longer_of_its_two_times_and_works_follow_each_other():
    work = Work("matrices", bytes=100, flops=1000)
    assert (
        work.seconds(bandwidth=10, matrix_rate=1000) == 10
        and work.seconds(bandwidth=1000, matrix_rate=10) == 100
    )
    cost = Roofline(toy_config()).decode(2, [0.5])
    assert cost.seconds(*H200) == pytest.approx(sum(work.seconds(*H200) for work in cost.works))
    assert cost.tokens == pytest.approx(2 * 1.5)


def test_acceptance_becomes_a_length():
    assert expected_length([]) == 1 and expected_length([1.0, 0.5, 0.5]) == 1 + 1 + 0.5 + 0.25
    assert depth_rates((0.9, 0.8), 4) == [0.9, 0.8, 0.8, 0.8] and depth_rates((0.9, 0.8), 0) == []


def test_prefill_counts_each_token_once_and_the_weights_once_a_step():
    config = toy_config(pattern="M*-", mtp_pattern="*")
    roofline = Roofline(config)
    layers = sum(KINDS[letter].matrices(config).used for letter in config.pattern)
    output = config.vocab_size * config.hidden_size
    one, two = (roofline.prefill(4, 8, max_num_batched_tokens=size) for size in (None, 16))
    assert one.tokens == 32
    assert works(one, "base")["matrices"].flops == 2 * (32 * layers + 4 * output)
    assert works(two, "base")["matrices"].bytes == 2 * works(one, "base")["matrices"].bytes
    assert two.flops == one.flops
    # Causal: a token attends to half of its prompt in the mean.
    assert works(one, "base")["attention"].flops == 32 * 4 * 4 * 8 * 4
    drafted = roofline.prefill(4, 8, k=3)
    assert list(drafted.phases) == ["base", "draft 1", "draft 2", "draft 3"]
    head = 2 * config.hidden_size**2 + KINDS["*"].matrices(config).used
    assert works(drafted, "draft 1")["matrices"].flops == 2 * (32 * head + 4 * output)
    assert works(drafted, "draft 2")["matrices"].flops == 2 * (4 * head + 4 * output)


def test_a_prefill_pass_that_ends_no_prompt_reads_no_output_layer():
    config = toy_config(pattern="-", mtp_pattern="-")
    output = config.vocab_size * config.hidden_size
    layer = KINDS["-"].matrices(config).used
    eh_proj = 2 * config.hidden_size**2
    cost = Roofline(config, draft_vocab_size=8).prefill(2, 64, k=1, max_num_batched_tokens=16)
    assert works(cost, "base")["matrices"].bytes == 2 * (8 * layer + 2 * output)
    draft = works(cost, "draft 1")["matrices"].bytes
    # the head's MLP is for drafts alone
    assert draft == 2 * (8 * eh_proj + 2 * (layer + 8 * config.hidden_size))


@pytest.mark.parametrize("repeated", [True, False])
def test_after_the_last_cache_of_a_repeated_head_go_the_rows_that_draft(repeated):
    def flops(pattern: str, phase: str) -> float:
        config = toy_config(pattern="M", mtp_pattern=pattern, mtp_use_repeated_layer=repeated)
        line = Roofline(config)
        cost = line.prefill(3, 50, k=2) if phase == "prefill" else line.decode(3, [1.0, 1.0])
        return works(cost, "draft 1")["matrices"].flops

    mlp = 2 * KINDS["-"].matrices(toy_config(mtp_pattern="*-")).used
    for phase, fed in (("prefill", 150), ("decode", 9)):
        assert flops("*-", phase) - flops("*", phase) == mlp * (3 if repeated else fed)
        assert flops("-*", phase) - flops("*", phase) == mlp * fed


def test_latent_attention_reads_a_row_a_token_and_scores_it_for_all_heads():
    """DeepSeek-V3: 671 billion weights, of which a token uses 37; rows of 576 numbers in 61
    layers."""
    layers = [KINDS[letter].matrices(DEEPSEEK_V3) for letter in DEEPSEEK_V3.pattern]
    vocabulary = 2 * DEEPSEEK_V3.vocab_size * DEEPSEEK_V3.hidden_size
    assert sum(layer.held for layer in layers) + vocabulary == pytest.approx(671.0e9, rel=1e-3)
    assert sum(layer.used for layer in layers) + vocabulary == pytest.approx(37.6e9, rel=1e-2)
    attention = works(Roofline(DEEPSEEK_V3).decode(2, context_len=1000), "verify")["attention"]
    assert attention.bytes == 2 * 1000 * 61 * 576 * 2
    assert attention.flops == 2 * 1000 * 61 * 128 * 2 * (576 + 512)
    prompts = works(Roofline(DEEPSEEK_V3).prefill(2, 1000), "base")["attention"]
    # with each head's own keys and values
    assert prompts.flops == 2 * 1000 * 500 * 61 * 128 * 2 * (192 + 128)


def test_tables_hold_every_step_and_its_works():
    steps, pieces = tabulate_limits(
        NEMOTRON_H_8B, RooflineConfig((1, 128), num_speculative_tokens=(0, 3), ring_entries=8), "8b"
    )
    assert [(row.batch_size, row.k) for row in steps.rows] == [(1, 0), (1, 3), (128, 0), (128, 3)]
    assert steps.rows[1].limit_tokens_per_s == pytest.approx(723, rel=0.02)
    own = [row for row in pieces.rows if (row.batch_size, row.k) == (128, 3)]
    assert [(row.phase, row.work) for row in own][:4] == [
        ("verify", "matrices"),
        ("verify", "state"),
        ("verify", "attention"),
        ("draft 1", "matrices"),
    ]
    assert [row.bound for row in own][:2] == ["matrix rate", "bandwidth"]
    assert sum(row.seconds for row in own) == pytest.approx(steps.rows[3].seconds)
    assert next(steps.tables()[0].columns[3].cells) == f"{steps.rows[0].bytes / 1e9:.2f}"
    assert len(steps.tables()[0].columns) == 7 and steps.to_dict()["settings"]["ring_entries"] == [
        8,
        8,
    ]
    engines, _ = tabulate_limits(NEMOTRON_H_8B, RooflineConfig((1,), num_speculative_tokens=(3, 8)))
    assert engines.settings["ring_entries"] == [16, 32]


def test_drafts_need_heads_that_make_them():
    without = toy_config(mtp_pattern="", mtp_num_depths=0)
    distinct = toy_config(mtp_use_repeated_layer=False)
    assert (
        Roofline(without).decode(2).tokens == 2 and Roofline(distinct).decode(2, RATES).tokens > 2
    )
    for config, says in (
        (without, "is 4, but the model has no MTP heads"),
        (distinct, "has 3 distinct MTP heads"),
    ):
        for cost in (lambda line: line.decode(2, [1.0] * 4), lambda line: line.prefill(2, 8, k=4)):
            with pytest.raises(UserError, match=says):
                cost(Roofline(config))
