"""Quantisation of a product's inputs in Triton, after the norm or the activation in the same
launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    Early,
    at_least,
    at_most,
    quotient,
    wait_for_previous,
    with_rows,
)
from mtpkit.kernels.linear.reference import FP8, FP8_MAX
from mtpkit.kernels.quantized.reference import Inputs

_SPREAD = 2048
"""Columns per program where no number depends on the whole row."""
_WARP_ITEMS = 256
"""Columns per warp."""


class Norm(NamedTuple):
    """An RMS norm before the quantisation, gated if there is a gate."""

    weight: Tensor
    eps: float
    zero_centered: bool = False
    gate: Tensor | None = None
    group_size: int | None = None


@Early
@triton.jit
def _quantize_kernel(
    x_ptr,
    gate_ptr,
    norm_ptr,
    static_ptr,
    ids_ptr,
    values_ptr,
    scales_ptr,
    eps,
    width,
    groups,
    x_stride,
    gate_stride,
    scale_stride,
    group_stride,
    SHARED_BY: tl.constexpr,
    EXPERTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NORMED_PARTS: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Quantise PARTS parts of LENGTH columns of a row per program. Each part has a scale, or with
    WHOLE_ROW all of them one. A norm is of NORMED_PARTS parts at a time. SHARED_BY neighbouring
    rows of the result come from the same row of x. With SWIGLU, a row of x is the gate, then as
    many values."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    within = tl.arange(0, BLOCK)[None, :]
    column = part[:, None] * LENGTH + within
    mask = (within < LENGTH) & (column < width)
    place = row // SHARED_BY * x_stride + column
    value = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        other = tl.load(x_ptr + place + width, mask=mask, other=0.0).to(tl.float32)
        # Rounded as the activation's own kernel would.
        value = (value * tl.sigmoid(value) * other).to(x_ptr.dtype.element_ty).to(tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
        value *= gate * tl.sigmoid(gate)
    if norm_ptr is not None:
        CHUNKS: tl.constexpr = PARTS // NORMED_PARTS
        squares = tl.sum(tl.reshape(tl.sum(value * value, 1), [CHUNKS, NORMED_PARTS]), 1)
        # All columns of a gated norm are in whole parts.
        count = width if CHUNKS == 1 else NORMED_PARTS * LENGTH
        root = tl.rsqrt(squares / count + eps)
        root = tl.reshape(tl.broadcast_to(root[:, None], [CHUNKS, NORMED_PARTS]), [PARTS])
        factor = tl.load(norm_ptr + column, mask=mask, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            factor += 1.0
        # Rounded as the norm's own kernel would.
        value = (value * root[:, None] * factor).to(x_ptr.dtype.element_ty).to(tl.float32)

    if static_ptr is not None:
        expert = 0
        if ids_ptr is not None:
            # Pairs of experts elsewhere take part in no product.
            expert = tl.minimum(tl.load(ids_ptr + row), EXPERTS - 1)
        scale = tl.load(static_ptr + expert) + tl.zeros([PARTS], tl.float32)
    else:
        largest = tl.max(tl.abs(value), 1)
        if WHOLE_ROW:
            largest = tl.max(largest, 0) + tl.zeros([PARTS], tl.float32)
        # Divisions round as PyTorch's do; Triton's own `/` is an approximation in fp32.
        scale = tl.div_rn(largest, MAX)
        scale = tl.where(scale > 0, scale, 1.0)
    scaled = at_most(at_least(quotient(value, scale[:, None]), -MAX), MAX)
    tl.store(values_ptr + row * width + column, scaled.to(values_ptr.dtype.element_ty), mask=mask)
    if WHOLE_ROW:
        tl.store(scales_ptr + row + part, scale, mask=part == 0)
    else:
        places = scales_ptr + row * scale_stride + part.to(tl.int64) * group_stride
        tl.store(places, scale, mask=part < groups)


def _parts(width: int, inputs: Inputs, norm: Norm | None) -> tuple[int, int] | None:
    """Columns of a part, and parts per norm; None: the norm does not divide into parts."""
    length = inputs.columns if inputs.rule == "group" else width
    if norm is None:
        # No number of the rule `static` depends on a row.
        return (min(width, _SPREAD) if inputs.rule == "static" else length), 0
    if norm.group_size is None:
        return length, triton.next_power_of_2(triton.cdiv(width, length))
    if inputs.rule != "group":
        length = norm.group_size
    parts, rest = divmod(norm.group_size, length)
    if rest or parts != triton.next_power_of_2(parts):
        return None
    return length, parts


def fuses(width: int, inputs: Inputs, norm: Norm) -> bool:
    """Whether the norm of rows of `width` runs in the launch of the quantisation."""
    return _parts(width, inputs, norm) is not None


def quantize(
    x: Tensor,
    inputs: Inputs,
    static: Tensor | None = None,
    norm: Norm | None = None,
    ids: Tensor | None = None,
    swiglu: bool = False,
    by_group: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise x [M, K] by a rule other than `none`, after a norm that `fuses`, or after swiglu of
    x [M, 2K].

    Args:
        static: [] or [E] fp32, scales of the rule `static`.
        ids: [M, k] int64, the expert of each pair, whose scale is taken; an id past the last expert
            is of another rank. The result then has a row for each pair.
        by_group: lay the scales of a group side by side, not those of a row.

    Returns:
        As `quantize_inputs`, of M or M * k rows.
    """
    x = with_rows(x)
    assert norm is None or not swiglu
    width = x.shape[1] // 2 if swiglu else x.shape[1]
    rows = len(x) if ids is None else ids.numel()
    groups = triton.cdiv(width, inputs.columns) if inputs.rule == "group" else 1
    values = torch.empty(rows, width, dtype=FP8, device=x.device)
    sizes = (groups, rows) if by_group else (rows, groups)
    scales = torch.empty(sizes, dtype=torch.float32, device=x.device)
    if by_group:
        scales = scales.t()
    if not rows:
        return values, scales
    found = _parts(width, inputs, norm)
    assert found is not None
    length, normed = found
    block = triton.next_power_of_2(length)
    parts = triton.next_power_of_2(triton.cdiv(width, length))
    if norm is None and inputs.rule != "token":
        parts = min(parts, max(1, _SPREAD // block))
    gate = None if norm is None or norm.gate is None else with_rows(norm.gate)
    _quantize_kernel[(rows, triton.cdiv(width, length * parts))](
        x,
        gate,
        None if norm is None else norm.weight,
        static if inputs.rule == "static" else None,
        None if ids is None else ids.contiguous(),
        values,
        scales,
        0.0 if norm is None else norm.eps,
        width,
        groups,
        x.stride(0),
        0 if gate is None else gate.stride(0),
        *scales.stride(),
        SHARED_BY=1 if ids is None else ids.shape[1],
        EXPERTS=1 if static is None else static.numel(),
        SWIGLU=swiglu,
        ZERO_CENTERED=norm is not None and norm.zero_centered,
        WHOLE_ROW=inputs.rule != "group",
        LENGTH=length,
        BLOCK=block,
        PARTS=parts,
        NORMED_PARTS=normed,
        MAX=FP8_MAX,
        num_warps=min(16, max(1, parts * block // _WARP_ITEMS)),
    )
    return values, scales
