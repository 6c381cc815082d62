# mypy: disable-error-code="no-untyped-def"
"""Device functions that the Triton kernels of paged attention share: one tile of queries against a range of positions.

All queries of a row that read the same keys are stacked in one dimension: T tokens times the REP = heads / kv_heads
heads of a group. Query m belongs to token m // REP and to head m % REP of the group. A decode step thus fills a tensor
core tile and reads each key once.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import SMALLEST_DOT

UNSPECIALIZED = ["tokens", "span", "fill", "longest", "width", "rows"]
"""Numbers that change from step to step and must not trigger a recompilation."""
UNALIGNED = ["table_ptr", "lens_ptr", "start_ptr"]
"""Tensors that may be slices, whose alignment must not trigger a recompilation."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a kernel: M queries against N positions at a time."""

    m: int
    n: int
    num_warps: int
    num_stages: int

    def launch(self) -> dict[str, int]:
        """Keyword arguments of a kernel's launch."""
        return dict(M=self.m, N=self.n, num_warps=self.num_warps, num_stages=self.num_stages)


def grouped(q: Tensor, dims: int, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """q as [..., kv_heads, heads / kv_heads, d] with `dims` dimensions."""
    # The only layouts that the kernels can address.
    assert q.stride(-1) == 1 and key_cache.is_contiguous() and value_cache.is_contiguous()
    return q if q.dim() == dims else q.unflatten(-2, (key_cache.shape[2], -1))


def padded(width: int) -> int:
    """Channels of a tile for `width` channels: a power of two, as tensor cores need."""
    return max(SMALLEST_DOT, triton.next_power_of_2(width))


def score_scale(width: int) -> float:
    """The factor that turns dot products into exponents of two."""
    return math.log2(math.e) / math.sqrt(width)


def sizes(q: Tensor, key_cache: Tensor, tiles: Tiles) -> dict[str, int]:
    """Compile-time arguments of a kernel, given q from `grouped`."""
    groups, rep, width = q.shape[-3:]
    return dict(
        GROUPS=groups,
        REP=rep,
        WIDTH=width,
        BLOCK_SIZE=key_cache.shape[1],
        D=padded(width),
        **tiles.launch(),
    )


@triton.jit
def load_queries(q_ptr, m, count, q_token, q_head, REP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Load the queries `m` [M] of the row and group at `q_ptr` as [M, D]; zero from query `count` and from channel
    WIDTH on."""
    channel = tl.arange(0, D)[None, :]
    place = (m // REP).to(tl.int64) * q_token + (m % REP) * q_head
    return tl.load(q_ptr + place[:, None] + channel, mask=(m < count)[:, None] & (channel < WIDTH), other=0.0)


@triton.jit
def load_blocks(table_ptr, place, last, BLOCK_SIZE: tl.constexpr):
    """Load the int64 block numbers of the positions `place` [N] below `last`. Unsigned division is cheaper."""
    return tl.load(table_ptr + place.to(tl.uint32) // BLOCK_SIZE, mask=place < last, other=0)


@triton.jit
def empty_state(M: tl.constexpr, D: tl.constexpr):
    """The state of `attend` before any position."""
    none = tl.full([M], float("-inf"), tl.float32)
    return tl.full([M, D], 0.0, tl.float32), none, tl.full([M], 0.0, tl.float32)


@triton.jit
def attend(
    q,
    newest,
    state,
    first,
    last,
    key_ptr,
    value_ptr,
    table_ptr,
    scale,
    BLOCK_SIZE: tl.constexpr,
    SLOT: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the positions first .. last - 1 into a running softmax; first is a multiple of N.

    Args:
        q: [M, D].
        newest: [M], the last position that each query sees, used if MASKED. If not, all queries see all positions, and
            last is a multiple of N.
        state: fp32 acc [M, D], the sum of values weighted by 2 ** (score - best); best [M]; total [M], the sum of the
            weights.
        key_ptr, value_ptr: the head's entry in slot 0 of caches whose slots are SLOT elements apart.
        table_ptr: block table of the row.
        scale: scale of the scores times log2(e).

    Returns:
        The new state.
    """
    acc, best, total = state
    D: tl.constexpr = q.shape[1]
    channel = tl.arange(0, D)[None, :]
    place = first + tl.arange(0, N)
    # Loaded one round ahead, so that the addresses of keys and values are ready in time.
    block = load_blocks(table_ptr, place, last, BLOCK_SIZE)
    for start in range(first, last, N):
        place = start + tl.arange(0, N)
        slot = block * BLOCK_SIZE + place.to(tl.uint32) % BLOCK_SIZE
        offset = (slot * SLOT)[:, None] + channel
        if MASKED:
            # Entries beyond may be NaN, and NaN times a weight of zero is NaN.
            inside = (place < last)[:, None] & (channel < WIDTH)
            keys = tl.load(key_ptr + offset, mask=inside, other=0.0)
            values = tl.load(value_ptr + offset, mask=inside, other=0.0)
        elif WIDTH < D:
            keys = tl.load(key_ptr + offset, mask=channel < WIDTH, other=0.0)
            values = tl.load(value_ptr + offset, mask=channel < WIDTH, other=0.0)
        else:
            keys = tl.load(key_ptr + offset)
            values = tl.load(value_ptr + offset)
        block = load_blocks(table_ptr, place + N, last, BLOCK_SIZE)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if MASKED:
            scores = tl.where(place[None, :] <= newest[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        shift = higher
        if MASKED:
            # For a query that has seen no position yet, -inf - -inf would be NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        best = higher
    return acc, best, total
