# mypy: disable-error-code="no-untyped-def"
"""The activations in Triton, computed in fp32 and rounded once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import as_rows

BLOCK, NUM_WARPS = 1024, 4
"""Eight elements a thread: one 16-byte access each way in bf16."""


@triton.jit
def _relu2_kernel(x, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    # Not tl.maximum, which would turn a NaN into 0.
    result = tl.where(value < 0, 0.0, value * value)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=place < size)


@triton.jit
def _swiglu_kernel(x, out, width, stride, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * value).to(out.dtype.element_ty), mask=mask)


def relu2(x: Tensor) -> Tensor:
    """See the reference."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _relu2_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def swiglu(x: Tensor) -> Tensor:
    """See the reference."""
    rows, width = as_rows(x), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(width, BLOCK)
    _swiglu_kernel[(len(rows) * blocks,)](rows, out, width, rows.stride(0), blocks, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out
