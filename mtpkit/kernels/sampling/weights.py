# mypy: disable-error-code="no-untyped-def"
"""Device functions that the sampling kernels share: logits as weights, and as integer keys in the same order."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
    """Whether a row with largest logit m is valid, where NaN was replaced by +inf."""
    return tl.abs(m) < float("inf")


@triton.jit
def row_statistics(maxima, sums, row, scale, num_chunks, CHUNKS: tl.constexpr):
    """The row's largest logit m, and each chunk's sum of weights [CHUNKS].

    The sums are products. If the compiler fuses such a product with the first addition of a sum over threads, the
    threads of a program get totals that differ in the last bits. A kernel that branches on a total is therefore
    compiled without fusion, so that all its threads take the same branch.
    """
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    each = tl.load(maxima + row * num_chunks + chunk, mask=inside, other=float("-inf"))
    m = tl.max(each, 0)
    return m, tl.load(sums + row * num_chunks + chunk, mask=inside, other=0.0) * weight_of(each, m, scale)


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
def bisect(x, measure, above, target, low, high, RESOLUTION: tl.constexpr):
    """Largest key in [low, high) for which `above` plus the `measure` of all x >= the key reaches the target; low if
    none does."""
    while low + RESOLUTION < high:
        middle = (low + high) // 2
        if above + tl.sum(tl.where(x >= value_of(middle), measure, 0.0), 0) >= target:
            low = middle
        else:
            high = middle
    return low
