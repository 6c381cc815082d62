# mypy: disable-error-code="no-untyped-def"
"""Device functions that the kernels of both updates share."""

import triton
import triton.language as tl


@triton.jit
def step_size(raw, bias, low, high):
    """Compute clamp(softplus(raw + bias)) in fp32. The logarithm is the series of 2 artanh(s), s = u / (2 + u) <= 1/3,
    since the device's approximate logarithm loses small step sizes."""
    v = raw.to(tl.float32) + bias
    u = tl.exp(-tl.abs(v))
    s = u / (2.0 + u)
    q = s * s
    series = 1 / 11 + q * (1 / 13 + q * (1 / 15))
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series))))
    return tl.minimum(tl.maximum(tl.maximum(v, 0.0) + 2.0 * s * series, low), high)


@triton.jit
def halves(a, NARROW: tl.constexpr):
    """Split fp32 numbers into sums of two bf16 numbers, exact to 2^-16. The first is truncated, which is cheaper than
    rounding."""
    high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16).to(NARROW), (a - high).to(tl.bfloat16).to(NARROW)


@triton.jit
def dot(a, b, NARROW: tl.constexpr):
    """Compute a @ b in fp32. With NARROW, one operand is bf16 or was converted from it; the other may be fp32."""
    if NARROW is None:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        high, rest = halves(a, NARROW)
        return tl.dot(rest, b.to(NARROW), tl.dot(high, b.to(NARROW)))
    elif b.dtype == tl.float32:
        high, rest = halves(b, NARROW)
        return tl.dot(a.to(NARROW), rest, tl.dot(a.to(NARROW), high))
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW))


@triton.jit
def load(ptrs, mask, WHOLE: tl.constexpr):
    """Load, zero where `mask` is False; WHOLE: it is True everywhere."""
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def places(slots_ptr, contexts_ptr, lens_ptr, row, e, t, LENGTH: tl.constexpr):
    """Slot of a row, its number of committed entries, and the ring indices of its old entries and new tokens."""
    slot = tl.load(slots_ptr + row)
    context, count = tl.load(contexts_ptr + row), tl.load(lens_ptr + row)
    # Padding rows may have fewer positions than entries; the places must still not be negative.
    old = slot * LENGTH + (((context - count) % LENGTH).to(tl.int32) + LENGTH + e) % LENGTH
    new = slot * LENGTH + ((context % LENGTH).to(tl.int32) + t) % LENGTH
    return slot, count, old, new


def largest_divisor(number: int, limit: int) -> int:
    """The largest power of two that divides `number` and is at most `limit`."""
    return min(number & -number, limit)
