"""Multi-head latent attention for sequences, MTP depths and paged decoding.

DeepSeek-V2 (arXiv:2405.04434, section 2.1). Shape legend: s sequence, b batch, T tokens of a step,
N tokens that it keeps, n heads of this rank, d and e head widths of keys without position and of
values, C width of the latent, P width of the rotary key.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mtpkit.kernels.attention import depth_attention
from mtpkit.kernels.kv_store import store_kv, through_fp8
from mtpkit.kernels.latent_attention import (
    chunk_attention,
    latent_attention,
    latent_context_attention,
)
from mtpkit.kernels.linear import FP8, linear
from mtpkit.kernels.rotary import rotate
from mtpkit.model.inputs import DepthInput, SequenceInput, StepInput
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.base import SplitOverRanks
from mtpkit.model.layers.rotary import frequencies, yarn_frequencies, yarn_scale
from mtpkit.model.state import PagedLatent
from mtpkit.model.transformer_config import TransformerConfig


class LatentAttention(SplitOverRanks, MegatronModule):
    """Attention whose keys and values are computed from one latent per token, with Megatron's
    parameter names.

    Ranks split the heads; each rank holds the whole down projections and computes all latents.
    """

    config: TransformerConfig
    frequencies: Tensor
    """[P / 2], radians per position."""
    layer_name: str
    """Key of this layer in `StepInput.states` and `DepthInput.streams`, set when the model is
    built."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        backend: Backend,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        sizes = config.mtpkit.mla
        shared = config.mtpkit.attention
        self.tp_group = pg_collection.tp
        self.sizes = sizes
        heads = shared.num_attention_heads
        hidden = config.hidden_size
        self.heads = heads // self.tp_group.size()
        split = dict(
            config=config, init_method=config.init_method, bias=False, tp_group=self.tp_group
        )
        columns = dict(split, gather_output=False, skip_bias_add=False, is_expert=False)
        up = backend.norm_column_linear if shared.qk_layernorm else backend.column_linear
        if sizes.q_lora_rank:
            self.linear_q_down_proj = backend.copied_linear(hidden, sizes.q_lora_rank, config)
            self.linear_q_up_proj = up(sizes.q_lora_rank, heads * sizes.qk_width, **columns)
        else:
            whole = backend.norm_column_linear if sizes.q_proj_layernorm else backend.column_linear
            self.linear_q_proj = whole(hidden, heads * sizes.qk_width, **columns)
        self.linear_kv_down_proj = backend.copied_linear(hidden, sizes.row, config)
        self.linear_kv_up_proj = up(
            sizes.kv_lora_rank, heads * (sizes.qk_head_dim + sizes.v_head_dim), **columns
        )
        # Decoding multiplies by both halves of each head's rows, one of them transposed, and
        # prefill must compute the same function.
        self.linear_kv_up_proj.quantizable = False
        rows = dict(
            split,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.linear_proj = backend.row_linear(
            heads * sizes.v_head_dim, hidden, is_expert=False, **rows
        )
        self._add_rotary(shared.rotary_base)
        self.core_attention = backend.core_attention(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=self.scale,
            k_channels=sizes.qk_width,
            v_channels=sizes.v_head_dim,
            pg_collection=pg_collection,
        )

    def _add_rotary(self, base: float) -> None:
        """Set the frequencies, the factor of rotated channels and the scale of scores, as Megatron
        does."""
        sizes = self.sizes
        factor = sizes.rotary_scaling_factor
        whole = yarn_scale(factor, sizes.mscale_all_dim)
        self.scale = whole**2 / sizes.qk_width**0.5
        if sizes.rope_type == "yarn":
            betas = sizes.beta_fast, sizes.beta_slow
            context = sizes.original_max_position_embeddings
            turns = yarn_frequencies(sizes.qk_pos_emb_head_dim, base, factor, context, *betas)
            self.rotary_factor = yarn_scale(factor, sizes.mscale) / whole
        else:
            turns = frequencies(sizes.qk_pos_emb_head_dim, base)
            self.rotary_factor = 1.0
        self.register_buffer("frequencies", turns.to(torch.cuda.current_device()), persistent=False)

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
            hidden_states: [s, b, h], normed (s / tp under sequence parallelism).
            inference_context: a `SequenceInput`, `DepthInput` or `StepInput` (then b = 1, s = T).
            residual: [s, b, h], to which the output is added; may be overwritten by the sum.

        Returns:
            ([s, b, h], or [N, 1, h] for the tokens `StepInput.keep`; bias or None).
        """
        inputs = SequenceInput() if inference_context is None else inference_context
        if isinstance(inputs, StepInput):
            keep = inputs.keep
            entries = self._store(hidden_states, inputs)
            if keep is not None:
                hidden_states = hidden_states[keep]
                residual = None if residual is None else residual[keep]
                # A depth that only completes the cache keeps no token.
                if not len(keep):
                    return (hidden_states if residual is None else residual), None
            out = self._step(hidden_states, entries, inputs)[:, None]
        else:
            # [b, s, n, ..]
            q, k, v = (t.transpose(0, 1) for t in self._project(hidden_states, inputs))
            if isinstance(inputs, DepthInput):
                out = self._depth(q, k, v, inputs).transpose(0, 1)
            else:
                out = self.core_attention(q, k, v, inputs.documents).transpose(0, 1)
        return self.linear_proj(out.reshape(*out.shape[:2], -1), residual)

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project x [s, b, h] to queries without position [s, b, n, d] and queries to rotate [s, b,
        n, P]."""
        if self.sizes.q_lora_rank:
            q, _ = self.linear_q_up_proj(self.linear_q_down_proj(x))
        else:
            q, _ = self.linear_q_proj(x)
        q = q.unflatten(-1, (self.heads, -1))
        return q[..., : self.sizes.qk_head_dim], q[..., self.sizes.qk_head_dim :]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [s, b, heads, P] to positions [b, s]; the weights expect channels 2i and 2i + 1
        as pairs."""
        return rotate(x, positions, self.frequencies, self.rotary_factor, paired=True)

    def _project(self, x: Tensor, inputs: SequenceInput) -> tuple[Tensor, Tensor, Tensor]:
        """Project whole sequences to queries and keys [s, b, n, d + P] and values [s, b, n, e]."""
        sizes = self.sizes
        plain_q, rotary_q = self._queries(x)
        latent, rotary_k = self.linear_kv_down_proj(x).split(
            [sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim], -1
        )
        kv, _ = self.linear_kv_up_proj(latent.contiguous())
        plain_k, v = kv.unflatten(-1, (self.heads, -1)).split(
            [sizes.qk_head_dim, sizes.v_head_dim], -1
        )
        # all ranks' heads read rotary_k, so its gradient is the sum over ranks
        if self.tp_group.size() > 1:
            if self.config.sequence_parallel:
                rotary_k = gather_from_sequence_parallel_region(rotary_k, group=self.tp_group)
            else:
                rotary_k = copy_to_tensor_model_parallel_region(rotary_k, self.tp_group)
        positions = inputs.positions_in(plain_q.shape[1], len(plain_q), x.device)
        rotary_q = self._rotate(rotary_q, positions)
        rotary_k = self._rotate(rotary_k[:, :, None], positions)
        q = torch.cat([plain_q, rotary_q], -1)
        return q, torch.cat([plain_k, rotary_k.expand(-1, -1, self.heads, -1)], -1), v.contiguous()

    def round_sequences(self) -> list[RemovableHandle]:
        """Compute whole sequences with latents and rotary keys as a cache in fp8 gives them back,
        until the handles are removed. Depths of heads stay as they are."""
        up = self.linear_kv_up_proj
        width = self.sizes.qk_head_dim

        def from_latents(_: nn.Module, args: tuple[Any, ...], __: object) -> tuple[Tensor, None]:
            latent = up.normed(args[0]) if self.config.mtpkit.attention.qk_layernorm else args[0]
            kv = linear(through_fp8(latent).flatten(0, 1), up.weight)
            return kv.unflatten(0, latent.shape[:2]), None

        def rotary(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, *rest = args
            return q, torch.cat([k[..., :width], through_fp8(k[..., width:])], -1), *rest

        return [
            up.register_forward_hook(from_latents),
            self.core_attention.register_forward_pre_hook(rotary),
        ]

    def _depth(self, q: Tensor, k: Tensor, v: Tensor, inputs: DepthInput) -> Tensor:
        (first_k, first_v), *later = inputs.leave(self.layer_name, (k, v))
        if not later:
            return self.core_attention(q, k, v, inputs.documents)
        entries = first_k, first_v, [k for k, _ in later], [v for _, v in later]
        return depth_attention(q, *entries, inputs.documents, self.scale)

    def _cache(self, step: StepInput) -> PagedLatent:
        (cache,) = step.states[self.layer_name]
        assert isinstance(cache, PagedLatent)
        return cache

    def _store(self, x: Tensor, step: StepInput) -> tuple[Tensor, Tensor]:
        """Store the cache rows of x [T, 1, h]: the normed latent and the rotated key of each token.

        Returns:
            The latents before the norm [T, 1, C], and the keys [T, 1, P].
        """
        row = self.linear_kv_down_proj(x)
        latent, rotary = row.split([self.sizes.kv_lora_rank, self.sizes.qk_pos_emb_head_dim], -1)
        # The cache holds the normed latent, so that the norm runs once per token and not once per
        # step that reads it.
        normed = latent
        if self.config.mtpkit.attention.qk_layernorm:
            normed = self.linear_kv_up_proj.normed(latent)
        rotary = self._rotate(rotary[:, :, None], step.positions[None])[:, 0]
        latents, keys = self._cache(step).parts
        store_kv(rotary, normed, keys, latents, step.kv_slots)  # the latents are the values
        return latent, rotary

    def _absorbed(self) -> tuple[Tensor, Tensor]:
        """Return each head's projections of latents to keys [n, d, C] and to values [n, e, C]."""
        key, value = self.linear_kv_up_proj.weight.unflatten(0, (self.heads, -1)).split(
            [self.sizes.qk_head_dim, self.sizes.v_head_dim], 1
        )
        return key, value

    def _step(self, x: Tensor, entries: tuple[Tensor, Tensor], step: StepInput) -> Tensor:
        """Attend through the cache, with the projections of keys and values absorbed into queries
        and outputs.

        Returns:
            [N, n, e], given x [N, 1, h] of the tokens to keep, or of all tokens, and `entries`, the
            result of `_store`.
        """
        cache = self._cache(step).rows
        keep = step.keep
        positions = step.positions if keep is None else step.positions[keep]
        plain, rotary = self._queries(x)
        key_up, value_up = self._absorbed()
        latent = (plain[:, 0].transpose(0, 1) @ key_up).transpose(0, 1)  # [N, n, C]
        rotary = self._rotate(rotary, positions[None])[:, 0]
        if keep is not None:
            kept = torch.searchsorted(step.query_start[1:], keep, right=True)
            places = step.block_tables[kept], positions
            out = latent_attention(latent[:, None], rotary[:, None], cache, *places, self.scale)
            return _per_head(out[:, 0], value_up)

        rows = step.num_decode_rows
        start = step.num_decode_tokens
        outputs = []
        for group in step.decode_groups:
            contexts, masks, earlier = step.attended(group)
            wide, turned = (
                part[group.tokens].unflatten(0, (group.num_rows, group.width))
                for part in (latent, rotary)
            )
            tables = step.block_tables[group.rows]
            out = latent_attention(
                wide, turned, cache, tables, contexts, self.scale, masks, earlier
            )
            outputs.append(_per_head(out.flatten(0, 1), value_up))
        if step.num_chunk_rows:
            lengths = step.context_lens[rows:]
            starts = step.query_start[rows:]
            own = step.block_tables[rows:], lengths
            # A chunk reads its context as latents, but its own tokens as keys and values: for many
            # queries per key that takes fewer operations than wide latents.
            before, lse = latent_context_attention(
                latent[start:], rotary[start:], cache, *own, starts, self.scale
            )
            if cache.dtype == FP8:
                # Tokens of one chunk must see each other as later chunks and steps see them:
                # rounded. Otherwise an output would depend on where its prompt was cut.
                # As bytes: not all devices index tensors in fp8.
                stored = cache.view(torch.uint8).flatten(0, 1)[step.kv_slots[start:]]
                cached = stored.view(FP8).to(latent.dtype)
                normed, turned = cached.split([latent.shape[-1], rotary.shape[-1]], -1)
                kv = linear(normed, self.linear_kv_up_proj.weight)
                turned = turned[:, None]
            else:
                kv, _ = self.linear_kv_up_proj(entries[0][start:].contiguous())
                kv = kv[:, 0]
                turned = entries[1][start:]
            k, v = self._keys_and_values(kv, turned)
            q = torch.cat([plain[start:, 0], rotary[start:]], -1)
            before = _per_head(before, value_up)
            outputs.append(chunk_attention(q, k, v, before, lse, lengths, starts, self.scale))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _keys_and_values(self, kv: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Split up projections of latents, [T, n * (d + e)], and join rotated keys [T, 1, P]: keys
        [T, n, d + P] and values [T, n, e]."""
        plain, v = kv.unflatten(-1, (self.heads, -1)).split(
            [self.sizes.qk_head_dim, self.sizes.v_head_dim], -1
        )
        return torch.cat([plain, rotary.expand(-1, self.heads, -1)], -1), v


def _per_head(latents: Tensor, value_up: Tensor) -> Tensor:
    """Project weighted sums of latents [N, n, C] to outputs [N, n, e] with the projections to
    values [n, e, C]."""
    return (latents.transpose(0, 1) @ value_up.transpose(1, 2)).transpose(0, 1)
