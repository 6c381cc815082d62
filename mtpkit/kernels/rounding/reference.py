"""Stochastic rounding of recurrent states to float16 in plain PyTorch.

A number between two neighbours in float16 becomes the upper one with a probability equal to its
distance from the lower one, in steps: rounding errors of many folds then average out, where the
nearest neighbour would swallow each addition of less than half a step. The noise is counter-based.
Where and when a state is rounded, in which slot, batch or on which rank, therefore does not change
what it is rounded to.

Shape legend: R rows, h heads, p rows of a head's state, n columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtpkit.kernels.sampling.reference import philox

GROUP = 8
"""Neighbouring columns that share the four 32-bit words of a counter: 16 bits of noise each."""
_LARGEST = 0x7BFF
_INFINITY = 0x7C00
_NAN = 0x7E00
"""Bits of float16 numbers."""


class Noise(NamedTuple):
    """Key of the noise for the states of one layer, R rows."""

    requests: Tensor
    """[R] int64, a number of each row's request."""
    layer: int
    """A number of the layer in the whole model."""
    first_head: int
    """Index in the whole layer of the states' first head, which is not 0 if heads are split over
    ranks."""
    positions: Tensor | None = None
    """[R] int64, position of the last token in each state; [R, T] if there is a state after each of
    T tokens. None: the op knows it."""

    def at(self, rows: Tensor) -> "Noise":
        """Return the noise for some of the rows."""
        positions = None if self.positions is None else self.positions[rows]
        return self._replace(requests=self.requests[rows], positions=positions)


def narrowed(states: Tensor, dtype: torch.dtype, noise: Noise | None, positions: Tensor) -> Tensor:
    """Round states [R, h, p, n] fp32 to `dtype`: to nearest without `noise`.

    Args:
        noise: makes the rounding stochastic; `dtype` must be float16. Finite numbers beyond its
            range become its largest ones; NaN and infinities stay.
        positions: [R] int64, position of the last token in each state.
    """
    if noise is None:
        return states.to(dtype)
    assert dtype == torch.float16, f"{dtype} is rounded to nearest"
    return to_half(states, noise_bits(noise, positions, states.shape[1:]))


def narrowed_row(
    state: Tensor, dtype: torch.dtype, noise: Noise | None, row: int, position: int
) -> Tensor:
    """`narrowed` for the state [h, p, n] of one row, whose last token has `position`."""
    if noise is None:
        return state.to(dtype)
    rows = torch.tensor([row], device=state.device)
    positions = torch.tensor([position], device=state.device)
    return narrowed(state[None], dtype, noise.at(rows), positions)[0]


def noise_bits(noise: Noise, positions: Tensor, shape: torch.Size) -> Tensor:
    """[R, h, p, n] int64 below 2^16, independent uniform numbers for states of `shape` (h, p, n)
    after `positions` [R]."""
    heads, width, columns = shape
    groups = -(-columns // GROUP)
    first = noise.first_head * width * groups
    group = first + torch.arange(heads * width * groups, device=positions.device)
    zeros = torch.zeros_like(group)
    counter = (positions[:, None] & 0xFFFFFFFF, zeros + noise.layer, group, zeros)
    words = philox(noise.requests[:, None], counter)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack(halves, -1).view(-1, heads, width, groups * GROUP)
    return bits[..., :columns]


def to_half(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 `values` to float16: away from zero if what is cut off, plus the noise `bits`
    (below 2^16), reaches a whole step. The probability is exact to 2^-16.

    Subnormal numbers have the same steps as the smallest normal ones. More bits of theirs are cut
    off, and the steps are as probable as for normal numbers.
    """
    raw = values.float().contiguous().view(torch.int32).long()
    magnitude = raw & 0x7FFFFFFF
    fraction = magnitude & 0x7FFFFF
    exponent = (magnitude >> 23).clamp_min(1)
    significand = fraction + torch.where(magnitude >= 1 << 23, 1 << 23, 0)

    # 10 of 23 bits are kept from 2^-14 on, which has exponent 113, and one bit fewer per halving.
    # Noise has 16 bits, so what lies 31 bits below a step or deeper never makes one.
    dropped = 126 - exponent
    cut = dropped.clamp(13, 31)
    significand = significand >> (dropped - 31).clamp(0, 31)
    threshold = (bits << (cut - 16).clamp_min(0)) >> (16 - cut).clamp_min(0)
    kept = (significand + threshold) >> cut
    # A carry out of the fraction is right as it is: it makes the exponent larger by one.
    half = (((exponent - 113).clamp_min(0) << 10) + kept).clamp_max(_LARGEST)

    not_finite = torch.where(fraction == 0, _INFINITY, _NAN)
    half = torch.where(magnitude >= 0x7F800000, not_finite, half)
    sign = (raw >> 16) & 0x8000
    return (half | sign).to(torch.int16).view(torch.float16)


def narrow_units(
    sources: Tensor, targets: Tensor, read: Tensor, written: Tensor, noise: Noise
) -> None:
    """Copy unit sources[r] of `read` to unit targets[r] of `written`, rounded by `narrowed`.

    Args:
        sources, targets: [R] int64, indices of units; no two copies have the same target. Where
            either index is negative, nothing is copied.
        read: [units, h, p, n] of any float dtype; written: [units, h, p, n] float16. Each unit must
            be dense, but there may be gaps between units.
        noise: with `positions` [R].
    """
    copied = (sources >= 0) & (targets >= 0)
    chosen = noise.at(copied)
    assert chosen.positions is not None
    values = read[sources[copied]].float()
    written[targets[copied]] = narrowed(values, written.dtype, chosen, chosen.positions)
