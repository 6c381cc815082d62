"""Experts with quantised weights against the twin in fp32, and in bf16 within 1.5 times the error
of torch's products."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpkit.kernels.moe import reference as plain
from mtpkit.kernels.quantized import Inputs, reference
from mtpkit.kernels.quantized.reference import widen
from tests.kernels.conftest import Twin
from tests.kernels.quantized import FORMATS, RULES, draw_matrix, of_sums
from tests.kernels.recurrence import relative

SERVED = [
    ("block", "group"),
    ("row", "token"),
    ("matrix", "static"),
    ("int4", "none"),
    ("nvfp4", "none"),
]
"""Formats and rules of published checkpoints."""
CUT = 2**-7
"""Triton's interpreter cuts bf16 off instead of rounding."""
FLIPPED = 2**-5
"""Some hidden channels round to another bf16 number, or differ by what short sums of fp8 products
lose, and then have other codes. A single token averages over few channels: twice as much."""


def draw(
    name: str,
    rule: str,
    tokens: int,
    experts: int,
    top_k: int,
    width: int,
    inner: int,
    activation: str,
    device: str = "cpu",
    dtype=torch.bfloat16,
    residual: bool = True,
) -> dict[str, Any]:
    """Arguments of `quantized_experts`; x and residual are slices of wider tensors, with NaN around
    them."""

    def sliced() -> Tensor:
        wide = torch.full((tokens, width + 16), torch.nan)
        wide[:, 8:-8] = torch.randn(tokens, width)
        return wide.to(device, dtype)[:, 8:-8]

    rows = inner * (2 if activation == "swiglu" else 1)
    ids = [torch.randperm(experts)[:top_k] for _ in range(tokens)]
    scales = 0.005 + 0.02 * torch.rand(2, experts, device=device)
    return dict(
        x=sliced(),
        fc1=draw_matrix(name, experts, rows, width, device=device),
        fc2=draw_matrix(name, experts, width, inner, device=device),
        expert_ids=torch.stack(ids).to(device),
        weights=torch.rand(tokens, top_k).to(device),
        activation=activation,
        residual=sliced() if residual else None,
        inputs=RULES[rule],
        input_scales=(scales[0], scales[1]) if rule == "static" else None,
    )


def exact(arguments: dict[str, Any]) -> Tensor:
    """The twin's result in fp32."""
    floats = {
        name: arguments[name].float() for name in ("x", "residual") if arguments[name] is not None
    }
    return reference.quantized_experts(**arguments | floats)


def low(arguments: dict[str, Any]) -> float:
    """Relative error of torch's experts in bf16 with the same weights."""
    around = [arguments[name] for name in ("expert_ids", "weights", "activation", "residual")]
    matrices = [arguments[name] for name in ("fc1", "fc2")]
    x = arguments["x"]
    have = plain.expert_mlp(x, *(widen(each, torch.bfloat16) for each in matrices), *around)
    if around[-1] is not None:
        around[-1] = around[-1].float()
    want = plain.expert_mlp(x.float(), *(widen(each) for each in matrices), *around)
    return relative(have, want.double())


def check(twin: Twin, arguments: dict[str, Any], **rest: Any) -> None:
    have = twin("quantized").quantized_experts(**arguments, **rest)
    want = exact(arguments).double()
    quantised = arguments["inputs"].rule != "none"
    short = of_sums(twin.device, arguments["fc1"].codes, arguments["inputs"])
    limit = (FLIPPED if short else 1e-3) if quantised else 1e-5
    if have.dtype == torch.bfloat16:
        limit = 1.5 * low(arguments)
        if quantised:
            limit += 2 * FLIPPED if len(have) == 1 else FLIPPED
        limit += CUT if twin.name == "interpreter" else 0
    assert have.dtype == arguments["x"].dtype
    assert relative(have, want) <= limit


SIZES = {
    "one token": (1, 4, 2, 64, 32),
    "one token of many experts": (1, 8, 3, 32, 32),
    "one token of several blocks": (1, 3, 2, 544, 32),
    "one token, wide": (1, 3, 2, 1184, 32),
    "one token of wide experts": (1, 3, 2, 32, 1184),
    "more experts than pairs": (3, 24, 2, 64, 32),
    "few pairs of wide experts": (2, 12, 1, 1056, 1056),
    "an expert for all": (9, 1, 1, 32, 64),
    "blocks that overflow": (40, 3, 2, 96, 32),
    "wider than a tile": (5, 4, 3, 160, 160),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FORMATS)
def test_experts(twin: Twin, name: str, rule: str, size: str, activation: str, dtype) -> None:
    check(twin, draw(name, rule, *SIZES[size], activation, twin.device, dtype))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_every_size_of_block(twin: Twin, name: str, size: int) -> None:
    """Experts that fill a block, and one pair more."""
    sizes = (50, 3, 1, 32, 32)
    arguments = draw(name, "none", *sizes, "relu2", twin.device, residual=False)
    arguments["expert_ids"][:33] = 1
    arguments["expert_ids"][33:49] = 0
    check(twin, arguments, **({} if twin.name == "reference" else dict(size=size)))


def test_no_tokens(twin: Twin) -> None:
    arguments = draw("block", "group", 1, 4, 2, 64, 32, "relu2", twin.device)
    none = {name: arguments[name][:0] for name in ("x", "expert_ids", "weights", "residual")}
    assert twin("quantized").quantized_experts(**arguments | none).shape == (0, 64)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 6), (7, 6), (2, 48)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_experts_of_other_ranks_add_nothing(
    twin: Twin, activation: str, rule: str, tokens: int, experts: int
) -> None:
    """Two ranks with half of the experts each come to the sum of one that has all."""
    sizes = (tokens, experts, 3, 64, 32)
    whole = draw("block", rule, *sizes, activation, twin.device, torch.float32, residual=False)
    half = experts // 2
    whole["expert_ids"][0] = torch.tensor([0, 1, 2])  # none on the second rank
    parts = []
    for first in (0, half):
        own = whole["expert_ids"] - first
        own = torch.where((own >= 0) & (own < half), own, half)
        here = {
            name: whole[name]._replace(
                values=whole[name].values[first : first + half],
                scales=whole[name].scales[first : first + half],
            )
            for name in ("fc1", "fc2")
        }
        if rule == "static":
            scales = whole["input_scales"]
            here["input_scales"] = tuple(each[first : first + half].contiguous() for each in scales)
        arguments = whole | here | dict(expert_ids=own, some_elsewhere=True)
        parts.append(twin("quantized").quantized_experts(**arguments))
    limit = FLIPPED if of_sums(twin.device, whole["fc1"].codes, whole["inputs"]) else 1e-5
    assert relative(sum(parts), exact(whole).double()) < limit
    assert not parts[1][0].any()


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_experts_of_other_ranks_read_nothing(twin: Twin, tokens: int, activation: str) -> None:
    """The last expert here, whose place they take, may be broken."""
    arguments = draw("row", "none", tokens, 24, 3, 64, 32, activation, twin.device)
    arguments["expert_ids"][:] = torch.tensor([24, 3, 24])
    want = exact(arguments | dict(some_elsewhere=True))
    for name in ("fc1", "fc2"):
        arguments[name].scales[-1] = torch.nan
    have = twin("quantized").quantized_experts(**arguments, some_elsewhere=True)
    assert relative(have, want.double()) < 1.5 * 2**-7


@pytest.mark.parametrize(("name", "rule"), SERVED)
def test_rows_do_not_mix_and_calls_repeat(twin: Twin, name: str, rule: str) -> None:
    """A row of NaN does not spread to rows in the same experts' blocks, and the same call gives the
    same bits."""
    arguments = draw(name, rule, 6, 2, 2, 64, 32, "relu2", twin.device)
    run = twin("quantized").quantized_experts
    first = run(**arguments)
    assert torch.equal(first, run(**arguments))
    arguments["x"][2] = torch.nan
    poisoned = run(**arguments)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(poisoned[others], first[others])
    assert poisoned[2].isnan().all()


def test_a_wrong_expert_or_scale_would_be_seen() -> None:
    arguments = draw("block", "static", 6, 4, 2, 64, 32, "relu2", dtype=torch.float32)
    want = exact(arguments).double()
    wrong = arguments | dict(expert_ids=(arguments["expert_ids"] + 1) % 4)
    assert relative(exact(wrong), want) > 4 * FLIPPED
    scales = arguments["input_scales"]
    rolled = arguments | dict(input_scales=(scales[0].roll(1), scales[1]))
    assert relative(exact(rolled), want) > 1e-3
    assert relative(exact(arguments | dict(inputs=Inputs("token"))), want) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 64, 700])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize(("name", "rule"), SERVED)
def test_many_experts(name: str, rule: str, activation: str, tokens: int) -> None:
    check(Twin("cuda", "cuda"), draw(name, rule, tokens, 128, 6, 1024, 640, activation, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["block", "int4", "nvfp4"])
def test_a_graph_repeats_with_other_experts(name: str, rule: str, tokens: int) -> None:
    """The experts of the captured call are arbitrary."""
    run = importlib.import_module("mtpkit.kernels.quantized.triton").quantized_experts
    arguments = draw(name, rule, tokens, 32, 4, 256, 192, "relu2", "cuda")
    run(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(**arguments)
    for _ in range(3):
        order = torch.rand(tokens, 32, device="cuda").argsort(1)[:, :4]
        arguments["expert_ids"].copy_(order)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run(**arguments)) and replayed.isfinite().all()
