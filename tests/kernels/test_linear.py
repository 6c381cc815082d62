"""The linear with its norm, activation and residual against the same in fp64; bf16 is allowed twice
PyTorch's error."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch

from mtpkit.kernels.linear import linear, one_row, reference
from tests.kernels.conftest import Twin
from tests.kernels.inputs import matrix
from tests.kernels.recurrence import relative

EPS = 0.1
"""Large enough that a result without it differs."""
GRADIENT_TOLERANCE = 2**-6
"""Relative error of some roundings to bf16, of 2^-9 each, one after another."""
SMALL = (64, 32, 3, 4, 2)
"""A tile that divides the widths below, whose outputs two programs share; it takes the matrix unit
of the real ones."""


def draw(
    rows,
    outputs,
    width,
    device="cpu",
    dtype=torch.bfloat16,
    norm=False,
    group=None,
    residual=False,
    bias=False,
    **rest,
):
    """Arguments of `linear`; x, gate and residual are slices of wider tensors, with NaN around x
    and the gate."""

    def sliced(columns: int) -> torch.Tensor:
        wide = torch.full((rows + 1, columns + 16), torch.nan)
        wide[:rows, 8:-8] = torch.randn(rows, columns)
        return wide.to(device, dtype)[:rows, 8:-8]

    weight = matrix(partial(torch.randn, device=device), outputs, width).to(dtype)
    arguments: dict[str, Any] = dict(x=sliced(width), weight=weight, eps=EPS) | rest
    if norm or group:
        arguments["norm_weight"] = (1 + 0.5 * torch.randn(width)).to(device, dtype)
    if group:
        arguments |= dict(group_size=group, gate=sliced(width))
    if bias:
        arguments["bias"] = torch.randn(outputs).to(device, dtype)
    if residual:
        arguments["residual"] = sliced(outputs)
    return arguments


def oracle(
    x,
    weight,
    norm_weight=None,
    eps=EPS,
    zero_centered=False,
    group_size=None,
    gate=None,
    bias=None,
    activation=None,
    residual=None,
):
    """The result in fp64, from the definitions."""
    x = x.double()
    if gate is not None:
        x = x * gate.double() * torch.sigmoid(gate.double())
    if norm_weight is not None:
        groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
        groups = groups / torch.sqrt((groups**2).mean(-1, keepdim=True) + eps)
        x = groups.flatten(-2) * (norm_weight.double() + zero_centered)
    y = x @ weight.double().t() + (0 if bias is None else bias.double())
    y = y.clamp_min(0) ** 2 if activation else y
    return y if residual is None else y + residual.double()


def run(twin: Twin, arguments: dict, tile: tuple | None = SMALL) -> torch.Tensor:
    """`tile` goes to the Triton twin alone."""
    if twin.name == "reference":
        return reference.linear(**own_residual(arguments))
    module = twin("linear")
    return module.linear(**own_residual(arguments), tile=tile and module.Tile(*tile))


def own_residual(arguments: dict) -> dict:
    """Copy the residual, which the call may overwrite."""
    return {
        name: value.clone() if name == "residual" else value for name, value in arguments.items()
    }


def check(twin: Twin, arguments: dict, **options) -> None:
    want = oracle(**arguments)
    out = run(twin, arguments, **options)
    # Triton's interpreter cuts bf16 off instead of rounding.
    limit = 2 * relative(reference.linear(**own_residual(arguments)), want) + (
        2**-7 if twin.name == "interpreter" else 0
    )
    assert out.dtype == torch.bfloat16 and relative(out, want) <= limit


CASES = {
    "plain": {},
    "residual": dict(residual=True),
    "norm": dict(norm=True),
    "bias": dict(bias=True),
    "norm, bias, relu^2": dict(norm=True, bias=True, activation="relu2"),
    "norm around zero": dict(norm=True, zero_centered=True),
    "norm, relu^2": dict(norm=True, activation="relu2"),
    "all": dict(norm=True, activation="relu2", residual=True),
    "a group a program": dict(group=64, residual=True),
    "two groups a program": dict(group=32, residual=True),
}


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32])
@pytest.mark.parametrize("case", CASES)
def test_bf16(twin, case, rows):
    check(twin, draw(rows, 70, 128, twin.device, **CASES[case]))


@pytest.mark.parametrize(("rows", "norms"), [(16, 0), (17, 1), (32, 1)])
def test_the_norm_of_many_rows_has_a_kernel_of_its_own(rows, norms, monkeypatch):
    """Which rounds once more, but is not repeated by every program of the product."""
    module = Twin("interpreter", "cpu")("linear")
    calls = []
    rms_norm = module.norms.rms_norm
    monkeypatch.setattr(
        module.norms, "rms_norm", lambda *args: calls.append(args) or rms_norm(*args)
    )
    run(Twin("interpreter", "cpu"), draw(rows, 70, 128, norm=True))
    assert len(calls) == norms


@pytest.mark.parametrize("tile", [(16, 32, 2, 1, 1), (32, 64, 3, 2, 3), (64, 64, 4, 4, 6)], ids=str)
@pytest.mark.parametrize("case", ["norm", "two groups a program"])
def test_tiles(twin, case, tile):
    """Several programs share the outputs, or none."""
    sizes = CASES[case] | (dict(group=64) if "group" in case else {})
    check(twin, draw(4, 63, 384, twin.device, **sizes), tile=tile)


@pytest.mark.parametrize("case", ["plain", "norm, relu^2", "all", "a group a program"])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(3, torch.float32), (33, torch.float32), (33, torch.bfloat16)]
)
def test_many_rows_and_fp32(twin, case, rows, dtype):
    arguments = draw(rows, 5, 64, twin.device, dtype, **CASES[case])
    want = oracle(**arguments)
    out = run(twin, arguments, tile=None)
    limit = (
        2 * relative(reference.linear(**own_residual(arguments)), want)
        if dtype == torch.bfloat16
        else 1e-5
    )
    assert out.dtype == dtype and relative(out, want) <= limit


def test_a_width_that_no_tile_divides(twin):
    check(twin, draw(2, 24, 72, twin.device, norm=True, residual=True), tile=None)


def test_rows_do_not_mix_and_calls_repeat(twin):
    """A row of NaN, such as a padding row, does not spread, and the same call gives the same
    bits."""
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


@pytest.mark.parametrize("name", ["x", "weight", "norm_weight"])
def test_gradients(device, name):
    """A gradient of any single argument is right, although the kernel has no backward."""
    arguments = draw(3, 70, 128, device, norm=True, activation="relu2")
    arguments[name].requires_grad_()
    positional = [arguments.pop("x"), arguments.pop("weight")]
    exact = oracle(*positional, **arguments)
    wanted = {"x": positional[0], "weight": positional[1], **arguments}[name]
    scales = torch.randn(exact.shape, device=device).to(torch.bfloat16)
    (want,) = torch.autograd.grad((exact * scales).sum(), wanted)
    (have,) = torch.autograd.grad((linear(*positional, **arguments) * scales).sum(), wanted)
    assert relative(have, want.double()) < GRADIENT_TOLERANCE


def test_tiles_of_the_table_divide_what_they_are_for():
    module = importlib.import_module("mtpkit.kernels.linear.triton")
    assert all(tile.fits(width) for (_, width), tile in module.TILES.items())


@pytest.mark.parametrize(
    ("outputs", "width", "splits"),
    [(24, 128, 1), (24, 384, 3), (24, 9216, 8), (4096, 5120, 5), (50000, 8192, 1)],
)
def test_other_weights_are_split_to_fill_the_gpu(outputs, width, splits):
    """At most eight programs share an output; all are resident at once, and each has whole
    tiles."""
    module = importlib.import_module("mtpkit.kernels.linear.triton")
    tile = module.choose_tile(outputs, width)
    assert tile.splits == splits and tile.fits(width)


@pytest.mark.parametrize(
    ("outputs", "width", "splits"), [(18560, 4096, 1), (4096, 8192, 2), (2048, 4096, 4)]
)
def test_tiles_of_more_rows_are_one_program_on_each_multiprocessor(outputs, width, splits):
    module = importlib.import_module("mtpkit.kernels.linear.triton")
    for rows in (17, 32):
        assert module.choose_tile(outputs, width, rows) == module.Tile(64, 128, 4, 4, splits)


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
@pytest.mark.parametrize("rows", [4, 16, 23, 32])
@pytest.mark.parametrize("name", REAL)
def test_sizes_of_an_8b_model(name, rows):
    outputs, width, rest = REAL[name]
    check(Twin("cuda", "cuda"), draw(rows, outputs, width, "cuda", **rest), tile=None)


@pytest.mark.parametrize(
    ("width", "outputs"), [(256, 70), (768, 3), (2048, 9), (2688, 5), (72, 9), (1000, 6)]
)
@pytest.mark.parametrize("case", [case for case in CASES if "group" not in case])
def test_one_row(twin, case, width, outputs):
    """The kernel without tensor cores, also where it does not start early."""
    if twin.name == "reference":
        pytest.skip("has one kernel for all")
    arguments = draw(1, outputs, width, twin.device, **CASES[case])
    want = oracle(**arguments)
    limit = 2 * relative(reference.linear(**own_residual(arguments)), want)
    limit += 2**-7 if twin.name == "interpreter" else 0  # which cuts bf16 off instead of rounding
    x = arguments["x"]
    weight = arguments["weight"]
    residual = arguments.get("residual")
    norm = arguments.get("norm_weight"), EPS, arguments.get("zero_centered", False)
    relu2 = "activation" in arguments
    have = one_row.one_row_linear(x, weight, *norm, arguments.get("bias"), relu2, residual)
    assert (
        have.shape == (1, outputs)
        and have.dtype == torch.bfloat16
        and relative(have, want) <= limit
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 32])
# of the first, a program has fewer tiles than are prefetched
@pytest.mark.parametrize("width", [256, 4096])
def test_an_early_start_changes_no_bit(rows, width):
    """Linears that wait for what the one before them writes, which starts early itself."""
    first, second = (draw(rows, width, width, "cuda", residual=True) for _ in range(2))

    def chain(early: bool) -> torch.Tensor:
        x = first["x"]
        for arguments in (first, *[second] * 8):
            x = linear(x, arguments["weight"], residual=arguments["residual"].clone(), early=early)
        return x

    want = chain(False)
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, want)


@pytest.mark.gpu
def test_a_graph_of_a_layer_repeats():
    """Two linears that share output tiles among programs, one fed by the other, replayed on new
    inputs."""
    twin = Twin("cuda", "cuda")
    first = draw(4, 4096, 4096, "cuda", norm=True, residual=True)
    second = draw(4, 4096, 4096, "cuda", norm=True)

    def layer() -> torch.Tensor:
        return run(twin, second | dict(x=run(twin, first, tile=None)), tile=None)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(5):
        first["x"].copy_(torch.randn_like(first["x"]))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, layer()) and replayed.isfinite().all()
