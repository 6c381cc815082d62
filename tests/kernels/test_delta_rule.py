"""The gated delta rule over whole rows, with states of their own and with gradients, against the
recurrence in fp64."""

import pytest
import torch

from mtpkit.kernels.gated_delta_rule import reference
from tests.kernels import delta_recurrence
from tests.kernels.conftest import Twin
from tests.kernels.inputs import starts_of
from tests.kernels.recurrence import relative

HEADS = 4
WIDTH = 5
GROUPS = 2
STATE = 7
TOLERANCE = 1e-5
BF16_TOLERANCE = 2**-6
FIRST = 7
"""Number of the first token: rows are those of a larger step."""


def make(
    length: int, reads: int | None = None, seed: int = 0, dtype=torch.float32, strong: bool = False
):
    """Arguments but `starts`; q has `reads` queries per token, None: no such dimension. Some keys
    repeat."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(length, reads or 1, GROUPS, STATE, generator=generator)
    k = torch.randn(length, GROUPS, STATE, generator=generator)
    k[length // 2 :: 2] = k[0].clone()
    a, b = torch.randn(2, length, HEADS, generator=generator)
    if strong:
        a = torch.where(a < -1.5, 100.0, a - 4)
    rates = torch.rand(HEADS, generator=generator) - 2, torch.randn(HEADS, generator=generator)
    q, k, g, beta = reference.delta_inputs(q if reads else q[:, 0], k, a, b, *rates)
    v = torch.randn(length, HEADS, WIDTH, generator=generator)
    return dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), g=g, beta=beta)


CASES = {
    "edges": ([1, 64, 65], [0, 0, 0], torch.bfloat16),
    "continued": ([1, 70, 17], [16, 60, 1], torch.bfloat16),
    "empty and null": ([0, 5, 0, 18, 2], [0, 7, 9, None, 5], torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_continue_and_leave_their_states(twin, case):
    lens, contexts, dtype = CASES[case]
    inputs = make(sum(lens), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    entries = torch.randn(len(lens) + 2, 3, HEADS, WIDTH, STATE, generator=generator)
    entries[:, 0], entries[:, 2] = torch.nan, torch.nan
    free = torch.randperm(len(lens) + 2, generator=generator)
    slots = torch.tensor(
        [-1 if c is None else int(s) for s, c in zip(free, contexts, strict=False)]
    )
    entries[[int(s) for s, c in zip(free, contexts, strict=False) if not c], 1] = torch.nan
    before = entries.clone()
    moved = entries.to(twin.device)
    lengths = torch.tensor([c or 0 for c in contexts])
    places = (t.to(twin.device) for t in (starts_of(lens, FIRST), slots, lengths))
    starts, slots_there, lengths = places
    out = twin("gated_delta_rule").delta_varlen(
        **{n: t.to(twin.device) for n, t in inputs.items()},
        starts=starts,
        states=moved[:, 1],
        slots=slots_there,
        context_lens=lengths,
    )
    tolerance = TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    moved = moved.cpu()
    row = 0
    for begin, length, slot, context in zip(starts_of(lens), lens, slots, contexts, strict=False):
        part = out[begin : begin + length].cpu()
        row = row + 1
        if slot < 0:
            assert (part == 0).all()
            continue
        state = before[slot, 1] if context else None
        tokens = {n: t[begin : begin + length] for n, t in inputs.items()}
        want, final = delta_recurrence.rule(**tokens, state=state)
        if length:
            assert relative(part.float(), want) < tolerance
            assert relative(moved[slot, 1], final) < tolerance
        else:
            assert torch.equal(
                moved[slot, 1], before[slot, 1] if context else torch.zeros_like(moved[slot, 1])
            )
    own = slots[slots >= 0]
    moved[own, 1], before[own, 1] = 0, 0
    assert torch.equal(moved.view(torch.uint8), before.view(torch.uint8))


def test_rare_strong_decays_among_weak_ones(twin):
    inputs = make(70, strong=True)
    starts = starts_of([70]).to(twin.device)
    out = twin("gated_delta_rule").delta_varlen(
        **{n: t.to(twin.device) for n, t in inputs.items()}, starts=starts
    )
    assert relative(out.cpu(), delta_recurrence.rule(**inputs)[0]) < TOLERANCE


def test_bits_do_not_depend_on_where_a_row_is_cut():
    inputs = make(150)
    twin = Twin("reference", "cpu")("gated_delta_rule")
    states = torch.zeros(2, HEADS, WIDTH, STATE)
    slot = torch.tensor([0])
    whole = twin.delta_varlen(
        **inputs, starts=starts_of([150]), states=states, slots=slot, context_lens=torch.tensor([0])
    )
    parts = []
    for first, last in ((0, 64), (64, 128), (128, 150)):
        span = {n: t[first:last] for n, t in inputs.items()}
        place = dict(states=states[1:], slots=slot, context_lens=torch.tensor([first]))
        parts.append(twin.delta_varlen(**span, starts=starts_of([last - first]), **place))
    assert torch.equal(torch.cat(parts), whole) and torch.equal(states[0], states[1])


def test_inputs(twin):
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 5, 4 * GROUPS * STATE, generator=generator).unflatten(
        -1, (4, GROUPS, STATE)
    )
    q = fused[:, :, 1]
    k = fused[:, :, 3]
    q[0, 0] = 0  # no direction
    a, b = torch.randn(2, 5, 3 * HEADS, generator=generator).split([HEADS, 2 * HEADS], -1)
    a[0, 0, 0], rates = 100, torch.randn(2, HEADS, generator=generator)
    arguments = (q, k, a, b[..., HEADS:], *rates)
    have = twin("gated_delta_rule").delta_inputs(*(t.to(twin.device) for t in arguments))
    for got, want in zip(have, delta_recurrence.inputs(*arguments), strict=True):
        assert relative(got.cpu(), want) < TOLERANCE


def test_channels_that_do_not_lie_side_by_side(twin):
    """As a convolution gives them that runs along the last dimension."""
    lens = [5, 18]
    inputs = make(23)
    op = twin("gated_delta_rule")
    rates = torch.randn(2, HEADS)
    turned = {
        name: t.to(twin.device).movedim(0, -1).contiguous().movedim(-1, 0)
        for name, t in inputs.items()
    }
    out = op.delta_varlen(**turned, starts=starts_of(lens).to(twin.device))
    want = torch.cat(
        [
            delta_recurrence.rule(*part)[0]
            for part in zip(*(t.split(lens) for t in inputs.values()), strict=True)
        ]
    )
    assert relative(out.cpu(), want) < TOLERANCE
    given = [turned["q"], turned["k"], turned["g"], turned["beta"], *rates.to(twin.device)]
    have, plain = (
        op.delta_inputs(*arguments) for arguments in (given, [t.contiguous() for t in given])
    )
    assert all(
        relative(got.cpu(), want.cpu()) < TOLERANCE for got, want in zip(have, plain, strict=True)
    )


def gradients(function, inputs, weights):
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    out = function(**leaves)
    (out * weights.to(out)).sum().backward()
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def by_recurrence(lens):
    """`delta_rule` with two readouts, one row after another."""

    def function(q, k, v, g, beta):
        rows = []
        begin = 0
        for length in lens:
            part = [t[begin : begin + length] for t in (k, v, g, beta)]
            reads = [
                delta_recurrence.rule(q[begin : begin + length, m], *part)[0]
                for m in range(q.shape[1])
            ]
            rows.append(torch.stack(reads, 1))
            begin += length
        return torch.cat(rows)

    return function


@pytest.mark.parametrize(
    ("lens", "dtype", "wide"),
    [
        ((1, 9, 30), torch.float32, False),
        ((70,), torch.bfloat16, False),
        ((9,), torch.bfloat16, True),
    ],
    ids=str,
)
def test_gradients(twin, lens, dtype, wide):
    inputs = make(sum(lens), reads=2, dtype=dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    weights = torch.randn(sum(lens), 2, HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    starts = starts_of(lens).to(twin.device)
    op = twin("gated_delta_rule").delta_rule
    moved = {name: t.to(twin.device) for name, t in inputs.items()}
    out, have = gradients(lambda **leaves: op(**leaves, starts=starts, wide=wide), moved, weights)
    wanted, want = gradients(
        by_recurrence(lens), {n: t.double() for n, t in inputs.items()}, weights
    )
    assert relative(out.cpu(), wanted) < tolerance and out.dtype == (
        torch.float32 if wide else dtype
    )
    for name, grad in want.items():
        assert (
            have[name].dtype == inputs[name].dtype
            and relative(have[name].cpu(), grad.double()) < tolerance
        ), name


def test_several_readouts_of_each_state(twin):
    inputs = make(21, reads=2)
    lens = (1, 20)
    have = twin("gated_delta_rule").delta_rule(
        **{n: t.to(twin.device) for n, t in inputs.items()}, starts=starts_of(lens).to(twin.device)
    )
    assert relative(have.cpu(), by_recurrence(lens)(**inputs)) < TOLERANCE


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_wrong_argument_would_be_seen(name):
    inputs = make(40)
    wrong = inputs | {name: inputs[name].roll(1, 0)}
    out = reference.delta_varlen(**wrong, starts=starts_of([40]))
    assert relative(out, delta_recurrence.rule(**inputs)[0]) > 1e-2
