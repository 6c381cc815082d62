"""The ops of a decode, a prefill or a training step, with inputs as a model's layers give them.

A step feeds T tokens of each row to the base, and again to the first depth of the heads, whose layers have the base's
sizes: one case stands for both. The deeper depths take one token per row, as a step with K = 0 does.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens, h hidden size, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from mtpkit.bench.kernel_cases import delta, latent, linears, mixers, ranks, tokens, training
from mtpkit.bench.kernel_inputs import Case, Shapes
from mtpkit.config.sections import AttentionConfig, GatedDeltaNetConfig, Mamba2Config, MlaConfig, MlpConfig, MoeConfig
from mtpkit.kernels.head_loss import LossKind

_PREFILL_ROWS = 16
_TRAINING_LENGTH = 8
"""Tokens of a training sequence, over those of a prompt."""


def decode_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step of `rows` decoding requests."""
    has = shapes.config.has
    if has(Mamba2Config):
        yield from (mixers.ssm_replay(shapes), mixers.ssm_snapshot(shapes), mixers.conv_update(shapes))
        yield from (linears.gated_norm(shapes), mixers.ssm_fold(shapes), mixers.leave_state(shapes))
    if has(GatedDeltaNetConfig):
        yield from (delta.replay(shapes), delta.snapshot(shapes), delta.gated_norm(shapes), delta.fold(shapes))
        if not has(Mamba2Config):  # which has the same op
            yield mixers.conv_update(shapes)
    if has(AttentionConfig):
        sizes = shapes.config.attention
        yield from (mixers.paged_attention(shapes), mixers.move_entries(shapes))
        turned = sizes.qk_layernorm or sizes.position_embedding_type != "none"
        yield mixers.place_qkv(shapes) if turned else mixers.store_kv(shapes)
        if sizes.attention_output_gate:
            yield linears.sigmoid_gate(shapes)
    if has(MlaConfig):
        yield from (latent.decode(shapes), latent.store(shapes))
    yield from (tokens.decode_rows(shapes), tokens.store_rows(shapes))
    if has(Mamba2Config) or has(GatedDeltaNetConfig):
        yield tokens.ring_lens_after(shapes)
    yield linears.rms_norm(shapes)
    if has(MlpConfig):
        yield from linears.activation(shapes)
    if has(MoeConfig):
        yield from (linears.router_logits(shapes), linears.route(shapes, shapes.count))
        yield linears.expert_mlp(shapes, shapes.count)
    if shapes.config.mtp.num_depths:
        yield from (tokens.mtp_input(shapes), tokens.linear_argmax(shapes), tokens.linear_best(shapes))
    yield from tokens.sampling_cases(shapes)
    if shapes.k:
        yield from (tokens.accept_matching(shapes), tokens.accept_tree(shapes), tokens.accept_rejection(shapes))
    yield from (linears.linear_case(shapes, call) for call in linears.calls(shapes))
    yield from (ranks.embedding(shapes), *ranks.exchanges(shapes))


def prefill_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step of prompts, 16 of `context_len` tokens; whatever `rows` is."""
    has = shapes.config.has
    lens = (shapes.context_len,) * _PREFILL_ROWS
    if has(AttentionConfig):
        yield mixers.prefill_attention(shapes, lens)
    if has(MlaConfig):
        yield from (latent.context(shapes, lens), latent.chunk(shapes, lens))
    if has(Mamba2Config):
        yield from (mixers.conv_varlen(shapes, lens), mixers.ssd_varlen(shapes, lens))
    if has(GatedDeltaNetConfig):
        yield from (delta.inputs(shapes, sum(lens)), delta.varlen(shapes, lens))
        if not has(Mamba2Config):
            yield mixers.conv_varlen(shapes, lens)
    if has(MoeConfig):
        for case in (linears.route(shapes, sum(lens)), linears.expert_mlp(shapes, sum(lens))):
            yield replace(case, name=f"{case.op}, prefill")


def training_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of training heads of K depths on one sequence of 8 x `context_len` tokens; whatever `rows` is."""
    length = _TRAINING_LENGTH * shapes.context_len
    attention = {AttentionConfig.letter, MlaConfig.letter}
    if attention & set(shapes.config.pattern):
        yield training.sequence_attention(shapes, length)
    if shapes.config.has(AttentionConfig) and shapes.config.attention.position_embedding_type != "none":
        yield linears.rotate(shapes)
    if GatedDeltaNetConfig.letter in shapes.config.letters:
        yield delta.rule(shapes, length)
    if shapes.k:
        if attention & set(shapes.config.mtp.pattern) and shapes.k > 1:
            yield training.depth_attention(shapes, length)
        if shapes.config.has(Mamba2Config):
            yield training.scan(shapes, length)
        if shapes.config.has(MlpConfig):
            yield training.activation(shapes, length)
        yield from (training.losses(shapes, length, kind) for kind in get_args(LossKind))
        yield training.update(shapes)
    if shapes.config.hidden_size % 16 == 0:  # others stay in bf16
        yield from (training.quantize_rows(shapes, length), training.fp8_linear(shapes, length))
