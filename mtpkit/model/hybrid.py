"""megatron-core's hybrid model: its configuration, its layer specs, and the attributes that mtpkit
reads of a model."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_block import HybridStack as MegatronHybridStack
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel as MegatronHybridModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from mtpkit.config import ModelConfig
from mtpkit.kernels.activation import relu2
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.head import MtpHead
from mtpkit.model.kinds import KINDS, kinds_in
from mtpkit.model.layers.backend import Backend
from mtpkit.model.transformer_config import TransformerConfig


def megatron_pattern(pattern: str) -> str:
    """Translate a pattern to megatron-core's letters, for which `stack_spec` gives the layers."""
    return "".join(KINDS[letter].slot.letter if letter in KINDS else letter for letter in pattern)


def transformer_config(
    config: ModelConfig, dtype: torch.dtype, **parallel: int | bool
) -> TransformerConfig:
    """Make megatron-core's config of a model.

    Args:
        parallel: megatron-core's own fields for parallelism.
    """
    settings: dict[str, object] = dict(
        num_layers=len(config.pattern),
        hidden_size=config.hidden_size,
        num_attention_heads=config.attention.num_attention_heads,
        num_query_groups=config.attention.num_query_groups,
        kv_channels=config.attention.kv_channels,
        ffn_hidden_size=config.mlp.ffn_hidden_size or config.hidden_size,
        activation_func=relu2 if config.mlp.activation == "relu2" else F.silu,
        gated_linear_unit=config.mlp.activation == "swiglu",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.layernorm_epsilon,
        layernorm_zero_centered_gamma=config.layernorm_zero_centered_gamma,
        qk_layernorm=config.attention.qk_layernorm,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_hybrid_model=True,
        mtp_num_layers=config.mtp.num_depths or None,
        mtp_use_repeated_layer=config.mtp.repeated,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # `init_weights` draws weights that are the same at any parallelism.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        **parallel,
    )
    for kind in kinds_in(config.letters):
        settings |= kind.settings(config)
    return TransformerConfig(mtpkit=config, **settings)


class HybridModel(MegatronHybridModel):
    """The base and its MTP heads; only `build_model` makes one."""

    base_context: Callable[[], AbstractContextManager[None]]
    """Context in which the base runs, see `use_fp8_base`."""
    post_process: bool

    def __init__(
        self, model_config: ModelConfig, backend: str, stage_patterns: list[str], **megatron: object
    ) -> None:
        """Build megatron-core's model from a config and megatron-core's own arguments;
        `stage_patterns` has the pattern of the base's layers on each pipeline stage."""
        super().__init__(
            vocab_size=model_config.vocab_size,
            max_sequence_length=model_config.max_position_embeddings,
            share_embeddings_and_output_weights=model_config.tie_word_embeddings,
            position_embedding_type=model_config.attention.position_embedding_type,
            rotary_base=int(model_config.attention.rotary_base),
            rotary_percent=model_config.attention.rotary_percent,
            parallel_output=True,
            **megatron,
        )
        if self.post_process:
            self.output_layer.quantizable = not model_config.tie_word_embeddings
        self.mtpkit_config = model_config
        self.backend = backend
        self.stage_patterns = stage_patterns
        self.base_context = nullcontext

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Megatron's distributed-checkpoint entries; quantised weights have none."""
        last = self.post_process
        # megatron-core takes for granted that a last stage has an entry of lm_head.
        if last and isinstance(self.output_layer.weight, QuantizedWeight):
            self.post_process = False
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            self.post_process = last


class HybridStack(MegatronHybridStack):
    """megatron-core's stack with the final norm of the backend; the original hard-wires Transformer
    Engine's.

    Its output is the hidden state that the heads read, see `MtpConfig.reads_of_base`. If that is
    the state before the final norm, the stack holds the norm but does not run it.
    """

    def __init__(
        self, config: TransformerConfig, *args: object, norm: type, **kwargs: object
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        if self.post_process:
            self.post_layer_norm = config.mtpkit.mtp.hands_on_normed(0)
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def one_layer_per_kind(model: HybridModel) -> HybridModel:
    """Copy a model with only the first base layer of each kind that it has, or that its pipeline
    stage has. Weights are shared. All layers of a kind are alike, see `LayerKind`, so the copy runs
    the same kernels as the model."""
    pattern = model.stage_patterns[model.pg_collection.pp.rank()]
    short = copy.copy(model)
    stack = copy.copy(model.decoder)
    first: dict[str, tuple[str, nn.Module]] = {}
    # There are no layers if the model was built without base layers.
    for letter, symbol, layer in zip(pattern, stack.layer_type_list, stack.layers, strict=False):
        first.setdefault(letter, (symbol, layer))
    stack.layer_type_list = [symbol for symbol, _ in first.values()]
    # A shallow copy has the original's own dict of submodules.
    stack._modules = stack._modules | {
        "layers": nn.ModuleList(layer for _, layer in first.values())
    }
    short._modules = short._modules | {"decoder": stack}
    return short


def stack_spec(backend: Backend, config: ModelConfig) -> ModuleSpec:
    """Make the spec of the decoder stack, the model's layer kinds and the MTP block."""
    head = ModuleSpec(
        MtpHead, params={"norm": backend.norm, "column_linear": backend.column_linear}
    )
    heads = MultiTokenPredictionBlockSubmodules(layer_specs=[head])
    submodules = HybridStackSubmodules(
        **{kind.slot.field: kind.spec(backend, config) for kind in kinds_in(config.letters)},
        mtp_block_spec=ModuleSpec(MultiTokenPredictionBlock, submodules=heads),
    )
    return ModuleSpec(module=HybridStack, submodules=submodules, params={"norm": backend.norm})
