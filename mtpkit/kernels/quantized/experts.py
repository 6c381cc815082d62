"""Experts with quantised weights in Triton: pairs sorted into blocks by expert, as in
`mtpkit.kernels.moe.triton`, or each in a block of its own where they are few. Then the last program
of a tile also adds up a token's experts. Programs share the columns of a matrix as in
`mtpkit.kernels.quantized.linear`.

A program of the first product with a gate takes as many rows of the gate as of the value, in one
tile, so that it reads x once and needs one sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    SMALLEST_DOT,
    Early,
    Tile,
    multiprocessors,
    wait_for_previous,
    with_rows,
)
from mtpkit.kernels.linear.triton import room
from mtpkit.kernels.moe.reference import Activation
from mtpkit.kernels.moe.triton import block_size, combine, sort_pairs
from mtpkit.kernels.quantized.inputs import quantize
from mtpkit.kernels.quantized.linear import WIDE, operand
from mtpkit.kernels.quantized.product import (
    add_part,
    constants,
    factor_of,
    multiply,
    pointers,
    scale_rows,
    step_of,
    sum_of_parts,
)
from mtpkit.kernels.quantized.reference import NOT_QUANTIZED, Inputs, Matrix
from mtpkit.kernels.quantized.tiles import Choice, divided, most_even

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
FEW = {
    "e4m3": (
        Choice(Tile(64, 128, 6, 4), 3),
        Choice(Tile(64, 128, 8, 4), 2),
        Choice(Tile(64, 128, 4, 4), 5),
    ),
    "int4": (Choice(Tile(128, 128, 4, 4), 4),),
    "e2m1": (Choice(Tile(128, 128, 4, 4), 4),),
}
"""Choices by codes where pairs are not sorted."""
_EXPERTS_PER_PAIR = 4
"""With at least so many experts per pair, pairs are not sorted: few would share an expert, and the
GPU's cache serves those that do."""
RESIDENT = 3
"""Programs per multiprocessor at which splits aim."""
_MOST_PARTS = 32
"""Most parts of a sum."""


class _Blocks(NamedTuple):
    """Blocks of pairs that have an expert in common."""

    order: Tensor | None
    """[blocks, size] int32, see `mtpkit.kernels.moe.triton.Blocks`; None: each pair is alone in the
    block of its number."""
    experts: Tensor
    """[blocks], the expert of each block. Only of pairs that are alone, it may be elsewhere."""
    used: Tensor | None
    """[1] int32, the number of blocks in use; None: all."""
    size: int


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
    residual_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    blocks,
    pairs,
    outputs,
    steps,
    x_stride,
    residual_stride,
    SHARED_BY: tl.constexpr,
    SUM_OF: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_N outputs of one block of pairs per program, or half as many with a gate, over
    `steps` steps of columns. SHARED_BY neighbouring pairs read the same row of x. SUM_OF
    neighbouring blocks, which have one pair each, are added up. Longer than most because its parts
    share nearly all pointers."""
    X_GROUPS: tl.constexpr = (WIDTH + X_COLUMNS - 1) // X_COLUMNS
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    block = tl.program_id(1)
    split = tl.program_id(2)
    place = tl.arange(0, BLOCK_M)
    wait_for_previous(EARLY)
    if blocks.order is None:
        pair = tl.where(place == 0, block, pairs)
    else:
        if block >= tl.load(blocks.used):
            return
        pair = tl.load(blocks.order + block * BLOCK_M + place)
    expert = tl.load(blocks.experts + block).to(tl.int64)
    # Only blocks that were not sorted may be of experts elsewhere, whose products are 0.
    here = expert < EXPERTS
    expert = tl.minimum(expert, EXPERTS - 1)
    live = pair < pairs
    source = tl.where(live, pair // SHARED_BY, 0).to(tl.int64)
    first = tl.program_id(0) * OUTPUTS
    row = _rows_of(tl.arange(0, BLOCK_N), outputs, first, BLOCK_N, GATED)
    all_rows = outputs * 2 if GATED else outputs
    rows = expert * all_rows + row
    scale_row = scale_rows(expert, row, all_rows, GROUP_ROWS)
    start = split * steps
    end = tl.minimum(start + steps, (WIDTH + BLOCK_K - 1) // BLOCK_K)
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if here:
        product = multiply(
            matrix,
            rows,
            scale_row,
            x_ptr + source * x_stride,
            x_ptr if x_scale_ptr is None else x_scale_ptr + source * X_GROUPS,
            live,
            start,
            end,
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
    if mixing_ptr is not None:
        product *= tl.load(mixing_ptr + pair, mask=live, other=0.0)[None, :]
    # Not by a factor of 0: nothing vouches for the scales that were read.
    product = tl.where(here, product, 0.0)

    PARTS: tl.constexpr = SUM_OF * SPLITS
    if PARTS > 1:
        tile = block // SUM_OF * tl.num_programs(0) + tl.program_id(0)
        part = block % SUM_OF * SPLITS + split
        alive = live[None, :]
        if not add_part(
            parts_ptr, counters_ptr, tile, part, product, alive, PARTS, BLOCK_N, BLOCK_M
        ):
            return
        product = sum_of_parts(parts_ptr, tile, alive, PARTS, BLOCK_N, BLOCK_M)

    product = _activated(product, ACTIVATION == "relu2", GATED)
    n = first + tl.arange(0, OUTPUTS)
    mask = live[None, :] & (n < outputs)[:, None]
    m = (pair // SUM_OF).to(tl.int64)[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + m * residual_stride + n[:, None], mask=mask, other=0.0)
        product += residual.to(tl.float32)
    tl.store(out_ptr + m * outputs + n[:, None], product.to(out_ptr.dtype.element_ty), mask=mask)


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
    """See the reference. With more than a few pairs, each expert's output is rounded before the
    sum. `size` overrides `block_size` and has the pairs sorted."""
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
    few = size is None and (tokens == 1 or pairs * _EXPERTS_PER_PAIR <= experts)
    if few:
        blocks = _Blocks(None, ids.view(-1), None, SMALLEST_DOT)
    else:
        size = size or block_size(pairs, experts)
        blocks = _Blocks(*sort_pairs(ids, experts, size), size)
    hidden = torch.empty(pairs, inner, dtype=dtype, device=x.device)
    _multiply(x, x_scales, fc1, hidden, blocks, inputs, shared_by=shared_by, activation=activation)
    hidden, hidden_scales = _quantized(hidden, inputs, second, ids.view(-1, 1))
    into = out if few else torch.empty(pairs, width, dtype=dtype, device=x.device)
    _multiply(
        hidden,
        hidden_scales,
        fc2,
        into,
        blocks,
        inputs,
        mixing=weights,
        residual=residual if few else None,
        sum_of=top_k if few else 1,
    )
    if not few:
        combine(into, ids if some_elsewhere else None, residual, out, experts)
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
    into: Tensor,
    blocks: _Blocks,
    inputs: Inputs,
    *,
    mixing: Tensor | None = None,
    residual: Tensor | None = None,
    shared_by: int = 1,
    sum_of: int = 1,
    activation: str = "none",
) -> None:
    """Multiply pairs in their blocks by their experts, into [pairs / sum_of, outputs]."""
    pairs, outputs = len(into) * sum_of, into.shape[1]
    width = matrix.shape[-1]
    count = pairs if blocks.order is None else len(blocks.order)
    most = _MOST_PARTS // sum_of

    def tiles_of(tile: Tile) -> int:
        rows = tile.block_n // 2 if activation == "swiglu" else tile.block_n
        return triton.cdiv(outputs, rows) * count

    tile = WIDE if into.dtype != torch.bfloat16 else TILES[matrix.codes][blocks.size]
    step = step_of(matrix, inputs, tile.block_k)
    assert step is not None, f"groups of {matrix.group[1]} columns fit no kernel"
    if blocks.order is None and into.dtype == torch.bfloat16:
        choices = [choice.of_step(step) for choice in FEW[matrix.codes]]
        nbytes = pairs * matrix.values[0].nbytes
        tile = most_even(choices, tiles_of, width, nbytes, most)
    else:
        most = min(most, RESIDENT * multiprocessors() // tiles_of(tile))
        tile = tile._replace(block_k=step, splits=divided(width, step, most))
    steps = triton.cdiv(width, step)
    tiles = tiles_of(tile) // count
    sums = tiles * count // sum_of
    _expert_kernel[(tiles, count, tile.splits)](
        x,
        x_scales,
        pointers(matrix),
        matrix.row_scales,
        mixing,
        residual,
        into,
        *room(x.device, sums, tile._replace(splits=tile.splits * sum_of), blocks.size),
        blocks,
        pairs,
        outputs,
        triton.cdiv(steps, tile.splits),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        SHARED_BY=shared_by,
        SUM_OF=sum_of,
        EXPERTS=len(matrix.values),
        ACTIVATION=activation,
        SPLITS=tile.splits,
        BLOCK_M=blocks.size,
        OPERAND=operand(into.dtype),
        **constants(matrix, inputs),
        **tile.launch(),
    )
