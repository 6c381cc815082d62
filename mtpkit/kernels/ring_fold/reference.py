"""Fold the rings of recurrent states into the states: the plain-PyTorch twin.

Shape legend: R rows, L ring length, E entries, h heads, p rows of a head's state, g key heads, n
columns.
"""

import torch
from torch import Tensor

from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.rounding.reference import Noise, narrowed


def fold_ring(
    state: Tensor,
    ring_values: Tensor,
    ring_keys: Tensor,
    ring_rates: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    ring_lens: Tensor,
    A_log: Tensor | None = None,
    noise: Noise | None = None,
) -> None:
    """Advance states by the committed entries of their rings, so that a prefill chunk can continue
    from them.

    Each entry first decays the state by exp(its log decay), then adds the outer product of its
    value and its key. The entries of row r are those of the last ring_lens[r] positions before
    context_lens[r]; position i is at place i % L.

    Args:
        state: [slots, h, p, n], updated in place; ring_values: [slots, L, h, p]; ring_keys: [slots,
            L, g, n].
        ring_rates: [slots, L, h], log decays; with `A_log`, step sizes dt: then the log decay is
            -exp(A_log) dt, and the value is multiplied by dt.
        slots, context_lens, ring_lens: [R] int64, no slot twice. A row at slot -1 is padding.
        A_log: [h].
        noise: makes the rounding of a float16 state stochastic, see `rounding.reference`; None: to
            nearest.
    """
    live = slots >= 0
    slots = slots[live]
    context_lens = context_lens[live]
    ring_lens = ring_lens[live]
    noise = None if noise is None else noise.at(live)
    length, heads = ring_values.shape[1:3]
    entries = torch.arange(ring_capacity(length), device=state.device)
    stored = entries < ring_lens[:, None]  # [R, E]
    old = (slots[:, None], (context_lens[:, None] - ring_lens[:, None] + entries) % length)

    def entry(ring: Tensor) -> Tensor:
        return torch.where(
            stored.view(*stored.shape, *[1] * (ring.dim() - 2)), ring[old].float(), 0.0
        )

    rates = entry(ring_rates)
    values = entry(ring_values)
    keys = entry(ring_keys).repeat_interleave(heads // ring_keys.shape[2], 2)
    if A_log is not None:
        values = values * rates[..., None]
        rates = rates * -torch.exp(A_log.float())
    # [R, E, h]; in fp64 since small decays are differences of large sums
    decay = torch.cumsum(rates.double(), 1)
    to_end = torch.exp((decay[:, -1:] - decay).float())
    added = torch.einsum("rehp,rehn->rhpn", values * to_end[..., None], keys)
    folded = state[slots].float() * torch.exp(decay[:, -1].float())[..., None, None] + added
    state[slots] = narrowed(folded, state.dtype, noise, context_lens - 1)
