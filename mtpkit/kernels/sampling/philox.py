"""Counter-based random numbers in Triton, for all kernels that draw."""

import triton
import triton.language as tl


@triton.jit
def philox(key0, key1, c0, c1, c2, c3):
    """Compute Philox4x32-10 as the twin does: four 32-bit words from the halves of a key and the
    four words of a counter, all uint32."""
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = right.to(tl.uint32)
        c3 = left.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3
