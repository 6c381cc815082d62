"""Writes the checkpoints beside it with the libraries of quantisers: random tiny models, in the
layouts that are published.

    python -m tests.checkpoint.quantizers.write

It needs compressed-tensors 0.20, nvidia-modelopt 0.47 and transformers 5.24, which tests do not.
Beside each checkpoint, `expected.safetensors` holds the first row of each of its quantised matrices
as the library widens it.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoint import block_models, builders, qwen_models

HERE = Path(__file__).parent
ROWS = 1
"""Rows of a matrix whose values are kept."""

Tensors = dict[str, Tensor]
Written = tuple[Tensors, dict[str, Any], dict[str, Any] | None, Tensors]
"""Tensors, `quantization_config`, ModelOpt's own file, and matrices as the library widens them."""


def main() -> None:
    for name, (write, quantize) in CHECKPOINTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "plain"
            write(source)
            tensors, settings, own, widened = quantize(load_file(source / "model.safetensors"))
            target = HERE / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            whole = {key: value.contiguous() for key, value in tensors.items()}
            save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
            rows = {key: value[:ROWS].float().contiguous() for key, value in widened.items()}
            save_file(rows, target / "expected.safetensors")
            config = json.loads((source / "config.json").read_text())
            config["quantization_config"] = settings
            (target / "config.json").write_text(json.dumps(config, separators=(",", ":")) + "\n")
            if own is not None:
                (target / "hf_quant_config.json").write_text(
                    json.dumps(own, separators=(",", ":")) + "\n"
                )


def as_model(tensors: Tensors, modules: Iterable[str]) -> nn.Module:
    """A model with a linear layer for each of some modules, under their names: a model of
    transformers has other names for the experts, and no heads."""
    model = nn.Module()
    for name in modules:
        *path, last = name.split(".")
        place = model
        for step in path:
            if step not in place._modules:
                place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        weight = tensors[f"{name}.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        place.add_module(last, linear)
    return model


def linears(tensors: Tensors, apart: Callable[[str], bool]) -> list[str]:
    """Modules with a matrix of which none of the names in `apart` is true."""
    names = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and name.endswith(".weight") and "embed" not in name
    ]
    return [name for name in names if not apart(name)]


def usual(name: str) -> bool:
    """Whether a module is usually left in bf16: routers, lm_head and what joins the heads."""
    return name.endswith(
        ("lm_head", ".head", ".gate", "eh_proj", ".fc", "shared_expert_gate", "_a", "_b")
    )


def rest(tensors: Tensors, modules: Iterable[str]) -> Tensors:
    return {key: value for key, value in tensors.items() if key[:-7] not in {*modules}}


def compressed_tensors(scheme: str, **changes: Any) -> Callable[[Tensors], Written]:
    """Quantise as llm-compressor does, by a preset of compressed-tensors."""

    def quantize(tensors: Tensors) -> Written:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.compressors.base import decompress_module
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        modules = linears(tensors, usual)
        model = as_model(tensors, modules)
        preset = preset_name_to_scheme(scheme, ["Linear"])
        weights = preset.weights.model_copy(update=changes)
        group = QuantizationScheme(**{**dict(preset), "weights": weights})
        left = linears(tensors, lambda name: not usual(name))
        config = QuantizationConfig(config_groups={"group_0": group}, ignore=left)
        apply_quantization_config(model, config)
        for number, name in enumerate(modules):
            module = model.get_submodule(name)
            if hasattr(module, "weight_global_scale"):
                low, high = module.weight.aminmax()
                module.weight_global_scale.data.copy_(generate_gparam(low, high))
            low, high = limits(module.weight.float(), module.weight_scale.shape, weights)
            scales, zeros = calculate_qparams(
                low, high, weights, getattr(module, "weight_global_scale", None)
            )
            module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
            for part in ("input_scale", "input_global_scale"):
                if hasattr(module, part):
                    getattr(module, part).data.fill_(0.03125 * (number + 1))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        stored = {key: value.clone() for key, value in model.state_dict().items()}
        with tempfile.TemporaryDirectory() as scratch:
            compressor.update_config(scratch)
            settings = json.loads((Path(scratch) / "config.json").read_text())
        settings = settings["quantization_config"]
        settings["ignore"] = left
        for name in modules:
            decompress_module(model.get_submodule(name))
        widened = {f"{name}.weight": model.get_submodule(name).weight.data for name in modules}
        return rest(tensors, modules) | stored, settings, None, widened

    return quantize


def limits(weight: Tensor, shape: torch.Size, args: Any) -> tuple[Tensor, Tensor]:
    """Least and largest values of the groups that have a scale each."""
    if args.strategy == "block":
        rows, columns = args.block_structure
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        padded = nn.functional.pad(weight, padding)
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    groups = weight.unflatten(1, (shape[-1], -1))
    return groups.amin(-1), groups.amax(-1)


def modelopt(algorithm: Callable[[str], str]) -> Callable[[Tensors], Written]:
    """Quantise as ModelOpt does: `algorithm` gives the name of the preset of a module, or an empty
    text."""

    def quantize(tensors: Tensors) -> Written:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
        from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
        from modelopt.torch.export.unified_export_hf import _export_quantized_weight
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        modules = linears(tensors, lambda name: False)
        model = as_model(tensors, modules)
        chosen = {name: algorithm(name) for name in modules if algorithm(name)}
        rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
        for name, preset in chosen.items():
            for rule in getattr(mtq, f"{preset}_CFG")["quant_cfg"]:
                which = rule["quantizer_name"].removeprefix("*")
                if which in ("weight_quantizer", "input_quantizer") and "cfg" in rule:
                    rules.append({"quantizer_name": f"{name}.{which}", "cfg": rule["cfg"]})

        def forward(_: nn.Module) -> None:
            generator = torch.Generator().manual_seed(0)
            for name in modules:
                linear = model.get_submodule(name)
                size = linear.weight.shape[1]
                linear(torch.randn(4, size, generator=generator).to(linear.weight.dtype))

        mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, forward)
        own = get_quant_config(model)
        for name in chosen:
            _export_quantized_weight(model.get_submodule(name), torch.bfloat16)
        stored = postprocess_state_dict(model.state_dict(), 0, None)
        widened = {}
        for name in chosen:
            parts = {part: stored[f"{name}.{part}"] for part in ("weight", "weight_scale")}
            whole = stored.get(f"{name}.weight_scale_2")
            if whole is None:
                scale = parts["weight_scale"]
                scale = scale[:, None] if scale.dim() == 1 else scale
                widened[f"{name}.weight"] = parts["weight"].float() * scale
            else:
                shape = (*parts["weight"].shape[:-1], 2 * parts["weight"].shape[-1])
                packed = NVFP4QTensor(shape, torch.float32, parts["weight"])
                widened[f"{name}.weight"] = packed.dequantize(
                    scale=parts["weight_scale"], double_scale=whole, block_sizes={-1: 16}
                )
        settings = convert_hf_quant_config_format(own)
        return rest(tensors, modules) | stored, settings, own, widened

    return quantize


def fine_grained(tensors: Tensors) -> Written:
    """Quantise in blocks as transformers does."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    modules = linears(tensors, usual)
    left = linears(tensors, lambda name: not usual(name))
    config = FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=left)
    quantizer = SimpleNamespace(quantization_config=config)
    stored: Tensors = {}
    widened: Tensors = {}
    for name in modules:
        key = f"{name}.weight"
        found = Fp8Quantize(quantizer).convert({key: tensors[key]})
        assert len(found) == 2, f"{name} {list(tensors[key].shape)} has partial blocks"
        stored |= found
        scales = found[f"{key}_scale_inv"]
        widened[key] = Fp8Dequantize(quantizer)._dequantize_one(found[key], scales)
    return rest(tensors, modules) | stored, config.to_dict(), None, widened


def nemotron(pattern: str, heads: str = "*E") -> Callable[[Path], None]:
    """Nemotron-H with heads, whose widths are multiples of 16."""

    def write(directory: Path) -> None:
        sizes = {"vocab_size": 16, "moe_shared_expert_intermediate_size": 32}
        sizes |= {"n_routed_experts": 2, "intermediate_size": 32}
        builders.write_base(directory, pattern, dtype=torch.bfloat16, **sizes)
        builders.add_heads(directory, heads)

    return write


def qwen(directory: Path) -> None:
    """Qwen3.5 with a vision tower and heads."""
    sizes = {"vocab_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_value_head_dim": 8,
        "head_dim": 8,
    }
    qwen_models.write("qwen3_5", directory, dtype=torch.bfloat16, **sizes)
    qwen_models.add_heads("qwen3_5", directory)


def glm(directory: Path) -> None:
    """GLM-4.5 with a head: gate and up, and q, k and v are joined in Megatron's layout."""
    sizes = {"vocab_size": 16, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    sizes |= {"first_k_dense_replace": 0, "intermediate_size": 16}
    block_models.write_glm(directory, dtype=torch.bfloat16, n_routed_experts=2, **sizes)
    block_models.add_glm_heads(directory)


def mixed(name: str) -> str:
    """As in Qwen3.6 NVFP4: fp8 for mixers but their smallest projections, fp4 for MLP and
    lm_head."""
    if name.startswith("mtp") or name.endswith(("in_proj_a", "in_proj_b")):
        return ""
    return "W4A16_NVFP4" if ".mlp." in name or name == "lm_head" else "FP8_DEFAULT"


CHECKPOINTS: dict[str, tuple[Callable[[Path], None], Callable[[Tensors], Written]]] = {
    "compressed_channel": (glm, compressed_tensors("FP8_DYNAMIC")),
    "compressed_tensor": (nemotron("*-", "*-"), compressed_tensors("FP8")),
    "compressed_block": (
        nemotron("*-", "*-"),
        compressed_tensors("FP8_BLOCK", block_structure=[16, 16]),
    ),
    "compressed_int4": (nemotron("*-", "*-"), compressed_tensors("W4A16", group_size=16)),
    "compressed_int4_zeros": (
        nemotron("*-", "*-"),
        compressed_tensors("W4A16_ASYM", group_size=16),
    ),
    "compressed_nvfp4": (nemotron("*-", "*-"), compressed_tensors("NVFP4")),
    "modelopt_fp8": (
        nemotron("M*E", "*-"),
        modelopt(lambda name: "" if usual(name) or name.startswith("mtp") else "FP8_DEFAULT"),
    ),
    "modelopt_nvfp4": (
        nemotron("*E", "*-"),
        modelopt(lambda name: "" if usual(name) or name.startswith("mtp") else "NVFP4_DEFAULT"),
    ),
    "modelopt_mixed": (qwen, modelopt(mixed)),
    "fine_grained": (nemotron("*E", "*-"), fine_grained),
}


if __name__ == "__main__":
    main()
