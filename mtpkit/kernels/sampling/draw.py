# mypy: disable-error-code="no-untyped-def"
"""Drawing a token from weights by inverse CDF: what the samplers and the acceptance of drafts share.

A row is cut into chunks. One kernel sums the weights of each chunk, a second picks the chunk that a uniform number
falls into and then the token inside it, so that all but one chunk is read once.
"""

import triton
import triton.language as tl

from mtpkit.kernels import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)
CHUNK = 4096
"""Tokens of a row that a program takes; a vocabulary of 131072 is 32 programs a row."""


def chunk_size(vocab_size: int) -> int:
    """Tokens a program takes: `CHUNK`, or a small vocabulary whole."""
    return min(CHUNK, max(32, triton.next_power_of_2(vocab_size)))


@triton.jit
def first_above(weights, threshold, SIZE: tl.constexpr):
    """Index of the first positive one of weights [SIZE] float64 at which their sum so far exceeds `threshold`.

    A parallel sum need not grow from one token to the next, and the sum of all may round differently elsewhere: hence
    the test of the weight itself, and the last positive one where no sum exceeds the threshold.
    """
    index = tl.arange(0, SIZE)
    reached = (tl.cumsum(weights, 0) > threshold) & (weights > 0)
    first = tl.min(tl.where(reached, index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def pick_chunk(sums, uniform, SIZE: tl.constexpr):
    """The chunk that `uniform` falls into by the chunks' sums [SIZE] float64, and what is left of the threshold."""
    threshold = uniform * tl.sum(sums, 0)
    chunk = first_above(sums, threshold, SIZE)
    return chunk, threshold - tl.sum(tl.where(tl.arange(0, SIZE) < chunk, sums, 0.0), 0)


@triton.jit
def sum_chunks_kernel(weights, sums, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """sums [N, num_chunks] float64 of weights [N, V]."""
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
    """tokens [N] int64 drawn from weights [N, V] with their sums [N, num_chunks]; NO_TOKEN without a positive sum."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    parts = tl.load(sums + row * num_chunks + each, mask=each < num_chunks, other=0.0)
    chunk, threshold = pick_chunk(parts, tl.load(uniforms + row * uniform_stride), CHUNKS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(weights + row * row_stride + index, mask=index < vocab_size, other=0.0)
    token = chunk * CHUNK + first_above(w.to(tl.float64), threshold, CHUNK)
    tl.store(tokens + row, tl.where(tl.sum(parts, 0) > 0, token, _NO_TOKEN).to(tl.int64))
