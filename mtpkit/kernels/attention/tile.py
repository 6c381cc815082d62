"""Parts shared by the attention kernels: the running softmax, and loads and stores of rows of a
strided tensor."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


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


def score_scale(width: int, scale: float | None = None) -> float:
    """The factor that turns dot products of `width` channels into exponents of base 2.

    Args:
        scale: factor of the scores; None: 1 / sqrt(width).
    """
    return math.log2(math.e) * (1 / math.sqrt(width) if scale is None else scale)


@triton.jit
def empty_state(M, D):
    """The fp32 state of a running softmax of M queries before any key: acc [M, D], the sum of
    values weighted by 2 ** (score - best); best [M], the largest score; total [M], the sum of the
    weights."""
    none = tl.full([M], float("-inf"), tl.float32)
    return tl.full([M, D], 0.0, tl.float32), none, tl.full([M], 0.0, tl.float32)


@triton.jit
def fold(state, scores, values, scale, MASKED):
    """Fold values [N, D] with scores [M, N] into a running softmax. `scale` is the factor of the
    scores times log2(e); MASKED: scores may be -inf."""
    acc, best, total = state
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    shift = higher
    if MASKED:
        # For a query that has seen no key yet, -inf - -inf would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total


class Rows(NamedTuple):
    """A tensor [b, s, heads, d] with contiguous channels, in the form that kernels take it: data
    and strides."""

    data: Tensor
    batch: int
    token: int
    head: int
    """The three strides are in elements."""


def rows_of(t: Tensor) -> Rows:
    """Rows of t [b, s, heads, d], whose last dimension is contiguous."""
    assert t.stride(-1) == 1
    return Rows(t, *t.stride()[:3])


class Inputs(NamedTuple):
    """Rows of the queries of a depth, of depth 1's keys and values, and of the later depths' keys
    and values."""

    q: Rows
    k: Rows
    v: Rows
    later_k: tuple[Rows, ...]
    later_v: tuple[Rows, ...]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "Inputs":
        """The rows of q, k, v, the keys of all later depths and the values of all later depths,
        given in this order."""
        q, k, v, *later = map(rows_of, tensors)
        count = len(later) // 2
        return cls(q, k, v, tuple(later[:count]), tuple(later[count:]))


class Bounds(NamedTuple):
    """Bounds of each token's document, int32 [b, s] each: its first token, and the token after its
    last one, as indices into the row."""

    start: Tensor
    end: Tensor


def document_bounds(documents: Tensor) -> Bounds:
    """Bounds of documents [b, s], which must not decrease along a row."""
    # searchsorted copies tensors that are not contiguous, with a warning.
    ids = documents.contiguous()
    return Bounds(
        *(torch.searchsorted(ids, ids, right=right, out_int32=True) for right in (False, True))
    )


@triton.jit
def _offsets(rows, batch, head, first, ROWS, D):
    # In int64: a batch of long rows may have more than 2^31 elements.
    token = (first + tl.arange(0, ROWS)).to(tl.int64) * rows.token
    line = batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
    return (line + token)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _inside(first, length, WIDTH, ROWS, D):
    inside = (first + tl.arange(0, ROWS) < length)[:, None]
    if WIDTH < D:
        inside = inside & (tl.arange(0, D) < WIDTH)[None, :]
    return inside


@triton.jit
def load_rows(rows, batch, head, first, length, WIDTH, ROWS, D):
    """Load ROWS tokens of a head from token `first` on, [ROWS, D]; zero from token `length` and
    from channel WIDTH on."""
    place = rows.data + _offsets(rows, batch, head, first, ROWS, D)
    # Without `other`, masked elements are undefined. They enter products of tiles, where NaN times
    # 0 is NaN.
    return tl.load(place, mask=_inside(first, length, WIDTH, ROWS, D), other=0.0)


@triton.jit
def store_rows(rows, values, batch, head, first, length, WIDTH, ROWS, D):
    """Store values [ROWS, D] to the elements that `load_rows` loads."""
    place = rows.data + _offsets(rows, batch, head, first, ROWS, D)
    tl.store(
        place, values.to(rows.data.dtype.element_ty), mask=_inside(first, length, WIDTH, ROWS, D)
    )


@triton.jit
def load_numbers(ptr, line, token, length):
    """Load the numbers of the tokens `token` from row `line` of a tensor [lines, length]; 0 from
    token `length` on."""
    return tl.load(ptr + line.to(tl.int64) * length + token, mask=token < length, other=0)


@triton.jit
def sees(place, token, begin, window):
    """[M, N] bool, whether the queries `token` [M], whose documents begin at `begin` [M], see the
    keys `place` [N]. `window`: size and sinks, see `AttentionWindow`; None: all of the document."""
    place = place[None, :]
    seen = (place <= token[:, None]) & (place >= begin[:, None])
    if window is not None:
        near = token[:, None] - place < window[0]
        seen = seen & (near | (place < begin[:, None] + window[1]))
    return seen


@triton.jit
def gap_of(first, begin, window, N):
    """Keys that no query from token `first` on sees, if its document begins at `begin`: the first
    one, a multiple of N, and their number, another one. Documents that begin later lie behind
    them."""
    low = (begin + window[1] + N - 1) // N * N
    near = tl.maximum(first + 1 - window[0], 0) // N * N
    return low, tl.maximum(near - low, 0)


@triton.jit
def row_dot(left, right):
    """Dot products of the rows of two tiles, [ROWS] fp32."""
    return tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
