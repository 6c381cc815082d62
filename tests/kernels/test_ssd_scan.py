"""The scan with gradients over whole rows, against the recurrence in fp64."""

import importlib
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.ssd import reference
from tests.kernels import recurrence
from tests.kernels.conftest import Twin
from tests.kernels.inputs import MambaSizes, last_columns, mamba_tokens, starts_of
from tests.kernels.recurrence import relative

SIZES = (4, 3, 2, 5)  # heads, their width, groups, state
TOLERANCE = 1e-5
BF16_TOLERANCE = 2**-6
LIMIT = (0.05, 2.0)
FIRST = 7
"""Number of the first token: rows are those of a larger step."""


def make(length: int, sizes=SIZES, dtype=torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors per token, which are slices of wider ones, and per head; some step sizes lie outside
    of LIMIT."""
    heads = sizes[0]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) + mean).to(dtype)

    x, B, C = mamba_tokens(normal, length, sizes=MambaSizes(*sizes))
    dt = last_columns(partial(normal, mean=-1.0), length, width=heads, beside=3)
    rates = torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    bias = torch.randn(heads, generator=generator).to(dtype)
    return dict(
        x=x,
        dt=dt,
        A_log=rates[0],
        B=B,
        C=C,
        D=rates[1],
        dt_bias=bias,
    )


def make_states(rows: int, sizes=SIZES) -> torch.Tensor:
    heads, width, _, state = sizes
    return torch.randn(rows, heads, width, state, generator=torch.Generator().manual_seed(9))


def by_recurrence(lens, limit=LIMIT):
    """`ssd_scan` in fp64, one row after another."""

    def function(x, dt, A_log, B, C, D=None, dt_bias=None, states=None):
        steps = F.softplus(dt + dt_bias).clamp(*limit)
        outputs = []
        begin = 0
        for row, length in enumerate(lens):
            tokens = [t[None, begin : begin + length] for t in (x, steps, B, C)]
            state = None if states is None else states[row, None]
            if length:
                outputs.append(
                    recurrence.scan(*tokens[:2], -A_log.exp(), *tokens[2:], D, initial_state=state)[
                        0
                    ][0]
                )
            begin += length
        return torch.cat(outputs)

    return function


def gradients(function, inputs, weights):
    """y, and the gradients of all inputs but None where y has `weights`."""
    leaves = {
        name: value.detach().requires_grad_() for name, value in inputs.items() if value is not None
    }
    y = function(**inputs | leaves)
    (y * weights.to(y)).sum().backward()
    return y.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def close(have, want, tolerance) -> bool:
    """`relative`, where `want` may be zero everywhere."""
    return bool((have == 0).all()) if not want.any() else relative(have, want) < tolerance


def check(twin, inputs, lens, tolerance, limit=LIMIT, op=None, **options) -> None:
    """y and all gradients against the recurrence."""
    op = op or twin("ssd").ssd_scan
    starts = starts_of(lens, FIRST).to(twin.device)
    weights = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(2))
    arguments = dict(dt_limit=limit, starts=starts, chunk_size=16, **options)
    moved = {name: None if t is None else t.to(twin.device) for name, t in inputs.items()}
    y, have = gradients(lambda **leaves: op(**leaves, **arguments), moved, weights)
    wide = {name: None if t is None else t.double() for name, t in inputs.items()}
    wanted, want = gradients(by_recurrence(lens, limit), wide, weights)
    assert y.dtype == (torch.float32 if options.get("wide") else inputs["x"].dtype)
    assert relative(y.cpu(), wanted) < tolerance
    for name, grad in want.items():
        assert have[name].dtype == inputs[name].dtype and close(
            have[name].cpu(), grad, tolerance
        ), name


CASES = {
    "one token": ([1], {}),
    "edges": ([16, 17], {}),
    "empty rows, with states": ([0, 18, 0], dict(states=True)),
    "no skip connection": ([1, 20], dict(D=None)),
}


@pytest.mark.parametrize("case", CASES)
def test_rows(twin, case):
    lens, changes = CASES[case]
    inputs = make(sum(lens)) | changes
    if "states" in changes:
        inputs["states"] = make_states(len(lens))
    check(twin, inputs, lens, TOLERANCE)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (3, 17, 3, 2), (2, 5, 1, 33), (2, 40, 2, 20)], ids=str
)
def test_sizes(twin, sizes):
    check(twin, make(17, sizes), [17], TOLERANCE)


@pytest.mark.parametrize("wide", [False, True])
def test_low_precision(twin, wide):
    """A row longer than a chunk; y is as precise as asked for."""
    sizes = (2, 20, 1, 24)
    inputs = make(70, sizes, torch.bfloat16) | dict(states=make_states(1, sizes))
    check(twin, inputs, [70], BF16_TOLERANCE, wide=wide)


def test_steps_of_any_size(twin):
    """Tokens that forget everything among tokens that forget nearly nothing; step sizes that are
    zero in fp32."""
    inputs = make(40)
    dt = torch.full_like(inputs["dt"], -7.0)
    dt[::7], dt[3] = 20.0, -120.0
    inputs |= dict(
        dt=dt, A_log=torch.full((SIZES[0],), math.log(16.0)), dt_bias=torch.zeros(SIZES[0])
    )
    check(twin, inputs, [40], TOLERANCE, limit=(0.0, math.inf))


def test_tokens_that_forget_everything_do_not_blur_the_gradient_of_the_decay():
    """What passes through them is rounding, which their log decays would multiply by hundreds."""
    inputs = make(64, (2, 16, 1, 24), torch.bfloat16)
    twin = Twin("interpreter", "cpu")
    starts = starts_of([64], FIRST)
    dt = torch.full_like(inputs["dt"], -7.0)
    dt[::7] = 20.0
    inputs |= dict(
        dt=dt, A_log=torch.full((2,), math.log(16.0)), dt_bias=torch.zeros(2, dtype=torch.bfloat16)
    )
    arguments = dict(dt_limit=(0.0, math.inf), starts=starts, chunk_size=64)
    weights = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(2))
    _, have = gradients(
        lambda **leaves: twin("ssd").ssd_scan(**leaves, **arguments), inputs, weights
    )
    wide = {name: t.double() for name, t in inputs.items()}
    _, want = gradients(by_recurrence([64], (0.0, math.inf)), wide, weights)
    assert relative(have["A_log"], want["A_log"]) < 5e-4


def kernels():
    return importlib.import_module("mtpkit.kernels.ssd.backward")


@pytest.mark.parametrize("programs", [0, 4, 10**9])
def test_heads_of_a_group_summed_by_one_or_more_programs(monkeypatch, programs):
    """6 heads per group in parts of 6, 3 and 1."""
    monkeypatch.setattr(kernels(), "busy_programs", lambda: programs)
    check(Twin("interpreter", "cpu"), make(9, (6, 3, 1, 5)), [9], TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_keeps_inputs_alone(twin, dtype):
    if twin.name == "reference":
        pytest.skip("keeps what autograd needs")
    inputs = make(40, dtype=dtype)
    kept = set()
    leaves = {name: t.to(twin.device).requires_grad_() for name, t in inputs.items()}
    starts = starts_of([40], FIRST).to(twin.device)
    own = {t.untyped_storage().data_ptr() for t in (*leaves.values(), starts)}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.add(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        twin("ssd").ssd_scan(**leaves, dt_limit=LIMIT, starts=starts, chunk_size=16)
    assert kept <= own


def test_bits_are_the_same_each_time(twin):
    inputs = make(9, dtype=torch.bfloat16)
    starts = starts_of([9], FIRST).to(twin.device)
    weights = torch.randn(inputs["x"].shape, device=twin.device)
    found = []
    for _ in range(2):
        op = twin("ssd").ssd_scan
        moved = {name: t.to(twin.device) for name, t in inputs.items()}
        arguments = dict(dt_limit=LIMIT, starts=starts, chunk_size=16)
        y, grads = gradients(
            lambda op=op, more=arguments, **leaves: op(**leaves, **more), moved, weights
        )
        found.append([y, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_tiles_fill_the_gpu():
    tiles = kernels().back_tiles
    assert [tiles(rows, 128, 64, 128, True).walk for rows in (1, 2, 16)] == [32, 64, 64]
    assert tiles(1, 8, 64, 128, True).walk == 16
    assert {tiles(1, 128, 64, state, True).chunk for state in (16, 128, 256)} == {64}


@pytest.mark.parametrize("name", ["x", "dt", "A_log", "B", "C", "D", "dt_bias"])
def test_a_wrong_argument_would_be_seen(name):
    inputs = make(20)
    wrong = inputs | {name: inputs[name].roll(1, 0)}
    y = reference.ssd_scan(**wrong, dt_limit=LIMIT, starts=starts_of([20], FIRST), chunk_size=16)
    assert relative(y, by_recurrence([20])(**{n: t.double() for n, t in inputs.items()})) > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(128, 64, 8, 128), (48, 80, 8, 128), (16, 64, 2, 256), (6, 17, 3, 33)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lens", [[2000], [1000, 64, 1, 130, 300], [2] * 200], ids=["one", "five", "many"]
)
def test_real_sizes(sizes, dtype, lens):
    """Against the reference in fp32, from inputs of either dtype."""
    found = []
    exact = TOLERANCE if dtype == torch.float32 else 2e-2
    inputs = {
        n: t.cuda()
        for n, t in (
            make(sum(lens), sizes, dtype) | dict(states=make_states(len(lens), sizes))
        ).items()
    }
    weights = torch.randn(inputs["x"].shape, device="cuda")
    arguments = dict(dt_limit=(0.0, math.inf), starts=starts_of(lens, FIRST).cuda(), chunk_size=128)
    for name in ("cuda", "reference"):
        op = Twin(name, "cuda")("ssd").ssd_scan
        given = inputs if name == "cuda" else {n: t.float() for n, t in inputs.items()}
        y, grads = gradients(lambda op=op, **leaves: op(**leaves, **arguments), given, weights)
        found.append(dict(y=y, **grads))
    for name, want in found[1].items():
        assert relative(found[0][name], want.double()) < exact, name
