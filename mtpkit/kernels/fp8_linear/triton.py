# mypy: disable-error-code="no-untyped-def"
"""Linears in fp8: a Triton kernel quantises with one program per row; torch picks cuBLAS or CUTLASS for the product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import as_rows
from mtpkit.kernels.fp8_linear.reference import FP8, FP8_MAX


@triton.jit
def _quantize_kernel(x, values, scales, width, stride, MAX: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    entry = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(entry), 0), MAX)
    scale = tl.where(scale > 0, scale, 1.0)
    scaled = tl.minimum(tl.maximum(tl.div_rn(entry, scale), -MAX), MAX)
    tl.store(values + row * width + column, scaled.to(values.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    rows = as_rows(x)
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(rows.shape[1])
    warps = min(16, max(1, block // 512))
    _quantize_kernel[(len(rows),)](
        rows, values, scales, rows.shape[1], rows.stride(0), MAX=FP8_MAX, BLOCK=block, num_warps=warps
    )
    return values, scales


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """See the reference. x must be bf16; in and out must be multiples of 16."""
    values, rows = quantize_rows(x)
    return torch._scaled_mm(values, weight.t(), rows, scale.t(), out_dtype=x.dtype, use_fast_accum=True)
