"""Both rollbacks over many steps with random rejections, against the recurrence over the accepted tokens in fp64."""

import pytest
import torch

from mtpkit.kernels.ssm_update import ssm_replay_update, ssm_snapshot_update
from mtpkit.model.inputs import ring_base
from tests.kernels.recurrence import relative, scan

HEADS, WIDTH, GROUPS, STATE = 4, 3, 2, 5
SLOTS, NUM_ROWS, STEPS = 9, 3, 12
OWNED = torch.tensor([7, 2, 4])
FOREIGN = torch.tensor([0, 1, 3, 5, 6, 8])
TOLERANCE = 1e-5


class History:
    """NUM_ROWS requests: the fp64 state of what each has accepted, and random tokens for all of them."""

    def __init__(self, tokens: int, strong: bool = False) -> None:
        self.strong = strong
        self.generator = torch.Generator().manual_seed(tokens)
        self.tokens = tokens
        self.A = -torch.rand(HEADS, generator=self.generator) * 2 - 0.05
        self.D = torch.randn(HEADS, generator=self.generator)
        self.state = torch.randn(NUM_ROWS, HEADS, WIDTH, STATE, dtype=torch.float64, generator=self.generator)

    def draw(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The rows of this step, in some order, and their inputs."""
        count = int(torch.randint(1, NUM_ROWS + 1, (), generator=self.generator))
        rows = torch.randperm(NUM_ROWS, generator=self.generator)[:count]
        x = torch.randn(len(rows), self.tokens, HEADS, WIDTH, generator=self.generator)
        dt = torch.rand(len(rows), self.tokens, HEADS, generator=self.generator) * 0.5 + 1e-3
        if self.strong:  # now and then a token that forgets everything
            dt = torch.where(dt < 0.1, 100.0, dt * 0.01)
        B, C = torch.randn(2, len(rows), self.tokens, GROUPS, STATE, generator=self.generator)
        return rows, dict(x=x, dt=dt, A=self.A, B=B, C=C, D=self.D)

    def expect(self, rows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return scan(**inputs, initial_state=self.state[rows])[0]

    def accept(self, rows: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Accept 1 .. T tokens of each row; returns the counts."""
        counts = torch.randint(1, self.tokens + 1, (len(rows),), generator=self.generator)
        for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            taken = {k: v if k in "AD" else v[i : i + 1, :count] for k, v in inputs.items()}
            self.state[row] = scan(**taken, initial_state=self.state[row : row + 1])[1][0]
        return counts


def run_snapshot(tokens: int, shift: int = 0, entries: int | None = None, strong: bool = False) -> float:
    """Worst relative error over all steps; `shift` is added to the committed index where there is room."""
    history, worst = History(tokens, strong), 0.0
    state = torch.full((SLOTS, entries or tokens, HEADS, WIDTH, STATE), torch.nan)
    state[OWNED, 0] = history.state.float()
    committed = torch.zeros(NUM_ROWS, dtype=torch.int64)
    for _ in range(STEPS):
        rows, inputs = history.draw()
        y = ssm_snapshot_update(state, OWNED[rows], committed[rows], **inputs)
        worst = max(worst, relative(y, history.expect(rows, inputs)))
        counts = history.accept(rows, inputs)
        committed[rows] = (counts - 1 + shift).clamp(0, tokens - 1)
        for row in rows.tolist():
            rejected = torch.arange(state.shape[1]) != committed[row]
            state[OWNED[row], rejected] = torch.nan
    assert state[FOREIGN].isnan().all()
    return worst


def run_replay(tokens: int, capacity: int, shift: int = 0, strong: bool = False) -> float:
    """Worst relative error over all steps; `shift` is added to the accepted counts where there is room."""
    history, worst = History(tokens, strong), 0.0
    state = torch.full((SLOTS, HEADS, WIDTH, STATE), torch.nan)
    state[OWNED] = history.state.float()
    ring_x = torch.full((SLOTS, capacity, HEADS, WIDTH), torch.nan)
    ring_B = torch.full((SLOTS, capacity, GROUPS, STATE), torch.nan)
    ring_dt = torch.full((SLOTS, capacity, HEADS), torch.nan)
    ring_lens = torch.zeros(NUM_ROWS, dtype=torch.int64)
    for _ in range(STEPS):
        rows, inputs = history.draw()
        before = state.clone()
        y = ssm_replay_update(state, ring_x, ring_B, ring_dt, OWNED[rows], ring_lens[rows], **inputs)
        worst = max(worst, relative(y, history.expect(rows, inputs)))
        for row in range(NUM_ROWS):
            full = row in rows.tolist() and ring_lens[row] + tokens > capacity
            unchanged = torch.equal(state[OWNED[row]].view(torch.int32), before[OWNED[row]].view(torch.int32))
            assert unchanged != full, "the state is written exactly when the ring is full"
        counts = history.accept(rows, inputs)
        ring_lens[rows] = ring_base(ring_lens[rows], tokens, capacity) + (counts + shift).clamp(1, tokens)
        for row in range(NUM_ROWS):
            for ring in (ring_x, ring_B, ring_dt):
                ring[OWNED[row], ring_lens[row] :] = torch.nan
    for buffer in (state, ring_x, ring_B, ring_dt):
        assert buffer[FOREIGN].isnan().all()
    return worst


@pytest.mark.parametrize("tokens", [1, 2, 3, 6])
def test_snapshot(tokens):
    assert run_snapshot(tokens) < TOLERANCE
    assert run_snapshot(tokens, entries=tokens + 2) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("extra", [0, 1, 4, 13])
def test_replay(tokens, extra):
    assert run_replay(tokens, tokens + extra) < TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_state_that_is_not_taken_back_would_be_seen(shift):
    assert run_snapshot(3, shift=shift) > 1e-2
    assert run_replay(3, 8, shift=shift) > 1e-2


def test_low_precision_state_is_rounded_only_when_it_is_folded():
    history = History(2)
    rows = torch.arange(NUM_ROWS)
    state = history.state.bfloat16()
    history.state = state.double()
    ring = [torch.zeros(NUM_ROWS, 8, *tail) for tail in ((HEADS, WIDTH), (GROUPS, STATE), (HEADS,))]
    ring_lens = torch.zeros(NUM_ROWS, dtype=torch.int64)
    for _ in range(4):
        inputs = next(inputs for _, inputs in iter(history.draw, None) if len(inputs["x"]) == NUM_ROWS)
        y = ssm_replay_update(state, *ring, rows, ring_lens, **inputs)
        assert relative(y, history.expect(rows, inputs)) < TOLERANCE
        ring_lens = ring_lens + history.accept(rows, inputs)


@pytest.mark.parametrize("run", [lambda: run_snapshot(3, strong=True), lambda: run_replay(3, 16, strong=True)])
def test_rare_large_steps_among_small_ones(run):
    assert run() < TOLERANCE
