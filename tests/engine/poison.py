"""What no step may read: all that is free, and all that is held but not written yet, taken back, or
never to be read.

In an engine with a prefix cache, idle blocks stay as far as a prompt can be found in them, and so
do checkpoints.
"""

import math
from typing import NamedTuple

import torch

from mtpkit.model.state import ConvWindow, Replay, Snapshot
from tests.engine.tiny import VOCAB_SIZE, poison_free

JUNK = {torch.bool: True, torch.int32: 1, torch.int64: 1}
"""What a free slot holds of numbers that are not floats: possible values, and wrong ones."""


class _Held(NamedTuple):
    """What a running request has in the states."""

    computed: int
    """Positions that are committed or, in an open plan of a pipeline stage, may still be."""
    ring_ends: int
    """Positions that are committed in the slot."""
    chunked: bool
    """Whether the newest step of the slot was a chunk, or the copy of a checkpoint."""
    is_open: bool
    """Whether a pipeline stage has yet to store the results of a step of the slot."""


def poison(engine) -> None:
    """Fill with NaN, between two steps of an engine:

    - free blocks, slots and checkpoints, and the null rows' block and slot;
    - in the slots of requests, the entries of rings, windows and snapshots that are not committed,
      and hidden states of positions before 0;
    - in the blocks of requests, the positions that are not committed, and those that the heads
      compute again;
    - in idle blocks of a checkpoint's tail, the positions after the checkpoint, and those that the
      heads compute again.

    Numbers of free slots become others. On a pipeline stage whose last step is not stored yet, all
    that the step wrote may still be committed, and stays.
    """
    poison_free(engine)
    executor = engine.executor
    scheduler = engine.scheduler
    state = executor.state
    free = scheduler.slots.free_ids
    null = [executor.graphs.null_block] if executor.graphs else []
    for tensor in state.tensors:
        tensor[free] = JUNK.get(tensor.dtype, math.nan)
    state.tokens[free] = VOCAB_SIZE - 1
    state.columns["output_counts"][free] = 1 << 20
    if state.parents is not None:
        state.parents[free] = 0
    if null and state.earlier is not None:
        state.earlier.hidden[-1] = math.nan
    if executor.checkpoints:
        for tensor in executor.checkpoints.tensors:
            tensor[scheduler.prefix.slots.free_ids] = JUNK.get(tensor.dtype, math.nan)
    plans = [one.launched.plan for one in getattr(executor, "_open", ())]
    chunks = {row.request: row for plan in plans for row in plan.chunks}
    decoded = {row.request: row for plan in plans for row in plan.decode_rows}
    held = {
        one.slot: _held(one, chunks.get(one), decoded.get(one), state) for one in scheduler.running
    }
    for slot, one in held.items():
        _poison_earlier(state.earlier, slot, one.computed)
    for name, states in executor.states.layers.items():
        # Of a position's entries, the heads compute the last ones again: before each step, and
        # after a checkpoint.
        again = engine.layout.behind if name.startswith("mtp.") else 0
        ahead = scheduler.prefix.following if scheduler.prefix and name.startswith("mtp.") else 0
        if scheduler.prefix and scheduler.prefix.successors:
            ahead = again
        for one in states:
            if one.unit == "block":
                for tensor in one.tensors.values():
                    tensor[null] = math.nan
                _poison_tails(scheduler.prefix, one, ahead)
            for request in scheduler.running:
                _poison_of(request, held[request.slot], one, again, state.committed.counts)


def _held(request, chunk, decoded, state) -> _Held:
    """What a running request holds, of which an open plan may have a `chunk` or a `decoded` row."""
    if chunk or not request.decoding:
        return _Held(request.num_computed, request.num_computed, True, chunk is not None)
    # The host may be a step behind the device while a request decodes.
    computed = int(state.num_computed[request.slot])
    return _Held(
        computed + (decoded.length if decoded else 0), computed, False, decoded is not None
    )


def _poison_earlier(earlier, slot: int, computed: int) -> None:
    """Fill the hidden states that a slot has of positions before 0."""
    if earlier is not None:
        missing = max(0, earlier.hidden.shape[1] - computed)
        earlier.hidden[slot, :missing] = math.nan
        earlier.token_ids[slot, :missing] = VOCAB_SIZE - 1


def _poison_tails(prefix, state, ahead: int) -> None:
    """Fill what idle blocks hold beyond the checkpoints to whose tails they belong."""
    if prefix is None:
        return
    blocks = prefix.blocks
    live = {}
    for entry in prefix._entries.values():
        for key in entry.tails:
            block = blocks.find(key)
            if block in blocks._idle and all(one in entry.tails for one in blocks._keys[block]):
                live[block] = max(0, entry.length - ahead - key.place * prefix.block_size)
    for block, count in live.items():
        for tensor in state.tensors.values():
            tensor[block, count:] = math.nan


def _poison_of(request, held: _Held, state, behind: int, counts) -> None:
    """Fill what a state holds for a request but has not committed."""
    slot = request.slot
    if state.unit == "block":
        first = next(iter(state.tensors.values()))
        positions = torch.arange(
            max(0, held.computed - behind), len(request.block_table) * first.shape[1]
        )
        blocks = torch.tensor(request.block_table)[positions // first.shape[1]]
        for tensor in state.tensors.values():
            tensor[blocks, positions % first.shape[1]] = math.nan
        return
    if held.is_open:
        return
    live = _committed(state, slot, held, counts) if held.computed else {}
    for name, tensor in state.tensors.items():
        places = live.get(name, torch.arange(0))
        if places is not None:
            dead = torch.ones(tensor.shape[1], dtype=torch.bool, device=tensor.device)
            dead[places.to(tensor.device)] = False
            tensor[slot, dead] = math.nan


def _committed(state, slot: int, held: _Held, counts) -> dict[str, torch.Tensor | None]:
    """For each tensor of a state with a slot for each request, the places that are committed; None:
    all of it."""
    counter = state.ring if isinstance(state, Replay) else state.newest
    count = counter.start if held.chunked else int(counts[counter][slot])
    if isinstance(state, Snapshot):
        return {"state": torch.tensor([count])}
    if isinstance(state, ConvWindow):
        return {"columns": count + torch.arange(state.taps)}
    end = max(0, held.ring_ends - state.ring.behind)
    ring = torch.arange(end - count, end) % state.ring.length
    return {name: None if name == "state" else ring for name in state.tensors}
