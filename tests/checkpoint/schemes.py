"""Quantised bases in the layouts of their quantisers, made of tiny checkpoints: names and shapes of
tensors, and settings."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mtpkit.kernels.quantized import Inputs
from mtpkit.model.formats import Fp8, Int4, Nvfp4
from tests.checkpoint.builders import edit, edit_config

GROUP = 16
"""Columns of a group of int4, and rows and columns of a block of fp8."""
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Scheme:
    """A way to quantise a base."""

    pack: Callable[[Tensor], Parts]
    """The tensors in place of a weight, by the ends of their names."""
    config: Mapping[str, object]
    """`quantization_config`."""
    own: Mapping[str, object] = field(default_factory=dict)
    """Settings in `hf_quant_config.json`, without their object `quantization`."""
    algorithm: str = ""
    """Algorithm of each quantised module under MIXED_PRECISION."""


def block_fp8(weight: Tensor) -> Parts:
    return Fp8(rows=GROUP, columns=GROUP).quantize(weight)


def fp8_of_matrix(weight: Tensor) -> Parts:
    parts = Fp8(rows=None, columns=None, scale="weight_scale", inputs=Inputs("token"))
    codes = parts.quantize(weight)
    scalars = {"weight_scale": codes["weight_scale"].reshape(()), "input_scale": torch.tensor(0.5)}
    return {**codes, **scalars}


def fp8_of_rows(weight: Tensor) -> Parts:
    return Fp8(rows=1, columns=None, scale="weight_scale", inputs=Inputs("token")).quantize(weight)


def nvfp4(weight: Tensor) -> Parts:
    parts = Nvfp4().quantize(weight)
    return parts | {"weight_scale_2": parts["weight_scale_2"].reshape(())}


def nvfp4_with_inputs(weight: Tensor) -> Parts:
    return nvfp4(weight) | {"input_scale": torch.tensor(0.5)}


def int4(weight: Tensor) -> Parts:
    shape = torch.tensor(weight.shape)
    return Int4(columns=GROUP).quantize(weight) | {"weight_shape": shape}


def packed_nvfp4(weight: Tensor) -> Parts:
    parts = Nvfp4(packed="weight_packed", whole="weight_global_scale").quantize(weight)
    return parts | {"weight_global_scale": parts["weight_global_scale"].reshape(1)}


def words(weight: Tensor) -> Parts:
    """Names and dtypes of AWQ and GPTQ, which mtpkit does not read."""
    rows, columns = weight.shape
    return {
        "qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": torch.zeros(columns // GROUP, rows // 8, dtype=torch.int32),
        "scales": torch.ones(columns // GROUP, rows, dtype=torch.float16),
    }


def modelopt(algorithm: str, **more: object) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def compressed(form: str, weights: dict[str, object], inputs: object = None) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_TOKEN = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
SCHEMES: dict[str, Scheme] = {
    "fp8 blocks": Scheme(
        block_fp8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "ModelOpt FP8": Scheme(
        fp8_of_matrix, modelopt("FP8"), {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    ),
    "ModelOpt rows": Scheme(
        lambda weight: {
            k: v.reshape(-1) if k == "weight_scale" else v for k, v in fp8_of_rows(weight).items()
        },
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "NVFP4": Scheme(
        nvfp4_with_inputs,
        modelopt("NVFP4", group_size=16),
        {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    ),
    "W4A16_NVFP4": Scheme(nvfp4, modelopt("W4A16_NVFP4", group_size=16)),
    "MIXED_PRECISION": Scheme(
        nvfp4, modelopt("MIXED_PRECISION"), {"quant_algo": "MIXED_PRECISION"}, "W4A16_NVFP4"
    ),
    "compressed FP8": Scheme(
        fp8_of_rows,
        compressed(
            "float-quantized",
            {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False},
            _TOKEN,
        ),
    ),
    "compressed W4A16": Scheme(
        int4,
        compressed(
            "pack-quantized",
            {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP},
        ),
    ),
    "compressed NVFP4": Scheme(
        packed_nvfp4,
        compressed(
            "nvfp4-pack-quantized",
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        ),
    ),
    "AWQ": Scheme(words, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "GPTQ": Scheme(words, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
}
READ = [name for name in SCHEMES if name not in ("AWQ", "GPTQ")]
"""Those that mtpkit reads."""


def write_quantised(
    name: str, source: Path, directory: Path, wanted: Callable[[str], bool]
) -> Path:
    """A copy of a checkpoint in which the wanted weights are quantised."""
    scheme = SCHEMES[name]
    shutil.copytree(source, directory)
    modules: list[str] = []

    def change(tensors: dict[str, Tensor]) -> None:
        for weight in [each for each in tensors if wanted(each)]:
            modules.append(weight.removesuffix(".weight"))
            start = weight.removesuffix("weight")
            parts = scheme.pack(tensors.pop(weight).float())
            tensors |= {start + end: part.contiguous() for end, part in parts.items()}

    edit(directory, change)
    layers = {module: {"quant_algo": scheme.algorithm, "group_size": 16} for module in modules}
    told = {"quantized_layers": layers} if scheme.algorithm else {}
    edit_config(directory, quantization_config={**scheme.config, **told})
    if scheme.own:
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": scheme.own | told})
        (directory / "hf_quant_config.json").write_text(text)
    return directory
