"""Grouped-query self-attention for sequences, MTP depths and paged decoding."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from torch import Tensor, nn

from mtpkit.kernels.attention import depth_attention, paged_attention, sequence_attention
from mtpkit.kernels.kv_store import store_kv
from mtpkit.model.inputs import AttentionCache, AttentionCacheSpec, DepthInput, SequenceInput, StepInput


class CoreAttention(nn.Module):
    """Holds megatron-core's place for the attention core; `SelfAttention` calls the kernels itself."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def apply_rotary(x: Tensor, positions: Tensor, base: float, percent: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves rotated against each other.

    Args:
        x: [s, b, heads, d]; the first percent * d channels are rotated.
        positions: [b, s] int64.

    Returns:
        [s, b, heads, d] in the dtype of x.
    """
    width = int(x.shape[-1] * percent)
    frequencies = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angles = (positions.t()[..., None].float() * frequencies)[:, :, None]  # [s, b, 1, width / 2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., : width // 2].float(), x[..., width // 2 : width].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated.to(x.dtype), x[..., width:]], -1)


class SelfAttention(MegatronSelfAttention):
    """megatron-core's attention parameters with mtpkit's forward."""

    cache_name: str
    """Key of this layer in `StepInput.caches` and `DepthInput.streams`, set when the model is built."""

    def cache_spec(self) -> AttentionCacheSpec:
        """What this layer caches for a token."""
        return AttentionCacheSpec(self.num_query_groups_per_partition, self.hidden_size_per_attention_head)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, inference_context: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: [s, b, h].
            inference_context: a `SequenceInput`, `DepthInput` or `StepInput` (then b = 1, s = T).

        Returns:
            ([s, b, h], bias or None).
        """
        inputs = SequenceInput() if inference_context is None else inference_context
        q, k, v = self.get_query_key_value_tensors(hidden_states)
        q, k = self._rotate(q, k, inputs)
        if isinstance(inputs, StepInput):
            out = self._step(q[:, 0], k[:, 0], v[:, 0], inputs)[:, None]
        else:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [b, s, heads, d]
            if isinstance(inputs, DepthInput):
                out = self._depth(q, k, v, inputs).transpose(0, 1)
            else:
                out = sequence_attention(q, k, v, inputs.documents).transpose(0, 1)
        return self.linear_proj(out.reshape(*out.shape[:2], -1))

    def _rotate(self, q: Tensor, k: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
        model_config = self.config.mtpkit
        if model_config.position_embedding_type == "none":
            return q, k
        if isinstance(inputs, StepInput):
            positions = inputs.positions[None]
        else:
            positions = inputs.positions
            if positions is None:
                positions = torch.arange(q.shape[0], device=q.device).expand(q.shape[1], -1)
            if isinstance(inputs, DepthInput):
                positions = positions + inputs.depth - 1
        base, percent = model_config.rotary_base, model_config.rotary_percent
        return apply_rotary(q, positions, base, percent), apply_rotary(k, positions, base, percent)

    def _depth(self, q: Tensor, k: Tensor, v: Tensor, inputs: DepthInput) -> Tensor:
        entries = inputs.streams.setdefault(self.cache_name, [])
        entries.append((k, v))
        if inputs.depth == 1:
            return sequence_attention(q, k, v, inputs.documents)
        (first_k, first_v), *later = entries
        return depth_attention(q, first_k, first_v, [k for k, _ in later], [v for _, v in later], inputs.documents)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, step: StepInput) -> Tensor:
        """Store the step's keys and values, then attend through the cache: [T, heads, d] to the same."""
        cache = step.caches[self.cache_name]
        assert isinstance(cache, AttentionCache)
        store_kv(k, v, cache.key, cache.value, step.kv_slots)
        rows, start = step.num_decode_rows, step.num_decode_tokens
        outputs = []
        if start:
            decode_q = q[:start].unflatten(0, (rows, step.decode_width))
            outputs.append(self._paged(decode_q, cache, step, slice(0, rows)).flatten(0, 1))
        for row, length in enumerate(step.prefill_lens, rows):
            outputs.append(self._paged(q[None, start : start + length], cache, step, slice(row, row + 1))[0])
            start += length
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _paged(self, q: Tensor, cache: AttentionCache, step: StepInput, rows: slice) -> Tensor:
        return paged_attention(q, cache.key, cache.value, step.block_tables[rows], step.context_lens[rows])
