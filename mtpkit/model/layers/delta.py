"""Gated delta net: chunked rule over sequences, recurrence over decode steps, readout at MTP
depths."""

from functools import partial
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from torch import Tensor, nn

from mtpkit.kernels.gated_delta_rule import (
    delta_inputs,
    delta_replay_update,
    delta_rule,
    delta_snapshot_update,
    delta_varlen,
)
from mtpkit.kernels.norm import norm_gate
from mtpkit.kernels.ring_fold import fold_ring
from mtpkit.kernels.rounding import Noise
from mtpkit.model.inputs import DepthInput, SequenceInput, TreeInput
from mtpkit.model.layers.base import NoExtraState, split_parameter
from mtpkit.model.layers.norm import norm_weight
from mtpkit.model.layers.recurrent import Places, RecurrentMixer
from mtpkit.model.state import Replay, Snapshot
from mtpkit.model.transformer_config import TransformerConfig


class Tokens(NamedTuple):
    """Inputs of the recurrence per token, see `delta_inputs`: q and k [..., j, k], v [..., h, v],
    g, beta [..., h]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class HeadNorm(NoExtraState, nn.Module):
    """RMS norm of each value head, followed by the gate; all heads and all ranks share one weight.

    Its weight is stored in fp32 in models of any dtype. Hugging Face's files hold 1 + the weight:
    in bf16, subtracting the 1 would round factors below 0.5, a factor of 0.005 by up to 40%.
    """

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = norm_weight(width, config, torch.float32)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Norm x and gate it with z, both [..., h * width]; returns the same shape."""
        return norm_gate(x, z, self.weight, self.eps, self.zero_centered)


class GatedDeltaNet(RecurrentMixer):
    """Gated delta net (Yang et al. 2024, arXiv:2412.06464) with the parameters and sharding of
    Megatron's mixer.

    `A_log` and `dt_bias` are stored in fp32: rounding them to bf16 would change the decays. So is
    the weight of the output norm, see `HeadNorm`.
    """

    pieces = ("conv", "gate", "rates")

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        sizes = config.mtpkit.gated_delta_net
        ranks = pg_collection.tp.size()
        keys = sizes.key_width // ranks
        values = sizes.value_width // ranks
        heads = sizes.num_value_heads // ranks
        channels = {"query": keys, "key": keys, "value": values}
        rows = {**channels, "z": values, "beta": heads, "alpha": heads}
        kernel = sizes.conv_kernel_dim
        super().__init__(
            config, submodules, pg_collection, rows, channels, values, kernel, conv_bias=False
        )
        self.num_key_heads = sizes.num_key_heads // ranks
        self.num_value_heads = heads
        zeros = partial(torch.zeros, heads, dtype=torch.float32, device=torch.cuda.current_device())
        self.dt_bias = split_parameter(zeros())
        self.A_log = split_parameter(zeros())
        self.out_norm = HeadNorm(config, sizes.value_head_dim)

    def normed(self, y: Tensor, z: Tensor) -> Tensor:
        """See `RecurrentMixer.normed`."""
        return self.out_norm(y, z)

    def _raw(
        self, conv_out: Tensor, rates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, a and b as the kernels of decode steps take them."""
        q, k, v = conv_out.split(list(self.channels.values()), -1)
        b, a = rates.chunk(2, -1)
        q, k = (t.unflatten(-1, (self.num_key_heads, -1)) for t in (q, k))
        return q, k, v.unflatten(-1, (self.num_value_heads, -1)), a, b

    def _tokens(self, conv_out: Tensor, rates: Tensor) -> Tokens:
        q, k, v, a, b = self._raw(conv_out, rates)
        q, k, g, beta = delta_inputs(q, k, a, b, self.A_log, self.dt_bias)
        return Tokens(q, k, v, g, beta)

    def scan(self, conv_out: Tensor, rates: Tensor, inputs: SequenceInput) -> Tensor:
        """See `RecurrentMixer.scan`."""
        tokens = self._tokens(conv_out, rates)
        return self._read(tokens, tokens.q[:, :, None], inputs)[:, :, 0]

    def _read(
        self, tokens: Tokens, queries: Tensor, inputs: SequenceInput, wide: bool = False
    ) -> Tensor:
        """Read each token's state with queries [b, s, m, j, k]; returns [b, s, m, h, v], in fp32 if
        `wide`."""
        shape = queries.shape[:2]
        starts = inputs.starts(shape[0], shape[1], queries.device)
        q, k, v, g, beta = (t.flatten(0, 1) for t in (queries, *tokens[1:]))
        return delta_rule(q, k, v, g, beta, starts, wide).unflatten(0, shape)

    def scan_rows(
        self, conv_out: Tensor, rates: Tensor, starts: Tensor, places: Places | None
    ) -> Tensor:
        """See `RecurrentMixer.scan_rows`."""
        q, k, v, g, beta = self._tokens(conv_out, rates)
        return delta_varlen(q, k, v, g, beta, starts, *(places or ()))

    def update(
        self,
        conv_out: Tensor,
        rates: Tensor,
        recurrent: Snapshot | Replay,
        slots: Tensor,
        lens: tuple[Tensor, Tensor],
        tree: TreeInput | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """See `RecurrentMixer.update`."""
        q, k, v, a, b = self._raw(conv_out, rates)
        context_lens, counts = lens
        if isinstance(recurrent, Snapshot):
            return delta_snapshot_update(
                recurrent.entries,
                slots=slots,
                committed=counts,
                q=q,
                k=k,
                v=v,
                a=a,
                b=b,
                A_log=self.A_log,
                dt_bias=self.dt_bias,
                parents=tree.parents if tree else None,
                noise=noise,
            )
        return delta_replay_update(
            recurrent.folded,
            ring_k=recurrent.inputs("k"),
            ring_u=recurrent.inputs("u"),
            ring_g=recurrent.inputs("g"),
            slots=slots,
            context_lens=context_lens,
            ring_lens=counts,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            ancestors=tree.ancestors if tree else None,
            noise=noise,
        )

    def fold(
        self,
        recurrent: Replay,
        slots: Tensor,
        lens: tuple[Tensor, Tensor],
        noise: Noise | None = None,
    ) -> None:
        """See `RecurrentMixer.fold`."""
        context_lens, counts = lens
        fold_ring(
            recurrent.folded,
            ring_values=recurrent.inputs("u"),
            ring_keys=recurrent.inputs("k"),
            ring_rates=recurrent.inputs("g"),
            slots=slots,
            context_lens=context_lens,
            ring_lens=counts,
            noise=noise,
        )

    def scan_depth(self, conv_out: Tensor, rates: Tensor, inputs: DepthInput) -> Tensor:
        """See `RecurrentMixer.scan_depth`.

        With S_i depth 1's state, S^k_i = exp(g_k) S^{k-1}_i + u_k k_k^T and S^1_i = S_i, where u_k
        = beta_k (v_k - exp(g_k) S^{k-1}_i k_k). So k_k and q_k each read the decayed S_i, plus one
        term for each of depths 2..k.
        """
        name = f"{self.layer_name}.corrections"
        current = self._tokens(conv_out, rates)
        first, *later = inputs.leave(self.layer_name, current)
        if not later:
            inputs.leave(name, None)
            return self._read(current, current.q[:, :, None], inputs)[:, :, 0]
        # Both are read by one scan.
        reads = torch.stack([current.k, current.q], 2)  # [b, s, 2, j, k]
        held = self._read(first, reads, inputs, wide=True)
        rep = self.num_value_heads // self.num_key_heads
        log_decay = current.g  # sum over the depths after `entry`, up to depth k
        total = torch.zeros_like(held)
        for entry, u in zip(
            reversed(later[:-1]), reversed(inputs.left(name, Tensor, first=2)), strict=True
        ):
            scores = (
                (reads.float() * entry.k.float()[:, :, None]).sum(-1).repeat_interleave(rep, -1)
            )
            total = total + (torch.exp(log_decay)[:, :, None] * scores)[..., None] * u[:, :, None]
            log_decay = log_decay + entry.g
        held = total + torch.exp(log_decay)[:, :, None, :, None] * held
        u = current.beta[..., None] * (current.v.float() - held[:, :, 0])
        inputs.leave(name, u)
        score = (current.q.float() * current.k.float()).sum(-1).repeat_interleave(rep, -1)
        return (held[:, :, 1] + score[..., None] * u).to(current.v.dtype)
