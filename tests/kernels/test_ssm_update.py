"""Both rollbacks over many steps with random rejections, against the recurrence over the accepted
tokens in fp64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.ring import ring_base, ring_capacity, ring_length
from mtpkit.kernels.ssm_update import reference
from tests.kernels.conftest import Twin
from tests.kernels.inputs import MambaSizes, last_columns, mamba_tokens
from tests.kernels.recurrence import relative, scan

HEADS = 4
WIDTH = 3
GROUPS = 2
STATE = 5
SLOTS = 9
NUM_ROWS = 3
OWNED = torch.tensor([7, 2, 4])
FOREIGN = torch.tensor([0, 1, 3, 5, 6, 8])
LIMITS = (0.0, float("inf"))
TOLERANCE = 1e-5
STEPS = {"reference": 20, "interpreter": 8, "cuda": 40}
"""The interpreter takes 40 ms for what a GPU does in a microsecond."""


def oracle(inputs: dict, state: torch.Tensor, rows=slice(None), count: int | None = None):
    """y and final state of the recurrence in fp64 over the first `count` tokens of some rows."""
    steps = F.softplus(inputs["dt"].double() + inputs["dt_bias"].double()).clamp(
        *inputs["dt_limit"]
    )
    per_token = {"x": inputs["x"], "dt": steps, "B": inputs["B"], "C": inputs["C"]}
    taken = {name: value[rows, :count].cpu() for name, value in per_token.items()}
    A = -torch.exp(inputs["A_log"].double())
    return scan(**taken, A=A.cpu(), D=inputs["D"].cpu(), initial_state=state)


def views(rows: int, tokens: int, generator: torch.Generator, sizes=(HEADS, WIDTH, GROUPS, STATE)):
    """x, B and C as slices of one tensor, dt as a slice of another, as the mixer has them."""
    sizes = MambaSizes(*sizes)
    normal = partial(torch.randn, generator=generator)
    uniform = partial(torch.rand, generator=generator)
    x, B, C = mamba_tokens(normal, rows, tokens, sizes=sizes, beside=3)
    dt = last_columns(uniform, rows, tokens, width=sizes.heads, beside=2)
    return x, dt, B, C


class History:
    """NUM_ROWS requests: the fp64 state of what each has accepted, and random tokens for all of
    them."""

    def __init__(
        self, tokens: int, strong: bool = False, limits: tuple[float, float] = LIMITS
    ) -> None:
        self.strong = strong
        self.generator = torch.Generator().manual_seed(tokens)
        self.tokens = tokens
        self.parameters = dict(
            A_log=torch.log(torch.rand(HEADS, generator=self.generator) * 2 + 0.05),
            D=torch.randn(HEADS, generator=self.generator),
            dt_bias=torch.randn(HEADS, generator=self.generator) - 2,
            dt_limit=limits,
        )
        self.state = torch.randn(
            NUM_ROWS, HEADS, WIDTH, STATE, dtype=torch.float64, generator=self.generator
        )

    def draw(self) -> tuple[torch.Tensor, dict]:
        """The rows of this step, in some order, and their inputs."""
        count = int(torch.randint(1, NUM_ROWS + 1, (), generator=self.generator))
        rows = torch.randperm(NUM_ROWS, generator=self.generator)[:count]
        x, steps, B, C = views(count, self.tokens, self.generator)
        steps = steps * 0.5 + 1e-3
        if self.strong:  # now and then a token that forgets everything
            steps = torch.where(steps < 0.1, 100.0, steps * 0.01)
        raw = (
            torch.where(steps > 50, steps, torch.log(torch.expm1(steps)))
            - self.parameters["dt_bias"]
        )
        return rows, dict(x=x, dt=raw, B=B, C=C) | self.parameters

    def expect(self, rows: torch.Tensor, inputs: dict) -> torch.Tensor:
        return oracle(inputs, self.state[rows])[0]

    def accept(self, rows: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Accept 1 .. T tokens of each row, often all; returns the counts."""
        counts = torch.randint(
            1, 2 * self.tokens + 1, (len(rows),), generator=self.generator
        ).clamp_max(self.tokens)
        for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            self.state[row] = oracle(inputs, self.state[row : row + 1], slice(i, i + 1), count)[1][
                0
            ]
        return counts


def on(device: str, inputs: dict) -> dict:
    """The inputs on a device, views still views of one tensor."""
    moved = {
        k: v.to(device) if isinstance(v, torch.Tensor) and v.dim() == 1 else v
        for k, v in inputs.items()
    }
    for name in ("x", "dt", "B", "C"):
        whole = torch.empty(*inputs[name].shape[:2], 2, *inputs[name].shape[2:], device=device)
        whole[:, :, 1] = inputs[name].to(device)
        moved[name] = whole[:, :, 1]
    return moved


def run_snapshot(
    twin, tokens: int, shift: int = 0, entries: int | None = None, strong: bool = False
) -> float:
    """Worst relative error over all steps; `shift` is added to the committed index where there is
    room."""
    history = History(tokens, strong)
    worst = 0.0
    state = torch.full(
        (SLOTS, entries or tokens, HEADS, WIDTH, STATE), torch.nan, device=twin.device
    )
    state[OWNED, 0] = history.state.float().to(state)
    committed = torch.zeros(NUM_ROWS, dtype=torch.int64)
    for _ in range(STEPS[twin.name] // 2):
        rows, inputs = history.draw()
        places = (t.to(twin.device) for t in (OWNED[rows], committed[rows]))
        y = twin("ssm_update").ssm_snapshot_update(state, *places, **on(twin.device, inputs))
        worst = max(worst, relative(y.cpu(), history.expect(rows, inputs)))
        counts = history.accept(rows, inputs)
        committed[rows] = (counts - 1 + shift).clamp(0, tokens - 1)
        for row in rows.tolist():
            rejected = torch.arange(state.shape[1]) != committed[row]
            state[OWNED[row], rejected] = torch.nan
    assert state[FOREIGN].isnan().all()
    return worst


def run_replay(
    twin, tokens: int, length: int, shift: int = 0, strong: bool = False, limits=LIMITS, **blocks
) -> float:
    """Worst relative error over all steps; `shift` is added to the accepted counts where there is
    room."""
    history = History(tokens, strong, limits)
    worst = 0.0
    folds = 0
    nan = {"fill_value": torch.nan, "device": twin.device}
    state = torch.full((SLOTS, HEADS, WIDTH, STATE), **nan)
    state[OWNED] = history.state.float().to(state)
    rings = [
        torch.full((SLOTS, length, *tail), **nan)
        for tail in ((HEADS, WIDTH), (GROUPS, STATE), (HEADS,))
    ]
    ring_lens = torch.zeros(NUM_ROWS, dtype=torch.int64)
    contexts = torch.tensor([1, 17, 1000])
    for _ in range(STEPS[twin.name]):
        rows, inputs = history.draw()
        before = state.clone()
        places = (t[rows].to(twin.device) for t in (OWNED, contexts, ring_lens))
        y = twin("ssm_update").ssm_replay_update(
            state, *rings, *places, **on(twin.device, inputs), **blocks
        )
        worst = max(worst, relative(y.cpu(), history.expect(rows, inputs)))
        for row in range(NUM_ROWS):
            full = row in rows.tolist() and ring_lens[row] + tokens > ring_capacity(length)
            unchanged = torch.equal(
                state[OWNED[row]].view(torch.int32), before[OWNED[row]].view(torch.int32)
            )
            assert shift or unchanged != full, "the state is written exactly when the ring is full"
            folds += full
        counts = history.accept(rows, inputs)
        ring_lens[rows] = ring_base(ring_lens[rows], tokens, length) + (counts + shift).clamp(
            1, tokens
        )
        contexts[rows] += counts
        for row in range(NUM_ROWS):
            unused = torch.ones(length, dtype=torch.bool)
            unused[torch.arange(contexts[row] - ring_lens[row], contexts[row]) % length] = False
            for ring in rings:
                ring[OWNED[row], unused] = torch.nan
    for buffer in (state, *rings):
        assert buffer[FOREIGN].isnan().all()
    assert folds, "no ring was ever full"
    return worst


@pytest.mark.parametrize(("tokens", "entries"), [(1, 1), (3, 5), (4, 4)])
def test_snapshot(twin, tokens, entries):
    assert run_snapshot(twin, tokens, entries=entries) < TOLERANCE


@pytest.mark.parametrize(("tokens", "length"), [(1, 5), (3, 15), (4, 20)])
def test_replay(twin, tokens, length):
    assert run_replay(twin, tokens, length) < TOLERANCE


def test_replay_with_several_heads_a_program(twin):
    blocks = {} if twin.name == "reference" else dict(block_h=2, num_stages=3)
    assert run_replay(twin, 3, 15, **blocks) < TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_state_that_is_not_taken_back_would_be_seen(shift):
    twin = Twin("reference", "cpu")
    assert run_snapshot(twin, 3, shift=shift) > 1e-2
    assert run_replay(twin, 3, 15, shift=shift) > 1e-2


def test_rare_large_steps_among_small_ones(twin):
    assert run_snapshot(twin, 3, strong=True) < TOLERANCE
    assert run_replay(twin, 3, 15, strong=True) < TOLERANCE


def test_step_sizes_are_clamped(twin):
    assert run_replay(twin, 2, 10, limits=(0.1, 0.3)) < TOLERANCE


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 20), (4, 20), (5, 24), (8, 24), (9, 48), (16, 48), (17, 96), (32, 96)],
)
def test_a_ring_holds_a_step_beside_a_power_of_two_of_entries(tokens, length):
    capacity = ring_capacity(length)
    assert (
        ring_length(tokens) == length
        and length - capacity >= tokens
        and capacity & (capacity - 1) == 0
    )


class Step:
    """One step of R rows with random caches: `ring_lens` and `slots` are given; all else is
    drawn."""

    def __init__(
        self, ring_lens, slots, tokens, sizes, device, dtype, state_dtype=torch.float32, length=20
    ) -> None:
        heads, width, groups, state = sizes
        generator = torch.Generator().manual_seed(len(slots))

        def normal(*shape: int, dtype=dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        count = max(slots) + 2
        self.state = normal(count, heads, width, state, dtype=state_dtype)
        self.rings = [normal(count, length, heads, width), normal(count, length, groups, state)]
        self.rings.append(torch.rand(count, length, heads, generator=generator).to(device) * 0.2)
        self.slots = torch.tensor(slots, device=device)
        self.ring_lens = torch.tensor(ring_lens, device=device)
        self.contexts = self.ring_lens + torch.arange(len(slots), device=device) * 7
        x, dt, B, C = (t.to(device, dtype) for t in views(len(slots), tokens, generator, sizes))
        A_log = torch.rand(heads, generator=generator).to(device)
        D = normal(heads, dtype=torch.float32)
        bias = normal(heads) - 3
        self.inputs = dict(x=x, dt=dt, A_log=A_log, B=B, C=C, D=D, dt_bias=bias, dt_limit=LIMITS)

    def run(self, function, **blocks):
        """y and the caches after the step."""
        caches = [t.clone() for t in (self.state, *self.rings)]
        return function(
            *caches, self.slots, self.contexts, self.ring_lens, **self.inputs, **blocks
        ), *caches

    def widened(self) -> "Step":
        """The same numbers in fp32, in which the reference is nearly exact."""
        other = Step.__new__(Step)
        vars(other).update(vars(self))
        other.state = self.state.float()
        other.rings = [ring.float() for ring in self.rings]
        other.inputs = {
            k: v.float() if isinstance(v, torch.Tensor) else v for k, v in self.inputs.items()
        }
        return other


def in_bf16(step: Step) -> torch.Tensor:
    """y by the recurrence in bf16 from the committed state, one token after another."""
    low = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in step.inputs.items()}
    rep = low["x"].shape[2] // low["B"].shape[2]
    A = -torch.exp(low["A_log"])
    outputs = []

    def advance(state, x, B, dt):
        return state * torch.exp(dt * A)[:, None, None] + (dt[:, None] * x)[..., None] * B[:, None]

    for row, slot in enumerate(step.slots.tolist()):
        state, ring_x, ring_B, ring_dt = (t[slot].bfloat16() for t in (step.state, *step.rings))
        for i in range(int(step.ring_lens[row])):
            place = int(step.contexts[row] - step.ring_lens[row] + i) % ring_x.shape[0]
            state = advance(
                state, ring_x[place], ring_B[place].repeat_interleave(rep, 0), ring_dt[place]
            )
        for t in range(low["x"].shape[1]):
            B, C = (low[name][row, t].repeat_interleave(rep, 0) for name in "BC")
            state = advance(
                state, low["x"][row, t], B, F.softplus(low["dt"][row, t] + low["dt_bias"])
            )
            outputs.append((state * C[:, None]).sum(-1) + low["D"][:, None] * low["x"][row, t])
    return torch.stack(outputs).view_as(low["x"])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_bf16_inputs(twin, state_dtype):
    """At most twice what bf16 arithmetic would lose; the fp32 state keeps more than bf16 has."""
    step = Step([14, 5], [1, 3], 4, (2, 19, 1, 17), twin.device, torch.bfloat16, state_dtype)
    y, state, *_ = step.run(twin("ssm_update").ssm_replay_update)
    want_y, want_state, *_ = step.widened().run(reference.ssm_replay_update)
    assert y.dtype == torch.bfloat16
    assert relative(y, want_y.double()) <= 2 * relative(in_bf16(step), want_y.double())
    assert relative(state, want_state.double()) < (2**-8 if state_dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_bf16_inputs_with_snapshots(twin, state_dtype):
    """The bound is the same; each snapshot is rounded once, and the interpreter truncates where a
    GPU rounds."""

    def run(step, function):
        snapshots = step.state[:, None].repeat(1, 4, 1, 1, 1)
        return function(
            snapshots, step.slots, torch.full_like(step.slots, 2), **step.inputs
        ), snapshots

    step = Step([0, 0], [1, 3], 4, (2, 19, 1, 17), twin.device, torch.bfloat16, state_dtype)
    y, state = run(step, twin("ssm_update").ssm_snapshot_update)
    want_y, want_state = run(step.widened(), reference.ssm_snapshot_update)
    assert y.dtype == torch.bfloat16 and state.dtype == state_dtype
    assert relative(y, want_y.double()) <= 2 * relative(in_bf16(step), want_y.double())
    assert relative(state, want_state.double()) < (2**-7 if state_dtype == torch.bfloat16 else 1e-4)


def test_padding_rows_touch_nothing(twin):
    step = Step([3, 0, 14], [2, -1, 0], 3, (2, 5, 1, 3), twin.device, torch.float32)
    y, *caches = step.run(twin("ssm_update").ssm_replay_update)
    assert (y[1] == 0).all() and y.isfinite().all()
    for before, after in zip((step.state, *step.rings), caches, strict=True):
        assert torch.equal(before[[1, 3]], after[[1, 3]])
    snapshots = step.state[:, None].repeat(1, 3, 1, 1, 1)
    after = snapshots.clone()
    y = twin("ssm_update").ssm_snapshot_update(
        after, step.slots, torch.ones_like(step.slots), **step.inputs
    )
    assert (y[1] == 0).all() and torch.equal(snapshots[[1, 3]], after[[1, 3]])


def test_low_precision_state_is_rounded_only_when_it_is_folded(twin):
    step = Step([4, 9], [0, 1], 2, (4, 3, 2, 5), twin.device, torch.float32, torch.bfloat16)
    y, state, *_ = step.run(twin("ssm_update").ssm_replay_update)
    assert relative(y, step.widened().run(reference.ssm_replay_update)[0].double()) < TOLERANCE
    assert torch.equal(state, step.state)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "blocks"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, dict(block_p=16, block_h=1)),
        (torch.bfloat16, dict(block_p=64, num_warps=8)),
        (torch.bfloat16, dict(block_p=64, block_h=4, num_warps=4, num_stages=3)),
        *((torch.bfloat16, dict(block_h=heads)) for heads in (1, 2, 4, 8, 16)),
        (torch.bfloat16, dict(block_h=4, maxnreg=168)),
    ],
    ids=str,
)
def test_blocks_at_the_size_of_an_8b_model(blocks, dtype):
    triton = Twin("cuda", "cuda")("ssm_update")
    step = Step([0, 16, 13, 12, 3], [4, 0, 7, 2, 5], 4, (128, 64, 8, 128), "cuda", dtype)
    got = step.run(triton.ssm_replay_update, **blocks)
    want = step.widened().run(reference.ssm_replay_update)
    tolerances = (2**-8, 2**-14) if dtype == torch.bfloat16 else (TOLERANCE, TOLERANCE)
    assert relative(got[0], want[0].double()) < tolerances[0]
    assert relative(got[1], want[1].double()) < tolerances[1]
    for have, expected in zip(got[2:], want[2:], strict=True):
        assert relative(have, expected.double()) < tolerances[1]
