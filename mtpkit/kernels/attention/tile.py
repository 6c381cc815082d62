# mypy: disable-error-code="no-untyped-def"
"""What the Triton kernels of paged attention share: one tile of queries against a range of positions.

The queries of a row that read the same keys, its T tokens times the REP = heads / kv_heads of a group, are stacked as
one dimension: query m is that of token m // REP and of head m % REP of the group. So a decode step fills a tensor core
tile, and reads each key once.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import SMALLEST_DOT

UNSPECIALIZED = ["tokens", "span", "fill", "longest", "width", "rows"]
"""Numbers that change from step to step and must not compile a kernel anew."""
UNALIGNED = ["table_ptr", "lens_ptr", "start_ptr"]
"""Tensors of which slices are passed, with the same effect."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles: M queries against N positions at a time."""

    m: int
    n: int
    num_warps: int
    num_stages: int


def grouped(q: Tensor, dims: int, key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """q as [..., kv_heads, heads / kv_heads, d] with `dims` dimensions."""
    # What the kernels can address.
    assert q.stride(-1) == 1 and key_cache.is_contiguous() and value_cache.is_contiguous()
    return q if q.dim() == dims else q.unflatten(-2, (key_cache.shape[2], -1))


def padded(width: int) -> int:
    """Channels of a tile: tensor cores take powers of two."""
    return max(SMALLEST_DOT, triton.next_power_of_2(width))


def score_scale(width: int) -> float:
    """What turns dot products into exponents of two."""
    return math.log2(math.e) / math.sqrt(width)


def sizes(q: Tensor, key_cache: Tensor, tiles: Tiles) -> dict[str, int]:
    """What a kernel is compiled for, given q as `grouped` returns it."""
    groups, rep, width = q.shape[-3:]
    return dict(
        GROUPS=groups,
        REP=rep,
        WIDTH=width,
        BLOCK_SIZE=key_cache.shape[1],
        M=tiles.m,
        N=tiles.n,
        D=padded(width),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit
def load_queries(q_ptr, m, count, q_token, q_head, REP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """[M, D] queries `m` [M] of a row and group that begin at `q_ptr`, zero from `count` and from WIDTH on."""
    channel = tl.arange(0, D)[None, :]
    place = (m // REP).to(tl.int64) * q_token + (m % REP) * q_head
    return tl.load(q_ptr + place[:, None] + channel, mask=(m < count)[:, None] & (channel < WIDTH), other=0.0)


@triton.jit
def load_blocks(table_ptr, place, last, BLOCK_SIZE: tl.constexpr):
    """[N] int64 blocks of the positions `place` [N] below `last`; unsigned division is cheaper."""
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
        q: [M, D]; newest: [M], the last position that each query sees, looked at where MASKED. Otherwise all see all,
            and last is a multiple of N.
        state: acc [M, D], the sum of values weighted by 2 ** (score - best); best [M]; total [M], the sum of the
            weights. fp32.
        key_ptr, value_ptr: the head's entry in slot 0 of caches whose slots are SLOT elements apart.
        table_ptr: the row's block table.
        scale: of the scores, times log2(e).

    Returns:
        The new state.
    """
    acc, best, total = state
    D: tl.constexpr = q.shape[1]
    channel = tl.arange(0, D)[None, :]
    place = first + tl.arange(0, N)
    # Fetched one round ahead: the addresses of keys and values then wait for nothing.
    block = load_blocks(table_ptr, place, last, BLOCK_SIZE)
    for start in range(first, last, N):
        place = start + tl.arange(0, N)
        slot = block * BLOCK_SIZE + place.to(tl.uint32) % BLOCK_SIZE
        offset = (slot * SLOT)[:, None] + channel
        if MASKED:
            # What lies beyond may be NaN, which no weight of zero would silence.
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
            # A query that has seen nothing yet: -inf - -inf would be NaN.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), values.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        best = higher
    return acc, best, total
