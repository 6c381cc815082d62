"""The product of a quantised matrix with a single row in Triton, without tensor cores, since one
row would leave them idle.

Each program computes a few outputs. It loads the next block of their weights while it multiplies
the current one, and the first block before the previous kernel has ended.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import NARROW, Early, load, wait_for_previous
from mtpkit.kernels.linear.one_row import store_outputs
from mtpkit.kernels.quantized.codes import E2M1_UNIT, e2m1, int4
from mtpkit.kernels.quantized.product import constants, factor_of, scale_rows
from mtpkit.kernels.quantized.reference import INT4_ZERO, NOT_QUANTIZED, Inputs, Matrix

OUTPUTS = 4
"""Outputs per program."""
_BLOCK = {"e4m3": 512, "int4": 1024, "e2m1": 1024}
"""Columns at a time: half a kilobyte of a row of weights."""
_ZERO = tl.constexpr(128.0 + INT4_ZERO)


@triton.jit
def multiply_row(
    matrix,
    row_scales_ptr,
    expert,
    row,
    all_rows,
    x_ptr,
    x_scale_ptr,
    source,
    norm_ptr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply rows `row` [OUTPUTS] of the matrix [all_rows, WIDTH] of an expert by row `source` of
    x. SHARING neighbouring columns of a block share all scales. With EARLY, the function waits for
    the previous kernel.

    Returns:
        [OUTPUTS] fp32 with all scales, and the sum of the squares of x, if there is a norm.
    """
    values_ptr, scales_ptr, zeros_ptr = matrix
    rows = expert * all_rows + row
    scale_row = scale_rows(expert, row, all_rows, GROUP_ROWS)
    x_ptr += source * WIDTH
    PACK: tl.constexpr = 1 if CODES == "e4m3" else 4
    GROUPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    X_GROUPS: tl.constexpr = (WIDTH + X_COLUMNS - 1) // X_COLUMNS
    WHOLE: tl.constexpr = WIDTH % BLOCK == 0
    SCALED: tl.constexpr = GROUPS > 1
    COUNT: tl.constexpr = BLOCK // SHARING
    ITEMS: tl.constexpr = SHARING // PACK
    group = tl.arange(0, COUNT) * SHARING
    item = tl.arange(0, ITEMS)
    column = item if PACK == 1 else item // APART * (4 * APART) + item % APART
    # [COUNT, ITEMS], and the same of all outputs.
    columns = group[:, None] + column[None, :]
    items = (group // PACK)[:, None] + item[None, :]
    weight_ptrs = values_ptr + (rows * (WIDTH // PACK))[:, None, None] + items[None, :, :]
    scale_ptrs = scales_ptr + (scale_row * GROUPS)[:, None]
    # No earlier kernel of a step writes weights, so they need no wait.
    w = load(weight_ptrs, (items < WIDTH // PACK)[None, :, :], WHOLE)
    scale = tl.full([OUTPUTS, COUNT], 1.0, tl.float32)
    if SCALED:
        scale = load(scale_ptrs + (group // COLUMNS)[None, :], (group < WIDTH)[None, :], WHOLE)
        scale = scale.to(tl.float32)
    wait_for_previous(EARLY)
    product = tl.zeros([OUTPUTS, COUNT, ITEMS], tl.float32)
    squares = tl.zeros([COUNT, ITEMS], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        now = scale
        if CODES == "e4m3":
            numbers = (w.to(tl.float32),)
        elif CODES == "e2m1":
            unit = (now * E2M1_UNIT).to(OPERAND)
            numbers = e2m1(w, tl.broadcast_to(unit[:, :, None], [OUTPUTS, COUNT, ITEMS]), OPERAND)
        else:
            zero = tl.full([OUTPUTS, COUNT, ITEMS], _ZERO, OPERAND)
            if zeros_ptr is not None:
                points = load(
                    zeros_ptr + (rows * GROUPS)[:, None] + ((start + group) // COLUMNS)[None, :],
                    (start + group < WIDTH)[None, :],
                    WHOLE,
                )
                points = (points.to(tl.float32) + 128.0).to(OPERAND)
                zero = tl.broadcast_to(points[:, :, None], [OUTPUTS, COUNT, ITEMS])
            numbers = int4(w, zero, OPERAND)
        APART_SCALE: tl.constexpr = SCALED and CODES != "e2m1"
        term = tl.zeros([OUTPUTS, COUNT, ITEMS], tl.float32) if APART_SCALE else product
        for place in tl.static_range(PACK):
            k = start + columns + place * APART
            inside = k < WIDTH
            x = load(x_ptr + k, inside, WHOLE).to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                factor = load(norm_ptr + k, inside, WHOLE).to(tl.float32)
                x *= factor + 1.0 if ZERO_CENTERED else factor
            if X_COLUMNS < WIDTH:
                x_group = source * X_GROUPS + (start + group) // X_COLUMNS
                x_scale = load(x_scale_ptr + x_group, start + group < WIDTH, WHOLE)
                x *= x_scale[:, None]
            term += numbers[place].to(tl.float32) * x[None, :, :]
        product = product + term * now[:, :, None] if APART_SCALE else term
        following = start + BLOCK
        # The mask is False everywhere after the last block, and partial before it.
        w = tl.load(
            weight_ptrs + following // PACK,
            mask=(following // PACK + items < WIDTH // PACK)[None, :, :],
            other=0.0,
        )
        if SCALED:
            scale = tl.load(
                scale_ptrs + ((following + group) // COLUMNS)[None, :],
                mask=(following + group < WIDTH)[None, :],
                other=0.0,
            ).to(tl.float32)
    total = tl.sum(tl.sum(product, 2), 1)
    total *= factor_of(scales_ptr, row_scales_ptr, rows, scale_row, WIDTH, CODES, COLUMNS)
    if x_scale_ptr is not None and X_COLUMNS == WIDTH:
        total *= tl.load(x_scale_ptr + source)
    return total, tl.sum(tl.sum(squares, 1), 0)


def blocks_of(matrix: Matrix, inputs: Inputs) -> dict[str, Any]:
    """Constants of `multiply_row` for a matrix that `product.step_of` takes."""
    width = matrix.shape[-1]
    block = min(_BLOCK[matrix.codes], max(64, triton.next_power_of_2(width)))
    sizes = [matrix.group[1]]
    if inputs.rule == "group":
        sizes.append(inputs.columns)
    sharing = block
    while any(size < width and size % sharing for size in sizes):
        sharing //= 2
    return constants(matrix, inputs) | dict(BLOCK=block, SHARING=sharing)


@partial(Early, most=None)
@triton.jit
def _one_row_kernel(
    x_ptr,
    matrix,
    row_scales_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    RELU2: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute OUTPUTS outputs per program."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    result, squares = multiply_row(
        matrix,
        row_scales_ptr,
        0,
        # Outputs past the end repeat the last one, so that loads need no mask.
        tl.minimum(n, outputs - 1).to(tl.int64),
        outputs,
        x_ptr,
        None,
        0,
        norm_ptr,
        WIDTH,
        CODES,
        APART,
        GROUP_ROWS,
        COLUMNS,
        X_COLUMNS,
        ZERO_CENTERED,
        OUTPUTS,
        BLOCK,
        SHARING,
        OPERAND,
        EARLY,
    )
    if norm_ptr is not None:
        result *= tl.rsqrt(squares / WIDTH + eps)
    store_outputs(result, n, outputs, bias_ptr, residual_ptr, out_ptr, RELU2)


def one_row_linear(
    x: Tensor,
    matrix: Matrix,
    pointers: tuple[Tensor | None, ...],
    norm_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    bias: Tensor | None,
    relu2: bool,
    residual: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Compute `quantized_linear` of x [1, K], which is not quantised, without a gated norm; all
    rows must be contiguous."""
    outputs = out.shape[1]
    _one_row_kernel[(triton.cdiv(outputs, OUTPUTS),)](
        x,
        pointers,
        matrix.row_scales,
        norm_weight,
        bias,
        residual,
        out,
        outputs,
        eps,
        ZERO_CENTERED=zero_centered,
        RELU2=relu2,
        OUTPUTS=OUTPUTS,
        OPERAND=tl.float32 if out.dtype != torch.bfloat16 else NARROW,
        num_warps=1,
        **blocks_of(matrix, NOT_QUANTIZED),
    )
    return out
