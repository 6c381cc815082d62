"""Checkpoints on the device: all that a request needs, besides keys and values, to continue after a
prefix.

A checkpoint of the first P tokens holds:
- for each recurrent layer, of the base and of the heads, the convolution window and the recurrent
  state as a prefill chunk leaves them, with the ring folded in;
- the base's last hidden states up to position P - 1, from which the heads continue and the next
  token is chosen;
- the tokens of these positions.

With several pipeline stages, each stage has checkpoints of its own layers, and the last one also
has the hidden states. All copies run in the order of launches. A checkpoint is copied to a request
before the request's first step, and written after the step that reaches it and before any later
step. No copy waits for the device. However many requests begin at a checkpoint or leave one in a
step, the copies take few launches, or a replay with CUDA graphs. One launch more per layer rounds
states to float16 for checkpoints.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtpkit.engine.device.capture import NO_ROW, RowGraphs
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import Restore, Save
from mtpkit.kernels.copy_units import copy_units
from mtpkit.kernels.linear import FP8
from mtpkit.kernels.rounding import Noise, narrow_units
from mtpkit.model.state import Committed, NoiseKey, RecurrentState, StateLayout, States
from mtpkit.platform import to_device

Fold = Callable[[States, Tensor, Tensor, Committed, Tensor], None]
"""Folds rings: see `mtpkit.model.fold_rings`."""


COLUMNS = 3
"""Integers per copied checkpoint: its slot, its place in the store, and its noise key."""


class CheckpointStore:
    """Room for checkpoints, and the copies from and to the slots of requests.

    Args:
        states, state: the layers' states and the engine's device state, both for all slots.
        count: number of checkpoints.
        dtype: dtype of recurrent state in checkpoints.
        fold: folds the rings of some slots.
        graphs: replays the copies; None: their kernels are launched each time.

    Attributes:
        tensors: the contents of the checkpoints, [count, ...] each.
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
        self.states = states
        self.state = state
        self.fold = fold
        self.graphs = graphs

        earlier = list(vars(state.earlier).values()) if state.earlier else []
        self.tensors = [*_saved_tensors(layout, states, count, dtype), *_like(earlier, count)]
        of_slots = (one for one in states.all() if one.unit == "slot")
        ends = [part for one in of_slots for part in one.chunk_end.values()]
        self._held = [*ends, *earlier]
        """[slots, ...] each, the slots' counterparts of `tensors`, in the same order."""
        keys = [
            one.key if isinstance(one, RecurrentState) else None
            for one in states.all()
            if one.unit == "slot"
            for _ in one.chunk_end
        ] + [None] * len(earlier)
        self._copied: list[tuple[Tensor, Tensor]] = []
        """Pairs of both that are copied as they are, or rounded to nearest."""
        self._narrowed: list[tuple[Tensor, Tensor, NoiseKey]] = []
        """Pairs that are rounded with noise, with the keys of their layers."""
        for held, kept, key in zip(self._held, self.tensors, keys, strict=True):
            if key is not None and kept.dtype == torch.float16 != held.dtype:
                self._narrowed.append((held, kept, key))
            else:
                self._copied.append((held, kept))

    def restore(self, restores: Sequence[Restore]) -> None:
        """Copy checkpoints to slots, and the blocks of their tails; all blocks are read before any
        is written."""
        pairs = [pair for one in restores for pair in one.blocks]
        if pairs:
            old, new = to_device(pairs, torch.int64, self.state.tokens.device).unbind(1)
            of_blocks = (one for one in self.states.all() if one.unit == "block")
            for state in of_blocks:
                for tensor in state.tensors.values():
                    # As bytes: not all devices index tensors in fp8.
                    moved = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
                    moved[new] = moved[old]
        self._run(self._enter, [(one.slot, one.checkpoint, 0) for one in restores])

    def save(self, saves: Sequence[Save]) -> None:
        """Copy slots to checkpoints. Of two saves to one checkpoint only the last counts: it has
        evicted the first."""
        last = {one.checkpoint: one for one in saves}.values()
        after_chunk = [one for one in last if not one.decoded]
        after_decoding = [one for one in last if one.decoded]
        for function, some in (
            (self._leave, after_chunk),
            (self._settle_and_leave, after_decoding),
        ):
            self._run(function, [(one.slot, one.checkpoint, one.noise_key) for one in some])

    def warm_up(self) -> None:
        """Capture all graphs, or compile the kernels if there are none."""
        for function in (self._enter, self._leave, self._settle_and_leave):
            if self.graphs:
                self.graphs.capture_all(function)
            else:
                self._run(function, [(NO_ROW,) * COLUMNS])

    def _run(self, function: Callable[[Tensor], None], rows: Sequence[tuple[int, ...]]) -> None:
        """Run one of the functions below on `rows` of a slot, a checkpoint and a noise key. The
        function gets them as [`COLUMNS`, R] int64, with -1 for all in null rows."""
        if not rows:
            return
        if self.graphs:
            self.graphs.run(function, rows)
        else:
            columns = list(zip(*rows, strict=True))
            function(to_device(columns, torch.int64, self.state.tokens.device))

    def _enter(self, rows: Tensor) -> None:
        """Copy checkpoints to slots."""
        slots, checkpoints, _ = rows.unbind()
        copy_units(checkpoints, slots, *zip(self.tensors, self._held, strict=True))

    def _leave(self, rows: Tensor) -> None:
        """Copy slots to checkpoints."""
        slots, checkpoints, noise_keys = rows.unbind()
        copy_units(slots, checkpoints, *self._copied)
        if not self._narrowed:
            return
        positions = self.state.num_computed[slots] - 1
        for held, kept, key in self._narrowed:
            narrow_units(slots, checkpoints, held, kept, Noise(noise_keys, *key, positions))

    def _settle_and_leave(self, rows: Tensor) -> None:
        """Copy slots that decoded to checkpoints."""
        self._settle(rows[0], rows[2])
        self._leave(rows)

    def _settle(self, slots: Tensor, noise_keys: Tensor) -> None:
        """Bring the states of slots [R] that decoded to where a chunk would have left them."""
        # Null rows read and write the counts of the null slot, which has no states.
        committed = self.state.committed.at(slots)
        self.states.settle(slots, committed)
        context_lens = self.state.num_computed[slots]
        self.fold(self.states, slots, context_lens, committed, noise_keys)
        self.state.settled(slots, committed)


def checkpoint_bytes(layout: StateLayout, dtype: torch.dtype, earlier: Sequence[Tensor]) -> int:
    """Bytes of one checkpoint.

    Args:
        earlier: the tensors of `DeviceState.earlier`, [slots, ...] each; they may be on device
            meta.
    """
    meta = torch.device("meta")
    saved = _saved_tensors(layout, layout.allocate(1, 1, meta), 1, dtype)
    return sum(tensor.nbytes for tensor in [*saved, *_like(earlier, 1)])


def _saved_tensors(
    layout: StateLayout, states: States, count: int, dtype: torch.dtype
) -> list[Tensor]:
    """The tensors for states of slots: recurrent state gets `dtype`, everything else keeps its
    dtype."""
    found = []
    for name, specs in layout.specs.items():
        for spec, state in zip(specs, states[name], strict=True):
            if state.unit != "slot":
                continue
            parts = spec.parts(layout.sizes_of(name))
            for part, held in state.chunk_end.items():
                own = parts[part].dtype == layout.sizes.state_dtype and held.is_floating_point()
                found += _like([held], count, dtype if own else None)
    return found


def _like(tensors: Sequence[Tensor], count: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [
        torch.empty(count, *t.shape[1:], dtype=dtype or t.dtype, device=t.device) for t in tensors
    ]
