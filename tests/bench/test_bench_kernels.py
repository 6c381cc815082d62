"""The kernel benchmark: every op is there, checked before it is timed, and its bytes are what it
moves."""

import gc
import importlib
import inspect
import json
import math
import pkgutil
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import mtpkit.kernels
from benchmarks.kernels import measure as kernels
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.case import Args, Case, Shapes, size
from benchmarks.kernels.cases import decode_cases, linears, prefill_cases, training_cases
from benchmarks.kernels.cases.recurrent import ring_lens
from benchmarks.kernels.measure import (
    KernelConfig,
    check,
    check_kernels,
    input_sets,
    measure_kernels,
)
from mtpkit.bench.machine import Machine
from mtpkit.bench.shapes import open_model
from mtpkit.bench.sizes import (
    DEEPSEEK_V3_TINY,
    NEMOTRON_3_TINY,
    NEMOTRON_H_8B,
    NEMOTRON_H_TINY,
    QWEN3_NEXT_TINY,
)
from mtpkit.cli.errors import run
from mtpkit.engine import LLM, SamplingParams
from mtpkit.errors import MtpkitError, UserError
from mtpkit.kernels.dispatch import CHOICE
from tests.shared import each
from tests.toy_config import toy_config

OPS = {
    "quantized_linear",
    *("ssm_replay_update", "ssm_snapshot_update", "causal_conv1d_update", "gated_rms_norm"),
    *(
        "paged_attention",
        "store_kv",
        "rms_norm",
        "relu2",
        "mtp_input",
        "decode_rows",
        "store_rows",
        "ring_lens_after",
    ),
    *(
        "fold_ring",
        "copy_units",
        "narrow_units",
        "move_entries",
        "linear_best",
        "best",
        "top_tokens",
        "accept_tree",
    ),
    *(
        "linear_argmax",
        "argmax",
        "probabilities",
        "sample_logits",
        "accept_matching",
        "accept_rejection",
    ),
    *("apply_penalties", "uniform", "sample"),
    *("prefill_attention", "causal_conv1d_varlen", "ssd_varlen"),
    *(
        f"linear {name}"
        for name in ("in_proj", "out_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    ),
    *("linear eh_proj", "linear lm_head"),
    *(
        "sequence_attention",
        "depth_attention",
        "head_losses kl",
        "head_losses tv",
        "head_losses ce",
    ),
    *("embedding_part", "sum_over_ranks", "gather_ranks", "best_of_ranks"),
    *("ssd_scan", "relu2 training", "adamw_", "quantize_rows"),
}


EXPERT_OPS = {
    "router_logits",
    "route",
    "expert_mlp",
    "route, prefill",
    "expert_mlp, prefill",
    "quantized_experts",
}


def shapes(config=NEMOTRON_H_TINY, rows=3, k=3, context_len=21, **more) -> Shapes:
    return Shapes(config, rows, k, context_len, torch.device("cpu"), torch.float32, **more)


def case(name: str, **sizes) -> Case:
    made = shapes(**sizes)
    return next(case for case in every(made) if case.op == name)


def every(made: Shapes) -> list[Case]:
    return [*decode_cases(made), *prefill_cases(made), *training_cases(made)]


def on_gpu(rows: int, config=NEMOTRON_H_8B, dtype=torch.bfloat16) -> dict[str, Case]:
    """Cases of a GPU by name, of which none is run."""
    made = Shapes(config, rows, 3, 512, torch.device("cuda"), dtype)
    return {case.op: case for case in decode_cases(made)}


def note(case: Case) -> str:
    return case.note(1.0) if case.note else ""


def broken(right: Case, call) -> Case:
    """The op with another implementation."""
    return replace(right, call=call, name=right.op, reference=right.twin)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_every_op_is_checked_and_timed(device, state_dtype, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SETS", 4)
    config = KernelConfig(rows=(1, 3), context_len=21, repeats=2, state_dtype=state_dtype)
    kept = []
    result = measure_kernels(NEMOTRON_H_TINY, config, device, "tiny", kept.append)
    assert {row.op for row in result.rows} == OPS and len(kept) == len(result.rows)
    assert all(row.microseconds > 0 and row.bytes > 0 for row in result.rows)
    assert [row.op for row in result.rows[:3]] == [
        "ssm_replay_update",
        "ssm_replay_update",
        "ssm_snapshot_update",
    ]
    assert result.title.startswith("kernels" if device == "cuda" else "reference twins")
    if device == "cpu":
        assert all(
            row.error == 0
            for row in result.rows
            if not row.op.startswith(("linear ", "head_losses "))
        )


def test_no_op_is_forgotten(monkeypatch):
    """All that have a kernel are called by some case, but the one that several processes must call
    together."""

    def code(op):
        twin = inspect.unwrap(op)
        return (twin.__init__ if inspect.isclass(twin) else twin).__code__

    picked = {
        code(op): f"{package.name}.{name}"
        for package in pkgutil.iter_modules(mtpkit.kernels.__path__, "mtpkit.kernels.")
        if package.ispkg
        for name, op in vars(importlib.import_module(package.name)).items()
        if inspect.isfunction(op) and hasattr(op, "__wrapped__")
    }
    assert len(picked) > 20
    called = set()
    options = dict(activation="swiglu", attention_output_gate=True)
    monkeypatch.setenv(CHOICE, "reference")
    for config in (
        NEMOTRON_H_TINY,
        NEMOTRON_3_TINY,
        NEMOTRON_H_TINY.replace(**options),
        DEEPSEEK_V3_TINY,
        QWEN3_NEXT_TINY,
    ):
        for one in every(shapes(config, rows=1, k=2, context_len=5)):
            args = one.make()
            sys.setprofile(
                lambda frame, event, _: called.add(frame.f_code) if event == "call" else None
            )
            try:
                one.call(*args)
            finally:
                sys.setprofile(None)
    assert {name for code, name in picked.items() if code not in called} == set()


def test_ops_of_experts(device, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SETS", 2)
    config = KernelConfig(rows=(1, 3), context_len=21, repeats=1)
    result = measure_kernels(NEMOTRON_3_TINY, config, device, "tiny")
    absent = {"relu2", "relu2 training", "linear linear_fc1", "linear linear_fc2"}
    assert {row.op for row in result.rows} == OPS - absent | EXPERT_OPS


def test_ops_of_latent_attention(device, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SETS", 2)
    result = measure_kernels(
        DEEPSEEK_V3_TINY, KernelConfig(rows=(3,), context_len=21, repeats=1), device, "tiny"
    )
    found = {row.op for row in result.rows}
    projections = ("q_down_proj", "q_up_proj", "kv_down_proj", "proj")
    assert {
        "latent_attention",
        "latent_context_attention",
        "chunk_attention",
        "store_kv",
        "sequence_attention",
        "depth_attention",
    } <= found
    assert {
        f"linear linear_{name}" for name in projections
    } <= found and "paged_attention" not in found


def test_bytes_of_latent_attention_are_a_row_a_token():
    """A row of 32 + 8 numbers for all heads, the queries, and outputs as wide as the latent."""
    one = case("latent_attention", config=DEEPSEEK_V3_TINY, rows=2, k=0, context_len=32)
    assert one.bytes(one.make()) == 4 * (2 * 33 * 40 + 2 * 4 * (32 + 32 + 8))


def test_ops_of_gated_delta_nets(device, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SETS", 2)
    result = measure_kernels(
        QWEN3_NEXT_TINY, KernelConfig(rows=(3,), context_len=21, repeats=1), device, "tiny"
    )
    found = {row.op for row in result.rows}
    assert {
        "causal_conv1d_update",
        "causal_conv1d_varlen",
        "linear in_proj",
        "linear out_proj",
        "norm_gate",
    } <= found
    assert {
        f"delta_{op}" for op in ("replay_update", "snapshot_update", "inputs", "varlen", "rule")
    } <= found


def test_bytes_of_a_replay_are_its_state_and_little_more():
    one = case("delta_replay_update", config=QWEN3_NEXT_TINY, rows=2, k=0, context_len=0)
    args = one.make()
    entries = 2 * 4 * (2 * 16 + 4 * 16 + 4)  # of the new tokens: keys, corrections, decays
    assert one.bytes(args) == size(args[0]) + entries + 2 * 4 * (2 * 2 * 16 + 2 * 4 * 16 + 2 * 4)


def test_matrices_that_do_not_become_fp8_have_no_case_of_it():
    names = {case.op for case in every(shapes(toy_config(hidden_size=40)))}
    assert "adamw_" in names and "quantize_rows" not in names


def test_bytes_are_of_the_experts_that_are_used():
    one, many = (case("expert_mlp", config=NEMOTRON_3_TINY, rows=rows, k=0) for rows in (1, 100))
    args = one.make()
    fc1, fc2 = args[1:3]
    assert one.bytes(args) == (size(fc1, fc2) * 2) / 8 + 2 * size(args[0])
    args = many.make()
    assert many.bytes(args) == size(fc1, fc2) + 2 * size(args[0])


@pytest.mark.parametrize("k", [0, 1, 5])
def test_other_numbers_of_drafts(k):
    made = [case for case in decode_cases(shapes(k=k)) if not case.op.startswith("linear ")]
    assert ("accept_matching" in {case.op for case in made}) == (k > 0)
    assert all(check(case, case.make()) == 0 for case in made)


@each("place", range(5))
@each("name", ["depth_attention", "head_losses kl", "head_losses tv", "head_losses ce"])
def test_a_wrong_output_or_gradient_is_seen(name, place):
    right = case(name, k=4)
    assert check(right, right.make()) < 1e-3

    def wrong(*args):
        outputs = list(right.call(*args))
        outputs[place] = outputs[place] * 1.2
        return tuple(outputs)

    with pytest.raises(MtpkitError, match=f"{name}, .* differs from the reference's"):
        check(broken(right, wrong), right.make())


def test_ops_of_layers_that_a_model_lacks_are_left_out():
    config = toy_config(pattern="*-", mtp_pattern="", mtp_num_depths=0, activation="swiglu")
    names = {case.op for case in every(shapes(config))}
    assert {
        "swiglu",
        "prefill_attention",
        "sequence_attention",
    } <= names and "depth_attention" not in names
    assert not names & {
        "relu2",
        "ssm_replay_update",
        "ssd_varlen",
        "linear in_proj",
        "mtp_input",
        "linear eh_proj",
    }


@each("name", ["rms_norm", "accept_matching", "linear_argmax", "linear lm_head"])
def test_a_wrong_result_is_refused(name):
    right = case(name)

    def wrong(*args):
        found = right.twin(*args)
        return tuple(part + 1 for part in found) if isinstance(found, tuple) else (found + 1) % 512

    with pytest.raises(
        MtpkitError,
        match=rf"{name}, .*: a torch\.\w+ tensor of shape .* differs from the reference's",
    ):
        check(broken(right, wrong), right.make())


@each(
    ("name", "place"),
    [
        ("ssm_replay_update", 1),
        ("causal_conv1d_update", 1),
        ("store_kv", 2),
        ("linear out_proj", 3),
    ],
)
def test_what_is_changed_in_place_is_compared_too(name, place):
    right = case(name)

    def forgets(*args):
        before = args[place].clone()
        found = right.twin(*args)
        args[place].copy_(before if name != "linear out_proj" else before + 1)
        return found

    with pytest.raises(MtpkitError, match=f"{name}, "):
        check(broken(right, forgets), right.make())


@pytest.mark.parametrize("overwrites", [True, False])
def test_a_residual_may_be_overwritten(overwrites):
    right = case("linear linear_fc2")

    def call(x, weight, norm_weight, gate, residual, bias):
        return right.twin(
            x, weight, norm_weight, gate, residual if overwrites else residual.clone(), bias
        )

    assert check(broken(right, call), right.make()) == 0


def test_not_a_number_is_refused():
    right = case("rms_norm")
    spoiled = broken(right, lambda *args: right.twin(*args) * torch.nan)
    with pytest.raises(MtpkitError, match="differs from the reference's by nan"):
        check(spoiled, right.make())


@pytest.mark.parametrize("place", [0, -1])
def test_large_tensors_are_compared_in_parts(place, monkeypatch):
    right = case("rms_norm")
    args = right.make()
    want = right.twin(*args)
    monkeypatch.setattr("benchmarks.kernels.measure._PART", want.numel() // 3)

    def near(*args):
        found = right.twin(*args)
        found.view(-1)[place] += want.float().norm() * 1e-3
        return found

    assert check(broken(right, near), args) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("shape", [(8, 5), (5, 1, 8), (8,)])
def test_another_shape_is_refused(shape):
    right = case("rms_norm")
    x, *rest = right.make()
    other = broken(
        right, lambda *args: right.twin(*args)[:5, :8].reshape(-1)[: math.prod(shape)].view(shape)
    )
    same = broken(right, lambda *args: right.twin(*args)[:5, :8])
    with pytest.raises(MtpkitError, match="differs from the reference's by inf"):
        check(replace(other, reference=same.call), (x, *rest))


def test_ties_may_be_broken_either_way():
    right = case("argmax")
    logits = torch.zeros(2, 8)
    other = broken(right, lambda logits: torch.tensor([3, 5]))
    assert check(other, (logits,)) == 0


def test_rings_are_as_full_as_decoding_leaves_them():
    lens = ring_lens(shapes(rows=2000, context_len=512), 20).float()
    assert lens.min() >= 1 and lens.max() == 16
    # A ring is folded when 4 more do not fit into 16: rows are spread over 1 .. 16.
    assert 6 < lens.mean() < 10 and 0.15 < (lens + 4 > 16).float().mean() < 0.35
    assert ring_lens(shapes(rows=50, context_len=3), 20).max() == 3


def test_the_replay_kernels_bytes_by_hand():
    made = case("ssm_replay_update", config=NEMOTRON_H_8B, rows=2, state_dtype=torch.float32)
    state, *rings, _, _, lens, x, dt, _, B, C, _, _, _ = made.make()
    lens.copy_(torch.tensor([12, 13]))  # the second one is folded, and alone writes its state
    args = (state, *rings, None, None, lens, x, dt, None, B, C, None, None, None)
    entry = 4 * (128 * 64 + 8 * 128 + 128)  # x, B and dt of one token; fp32 on a CPU
    inputs = 2 * 4 * 4 * (2 * 128 * 64 + 128 + 2 * 8 * 128)
    whole = 128 * 64 * 128 * 4
    assert made.bytes(args) == 3 * whole + (12 + 13 + 2 * 4) * entry + inputs
    assert made.note is not None and made.note(3 * whole) == "1.50 x the state"


def test_bytes_and_flops_of_attention_and_linears():
    made = case("paged_attention", config=NEMOTRON_H_8B, rows=2, k=3, context_len=100)
    q = 2 * 4 * 32 * 128 * 4
    assert made.bytes(made.make()) == 2 * (2 * 104 * 8 * 128 * 4) + 2 * q
    assert made.flops == 4 * 2 * 4 * 32 * 128 * 102
    sizes = {
        c.op: c.shape
        for c in decode_cases(shapes(NEMOTRON_H_8B, rows=2))
        if c.op.startswith("linear ")
    }
    assert sizes["linear in_proj"] == "[8, 4096] x [18560, 4096]"
    assert sizes["linear linear_qkv"] == "[8, 4096] x [6144, 4096]"
    assert sizes["linear linear_fc1"] == "[8, 4096] x [21504, 4096]"
    assert sizes["linear eh_proj"] == "[8, 8192] x [4096, 8192]"


def test_linears_are_what_a_models_layers_call(monkeypatch):
    plain = linears.linear

    def recorder(calls: set):
        def record(x, weight, **more):
            given = {
                name: value
                for name, value in more.items()
                if value is not None and value is not False
            }
            around = sorted(given.keys() - {"eps", "group_size"})
            calls.add((*weight.shape, *around))
            return plain(x, weight, **more)

        return record

    called = set()
    timed = set()
    monkeypatch.setattr("mtpkit.model.formats.weight.linear", recorder(called))
    monkeypatch.setattr(linears, "linear", recorder(timed))
    llm = LLM(
        open_model("nemotron-h-tiny", torch.device("cpu")),
        num_speculative_tokens=2,
        max_model_len=32,
    )
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for made in (linears.linear_case(shapes(), call) for call in linears.calls(shapes())):
        made.call(*made.make())
    assert timed == called and len(timed) == 8


def test_a_convolution_of_each_kind_that_has_one():
    """With the channels of that kind, where a model has both."""
    sizes = dict(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    both = shapes(toy_config(pattern="MG*-", **sizes))
    found = [case.make() for case in every(both) if case.op == "causal_conv1d_update"]
    mamba = both.config.mamba2
    delta = both.config.gated_delta_net
    assert {x.shape[-1] for x, *_ in found} == {mamba.inner + 2 * mamba.bc_width, delta.convolved}


def test_what_is_fused_is_not_timed_on_its_own():
    # 16, 20 and 36 tokens
    few = on_gpu(4)
    more = on_gpu(5)
    many = on_gpu(9)
    assert "relu2" not in few and "relu2" not in more and "relu2" in many
    assert note(few["linear linear_fc1"]) == "norm + relu2 fused"
    assert note(more["linear linear_fc1"]) == "relu2 fused, norm apart"
    assert note(many["linear linear_fc1"]) == "norm + relu2 apart"
    assert [note(made["linear in_proj"]) for made in (few, more, many)] == [
        "norm fused",
        "norm apart",
        "norm apart",
    ]
    assert [note(made["rms_norm"]) for made in (few, more, many)] == [
        "final norm, others fused",
        "",
        "",
    ]
    for made in (few, more, many):
        assert note(made["linear out_proj"]) == "residual fused, gated norm apart"
        assert note(made["linear linear_fc2"]) == "residual fused"
        assert note(made["linear eh_proj"]) == note(made["linear lm_head"]) == ""
    gated = on_gpu(4, NEMOTRON_H_8B.replace(activation="swiglu"))
    assert "swiglu" in gated and note(gated["linear linear_fc1"]) == "norm fused"
    assert "relu2" in on_gpu(4, dtype=torch.float32)
    assert "relu2" in on_gpu(4, NEMOTRON_H_TINY)  # no tile fits its width


@pytest.mark.parametrize(
    ("name", "place"), [("ssm_replay_update", 0), ("ssm_snapshot_update", 0), ("ssd_varlen", 10)]
)
def test_the_state_is_of_the_type_asked_for(name, place):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        config = KernelConfig((2,), state_dtype=dtype, context_len=9, ops=(name,))
        (made,) = kernels._cases(NEMOTRON_H_TINY, config, torch.device("cpu"))
        args = made.make()
        assert args[place].dtype == getattr(torch, dtype)
        sizes[dtype] = made.bytes(args)
        assert check(made, args) == 0
    assert sizes["bfloat16"] < sizes["float32"]


def test_a_rejection_reads_what_was_drafted_and_an_acceptance_does_not():
    made = case("accept_rejection", rows=2, k=2)
    args = made.make()
    uniforms = args[3]
    row = 4 * NEMOTRON_H_TINY.vocab_size
    for rejected, numbers in (
        (0, [[0.0, 0.0], [0.0, 0.0]]),
        (1, [[0.0, 1e9], [0.0, 0.0]]),
        (2, [[0.0, 1e9], [1e9, 0.0]]),
    ):
        uniforms.copy_(torch.tensor(numbers))
        assert made.bytes(args) == (2 + rejected) * row


def test_inputs_are_more_than_a_cache_holds(monkeypatch):
    made = case("rms_norm")
    args = made.make()
    held = size(args[0], args[1])

    def count(cache: float, sets: int = 100, memory: int = 1 << 30) -> int:
        for name, value in (("CACHE_BYTES", cache), ("MOST_SETS", sets), ("MOST_BYTES", memory)):
            monkeypatch.setattr(kernels, name, value)
        found = input_sets(made, args)
        assert found[0] is args and len({one[0].data_ptr() for one in found}) == len(found)
        return len(found)

    assert count(9.5 * made.bytes(args)) == 10 and count(1) == 2
    assert count(9.5 * made.bytes(args), sets=4) == 4
    assert count(9.5 * made.bytes(args), memory=6 * held) == 6


def test_what_a_step_hardly_touches_is_there_once(monkeypatch):
    made = case("mtp_input", config=NEMOTRON_H_TINY.replace(vocab_size=50_000))
    args = made.make()
    monkeypatch.setattr(kernels, "CACHE_BYTES", 7 * made.bytes(args))
    monkeypatch.setattr(kernels, "MOST_BYTES", size(args[2]))
    sets = input_sets(made, args)
    assert len(sets) == 7 and all(one[2] is args[2] for one in sets)
    assert len({one[1].data_ptr() for one in sets}) == 7
    assert made.bytes(args) == 12 * 8 + 4 * (4 * 12 * 64 + 2 * 64)
    assert len(case("store_kv", rows=3, k=3, context_len=5000).make()[2]) == 3


def test_a_row_says_what_it_is_compared_with(monkeypatch):
    def row(name: str, matrix_rate: float):
        machine = Machine("fake", None, "today", 1e9, 2e9, matrix_rate)
        return kernels._measure(case(name, rows=2), machine, torch.device("cpu"), 1)

    found = row("linear linear_fc2", 1e12)
    assert found.note == "residual fused; floor of bytes; in cache"
    assert found.floor_microseconds == pytest.approx(found.bytes / 1e9 * 1e6)
    found = row("linear linear_fc2", 1e6)
    assert found.note == "residual fused; floor of FLOPs; in cache"
    assert found.floor_microseconds == pytest.approx(found.flops)
    monkeypatch.setattr(kernels, "CACHE_BYTES", 2 * found.bytes)
    assert row("linear linear_fc2", 1e12).note == "residual fused; floor of bytes"


def test_a_gpu_is_asked_for_in_one_line(monkeypatch):
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="kernels need a GPU; --device cpu tries the command"):
        measure_kernels(NEMOTRON_H_TINY, KernelConfig())


def test_unknown_ops_and_sizes_are_refused():
    with pytest.raises(
        UserError, match=r"ops conv, scan are unknown, or not of this .* K = 3; there are ssm_"
    ):
        measure_kernels(NEMOTRON_H_TINY, KernelConfig(ops=("scan", "rms_norm", "conv")), "cpu")
    with pytest.raises(UserError, match="ops expert_mlp are unknown, or not of this model"):
        measure_kernels(NEMOTRON_H_TINY, KernelConfig(ops=("expert_mlp",)), "cpu")


def test_only_the_ops_that_are_asked_for():
    result = measure_kernels(
        NEMOTRON_H_TINY, KernelConfig((2,), ops=("store_kv", "relu2"), repeats=1), "cpu"
    )
    assert [row.op for row in result.rows] == ["store_kv", "relu2"]


def test_a_cpu_says_that_it_compares_nothing():
    """Once the ops are known to be there."""
    lines = list(check_kernels(NEMOTRON_H_TINY, KernelConfig(ops=("rms_norm",)), "cpu"))
    assert (
        lines[0].startswith("a CPU has only the reference twins")
        and all(line.startswith("rms_norm") for line in lines[1:])
        and lines[1:]
    )
    with pytest.raises(UserError, match="ops nope are unknown"):
        next(check_kernels(NEMOTRON_H_TINY, KernelConfig(ops=("nope",)), "cpu"))


def test_what_a_case_holds_is_freed_before_the_next_one(device, monkeypatch):
    """The weights of all experts and their copies fit a GPU, but not beside those of another
    case."""
    held: list[StorageWeakRef] = []

    def watched(made: Args) -> Args:
        held.extend(StorageWeakRef(t.untyped_storage()) for t in made if isinstance(t, Tensor))
        return made

    right_cases = kernels._cases
    clone = Tensor.clone

    def cases(*arguments):
        for right in right_cases(*arguments):
            yield replace(right, make=lambda right=right: watched(right.make()))

    def watched_clone(*arguments, **options) -> Tensor:
        return watched((clone(*arguments, **options),))[0]

    monkeypatch.setattr(kernels, "_cases", cases)
    monkeypatch.setattr(Tensor, "clone", watched_clone)
    config = KernelConfig(rows=(1,), k=0, context_len=5)
    for line in check_kernels(DEEPSEEK_V3_TINY, config, device):
        gc.collect()
        assert all(storage.expired() for storage in held), line
    assert len(held) > 200


def test_only_what_decode_steps_run_is_timed_in_a_graph():
    made = shapes(NEMOTRON_3_TINY)
    cases = kernels._cases(NEMOTRON_3_TINY, KernelConfig((3,), context_len=21), torch.device("cpu"))
    assert [case.op for case in cases if case.capture] == [case.op for case in decode_cases(made)]


@pytest.mark.parametrize("k", [0, 3])
def test_rows_do_not_fold_their_rings_together(k):
    """As requests that began at different times do not, though without drafts all rings grow
    alike."""
    lens = ring_lens(shapes(rows=200, k=k, context_len=512), 20)
    assert len(lens.unique()) >= 10 and int(lens.bincount().max()) < 50


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command with a line of options; returns its exit code, output and errors."""

    def run_line(line: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["kernels", *line.split()])
        with pytest.raises(SystemExit) as ended:
            run(main)
        return ended.value.code or 0, *capsys.readouterr()

    return run_line


def test_the_command(command, tmp_path):
    options = "--device cpu --rows 1 2 --num-speculative-tokens 1 --context-length 9"
    code, printed, _ = command(f"{options} --ops rms_norm store_kv --output {tmp_path}")
    found = json.loads(printed.splitlines()[-1])
    assert code == 0 and json.loads((tmp_path / "kernels.json").read_text()) == found
    assert [row["op"] for row in found["rows"]] == ["store_kv", "store_kv", "rms_norm", "rms_norm"]
    settings = found["settings"]
    given = {"rows": [1, 2], "k": 1, "context_len": 9, "repeats": kernels.ON_CPU.repeats}
    assert settings == settings | given | {"model": "nemotron-h-tiny"}


@each(
    ("line", "message"),
    [
        ("", "nemotron-h-8b needs a GPU|kernels need a GPU; --device cpu tries"),
        ("--device cpu --model nemotron-h-8b", "nemotron-h-8b needs a GPU"),
        ("--device cpu --ops nope", "ops nope are unknown"),
        ("--device cpu --draft-vocab-size 513", "513 tokens, but the model has 512"),
        ("--device cpu --draft-vocab-size 513 --check-only", "but the model has 512"),
        ("--device cpu --rows 0", "--rows: 0 is less than 1"),
        ("--device cpu --num-speculative-tokens x", "--num-speculative-tokens: x is no whole"),
    ],
)
def test_a_wrong_command_line_is_refused(command, line, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed, error = command(line)
    assert code == 2 and not printed and re.search(message, error.splitlines()[-1])


def test_several_processes_are_refused(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, printed, error = command("--device cpu")
    assert code == 2 and not printed and "there are 2 processes, but this command runs" in error
