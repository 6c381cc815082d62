"""Stochastic rounding of tiles of recurrent states to float16 in Triton, for the kernels that write
them; equal to the twin to the bit."""

import triton
import triton.language as tl

from mtpkit.kernels.rounding.reference import _INFINITY, _LARGEST, _NAN, GROUP, Noise
from mtpkit.kernels.sampling.philox import philox

_GROUP = tl.constexpr(GROUP)
_MOST = tl.constexpr(_LARGEST)
_INF = tl.constexpr(_INFINITY)
_NOT = tl.constexpr(_NAN)


def packed(noise: Noise | None) -> tuple | None:
    """Noise as kernels take it."""
    if noise is None:
        return None
    requests = noise.requests.contiguous()
    # Functions that kernels call take no tuples with None in them.
    positions = requests if noise.positions is None else noise.positions.contiguous()
    return requests, noise.layer, noise.first_head, positions


@triton.jit
def narrowed(
    values,
    dtype: tl.constexpr,
    noise,
    row,
    position,
    head,
    p,
    start,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr = False,
):
    """Round fp32 values [P, N], rows p of the state of one head, to the dtype: to nearest if
    `noise` is None.

    Args:
        noise: see `packed`.
        row: the row whose request's noise is taken.
        position: position of the last token in the state.
        start: column of the first value, a multiple of 8; N is, too.
        COLUMNS_FIRST: the values are [N, P].
    """
    if noise is None:
        return values.to(dtype)
    else:
        requests_ptr, layer, first_head, _ = noise
        request = tl.load(requests_ptr + row)
        SIZE: tl.constexpr = values.shape[0 if COLUMNS_FIRST else 1] // _GROUP
        GROUPS: tl.constexpr = (STATE + _GROUP - 1) // _GROUP
        group = start // _GROUP + tl.arange(0, SIZE)
        index = ((first_head + head) * WIDTH + p)[:, None] * GROUPS + group[None, :]
        c2 = index.to(tl.uint32)
        zeros = tl.zeros(c2.shape, tl.uint32)
        w0, w1, w2, w3 = philox(
            zeros + request.to(tl.uint32),
            zeros + (request >> 32).to(tl.uint32),
            zeros + position.to(tl.uint32),
            zeros + layer,
            c2,
            zeros,
        )
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        bits = tl.interleave(words & 0xFFFF, words >> 16)
        if COLUMNS_FIRST:
            bits = tl.trans(bits)
        return to_half(values, bits)


@triton.jit
def to_half(values, bits):
    """Round fp32 values to float16 with noise `bits` uint32 below 2^16, see the twin."""
    raw = values.to(tl.uint32, bitcast=True)
    magnitude = raw & 0x7FFFFFFF
    fraction = magnitude & 0x7FFFFF
    exponent = tl.maximum((magnitude >> 23).to(tl.int32), 1)
    significand = fraction + tl.where(magnitude >= 0x800000, 0x800000, 0).to(tl.uint32)
    dropped = 126 - exponent
    cut = tl.minimum(tl.maximum(dropped, 13), 31)
    significand = significand >> tl.minimum(tl.maximum(dropped - 31, 0), 31).to(tl.uint32)
    up = tl.maximum(cut - 16, 0).to(tl.uint32)
    down = tl.maximum(16 - cut, 0).to(tl.uint32)
    kept = (significand + ((bits << up) >> down)) >> cut.to(tl.uint32)
    half = (tl.maximum(exponent - 113, 0) << 10) + kept.to(tl.int32)
    half = tl.minimum(half, _MOST)
    not_finite = tl.where(fraction == 0, _INF, _NOT)
    half = tl.where(magnitude >= 0x7F800000, not_finite, half)
    half |= ((raw >> 16) & 0x8000).to(tl.int32)
    return half.to(tl.uint16).to(tl.float16, bitcast=True)
