"""Products with matrices that stay quantised: linear layers and experts.

Shape legend: M rows of the input, N rows (outputs) and K columns (inputs) of a matrix, E experts.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtpkit.kernels.activation import reference as activations
from mtpkit.kernels.linear.reference import FP8, FP8_MAX, scale_of
from mtpkit.kernels.norm import reference as norms

Codes = Literal["e4m3", "int4", "e2m1"]
"""Type of an element before it is scaled: fp8 (Micikevicius et al. 2022, arXiv:2209.05433), an
integer of 4 bits, or fp4 with the magnitudes of `E2M1` (OCP Microscaling Formats 1.0)."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the lower three bits of an fp4 code; the fourth bit is the sign."""
INT4_ZERO = 8
"""Code of zero in int4, unless zero points say otherwise."""
MOST_WIDENED = 2**27
"""Most elements of a matrix that kernels widen to bf16 for a product of many rows."""
APART = 4
"""Columns between neighbouring codes of 4 bits after `prepare`."""


class Matrix(NamedTuple):
    """A quantised matrix [N, K], or E of them [E, N, K].

    An element is (code - zero point) * scale of its group * scale of its row.
    """

    codes: Codes
    values: Tensor
    """e4m3 [.., N, K]; with 4 bits uint8 [.., N, K / 2], column 2j in the lower half of byte j, or
    the order that `apart` says."""
    scales: Tensor
    """[.., ceil(N / rows), ceil(K / columns)] in fp32, bf16, fp16 or e4m3."""
    group: tuple[int, int]
    """(rows, columns) that share a scale; groups at the edges may be partial."""
    row_scales: Tensor | None = None
    """[.., N] fp32."""
    zeros: Tensor | None = None
    """[.., N, ceil(K / columns)] uint8, zero points of int4; None: all are `INT4_ZERO`."""
    apart: int = 1
    """Columns between neighbouring codes of 4 bits: 1 as files have them, `APART` after
    `prepare`."""

    @property
    def shape(self) -> torch.Size:
        """[.., N, K]."""
        *lead, width = self.values.shape
        return torch.Size((*lead, width if self.codes == "e4m3" else 2 * width))


class Inputs(NamedTuple):
    """The way in which the inputs of a product are quantised to e4m3 before it."""

    rule: Literal["none", "token", "group", "static"] = "none"
    """`none`: not at all. `token`: a row of the input has one scale, its largest magnitude / 448.
    `group`: each `columns` neighbours of a row have one. `static`: one scale that the file
    gives."""
    columns: int = 0


NOT_QUANTIZED = Inputs()

_ACTIVATIONS = {"relu2": activations.relu2, "swiglu": activations.swiglu}


def widen(matrix: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Restore the elements [.., N, K]: multiply in fp32, then round once to `dtype`."""
    rows, columns = matrix.group
    outputs, width = matrix.shape[-2:]
    wide = _decode(matrix)
    by_row = matrix.scales.float().repeat_interleave(rows, -2)[..., :outputs, :]
    wide *= by_row.repeat_interleave(columns, -1)[..., :width]
    if matrix.row_scales is not None:
        wide *= matrix.row_scales[..., None]
    return wide.to(dtype)


def _decode(matrix: Matrix) -> Tensor:
    """The codes' values minus zero points, [.., N, K] fp32."""
    if matrix.codes == "e4m3":
        return matrix.values.float()

    halves = _in_order(_halves(matrix.values), matrix.apart)
    if matrix.codes == "e2m1":
        magnitudes = torch.tensor(E2M1, device=halves.device)[(halves & 7).long()]
        return torch.where(halves > 7, -magnitudes, magnitudes)

    codes = halves.float()
    if matrix.zeros is None:
        return codes - INT4_ZERO
    zeros = matrix.zeros.float().repeat_interleave(matrix.group[1], -1)
    return codes - zeros[..., : codes.shape[-1]]


def prepare(matrix: Matrix) -> Matrix:
    """Arrange codes of 4 bits as kernels read them fastest, without shuffling; scales stay.

    Of each 16 columns the four codes of 16 bits are columns j, j + 4, j + 8 and j + 12, so that a
    program that takes them apart has runs of four neighbouring columns. Other matrices, and widths
    that are no multiple of 16, are returned as they are.
    """
    if matrix.codes == "e4m3" or matrix.shape[-1] % (APART * APART) or matrix.apart == APART:
        return matrix
    return matrix._replace(values=_transposed(matrix.values), apart=APART)


def restore(matrix: Matrix) -> Matrix:
    """Undo `prepare`: arrange the codes as files have them."""
    if matrix.apart == 1:
        return matrix
    return matrix._replace(values=_transposed(matrix.values), apart=1)


def _transposed(values: Tensor) -> Tensor:
    """Bytes [.., N, K / 2] with the order of codes changed from one to the other."""
    changed = torch.empty_like(values, memory_format=torch.contiguous_format)
    # One expert at a time, since the codes take twice the bytes for as long as this takes.
    matrices = zip(values, changed, strict=True) if values.dim() == 3 else ((values, changed),)
    for old, new in matrices:
        codes = _in_order(_halves(old), APART)
        new.copy_(codes[..., ::2] | codes[..., 1::2] << 4)
    return changed


def _halves(values: Tensor) -> Tensor:
    """The codes [.., N, K] of bytes [.., N, K / 2], in the order of the bits."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def _in_order(halves: Tensor, apart: int) -> Tensor:
    """Codes [.., N, K] in the order of the columns, from that of the bits, or the other way round:
    of 16 codes both are the rows and the columns of a square."""
    if apart == 1:
        return halves
    return halves.unflatten(-1, (-1, APART, APART)).transpose(-1, -2).flatten(-3)


def quantize_inputs(
    x: Tensor, inputs: Inputs, static: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise x [M, K] by a rule other than `none`.

    Args:
        static: [] fp32, the scale of the rule `static`.

    Returns:
        Values [M, K] e4m3, and the scales that restore them, fp32: [M, 1], or [M, ceil(K /
        columns)] by the rule `group`. A row or a group of zeros has scale 1.
    """
    wide = x.float()
    if inputs.rule == "static":
        assert static is not None
        scales = static.reshape(1, 1).expand(len(x), 1)
        values = (wide / static).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return values, scales.contiguous()

    columns = inputs.columns if inputs.rule == "group" else x.shape[1]
    padding = -x.shape[1] % columns
    groups = torch.nn.functional.pad(wide, (0, padding)).unflatten(1, (-1, columns))
    scales = scale_of(groups.abs().amax(-1))
    values = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(1)
    return values[:, : x.shape[1]].to(FP8), scales


def restored_inputs(x: Tensor, inputs: Inputs, static: Tensor | None = None) -> Tensor:
    """x [M, K] after quantisation by a rule, in fp32; x in fp32 itself by the rule `none`."""
    if inputs.rule == "none":
        return x.float()
    return _restored(*quantize_inputs(x, inputs, static), inputs)


def _restored(values: Tensor, scales: Tensor, inputs: Inputs) -> Tensor:
    """The result of `quantize_inputs` in fp32."""
    width = values.shape[1]
    columns = inputs.columns if inputs.rule == "group" else width
    return values.float() * scales.repeat_interleave(columns, 1)[:, :width]


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
) -> Tensor:
    """Compute activation(quantised(norm(x)) @ matrix.T + bias) + residual, or the same with
    swiglu(x) [M, K] in place of the norm.

    The inputs are quantised for any number of rows in the same way, so that a token has the same
    result alone and beside drafts.

    Args:
        x, norm_weight, eps, zero_centered, group_size, gate, bias, activation, residual: as for
            `mtpkit.kernels.linear.linear`.
        inputs, input_scale: how the inputs are quantised, after the norm; see `quantize_inputs`.
        swiglu: x is [M, 2K], the gate and the values of `mtpkit.kernels.activation.swiglu`; there
            is no norm.
        x_scales: scales of x, the result of `quantize_inputs` with `inputs`; None: x is still to be
            quantised. With scales, `out` must be given, and there must be no norm.
        out: [M, N], any row stride, to write to; None: a new tensor.

    Returns:
        [M, N] in the dtype of x, or of `out`. Products are summed in fp32; the result is rounded
        once after scales, bias, activation and residual.
    """
    assert (gate is None) == (group_size is None), "a gated norm needs both gate and group_size"
    assert bias is None or residual is None
    if gate is not None:
        assert norm_weight is not None and group_size is not None
        x = norms.gated_rms_norm(x, gate, norm_weight, group_size, eps)
    elif norm_weight is not None:
        x = norms.rms_norm(x, norm_weight, eps, zero_centered)
    if swiglu:
        assert norm_weight is None and x_scales is None
        x = activations.swiglu(x)

    if x_scales is None:
        wide = restored_inputs(x, inputs, input_scale)
    else:
        assert out is not None and norm_weight is None
        wide = _restored(x, x_scales, inputs)
    product = wide @ widen(matrix).t()
    if bias is not None:
        product += bias.float()
    if activation is not None:
        product = activations.relu2(product)
    if residual is not None:
        product += residual.float()
    return product.to(x.dtype) if out is None else out.copy_(product)


def quantized_experts(
    x: Tensor,
    fc1: Matrix,
    fc2: Matrix,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Literal["relu2", "swiglu"],
    residual: Tensor | None = None,
    some_elsewhere: bool = False,
    inputs: Inputs = NOT_QUANTIZED,
    input_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Run the chosen experts of each token, see `mtpkit.kernels.moe.expert_mlp`, with quantised
    matrices of all experts.

    Args:
        fc1, fc2: [E, inner or twice that, h] and [E, h, inner].
        inputs: how the inputs of both products are quantised; see `quantize_inputs`.
        input_scales: scales [E] fp32 of the inputs of fc1 and of fc2, by the rule `static`.

    Returns:
        [M, h] in the dtype of x.
    """
    total = torch.zeros(len(expert_ids), fc2.shape[-2], dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        if expert >= len(fc1.values):
            continue  # of another rank
        token, place = (expert_ids == expert).nonzero(as_tuple=True)
        static = (None, None) if input_scales is None else [each[expert] for each in input_scales]
        inner = restored_inputs(x[token], inputs, static[0]) @ widen(_one(fc1, expert)).t()
        inner = _ACTIVATIONS[activation](inner)
        # As the kernels do, which keep the inner channels in the dtype of x.
        inner = inner.to(x.dtype)
        outer = restored_inputs(inner, inputs, static[1]) @ widen(_one(fc2, expert)).t()
        total.index_add_(0, token, outer * weights[token, place, None])
    if residual is not None:
        total += residual.float()
    return total.to(x.dtype)


def _one(matrix: Matrix, expert: int) -> Matrix:
    """The matrix [N, K] of one expert."""
    rows = matrix.row_scales
    zeros = matrix.zeros
    return matrix._replace(
        values=matrix.values[expert],
        scales=matrix.scales[expert],
        row_scales=None if rows is None else rows[expert],
        zeros=None if zeros is None else zeros[expert],
    )
