# mypy: disable-error-code="no-untyped-def"
"""Logits as weights and as keys: small device functions that the sampling kernels share."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def weight_of(x, m, scale):
    """Weight of logit x in a row whose largest is m: its probability but for a factor."""
    return tl.exp2((x - m) * scale)


@triton.jit
def scale_of(temperature):
    """log2(e) / temperature, finite."""
    return tl.minimum(LOG2_E / temperature, 1e30)


@triton.jit
def has_token(m):
    """Whether a token can be taken from a row whose largest logit is m; NaN counts as +inf."""
    return tl.abs(m) < float("inf")


@triton.jit
def row_statistics(maxima, sums, row, scale, num_chunks, CHUNKS: tl.constexpr):
    """The row's largest logit m, and each chunk's sum of weights [CHUNKS].

    They are products. Where a multiply and the first add of a sum over threads are fused, each thread rounds its own
    product's part alone, and the threads of a program get sums that differ in the last bits. A kernel that branches on
    a sum is therefore compiled without fusion: its threads have to take the same way.
    """
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    each = tl.load(maxima + row * num_chunks + chunk, mask=inside, other=float("-inf"))
    m = tl.max(each, 0)
    return m, tl.load(sums + row * num_chunks + chunk, mask=inside, other=0.0) * weight_of(each, m, scale)


@triton.jit
def key_of(x):
    """Integer in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """The float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bisect(x, measure, above, target, low, high, RESOLUTION: tl.constexpr):
    """Largest key in [low, high) at which `above` and the `measure` of x >= it reach the target; low if none does."""
    while low + RESOLUTION < high:
        middle = (low + high) // 2
        if above + tl.sum(tl.where(x >= value_of(middle), measure, 0.0), 0) >= target:
            low = middle
        else:
            high = middle
    return low
