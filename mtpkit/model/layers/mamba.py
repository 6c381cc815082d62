"""Mamba2 mixer: chunked scan over sequences, recurrence over decode steps, readout at MTP
depths."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from torch import Tensor

from mtpkit.kernels.ring_fold import fold_ring
from mtpkit.kernels.rounding import Noise
from mtpkit.kernels.ssd import ssd_scan, ssd_varlen
from mtpkit.kernels.ssm_update import ssm_replay_update, ssm_snapshot_update
from mtpkit.model.inputs import DepthInput, SequenceInput, TreeInput
from mtpkit.model.layers.base import split_parameter
from mtpkit.model.layers.norm import GatedRMSNorm
from mtpkit.model.layers.recurrent import Places, RecurrentMixer
from mtpkit.model.state import Replay, Snapshot
from mtpkit.model.transformer_config import TransformerConfig


class ScanInputs(NamedTuple):
    """Inputs of the recurrence per token: x [..., h, p], B and C [..., g, n] after the convolution,
    dt [..., h] before bias and softplus."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


class MambaMixer(RecurrentMixer):
    """Mamba2 (Dao and Gu 2024, arXiv:2405.21060) with the parameters and sharding of Megatron's
    mixer."""

    pieces = ("gate", "conv", "rates")

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        sizes = config.mtpkit.mamba2
        ranks = pg_collection.tp.size()
        heads = sizes.num_heads // ranks
        groups = sizes.num_groups // ranks
        inner = heads * sizes.head_dim
        bc_width = groups * sizes.state_dim
        channels = {"x": inner, "B": bc_width, "C": bc_width}
        rows = {"z": inner, **channels, "dt": heads}
        super().__init__(
            config,
            submodules,
            pg_collection,
            rows,
            channels,
            inner,
            sizes.conv_kernel,
            conv_bias=True,
        )
        self.head_dim = sizes.head_dim
        self.state_dim = sizes.state_dim
        self.num_heads = heads
        self.num_groups = groups
        self.bc_width = bc_width
        self.chunk_size = sizes.chunk_size
        self.dt_limit = sizes.dt_limit
        zeros = partial(torch.zeros, heads, device=torch.cuda.current_device())
        self.dt_bias = split_parameter(zeros(dtype=config.params_dtype))
        self.A_log = split_parameter(zeros(dtype=torch.float32))
        self.D = split_parameter(zeros(dtype=torch.float32))
        self.norm = GatedRMSNorm(config, inner, inner // groups, self.tp_group)

    def normed(self, y: Tensor, z: Tensor) -> Tensor:
        """See `RecurrentMixer.normed`."""
        return self.norm(y, z)

    def _finish_step(
        self, y: Tensor, z: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.out_proj.gated(y, z, self.norm, residual)

    def _step_size(self, dt: Tensor) -> Tensor:
        return F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.dt_limit)

    def _scan_inputs(self, conv_out: Tensor, dt: Tensor) -> ScanInputs:
        x, B, C = conv_out.contiguous().split(list(self.channels.values()), -1)
        return ScanInputs(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            dt,
            B.unflatten(-1, (self.num_groups, self.state_dim)),
            C.unflatten(-1, (self.num_groups, self.state_dim)),
        )

    def scan(self, conv_out: Tensor, rates: Tensor, inputs: SequenceInput) -> Tensor:
        """See `RecurrentMixer.scan`."""
        return self._scan(self._scan_inputs(conv_out, rates), self.D, inputs)

    def _scan(
        self, tokens: ScanInputs, D: Tensor | None, inputs: SequenceInput, wide: bool = False
    ) -> Tensor:
        """Scan whole sequences, document by document, to y [b, s, h, p], in fp32 if `wide`."""
        shape = tokens.dt.shape[:2]
        starts = inputs.starts(shape[0], shape[1], tokens.dt.device)
        x, dt, B, C = (t.flatten(0, 1) for t in tokens)
        y = ssd_scan(
            x,
            dt,
            self.A_log,
            B,
            C,
            D,
            self.dt_bias,
            self.dt_limit,
            starts,
            self.chunk_size,
            wide=wide,
        )
        return y.unflatten(0, shape)

    def scan_rows(
        self, conv_out: Tensor, rates: Tensor, starts: Tensor, places: Places | None
    ) -> Tensor:
        """See `RecurrentMixer.scan_rows`."""
        x, dt, B, C = self._scan_inputs(conv_out, rates)
        states, slots, context_lens, noise = places or (None, None, None, None)
        return ssd_varlen(
            x,
            dt,
            self.A_log,
            B,
            C,
            self.D,
            self.dt_bias,
            dt_limit=self.dt_limit,
            starts=starts,
            chunk_size=self.chunk_size,
            states=states,
            slots=slots,
            context_lens=context_lens,
            noise=noise,
        )

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
        x, dt, B, C = self._scan_inputs(conv_out, rates)
        context_lens, counts = lens
        if isinstance(recurrent, Snapshot):
            return ssm_snapshot_update(
                recurrent.entries,
                slots=slots,
                committed=counts,
                x=x,
                dt=dt,
                A_log=self.A_log,
                B=B,
                C=C,
                D=self.D,
                dt_bias=self.dt_bias,
                dt_limit=self.dt_limit,
                parents=tree.parents if tree else None,
                noise=noise,
            )
        return ssm_replay_update(
            recurrent.folded,
            ring_x=recurrent.inputs("x"),
            ring_B=recurrent.inputs("B"),
            ring_dt=recurrent.inputs("dt"),
            slots=slots,
            context_lens=context_lens,
            ring_lens=counts,
            x=x,
            dt=dt,
            A_log=self.A_log,
            B=B,
            C=C,
            D=self.D,
            dt_bias=self.dt_bias,
            dt_limit=self.dt_limit,
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
            ring_values=recurrent.inputs("x"),
            ring_keys=recurrent.inputs("B"),
            ring_rates=recurrent.inputs("dt"),
            slots=slots,
            context_lens=context_lens,
            ring_lens=counts,
            A_log=self.A_log,
            noise=noise,
        )

    def scan_depth(self, conv_out: Tensor, rates: Tensor, inputs: DepthInput) -> Tensor:
        """See `RecurrentMixer.scan_depth`.

        With S_i depth 1's state, S^k_i = a_k S^{k-1}_i + dt_k x_k B_k^T and S^1_i = S_i. So y^k_i
        is C_k's readout of the decayed S_i, plus one term for each of depths 2..k.
        """
        current = self._scan_inputs(conv_out, rates)
        first, *later = inputs.leave(self.layer_name, current)
        name = f"{self.layer_name}.steps"
        if not later:  # the scan computes depth 1's step sizes itself
            inputs.leave(name, None)
            return self._scan(current, self.D, inputs)
        _, *steps = inputs.leave(name, self._step_size(rates))
        A = -torch.exp(self.A_log)
        rep = self.num_heads // self.num_groups
        readout = self._scan(first._replace(C=current.C), None, inputs, wide=True)
        log_decay = torch.zeros_like(steps[-1])  # sum over the depths after `entry`, up to depth k
        y = current.x.float() * self.D[:, None]
        for entry, step in zip(reversed(later), reversed(steps), strict=True):
            score = (current.C.float() * entry.B.float()).sum(-1).repeat_interleave(rep, -1)
            y = y + (torch.exp(log_decay) * score * step)[..., None] * entry.x.float()
            log_decay = log_decay + step * A
        return (y + torch.exp(log_decay)[..., None] * readout).to(current.x.dtype)
