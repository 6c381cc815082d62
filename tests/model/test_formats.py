"""Quantisation formats: their elements, and rows and columns taken from them."""

import math

import pytest
import torch
from torch import Tensor

from mtpkit.kernels.quantized import Inputs
from mtpkit.kernels.quantized.reference import quantize_inputs, quantized_linear, widen
from mtpkit.model.formats import (
    ONLINE,
    CutGroup,
    Format,
    Fp8,
    Int4,
    Nvfp4,
    Quantized,
    join,
    odd_values,
)
from tests.shared import each

FORMATS: dict[str, Format] = {
    "block": Fp8(),
    "row": ONLINE,
    "matrix": Fp8(inputs=Inputs(), rows=None, columns=None, scale="weight_scale"),
    "int4": Int4(),
    "nvfp4": Nvfp4(),
    "reciprocal": Nvfp4(packed="weight_packed", whole="weight_global_scale"),
}
SCALED_INPUTS: dict[str, Format] = {
    "input_scale": Fp8(rows=None, columns=None, scale="weight_scale", inputs=Inputs("static")),
    "input_global_scale": Nvfp4(input_scale="input_global_scale"),
}
"""Formats with a scale of inputs, by the name of that part."""
STEPS = {"fp8": 1 / 16, "int4": 1 / 14, "nvfp4": 1 / 4}
"""Largest error of an element relative to the largest magnitude of its group, or to itself."""


def quantize(kind: Format, weight: Tensor) -> Quantized:
    return Quantized(kind, tuple(weight.shape), kind.quantize(weight))


def weight_of(rows: int = 256, columns: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


@each("name", FORMATS)
def test_elements_are_near_the_originals(name: str) -> None:
    weight = weight_of()
    found = widen(quantize(FORMATS[name], weight).matrix())
    error = (found - weight).abs().amax() / weight.abs().amax()
    assert error < STEPS[FORMATS[name].name]
    # A second round finds the same codes: quantising is a projection.
    again = widen(quantize(FORMATS[name], found).matrix())
    assert torch.allclose(again, found, rtol=1e-2, atol=1e-3)


@each("name", FORMATS)
def test_parts_have_the_declared_shapes(name: str) -> None:
    kind = FORMATS[name]
    shape = (256, 384)
    parts = kind.quantize(weight_of(*shape))
    declared = kind.parts()
    assert {n: tuple(part.shape) for n, part in parts.items()} == {
        n: declared[n].shape(shape) for n in parts
    }
    assert kind.shape_of(tuple(parts[kind.codes].shape)) == shape


def test_codes_of_each_format_by_hand() -> None:
    one = torch.tensor([[1.0]])
    fp4 = Quantized(
        Nvfp4(),
        (1, 16),
        {
            "weight": torch.arange(8, dtype=torch.uint8).mul(2)[None] + 16,
            "weight_scale": (2 * one).to(torch.float8_e4m3fn),
            "weight_scale_2": 0.5 * one,
        },
    )
    # Byte j holds the codes of columns 2j (lower half) and 2j + 1; here 2j mod 16 and 1 + j // 8.
    even = [0.0, 1.0, 2.0, 4.0, -0.0, -1.0, -2.0, -4.0]
    assert widen(fp4.matrix())[0, ::2].tolist() == even
    assert widen(fp4.matrix())[0, 1::2].tolist() == [0.5] * 8

    # Codes 0 to 15, that of column 0 in the lowest bits.
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - 2**32]], dtype=torch.int32)
    int4 = Quantized(
        Int4(columns=16),
        (1, 16),
        {"weight_packed": words, "weight_scale": (3 * one).to(torch.bfloat16)},
    )
    assert widen(int4.matrix())[0].tolist() == [3.0 * (code - 8) for code in range(16)]


@each("name", FORMATS)
def test_rows_and_columns_are_those_of_the_matrix(name: str) -> None:
    matrix = quantize(FORMATS[name], weight_of())
    whole = widen(matrix.matrix())
    rows = torch.cat([torch.arange(128, 256), torch.arange(128)])
    assert torch.equal(widen(matrix.take_rows(rows).matrix()), whole[rows])
    assert torch.equal(widen(matrix.take_columns(128, 256).matrix()), whole[:, 128:])
    other = quantize(FORMATS[name], 3 * weight_of())
    both = join([matrix, other])
    assert torch.equal(widen(both.matrix())[:256], whole)
    assert torch.equal(widen(both.take_rows(rows + 256).matrix()), widen(other.matrix())[rows])


def test_groups_that_share_a_scale_are_not_cut() -> None:
    block = quantize(FORMATS["block"], weight_of())
    odd = torch.arange(256).roll(1)
    with pytest.raises(CutGroup, match="weight_scale_inv"):
        block.take_rows(odd)
    with pytest.raises(CutGroup, match="weight_scale_inv"):
        block.take_columns(0, 100)
    with pytest.raises(CutGroup, match="weight_scale_inv"):
        join([quantize(FORMATS["block"], weight_of(100)), block])
    with pytest.raises(CutGroup, match="weight_scale"):
        quantize(FORMATS["nvfp4"], weight_of()).take_columns(8, 256)
    # A partial block may be the last one, as in a file.
    edge = join([block, quantize(FORMATS["block"], weight_of(100))])
    assert edge.take_rows(torch.arange(256, 356)).shape == (100, 256)
    # A scale per row cuts nothing.
    assert quantize(FORMATS["row"], weight_of()).take_rows(odd).shape == (256, 256)


@each("value", (math.nan, math.inf, -1.0, 0.0))
def test_scales_that_no_quantiser_writes(value: float) -> None:
    for kind in FORMATS.values():
        matrix = quantize(kind, weight_of())
        assert not list(odd_values(matrix))
        for part in matrix.parts.keys() - {kind.codes}:
            # e4m3 has no infinity
            if matrix.parts[part].dtype == torch.float8_e4m3fn and math.isinf(value):
                continue
            spoilt = matrix.parts[part].clone()
            spoilt[-1, -1] = value
            found = list(odd_values(Quantized(kind, matrix.shape, {**matrix.parts, part: spoilt})))
            assert len(found) == 1
            assert found[0].startswith(part)


@each("value", (math.nan, math.inf, -1.0, 0.0, 1e-40, 3e38))
def test_scales_of_inputs_that_no_quantiser_writes(value: float) -> None:
    weight = weight_of()
    for part, kind in SCALED_INPUTS.items():

        def scaled(scale: float, part: str = part, kind: Format = kind) -> Quantized:
            parts = kind.quantize(weight) | {part: torch.tensor([[scale]])}
            return Quantized(kind, tuple(weight.shape), parts)

        assert not list(odd_values(scaled(0.5)))
        (found,) = odd_values(scaled(value))
        assert found.startswith(part)


@each("value", (1e-40, 3e38))
def test_scales_that_make_weights_vanish_or_infinite(value: float) -> None:
    for kind in FORMATS.values():
        matrix = quantize(kind, weight_of())
        for part in matrix.parts.keys() - {kind.codes}:
            if matrix.parts[part].dtype == torch.float8_e4m3fn:
                continue  # whose largest number is 448
            spoilt = torch.full_like(matrix.parts[part], value)
            (found,) = odd_values(Quantized(kind, matrix.shape, {**matrix.parts, part: spoilt}))
            assert found.startswith(f"{part} is {spoilt[0, 0].item():.3g} at most, not from")


def test_scales_of_rows_that_are_nearly_zero_are_fine() -> None:
    weight = weight_of()
    weight[0] *= 1e-36
    assert not list(odd_values(quantize(FORMATS["row"], weight)))


def test_scale_zero_is_fine_for_zeros() -> None:
    weight = weight_of()
    weight[:128, :128] = 0
    matrix = quantize(FORMATS["block"], weight)
    matrix.parts["weight_scale_inv"][0, 0] = 0
    assert not list(odd_values(matrix))


def test_inputs_are_quantised_by_their_rule() -> None:
    x = torch.tensor([[448.0, 1.0, -3.0, 0.0], [0.0, 0.0, 7.0, -7.0]])
    values, scales = quantize_inputs(x, Inputs("token"))
    assert scales.flatten().tolist() == [1.0, 7 / 448]
    assert values.float()[1].tolist() == [0.0, 0.0, 448.0, -448.0]
    values, scales = quantize_inputs(x, Inputs("group", 2))
    assert torch.allclose(scales, torch.tensor([[448, 3], [448, 7]]) / 448)
    values, scales = quantize_inputs(x, Inputs("static"), torch.tensor(0.5))
    assert values.float()[0].tolist() == [448.0, 2.0, -6.0, 0.0]


@each("name", FORMATS)
def test_a_row_has_the_same_product_alone_and_beside_others(name: str) -> None:
    kind = FORMATS[name]
    matrix = quantize(kind, weight_of()).matrix()
    x = weight_of(5) * 16
    together = quantized_linear(x, matrix, inputs=kind.inputs)
    alone = torch.cat([quantized_linear(row[None], matrix, inputs=kind.inputs) for row in x])
    assert torch.allclose(together, alone, atol=1e-5)
    exact = x @ widen(matrix).t()
    bound = 0.0 if kind.inputs.rule == "none" else 0.05
    assert (together - exact).norm() / exact.norm() <= bound + 1e-6


def test_scales_of_blocks_go_to_rows_and_back() -> None:
    kind = Fp8(rows=16, columns=32)
    matrix = quantize(kind, weight_of(40, 64))
    rows = matrix.expanded()
    assert rows.format == Fp8(rows=1, columns=32) and rows.parts["weight_scale_inv"].shape[0] == 40
    assert torch.equal(rows.widen(), matrix.widen())
    back = rows.gathered(kind)
    assert back.format == kind
    assert torch.equal(back.parts["weight_scale_inv"], matrix.parts["weight_scale_inv"])
    rows.parts["weight_scale_inv"][17] *= 2
    with pytest.raises(CutGroup, match="different values"):
        rows.gathered(kind)


@each("name", FORMATS)
def test_rows_widen_alike_in_pieces(name: str) -> None:
    matrix = quantize(FORMATS[name], weight_of(2048 + 256, 128))
    assert torch.equal(matrix.widen(), widen(matrix.matrix()))
    part = matrix.narrow_rows(128, 300)
    assert torch.equal(part.widen(), matrix.widen()[128:300])
