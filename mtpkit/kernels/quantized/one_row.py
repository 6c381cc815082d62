"""The product of a matrix of e4m3 with a single row of bf16 in Triton, without tensor cores, since
one row would leave them idle.

Each program computes a few outputs. It loads the next block of their weights while it multiplies
the current one, and the first block before the previous kernel has ended.
"""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, load, wait_for_previous
from mtpkit.kernels.linear.one_row import store_outputs
from mtpkit.kernels.quantized.product import factor_of, scale_rows
from mtpkit.kernels.quantized.reference import Matrix

_OUTPUTS = 4
"""Outputs per program."""
_BLOCK = 512
"""Columns at a time."""


@partial(Early, most=None)
@triton.jit
def _one_row_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    row_scales_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    WIDTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    RELU2: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute OUTPUTS outputs per program. SHARING neighbouring columns of a block share a
    scale."""
    WHOLE: tl.constexpr = WIDTH % BLOCK == 0
    GROUPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    SCALED: tl.constexpr = GROUPS > 1
    COUNT: tl.constexpr = BLOCK // SHARING
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Outputs past the end repeat the last one, so that loads need no mask.
    rows = tl.minimum(n, outputs - 1).to(tl.int64)
    scale_row = scale_rows(0, rows, outputs, GROUP_ROWS)
    group = tl.arange(0, COUNT) * SHARING
    # [COUNT, SHARING]
    columns = group[:, None] + tl.arange(0, SHARING)[None, :]
    weight_ptrs = values_ptr + (rows * WIDTH)[:, None, None] + columns[None, :, :]
    scale_ptrs = scales_ptr + (scale_row * GROUPS)[:, None]
    # No earlier kernel of a step writes weights, so they need no wait.
    w = load(weight_ptrs, (columns < WIDTH)[None, :, :], WHOLE)
    scale = tl.full([OUTPUTS, COUNT], 1.0, tl.float32)
    if SCALED:
        scale = load(scale_ptrs + (group // COLUMNS)[None, :], (group < WIDTH)[None, :], WHOLE)
        scale = scale.to(tl.float32)
    wait_for_previous(EARLY)

    product = tl.zeros([OUTPUTS, COUNT, SHARING], tl.float32)
    squares = tl.zeros([COUNT, SHARING], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + columns < WIDTH
        x = load(x_ptr + start + columns, inside, WHOLE).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            factor = load(norm_ptr + start + columns, inside, WHOLE).to(tl.float32)
            x *= factor + 1.0 if ZERO_CENTERED else factor
        term = w.to(tl.float32) * x[None, :, :]
        product += term * scale[:, :, None] if SCALED else term
        following = start + BLOCK
        # The mask is False everywhere after the last block, and partial before it.
        w = tl.load(
            weight_ptrs + following, mask=(following + columns < WIDTH)[None, :, :], other=0.0
        )
        if SCALED:
            scale = tl.load(
                scale_ptrs + ((following + group) // COLUMNS)[None, :],
                mask=(following + group < WIDTH)[None, :],
                other=0.0,
            ).to(tl.float32)

    result = tl.sum(tl.sum(product, 2), 1)
    result *= factor_of(scales_ptr, row_scales_ptr, rows, scale_row, WIDTH, "e4m3", COLUMNS)
    if norm_ptr is not None:
        result *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / WIDTH + eps)
    store_outputs(result, n, outputs, bias_ptr, residual_ptr, out_ptr, RELU2)


def one_row_linear(
    x: Tensor,
    matrix: Matrix,
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
    outputs, width = matrix.shape
    columns = min(width, matrix.group[1])
    block = min(_BLOCK, max(64, triton.next_power_of_2(width)))
    sharing = block
    while columns < width and columns % sharing:
        sharing //= 2
    _one_row_kernel[(triton.cdiv(outputs, _OUTPUTS),)](
        x,
        matrix.values,
        matrix.scales,
        matrix.row_scales,
        norm_weight,
        bias,
        residual,
        out,
        outputs,
        eps,
        WIDTH=width,
        GROUP_ROWS=matrix.group[0],
        COLUMNS=columns,
        ZERO_CENTERED=zero_centered,
        RELU2=relu2,
        OUTPUTS=_OUTPUTS,
        BLOCK=block,
        SHARING=sharing,
        num_warps=1,
    )
    return out
