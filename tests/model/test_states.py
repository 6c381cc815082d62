"""Kinds of state: shapes, bytes, rollback, forks; also of kinds that are not mtpkit's own."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mtpkit.kernels.ring import ring_capacity, ring_length
from mtpkit.model.state import (
    Committed,
    ConvWindow,
    ConvWindowSpec,
    Counter,
    Newest,
    PagedKVSpec,
    PagedLatentSpec,
    Part,
    RecurrentSpec,
    Replay,
    Ring,
    Snapshot,
    State,
    StateLayout,
    States,
    StateSizes,
    StateSpec,
)
from tests.model.toy import move_slot

BF16 = torch.bfloat16
FP32 = torch.float32
CPU = torch.device("cpu")
INPUTS = {"x": Part((4, 8)), "B": Part((2, 16)), "dt": Part((4,), FP32)}
SPECS = {
    "decoder.0": (ConvWindowSpec(kernel=4, channels=96), RecurrentSpec((4, 8, 16), INPUTS)),
    "decoder.1": (PagedKVSpec(num_kv_heads=2, head_dim=32),),
    "decoder.2": (PagedLatentSpec(latent_width=48, rotary_width=8),),
}


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_states_have_what_their_kernels_ask_for(k, rollback):
    """Weights in bf16, state in fp32: step sizes are never rounded to the weights' type."""
    layout = StateLayout(SPECS, StateSizes(8, 1 + k, rollback, BF16, FP32))
    states = layout.allocate(7, 5, CPU)
    have = [
        {name: (tuple(t.shape), t.dtype) for name, t in state.tensors.items()}
        for state in states.all()
    ]
    ring = ring_length(1 + k)
    state = {
        "replay": {
            "state": ((5, 4, 8, 16), FP32),
            "x": ((5, ring, 4, 8), BF16),
            "B": ((5, ring, 2, 16), BF16),
            "dt": ((5, ring, 4), FP32),
        },
        "snapshot": {"state": ((5, 1 + k, 4, 8, 16), FP32)},
    }[rollback]
    page = ((7, 8, 2, 32), BF16)
    rows = {"rows": ((7, 8, 48 + 8), BF16)}
    assert have == [{"columns": ((5, 3 + k, 96), BF16)}, state, {"key": page, "value": page}, rows]
    held = {
        unit: [t for s in states.all() if s.unit == unit for t in s.tensors.values()]
        for unit in ("slot", "block")
    }
    taken = {unit: sum(tensor.nbytes for tensor in tensors) for unit, tensors in held.items()}
    assert (5 * layout.slot_bytes, 7 * layout.block_bytes) == (taken["slot"], taken["block"])
    rings = sum(
        math.prod(state[name][0]) * state[name][1].itemsize
        for name in ("x", "B", "dt")
        if name in state
    )
    assert 5 * layout.ring_bytes == rings


DECAY = 0.75
WIDTH = 3
ROWS = 3
SLOTS = 6


class Toy:
    """A moving average of vectors, s = DECAY s + x, over steps whose later tokens may be rejected:
    one state for each request. `advance` gives [R, WIDTH, d], the average after each of a step's
    tokens."""

    dim = 2

    def __init__(self, spec: StateSpec, rollback: str) -> None:
        self.layout = StateLayout({"toy": (spec,)}, StateSizes(8, WIDTH, rollback, FP32))
        self.states = self.layout.allocate(0, SLOTS, CPU)
        (self.state,) = self.states["toy"]
        self.committed = Committed.none(self.layout.counters, SLOTS, CPU)
        for tensor in self.state.tensors.values():
            tensor.fill_(math.nan)
        self.contexts = torch.zeros(SLOTS, dtype=torch.int64)

    def prefill(self, slot: int, value: Tensor) -> None:
        """Take up the state after a prompt."""
        self.state.folded[slot] = value
        self.contexts[slot] = 100 + slot

    def step(self, slots: Tensor, x: Tensor, new: Tensor) -> Tensor:
        committed = self.committed.at(slots)
        y = self.advance(slots, x, committed)
        self.committed.put(slots, committed.after(self.contexts[slots], WIDTH, new))
        self.contexts[slots] += new
        return y

    def advance(self, slots: Tensor, x: Tensor, committed: Committed) -> Tensor:
        state = self.state
        if isinstance(state, Snapshot):
            after = averages(state.entries[slots, committed.counts[state.newest]], x)
            state.entries[slots] = after
            return after
        assert isinstance(state, Replay)
        ring = state.inputs("x")
        length = state.ring.length
        counts = committed.counts[state.ring]
        folded = state.folded[slots]
        for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            places = (self.contexts[slot] - count + torch.arange(count)) % length
            folded[row] = (
                averages(folded[row : row + 1], ring[slot, places][None])[0, -1]
                if count
                else folded[row]
            )
            ring[slot, (self.contexts[slot] + torch.arange(WIDTH)) % length] = x[row]
            if count + WIDTH > ring_capacity(length):
                state.folded[slot] = folded[row]
        return averages(folded, x)


def averages(start: Tensor, x: Tensor) -> Tensor:
    """[R, T, d] the state after each of x [R, T, d], given start [R, d]."""
    after = []
    for t in range(x.shape[1]):
        start = DECAY * start + x[:, t]
        after.append(start)
    return torch.stack(after, 1)


@dataclass(frozen=True)
class Taken(Counter):
    """Counts the tokens of the last step that do not stand."""

    def after(self, counts: Tensor, width: int, new: Tensor) -> Tensor:
        return width - new


@dataclass(frozen=True)
class Undo(State):
    """A state that is computed back: the rejected tokens are subtracted before the next step."""

    taken: Taken

    @property
    def folded(self) -> Tensor:
        return self.tensors["state"]


@dataclass(frozen=True)
class UndoSpec(StateSpec):
    """A kind of state that mtpkit does not have, with a rollback of its own."""

    kind = Undo
    dim: int

    def parts(self, sizes: StateSizes) -> dict[str, Part]:
        return {
            "state": Part((self.dim,), sizes.state_dtype),
            "x": Part((sizes.decode_width, self.dim)),
        }

    def counters(self, sizes: StateSizes) -> tuple[Counter, ...]:
        return (Taken(),)


class UndoToy(Toy):
    def advance(self, slots: Tensor, x: Tensor, committed: Committed) -> Tensor:
        start = self.state.folded[slots]
        last = self.state.tensors["x"]
        for row, (slot, count) in enumerate(
            zip(slots.tolist(), committed.counts[self.state.taken].tolist(), strict=True)
        ):
            for back in range(count):
                start[row] = (start[row] - last[slot, WIDTH - 1 - back]) / DECAY
        after = averages(start, x)
        self.state.folded[slots], last[slots] = after[:, -1], x
        return after


VECTOR = RecurrentSpec((Toy.dim,), {"x": Part((Toy.dim,))})
TOYS = {
    "snapshot": lambda: Toy(VECTOR, "snapshot"),
    "replay": lambda: Toy(VECTOR, "replay"),
    "own": lambda: UndoToy(UndoSpec(Toy.dim), "replay"),
}


def error(toy: Toy, move: bool = False, fork: bool = False, kept: int | None = None) -> float:
    """Worst error over 20 steps with random rejections, of which the toy is told, or of `kept`
    tokens each time."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.tensor([4, 0, 3])
    free = 1
    want = torch.randn(ROWS, Toy.dim, generator=generator)
    worst = 0.0
    for slot, value in zip(slots.tolist(), want, strict=True):
        toy.prefill(slot, value)
    for turn in range(20):
        x = torch.randn(ROWS, WIDTH, Toy.dim, generator=generator)
        new = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
        if fork:
            forget(toy, slots, x)
        have = toy.step(slots, x, new if kept is None else torch.full_like(new, kept))
        after = averages(want, x)
        worst = max(worst, float((have - after).abs().max()))
        want = after[torch.arange(ROWS), new - 1]
        if move:
            row = turn % ROWS
            old = int(slots[turn % ROWS])
            move_slot(toy.states, toy.committed, old, free)
            toy.contexts[free], slots[row], free = toy.contexts[old], free, old
    return worst


def forget(toy: Toy, slots: Tensor, x: Tensor) -> None:
    """Take other tokens up on a copy."""
    state = toy.state
    contexts = toy.contexts
    committed = toy.committed.at(slots)
    toy.state = state.fork(slots)
    toy.contexts = contexts[slots]
    before = {name: tensor.clone() for name, tensor in toy.state.tensors.items()}
    toy.advance(torch.arange(ROWS), -x, committed)
    assert any(not torch.equal(toy.state.tensors[name], tensor) for name, tensor in before.items())
    toy.state = state
    toy.contexts = contexts


@pytest.mark.parametrize("kind", TOYS)
def test_a_state_from_outside_is_rolled_back_moved_and_forked(kind):
    assert error(TOYS[kind]()) < 1e-4 > error(TOYS[kind](), move=True)
    assert error(TOYS[kind](), fork=True) == error(TOYS[kind]())


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_what_is_committed_is_settled_where_a_chunk_leaves_it(rollback):
    """States of base and heads, which are behind; rings, null rows and other slots are left as they
    are."""
    sizes = StateSizes(8, WIDTH, rollback, FP32)
    windows = (
        (ConvWindowSpec(kernel=4, channels=5), VECTOR),
        (ConvWindowSpec(kernel=3, channels=5), VECTOR),
    )
    layers = {
        "decoder.0": windows[0],
        "decoder.1": windows[0],
        "decoder.2": windows[1],
        "mtp.0": windows[0],
    }
    layout = StateLayout(layers, sizes, BEHIND)
    states, same = (layout.allocate(1, SLOTS, CPU) for _ in range(2))
    for one, other in zip(states.all(), same.all(), strict=True):
        for tensor, twin in zip(one.tensors.values(), other.tensors.values(), strict=True):
            twin.copy_(tensor.normal_())
    committed = Committed.none(layout.counters, SLOTS, CPU)
    for counts in committed.counts.values():
        counts.copy_(torch.randint(0, WIDTH, (SLOTS,)))
    slots = [3, -1, 0, -1, 4]
    rows = torch.tensor(slots)
    states.settle(rows, committed.at(rows))
    for state in (one for one in same.all() if not isinstance(one, Replay)):
        (entries,) = state.tensors.values()
        length = state.taps if isinstance(state, ConvWindow) else 1
        for slot in set(slots) - {-1}:
            first = int(committed.counts[state.newest][slot])
            start = state.newest.start
            entries[slot, start : start + length] = entries[slot, first : first + length].clone()
    for one, other in zip(states.all(), same.all(), strict=True):
        for name, tensor in one.tensors.items():
            assert tensor.equal(other.tensors[name])


class Single(State):
    """A number a request, which lies where it always does."""


def test_a_state_from_outside_says_what_settles_it():
    rows = torch.tensor([2])
    States({"decoder.0": (Single({"state": torch.arange(SLOTS)}),)}).settle(rows, Committed({}))
    toy = TOYS["own"]()
    with pytest.raises(
        NotImplementedError, match="Undo keeps a counter, so it needs a `settling` that says where"
    ):
        toy.states.settle(rows, toy.committed.at(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_settling_does_not_wait_for_the_device(rollback):
    layout = StateLayout(SPECS, StateSizes(8, WIDTH, rollback, FP32))
    device = torch.device("cuda")
    rows = torch.tensor([1, -1], device=device)
    states = layout.allocate(2, SLOTS, device)
    committed = Committed.none(layout.counters, len(rows), device)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        states.settle(rows, committed)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("kind", TOYS)
def test_a_rollback_that_keeps_everything_would_be_seen(kind):
    assert error(TOYS[kind](), kept=WIDTH) > 0.1


@pytest.mark.parametrize(
    ("kind", "slot", "ring"),
    [("snapshot", WIDTH * 8, 0), ("replay", 8 + 20 * 8, 20 * 8), ("own", 8 + WIDTH * 8, 0)],
)
def test_bytes_of_a_state_from_outside(kind, slot, ring):
    toy = TOYS[kind]()
    assert (toy.layout.slot_bytes, toy.layout.ring_bytes, toy.layout.block_bytes) == (slot, ring, 0)
    assert sum(tensor.nbytes for tensor in toy.state.tensors.values()) == SLOTS * slot


def test_layers_with_equal_rings_count_once():
    sizes = StateSizes(8, WIDTH, "replay", FP32)
    assert (
        len(StateLayout({"a": (VECTOR,), "b": (VECTOR,), "c": (UndoSpec(2),)}, sizes).counters) == 2
    )


BEHIND = 2


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_states_of_heads_that_are_behind_have_room_for_what_is_fed_again(rollback):
    sizes = StateSizes(8, WIDTH, rollback, FP32)
    specs = {
        name: (ConvWindowSpec(kernel=4, channels=5), VECTOR) for name in ("decoder.0", "mtp.0")
    }
    layout = StateLayout(specs, sizes, BEHIND)
    wider = StateLayout(specs, replace(sizes, decode_width=WIDTH + BEHIND))
    (base_window, base), (window, state) = layout.allocate(1, 1, CPU).layers.values()
    (_, same), _ = wider.allocate(1, 1, CPU).layers.values()
    assert (
        base_window.columns.shape[1] == 2 + WIDTH
        and window.columns.shape[1] == 2 + WIDTH + BEHIND + 3
    )
    if rollback == "replay":
        assert state.inputs("x").shape == same.inputs("x").shape
    else:
        assert (base.entries.shape[1], state.entries.shape[1]) == (WIDTH, WIDTH + BEHIND + 1)
    assert layout.slot_bytes == sum(
        tensor.nbytes
        for kept in (base_window, base, window, state)
        for tensor in kept.tensors.values()
    )


def test_counts_of_states_that_are_behind():
    """A prompt of 1 token, then steps of which 1, 1, 3 and 2 tokens stand: the states are at 0, 0,
    1, 4 and 6."""
    newest = Newest(behind=BEHIND, start=9)
    ring = Ring(20, behind=BEHIND)
    plain = Newest()
    committed = Committed.none((newest, ring, plain), 1, CPU)
    context = torch.tensor([1])
    seen = []
    for accepted in (1, 1, 3, 2):
        new = torch.tensor([accepted])
        committed = committed.after(context, WIDTH, new)
        context += new
        seen.append([int(committed.counts[counter]) for counter in (newest, ring, plain)])
    assert seen == [[9, 0, 0], [0, 1, 0], [2, 4, 2], [1, 6, 1]]
