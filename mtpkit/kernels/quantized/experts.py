"""Experts with quantised weights in Triton: pairs sorted into blocks by expert, as in
`mtpkit.kernels.moe.triton`, and kernels of their own for a single token.

A program of the first product with a gate takes as many rows of the gate as of the value, in one
tile, so that it reads x once and needs one sum.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, Tile, wait_for_previous, with_rows
from mtpkit.kernels.moe.reference import Activation
from mtpkit.kernels.moe.triton import Blocks, block_size, combine, sort_pairs
from mtpkit.kernels.quantized.inputs import quantize
from mtpkit.kernels.quantized.linear import WIDE, operand, pointers
from mtpkit.kernels.quantized.one_row import OUTPUTS, blocks_of, multiply_row
from mtpkit.kernels.quantized.product import constants, factor_of, multiply, scale_rows, step_of
from mtpkit.kernels.quantized.reference import NOT_QUANTIZED, Inputs, Matrix

TILES = {
    "e4m3": {
        16: Tile(64, 128, 6, 4),
        32: Tile(64, 128, 5, 4),
        64: Tile(64, 128, 4, 4),
        128: Tile(64, 128, 4, 4),
    },
    "int4": {
        16: Tile(128, 128, 4, 4),
        32: Tile(128, 128, 4, 4),
        64: Tile(128, 128, 3, 8),
        128: Tile(128, 64, 3, 8),
    },
    "e2m1": {
        16: Tile(128, 128, 4, 4),
        32: Tile(128, 128, 4, 4),
        64: Tile(128, 64, 4, 4),
        128: Tile(128, 64, 4, 8),
    },
}
"""Tiles by codes and pairs per block."""


@triton.jit
def _activated(product, RELU2: tl.constexpr, GATED: tl.constexpr):
    """Apply an activation to products [rows, n] or [rows]; with GATED, the first half of the rows
    is the gate of the other, and the result has half of them."""
    if RELU2:
        # tl.maximum would turn a NaN into 0
        product = tl.where(product < 0, 0.0, product * product)
    if GATED:
        halves = tl.reshape(product, [2, product.shape[0] // 2, product.numel // product.shape[0]])
        gate, value = tl.split(tl.permute(halves, [1, 2, 0]))
        product = gate / (1.0 + tl.exp(-gate)) * value
    return product


@triton.jit
def _rows_of(place, outputs, first, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Rows of a matrix for place [SIZE] of a tile whose outputs begin at `first`: those outputs, or
    with GATED half as many rows of the gate, then as many of the value."""
    HALF: tl.constexpr = SIZE // 2 if GATED else SIZE
    # Outputs past the end repeat the last one.
    return place // HALF * outputs + tl.minimum(first + place % HALF, outputs - 1)


@Early
@triton.jit(do_not_specialize=["pairs"])
def _expert_kernel(
    x_ptr,
    x_scale_ptr,
    matrix,
    row_scales_ptr,
    mixing_ptr,
    out_ptr,
    blocks,
    pairs,
    outputs,
    x_stride,
    SHARED_BY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_N outputs of one block of pairs per program, or half as many with a gate;
    SHARED_BY neighbouring pairs read the same row of x."""
    wait_for_previous(EARLY)
    block = tl.program_id(1)
    if block >= tl.load(blocks.used):
        return
    X_GROUPS: tl.constexpr = (WIDTH + X_COLUMNS - 1) // X_COLUMNS
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    expert = tl.load(blocks.experts + block).to(tl.int64)
    pair = tl.load(blocks.order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    live = pair < pairs
    source = tl.where(live, pair // SHARED_BY, 0).to(tl.int64)
    first = tl.program_id(0) * OUTPUTS
    row = _rows_of(tl.arange(0, BLOCK_N), outputs, first, BLOCK_N, GATED)
    all_rows = outputs * 2 if GATED else outputs
    rows = expert * all_rows + row
    scale_row = scale_rows(expert, row, all_rows, GROUP_ROWS)
    product = multiply(
        matrix,
        rows,
        scale_row,
        x_ptr + source * x_stride,
        x_ptr if x_scale_ptr is None else x_scale_ptr + source * X_GROUPS,
        live,
        0,
        (WIDTH + BLOCK_K - 1) // BLOCK_K,
        WIDTH,
        CODES,
        APART,
        COLUMNS,
        X_COLUMNS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        OPERAND,
    )
    factor = factor_of(matrix[1], row_scales_ptr, rows, scale_row, WIDTH, CODES, COLUMNS)
    product *= factor[:, None]
    if x_scale_ptr is not None and X_COLUMNS == WIDTH:
        product *= tl.load(x_scale_ptr + source, mask=live, other=0.0)[None, :]
    product = _activated(product, ACTIVATION == "relu2", GATED)
    if mixing_ptr is not None:
        product *= tl.load(mixing_ptr + pair, mask=live, other=0.0)[None, :]
    n = first + tl.arange(0, OUTPUTS)
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * outputs + n[:, None]
    mask = live[None, :] & (n < outputs)[:, None]
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=mask)


@partial(Early, most=None)
@triton.jit
def _inner_kernel(
    x_ptr,
    x_scale_ptr,
    matrix,
    row_scales_ptr,
    ids_ptr,
    out_ptr,
    inner,
    SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute inner channels of one of the token's experts from OUTPUTS rows of the matrix per
    program. SHARED: all experts read the same row of x."""
    wait_for_previous(EARLY)
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    CHANNELS: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    place = tl.program_id(1)
    expert = tl.load(ids_ptr + place).to(tl.int64)
    # The expert's hidden channels stay unwritten; no product reads them.
    if expert >= EXPERTS:
        return
    first = tl.program_id(0) * CHANNELS
    product, _ = multiply_row(
        matrix,
        row_scales_ptr,
        expert,
        _rows_of(tl.arange(0, OUTPUTS), inner, first, OUTPUTS, GATED),
        inner * 2 if GATED else inner,
        x_ptr,
        x_scale_ptr,
        0 if SHARED else place,
        None,
        WIDTH,
        CODES,
        APART,
        GROUP_ROWS,
        COLUMNS,
        X_COLUMNS,
        False,
        OUTPUTS,
        BLOCK,
        SHARING,
        OPERAND,
        False,
    )
    channels = tl.reshape(_activated(product, ACTIVATION == "relu2", GATED), [CHANNELS])
    n = first + tl.arange(0, CHANNELS)
    tl.store(out_ptr + place * inner + n, channels.to(out_ptr.dtype.element_ty), mask=n < inner)


@partial(Early, most=None)
@triton.jit
def _outer_kernel(
    hidden_ptr,
    x_scale_ptr,
    matrix,
    row_scales_ptr,
    ids_ptr,
    mixing_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARING: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute OUTPUTS outputs per program: the sum over the token's experts, plus the residual."""
    wait_for_previous(EARLY)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = n < outputs
    row = tl.minimum(n, outputs - 1)
    total = tl.zeros([OUTPUTS], tl.float32)
    for place in range(TOP_K):
        expert = tl.load(ids_ptr + place).to(tl.int64)
        if expert < EXPERTS:
            product, _ = multiply_row(
                matrix,
                row_scales_ptr,
                expert,
                row,
                outputs,
                hidden_ptr,
                x_scale_ptr,
                place,
                None,
                WIDTH,
                CODES,
                APART,
                GROUP_ROWS,
                COLUMNS,
                X_COLUMNS,
                False,
                OUTPUTS,
                BLOCK,
                SHARING,
                OPERAND,
                False,
            )
            total += product * tl.load(mixing_ptr + place)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=real)


def quantized_experts(
    x: Tensor,
    fc1: Matrix,
    fc2: Matrix,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
    residual: Tensor | None = None,
    some_elsewhere: bool = False,
    inputs: Inputs = NOT_QUANTIZED,
    input_scales: tuple[Tensor, Tensor] | None = None,
    size: int | None = None,
) -> Tensor:
    """See the reference. With several tokens, each expert's output is rounded before the sum.
    `size` overrides `block_size` and rules out the kernels for one token."""
    assert activation in ("relu2", "swiglu")
    tokens, top_k = expert_ids.shape
    experts, width, inner = fc2.shape
    pairs = tokens * top_k
    dtype = x.dtype
    out = torch.empty(tokens, width, dtype=dtype, device=x.device)
    if not tokens:
        return out
    x = with_rows(x)
    residual = None if residual is None else with_rows(residual)
    ids = expert_ids.contiguous()
    weights = weights.contiguous()
    first, second = (None, None) if input_scales is None else input_scales
    x, x_scales = _quantized(x, inputs, first, ids)
    # With a scale per expert, each pair has its own row.
    shared_by = top_k if len(x) == tokens else 1
    hidden = torch.empty(pairs, inner, dtype=dtype, device=x.device)
    if tokens == 1 and size is None:
        rest: dict[str, Any] = dict(
            EXPERTS=experts, OUTPUTS=OUTPUTS, OPERAND=operand(dtype), num_warps=1
        )
        channels = OUTPUTS // 2 if activation == "swiglu" else OUTPUTS
        _inner_kernel[(triton.cdiv(inner, channels), top_k)](
            x,
            x_scales,
            pointers(fc1),
            fc1.row_scales,
            ids,
            hidden,
            inner,
            SHARED=len(x) == 1,
            ACTIVATION=activation,
            **blocks_of(fc1, inputs),
            **rest,
        )
        hidden, hidden_scales = _quantized(hidden, inputs, second, ids.view(-1, 1))
        _outer_kernel[(triton.cdiv(width, OUTPUTS),)](
            hidden,
            hidden_scales,
            pointers(fc2),
            fc2.row_scales,
            ids,
            weights,
            residual,
            out,
            width,
            TOP_K=top_k,
            **blocks_of(fc2, inputs),
            **rest,
        )
        return out

    size = size or block_size(pairs, experts)
    blocks = sort_pairs(ids, experts, size)
    _multiply(x, x_scales, fc1, None, hidden, blocks, shared_by, activation, inputs)
    hidden, hidden_scales = _quantized(hidden, inputs, second, ids.view(-1, 1))
    parts = torch.empty(pairs, width, dtype=dtype, device=x.device)
    _multiply(hidden, hidden_scales, fc2, weights, parts, blocks, 1, "none", inputs)
    combine(parts, ids if some_elsewhere else None, residual, out, experts)
    return out


def _quantized(
    x: Tensor, inputs: Inputs, static: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor | None]:
    """x and its scales after quantisation; with the rule `static` a row for each of the ids."""
    if inputs.rule == "none":
        return x, None
    return quantize(x, inputs, static, ids=ids if inputs.rule == "static" else None)


def _multiply(
    x: Tensor,
    x_scales: Tensor | None,
    matrix: Matrix,
    mixing: Tensor | None,
    into: Tensor,
    blocks: Blocks,
    shared_by: int,
    activation: str,
    inputs: Inputs,
) -> None:
    """Multiply the pairs in their blocks by their experts, into [pairs, outputs]."""
    size = blocks.order.shape[1]
    tile = WIDE if into.dtype != torch.bfloat16 else TILES[matrix.codes][size]
    step = step_of(matrix, inputs, tile.block_k)
    assert step is not None, f"groups of {matrix.group[1]} columns fit no kernel"
    tile = tile._replace(block_k=step)
    outputs = into.shape[1]
    each = tile.block_n // 2 if activation == "swiglu" else tile.block_n
    _expert_kernel[(triton.cdiv(outputs, each), len(blocks.experts))](
        x,
        x_scales,
        pointers(matrix),
        matrix.row_scales,
        mixing,
        into,
        blocks,
        len(into),
        outputs,
        x.stride(0),
        SHARED_BY=shared_by,
        ACTIVATION=activation,
        BLOCK_M=size,
        OPERAND=operand(into.dtype),
        **constants(matrix, inputs),
        **tile.launch(),
    )
