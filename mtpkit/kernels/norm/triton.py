"""RMS norms in Triton: each program keeps its rows (or one group of a row) in registers and reads
and writes them once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, as_rows, strided, wait_for_previous
from mtpkit.kernels.integer_rows import OFFSET, IntegerRows

_OFFSET = tl.constexpr(OFFSET)
TILE = 2048
"""Elements per program if it takes several narrow rows."""


@triton.jit
def normalise(value, weight, column, width, eps, ZERO_CENTERED):
    """Normalise value [rows, block], fp32 and zero from column `width` on, and multiply by
    weight[column], or by 1 + weight[column] with ZERO_CENTERED."""
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    return value * scale * factor


@Early
@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    eps,
    rows,
    width,
    stride,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < width)
    value = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    normed = normalise(value, weight, column, width, eps, ZERO_CENTERED)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=mask)


@Early
@triton.jit
def _gated_rms_norm_kernel(
    x_rows, z_rows, weight, out, eps, groups, width, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_previous(EARLY)
    x, x_stride = x_rows
    z, z_stride = z_rows
    row = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < width
    start = group * width
    value = tl.load(x + row * x_stride + start + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + start + column, mask=mask, other=0.0).to(tl.float32)
    normed = normalise(value * gate * tl.sigmoid(gate), weight + start, column, width, eps, False)
    tl.store(
        out + (row * groups + group) * width + column, normed.to(out.dtype.element_ty), mask=mask
    )


@Early
@triton.jit
def _norm_gate_kernel(
    x_rows,
    z_rows,
    weight,
    out,
    eps,
    heads,
    width,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute ROWS heads of one token per program."""
    wait_for_previous(EARLY)
    x, x_stride = x_rows
    z, z_stride = z_rows
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (column < width)
    place = head * width + column
    value = tl.load(x + row * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + place, mask=mask, other=0.0).to(tl.float32)
    normed = normalise(value, weight, column, width, eps, ZERO_CENTERED) * gate * tl.sigmoid(gate)
    tl.store(out + row * heads * width + place, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_row(value, weight, out, column, width, eps, ZERO_CENTERED):
    """Normalise value [1, block], fp32, and store its first `width` columns."""
    normed = normalise(value, weight, column, width, eps, ZERO_CENTERED)
    tl.store(out + column, normed.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _embedding_row(rows, scales, row, column, known, BITS):
    """Load a row of a table as [1, block] fp32: its first `known` values, and zeros after them.

    BITS: the bits of `IntegerRows`; 0: the table has plain numbers.
    """
    table, stride = rows
    values = table + row * stride
    mask = column < known
    if BITS == 0:
        value = tl.load(values + column, mask=mask, other=0.0).to(tl.float32)
    else:
        factors, groups, width = scales
        if BITS == 4:
            byte = tl.load(values + column // 2, mask=mask, other=0).to(tl.int32)
            number = ((byte >> (column % 2 * 4)) & 15) - _OFFSET
        else:
            number = tl.load(values + column, mask=mask, other=0).to(tl.int32)
        scale = tl.load(factors + row * groups + column // width, mask=mask, other=0.0)
        value = number.to(tl.float32) * scale
    return value


@Early
@triton.jit
def _mtp_input_kernel(
    token_ids,
    positions,
    hidden_rows,
    embedding_rows,
    embedding_scales,
    norms,
    out,
    eps,
    width,
    ZERO_FIRST: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    hidden, hidden_stride = hidden_rows
    enorm_weight, hnorm_weight = norms
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    out += token * 2 * width
    if tl.program_id(1) == 0:
        row = tl.load(token_ids + token).to(tl.int64)
        known = width
        if ZERO_FIRST:
            known = tl.where(tl.load(positions + token) == 0, 0, width)
        embedded = _embedding_row(embedding_rows, embedding_scales, row, column, known, BITS)
        _norm_row(embedded, enorm_weight, out, column, width, eps, ZERO_CENTERED)
    else:
        value = tl.load(hidden + token * hidden_stride + column, mask=column < width, other=0.0).to(
            tl.float32
        )
        _norm_row(value, hnorm_weight, out + width, column, width, eps, ZERO_CENTERED)


def _tile(width: int) -> dict[str, int]:
    """Rows, columns and warps of a program for rows of `width`: 16 elements per thread."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return dict(ROWS=rows, BLOCK=block, num_warps=min(16, max(1, rows * block // 512)))


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """See the reference."""
    rows = as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    settings = _tile(x.shape[-1])
    grid = (triton.cdiv(len(rows), settings["ROWS"]),)
    _rms_norm_kernel[grid](
        rows, weight, out, eps, *rows.shape, rows.stride(0), ZERO_CENTERED=zero_centered, **settings
    )
    return out


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    """See the reference. One program per group of a row."""
    left = as_rows(x)
    right = as_rows(z)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = x.shape[-1] // group_size
    block = triton.next_power_of_2(group_size)
    _gated_rms_norm_kernel[(len(left) * groups,)](
        strided(left),
        strided(right),
        weight,
        out,
        eps,
        groups,
        group_size,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )
    return out


def norm_gate(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """See the reference."""
    left = as_rows(x)
    right = as_rows(z)
    width = len(weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[-1] // width
    settings = _tile(width)
    grid = (len(left), triton.cdiv(heads, settings["ROWS"]))
    _norm_gate_kernel[grid](
        strided(left),
        strided(right),
        weight,
        out,
        eps,
        heads,
        width,
        ZERO_CENTERED=zero_centered,
        **settings,
    )
    return out


def mtp_input(
    token_ids: Tensor,
    hidden: Tensor,
    embedding: Tensor | IntegerRows,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    eps: float,
    zero_centered: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """See the reference. Gather, both norms and the concatenation are one launch, two programs per
    token."""
    hidden = as_rows(hidden)
    token_ids = token_ids.contiguous()
    tokens, width = hidden.shape
    out = torch.empty(tokens, 2 * width, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(width)
    if isinstance(embedding, IntegerRows):
        groups = embedding.scales.shape[1]
        table = embedding.values
        scales = (embedding.scales, groups, width // groups)
        bits = int(embedding.bits)
    else:
        table = embedding
        # Any tensor will do: with BITS 0 the kernel reads no scales.
        scales = (enorm_weight, 1, width)
        bits = 0
    _mtp_input_kernel[(tokens, 2)](
        token_ids,
        token_ids if positions is None else positions.contiguous(),
        strided(hidden),
        strided(table),
        scales,
        (enorm_weight, hnorm_weight),
        out,
        eps,
        width,
        ZERO_FIRST=positions is not None,
        ZERO_CENTERED=zero_centered,
        BITS=bits,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
