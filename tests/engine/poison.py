"""What no step may read: all that is free, and all that requests hold but have not written or have taken back."""

import math

import torch

from mtpkit.model.state import ConvWindow, Replay, Snapshot
from tests.engine.tiny import VOCAB_SIZE, poison_free


def poison(engine, behind: int) -> None:
    """Fill with NaN, between two steps of an engine without a prefix cache: free blocks, slots and the null rows' block
    and slot; in the slots of requests, the entries of rings, windows and snapshots that are not committed; in the
    blocks of requests, the positions that are not. Tokens and trees of free slots become somebody else's.

    Args:
        behind: committed positions that the heads compute again in every step, `Drafter.earlier[0]`.
    """
    poison_free(engine)
    executor, scheduler = engine.executor, engine.scheduler
    state, free = executor.state, scheduler.slots.free_ids
    null = [executor.graphs.null_block] if executor.graphs else []
    state.tokens[free] = VOCAB_SIZE - 1
    for tensor, value in ((state.parents, 0), (state.draft_probs, math.nan)):
        if tensor is not None:
            tensor[free] = value
    if null and state.earlier is not None:
        state.earlier.hidden[-1] = math.nan
    for name, states in executor.states.layers.items():
        again = behind if name.startswith("mtp.") else 0
        for one in states:
            if one.unit == "block":
                for tensor in one.tensors.values():
                    tensor[null] = math.nan
            for request in scheduler.running:
                _poison_of(request, one, again, state, engine.config.block_size)


def _poison_of(request, state, behind: int, device_state, block_size: int) -> None:
    """Fill what a state holds for a request but has not committed."""
    slot = request.slot
    # The host may be a step behind the device while a request decodes.
    computed = int(device_state.num_computed[slot]) if request.decoding else request.num_computed
    if state.unit == "block":
        positions = torch.arange(max(0, computed - behind), len(request.block_table) * block_size)
        blocks = torch.tensor(request.block_table)[positions // block_size]
        for tensor in state.tensors.values():
            tensor[blocks, positions % block_size] = math.nan
        return
    live = _committed(state, slot, computed, device_state.committed.counts) if computed else {}
    for name, tensor in state.tensors.items():
        places = live.get(name, torch.arange(0))
        if places is not None:
            dead = torch.ones(tensor.shape[1], dtype=torch.bool, device=tensor.device)
            dead[places.to(tensor.device)] = False
            tensor[slot, dead] = math.nan


def _committed(state, slot: int, computed: int, counts) -> dict[str, torch.Tensor | None]:
    """For each tensor of a state with a slot for each request, the places that are committed; None: all of it."""
    if isinstance(state, Snapshot):
        return {"state": counts[state.newest][slot].cpu().view(1)}
    if isinstance(state, ConvWindow):
        return {"columns": counts[state.newest][slot].cpu() + torch.arange(state.taps)}
    assert isinstance(state, Replay)
    end, count = max(0, computed - state.ring.behind), int(counts[state.ring][slot])
    ring = torch.arange(end - count, end) % state.ring.length
    return {name: None if name == "state" else ring for name in state.tensors}
