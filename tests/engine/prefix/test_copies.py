"""What saves and restores cost the host, and that graphs copy what is copied without them."""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtpkit.engine.device import capture
from mtpkit.engine.device import checkpoints as store_module
from mtpkit.engine.steps.plan import Restore, Save
from mtpkit.kernels.ring import ring_capacity
from mtpkit.model.state import Ring, layout
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import make_llm, tiny_model

SEQS = 6


class Operations(TorchDispatchMode):
    """Counts the PyTorch ops outside of the plain twins of kernels, which are one launch on a
    GPU."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        frames = [frame.filename for frame in traceback.extract_stack()]
        self.count += not any("/mtpkit/kernels/" in name for name in frames)
        return op(*args, **(kwargs or {}))


def executor_of(pattern="M-*M-", heads="repeated", mtp_pattern="*-", **settings):
    model = tiny_model(heads, pattern, mtp_pattern)
    k = 2 if heads == "distinct" else 3
    executor = make_llm(
        model, k, enable_prefix_caching=True, max_num_seqs=SEQS, **settings
    ).engine.executor
    fill(executor)
    return executor


def fill(executor) -> None:
    """Random numbers in all states and checkpoints, and counts as decode steps leave them."""
    generator = torch.Generator().manual_seed(1)
    store = executor.checkpoints
    state = executor.state
    states = [tensor for one in executor.states.all() for tensor in one.tensors.values()]
    for tensor in (*states, *store.tensors, *vars(state.earlier).values()):
        tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
    state.num_computed.copy_(torch.randint(20, 40, (SEQS + 1,), generator=generator))
    for counter, held in state.committed.counts.items():
        most = (
            ring_capacity(counter.length)
            if isinstance(counter, Ring)
            else executor.config.decode_width - 1
        )
        held.copy_(torch.randint(0, most + 1, (SEQS + 1,), generator=generator))


def held_by(executor, end: int | None = None) -> list[torch.Tensor]:
    """All that is held, checkpoints last; with end -1 but for what the null slot has."""
    states = [tensor for one in executor.states.all() for tensor in one.tensors.values()]
    return [
        *states,
        *(tensor[:end] for tensor in executor.state.tensors),
        *executor.checkpoints.tensors,
    ]


@torch.inference_mode()
def after(executor, *calls) -> list[torch.Tensor]:
    """What requests and checkpoints hold after these calls, which are then undone."""
    before = [tensor.clone() for tensor in held_by(executor)]
    for function, given in calls:
        function(given)
    found = [tensor.clone() for tensor in held_by(executor, -1)]
    for tensor, old in zip(held_by(executor), before, strict=True):
        tensor.copy_(old)
    return found


def differing(some, others) -> int:
    """How many tensors differ by more than how sums over more rows are rounded."""
    pairs = zip(some, others, strict=True)
    return sum(
        not torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-5)
        for one, other in pairs
    )


def saves_of(count: int, decoded: bool = True) -> list[Save]:
    """Saves of slots in some order, to checkpoints in another."""
    slots = (4, 0, 2, 5, 1, 3)
    checkpoints = (7, 3, 0, 9, 5, 11)
    pairs = zip(slots[:count], checkpoints, strict=False)
    return [Save(checkpoint, slot, 9, decoded) for slot, checkpoint in pairs]


KINDS = [("repeated", "M-*G-", "*-"), ("distinct", "M-*M-", "*G")]


def operations(executor, function, given) -> int:
    watch = Operations()
    with torch.inference_mode(), watch:
        function(given)
    return watch.count


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_saves_and_restores_of_any_number_take_as_many_operations_as_one(rollback, monkeypatch):
    """With any number of recurrent layers, too, but for the launches that fold their rings."""
    launches = []
    for module, name in ((store_module, "copy_units"), (layout, "move_entries")):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, op=op: launches.append(op) or op(*given))
    found = {}
    for layers in (2, 12):
        executor = executor_of("M-*M-" + "M-" * (layers - 2), state_rollback=rollback)
        store = executor.checkpoints
        with torch.inference_mode():
            store.warm_up()
        for count in (1, 4):
            launches.clear()
            restores = [
                Restore(one.checkpoint, one.slot, 9, ((one.slot, 9 + one.slot),))
                for one in saves_of(count)
            ]
            found[layers, count] = (
                operations(executor, store.save, saves_of(count)),
                operations(executor, store.save, saves_of(count, decoded=False)),
                operations(executor, store.restore, restores),
            )
            assert len(launches) == 4 + (rollback == "snapshot")  # windows move, then snapshots do
    assert found[2, 1] == found[12, 1] and found[2, 4] == found[12, 4]
    assert all(four <= one for one, four in zip(found[2, 1], found[2, 4], strict=True))
    assert all(count <= most for count, most in zip(found[12, 1], (30, 5, 25), strict=True))


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(("heads", "pattern", "mtp_pattern"), KINDS)
def test_saves_together_are_saves_one_by_one(heads, pattern, mtp_pattern, rollback):
    executor = executor_of(pattern, heads, mtp_pattern, state_rollback=rollback)
    save = executor.checkpoints.save
    saves = saves_of(4) + saves_of(6, decoded=False)[4:]
    together = after(executor, (save, saves))
    assert differing(together, after(executor)) > 4
    assert not differing(together, after(executor, *((save, [one]) for one in saves)))


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_what_was_saved_can_be_saved_again(rollback):
    """What is committed lies where a chunk would have left it, and is counted so."""
    executor = executor_of("M-*M-", "distinct", "*G", state_rollback=rollback)
    once = (executor.checkpoints.save, saves_of(3))
    assert not differing(after(executor, once, once), after(executor, once))


def test_a_checkpoint_that_changes_hands_within_a_step_is_the_last_ones():
    executor = executor_of()
    first = Save(2, 1, 9)
    second = Save(2, 4, 9)
    save = executor.checkpoints.save
    for decoded in ((), (first,), (second,), (first, second)):
        saves = [Save(one.checkpoint, one.slot, 9, one in decoded) for one in (first, second)]
        checkpoints = len(executor.checkpoints.tensors)
        want = after(executor, (save, saves[1:]))[-checkpoints:]
        assert not differing(after(executor, (save, saves))[-checkpoints:], want)


@pytest.mark.parametrize(("rollback", "kept"), [("replay", "float16"), ("snapshot", "auto")])
@pytest.mark.parametrize(("heads", "pattern", "mtp_pattern"), KINDS)
def test_graphs_save_and_restore_what_is_copied_without_them(
    heads, pattern, mtp_pattern, rollback, kept, monkeypatch
):
    """Null rows change nothing; more rows than a graph has are replayed in turns."""
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(capture, "_MOST_ROWS", 4)
    executor = executor_of(
        pattern, heads, mtp_pattern, state_rollback=rollback, prefix_cache_dtype=kept
    )
    store = executor.checkpoints
    graphs = executor.checkpoints.graphs
    assert graphs.sizes == [1, 2, 4]
    for count in (1, 3, 5, 6):
        saves = saves_of(count) + saves_of(6, decoded=False)[count:]
        restores = [Restore(one.checkpoint, one.slot, 9) for one in saves_of(count)]
        found = []
        for store.graphs in (None, graphs):
            found.append(
                [after(executor, (store.save, saves)), after(executor, (store.restore, restores))]
            )
        for eager, replayed in zip(*found, strict=True):
            assert differing(eager, after(executor)) > 4 and not differing(eager, replayed)
    assert {
        ("_settle_and_leave", 4),
        ("_leave", 4),
        ("_enter", 4),
        ("_enter", 1),
    } <= graphs._graphs.keys()


def test_all_graphs_of_copies_are_captured_before_the_first_request(monkeypatch):
    replay_on_cpu(monkeypatch)
    executor = executor_of(warm_up=True, max_num_batched_tokens=16)
    want = after(executor)
    graphs = executor.checkpoints.graphs
    captured = set(graphs._graphs)
    assert {size for _, size in captured} == {1, 2, 4, 8} and len(captured) == 3 * 4
    graphs._graphs.clear()
    with torch.inference_mode():
        executor.checkpoints.warm_up()
    assert not differing(after(executor), want)
    for count in (1, 3, 6):
        after(executor, (executor.checkpoints.save, saves_of(count)))
    assert set(graphs._graphs) == captured
