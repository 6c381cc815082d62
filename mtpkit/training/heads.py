"""The model of a run: a base from a directory, with its own heads or fresh ones."""

import dataclasses
import gc
from pathlib import Path

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.checkpoint import load_config as load_model_config
from mtpkit.checkpoint import load_model_weights
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError
from mtpkit.model import build_model, init_weights
from mtpkit.training.config import HeadAttention, TrainConfig
from mtpkit.training.freeze import HEAD_PREFIX


def resolve(config: TrainConfig) -> tuple[TrainConfig, ModelConfig]:
    """Settle what is `auto` in the settings, and which heads the model gets.

    Raises:
        UserError: the settings of the heads do not fit the model.
    """
    base = load_model_config(config.model)
    heads = config.heads
    new = heads.init in ("fresh", "base") or (heads.init == "auto" and not base.mtp_num_depths)
    if not new and not base.mtp_num_depths:
        raise UserError(f"heads.init=checkpoint, but {config.model} has no heads; set heads.init=fresh")
    absent = sorted(set(heads.pattern) - set(base.pattern))
    if heads.init == "base" and absent:
        raise UserError(
            f"heads.init=base copies layers of {config.model}, but its pattern {base.pattern!r} has no "
            f"{', '.join(map(repr, absent))}; set heads.init=fresh or another heads.pattern"
        )
    if new:
        model = base.replace(
            mtp_pattern=heads.pattern, mtp_num_depths=heads.num_depths, mtp_use_repeated_layer=heads.repeated
        )
        if base.mtp_num_depths and not _same_layers(base, model):
            raise UserError(
                f"{config.model} has heads of pattern {base.mtp_pattern!r} ({base.num_mtp_layers} physical), which "
                f"heads.init={heads.init} can start anew but not change; set heads.pattern and heads.repeated to match"
            )
    elif base.mtp_use_repeated_layer:
        model = base.replace(mtp_num_depths=heads.num_depths)
    elif base.mtp_num_depths != heads.num_depths:
        raise UserError(
            f"{config.model} has {base.mtp_num_depths} distinct heads; set heads.num_depths={base.mtp_num_depths}"
        )
    else:
        model = base
    attention = resolve_attention(heads.attention, model)
    init = heads.init if heads.init != "auto" else "fresh" if new else "checkpoint"
    settled = dataclasses.replace(heads, init=init, attention=attention)
    return dataclasses.replace(config, heads=settled), model


def _same_layers(a: ModelConfig, b: ModelConfig) -> bool:
    return (a.mtp_pattern, a.num_mtp_layers) == (b.mtp_pattern, b.num_mtp_layers)


def resolve_attention(asked: HeadAttention, model: ModelConfig) -> HeadAttention:
    """What `auto` is for a model.

    Raises:
        UserError: `serving` for distinct heads.
    """
    if asked == "serving" and not model.mtp_use_repeated_layer:
        raise UserError(
            "heads.attention=serving is for one repeated head; distinct heads have a cache a depth, so that "
            "heads.attention=per_depth is what they see in serving"
        )
    if asked != "auto":
        return asked
    return "serving" if model.mtp_use_repeated_layer else "per_depth"


def build_with_heads(
    config: TrainConfig,
    model_config: ModelConfig,
    device: torch.device,
    load_weights: bool = True,
    base_layers: bool = True,
) -> HybridModel:
    """The model that `resolve` settled on; `load_weights=False` leaves them to a checkpoint that is restored later.

    Args:
        base_layers: as of `build_model`.

    Raises:
        UserError: the weights in `config.model` do not fit its config.
    """
    dtype = getattr(torch, config.dtype)
    model = build_model(model_config, dtype=dtype, device=device, seed=config.seed, base_layers=base_layers)
    if load_weights:
        new = config.heads.init != "checkpoint"
        load_model_weights(model, Path(config.model), strict=base_layers, allow_missing_heads=new)
        if new:
            init_weights(model, model_config, config.seed, prefix=HEAD_PREFIX)
        if config.heads.init == "base":
            init_from_base(model)
    return model


@torch.no_grad()
def init_from_base(model: HybridModel) -> None:
    """Start each head as the base's last layers of its kinds, reading the sum of embedding and hidden state.

    What is there before stays as noise in `eh_proj`; everything else but the input norms is replaced.
    """
    pattern = model.mtpkit_config.pattern
    for head in model.mtp.layers:
        weight = head.eh_proj.weight
        identity = torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)
        weight.add_(torch.cat([identity, identity], dim=1))
        for letter, layer in zip(model.mtpkit_config.mtp_pattern, head.mtp_model_layer.layers, strict=True):
            layer.load_state_dict(model.decoder.layers[pattern.rindex(letter)].state_dict())
        head.final_layernorm.weight.copy_(model.decoder.final_norm.weight)


def drop_base_layers(model: HybridModel) -> None:
    """Free the base's layers, for heads that are trained on cached hidden states."""
    model.decoder.layers = torch.nn.ModuleList()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
