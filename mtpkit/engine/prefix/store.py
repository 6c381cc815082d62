"""Checkpoints on the device: what goes on after a prefix besides keys and values.

A checkpoint of the first P tokens holds, per layer of the base, the convolution window and the recurrent state as a
prefill chunk leaves them, with the ring folded in; the last base hidden states up to position P - 1, from which the
heads go on and the next token is chosen; and their tokens. Of several pipeline stages each has checkpoints of its own
layers, and the last one the hidden states. All copies run in the order of launches: those of a request that begins at a
checkpoint before its first step, those that leave one after the step that comes to it and before any later one. No copy
waits for the device. However many requests begin or leave one in a step, the copies take few launches, and with CUDA
graphs a replay.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtpkit.engine.capture import NO_ROW, RowGraphs
from mtpkit.engine.device_state import DeviceState
from mtpkit.engine.step import Restore, Save
from mtpkit.kernels.copy_units import copy_units
from mtpkit.model.state import Committed, StateLayout, States
from mtpkit.platform import to_device

Fold = Callable[[States, Tensor, Tensor, Committed], None]
"""Folds rings: see `mtpkit.model.fold_rings`."""


class CheckpointStore:
    """Room for checkpoints, and the copies from and to the slots of requests.

    Args:
        states, state: of all slots.
        count: checkpoints.
        dtype: type of recurrent state.
        fold: folds the rings of some slots.
        graphs: replays what is done to rows; None: it is launched each time.

    Attributes:
        tensors: [count, ...] each.
    """

    def __init__(
        self,
        layout: StateLayout,
        states: States,
        state: DeviceState,
        count: int,
        dtype: torch.dtype,
        fold: Fold,
        graphs: RowGraphs | None = None,
    ) -> None:
        self.states, self.state, self.fold, self.graphs = states, state, fold, graphs
        earlier = list(vars(state.earlier).values()) if state.earlier else []
        self.tensors = [*_saved_tensors(layout, states, count, dtype), *_like(earlier, count)]
        ends = [part for one in states.all() if one.unit == "slot" for part in one.chunk_end.values()]
        self._held = [*ends, *earlier]
        """[slots, ...] each, what the slots hold of what a checkpoint has, in the order of `tensors`."""

    def restore(self, restores: Sequence[Restore]) -> None:
        """Copy checkpoints to slots, and the blocks of their tails; all blocks are read before any is written."""
        pairs = [pair for one in restores for pair in one.blocks]
        if pairs:
            old, new = to_device(pairs, torch.int64, self.state.tokens.device).unbind(1)
            for state in (one for one in self.states.all() if one.unit == "block"):
                for tensor in state.tensors.values():
                    tensor[new] = tensor[old]
        self._run(self._enter, [(one.slot, one.checkpoint) for one in restores])

    def save(self, saves: Sequence[Save]) -> None:
        """Copy slots to checkpoints; of two that one checkpoint is for, the first had to give it up."""
        last = {one.checkpoint: one for one in saves}.values()
        self._run(self._leave, [(one.slot, one.checkpoint) for one in last if not one.decoded])
        self._run(self._settle_and_leave, [(one.slot, one.checkpoint) for one in last if one.decoded])

    def warm_up(self) -> None:
        """Capture all graphs, or compile the kernels if there are none."""
        for function in (self._enter, self._leave, self._settle_and_leave):
            if self.graphs:
                self.graphs.capture_all(function)
            else:
                self._run(function, [(NO_ROW, NO_ROW)])

    def _run(self, function: Callable[[Tensor], None], rows: Sequence[tuple[int, int]]) -> None:
        """Run one of the functions below, which get rows [2, R] int64 of slots and checkpoints, both -1 in null
        rows."""
        if rows and self.graphs:
            self.graphs.run(function, rows)
        elif rows:
            function(to_device(list(zip(*rows, strict=True)), torch.int64, self.state.tokens.device))

    def _enter(self, rows: Tensor) -> None:
        """Copy checkpoints to slots."""
        slots, checkpoints = rows.unbind()
        copy_units(checkpoints, slots, *zip(self.tensors, self._held, strict=True))

    def _leave(self, rows: Tensor) -> None:
        """Copy slots to checkpoints."""
        slots, checkpoints = rows.unbind()
        copy_units(slots, checkpoints, *zip(self._held, self.tensors, strict=True))

    def _settle_and_leave(self, rows: Tensor) -> None:
        """Copy slots that decoded to checkpoints."""
        self._settle(rows[0])
        self._leave(rows)

    def _settle(self, slots: Tensor) -> None:
        """Bring the states of slots [R] that decoded to where a chunk would have left them."""
        # Null rows read and write the counts of the null slot, which has no states.
        committed = self.state.committed.at(slots)
        self.states.settle(slots, committed)
        self.fold(self.states, slots, self.state.num_computed[slots], committed)
        self.state.settled(slots, committed)


def checkpoint_bytes(layout: StateLayout, dtype: torch.dtype, earlier: Sequence[Tensor]) -> int:
    """Bytes of one checkpoint.

    Args:
        earlier: [slots, ...] each, those of `DeviceState.earlier`; device meta will do.
    """
    meta = torch.device("meta")
    saved = _saved_tensors(layout, layout.allocate(1, 1, meta), 1, dtype)
    return sum(tensor.nbytes for tensor in [*saved, *_like(earlier, 1)])


def _saved_tensors(layout: StateLayout, states: States, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Recurrent state, which has a type of its own, gets `dtype`; all else keeps its type."""
    found = []
    for name, specs in layout.specs.items():
        for spec, state in zip(specs, states[name], strict=True):
            parts = spec.parts(layout.sizes_of(name))
            for part, held in state.chunk_end.items() if state.unit == "slot" else ():
                own = parts[part].dtype == layout.sizes.state_dtype and held.is_floating_point()
                found += _like([held], count, dtype if own else None)
    return found


def _like(tensors: Sequence[Tensor], count: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.empty(count, *t.shape[1:], dtype=dtype or t.dtype, device=t.device) for t in tensors]
