"""The linear with its norm, activation and residual against the same in fp64; bf16 is allowed twice PyTorch's error."""

import importlib
from typing import Any

import pytest
import torch

from mtpkit.kernels.linear import linear, reference
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative

EPS = 0.1
"""Large enough to be missed."""
SMALL = (64, 32, 2, 3, 4)
"""A tile that divides the widths below, whose outputs two programs share; it takes the matrix unit of the real ones."""


def draw(rows, outputs, width, device="cpu", dtype=torch.bfloat16, norm=False, group=None, residual=False, **rest):
    """Arguments of `linear`; x, gate and residual are slices of wider tensors, with NaN around x and the gate."""

    def sliced(columns: int) -> torch.Tensor:
        wide = torch.full((rows + 1, columns + 16), torch.nan)
        wide[:rows, 8:-8] = torch.randn(rows, columns)
        return wide.to(device, dtype)[:rows, 8:-8]

    weight = (torch.randn(outputs, width, device=device) / width**0.5).to(dtype)
    arguments: dict[str, Any] = dict(x=sliced(width), weight=weight, eps=EPS) | rest
    if norm or group:
        arguments["norm_weight"] = (1 + 0.5 * torch.randn(width)).to(device, dtype)
    if group:
        arguments |= dict(group_size=group, gate=sliced(width))
    if residual:
        arguments["residual"] = sliced(outputs)
    return arguments


def oracle(x, weight, norm_weight=None, eps=EPS, group_size=None, gate=None, activation=None, residual=None):
    """In fp64, from the definitions."""
    x = x.double()
    if gate is not None:
        x = x * gate.double() * torch.sigmoid(gate.double())
    if norm_weight is not None:
        groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
        groups = groups / torch.sqrt((groups**2).mean(-1, keepdim=True) + eps)
        x = groups.flatten(-2) * norm_weight.double()
    y = x @ weight.double().t()
    y = y.clamp_min(0) ** 2 if activation else y
    return y if residual is None else y + residual.double()


def run(twin: Twin, arguments: dict, tile: tuple | None = SMALL, **options) -> torch.Tensor:
    """`tile` and the other options go to the Triton twin alone."""
    if twin.name == "reference":
        return reference.linear(**own_residual(arguments))
    module = twin("linear")
    return module.linear(**own_residual(arguments), tile=tile and module.Tile(*tile), **options)


def own_residual(arguments: dict) -> dict:
    """With a residual that the call may overwrite."""
    return {name: value.clone() if name == "residual" else value for name, value in arguments.items()}


def check(twin: Twin, arguments: dict, **options) -> None:
    want, out = oracle(**arguments), run(twin, arguments, **options)
    # Triton's interpreter cuts bf16 off instead of rounding.
    limit = 2 * relative(reference.linear(**own_residual(arguments)), want) + (
        2**-7 if twin.name == "interpreter" else 0
    )
    assert out.dtype == torch.bfloat16 and relative(out, want) <= limit


CASES = {
    "plain": {},
    "residual": dict(residual=True),
    "norm": dict(norm=True),
    "norm, relu^2": dict(norm=True, activation="relu2"),
    "all": dict(norm=True, activation="relu2", residual=True),
    "a group a program": dict(group=64, residual=True),
    "two groups a program": dict(group=32, residual=True),
}


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("case", CASES)
def test_bf16(twin, case, rows):
    check(twin, draw(rows, 70, 128, twin.device, **CASES[case]))


@pytest.mark.parametrize("tile", [(16, 32, 1, 2, 1), (32, 64, 3, 3, 2), (64, 64, 6, 4, 4)], ids=str)
@pytest.mark.parametrize("case", ["norm", "two groups a program"])
def test_tiles(twin, case, tile):
    """Several programs share the outputs, or none."""
    sizes = CASES[case] | (dict(group=64) if "group" in case else {})
    check(twin, draw(4, 63, 384, twin.device, **sizes), tile=tile)


@pytest.mark.parametrize("case", ["plain", "norm, relu^2", "all", "a group a program"])
@pytest.mark.parametrize(("rows", "dtype"), [(3, torch.float32), (17, torch.float32), (17, torch.bfloat16)])
def test_many_rows_and_fp32(twin, case, rows, dtype):
    arguments = draw(rows, 5, 64, twin.device, dtype, **CASES[case])
    want, out = oracle(**arguments), run(twin, arguments, tile=None)
    limit = 2 * relative(reference.linear(**own_residual(arguments)), want) if dtype == torch.bfloat16 else 1e-5
    assert out.dtype == dtype and relative(out, want) <= limit


def test_a_width_that_no_tile_divides(twin):
    check(twin, draw(2, 24, 72, twin.device, norm=True, residual=True), tile=None)


def test_rows_do_not_mix_and_calls_repeat(twin):
    """A row of NaN (one that pads a batch) is alone with it, and the same call gives the same bits."""
    arguments = draw(3, 70, 128, twin.device, norm=True, activation="relu2")
    first = run(twin, arguments)
    assert torch.equal(first, run(twin, arguments))
    arguments["x"][1] = torch.nan
    poisoned = run(twin, arguments)
    assert torch.equal(poisoned[[0, 2]], first[[0, 2]]) and poisoned[1].isnan().all()


def test_a_wrong_norm_would_be_seen():
    arguments = draw(3, 70, 128, group=32)
    want = oracle(**arguments)
    limit = 2 * relative(reference.linear(**own_residual(arguments)), want)
    assert relative(reference.linear(**own_residual(arguments) | dict(group_size=64)), want) > limit
    assert relative(reference.linear(**own_residual(arguments) | dict(eps=0)), want) > limit


def test_gradients_take_the_reference():
    arguments = draw(2, 3, 8, dtype=torch.float32, norm=True)
    arguments["weight"].requires_grad_()
    linear(arguments.pop("x"), arguments.pop("weight"), **arguments).sum().backward()


def test_configs_divide_what_they_are_for():
    module = importlib.import_module("mtpkit.kernels.linear.triton")
    for (outputs, width), tile in module.TILES.items():
        found = module.configs(outputs, width)
        assert found[0] == tile and 8 <= len(found) <= 12 and len(set(found)) == len(found)
        assert all(one.fits(width) for one in found)


REAL = {
    "in_proj": (18560, 4096, dict(norm=True)),
    "out_proj": (4096, 8192, dict(group=1024, residual=True)),
    "fc1": (21504, 4096, dict(norm=True, activation="relu2")),
    "fc2": (4096, 21504, dict(residual=True)),
    "qkv": (6144, 4096, dict(norm=True)),
    "o": (4096, 4096, dict(residual=True)),
    "eh_proj": (4096, 8192, {}),
    "lm_head": (131072, 4096, dict(norm=True)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("name", REAL)
def test_sizes_of_an_8b_model(name, rows):
    outputs, width, rest = REAL[name]
    check(Twin("cuda", "cuda"), draw(rows, outputs, width, "cuda", **rest), tile=None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["out_proj", "qkv"])
def test_all_configs(name):
    outputs, width, rest = REAL[name]
    twin, arguments = Twin("cuda", "cuda"), draw(5, outputs, width, "cuda", **rest)
    for tile in twin("linear").configs(outputs, width):
        check(twin, arguments, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_of_a_layer_repeats(pdl):
    """Two linears that share output tiles among programs, one fed by the other, replayed on new inputs."""
    twin = Twin("cuda", "cuda")
    first = draw(4, 4096, 4096, "cuda", norm=True, residual=True)
    second = draw(4, 4096, 4096, "cuda", norm=True)
    stages = dict(tile=None, pdl=pdl)

    def layer() -> torch.Tensor:
        return run(twin, second | dict(x=run(twin, first, **stages)), **stages)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(5):
        first["x"].copy_(torch.randn_like(first["x"]))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, layer()) and replayed.isfinite().all()
