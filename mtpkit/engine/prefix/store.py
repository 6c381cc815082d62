"""Checkpoints on the device: what goes on after a prefix besides keys and values.

A checkpoint of the first P tokens holds, per layer of the base, the convolution window and the recurrent state as a
prefill chunk leaves them, with the ring folded in; the last base hidden states up to position P - 1, from which the
heads go on and the next token is chosen; and their tokens. Of several pipeline stages each has checkpoints of its own
layers, and the last one the hidden states. All copies run in the order of launches: those of a request that begins at a
checkpoint before its first step, those that leave one after the step that comes to it and before any later one. No copy
waits for the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtpkit.engine.device_state import DeviceState
from mtpkit.engine.step import Restore, Save
from mtpkit.model.state import Committed, State, StateLayout, States
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
    """

    def __init__(
        self, layout: StateLayout, states: States, state: DeviceState, count: int, dtype: torch.dtype, fold: Fold
    ) -> None:
        self.states, self.state, self.fold = states, state, fold
        self.tensors = [*_saved_tensors(layout, states, count, dtype), *_like(self._earlier, count)]
        """[count, ...] each, in the order of `_held`."""

    def _held(self) -> list[Tensor]:
        """[slots, ...], what the slots hold of what a checkpoint has."""
        parts = [part for state in _slot_states(self.states) for part in state.chunk_end.values()]
        return [*parts, *self._earlier]

    @property
    def _earlier(self) -> list[Tensor]:
        return list(vars(self.state.earlier).values()) if self.state.earlier else []

    def restore(self, restores: Sequence[Restore]) -> None:
        """Copy checkpoints to slots, and the blocks of their tails; all blocks are read before any is written."""
        pairs = [pair for one in restores for pair in one.blocks]
        if pairs:
            old, new = to_device(pairs, torch.int64, self.state.tokens.device).unbind(1)
            for state in (one for one in self.states.all() if one.unit == "block"):
                for tensor in state.tensors.values():
                    tensor[new] = tensor[old]
        held = self._held()
        for one in restores:
            _copy([part[one.slot] for part in held], [part[one.checkpoint] for part in self.tensors])

    def save(self, saves: Sequence[Save]) -> None:
        """Copy slots to checkpoints."""
        self._settle([one.slot for one in saves if one.decoded])
        held = self._held()
        for one in saves:
            _copy([part[one.checkpoint] for part in self.tensors], [part[one.slot] for part in held])

    def warm_up(self) -> None:
        """Compile the kernel that folds rings, on no slot."""
        rows = torch.full((1,), -1, device=self.state.tokens.device)
        self.fold(self.states, rows, torch.zeros_like(rows), self.state.committed.at(rows))

    def _settle(self, slots: Sequence[int]) -> None:
        """Bring the states of slots that decoded to where a chunk would have left them."""
        if not slots:
            return
        committed = self.state.committed
        for state in _slot_states(self.states):
            for slot in slots:
                state.settle(slot, committed)
        rows = to_device(slots, torch.int64, self.state.tokens.device)
        self.fold(self.states, rows, self.state.num_computed[rows], committed.at(rows))
        committed.put(rows, committed.none(committed.counts, len(slots), rows.device))


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


def _slot_states(states: States) -> list[State]:
    return [state for state in states.all() if state.unit == "slot"]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in few launches, whatever their number: one for each type and a few hundred tensors."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
