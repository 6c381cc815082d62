"""Helpers for sampling and for the acceptance of drafts: weights of logits, integer keys, and draws
by inverse CDF.

A row is cut into chunks. One kernel sums the weights of each chunk; a second picks the chunk that a
uniform number falls into and then the token inside it, so that only that chunk is read twice.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Tokens per program; a vocabulary of 131072 takes 32 programs per row."""
LOG2_E = tl.constexpr(1.4426950408889634)


def chunk_size(vocab_size: int) -> int:
    """Tokens per program: `CHUNK`, or all of a smaller vocabulary."""
    return min(CHUNK, max(32, triton.next_power_of_2(vocab_size)))


class Logits(NamedTuple):
    """Logits and their statistics from one pass, as kernels take them."""

    data: Tensor
    """[N, V] with contiguous rows."""
    stride: int
    vocab_size: int
    num_chunks: int
    maxima: Tensor
    """[N, num_chunks] float32, largest logit of each chunk."""
    sums: Tensor
    """[N, num_chunks] float32, sum of each chunk's weights relative to its largest logit."""
    best: Tensor
    """[N, num_chunks] int32, best token of each chunk; only for greedy rows."""


@triton.jit
def weight_of(x, m, scale):
    """Weight of logit x in a row whose largest logit is m: its probability up to a factor."""
    return tl.exp2((x - m) * scale)


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature, bounded so that it is finite."""
    return tl.minimum(LOG2_E / temperature, 1e30)


@triton.jit
def has_token(m):
    """Whether a row with largest logit m is valid; NaN must have been replaced by +inf."""
    return tl.abs(m) < float("inf")


@triton.jit
def row_statistics(logits, row, scale, CHUNKS):
    """The row's largest logit m, and each chunk's sum of weights [CHUNKS].

    The chunks' sums are products. If the compiler fuses such a product with the first addition of a
    sum over threads, the threads of a program get totals that differ in the last bits. A kernel
    that branches on a total is therefore compiled without fusion, so that all its threads take the
    same branch.
    """
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < logits.num_chunks
    place = row * logits.num_chunks + chunk
    each = tl.load(logits.maxima + place, mask=inside, other=float("-inf"))
    m = tl.max(each, 0)
    return m, tl.load(logits.sums + place, mask=inside, other=0.0) * weight_of(each, m, scale)


@triton.jit
def key_of(x):
    """Integer key of the float x; keys have the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """The float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bisect(x, measure, above, target, low, high, RESOLUTION):
    """Largest key in [low, high) for which `above` plus the `measure` of all x >= the key reaches
    the target; low if none does."""
    while low + RESOLUTION < high:
        middle = (low + high) // 2
        if above + tl.sum(tl.where(x >= value_of(middle), measure, 0.0), 0) >= target:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def first_above(weights, threshold, SIZE):
    """Index of the first positive weight of weights [SIZE] float64 at which the cumulative sum
    exceeds `threshold`; of the last positive weight if no sum does.

    Both rules guard against rounding: a parallel cumulative sum need not increase from one token to
    the next, and the total that the threshold was computed from may differ in the last bits.
    """
    index = tl.arange(0, SIZE)
    reached = (tl.cumsum(weights, 0) > threshold) & (weights > 0)
    first = tl.min(tl.where(reached, index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def pick_chunk(sums, uniform, SIZE):
    """The chunk that `uniform` falls into, by the chunks' sums [SIZE] float64, and the threshold
    inside that chunk."""
    threshold = uniform * tl.sum(sums, 0)
    chunk = first_above(sums, threshold, SIZE)
    return chunk, threshold - tl.sum(tl.where(tl.arange(0, SIZE) < chunk, sums, 0.0), 0)
