# mypy: disable-error-code="no-untyped-def"
"""Kernels around the cut: statistics of the logits before it, probabilities or a draw after it.

`draw_logits_kernel` has one program per row, the others one per chunk of a row. Rows of temperature 0 take their best
token.
"""

import triton
import triton.language as tl

from mtpkit.kernels import NO_TOKEN
from mtpkit.kernels.sampling.draw import first_above, pick_chunk
from mtpkit.kernels.sampling.weights import has_token, row_statistics, scale_of, weight_of

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def statistics_kernel(
    logits,
    row_stride,
    temperature,
    maxima,
    sums,
    best,
    heads,
    vocab_size,
    num_chunks,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store each chunk's largest logit, and the sum of its weights relative to that, or in a greedy row its best token.

    With HEADS, also store the largest logit of each group. NaN is replaced by +inf, so that a row's largest logit tells
    without another pass whether the row is valid.
    """
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    place = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, CHUNK // GROUP)
    index = chunk * CHUNK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * row_stride + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    head = tl.max(x, 1)
    m = tl.max(head, 0)
    if HEADS:
        tl.store(heads + place * (CHUNK // GROUP) + group, head)
    tl.store(maxima + place, m)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        tl.store(best + place, tl.min(tl.min(tl.where(x == m, index, vocab_size - 1), 1), 0))
    else:
        # A chunk of -inf alone has weight 0.
        w = tl.where(x > float("-inf"), weight_of(x, m, scale_of(heat)), 0.0)
        tl.store(sums + place, tl.sum(tl.sum(w, 1), 0))


@triton.jit
def _best_token(maxima, best, row, vocab_size, num_chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    each = tl.load(maxima + row * num_chunks + chunk, mask=inside, other=float("-inf"))
    index = tl.load(best + row * num_chunks + chunk, mask=inside, other=0)
    m = tl.max(each, 0)
    return tl.where(has_token(m), tl.min(tl.where(inside & (each == m), index, vocab_size - 1), 0), _NO_TOKEN)


@triton.jit
def _kept_weights(x, index, row, m, scale, cut_t, cut_last):
    t, last = tl.load(cut_t + row), tl.load(cut_last + row)
    return tl.where((x > t) | ((x == t) & (index <= last)), weight_of(x, m, scale), 0.0)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def probabilities_kernel(
    logits,
    row_stride,
    temperature,
    maxima,
    sums,
    best,
    cut_t,
    cut_last,
    cut_weight,
    probs,
    vocab_size,
    num_chunks,
    CUT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store probs [N, V] of the kept tokens; NaN in invalid rows."""
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < vocab_size
    out = probs + row * vocab_size + index
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        token = _best_token(maxima, best, row, vocab_size, num_chunks, CHUNKS)
        p = tl.where(index == token, 1.0, 0.0)
        tl.store(out, tl.where(token == _NO_TOKEN, float("nan"), p), mask=inside)
    else:
        scale = scale_of(heat)
        m, parts = row_statistics(maxima, sums, row, scale, num_chunks, CHUNKS)
        x = tl.load(logits + row * row_stride + index, mask=inside, other=float("-inf")).to(tl.float32)
        if CUT:
            w = _kept_weights(x, index, row, m, scale, cut_t, cut_last)
            total = tl.load(cut_weight + row)
        else:
            w = weight_of(x, m, scale)
            total = tl.sum(parts, 0)
        tl.store(out, tl.where(has_token(m), w * (1 / total), float("nan")), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def kept_sums_kernel(
    logits,
    row_stride,
    temperature,
    maxima,
    sums,
    cut_t,
    cut_last,
    tokens,
    kept_sums,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store kept_sums [N, num_chunks] float64, the weight of each chunk's kept tokens, for rows without a token yet."""
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    if tl.load(tokens + row) >= 0:
        return
    heat = tl.load(temperature + row).to(tl.float32)
    if heat == 0:
        return
    scale = scale_of(heat)
    m, parts = row_statistics(maxima, sums, row, scale, num_chunks, CHUNKS)
    if not has_token(m):  # such a row has no cut
        return
    if tl.load(cut_t + row) == float("-inf"):  # all tokens are kept
        kept = tl.sum(tl.where(tl.arange(0, CHUNKS) == chunk, parts, 0.0), 0).to(tl.float64)
    else:
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * row_stride + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        kept = tl.sum(_kept_weights(x, index, row, m, scale, cut_t, cut_last).to(tl.float64), 0)
    tl.store(kept_sums + row * num_chunks + chunk, kept)


@triton.jit(do_not_specialize_on_alignment=["temperature", "uniforms"])
def draw_logits_kernel(
    logits,
    row_stride,
    temperature,
    maxima,
    sums,
    best,
    cut_t,
    cut_last,
    kept_sums,
    uniforms,
    uniform_stride,
    tokens,
    vocab_size,
    num_chunks,
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
        tl.store(tokens + row, _best_token(maxima, best, row, vocab_size, num_chunks, CHUNKS).to(tl.int64))
        return
    scale = scale_of(heat)
    m, parts = row_statistics(maxima, sums, row, scale, num_chunks, CHUNKS)
    if not has_token(m):
        tl.store(tokens + row, _NO_TOKEN)
        return
    each = tl.arange(0, CHUNKS)
    if CUT:
        weights = tl.load(kept_sums + row * num_chunks + each, mask=each < num_chunks, other=0.0)
    else:
        weights = parts.to(tl.float64)
    chunk, threshold = pick_chunk(weights, tl.load(uniforms + row * uniform_stride), CHUNKS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    w = _kept_weights(x, index, row, m, scale, cut_t, cut_last) if CUT else weight_of(x, m, scale)
    tl.store(tokens + row, (chunk * CHUNK + first_above(w.to(tl.float64), threshold, CHUNK)).to(tl.int64))
