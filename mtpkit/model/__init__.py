"""The model: megatron-core's HybridModel with mtpkit's layers, and its forward passes."""

import mtpkit.platform  # noqa: F401  (quiets megatron-core, so it comes first)
from mtpkit.kernels.attention.reference import AttentionWindow
from mtpkit.model.build import build_model, init_weights, layer_numbers, state_specs
from mtpkit.model.inputs import DepthInput, SequenceInput, StepInput
from mtpkit.model.layers.embedding import draft_embedding_bytes, round_draft_embedding
from mtpkit.model.layers.moe import draw_experts, stack_experts
from mtpkit.model.layers.recurrent import fold_rings
from mtpkit.model.mtp import (
    attention_window,
    base_forward,
    compute_logits,
    depth_embedding,
    draft_output_weight,
    embed,
    first_token,
    gather_sequence,
    greedy_tokens,
    local_logits,
    mtp_forward,
    normed_states,
    output_weight,
    shift_tokens,
    unroll_depths,
)
from mtpkit.model.quantized import quantize_base

__all__ = [
    "AttentionWindow",
    "DepthInput",
    "SequenceInput",
    "StepInput",
    "attention_window",
    "base_forward",
    "build_model",
    "compute_logits",
    "depth_embedding",
    "draft_embedding_bytes",
    "draft_output_weight",
    "draw_experts",
    "embed",
    "first_token",
    "fold_rings",
    "gather_sequence",
    "greedy_tokens",
    "init_weights",
    "layer_numbers",
    "local_logits",
    "mtp_forward",
    "normed_states",
    "output_weight",
    "quantize_base",
    "round_draft_embedding",
    "shift_tokens",
    "stack_experts",
    "state_specs",
    "unroll_depths",
]
