"""Tiny random models of families whose layers are a mixer and an MLP or experts, as transformers
itself writes them, with heads added under the published names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def random_weights(model: torch.nn.Module, seed: int) -> None:
    """No tensor keeps a value that another could be mistaken for."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                scale = 0.3 if tensor.dim() == 1 else 0.1
                tensor.add_(scale * torch.randn(tensor.shape, generator=generator))


def save_with_experts(
    model: torch.nn.Module, directory: Path, seed: int, dtype: torch.dtype
) -> None:
    """Save with random weights in `dtype`, but the biases of routers in fp32, as published."""
    random_weights(model, seed)
    model.to(dtype)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    model.save_pretrained(directory)


def write_glm(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """A `Glm4MoeForCausalLM` without heads; experts one by one, as published."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        pad_token_id=None,
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(seed)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes | changes))
    save_with_experts(model, directory, seed, dtype)


def write_deepseek(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """A `DeepseekV3ForCausalLM` without heads; experts one by one, as published."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        intermediate_size=48,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        moe_intermediate_size=12,
        eos_token_id=None,
        bos_token_id=None,
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | changes))
    save_with_experts(model, directory, seed, dtype)
    edit_config(directory, scoring_func="sigmoid", topk_method="noaux_tc")


def write_mimo(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """A `Qwen2ForCausalLM` that calls itself MiMo, without heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        rope_theta=640000.0,
        attention_bias=True,
        use_sliding_window=False,
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes | changes))
    random_weights(model, seed)
    model.to(dtype).save_pretrained(directory)
    edit_config(directory, model_type="mimo", architectures=["MiMoForCausalLM"])


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def _layer(
    directory: Path, writer, number: int, seed: int, **changes: Any
) -> dict[str, torch.Tensor]:
    """Tensors of one layer of a throw-away model of the same sizes."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    known = {
        k: v
        for k, v in config.items()
        if k not in ("architectures", "model_type", "transformers_version", "dtype")
    }
    donor = directory / "donor"
    writer(donor, seed, tensors["lm_head.weight"].dtype, **known | changes)
    prefix = f"model.layers.{number}."
    found = {
        n.removeprefix(prefix): t
        for n, t in load_file(donor / "model.safetensors").items()
        if prefix in n
    }
    for file in donor.iterdir():
        file.unlink()
    donor.rmdir()
    return found


def _join(
    tensors: dict, hidden: int, names: tuple[str, ...], matrix: str, generator
) -> dict[str, torch.Tensor]:
    dtype = tensors["lm_head.weight"].dtype
    made = {
        f"{name}.weight": (1 + 0.3 * torch.randn(hidden, generator=generator)).to(dtype)
        for name in names
    }
    return made | {
        f"{matrix}.weight": (0.2 * torch.randn(hidden, 2 * hidden, generator=generator)).to(dtype)
    }


def add_glm_heads(
    directory: Path,
    physical: int = 1,
    copies: bool = True,
    writer: Callable[..., None] = write_glm,
    **own: Any,
) -> None:
    """One or more layers after the last. `own`: keys for the config, such as `mtpkit`."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    first = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(9)
    for depth in range(physical):
        made = _layer(directory, writer, 0, 5 + depth, num_hidden_layers=1, first_k_dense_replace=0)
        made |= _join(tensors, hidden, ("enorm", "hnorm", "shared_head.norm"), "eh_proj", generator)
        if copies:
            made["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            made["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors |= {f"model.layers.{first + depth}.{name}": tensor for name, tensor in made.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, num_nextn_predict_layers=physical, **own)


def add_mimo_heads(directory: Path, physical: int = 1, **own: Any) -> None:
    """Layers under names of their own. `own`: keys for the config, such as `mtpkit`."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    generator = torch.Generator().manual_seed(9)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    for depth in range(physical):
        made = _layer(
            directory, write_mimo, 0, 5 + depth, num_hidden_layers=1, layer_types=["full_attention"]
        )
        made |= _join(tensors, config["hidden_size"], norms, "input_proj", generator)
        tensors |= {f"model.mtp_layers.{depth}.{name}": tensor for name, tensor in made.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, num_nextn_predict_layers=physical, **own)
