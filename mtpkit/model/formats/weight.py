"""Quantised matrices inside a model: what a linear holds in place of its parameter `weight`, and
what a layer of experts holds of all their matrices.

Shape legend: M rows of the input, N rows (outputs) and K columns (inputs) of a matrix, E experts.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpkit.kernels.activation import swiglu
from mtpkit.kernels.linear import linear
from mtpkit.kernels.moe import expert_mlp
from mtpkit.kernels.norm import gated_rms_norm, rms_norm
from mtpkit.kernels.quantized import (
    MOST_WIDENED,
    NOT_QUANTIZED,
    Inputs,
    Matrix,
    prepare,
    quantize_inputs,
    quantized_experts,
    quantized_linear,
)
from mtpkit.kernels.quantized.reference import INT4_ZERO, Codes
from mtpkit.model.formats.base import Quantized, widened_rows


class Around(TypedDict, total=False):
    """The ops around a product, see `mtpkit.kernels.linear.linear`."""

    norm_weight: Tensor | None
    eps: float
    zero_centered: bool
    group_size: int | None
    gate: Tensor | None
    bias: Tensor | None
    activation: Literal["relu2"] | None
    residual: Tensor | None
    swiglu: bool
    """x [M, 2K] is the gate and the values of `swiglu`, which runs before the product."""
    early: bool


def multiply(x: Tensor, weight: "Tensor | QuantizedWeight", **around: Unpack[Around]) -> Tensor:
    """Compute `mtpkit.kernels.linear.linear` with a weight that may be quantised. No gradient.

    Returns:
        [M, N] in the dtype of x.
    """
    if isinstance(weight, Tensor):
        return _linear(x, weight, around)
    return weight.multiply(x, **around)


def _linear(x: Tensor, weight: Tensor, around: Around) -> Tensor:
    gated = around.pop("swiglu", False)
    return linear(swiglu(x) if gated else x, weight, **around)  # type: ignore[misc]


def product(x: Tensor, weight: "Tensor | QuantizedWeight", bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., K] by the transpose of a weight, with a gradient to x and to the bias. The
    gradient passes through the quantisation of x as if it were not there.

    Returns:
        [..., N] in the dtype of x.
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    rows = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    """`QuantizedWeight.multiply` in the forward, the widened matrix in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: "QuantizedWeight", bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return weight.multiply(x, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out = grads[0]
        own = out @ ctx.weight.widened(out.dtype) if ctx.needs_input_grad[0] else None
        return own, None, out.sum(0) if ctx.needs_input_grad[2] else None


class Layout(NamedTuple):
    """What matrices must have in common to lie in one stack."""

    codes: str
    tensors: tuple[tuple[str, torch.Size, torch.dtype], ...]
    group: tuple[int, int]
    apart: int
    inputs: Inputs


class _Rows(nn.Module):
    """Neighbouring rows of a weight that are quantised in one way, as their kernel reads them."""

    values: Tensor
    scales: Tensor
    row_scales: Tensor | None
    zeros: Tensor | None
    input_scale: Tensor | None

    def __init__(self, matrix: Matrix, inputs: Inputs, input_scale: Tensor | None) -> None:
        super().__init__()
        # In the order that kernels read codes of 4 bits fastest.
        matrix = prepare(matrix)
        self.codes = matrix.codes
        self.group = matrix.group
        self.apart = matrix.apart
        self.inputs = inputs
        tensors = dict(
            values=matrix.values,
            scales=matrix.scales,
            row_scales=matrix.row_scales,
            zeros=matrix.zeros,
            input_scale=input_scale,
        )
        # Checkpoints leave these tensors out: the files of the base have them.
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def __len__(self) -> int:
        return len(self.values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_Rows":
        """Move the tensors; a change of the model's dtype must change neither codes nor scales."""
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = fn(tensor)
                same = moved.dtype == tensor.dtype
                self._buffers[name] = moved if same else tensor.to(moved.device)
        return self

    @property
    def matrix(self) -> Matrix:
        return Matrix(
            self.codes,
            self.values,
            self.scales,
            self.group,
            self.row_scales,
            self.zeros,
            self.apart,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in self._buffers.items() if tensor is not None)

    @property
    def layout(self) -> Layout:
        sizes = ((name, tensor.shape, tensor.dtype) for name, tensor in self.tensors())
        return Layout(self.codes, tuple(sizes), self.group, self.apart, self.inputs)

    def widened(self, dtype: torch.dtype) -> Tensor:
        return widened_rows(self.matrix, dtype)

    def multiply(
        self, x: Tensor, out: Tensor | None, around: Around, x_scales: Tensor | None = None
    ) -> Tensor:
        rest = around.copy()
        rest.pop("early", None)  # its kernels decide that themselves
        return quantized_linear(
            x,
            self.matrix,
            inputs=self.inputs,
            input_scale=self.input_scale,
            x_scales=x_scales,
            out=out,
            **rest,  # type: ignore[misc]
        )


class _Plain(nn.Module):
    """Neighbouring rows of a weight that are not quantised."""

    values: Tensor
    inputs = NOT_QUANTIZED
    input_scale = None

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", rows, persistent=False)

    def __len__(self) -> int:
        return len(self.values)

    def widened(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)

    def multiply(
        self, x: Tensor, out: Tensor | None, around: Around, x_scales: Tensor | None = None
    ) -> Tensor:
        assert x_scales is None
        result = _linear(x, self.values, around)
        return result if out is None else out.copy_(result)


class QuantizedWeight(nn.Module):
    """A weight [N, K] of which at least some rows are quantised.

    It stands in a linear in place of the parameter `weight`, moves with the model, and is no
    parameter. Rows that are quantised in one way are multiplied by one kernel. Scales of inputs
    that a file gives for several parts of a weight become one, the largest, as in vLLM: the parts
    have one input.

    Args:
        pieces: the rows in order: plain ones [n, K], or quantised matrices.
        dtype: dtype of results.
    """

    requires_grad = False
    like: Tensor

    def __init__(self, pieces: Sequence[Quantized | Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._segments = nn.ModuleList(_segments(pieces, dtype))
        self.shape = torch.Size((sum(map(len, self.segments)), pieces[0].shape[1]))
        first = self.segments[0].values
        # Its dtype and its device follow `Module.to`.
        self.register_buffer(
            "like", torch.empty(0, dtype=dtype, device=first.device), persistent=False
        )

    @property
    def segments(self) -> list["_Rows | _Plain"]:
        """The rows in order, those of each kind together."""
        return cast(list[_Rows | _Plain], [*self._segments])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of results."""
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def codes(self) -> set[Codes]:
        """Types of the elements of the quantised rows."""
        return {segment.codes for segment in self.segments if isinstance(segment, _Rows)}

    @property
    def fp8_elements(self) -> int:
        """Number of elements that are multiplied with inputs in fp8."""
        rows = sum(
            len(segment)
            for segment in self.segments
            if isinstance(segment, _Rows) and segment.inputs != NOT_QUANTIZED
        )
        return rows * self.shape[1]

    @property
    def widened_elements(self) -> int:
        """Elements of the largest matrix that products of many rows widen; 0 if there is none."""
        sizes = (
            len(segment) * self.shape[1]
            for segment in self.segments
            if isinstance(segment, _Rows) and segment.inputs == NOT_QUANTIZED
        )
        return max((size for size in sizes if size <= MOST_WIDENED), default=0)

    @property
    def layout(self) -> Layout | None:
        """What weights must have in common to be stacked; None: this one cannot be stacked."""
        if len(self.segments) > 1 or not isinstance(self.segments[0], _Rows):
            return None
        return self.segments[0].layout

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.segments[0].values.data_ptr()

    def widened(self, dtype: torch.dtype | None = None) -> Tensor:
        """The elements [N, K], rounded once to a dtype; None: that of results."""
        rows = [segment.widened(dtype or self.dtype) for segment in self.segments]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def multiply(self, x: Tensor, **around: Unpack[Around]) -> Tensor:
        """Compute `multiply` with this weight."""
        if len(self.segments) == 1:
            return self.segments[0].multiply(x, None, around)

        x = swiglu(x) if around.get("swiglu") else normed(x, around)
        # Once for all segments that read the inputs in one way.
        scales = {segment.inputs: segment.input_scale for segment in self.segments}
        read: dict[Inputs, tuple[Tensor, Tensor | None]] = {
            inputs: quantize_inputs(x, inputs, scale) if inputs.rule != "none" else (x, None)
            for inputs, scale in scales.items()
        }
        out = x.new_empty(len(x), len(self))
        ends = itertools.accumulate(map(len, self.segments))
        for segment, end in zip(self.segments, ends, strict=True):
            rows = slice(end - len(segment), end)
            own: Around = {}
            own["activation"] = around.get("activation")
            own["early"] = around.get("early", False)
            if (bias := around.get("bias")) is not None:
                own["bias"] = bias[rows]
            if (residual := around.get("residual")) is not None:
                own["residual"] = residual[:, rows].contiguous()
            values, x_scales = read[segment.inputs]
            segment.multiply(values, out[:, rows], own, x_scales)
        return out


def normed(x: Tensor, around: Around) -> Tensor:
    """Norm x as `mtpkit.kernels.linear.linear` does before its product."""
    weight = around.get("norm_weight")
    gate = around.get("gate")
    if weight is None:
        return x
    eps = around.get("eps", 1e-5)
    if gate is not None:
        group_size = around["group_size"]
        assert group_size is not None
        return gated_rms_norm(x, gate, weight, group_size, eps)
    return rms_norm(x, weight, eps, around.get("zero_centered", False))


class _Piece(NamedTuple):
    """A quantised matrix, and how its inputs are quantised."""

    matrix: Matrix
    inputs: Inputs
    input_scale: Tensor | None

    @property
    def joins(self) -> tuple[object, ...]:
        """What neighbours must have in common to be one matrix."""
        matrix = self.matrix
        return matrix.codes, matrix.group[1], matrix.scales.dtype, self.inputs


def _segments(
    pieces: Sequence[Quantized | Tensor], dtype: torch.dtype
) -> Iterator["_Rows | _Plain"]:
    """Yield the pieces' rows with neighbours of one kind joined."""

    def kind(piece: Tensor | _Piece) -> object:
        return None if isinstance(piece, Tensor) else piece.joins

    read = [
        piece
        if isinstance(piece, Tensor)
        else _Piece(piece.matrix(), piece.format.inputs, piece.input_scale())
        for piece in pieces
    ]
    scales = [each.input_scale for each in read if isinstance(each, _Piece)]
    given = [scale for scale in scales if scale is not None]
    largest = torch.stack(given).amax() if given else None
    for _, group in itertools.groupby(read, kind):
        same = [*group]
        plain = [piece for piece in same if isinstance(piece, Tensor)]
        quantized = [piece for piece in same if isinstance(piece, _Piece)]
        if plain:
            yield _Plain(torch.cat(plain).to(dtype))
        else:
            joined = _joined([each.matrix for each in quantized])
            inputs = quantized[0].inputs
            yield _Rows(joined, inputs, largest if inputs.rule == "static" else None)


def _joined(matrices: Sequence[Matrix]) -> Matrix:
    """Put matrices with the same groups of columns below each other.

    If a group of rows would begin in one matrix and end in the next, each row gets scales of its
    own, with the same values.
    """
    if len(matrices) == 1:
        return matrices[0]
    rows = matrices[0].group[0]
    whole = all(matrix.group[0] == rows for matrix in matrices)
    if not whole or any(len(matrix.values) % rows for matrix in matrices[:-1]):
        matrices = [_by_row(matrix) for matrix in matrices]
    first = matrices[0]
    row_scales = None
    if any(matrix.row_scales is not None for matrix in matrices):
        row_scales = torch.cat([_row_scales(matrix) for matrix in matrices])
    zeros = None
    if any(matrix.zeros is not None for matrix in matrices):
        zeros = torch.cat([_zeros(matrix) for matrix in matrices])
    return Matrix(
        first.codes,
        torch.cat([matrix.values for matrix in matrices]),
        torch.cat([matrix.scales for matrix in matrices]),
        first.group,
        row_scales,
        zeros,
    )


def _by_row(matrix: Matrix) -> Matrix:
    """The same matrix with a group of columns' scale for each row."""
    rows, columns = matrix.group
    scales = matrix.scales.repeat_interleave(rows, 0)[: len(matrix.values)].contiguous()
    return matrix._replace(scales=scales, group=(1, columns))


def _row_scales(matrix: Matrix) -> Tensor:
    if matrix.row_scales is not None:
        return matrix.row_scales
    return torch.ones(len(matrix.values), device=matrix.values.device)


def _zeros(matrix: Matrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.full_like(matrix.scales, INT4_ZERO, dtype=torch.uint8)


class QuantizedStack:
    """The quantised weights of all experts of a layer, side by side; they become views of it.

    Args:
        weights: one per expert, with one `QuantizedWeight.layout`.
    """

    def __init__(self, weights: Sequence[QuantizedWeight]) -> None:
        rows = [weight.segments[0] for weight in weights]
        first = rows[0]
        assert isinstance(first, _Rows)
        self.inputs = first.inputs
        self._codes = first.codes
        self._group = first.group
        self._apart = first.apart
        self._tensors: dict[str, Tensor] = {}
        for name, _ in [*first.tensors()]:
            together = torch.stack([getattr(each, name) for each in rows])
            self._tensors[name] = together
            # One after the other, so that memory for one tensor of all experts suffices.
            for each, part in zip(rows, together, strict=True):
                setattr(each, name, part)

    def data_ptr(self) -> int:
        """Address of the first expert's first element."""
        return self._tensors["values"].data_ptr()

    def holds(self, weights: Sequence["Weight"]) -> bool:
        """Whether the weights still are the views of this stack, in this order."""
        values = self._tensors["values"]
        places = [part.data_ptr() for part in values]
        return places == [weight.data_ptr() for weight in weights]

    def first(self, count: int) -> "QuantizedStack":
        """The first experts alone."""
        part = copy.copy(self)
        part._tensors = {name: tensor[:count] for name, tensor in self._tensors.items()}
        return part

    @property
    def matrix(self) -> Matrix:
        """The matrices [E, N, K]."""
        found = self._tensors
        return Matrix(
            self._codes,
            found["values"],
            found["scales"],
            self._group,
            found.get("row_scales"),
            found.get("zeros"),
            self._apart,
        )

    @property
    def input_scales(self) -> Tensor | None:
        """Scales [E] of the inputs, if the file gives them."""
        return self._tensors.get("input_scale")


Weight = Tensor | QuantizedWeight
"""The weight [N, K] of a linear."""
Stack = Tensor | QuantizedStack
"""The weights of all experts of a layer."""


def widened(weight: Weight) -> Tensor:
    """A weight [N, K] as a plain tensor, in the dtype of its results."""
    return weight if isinstance(weight, Tensor) else weight.widened()


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight, its scales included."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    return sum(tensor.nbytes for tensor in weight.buffers())


def layout_of(weight: Weight) -> object:
    """What weights must have in common to lie in one stack; None: this one cannot be stacked."""
    return weight.dtype if isinstance(weight, Tensor) else weight.layout


def input_rule(weight: Weight) -> Inputs | None:
    """How the inputs of a quantised weight that can be stacked are quantised; None: the weight is
    another one."""
    if isinstance(weight, Tensor) or weight.layout is None:
        return None
    return weight.layout.inputs


def quantizes_inputs(weight: Weight) -> bool:
    """Whether products with a weight quantise their inputs, at least those of some rows."""
    return isinstance(weight, QuantizedWeight) and weight.fp8_elements > 0


def run_experts(
    x: Tensor,
    fc1: Stack,
    fc2: Stack,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Literal["relu2", "swiglu"],
    residual: Tensor | None = None,
    some_elsewhere: bool = False,
) -> Tensor:
    """Compute `mtpkit.kernels.moe.expert_mlp` with experts that may be quantised."""
    chosen = expert_ids, weights, activation, residual, some_elsewhere
    if isinstance(fc1, Tensor) and isinstance(fc2, Tensor):
        return expert_mlp(x, fc1, fc2, *chosen)

    assert isinstance(fc1, QuantizedStack) and isinstance(fc2, QuantizedStack)
    scales = None
    if fc1.input_scales is not None and fc2.input_scales is not None:
        scales = fc1.input_scales, fc2.input_scales
    return quantized_experts(
        x, fc1.matrix, fc2.matrix, *chosen, inputs=fc1.inputs, input_scales=scales
    )
