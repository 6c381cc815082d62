"""Grouped-query self-attention for sequences, MTP depths and paged decoding."""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mtpkit.config.sections import AttentionConfig
from mtpkit.kernels.activation import sigmoid_gate
from mtpkit.kernels.attention import (
    depth_attention,
    paged_attention,
    prefill_attention,
    sequence_attention,
)
from mtpkit.kernels.kv_store import UNSCALED, through_fp8
from mtpkit.kernels.linear import FP8
from mtpkit.kernels.place_qkv import place_qkv
from mtpkit.kernels.rotary import rotate
from mtpkit.model.inputs import DepthInput, SequenceInput, StepInput
from mtpkit.model.layers.base import linear_of
from mtpkit.model.layers.rotary import frequencies, yarn_frequencies
from mtpkit.model.state import PagedKV
from mtpkit.model.transformer_config import TransformerConfig


class CoreAttention(nn.Module):
    """Attention over sequences. `SelfAttention` calls the kernels for MTP depths and decoding
    itself."""

    def __init__(self, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """See `sequence_attention`."""
        return sequence_attention(q, k, v, documents, self.scale)


def _frequencies(settings: AttentionConfig) -> Tensor:
    """[rotated channels / 2] fp32, radians per position."""
    width = int(settings.kv_channels * settings.rotary_percent)
    if settings.yarn_factor == 1:
        return frequencies(width, settings.rotary_base)
    betas = settings.yarn_beta_fast, settings.yarn_beta_slow
    return yarn_frequencies(
        width, settings.rotary_base, settings.yarn_factor, settings.yarn_original_context, *betas
    )


class SelfAttention(MegatronSelfAttention):
    """megatron-core's attention parameters with mtpkit's forward."""

    config: TransformerConfig
    layer_name: str
    """Key of this layer in `StepInput.states` and `DepthInput.streams`, set when the model is
    built."""
    frequencies: Tensor | None
    """Radians per position of the rotated channels; None: no rotary position embedding."""
    kv_scales = UNSCALED
    """Scales of this layer's keys and values in a cache in fp8, set when a checkpoint that has some
    is loaded. All tensor-parallel ranks have the same."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        settings = config.mtpkit.attention
        turns = None
        if settings.position_embedding_type != "none":
            turns = _frequencies(settings).to(torch.cuda.current_device())
        self.rotary_factor = settings.yarn_attention_factor
        self.register_buffer("frequencies", turns, persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: SequenceInput | StepInput | None = None,
        residual: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [s, b, h].
            inference_context: a `SequenceInput`, `DepthInput` or `StepInput` (then b = 1, s = T).
            residual: [s, b, h], to which the output is added; may be overwritten by the sum.

        Returns:
            ([s, b, h], or [N, 1, h] for the tokens `StepInput.keep`; bias or None).
        """
        inputs = SequenceInput() if inference_context is None else inference_context
        if isinstance(inputs, StepInput):
            q, k, v, gate, normed = self._project(hidden_states)
            if (keep := inputs.keep) is not None:
                gate, residual = (None if t is None else t[keep] for t in (gate, residual))
            out = self._step(q, k, v, normed, inputs)[:, None]
            # A depth that only completes the cache keeps no token: the output has nothing to add.
            if not len(out) and residual is not None:
                return residual, None
            gate = None if gate is None else gate[:, None]
        else:
            q, k, v, *rest = self.get_query_key_value_tensors(
                hidden_states, output_gate=self._gated
            )
            gate = rest[0] if rest else None
            positions = self._positions(q, inputs)
            q = self._rotate(q, positions)
            k = self._rotate(k, positions)
            if torch.is_grad_enabled() and self.k_layernorm is None:
                # Without the copies, the backward would keep the whole projection; k_layernorm
                # keeps it in any case.
                q, k, v = (t.contiguous() for t in (q, k, v))
                gate = None if gate is None else gate.contiguous()
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [b, s, heads, d]
            if isinstance(inputs, DepthInput):
                out = self._depth(q, k, v, inputs).transpose(0, 1)
            elif inputs.window is not None:
                out = sequence_attention(q, k, v, inputs.documents, window=inputs.window)
                out = out.transpose(0, 1)
            else:
                out = self.core_attention(q, k, v, inputs.documents).transpose(0, 1)
        out = out.reshape(*out.shape[:2], -1)
        if gate is None:
            return self.linear_proj(out, residual)
        return linear_of(partial(self.linear_proj, residual=residual), sigmoid_gate, out, gate)

    @property
    def _gated(self) -> bool:
        return self.config.attention_output_gate

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Project a step to queries, keys, values and gates, as views of the projection.
        megatron-core's own split copies the queries to bring their heads into one dimension.

        Returns:
            q [T, groups, heads / groups, d]; k, v [T, groups, d]; gate [T, groups, heads / groups *
            d] or None; whether q and k are already normalised.
        """
        if self.config.num_query_groups < self.world_size:  # a group's heads are on several ranks
            q, k, v, *rest = self.get_query_key_value_tensors(
                hidden_states, output_gate=self._gated
            )
            heads = q[:, 0].unflatten(1, (k.shape[2], -1))
            return heads, k[:, 0], v[:, 0], rest[0][:, 0] if rest else None, True
        qkv, _ = self.linear_qkv(hidden_states)
        width = self.hidden_size_per_attention_head
        groups = self.num_query_groups_per_partition
        qkv = qkv.view(qkv.shape[0], groups, -1, width)
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2]
        v = qkv[:, :, -1]
        gate = None
        if self._gated:
            q, gate = q.chunk(2, 2)
            gate = gate.flatten(2)
        return q, k, v, gate, False

    def _positions(self, q: Tensor, inputs: SequenceInput) -> Tensor:
        """[b, s] rotary positions of whole sequences."""
        return inputs.positions_in(q.shape[1], q.shape[0], q.device)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.frequencies is None:
            return x
        return rotate(x, positions, self.frequencies, self.rotary_factor)

    def round_sequences(self) -> list[RemovableHandle]:
        """Compute whole sequences with keys and values as a cache in fp8 gives them back, until the
        handles are removed. Depths of heads stay as they are."""

        def rounded(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, v, documents = args
            scales = self.kv_scales
            return q, through_fp8(k, scales.key), through_fp8(v, scales.value), documents

        return [self.core_attention.register_forward_pre_hook(rounded)]

    def _depth(self, q: Tensor, k: Tensor, v: Tensor, inputs: DepthInput) -> Tensor:
        (first_k, first_v), *later = inputs.leave(self.layer_name, (k, v))
        if not later:
            return sequence_attention(q, k, v, inputs.documents, window=inputs.window)
        return depth_attention(
            q,
            first_k,
            first_v,
            [k for k, _ in later],
            [v for _, v in later],
            inputs.documents,
            window=inputs.window,
        )

    def _step(self, q: Tensor, k: Tensor, v: Tensor, normed: bool, step: StepInput) -> Tensor:
        """Store the step's keys and values [T, groups, d], then attend through the cache.

        Args:
            q: [T, groups, heads / groups, d].
            normed: whether the norms of q and k, if any, are already applied.

        Returns:
            [N, heads, d] for the tokens to keep, or for all tokens.
        """
        (cache,) = step.states[self.layer_name]
        assert isinstance(cache, PagedKV)
        # A cache in the model's own dtype holds keys and values as they are.
        scales = self.kv_scales if cache.key.dtype == FP8 else UNSCALED
        attend_decoded = partial(paged_attention, scales=scales, window=step.window)
        attend_chunks = partial(prefill_attention, scales=scales, window=step.window)
        # Norms, rotation and the copy to the cache are one kernel: each alone is so small that its
        # launch would take most of its time.
        q_norm, k_norm = (None if normed else norm for norm in (self.q_layernorm, self.k_layernorm))
        q = place_qkv(
            q,
            k,
            v,
            cache.key,
            cache.value,
            step.kv_slots,
            step.positions,
            self.frequencies,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            eps=self.config.layernorm_epsilon,
            zero_centered=self.config.layernorm_zero_centered_gamma,
            keep=step.keep,
            factor=self.rotary_factor,
            scales=scales,
        )
        if step.keep is not None:
            kept = torch.searchsorted(step.query_start[1:], step.keep, right=True)
            newest = step.block_tables[kept], step.positions[step.keep]
            if not len(q):
                return q.flatten(1, 2)
            # Each kept token is a row of its own: its keys, also those of this step, are in the
            # cache by now.
            return attend_decoded(q[:, None], cache.key, cache.value, *newest)[:, 0]

        rows = step.num_decode_rows
        start = step.num_decode_tokens
        outputs = []
        for group in step.decode_groups:
            places = step.block_tables[group.rows], *step.attended(group)
            decode_q = q[group.tokens].unflatten(0, (group.num_rows, group.width))
            out = attend_decoded(decode_q, cache.key, cache.value, *places)
            outputs.append(out.flatten(0, 1))
        if step.num_chunk_rows:
            own = step.block_tables[rows:], step.context_lens[rows:], step.query_start[rows:]
            outputs.append(attend_chunks(q[start:], cache.key, cache.value, *own))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
