"""Kernels around the cut: statistics of the logits before it, probabilities or a draw after it; and
draws from weights.

The two kernels that draw have one program per row, the others one per chunk of a row. Rows of
temperature 0 take their best token.
"""

import triton
import triton.language as tl

from mtpkit.kernels.device import NO_TOKEN
from mtpkit.kernels.sampling.weights import (
    first_above,
    has_token,
    pick_chunk,
    row_statistics,
    scale_of,
    weight_of,
)


@triton.jit
def _row_and_chunk(num_chunks):
    return (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks


@triton.jit
def _load(logits, row, index):
    """Load the logits of the tokens `index` of a row in fp32; -inf past the vocabulary."""
    place = logits.data + row * logits.stride + index
    return tl.load(place, mask=index < logits.vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def statistics_kernel(
    logits, temperature, heads, HEADS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr
):
    """Store each chunk's largest logit, and the sum of its weights relative to that logit.

    In a greedy row, store the chunk's best token in place of the sum. With HEADS, also store the
    largest logit of each group. NaN is replaced by +inf, so that a row's largest logit tells
    without another pass whether the row is valid.
    """
    row, chunk = _row_and_chunk(logits.num_chunks)
    place = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, CHUNK // GROUP)
    index = chunk * CHUNK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load(logits, row, index)
    x = tl.where(x == x, x, float("inf"))
    head = tl.max(x, 1)
    m = tl.max(head, 0)
    if HEADS:
        tl.store(heads + place * (CHUNK // GROUP) + group, head)
    tl.store(logits.maxima + place, m)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        tl.store(
            logits.best + place,
            tl.min(tl.min(tl.where(x == m, index, logits.vocab_size - 1), 1), 0),
        )
    else:
        # A chunk of -inf alone has weight 0.
        w = tl.where(x > float("-inf"), weight_of(x, m, scale_of(heat)), 0.0)
        tl.store(logits.sums + place, tl.sum(tl.sum(w, 1), 0))


@triton.jit
def _best_token(logits, row, CHUNKS):
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < logits.num_chunks
    each = tl.load(
        logits.maxima + row * logits.num_chunks + chunk, mask=inside, other=float("-inf")
    )
    index = tl.load(logits.best + row * logits.num_chunks + chunk, mask=inside, other=0)
    m = tl.max(each, 0)
    return tl.where(
        has_token(m),
        tl.min(tl.where(inside & (each == m), index, logits.vocab_size - 1), 0),
        NO_TOKEN,
    )


@triton.jit
def _kept_weights(x, index, row, m, scale, cut):
    t = tl.load(cut.t + row)
    last = tl.load(cut.last + row)
    return tl.where((x > t) | ((x == t) & (index <= last)), weight_of(x, m, scale), 0.0)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def probabilities_kernel(
    logits, temperature, cut, probs, CUT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Store probs [N, V] of the kept tokens; NaN in invalid rows."""
    row, chunk = _row_and_chunk(logits.num_chunks)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < logits.vocab_size
    out = probs + row * logits.vocab_size + index
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        token = _best_token(logits, row, CHUNKS)
        p = tl.where(index == token, 1.0, 0.0)
        tl.store(out, tl.where(token == NO_TOKEN, float("nan"), p), mask=inside)
    else:
        scale = scale_of(heat)
        m, parts = row_statistics(logits, row, scale, CHUNKS)
        x = _load(logits, row, index)
        if CUT:
            w = _kept_weights(x, index, row, m, scale, cut)
            total = tl.load(cut.weight + row)
        else:
            w = weight_of(x, m, scale)
            total = tl.sum(parts, 0)
        tl.store(out, tl.where(has_token(m), w * (1 / total), float("nan")), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def kept_sums_kernel(
    logits, temperature, cut, tokens, kept_sums, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Store kept_sums [N, num_chunks] float64, the weight of each chunk's kept tokens, for rows
    without a token yet."""
    row, chunk = _row_and_chunk(logits.num_chunks)
    if tl.load(tokens + row) >= 0:
        return
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        return
    scale = scale_of(heat)
    m, parts = row_statistics(logits, row, scale, CHUNKS)
    if not has_token(m):  # such a row has no cut
        return
    if tl.load(cut.t + row) == float("-inf"):  # all tokens are kept
        kept = tl.sum(tl.where(tl.arange(0, CHUNKS) == chunk, parts, 0.0), 0).to(tl.float64)
    else:
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load(logits, row, index)
        kept = tl.sum(_kept_weights(x, index, row, m, scale, cut).to(tl.float64), 0)
    tl.store(kept_sums + row * logits.num_chunks + chunk, kept)


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniforms"])
def draw_logits_kernel(
    logits,
    temperature,
    cut,
    kept,
    uniforms,
    stride,
    tokens,
    CUT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw tokens [N] int64 for rows without a token yet; NO_TOKEN for invalid rows."""
    row = tl.program_id(0).to(tl.int64)
    if CUT and tl.load(tokens + row) >= 0:
        return
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        tl.store(tokens + row, _best_token(logits, row, CHUNKS).to(tl.int64))
        return
    scale = scale_of(heat)
    m, parts = row_statistics(logits, row, scale, CHUNKS)
    if not has_token(m):
        tl.store(tokens + row, NO_TOKEN)
        return
    each = tl.arange(0, CHUNKS)
    if CUT:
        weights = tl.load(
            kept + row * logits.num_chunks + each, mask=each < logits.num_chunks, other=0.0
        )
    else:
        weights = parts.to(tl.float64)
    chunk, threshold = pick_chunk(weights, tl.load(uniforms + row * stride), CHUNKS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(logits, row, index)
    w = _kept_weights(x, index, row, m, scale, cut) if CUT else weight_of(x, m, scale)
    tl.store(
        tokens + row, (chunk * CHUNK + first_above(w.to(tl.float64), threshold, CHUNK)).to(tl.int64)
    )


@triton.jit
def sum_chunks_kernel(parts, sums, CHUNK: tl.constexpr):
    """Store sums [N, num_chunks] float64 of weights [N, V]; parts: weights, their row stride, V,
    num_chunks."""
    weights, row_stride, vocab_size, num_chunks = parts
    row = tl.program_id(0) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(weights + row.to(tl.int64) * row_stride + index, mask=index < vocab_size, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(w.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=["uniforms"])
def draw_kernel(
    parts, sums, uniforms, uniform_stride, tokens, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Draw tokens [N] int64 given the parts and sums of `sum_chunks_kernel`; NO_TOKEN if no sum is
    positive."""
    weights, row_stride, vocab_size, num_chunks = parts
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, CHUNKS)
    masses = tl.load(sums + row * num_chunks + each, mask=each < num_chunks, other=0.0)
    chunk, threshold = pick_chunk(masses, tl.load(uniforms + row * uniform_stride), CHUNKS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    w = tl.load(weights + row * row_stride + index, mask=index < vocab_size, other=0.0)
    token = chunk * CHUNK + first_above(w.to(tl.float64), threshold, CHUNK)
    tl.store(tokens + row, tl.where(tl.sum(masses, 0) > 0, token, NO_TOKEN).to(tl.int64))
