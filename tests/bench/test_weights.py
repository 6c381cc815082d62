"""Bytes and fp8 products of a limit against the tensors that models hold, in every format."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtpkit import LLM, SamplingParams
from mtpkit.bench import drawn
from mtpkit.bench.roofline import Cost, Roofline, Work
from mtpkit.bench.shapes import get_config, open_model
from mtpkit.bench.sizes import DEEPSEEK_V3_TINY, NEMOTRON_3_TINY
from mtpkit.bench.weights import ModelWeights
from mtpkit.checkpoint.load import ModelTensors
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.config import ModelConfig
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.errors import UserError
from mtpkit.kernels.linear import FP8
from mtpkit.kernels.quantized import Inputs
from mtpkit.model import build_model, quantize_base
from mtpkit.model.formats import Format, Fp8
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.kinds import KINDS
from mtpkit.model.quantized import for_drafts
from mtpkit.model.state import StateSizes
from tests.checkpoint.builders import GOLDEN
from tests.model.quantized_models import (
    CONFIGS,
    FORMATS,
    PLAIN,
    WEIGHT_ONLY,
    Stored,
    everywhere,
    filled,
    stored,
)
from tests.ranks import run_ranks
from tests.shared import each

CPU = torch.device("cpu")
RATES = [0.85, 0.85, 0.85]
MANY = 10**6
"""Tokens after which no expert is left out."""


def held_by(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of all matrices of a model: parameters with two dimensions, and whatever stands in
    place of some."""
    yield from ((name, each) for name, each in model.named_parameters() if each.dim() == 2)
    # `like` has no elements.
    yield from ((name, each) for name, each in model.named_buffers() if "weight._segments." in name)


def bytes_of(model: nn.Module, start: str) -> int:
    return sum(each.nbytes for name, each in held_by(model) if name.startswith(start))


def matrices(cost: Cost, phase: str) -> Work:
    return next(work for work in cost.phases[phase] if work.name == "matrices")


def check_all(model: nn.Module) -> None:
    """Check the bytes of steps that read every expert, with K = 0 and with drafts."""
    roofline = Roofline.of(model, EngineOptions())
    output = bytes_of(model, "output_layer.weight")
    assert output
    base = bytes_of(model, "decoder.layers.") + output
    k = model.mtpkit_config.mtp.num_depths
    for rates in ([], RATES[:k]):
        cost = roofline.decode(MANY, rates)
        assert matrices(cost, "verify").bytes == pytest.approx(base, rel=1e-12)
    for depth in range(1, 1 + k):
        head = 0 if model.mtpkit_config.mtp.repeated else depth - 1
        own = bytes_of(model, f"mtp.layers.{head}.") + output
        assert matrices(cost, f"draft {depth}").bytes == pytest.approx(own, rel=1e-12)


@each("family", CONFIGS)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_tensors(name: str, family: str) -> None:
    config = CONFIGS[family]
    model = filled(config, stored(config, everywhere(FORMATS[name])))
    check_all(model)
    # fewer than the same model's in fp32, of which these tests are
    whole = Roofline(config, torch.float32).decode(MANY)
    found = Roofline.of(model, EngineOptions()).decode(MANY)
    assert matrices(found, "verify").bytes < 0.9 * matrices(whole, "verify").bytes
    assert found.flops == whole.flops


@each("family", CONFIGS)
def test_formats_may_be_mixed(family: str) -> None:
    """Between layers, in one layer, in the rows of one matrix, and with plain ones."""
    names = sorted(FORMATS)

    def kinds(name: str) -> Format | None:
        number = sum(map(ord, name)) % (len(names) + 1)
        plain = any(part in name for part in PLAIN) or number == len(names)
        # Scales of inputs are one for all rows of a matrix.
        return None if plain or ".weight." in name else FORMATS[names[number]]

    config = CONFIGS[family]
    model = filled(config, stored(config, kinds))
    check_all(model)
    assert len(ModelWeights.of(model).formats) > 1


@each("family", ["mamba2", "gated delta net", "latent attention"])
def test_a_token_reads_its_own_experts_alone(family: str) -> None:
    config = CONFIGS[family]
    model = filled(config, stored(config, everywhere(WEIGHT_ONLY["nvfp4"])))
    total = bytes_of(model, "decoder.layers.") + bytes_of(model, "output_layer.weight")
    routed = sum(each.nbytes for name, each in held_by(model.decoder) if ".local_experts." in name)
    experts = KINDS["E"].experts(config)
    one = matrices(Roofline.of(model, EngineOptions()).decode(1), "verify")
    left = routed * (1 - experts.chosen / experts.count)
    assert one.bytes == pytest.approx(total - left, rel=1e-12)


@each("family", CONFIGS)
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_inputs_in_fp8_run_at_its_rate(name: str, family: str) -> None:
    """Others do not, whatever their weights are in."""
    config = CONFIGS[family]
    source = stored(config, everywhere(FORMATS[name]))
    model = filled(config, source)
    cost = Roofline.of(model, EngineOptions()).decode(7)
    work = matrices(cost, "verify")
    if name in WEIGHT_ONLY:
        assert not any(work.fp8_flops for work in cost.works)
        assert work.seconds(1e9, 1e3, 1e30) == work.flops / 1e3
        return

    experts = KINDS["E"].experts(config)
    share = experts.chosen / experts.count if experts.count else 0.0
    quantized = sum(
        matrix.shape[0] * matrix.shape[1] * (share if "experts.experts" in place else 1)
        for place, matrix in source.matrices.items()
        # Decoding multiplies by parts of it, so that it is widened.
        if place.startswith(("decoder.", "output_layer.")) and "kv_up_proj" not in place
    )
    assert work.fp8_flops == pytest.approx(2 * 7 * quantized)
    others = work.flops - work.fp8_flops
    assert work.seconds(1e30, 1e3, 2e3) == pytest.approx(others / 1e3 + work.fp8_flops / 2e3)
    assert work.seconds(1e30, 1e3) == pytest.approx(work.flops / 1e3)


@each("config", [*CONFIGS.values(), NEMOTRON_3_TINY, DEEPSEEK_V3_TINY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_models_count_as_their_config_does(config: ModelConfig, dtype: torch.dtype) -> None:
    model = build_model(config, dtype, device="cpu")
    roofline = Roofline.of(model, EngineOptions())
    again = Roofline(config, dtype)
    for size in (1, 3, 64):
        for rates in ([], RATES[: config.mtp.num_depths]):
            assert roofline.decode(size, rates) == again.decode(size, rates)
    assert roofline.prefill(4, 100.0, k=1) == again.prefill(4, 100.0, k=1)


def test_pruned_drafts_read_rows_in_the_dtype_of_the_model() -> None:
    """lm_head may be quantised; the rows that drafts choose from are widened."""
    config = CONFIGS["dense"]
    model = filled(config, stored(config, everywhere(WEIGHT_ONLY["nvfp4"])))
    whole, pruned = (
        Roofline.of(model, EngineOptions(), draft_vocab_size=size).decode(2, [0.5])
        for size in (None, 8)
    )
    output = bytes_of(model, "output_layer.weight")
    assert output < 4 * config.vocab_size * config.hidden_size
    own = matrices(whole, "draft 1").bytes - output + 4 * 8 * config.hidden_size
    assert matrices(pruned, "draft 1").bytes == own
    assert matrices(pruned, "verify") == matrices(whole, "verify")


def test_drafts_by_a_copy_in_fp8_read_its_bytes() -> None:
    """As the engine makes it, unless the lm_head is quantised already."""
    config = CONFIGS["dense"]
    plain = build_model(config, torch.bfloat16, "cpu")
    quantized = filled(config, stored(config, everywhere(WEIGHT_ONLY["nvfp4"])))
    options = EngineOptions(draft_lm_head_dtype="fp8_e4m3")
    copy = sum(
        each.nbytes for each in for_drafts(plain.output_layer.weight.detach(), "fp8_e4m3").buffers()
    )
    for size, rows in ((None, 48), (8, 8)):
        whole, copied = (
            Roofline.of(plain, each, draft_vocab_size=size).decode(2, [0.5])
            for each in (EngineOptions(), options)
        )
        saved = matrices(whole, "draft 1").bytes - matrices(copied, "draft 1").bytes
        assert saved == rows * (2 * config.hidden_size - copy / 48) > 0
        assert matrices(whole, "verify") == matrices(copied, "verify")
    assert Roofline.of(quantized, options) == Roofline.of(quantized, EngineOptions())


@each("engine", [{}, {"kv_cache_dtype": "fp8_e4m3", "state_dtype": "float16"}])
def test_caches_and_states_count_in_their_types(engine: dict[str, str]) -> None:
    """As tensors of the engine have them."""
    options = EngineOptions(**engine)
    kv = {"auto": torch.bfloat16, "fp8_e4m3": FP8}[options.kv_cache_dtype]
    state = getattr(torch, options.state_dtype)
    for letter, family in {"M": "mamba2", "*": "dense", "+": "latent attention"}.items():
        config = CONFIGS[family].replace(pattern=letter, mtp_pattern="", mtp_num_depths=0)
        model = build_model(config, torch.bfloat16, "cpu")
        sizes = StateSizes(16, 1, "replay", torch.bfloat16, state, kv)
        parts = [
            (spec.unit, name, part)
            for spec in KINDS[letter].states(config)
            for name, part in spec.parts(sizes).items()
        ]
        own = {
            unit: sum(
                part.dtype.itemsize * torch.Size(part.shape).numel()
                for at, name, part in parts
                if at == unit and (at == "block" or name == "state")
            )
            for unit in ("block", "slot")
        }
        cost = Roofline.of(model, options, ring_entries=8).decode(2, context_len=50)
        found = {work.name: work.bytes for work in cost.phases["verify"]}
        assert found.get("attention", 0) == 2 * 50 * own["block"] / 16
        assert found.get("state", 0) == pytest.approx(2 * (1 + 1 / 8) * own["slot"])


SMALL = everywhere(Fp8(rows=4, columns=4, inputs=Inputs()))
"""Blocks that no split cuts: ranks hold as many as one process."""
SPLIT = ("gated delta net", "latent attention", "dense")
Tensors = dict[str, Tensor]


def of_rank(
    rank: int,
    tensors: dict[str, Tensors],
    whole: dict[str, ModelWeights],
    parallel: dict[str, int],
) -> None:
    for family, plain in tensors.items():
        model = filled(CONFIGS[family], Stored(plain, SMALL), **parallel)
        assert ModelWeights.of(model) == whole[family], family


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
        {"pipeline_parallel": 2},
    ],
)
def test_ranks_count_the_whole_model(parallel: dict[str, int]) -> None:
    tensors = {}
    whole = {}
    for family in SPLIT:
        config = CONFIGS[family]
        # megatron-core refuses to divide experts that are not there.
        if "expert_parallel" in parallel and "E" not in config.pattern:
            continue
        plain = ModelTensors(build_model(config, device="cpu", seed=4))
        tensors[family] = {name: plain.read(name).detach() for name in plain.tensors}
        whole[family] = ModelWeights.of(filled(config, Stored(tensors[family], SMALL)))
    run_ranks(of_rank, tensors, whole, parallel)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


@each("shape", ["nemotron-3-tiny", "deepseek-v3-tiny", "qwen3-next-tiny"])
def test_shapes_drawn_in_fp8_are_those_that_are_quantised_afterwards(shape: str) -> None:
    at_once = open_model(shape, CPU, "bfloat16", quantization="fp8")
    whole = open_model(shape, CPU, "bfloat16")
    quantize_base(whole)
    found = values_of(at_once)
    expected = values_of(whole)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert bits_equal(found[name], value), name
        assert found[name].dtype == value.dtype


@each("shape", ["nemotron-3-tiny", "deepseek-v3-tiny", "qwen3-next-tiny"])
def test_shapes_are_drawn_in_published_formats(shape: str) -> None:
    """fp8 in blocks with the heads' layers, 4 bits of the base alone."""
    plain = ModelWeights.in_dtype(get_config(shape), torch.bfloat16)
    for name, formats in {"fp8-blocks": "fp8", "int4": "int4", "nvfp4": "nvfp4"}.items():
        model = open_model(shape, CPU, "bfloat16", weight_format=name)
        weights = ModelWeights.of(model)
        assert weights.formats == (formats,)
        check_all(model)
        in_heads = any(isinstance(each, QuantizedWeight) for each in model.mtp.modules())
        assert in_heads == (name == "fp8-blocks")
        assert weights.output == plain.output
        assert weights.heads[0].eh_proj == plain.heads[0].eh_proj
        assert any(layer.fp8 for layer in weights.base) == (name == "fp8-blocks")


def test_a_shape_is_drawn_as_lightning_is_published() -> None:
    """Experts and lm_head in NVFP4, Mamba2 in fp8 with one scale and fixed scales of inputs, the
    rest as it is; and it decodes."""
    model = open_model("nemotron-3-tiny", CPU, "float32", "*E", weight_format="nemotron-nvfp4")
    check_all(model)
    found = {
        name.removesuffix(".weight"): (weight.codes, {one.inputs.rule for one in weight.segments})
        for name, weight in model.named_modules()
        if isinstance(weight, QuantizedWeight)
    }
    assert found.pop("output_layer") == ({"e2m1"}, {"none"})
    letters = {name: "ME*E"[int(name.split(".")[2])] for name in found}
    assert all(name.startswith("decoder.") for name in found)
    wanted = {"M": ({"e4m3"}, {"static"}), "E": ({"e2m1"}, {"none"})}
    assert found == {name: wanted[letter] for name, letter in letters.items()}
    assert {*letters.values()} == {"M", "E"}

    weights = ModelWeights.of(model)
    assert weights.output_quantized and weights.formats == ("fp8", "nvfp4")
    llm = LLM(model, num_speculative_tokens=3)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9))
    assert len(output.outputs[0].token_ids) == 9


def test_layers_are_drawn_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of no two layers are in bf16 at once."""
    built: list[nn.Module] = []
    layers: list[set[str]] = []
    build = drawn.build_model
    quantize = drawn.quantize_linear

    def keeping(*args: Any, **settings: Any) -> nn.Module:
        built.append(build(*args, **settings))
        return built[0]

    def noting(module: nn.Module, kind: Format) -> None:
        names = (name for name, each in built[0].named_parameters() if not each.is_meta)
        layers.append({name.partition(".mlp.")[0] for name in names if ".local_experts." in name})
        quantize(module, kind)

    monkeypatch.setattr(drawn, "build_model", keeping)
    monkeypatch.setattr(drawn, "quantize_linear", noting)
    open_model("nemotron-3-tiny", CPU, "bfloat16", weight_format="nvfp4")
    assert max(map(len, layers)) == 1


def test_a_directory_has_its_own_format() -> None:
    told = r"weight format int4 is for a shape .*, not for a model directory as"
    with pytest.raises(UserError, match=told):
        open_model(str(GOLDEN / "tp1/mla"), CPU, weight_format="int4")
