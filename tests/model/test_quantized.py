"""Models whose weights stay quantised, against models with the same weights widened."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.checkpoint import save_model
from mtpkit.checkpoint.load import ModelTensors, fill_model
from mtpkit.checkpoint.shards import targets_of
from mtpkit.checkpoint.waiting import quantized_linears
from mtpkit.errors import UserError
from mtpkit.kernels.activation.reference import relu2, swiglu
from mtpkit.kernels.norm.reference import gated_rms_norm, rms_norm
from mtpkit.kernels.quantized import NOT_QUANTIZED, Inputs, quantize_inputs, reference
from mtpkit.model import (
    SequenceInput,
    base_forward,
    build_model,
    compute_logits,
    output_weight,
    stack_experts,
    unroll_depths,
)
from mtpkit.model.formats import ONLINE, base, weight
from mtpkit.model.formats.weight import QuantizedWeight, multiply, product
from mtpkit.model.layers import linear
from mtpkit.model.layers.moe import MoELayer
from mtpkit.model.quantized import quantize_base
from tests.kernels.recurrence import relative
from tests.model.quantized_models import (
    CONFIGS,
    FORMATS,
    PLAIN,
    WEIGHT_ONLY,
    WITH_INPUTS,
    everywhere,
    filled,
    quantize,
    stored,
)

TOKENS = torch.randint(0, 48, (1, 20), generator=torch.Generator().manual_seed(1))


def logits_of(model) -> list[Tensor]:
    """Logits of the base and of two depths."""
    hidden = base_forward(model, TOKENS, SequenceInput())
    states = [hidden, *unroll_depths(model, hidden, TOKENS, 2)]
    return [compute_logits(model, each) for each in states]


def errors(model, twin) -> list[float]:
    found = zip(logits_of(model), logits_of(twin), strict=True)
    return [relative(have, want.double()) for have, want in found]


def quantized_in(model) -> dict[str, QuantizedWeight]:
    return {name: model.get_submodule(name) for name in quantized_linears(model)}


@torch.no_grad()
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_widened_weights(family, kind):
    source = stored(CONFIGS[family], everywhere(WEIGHT_ONLY[kind]))
    model = filled(CONFIGS[family], source)
    twin = filled(CONFIGS[family], source, keep=False)
    assert max(errors(model, twin)) < 1e-5
    assert stack_experts(model)
    assert max(errors(model, twin)) < 1e-5

    every = {name for name in source.formats if "kv_up" not in name}
    segments = [part for each in quantized_in(model).values() for part in each.segments]
    codes = sum(math.prod(part.matrix.shape) for part in segments if hasattr(part, "codes"))
    assert isinstance(output_weight(model), QuantizedWeight)
    assert codes == sum(math.prod(source.tensors[name].shape) for name in every)
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def rounded(x: Tensor, inputs: Inputs, scale: Tensor | None) -> Tensor:
    """x [M, K] as e4m3 restores it."""
    groups = x.unflatten(1, (-1, inputs.columns if inputs.rule == "group" else x.shape[1]))
    scales = groups.abs().amax(-1, keepdim=True) / 448 if scale is None else scale
    return ((groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales).flatten(1)


def round_inputs(twin, model, monkeypatch) -> None:
    """Make the products of a model with plain weights round their inputs as another one does."""
    rules = {}
    for name, each in quantized_in(model).items():
        rules[twin.get_parameter(name).data_ptr()] = [
            (len(segment), segment.inputs, segment.input_scale) for segment in each.segments
        ]

    def linear(
        x, weight, *, norm_weight=None, eps=1e-5, zero_centered=False, group_size=None, gate=None,
        bias=None, activation=None, residual=None, early=False,
    ):  # fmt: skip
        if gate is not None:
            x = gated_rms_norm(x, gate, norm_weight, group_size, eps)
        elif norm_weight is not None:
            x = rms_norm(x, norm_weight, eps, zero_centered)
        own = rules.get(weight.data_ptr(), [(len(weight), NOT_QUANTIZED, None)])
        y = [
            F.linear(x if inputs == NOT_QUANTIZED else rounded(x, inputs, scale), rows)
            for rows, (_, inputs, scale) in zip(
                weight.split([count for count, _, _ in own]), own, strict=True
            )
        ]
        y = torch.cat(y, -1) + (0 if bias is None else bias)
        y = relu2(y) if activation else y
        return y if residual is None else residual + y

    def expert_mlp(
        x, fc1, fc2, expert_ids, weights, activation, residual=None, some_elsewhere=False
    ):
        act = relu2 if activation == "relu2" else swiglu
        outputs = []
        for token, chosen, factors in zip(x, expert_ids.tolist(), weights, strict=True):
            own = [
                linear(act(linear(token[None], fc1[each])), fc2[each])[0] * factor
                for each, factor in zip(chosen, factors, strict=True)
            ]
            outputs.append(torch.stack(own).sum(0))
        total = torch.stack(outputs)
        return total if residual is None else residual + total

    monkeypatch.setattr(weight, "linear", linear)
    monkeypatch.setattr(weight, "expert_mlp", expert_mlp)


@torch.no_grad()
@pytest.mark.parametrize("kind", WITH_INPUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_a_twin_that_rounds_inputs(family, kind, monkeypatch):
    source = stored(CONFIGS[family], everywhere(WITH_INPUTS[kind]))
    model = filled(CONFIGS[family], source)
    twin = filled(CONFIGS[family], source, keep=False)
    before = errors(model, twin)
    assert stack_experts(twin)
    # The map from weights to rules is by their places, which stacking changes.
    round_inputs(twin, model, monkeypatch)
    assert min(before) > 1e-2
    assert max(errors(model, twin)) < 1e-4
    assert stack_experts(model)
    assert max(errors(model, twin)) < 1e-4


def mixed(name: str):
    """q, k, v and z of a gated delta net in fp8, b and a plain, the rest in 4 bits."""
    if any(part in name for part in PLAIN):
        return None
    if "in_proj" in name:
        return FORMATS["block"]
    return FORMATS["nvfp4" if "experts" in name else "int4"]


@torch.no_grad()
def test_one_weight_has_rows_of_several_formats():
    config = CONFIGS["gated delta net"]
    source = stored(config, mixed)
    model = filled(config, source)
    assert max(errors(model, filled(config, source, keep=False))) < 1e-5
    projected = model.decoder.layers[0].self_attention.in_proj.weight
    assert [len(each) for each in projected.segments] == [96, 8]
    assert [hasattr(each, "codes") for each in projected.segments] == [True, False]


def some_weight(dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """32 rows in fp8 with a scale for each matrix, 16 of them from another, and 4 plain rows."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, 32, generator=generator) for count in (16, 16, 4)]
    kind = FORMATS["matrix"]
    return QuantizedWeight([quantize(kind, rows[0]), quantize(kind, 9 * rows[1]), rows[2]], dtype)


def test_a_weight_looks_like_the_tensor_it_stands_for():
    found = some_weight()
    assert found.shape == (36, 32) and len(found) == 36 and found.dtype == torch.float32
    assert len(found.segments) == 2
    assert not [*found.parameters()] and not found.state_dict()
    codes = found.segments[0].values.clone()
    again = copy.deepcopy(found).to(torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert again.segments[0].values.dtype == codes.dtype
    assert torch.equal(again.segments[0].values.float(), codes.float())
    assert again.segments[0].scales.dtype == torch.float32
    assert again.segments[1].values.dtype == torch.bfloat16
    assert all(each.is_meta for each in found.to("meta").buffers())


def test_ops_around_a_weight_of_several_segments():
    found = some_weight()
    wide = found.widened()
    generator = torch.Generator().manual_seed(3)
    x, gate = torch.randn(2, 5, 32, generator=generator)
    norm = torch.rand(32, generator=generator)
    bias = torch.randn(36, generator=generator)
    residual = torch.randn(5, 36, generator=generator)
    around = [
        dict(norm_weight=norm, zero_centered=True, bias=bias, activation="relu2"),
        dict(norm_weight=norm, gate=gate, group_size=8, eps=0.1, residual=residual),
    ]
    for each in around:
        want = multiply(x, wide, **{n: copy.deepcopy(value) for n, value in each.items()})
        assert relative(multiply(x, found, **each), want.double()) < 1e-5


@pytest.mark.parametrize("kind", FORMATS)
def test_swiglu_before_a_weight(kind):
    """Of one segment, of several, and plain."""
    parts = [quantize(FORMATS[kind], torch.randn(16, 32)), torch.randn(8, 32)]
    x = torch.randn(5, 64)
    residual = torch.randn(5, 24)
    for pieces in (parts[:1], parts):
        found = QuantizedWeight(pieces, torch.float32)
        around = dict(residual=residual[:, : len(found)].contiguous())
        want = multiply(swiglu(x), found, **copy.deepcopy(around))
        assert torch.equal(multiply(x, found, swiglu=True, **around), want)
    want = multiply(swiglu(x), parts[1])
    assert torch.equal(multiply(x, parts[1], swiglu=True), want)


def test_a_dense_layer_has_no_launch_for_its_activation(monkeypatch):
    """If the inputs of its second matrix are quantised."""
    config = CONFIGS["dense"]
    model = filled(config, stored(config, everywhere(FORMATS["static, inputs"])))
    monkeypatch.setattr(linear, "ACTIVATIONS", {})
    layer = model.decoder.layers[1]
    with torch.no_grad():
        assert layer._step(torch.randn(3, 1, config.hidden_size), None).isfinite().all()


@pytest.mark.parametrize("kind", ["row", "token, inputs"])
def test_a_backward_passes_the_widened_matrix(kind):
    matrix = quantize(FORMATS[kind], torch.randn(16, 32))
    found = QuantizedWeight([matrix], torch.float32)
    x = torch.randn(2, 3, 32, requires_grad=True)
    bias = torch.randn(16, requires_grad=True)
    outer = torch.randn(2, 3, 16)
    (product(x, found, bias) * outer).sum().backward()
    assert relative(x.grad, (outer @ matrix.widen()).double()) < 1e-5
    assert relative(bias.grad, outer.sum((0, 1)).double()) < 1e-5


def test_a_model_passes_gradients_to_its_heads():
    """Through all its layers: the heads' own are quantised here, so only norms get some."""
    config = CONFIGS["gated delta net"]
    source = stored(config, everywhere(FORMATS["row"]))
    grads = []
    for keep in (True, False):
        model = filled(config, source, keep)
        norm = model.decoder.layers[0].self_attention.in_proj.layer_norm_weight.requires_grad_()
        sum(each.square().mean() for each in logits_of(model)).backward()
        grads.append(norm.grad)
    assert relative(grads[0], grads[1].double()) < 1e-4


def test_the_largest_scale_of_inputs_counts():
    kind = WITH_INPUTS["static"]
    parts = [quantize(kind, factor * torch.randn(16, 32)) for factor in (1, 9)]
    found = QuantizedWeight(parts, torch.float32)
    (segment,) = found.segments
    scales = [float(part.parts["input_scale"]) for part in parts]
    assert float(segment.input_scale) == max(scales) > min(scales)


def test_the_largest_scale_counts_for_parts_that_are_apart():
    """They read the same inputs, which are quantised once."""
    kind = WITH_INPUTS["static"]
    first, last = (quantize(kind, factor * torch.randn(16, 32)) for factor in (1, 9))
    found = QuantizedWeight([first, torch.randn(8, 32), last], torch.float32)
    scales = [segment.input_scale for segment in found.segments]
    assert scales[1] is None
    assert scales[0] == scales[2] == last.parts["input_scale"].amax() > first.parts["input_scale"]


@pytest.mark.parametrize("kind", WITH_INPUTS)
def test_segments_share_inputs_that_are_quantised_once(kind, monkeypatch):
    parts = [quantize(WITH_INPUTS[kind], torch.randn(16, 32)) for _ in range(2)]
    found = QuantizedWeight([parts[0], torch.randn(8, 32), parts[1]], torch.float32)
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return quantize_inputs(*arguments)

    monkeypatch.setattr(weight, "quantize_inputs", counted)
    x = torch.randn(5, 32)
    have = multiply(x, found)
    assert len(calls) == 1
    alone = [multiply(x, QuantizedWeight([part], torch.float32)) for part in parts]
    assert have.shape == (5, 40)
    if kind != "static":
        assert torch.equal(have[:, :16], alone[0]) and torch.equal(have[:, 24:], alone[1])
    read = reference.restored_inputs(x, parts[0].format.inputs, found.segments[0].input_scale)
    want = read @ torch.cat([part.widen() for part in parts]).t()
    assert relative(have[:, [*range(16), *range(24, 40)]], want.double()) < 1e-5


@pytest.mark.parametrize("rows", [(24, 40, 16), (32, 16, 8), (5, 5, 5)])
def test_parts_whose_groups_do_not_fit_together(rows):
    """Blocks that end within a part, between two parts, and whole parts of one scale."""
    parts = [torch.randn(count, 32) * 3**at for at, count in enumerate(rows)]
    for kind in ("block", "matrix", "nvfp4", "int4"):
        matrices = [quantize(FORMATS[kind], part) for part in parts]
        found = QuantizedWeight(matrices, torch.float32)
        assert len(found.segments) == 1
        want = torch.cat([matrix.widen() for matrix in matrices])
        assert torch.equal(found.widened(), want)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_matrix_is_widened_a_few_rows_at_a_time(kind, monkeypatch):
    matrix = quantize(FORMATS[kind], torch.randn(72, 32))
    found = QuantizedWeight([matrix], torch.bfloat16)
    taken = []
    whole = base.widen

    def noted(rows, dtype):
        taken.append(len(rows.values))
        return whole(rows, dtype)

    monkeypatch.setattr(base, "widen", noted)
    monkeypatch.setattr(base, "_WIDENED_ROWS", 20)
    want = whole(matrix.matrix())
    assert torch.equal(found.widened(torch.float32), want)
    assert torch.equal(matrix.widen(torch.bfloat16), want.bfloat16())
    assert max(taken) <= 20 and sum(taken) == 2 * 72


@torch.no_grad()
def test_experts_of_several_formats_run_one_after_the_other():
    config = CONFIGS["mamba2"]

    def kinds(name: str):
        return FORMATS["int4" if "[1]" in name else "row"]

    source = stored(config, everywhere(FORMATS["row"]))
    alike = filled(config, source)
    assert stack_experts(alike)
    source = stored(config, lambda name: everywhere(kinds(name))(name))
    model = filled(config, source)
    assert not stack_experts(model)
    assert max(errors(model, filled(config, source, keep=False))) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("shared", ["row", "int4", None])
def test_a_shared_expert_joins_those_of_its_format(shared):
    config = CONFIGS["gated delta net"]

    def kinds(name: str):
        kind = FORMATS["row"] if "shared" not in name else shared and FORMATS[shared]
        return kind and everywhere(kind)(name)

    source = stored(config, kinds)
    model = filled(config, source)
    assert stack_experts(model)
    layer = next(each for each in model.modules() if isinstance(each, MoELayer))
    assert layer._joins == ("gated" if shared == "row" else "apart")
    assert max(errors(model, filled(config, source, keep=False))) < 1e-5


@torch.no_grad()
def test_stacked_experts_are_views_that_are_made_once():
    config = CONFIGS["latent attention"]
    model = filled(config, stored(config, everywhere(FORMATS["nvfp4"])))
    layer = next(each for each in model.modules() if isinstance(each, MoELayer))
    before = [each.linear_fc1.weight.widened() for each in layer.experts.local_experts]
    assert not layer.is_stacked
    assert stack_experts(model) and layer.is_stacked
    places = [each.linear_fc1.weight.data_ptr() for each in layer.experts.local_experts]
    assert len(set(torch.tensor(places).diff().tolist())) == 1
    assert stack_experts(model)
    assert places == [each.linear_fc1.weight.data_ptr() for each in layer.experts.local_experts]
    after = [each.linear_fc1.weight.widened() for each in layer.experts.local_experts]
    assert all(map(torch.equal, before, after))
    layer._apply(torch.clone)
    assert not layer.is_stacked


@torch.no_grad()
def test_a_base_quantised_at_load_is_one_quantised_in_place():
    config = CONFIGS["mamba2"]
    source = stored(config, lambda name: None)
    model = build_model(config, device="cpu", init="none", waiting=True)
    fill_model(model, source, Path("file"), quantization="fp8")
    twin = filled(config, source, keep=False)
    quantize_base(twin)
    assert quantized_linears(model) == quantized_linears(twin)
    assert all(name.startswith("decoder.") for name in quantized_linears(model))
    # rows of in_proj number 100, which is no multiple of 16
    assert not any("in_proj" in name for name in quantized_linears(model))
    assert sum("experts" in name for name in quantized_linears(model)) == 10
    found = quantized_in(model)["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert found.segments[0].inputs == ONLINE.inputs
    assert all(map(torch.equal, logits_of(model), logits_of(twin)))


def test_quantised_weights_are_not_written(tmp_path):
    config = CONFIGS["dense"]
    model = filled(config, stored(config, everywhere(FORMATS["int4"])))
    assert not any("linear_fc1.weight" in name for name in targets_of(model))
    with pytest.raises(UserError, match=r"run is not written: the model's weights are quantised"):
        save_model(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"^the model's weights are quantised \(decoder"):
        ModelTensors(model)
