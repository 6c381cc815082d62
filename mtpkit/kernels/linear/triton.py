"""Linear layers of a few rows in Triton: one pass over the weight, fused with activation and
residual, and for up to NORMED_ROWS rows with the norm.

The norm's factor 1 / rms is one number per row and is applied after the product; the same loop over
K sums the squares. (A gated norm has its own kernel: fused, its silu would be recomputed for every
tile of outputs, which costs more than it saves.) If one program per tile of outputs would leave the
GPU idle, several programs share the input channels; the last to finish adds up the parts, always in
the same order.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels import activation as activations
from mtpkit.kernels import norm as norms
from mtpkit.kernels.device import (
    NARROW,
    Tile,
    as_rows,
    counters_of,
    early_launch,
    multiprocessors,
    overlaps,
    padded,
    prefetch,
    quotient,
    wait_for_previous,
    with_rows,
)
from mtpkit.kernels.linear import one_row
from mtpkit.kernels.linear.reference import FP8, FP8_MAX, compose

MAX_ROWS = 32
"""Most rows that the kernel takes; with more, cuBLAS makes better use of tensor cores."""
NORMED_ROWS = 16
"""Most rows for which the kernel computes the norm too; with more, repeating the norm in every
program costs more than a separate kernel."""
_AHEAD = 4
"""Tiles of its weight that a program prefetches while the previous kernel is still running."""
_MAX_SPLITS = 8
"""Most splits of the input channels; more would leave a program too few tiles to overlap."""


TILES: dict[tuple[int, int], Tile] = {
    (18560, 4096): Tile(64, 128, 3, 4),
    (21504, 4096): Tile(64, 128, 3, 4),
    (131072, 4096): Tile(64, 128, 4, 4),
    (6144, 4096): Tile(64, 128, 3, 4, splits=4),
    (4096, 4096): Tile(64, 128, 4, 4, splits=4),
    (4096, 8192): Tile(64, 128, 4, 4, splits=4),
    (4096, 21504): Tile(64, 128, 4, 4, splits=4),
}
"""Tiles by (N, K) of the weight. Except with the vocabulary's weight, all programs are resident at
once, so that they share the bandwidth evenly and end together. 64 outputs are the fewest that
Hopper's tensor cores take from shared memory as their left operand."""
_OTHER = {16: (Tile(64, 128, 3, 4), 3), 32: (Tile(64, 128, 4, 4), 1)}
"""Padded number of rows -> the tile for weights that are not in `TILES`, before `splits` is chosen,
and the number of programs per multiprocessor that `splits` aims at."""


def choose_tile(outputs: int, width: int, rows: int = 1) -> Tile | None:
    """Take the tile from `TILES`; for other weights or more than NORMED_ROWS rows, fit a tile to
    the GPU.

    The programs of a fitted tile fill the GPU and are resident at once. Return None if `width`
    channels do not divide into whole tiles.
    """
    if rows <= NORMED_ROWS and (outputs, width) in TILES:
        return TILES[outputs, width]
    other, resident = _OTHER[padded(rows)]
    most = resident * multiprocessors() // triton.cdiv(outputs, other.block_n)
    for splits in range(max(1, min(_MAX_SPLITS, most)), 0, -1):
        tile = other._replace(splits=splits)
        if tile.fits(width):
            return tile
    return None


@triton.jit
def store_part(products, squares, product, square, live, NORMED):
    """Store one program's sums, which the last program of its tile adds up."""
    tl.store(products, product, mask=live)
    if NORMED:
        tl.store(squares, square)
    # all threads must have stored their part before one thread increments the counter
    tl.debug_barrier()


@triton.jit
def sum_parts(products, squares, live, PART, SPLITS, NORMED):
    """Add up all parts of a tile; the pointers are those of the first part, and parts are PART
    elements apart."""
    product = tl.zeros(products.shape, tl.float32)
    square = tl.zeros(squares.shape, tl.float32)
    for part in tl.static_range(SPLITS):
        # .cg reads the L2 cache, where the other multiprocessors' stores are.
        product += tl.load(products + part * PART, mask=live, other=0.0, cache_modifier=".cg")
        if NORMED:
            square += tl.load(squares + part * PART, cache_modifier=".cg")
    return product, square


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    rows,
    outputs,
    eps,
    x_stride,
    weight_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    RELU2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_N outputs of all rows per program, summed over SPAN of the WIDTH input
    channels. The weight is the left operand of the product; the right one may have as few as 16
    columns, rows of x. Longer than 70 lines because its parts share nearly all pointers."""
    SPLITS: tl.constexpr = WIDTH // SPAN
    NORMED: tl.constexpr = norm_ptr is not None
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = split * SPAN + tl.arange(0, BLOCK_K)
    live = (m < rows)[None, :]
    # Outputs past the end repeat the last one, so that loads need no mask.
    weights = weight_ptr + tl.minimum(n, outputs - 1).to(tl.int64) * weight_stride
    # No earlier kernel of a step writes weights, so they need no wait.
    if EARLY and SPAN >= AHEAD * BLOCK_K:
        prefetch(weights + split * SPAN, AHEAD * BLOCK_K)
    wait_for_previous(EARLY)
    weight_ptrs = weights[:, None] + k[None, :]
    x_ptrs = x_ptr + m[None, :] * x_stride + k[:, None]
    product = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([BLOCK_K, ROWS], tl.float32)
    if NORMED:
        # Loaded one tile ahead and in the layout of x, so that threads exchange no data; the L1
        # cache serves repeats.
        scale_ptrs = norm_ptr + k[:, None] + tl.zeros([1, ROWS], tl.int32)
        scale = tl.load(scale_ptrs)
    for start in range(0, SPAN, BLOCK_K):
        w = tl.load(weight_ptrs + start)
        x = tl.load(x_ptrs + start, mask=live, other=0.0)
        if NORMED:
            value = x.to(tl.float32)
            squares += value * value
            factor = scale.to(tl.float32)
            if ZERO_CENTERED:
                factor += 1.0
            x = (value * factor).to(x_ptr.dtype.element_ty)
            scale = tl.load(scale_ptrs + tl.minimum(start + BLOCK_K, SPAN - BLOCK_K))
        product = tl.dot(w.to(NARROW), x.to(NARROW), product)
    square = tl.sum(squares, 0)

    if SPLITS > 1:
        # A part holds products [ROWS, BLOCK_N], then sums of squares [ROWS].
        PART: tl.constexpr = ROWS * (BLOCK_N + 1)
        places = (
            parts_ptr
            + tile * (SPLITS * PART)
            + m[None, :] * BLOCK_N
            + tl.arange(0, BLOCK_N)[:, None]
        )
        last = parts_ptr + tile * (SPLITS * PART) + ROWS * BLOCK_N + m
        store_part(places + split * PART, last + split * PART, product, square, live, NORMED)
        # The release publishes this program's part, the acquire shows the last program all others.
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        product, square = sum_parts(places, last, live, PART, SPLITS, NORMED)
    if NORMED:
        product *= tl.rsqrt(square / WIDTH + eps)[None, :]
    if bias_ptr is not None:
        product += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if RELU2:
        # tl.maximum would turn a NaN into 0
        product = tl.where(product < 0, 0.0, product * product)
    mask = (n < outputs)[:, None] & live
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + m[None, :] * residual_stride + n[:, None], mask=mask, other=0.0
        )
        product += residual.to(tl.float32)
    tl.store(
        out_ptr + m[None, :] * outputs + n[:, None], product.to(out_ptr.dtype.element_ty), mask=mask
    )


def room(
    device: torch.device, tiles: int, tile: Tile, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate room for the partial sums of programs that split the input channels, and get their
    counters."""
    if tile.splits == 1:
        return None, None
    return torch.empty(tiles, tile.splits, rows, tile.block_n + 1, device=device), counters_of(
        device, tiles
    )


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    group_size: int | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Literal["relu2"] | None = None,
    residual: Tensor | None = None,
    early: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """See the reference. Up to MAX_ROWS rows in bf16 take one kernel that rounds once; a gated
    norm, and any norm of more than NORMED_ROWS rows, runs in a kernel before it. Other inputs run
    as separate ops. `tile` overrides `choose_tile` and rules out the kernel for one row.
    """
    assert (
        activation in (None, "relu2")
        and (bias is None or residual is None)
        and (gate is None) == (group_size is None)
    )
    (rows, width), outputs = x.shape, len(weight)
    fits = x.dtype == torch.bfloat16 and 0 < rows <= MAX_ROWS
    alone = fits and rows == 1 and tile is None and overlaps(x.device)
    chosen = tile or (choose_tile(outputs, width, rows) if fits else None)
    if not alone and (not fits or chosen is None):
        around = norm_weight, eps, zero_centered, group_size, gate, bias, activation, residual
        return compose(norms, activations, x, weight, *around)
    assert weight.stride(1) == 1
    if gate is not None:
        assert norm_weight is not None and group_size is not None and not zero_centered
        x = norms.gated_rms_norm(x, gate, norm_weight, group_size, eps)
        norm_weight = None
    elif norm_weight is not None and rows > NORMED_ROWS:
        x = norms.rms_norm(x, norm_weight, eps, zero_centered)
        norm_weight = None
    x = with_rows(x)
    residual = None if residual is None else with_rows(residual)
    if alone:
        relu2 = activation is not None
        return one_row.one_row_linear(
            x, weight, norm_weight, eps, zero_centered, bias, relu2, residual
        )
    assert chosen is not None and chosen.fits(width), f"{chosen} does not divide {width} channels"
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block_m = padded(rows)
    tiles = triton.cdiv(outputs, chosen.block_n)
    _linear_kernel[(tiles, chosen.splits)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        *room(x.device, tiles, chosen, block_m),
        rows,
        outputs,
        eps,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        WIDTH=width,
        SPAN=width // chosen.splits,
        ZERO_CENTERED=zero_centered,
        RELU2=activation is not None,
        ROWS=block_m,
        NARROW=NARROW,
        AHEAD=_AHEAD,
        **early_launch(x.device, early),
        **chosen.launch(),
    )
    return out


@triton.jit
def _quantize_kernel(x, values, scales, width, stride, MAX: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    entry = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    # Divisions round as PyTorch's do; Triton's own `/` is an approximation in fp32.
    scale = tl.div_rn(tl.max(tl.abs(entry), 0), MAX)
    scale = tl.where(scale > 0, scale, 1.0)
    scaled = tl.minimum(tl.maximum(quotient(entry, scale), -MAX), MAX)
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
        rows,
        values,
        scales,
        rows.shape[1],
        rows.stride(0),
        MAX=FP8_MAX,
        BLOCK=block,
        num_warps=warps,
    )
    return values, scales
