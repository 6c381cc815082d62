"""The product of a tile of a quantised matrix with rows of an input, on tensor cores.

The weights are the left operand: Hopper's tensor cores take at least 64 rows of that one, also for
fp8, and as few as 8 columns of the other, rows of x. Weights and inputs of e4m3 are multiplied as
they are; other codes become bf16 in registers and never return to shared memory.

A scale that belongs to a row of weights or of x is applied after the sum; scales of groups of
columns after each group. Only the scales of groups that are smaller than a step are multiplied with
the codes, which is exact for e2m1.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import load
from mtpkit.kernels.linear.triton import store_part, sum_parts
from mtpkit.kernels.quantized.codes import E2M1_FACTOR, E2M1_UNIT, e2m1, e4m3, int4
from mtpkit.kernels.quantized.reference import INT4_ZERO, Inputs, Matrix

_ZERO = tl.constexpr(128.0 + INT4_ZERO)
_LEAST = {"e4m3": 32, "int4": 64, "e2m1": 64}
"""Fewest columns of a step: tensor cores multiply 32 of fp8, or 16 of each of the four blocks that
quads become."""
_WITHIN = (16, 32)
"""Columns of groups whose scales are multiplied with codes of 4 bits."""


def step_of(matrix: Matrix, inputs: Inputs, most: int) -> int | None:
    """Largest number of columns per step, at most `most`, with which no step cuts a group of
    columns; None: there is none, and the kernels do not take the matrix."""
    width = matrix.shape[-1]
    sizes = [matrix.group[1]]
    if matrix.codes != "e4m3":
        if width % 4:
            return None
        if sizes[0] in _WITHIN and width % sizes[0] == 0:
            sizes = []
    if inputs.rule == "group":
        sizes.append(inputs.columns)
    step = most
    while any(size < width and size % step for size in sizes):
        step //= 2
    return step if step >= _LEAST[matrix.codes] else None


def constants(matrix: Matrix, inputs: Inputs) -> dict[str, Any]:
    """Constants of kernels that describe a matrix and its inputs."""
    width = matrix.shape[-1]
    return dict(
        WIDTH=width,
        CODES=matrix.codes,
        APART=matrix.apart,
        GROUP_ROWS=matrix.group[0],
        COLUMNS=min(width, matrix.group[1]),
        X_COLUMNS=min(width, inputs.columns) if inputs.rule == "group" else width,
    )


def pointers(matrix: Matrix) -> tuple[Tensor | None, ...]:
    """Values, scales and zero points as kernels take them; four codes of 4 bits are one value."""
    parts = (matrix.values, matrix.scales, matrix.zeros)
    assert all(part is None or part.is_contiguous() for part in parts)
    values = matrix.values if matrix.codes == "e4m3" else matrix.values.view(torch.uint16)
    return values, matrix.scales, matrix.zeros


@triton.jit
def scale_rows(expert, n, ROWS, GROUP_ROWS):
    """Rows of the scales for rows n of the matrix [ROWS, K] of an expert."""
    return expert * ((ROWS + GROUP_ROWS - 1) // GROUP_ROWS) + n // GROUP_ROWS


@triton.jit
def _dot(a, b, product, OPERAND):
    if tl.float32 == OPERAND:
        return tl.dot(a, b, product, input_precision="ieee")
    else:
        return tl.dot(a, b, product)


@triton.jit
def multiply(
    matrix,
    rows,
    scale_row,
    x_ptrs,
    x_scale_ptrs,
    live,
    first,
    last,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Multiply rows of a matrix by rows of an input, over the steps of BLOCK_K columns from `first`
    to before `last`, at least one.

    Args:
        matrix: pointers to values (quads with codes of 4 bits), scales and zero points.
        rows, scale_row: [BLOCK_N] int64, rows of the values and of the scales.
        x_ptrs, x_scale_ptrs: [ROWS] pointers to rows of x and of its scales.
        live: [ROWS] mask of the rows of x.

    Returns:
        [BLOCK_N, ROWS] fp32; `factor_of` gives the scales that are left.
    """
    values_ptr, scales_ptr, zeros_ptr = matrix
    FP8: tl.constexpr = x_ptrs.dtype.element_ty == tl.float8e4nv
    PACK: tl.constexpr = 1 if CODES == "e4m3" else 4
    GROUPS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    WHOLE: tl.constexpr = WIDTH % BLOCK_K == 0
    # Scales of groups within a step, and of groups that have one or more steps.
    WITHIN: tl.constexpr = GROUPS > 1 and COLUMNS < BLOCK_K
    STEPS: tl.constexpr = GROUPS > 1 and COLUMNS >= BLOCK_K
    X_STEPS: tl.constexpr = X_COLUMNS < WIDTH
    item = tl.arange(0, BLOCK_K // PACK)
    column = item if PACK == 1 else item // APART * (4 * APART) + item % APART
    weight_ptrs = values_ptr + rows[:, None] * (WIDTH // PACK) + item[None, :]
    scale_ptrs = scales_ptr + scale_row * GROUPS
    x_ptrs = x_ptrs[None, :] + column[:, None]
    product = tl.zeros([BLOCK_N, ROWS], tl.float32)
    # Loaded one step ahead.
    scale = tl.zeros([BLOCK_N], tl.float32)
    if STEPS:
        scale = tl.load(scale_ptrs + first * BLOCK_K // COLUMNS).to(tl.float32)
    x_scale = tl.zeros([ROWS], tl.float32)
    if X_STEPS:
        x_scale = tl.load(x_scale_ptrs + first * BLOCK_K // X_COLUMNS, mask=live, other=0.0)
    # Of a loop that might run not at all, the compiler lets each product of e2m1 wait for the one
    # before it.
    tl.assume(last > first)
    for step in range(first, last):
        # A product with a constant, so that the compiler sees what can be copied at once.
        start = step * BLOCK_K
        following = tl.minimum(step + 1, last - 1) * BLOCK_K
        now = scale
        x_now = x_scale
        if STEPS:
            scale = tl.load(scale_ptrs + following // COLUMNS).to(tl.float32)
        if X_STEPS:
            x_scale = tl.load(x_scale_ptrs + following // X_COLUMNS, mask=live, other=0.0)
        w = load(
            weight_ptrs + start // PACK, (start // PACK + item < WIDTH // PACK)[None, :], WHOLE
        )
        mask = live[None, :] if WHOLE else live[None, :] & (start + column < WIDTH)[:, None]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0)
        part = tl.zeros([BLOCK_N, ROWS], tl.float32) if STEPS or X_STEPS else product
        if CODES == "e4m3":
            if FP8:
                # The tensor cores' own sums are short; each step's are added in fp32.
                part = tl.dot(w, x, part, max_num_imprecise_acc=BLOCK_K)
            else:
                part = _dot(e4m3(w, OPERAND), x.to(OPERAND), part, OPERAND)
        else:
            codes = _numbers(
                w,
                scales_ptr,
                zeros_ptr,
                rows,
                scale_row,
                start,
                CODES,
                COLUMNS,
                GROUPS,
                WITHIN,
                WHOLE,
                BLOCK_N,
                BLOCK_K,
                OPERAND,
            )
            part = _dot(codes[0], x.to(OPERAND), part, OPERAND)
            for place in tl.static_range(1, 4):
                x = tl.load(x_ptrs + start + place * APART, mask=mask, other=0.0)
                part = _dot(codes[place], x.to(OPERAND), part, OPERAND)
        if STEPS and X_STEPS:
            product += part * (now[:, None] * x_now[None, :])
        elif STEPS:
            product += part * now[:, None]
        elif X_STEPS:
            product += part * x_now[None, :]
        else:
            product = part
    return product


@triton.jit
def _numbers(
    quads,
    scales_ptr,
    zeros_ptr,
    rows,
    scale_row,
    start,
    CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    WITHIN: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Four blocks of numbers from quads [BLOCK_N, BLOCK_K / 4], with the scales and zero points of
    groups within the step."""
    SIZE: tl.constexpr = BLOCK_K // 4
    # Groups of the step.
    COUNT: tl.constexpr = BLOCK_K // COLUMNS if WITHIN else 1
    group = start // COLUMNS + tl.arange(0, COUNT)
    inside = (group < GROUPS)[None, :]
    scale = tl.full([BLOCK_N, SIZE], 1.0, tl.float32)
    if WITHIN:
        found = load(scales_ptr + (scale_row * GROUPS)[:, None] + group[None, :], inside, WHOLE)
        scale = found.to(tl.float32)
        if CODES == "e2m1":
            scale = (scale * E2M1_UNIT).to(OPERAND)
        scale = _spread(scale, BLOCK_N, COUNT, SIZE)
    elif CODES == "e2m1":
        scale = (scale * E2M1_UNIT).to(OPERAND)
    if CODES == "e2m1":
        return e2m1(quads, scale, OPERAND)
    else:
        zero = tl.full([BLOCK_N, SIZE], _ZERO, OPERAND)
        if zeros_ptr is not None:
            points = load(zeros_ptr + (rows * GROUPS)[:, None] + group[None, :], inside, WHOLE)
            zero = _spread((points.to(tl.float32) + 128.0).to(OPERAND), BLOCK_N, COUNT, SIZE)
        codes = int4(quads, zero, OPERAND)
        if not WITHIN:
            return codes
        else:
            return (
                (codes[0].to(tl.float32) * scale).to(OPERAND),
                (codes[1].to(tl.float32) * scale).to(OPERAND),
                (codes[2].to(tl.float32) * scale).to(OPERAND),
                (codes[3].to(tl.float32) * scale).to(OPERAND),
            )


@triton.jit
def _spread(value, BLOCK_N: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Repeat each column of value [BLOCK_N, COUNT] for its group, [BLOCK_N, SIZE]."""
    wide = tl.broadcast_to(value[:, :, None], [BLOCK_N, COUNT, SIZE // COUNT])
    return tl.reshape(wide, [BLOCK_N, SIZE])


@triton.jit
def factor_of(
    scales_ptr,
    row_scales_ptr,
    rows,
    scale_row,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Factors [n] of rows of a product that no step has applied."""
    factor = tl.full(rows.shape, 1.0, tl.float32)
    if COLUMNS == WIDTH:
        factor = tl.load(scales_ptr + scale_row).to(tl.float32)
    if CODES == "e2m1":
        factor *= E2M1_FACTOR
    if row_scales_ptr is not None:
        factor *= tl.load(row_scales_ptr + rows)
    return factor


@triton.jit
def add_part(
    parts_ptr,
    counters_ptr,
    tile,
    part,
    product,
    live,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store part number `part` of the PARTS whose sum a tile is. The result tells whether all are
    stored now; then this program adds them up with `sum_of_parts`.

    Args:
        parts_ptr, counters_ptr: as `mtpkit.kernels.linear.triton.room` makes them.
        product: [BLOCK_N, ROWS] fp32.
        live: [1, ROWS] mask of the columns to store.
    """
    places = _places(parts_ptr, tile * PARTS + part, BLOCK_N, ROWS)
    store_part(places, places, product, product, live, False)
    # The release publishes this program's part, the acquire shows the last program all others.
    complete = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == PARTS - 1
    if complete:
        tl.store(counters_ptr + tile, 0)
    return complete


@triton.jit
def sum_of_parts(
    parts_ptr, tile, live, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr
):
    """The sum [BLOCK_N, ROWS] of all parts of a tile, always in the same order."""
    places = _places(parts_ptr, tile * PARTS, BLOCK_N, ROWS)
    product, _ = sum_parts(places, places, live, ROWS * (BLOCK_N + 1), PARTS, False)
    return product


@triton.jit
def _places(parts_ptr, part, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Pointers [BLOCK_N, ROWS] to a part, which ends with ROWS numbers that stay unused."""
    inner = tl.arange(0, ROWS)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    return parts_ptr + part * (ROWS * (BLOCK_N + 1)) + inner
