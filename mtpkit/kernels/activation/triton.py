"""Activations in Triton, computed in fp32 and rounded once; the backward passes need only the
inputs."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mtpkit.kernels.device import Early, as_rows, strided, wait_for_previous, with_rows

BLOCK = 1024
NUM_WARPS = 4
"""Eight elements per thread: one 16-byte load and one 16-byte store in bf16."""


@Early
@triton.jit
def _relu2_kernel(
    x, grad, out, size, BACKWARD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Store relu2 of x; or, with BACKWARD, the gradient of x, given the gradient `grad` of the
    output."""
    wait_for_previous(EARLY)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    factor = 2 * tl.load(grad + place, mask=mask, other=0.0).to(tl.float32) if BACKWARD else value
    # tl.maximum would turn a NaN into 0.
    result = tl.where(value < 0, 0.0, value * factor)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@Early
@triton.jit
def _swiglu_kernel(
    x,
    grad,
    out,
    width,
    stride,
    blocks,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Store swiglu of x in out [rows, width]; or, with BACKWARD, the gradient of x in out [rows, 2
    width], given the gradient `grad` of the output."""
    wait_for_previous(EARLY)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if BACKWARD:
        above = tl.load(grad + row * width + column, mask=mask, other=0.0).to(tl.float32)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        place = out + 2 * row * width + column
        tl.store(place, (above * value * slope).to(out.dtype.element_ty), mask=mask)
        tl.store(place + width, (above * gate * sigmoid).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(
            out + row * width + column, (gate * sigmoid * value).to(out.dtype.element_ty), mask=mask
        )


def _run_relu2(x: Tensor, grad: Tensor | None = None) -> Tensor:
    x, grid = x.contiguous(), (triton.cdiv(x.numel(), BLOCK),)
    out = torch.empty_like(x)
    above = x if grad is None else grad.contiguous()
    _relu2_kernel[grid](
        x, above, out, x.numel(), BACKWARD=grad is not None, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return out


def _run_swiglu(x: Tensor, grad: Tensor | None = None) -> Tensor:
    rows = as_rows(x)
    width = x.shape[-1] // 2
    out = torch.empty(
        *x.shape[:-1], width if grad is None else 2 * width, dtype=x.dtype, device=x.device
    )
    above = x if grad is None else grad.contiguous()
    blocks = triton.cdiv(width, BLOCK)
    sizes = (width, rows.stride(0), blocks)
    settings = dict(BLOCK=BLOCK, num_warps=NUM_WARPS)
    _swiglu_kernel[(len(rows) * blocks,)](
        rows, above, out, *sizes, BACKWARD=grad is not None, **settings
    )
    return out


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.run(*ctx.saved_tensors, grad), None


def relu2(x: Tensor) -> Tensor:
    """See the reference."""
    return _Activation.apply(x, _run_relu2)


def swiglu(x: Tensor) -> Tensor:
    """See the reference."""
    return _Activation.apply(x, _run_swiglu)


@Early
@triton.jit
def _gate_kernel(
    x_rows,
    gate_rows,
    grad,
    out,
    gate_grad,
    width,
    part,
    blocks,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Store x * sigmoid(gate) in out [rows, width]; or, given the gradient `grad` of that product,
    the gradient of x in out and the gradient of the gate in gate_grad, both [rows, width]."""
    wait_for_previous(EARLY)
    x, x_stride = x_rows
    gate, gate_stride, part_stride = gate_rows
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    place = row * gate_stride + (column // part) * part_stride + column % part
    sigmoid = tl.sigmoid(tl.load(gate + place, mask=mask, other=0.0).to(tl.float32))
    place = row * width + column
    if grad is None:
        tl.store(out + place, (value * sigmoid).to(out.dtype.element_ty), mask=mask)
    else:
        above = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, (above * sigmoid).to(out.dtype.element_ty), mask=mask)
        slope = above * value * sigmoid * (1 - sigmoid)
        tl.store(gate_grad + place, slope.to(gate_grad.dtype.element_ty), mask=mask)


def _run_gate(x: Tensor, gate: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The gated x [..., n]; or, given the gradient `grad` of the gated x, the gradients of x and of
    the gate, [..., n] each."""
    rows = as_rows(x)
    gates = with_rows(gate).flatten(0, -3)
    width = rows.shape[1]
    part = gate.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gate_grad = None
    if grad is not None:
        grad = grad.contiguous()
        gate_grad = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    blocks = triton.cdiv(width, BLOCK)
    sizes = dict(width=width, part=part, blocks=blocks, BLOCK=BLOCK, num_warps=NUM_WARPS)
    _gate_kernel[(len(rows) * blocks,)](
        strided(rows), strided(gates), grad, out, gate_grad, **sizes
    )
    return out, gate_grad


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return _run_gate(x, gate)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        x_grad, gate_grad = _run_gate(x, gate, grad)
        assert gate_grad is not None
        return x_grad, gate_grad.view(gate.shape)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See the reference."""
    return _Gate.apply(x, gate)
