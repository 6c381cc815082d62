"""Linear layer of a single row in Triton, without tensor cores, since one row would leave them
idle.

Each program computes a few outputs. It loads the next block of their weights while it multiplies
the current one, and the first block before the previous kernel has ended.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, load, wait_for_previous

_OUTPUTS = 4
"""Outputs per program."""
_BLOCKS = (512, 256)
"""Choices of input channels per block, of which the largest that divides the number of channels is
taken; if none does, the last block of 512 is cut off."""


@triton.jit
def store_outputs(result, n, outputs, bias_ptr, residual_ptr, out_ptr, RELU2):
    """Store outputs `n` [N] of one row after bias, activation and residual."""
    real = n < outputs
    if bias_ptr is not None:
        result += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
    if RELU2:
        result = tl.where(result < 0, 0.0, result * result)  # tl.maximum would turn a NaN into 0
    if residual_ptr is not None:
        result += tl.load(residual_ptr + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=real)


@partial(Early, most=None)
@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    weight_stride,
    WIDTH: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    RELU2: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute OUTPUTS outputs per program."""
    NORMED: tl.constexpr = norm_ptr is not None
    WHOLE: tl.constexpr = WIDTH % BLOCK == 0
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    # Outputs past the end repeat the last one, so that loads need no mask.
    weight_ptrs = (
        weight_ptr + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]
    )
    # No earlier kernel of a step writes weights, so they need no wait.
    weight = load(weight_ptrs, (k < WIDTH)[None, :], WHOLE)
    wait_for_previous(EARLY)
    product = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + k < WIDTH
        x = load(x_ptr + start + k, inside, WHOLE).to(tl.float32)
        if NORMED:
            squares += x * x
            factor = load(norm_ptr + start + k, inside, WHOLE).to(tl.float32)
            x *= factor + 1.0 if ZERO_CENTERED else factor
        product += weight.to(tl.float32) * x[None, :]
        left = start + BLOCK < WIDTH if WHOLE else (start + BLOCK + k < WIDTH)[None, :]
        weight = tl.load(weight_ptrs + start + BLOCK, mask=left, other=0.0)
    result = tl.sum(product, 1)
    if NORMED:
        result *= tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    store_outputs(result, n, outputs, bias_ptr, residual_ptr, out_ptr, RELU2)


def one_row_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    bias: Tensor | None,
    relu2: bool,
    residual: Tensor | None,
) -> Tensor:
    """Compute `linear` of x [1, K] without a gated norm; all rows must be contiguous."""
    outputs, width = weight.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(outputs, _OUTPUTS),)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        outputs,
        eps,
        weight.stride(0),
        WIDTH=width,
        ZERO_CENTERED=zero_centered,
        RELU2=relu2,
        OUTPUTS=_OUTPUTS,
        BLOCK=next((block for block in _BLOCKS if width % block == 0), _BLOCKS[0]),
        num_warps=1,
    )
    return out
