# mypy: disable-error-code="no-untyped-def"
"""Draw tokens from weights by inverse CDF, for the samplers and for the acceptance of drafts.

A row is cut into chunks. One kernel sums the weights of each chunk; a second picks the chunk that a uniform number
falls into and then the token inside it, so that only that chunk is read twice.
"""

import triton
import triton.language as tl

from mtpkit.kernels import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)
CHUNK = 4096
"""Tokens per program; a vocabulary of 131072 takes 32 programs per row."""


def chunk_size(vocab_size: int) -> int:
    """Tokens per program: `CHUNK`, or all of a smaller vocabulary."""
    return min(CHUNK, max(32, triton.next_power_of_2(vocab_size)))


@triton.jit
def first_above(weights, threshold, SIZE: tl.constexpr):
    """Index of the first positive weight of weights [SIZE] float64 at which the cumulative sum exceeds `threshold`; of
    the last positive weight if no sum does.

    Both rules guard against rounding: a parallel cumulative sum need not increase from one token to the next, and the
    total that the threshold was computed from may differ in the last bits.
    """
    index = tl.arange(0, SIZE)
    reached = (tl.cumsum(weights, 0) > threshold) & (weights > 0)
    first = tl.min(tl.where(reached, index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def pick_chunk(sums, uniform, SIZE: tl.constexpr):
    """The chunk that `uniform` falls into, by the chunks' sums [SIZE] float64, and the threshold inside that chunk."""
    threshold = uniform * tl.sum(sums, 0)
    chunk = first_above(sums, threshold, SIZE)
    return chunk, threshold - tl.sum(tl.where(tl.arange(0, SIZE) < chunk, sums, 0.0), 0)


@triton.jit
def sum_chunks_kernel(weights, sums, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """Store sums [N, num_chunks] float64 of weights [N, V]."""
    row, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(weights + row.to(tl.int64) * row_stride + index, mask=index < vocab_size, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(w.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=["uniforms"])
def draw_kernel(
    weights,
    sums,
    uniforms,
    uniform_stride,
    tokens,
    row_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw tokens [N] int64 from weights [N, V] with sums [N, num_chunks]; NO_TOKEN if no sum is positive."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    parts = tl.load(sums + row * num_chunks + each, mask=each < num_chunks, other=0.0)
    chunk, threshold = pick_chunk(parts, tl.load(uniforms + row * uniform_stride), CHUNKS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(weights + row * row_stride + index, mask=index < vocab_size, other=0.0)
    token = chunk * CHUNK + first_above(w.to(tl.float64), threshold, CHUNK)
    tl.store(tokens + row, tl.where(tl.sum(parts, 0) > 0, token, _NO_TOKEN).to(tl.int64))
