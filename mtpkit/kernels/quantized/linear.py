"""Linear layers with quantised weights in Triton.

One kernel takes any number of rows: a few in tiles of 16 to 64, which read the weights once at the
rate of the memory, more in tiles of 128. If one program per tile would leave the GPU idle, several
programs share the columns; the last to finish adds up the parts, always in the same order. One row
may take a kernel without tensor cores. More rows than `_FEW` are a product of torch: of both sides
in fp8, if torch takes their scales, or of bf16, to which weights alone in fewer bits are widened.

A norm or swiglu runs before the product: in the launch that quantises the inputs, or in its own.
"""

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels import activation as activations
from mtpkit.kernels import norm as norms
from mtpkit.kernels.device import (
    NARROW,
    Early,
    Tile,
    multiprocessors,
    overlaps,
    padded,
    prefetch,
    wait_for_previous,
    with_rows,
)
from mtpkit.kernels.linear.triton import linear, room
from mtpkit.kernels.quantized import one_row, reference
from mtpkit.kernels.quantized.inputs import Norm, fuses, quantize
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
from mtpkit.kernels.quantized.reference import MOST_WIDENED, NOT_QUANTIZED, Inputs, Matrix
from mtpkit.kernels.quantized.tiles import Choice, divided, most_even
from mtpkit.kernels.quantized.widening import widened

_FEW = 128
"""Most rows that never go to torch."""
_BLOCK = 128
"""Rows and columns of the blocks whose scales torch takes."""
_CUDA = (12, 9)
"""Version of CUDA from which on it takes them."""
_MOST_ROWS = 128
"""Most rows of a tile."""
_AHEAD = 256
"""Bytes of each row of weights that a program prefetches while the previous kernel is still
running. More cost time in fp8."""


TILES: dict[str, dict[int, tuple[Choice, ...]]] = {
    "e4m3": {
        16: (
            Choice(Tile(64, 256, 3, 4), 3),
            Choice(Tile(64, 128, 4, 4), 5),
        ),
        64: (Choice(Tile(64, 128, 4, 4), 1), Choice(Tile(64, 256, 4, 4), 1)),
        128: (Choice(Tile(64, 128, 4, 4), 1),),
    },
    "e4m3 in groups": {
        16: (
            Choice(Tile(64, 128, 6, 4), 3),
            Choice(Tile(64, 128, 4, 4), 5),
            Choice(Tile(128, 128, 4, 4), 3),
        ),
        64: (Choice(Tile(64, 128, 4, 4), 2),),
        128: (Choice(Tile(64, 128, 4, 4), 1),),
    },
    "int4": {
        16: (
            Choice(Tile(128, 128, 4, 4), 4),
            Choice(Tile(64, 128, 4, 4), 7),
        ),
        64: (Choice(Tile(128, 128, 3, 8), 3),),
        128: (Choice(Tile(128, 64, 3, 8), 1),),
    },
    "e2m1": {
        16: (
            Choice(Tile(128, 256, 4, 4), 2),
            Choice(Tile(64, 256, 3, 4), 4),
            Choice(Tile(128, 128, 4, 4), 4),
        ),
        64: (Choice(Tile(128, 64, 4, 4), 3),),
        128: (Choice(Tile(128, 64, 4, 8), 1),),
    },
}
"""Kinds of matrices -> most rows -> choices, measured on an H200 with the linears of Nemotron-H-8B
and Nemotron 3 Nano. Today only products that torch does not take have more than 128 rows. 64
outputs are the fewest that Hopper's tensor cores take as their left operand."""
_EVEN = 16
"""Most rows for which `most_even` chooses. With more, it is the first choice, or the last where one
program per tile would leave multiprocessors idle, and `resident` is what splits aim at."""
WIDE = Tile(64, 64, 2, 4)
"""Tile for fp32, which tensor cores do not multiply at full precision: small, so that operands stay
in registers."""
_MOST_EXCHANGED = 0.5
"""Most bytes of sums that programs of a split exchange, as a share of the matrix's, unless splits
only fill multiprocessors that would be idle."""


def kind_of(matrix: Matrix, inputs: Inputs) -> str:
    """The kind of a matrix in `TILES`."""
    grouped = matrix.group[1] < matrix.shape[-1] or inputs.rule == "group"
    return "e4m3 in groups" if matrix.codes == "e4m3" and grouped else matrix.codes


def choose_tile(matrix: Matrix, inputs: Inputs, rows: int, wide: bool) -> Tile | None:
    """Choose a tile for a matrix and a number of rows; None: the kernel does not take the matrix.

    `wide`: operands are fp32.
    """
    outputs, width = matrix.shape
    sizes = TILES[kind_of(matrix, inputs)]
    size = next((size for size in sizes if rows <= size), _MOST_ROWS)
    choices = sizes[size]
    if wide:
        choices = (choices[0]._replace(tile=WIDE),)
    choices = tuple(
        choice.of_step(step)
        for choice in choices
        if (step := step_of(matrix, inputs, choice.tile.block_k)) is not None
    )
    if not choices:
        return None

    def tiles_of(tile: Tile) -> int:
        return triton.cdiv(outputs, tile.block_n) * triton.cdiv(rows, _MOST_ROWS)

    # Each part is written once and read once, in fp32.
    most = int(_MOST_EXCHANGED * matrix.values.nbytes / (8 * rows * outputs))
    if size <= _EVEN:
        return most_even(choices, tiles_of, width, matrix.values.nbytes, most)
    idle = tiles_of(choices[0].tile) < multiprocessors()
    tile, resident = choices[-1 if idle else 0]
    tiles = tiles_of(tile)
    most = max(most, multiprocessors() // tiles)
    splits = divided(width, tile.block_k, min(most, resident * multiprocessors() // tiles))
    return tile._replace(splits=splits)


@Early
@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    x_scale_ptr,
    matrix,
    row_scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    rows,
    outputs,
    steps,
    x_stride,
    residual_stride,
    out_stride,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    APART: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    RELU2: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_N outputs of ROWS rows per program, summed over `steps` steps of columns.
    Longer than most because its parts share nearly all pointers."""
    X_GROUPS: tl.constexpr = (WIDTH + X_COLUMNS - 1) // X_COLUMNS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # Programs that share weights are neighbours, so that all but the first find them in the cache.
    tiles_m = (rows + ROWS - 1) // ROWS
    n = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile % tiles_m * ROWS + tl.arange(0, ROWS)
    live = m < rows
    first = split * steps
    # Outputs past the end repeat the last one, so that loads need no mask.
    weight_rows = tl.minimum(n, outputs - 1).to(tl.int64)
    # No earlier kernel of a step writes weights, so they need no wait.
    if EARLY:
        # Values of 4 bits are in quads of 2 bytes.
        PACK: tl.constexpr = 1 if CODES == "e4m3" else 4
        ITEMS: tl.constexpr = AHEAD if CODES == "e4m3" else AHEAD // 2
        start = first * BLOCK_K // PACK
        if start + ITEMS <= WIDTH // PACK:
            prefetch(matrix[0] + weight_rows * (WIDTH // PACK) + start, ITEMS)
    wait_for_previous(EARLY)
    scale_row = scale_rows(0, weight_rows, outputs, GROUP_ROWS)
    safe = tl.where(live, m, 0).to(tl.int64)
    product = multiply(
        matrix,
        weight_rows,
        scale_row,
        x_ptr + safe * x_stride,
        x_ptr if x_scale_ptr is None else x_scale_ptr + safe * X_GROUPS,
        live,
        first,
        tl.minimum(first + steps, (WIDTH + BLOCK_K - 1) // BLOCK_K),
        WIDTH,
        CODES,
        APART,
        COLUMNS,
        X_COLUMNS,
        ROWS,
        BLOCK_N,
        BLOCK_K,
        OPERAND,
    )
    live = live[None, :]
    if SPLITS > 1:
        if not add_part(parts_ptr, counters_ptr, tile, split, product, live, SPLITS, BLOCK_N, ROWS):
            return
        product = sum_of_parts(parts_ptr, tile, live, SPLITS, BLOCK_N, ROWS)

    factor = factor_of(matrix[1], row_scales_ptr, weight_rows, scale_row, WIDTH, CODES, COLUMNS)
    product *= factor[:, None]
    if x_scale_ptr is not None and X_COLUMNS == WIDTH:
        product *= tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)[None, :]
    if bias_ptr is not None:
        product += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if RELU2:
        # tl.maximum would turn a NaN into 0
        product = tl.where(product < 0, 0.0, product * product)
    mask = (n < outputs)[:, None] & live
    places_m = m[None, :].to(tl.int64)
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + places_m * residual_stride + n[:, None], mask=mask, other=0.0
        )
        product += residual.to(tl.float32)
    tl.store(
        out_ptr + places_m * out_stride + n[:, None],
        product.to(out_ptr.dtype.element_ty),
        mask=mask,
    )


def operand(dtype: torch.dtype) -> tl.dtype:
    """Type in which numbers are multiplied unless both sides are fp8."""
    return NARROW if dtype == torch.bfloat16 else tl.float32


@functools.cache
def _takes_blocks(device: torch.device) -> bool:
    """Whether torch multiplies fp8 in blocks on a device: cuBLAS does on Hopper alone, from CUDA
    12.9 on."""
    hopper = overlaps(device) and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and torch.version.cuda is not None and _version(torch.version.cuda) >= _CUDA


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _is_torch_product(matrix: Matrix, inputs: Inputs, rows: int, device: torch.device) -> bool:
    """Whether torch multiplies: both sides in fp8, and scales of whole rows, or of blocks and of
    groups as wide."""
    outputs, width = matrix.shape
    by_row = matrix.group[1] >= width and (matrix.group[0] == 1 or matrix.group[0] >= outputs)
    if inputs.rule == "group":
        # With other widths torch 2.11 reads scales of other blocks.
        scaled = matrix.group == (_BLOCK, _BLOCK) and inputs.columns == _BLOCK
        scaled = scaled and width % (4 * _BLOCK) == 0 and _takes_blocks(device)
    else:
        scaled = by_row and inputs.rule in ("token", "static")
    fits = outputs % 16 == 0 and width % 16 == 0 and matrix.row_scales is None
    return rows > _FEW and fits and scaled and matrix.codes == "e4m3" and overlaps(device)


def widens(matrix: Matrix, inputs: Inputs, rows: int) -> bool:
    """Whether a product in bf16 of so many rows widens the matrix first. Writing and reading it in
    bf16 then costs less than the kernel's own widening, which it repeats for every 128 rows."""
    fits = math.prod(matrix.shape) <= MOST_WIDENED and inputs.rule == "none"
    return rows > _FEW and fits and step_of(matrix, inputs, _BLOCK) is not None


def _torch_product(x: Tensor, x_scales: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Multiply fp8 by fp8 with torch, which scales before it rounds."""
    scales = matrix.scales.float()
    if matrix.group[1] < matrix.shape[1]:
        rows = len(x)
        padding = (0, 0, 0, -rows % 4)
        if padding[-1]:
            x = F.pad(x.view(torch.uint8), padding).view(x.dtype)
            x_scales = F.pad(x_scales, padding)
        x_scales = x_scales.t().contiguous().t()
        return torch._scaled_mm(
            x, matrix.values.t(), x_scales, scales.contiguous().t(), out_dtype=dtype
        )[:rows]
    scales = scales.reshape(-1, 1).expand(len(matrix.values), 1).contiguous()
    return torch._scaled_mm(
        x, matrix.values.t(), x_scales, scales.t(), out_dtype=dtype, use_fast_accum=True
    )


def quantized_linear(
    x: Tensor,
    matrix: Matrix,
    *,
    inputs: Inputs = NOT_QUANTIZED,
    input_scale: Tensor | None = None,
    x_scales: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    group_size: int | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Literal["relu2"] | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """See the reference. A product of torch (see `_FEW`) rounds before activation and residual, and
    rounds weights that it has to widen. `tile` overrides `choose_tile` and rules out the kernel for
    one row and torch's product.

    The kernel for one row takes e4m3 with inputs that are not quantised. With both sides in fp8
    tensor cores are faster by a fifth to a half, and codes of 4 bits take fewer instructions there.
    """
    assert activation in (None, "relu2") and (bias is None or residual is None)
    assert (gate is None) == (group_size is None), "a gated norm needs both gate and group_size"
    rows = len(x)
    outputs = matrix.shape[0]
    dtype = x.dtype if out is None else out.dtype
    norm = None
    assert x_scales is None or (out is not None and norm_weight is None)
    if norm_weight is not None:
        norm = Norm(norm_weight, eps, zero_centered, gate, group_size)
    chosen = tile or choose_tile(matrix, inputs, max(1, rows), dtype != torch.bfloat16)
    if chosen is None:
        return reference.quantized_linear(
            _normed(x, norm),
            matrix,
            inputs=inputs,
            input_scale=input_scale,
            x_scales=x_scales,
            swiglu=swiglu,
            bias=bias,
            activation=activation,
            residual=residual,
            out=out,
        )

    if tile is None and dtype == torch.bfloat16 and widens(matrix, inputs, rows):
        result = linear(
            activations.swiglu(x) if swiglu else x,
            widened(matrix, dtype),
            norm_weight=norm_weight,
            eps=eps,
            zero_centered=zero_centered,
            group_size=group_size,
            gate=gate,
            bias=bias,
            activation=activation,
            residual=residual,
        )
        return result if out is None else out.copy_(result)

    if not rows:
        return x.new_empty(0, outputs, dtype=dtype) if out is None else out
    by_torch = tile is None and _is_torch_product(matrix, inputs, rows, x.device)
    alone = rows == 1 and tile is None and matrix.codes == "e4m3" and inputs.rule == "none"
    if swiglu and inputs.rule == "none":
        x = activations.swiglu(x)
    elif inputs.rule != "none" and x_scales is None:
        if norm is not None and not fuses(x.shape[1], inputs, norm):
            x = _normed(x, norm)
            norm = None
        by_group = by_torch and inputs.rule == "group"
        x, x_scales = quantize(x, inputs, input_scale, norm, swiglu=swiglu, by_group=by_group)
        norm = None
    elif norm is not None and not (alone and gate is None):
        x = _normed(x, norm)
        norm = None

    residual = None if residual is None else with_rows(residual)
    if by_torch:
        assert x_scales is not None
        product = _torch_product(x, x_scales, matrix, dtype)
        if bias is not None:
            product += bias
        if activation is not None:
            product = activations.relu2(product)
        if residual is not None:
            product += residual
        return product if out is None else out.copy_(product)

    out = torch.empty(rows, outputs, dtype=dtype, device=x.device) if out is None else out
    x = with_rows(x)
    if alone:
        return one_row.one_row_linear(
            x,
            matrix,
            None if norm is None else norm.weight,
            eps,
            zero_centered,
            bias,
            activation is not None,
            residual,
            out,
        )
    block_m = min(_MOST_ROWS, padded(rows))
    tiles = triton.cdiv(outputs, chosen.block_n) * triton.cdiv(rows, block_m)
    whole = triton.cdiv(matrix.shape[1], chosen.block_k)
    steps = triton.cdiv(whole, chosen.splits)
    assert (chosen.splits - 1) * steps < whole, f"{chosen} has programs without columns"
    _linear_kernel[(tiles, chosen.splits)](
        x,
        x_scales,
        pointers(matrix),
        matrix.row_scales,
        bias,
        residual,
        out,
        *room(x.device, tiles, chosen, block_m),
        rows,
        outputs,
        steps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        RELU2=activation is not None,
        SPLITS=chosen.splits,
        ROWS=block_m,
        OPERAND=operand(dtype),
        AHEAD=_AHEAD,
        **constants(matrix, inputs),
        **chosen.launch(),
    )
    return out


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """x after a norm in a kernel of its own."""
    if norm is None:
        return x
    if norm.gate is None:
        return norms.rms_norm(x, norm.weight, norm.eps, norm.zero_centered)
    assert norm.group_size is not None
    return norms.gated_rms_norm(x, norm.gate, norm.weight, norm.group_size, norm.eps)


def quantize_inputs(
    x: Tensor, inputs: Inputs, static: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    assert inputs.rule != "none"
    return quantize(x, inputs, static)
