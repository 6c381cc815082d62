"""Decode steps of the gated delta rule with random rejections, against the recurrence over the
accepted tokens."""

from functools import partial

import pytest
import torch

from mtpkit.kernels.ring import ring_base, ring_capacity
from tests.kernels import delta_recurrence
from tests.kernels.conftest import Twin
from tests.kernels.inputs import DeltaSizes, delta_rates, delta_tokens
from tests.kernels.recurrence import relative

HEADS = 4
WIDTH = 5
GROUPS = 2
STATE = 7
SLOTS = 4
OWNED = torch.tensor([3, 1])
FOREIGN = torch.tensor([0, 2])
TOLERANCE = 1e-5
BF16_TOLERANCE = 2**-6
STEPS = {"reference": 20, "interpreter": 6, "cuda": 40}
"""The interpreter takes a tenth of a second for what a GPU does in microseconds."""


def draw(
    rows: int, tokens: int, generator: torch.Generator, strong: bool = False
) -> dict[str, torch.Tensor]:
    """q, k and v as slices of one tensor, a and b of another, as the mixer has them."""
    normal = partial(torch.randn, generator=generator)
    sizes = DeltaSizes(HEADS, WIDTH, GROUPS, STATE)
    q, k, v = delta_tokens(normal, rows, tokens, sizes=sizes, beside=3)
    a, b = delta_rates(normal, rows, tokens, heads=HEADS, beside=1)
    if strong:  # now and then a token that forgets everything
        a.copy_(torch.where(a < -0.5, 100.0, a - 3))
    return dict(q=q, k=k, v=v, a=a, b=b)


class History:
    """Requests in some slots: the fp64 state of what each has accepted, and random tokens for all
    of them."""

    def __init__(self, twin: Twin, tokens: int, strong: bool = False) -> None:
        self.twin = twin
        self.tokens = tokens
        self.strong = strong
        self.generator = torch.Generator().manual_seed(tokens)
        self.parameters = dict(
            A_log=torch.rand(HEADS, generator=self.generator) - 1.5,
            dt_bias=torch.randn(HEADS, generator=self.generator) - 1,
        )
        self.state = torch.randn(
            len(OWNED), HEADS, WIDTH, STATE, dtype=torch.float64, generator=self.generator
        )

    def step(self, run) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Draw rows and tokens, call `run(rows, arguments)` and accept some tokens.

        Returns:
            the rows, how many tokens of each are accepted, and the relative error of what `run`
            returned.
        """
        rows = torch.randperm(len(OWNED), generator=self.generator)
        if self.twin.name != "interpreter":  # where rows that wait cost time
            rows = rows[: int(torch.randint(1, len(OWNED) + 1, (), generator=self.generator))]
        count = len(rows)
        drawn = draw(count, self.tokens, self.generator, self.strong)
        accepted = torch.randint(
            1, 2 * self.tokens + 1, (count,), generator=self.generator
        ).clamp_max(self.tokens)
        moved = {name: t.to(self.twin.device) for name, t in (drawn | self.parameters).items()}
        out = run(rows, moved)
        q, k, g, beta = delta_recurrence.inputs(
            *(drawn[n] for n in "qkab"), *self.parameters.values()
        )
        want = []
        for i, row in enumerate(rows.tolist()):
            tokens = (q[i], k[i], drawn["v"][i], g[i], beta[i])
            want.append(delta_recurrence.rule(*tokens, state=self.state[row])[0])
            taken = (t[: accepted[i]] for t in tokens)
            self.state[row] = delta_recurrence.rule(*taken, state=self.state[row])[1]
        return rows, accepted, relative(out.cpu(), torch.stack(want))


def run_snapshot(twin: Twin, tokens: int, shift: int = 0, strong: bool = False) -> float:
    """Worst relative error over all steps; `shift` is added to the committed index where there is
    room."""
    history = History(twin, tokens, strong)
    worst = 0.0
    state = torch.full((SLOTS, tokens + 1, HEADS, WIDTH, STATE), torch.nan, device=twin.device)
    state[OWNED, 0] = history.state.float().to(state)
    committed = torch.zeros(len(OWNED), dtype=torch.int64)

    def run(rows, arguments):
        places = (t[rows].to(twin.device) for t in (OWNED, committed))
        return twin("gated_delta_rule").delta_snapshot_update(state, *places, **arguments)

    for _ in range(STEPS[twin.name] // 2):
        rows, accepted, error = history.step(run)
        worst = max(worst, error)
        committed[rows] = (accepted - 1 + shift).clamp(0, tokens - 1)
        for row in rows.tolist():
            state[OWNED[row], torch.arange(tokens + 1) != committed[row]] = torch.nan
    assert state[FOREIGN].isnan().all()
    return worst


def run_replay(
    twin: Twin, tokens: int, length: int, shift: int = 0, strong: bool = False, **blocks
) -> float:
    """Worst relative error over all steps; `shift` is added to the accepted counts where there is
    room."""
    history = History(twin, tokens, strong)
    worst = 0.0
    folds = 0
    nan = {"fill_value": torch.nan, "device": twin.device}
    state = torch.full((SLOTS, HEADS, WIDTH, STATE), **nan)
    state[OWNED] = history.state.float().to(state)
    rings = [
        torch.full((SLOTS, length, *tail), **nan)
        for tail in ((GROUPS, STATE), (HEADS, WIDTH), (HEADS,))
    ]
    lens = torch.zeros(len(OWNED), dtype=torch.int64)
    contexts = torch.tensor([1, 1000])

    def run(rows, arguments):
        places = (t[rows].to(twin.device) for t in (OWNED, contexts, lens))
        return twin("gated_delta_rule").delta_replay_update(
            state, *rings, *places, **arguments, **blocks
        )

    for _ in range(STEPS[twin.name]):
        before = state.clone()
        rows, accepted, error = history.step(run)
        worst = max(worst, error)
        for row in range(len(OWNED)):
            full = row in rows.tolist() and lens[row] + tokens > ring_capacity(length)
            unchanged = torch.equal(
                state[OWNED[row]].view(torch.int32), before[OWNED[row]].view(torch.int32)
            )
            assert shift or unchanged != full, "the state is written exactly when the ring is full"
            folds += full
        lens[rows] = ring_base(lens[rows], tokens, length) + (accepted + shift).clamp(1, tokens)
        contexts[rows] += accepted
        for row in range(len(OWNED)):
            unused = torch.ones(length, dtype=torch.bool)
            unused[torch.arange(contexts[row] - lens[row], contexts[row]) % length] = False
            for ring in rings:
                ring[OWNED[row], unused] = torch.nan
    assert all(buffer[FOREIGN].isnan().all() for buffer in (state, *rings))
    assert folds, "no ring was ever full"
    return worst


@pytest.mark.parametrize(("tokens", "strong"), [(1, False), (3, True)])
def test_snapshot(twin, tokens, strong):
    """Some tokens forget everything where decays are `strong`."""
    assert run_snapshot(twin, tokens, strong=strong) < TOLERANCE


@pytest.mark.parametrize(("tokens", "length", "strong"), [(1, 5, False), (2, 10, True)])
def test_replay(twin, tokens, length, strong):
    """Some tokens forget everything where decays are `strong`."""
    assert run_replay(twin, tokens, length, strong=strong) < TOLERANCE


@pytest.mark.parametrize(
    ("width", "state"), [(37, 40), pytest.param(128, 128, marks=pytest.mark.gpu)]
)
def test_replay_by_parts_of_the_key(twin, width, state, monkeypatch):
    """Several parts of the key, of which the last may be partial, and several programs a head."""
    if twin.name == "reference" or (state == 128) != (twin.name == "cuda"):
        pytest.skip("has no parts, or the other sizes")
    monkeypatch.setitem(globals(), "WIDTH", width)
    monkeypatch.setitem(globals(), "STATE", state)
    assert (
        run_replay(twin, 2, 10, **({} if state == 128 else dict(block_p=16, chunk=16))) < TOLERANCE
    )


def test_replay_of_many_tokens():
    assert run_replay(Twin("reference", "cpu"), 5, 25) < TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_state_that_is_not_taken_back_would_be_seen(shift):
    twin = Twin("reference", "cpu")
    assert run_snapshot(twin, 3, shift=shift) > 1e-2
    assert run_replay(twin, 3, 15, shift=shift) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_rows_touch_nothing_and_both_ways_agree(twin, dtype):
    """Row 1 of 3 is padding; widths of whole blocks, so that the state is loaded without a mask."""
    generator = torch.Generator().manual_seed(3)
    op = twin("gated_delta_rule")
    tokens = 4
    length = 20
    heads = 4
    width = 16

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=generator).to(twin.device, of)

    drawn = dict(
        q=normal(3, tokens, 2, 16), k=normal(3, tokens, 2, 16), v=normal(3, tokens, heads, width)
    )
    drawn |= dict(a=normal(3, tokens, heads), b=normal(3, tokens, heads))
    drawn |= dict(A_log=normal(heads, of=torch.float32), dt_bias=normal(heads, of=torch.float32))
    slots = torch.tensor([2, -1, 0], device=twin.device)
    zeros = torch.zeros(3, dtype=torch.int64, device=twin.device)
    state = normal(4, heads, width, 16, of=torch.float32)
    entries = state[:, None].repeat(1, tokens, 1, 1, 1)
    kept = (
        normal(4, length, heads, width, of=torch.float32),
        normal(4, length, heads, of=torch.float32),
    )
    rings = normal(4, length, 2, 16), *kept
    before = [t.clone() for t in (state, entries, *rings)]
    y = op.delta_replay_update(state, *rings, slots, zeros, zeros, **drawn)
    again = op.delta_snapshot_update(entries, slots, zeros, **drawn)
    assert y.dtype == dtype and (y[1] == 0).all() and (again[1] == 0).all()
    for have, was in zip((state, entries, *rings), before, strict=True):
        assert torch.equal(have[[1, 3]], was[[1, 3]])
    assert relative(y.float(), again.double()) < (
        TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    )
