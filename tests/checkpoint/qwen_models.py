"""Tiny random Qwen models as transformers itself makes them, under the published names, with heads
added."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.block_models import edit_config, random_weights

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=512,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    rms_norm_eps=1e-6,
)
VISION = {"model.visual.patch_embed.proj.weight": torch.arange(12.0).view(3, 4)}


def make(family: str, seed: int, **changes: Any):
    """A model of transformers, text alone."""
    import transformers

    family = family.removesuffix("_text")
    names = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
    config_name = names[family] + ("Config" if family == "qwen3_next" else "TextConfig")
    config = getattr(transformers, config_name)(**SIZES | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
    random_weights(model, seed)
    return model.eval()


def published(name: str, family: str) -> str:
    """The published name of a tensor, from that of a text model."""
    alone = family == "qwen3_next" or family.endswith("_text")
    return name if alone else re.sub(r"^model\.", "model.language_model.", name)


def write(
    family: str, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
):
    """A directory without heads; returns the model."""
    model = make(family, seed, **changes)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors = {published(name, family): tensor.to(dtype) for name, tensor in tensors.items()}
    config = json.loads((directory / "config.json").read_text()) | {
        "dtype": str(dtype).removeprefix("torch.")
    }
    if family == "qwen3_next":
        config |= {"num_nextn_predict_layers": 0}
    elif not family.endswith("_text"):
        tensors |= {name: tensor.to(dtype) for name, tensor in VISION.items()}
        top = {
            "architectures": [f"{model.config.__class__.__name__[:-10]}ForConditionalGeneration"]
        }
        top |= {"model_type": family, "vision_config": {"depth": 1}, "dtype": config["dtype"]}
        if "tie_word_embeddings" in config:
            top["tie_word_embeddings"] = config["tie_word_embeddings"]
        config = top | {
            "text_config": {key: v for key, v in config.items() if key != "architectures"}
        }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def text_config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    return config.get("text_config", config)


def edit_text(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    if "text_config" in config:
        edit_config(directory, text_config=config["text_config"] | changes)
    else:
        edit_config(directory, **changes)


def add_heads(family: str, directory: Path, **own: Any) -> None:
    """The one physical head. `own`: keys for the top of the config, such as `mtpkit`."""
    tensors = load_file(directory / "model.safetensors")
    config = text_config(directory)
    own_keys = {
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "layer_types",
        "full_attention_interval",
    }
    known = {
        key: value for key, value in config.items() if key not in own_keys and "mtp" not in key
    }
    donor = make(family, 5, **known | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    prefix = "model.layers.0."
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(9)
    dtype = next(t.dtype for name, t in tensors.items() if "embed_tokens" in name)
    made = {
        f"mtp.layers.0.{n.removeprefix(prefix)}": t
        for n, t in donor.state_dict().items()
        if n.startswith(prefix)
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        made[f"mtp.{name}.weight"] = 0.3 * torch.randn(hidden, generator=generator)
    made["mtp.fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    tensors |= {name: tensor.detach().to(dtype).contiguous() for name, tensor in made.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_text(
        directory,
        **{"num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers": 1},
    )
    edit_config(directory, **own)
