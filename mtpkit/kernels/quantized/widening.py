"""Quantised matrices in bf16 again, in Triton, for products of so many rows that tensor cores and
not the memory are what they wait for."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import load
from mtpkit.kernels.quantized.codes import E2M1_UNIT, e2m1, int4
from mtpkit.kernels.quantized.product import factor_of, pointers, scale_rows
from mtpkit.kernels.quantized.reference import INT4_ZERO, Matrix

_ROWS = 32
_COLUMNS = 128
"""Elements per program."""
_ZERO = tl.constexpr(128.0 + INT4_ZERO)


@triton.jit
def _widen_kernel(
    matrix,
    row_scales_ptr,
    out_ptr,
    outputs,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Widen BLOCK_N rows and BLOCK_K columns per program. Groups have whole quads."""
    values_ptr, scales_ptr, zeros_ptr = matrix
    PACK: tl.constexpr = 1 if CODES == "e4m3" else 4
    ITEMS: tl.constexpr = BLOCK_K // PACK
    GROUPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last one, so that loads need no mask.
    rows = tl.minimum(n, outputs - 1).to(tl.int64)
    scale_row = scale_rows(0, rows, outputs, GROUP_ROWS)
    start = tl.program_id(1) * BLOCK_K
    item = start // PACK + tl.arange(0, ITEMS)
    inside = (item < WIDTH // PACK)[None, :]
    WHOLE: tl.constexpr = WIDTH % BLOCK_K == 0
    w = load(values_ptr + rows[:, None] * (WIDTH // PACK) + item[None, :], inside, WHOLE)
    # The first column of each item's codes; the others are in the same group.
    column = item if PACK == 1 else item // APART * (4 * APART) + item % APART
    group = (column // COLUMNS)[None, :]
    scale = tl.full([BLOCK_N, ITEMS], 1.0, tl.float32)
    if GROUPS > 1:
        places = scales_ptr + (scale_row * GROUPS)[:, None] + group
        scale = load(places, inside, WHOLE).to(tl.float32)
    if CODES == "e4m3":
        wide = w.to(tl.float32) * scale
    else:
        if CODES == "e2m1":
            numbers = e2m1(w, scale * E2M1_UNIT, tl.float32)
        else:
            zero = tl.full([BLOCK_N, ITEMS], _ZERO, tl.float32)
            if zeros_ptr is not None:
                points = load(zeros_ptr + (rows * GROUPS)[:, None] + group, inside, WHOLE)
                zero = points.to(tl.float32) + 128.0
            numbers = int4(w, zero, tl.float32)
            numbers = (
                numbers[0] * scale,
                numbers[1] * scale,
                numbers[2] * scale,
                numbers[3] * scale,
            )
        # [BLOCK_N, quads, APART, 2, 2], where the last two count in fours
        wide = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
        wide = tl.reshape(wide, [BLOCK_N, ITEMS // APART, APART, 4])
        wide = tl.reshape(tl.permute(wide, [0, 1, 3, 2]), [BLOCK_N, BLOCK_K])
    wide *= factor_of(scales_ptr, row_scales_ptr, rows, scale_row, WIDTH, CODES, COLUMNS)[:, None]
    k = start + tl.arange(0, BLOCK_K)
    mask = (n < outputs)[:, None] & (k < WIDTH)[None, :]
    places = out_ptr + rows[:, None] * WIDTH + k[None, :]
    tl.store(places, wide.to(out_ptr.dtype.element_ty), mask=mask)


def widened(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """`widen` of a matrix [N, K] that `product.step_of` takes."""
    outputs, width = matrix.shape
    out = torch.empty(outputs, width, dtype=dtype, device=matrix.values.device)
    _widen_kernel[(triton.cdiv(outputs, _ROWS), triton.cdiv(width, _COLUMNS))](
        pointers(matrix),
        matrix.row_scales,
        out,
        outputs,
        WIDTH=width,
        CODES=matrix.codes,
        APART=matrix.apart,
        GROUP_ROWS=matrix.group[0],
        COLUMNS=min(width, matrix.group[1]),
        BLOCK_N=_ROWS,
        BLOCK_K=_COLUMNS,
    )
    return out
