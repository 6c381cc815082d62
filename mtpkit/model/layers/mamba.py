"""Mamba2 mixer: chunked scan over sequences, recurrence over decode steps, readout at MTP depths."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mtpkit.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update, causal_conv1d_varlen
from mtpkit.kernels.dispatch import no_grad, on_kernels
from mtpkit.kernels.ssd import ssd_chunk_scan, ssd_varlen
from mtpkit.kernels.ssm_update import ssm_replay_update, ssm_snapshot_update
from mtpkit.model.inputs import DepthInput, SequenceInput, StepInput
from mtpkit.model.layers.base import SplitOverRanks, split_parameter
from mtpkit.model.layers.norm import GatedRMSNorm
from mtpkit.model.state import ConvWindow, Replay, Snapshot


class ScanInputs(NamedTuple):
    """Inputs of the recurrence per token, after the convolution: x [..., h, p], dt [..., h], B and C [..., g, n]."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


class MambaMixer(SplitOverRanks, MegatronModule):
    """Mamba2 (Dao and Gu 2024, arXiv:2405.21060) with the parameters and sharding of Megatron's mixer."""

    layer_name: str
    """Key of this layer in `StepInput.states` and `DepthInput.streams`, set when the model is built."""

    def __init__(
        self, config: Any, submodules: Any, d_model: int, layer_number: int, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config)
        sizes = config.mtpkit.mamba2
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        ranks = self.tp_group.size()
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.num_heads, self.num_groups = config.mamba_num_heads // ranks, config.mamba_num_groups // ranks
        self.inner = self.num_heads * self.head_dim
        self.bc_width = self.num_groups * self.state_dim
        self.conv_dim = self.inner + 2 * self.bc_width
        self.conv_kernel = sizes.conv_kernel
        self.chunk_size, self.dt_limit = sizes.chunk_size, sizes.dt_limit
        common = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            ranks * sum(self._in_proj_parts().values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        settings: Any = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        self.conv1d_weight = split_parameter(torch.zeros(self.conv_dim, 1, self.conv_kernel, **settings))
        self.conv1d_bias = split_parameter(torch.zeros(self.conv_dim, **settings))
        self.dt_bias = split_parameter(torch.zeros(self.num_heads, **settings))
        settings["dtype"] = torch.float32
        self.A_log = split_parameter(torch.zeros(self.num_heads, **settings))
        self.D = split_parameter(torch.zeros(self.num_heads, **settings))
        self.norm = GatedRMSNorm(config, self.inner, self.inner // self.num_groups, self.tp_group)
        self.out_proj = build_module(
            submodules.out_proj,
            ranks * self.inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def _in_proj_parts(self) -> dict[str, int]:
        """Rows of `in_proj` on this rank, in order."""
        return {"z": self.inner, "x": self.inner, "B": self.bc_width, "C": self.bc_width, "dt": self.num_heads}

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, residual: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix along the sequence.

        Args:
            hidden_states: [s, b, h].
            inference_context: a `SequenceInput`, `DepthInput` or `StepInput` (then b = 1, s = T).
            residual: [s, b, h], to which the output is added; may be overwritten by the sum.

        Returns:
            ([s, b, h], or [N, 1, h] of the tokens `StepInput.keep`; bias or None).
        """
        inputs = SequenceInput() if inference_context is None else inference_context
        projected = self.in_proj(hidden_states)[0].transpose(0, 1)  # [b, s, ...]
        z, conv_in, dt = projected.split([self.inner, self.conv_dim, self.num_heads], -1)
        if isinstance(inputs, StepInput):
            y, z = self._step(conv_in[0], dt[0], inputs).flatten(-2)[:, None], z.transpose(0, 1)
            if (keep := inputs.keep) is not None:
                y, z, residual = y[keep], z[keep], None if residual is None else residual[keep]
                if not len(y) and residual is not None:
                    return residual, None
            return self.out_proj.gated(y, z, self.norm, residual)
        if isinstance(inputs, DepthInput):
            y = self._depth(conv_in, self._step_size(dt), inputs)
        elif self._as_prefill(conv_in):
            y = self._documents(conv_in, dt, inputs)
        else:
            conv_out = causal_conv1d(conv_in, self.conv1d_weight, self.conv1d_bias, inputs.documents)
            y = self._scan(self._scan_inputs(conv_out, self._step_size(dt)), documents=inputs.documents)[0]
        return self.out_proj(self.norm(y.flatten(-2).transpose(0, 1), z.transpose(0, 1)), residual)

    @property
    def _A(self) -> Tensor:
        return -torch.exp(self.A_log)

    def _step_size(self, dt: Tensor) -> Tensor:
        return F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.dt_limit)

    def _scan_inputs(self, conv_out: Tensor, dt: Tensor) -> ScanInputs:
        x, B, C = conv_out.split([self.inner, self.bc_width, self.bc_width], -1)
        return ScanInputs(
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            dt,
            B.unflatten(-1, (self.num_groups, self.state_dim)),
            C.unflatten(-1, (self.num_groups, self.state_dim)),
        )

    def _scan(self, inputs: ScanInputs, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return ssd_chunk_scan(
            inputs.x, inputs.dt, self._A, inputs.B, inputs.C, self.D, chunk_size=self.chunk_size, **kwargs
        )

    def _as_prefill(self, conv_in: Tensor) -> bool:
        """Whether sequences run through prefill's kernels, which have no backward and multiply in low precision."""
        exact = conv_in.dtype == torch.float32
        return not exact and on_kernels(conv_in) and no_grad(conv_in, *self.parameters(recurse=False))

    def _documents(self, conv_in: Tensor, dt: Tensor, inputs: SequenceInput) -> Tensor:
        """Whole sequences, one document behind the other: conv_in [b, s, c], raw dt [b, s, h] to y [b, s, h, p]."""
        shape = conv_in.shape[:2]
        starts = inputs.starts(shape[0], shape[1], conv_in.device)
        return self._rows(conv_in.flatten(0, 1), dt.flatten(0, 1), starts).unflatten(0, shape)

    def _rows(
        self, conv_in: Tensor, dt: Tensor, starts: Tensor, states: tuple[Tensor, Tensor] | None = None, *rows: Tensor
    ) -> Tensor:
        """Rows that begin at `starts` [R + 1]: conv_in [T, c] and raw dt [T, h] to y [T, h, p].

        Args:
            states: windows and states of all slots, which the rows continue and leave; None: they begin at zero.
            rows: state slots and context lengths of the rows, given with `states`.
        """
        window, state = (None, None) if states is None else states
        conv: Any = (conv_in, self.conv1d_weight, self.conv1d_bias, starts, window, *rows)
        x, dt, B, C = self._scan_inputs(causal_conv1d_varlen(*conv), dt)
        scan: Any = (self.dt_limit, starts, self.chunk_size, state, *rows)
        return ssd_varlen(x, dt, self.A_log, B, C, self.D, self.dt_bias, *scan)

    def _step(self, conv_in: Tensor, dt: Tensor, step: StepInput) -> Tensor:
        """Decode rows, then prefill chunks: conv_in [T, c], raw dt [T, h] to y [T, h, p]."""
        window, recurrent = step.states[self.layer_name]
        assert isinstance(window, ConvWindow) and isinstance(recurrent, Snapshot | Replay)
        split = step.num_decode_tokens
        if not step.num_chunk_rows:
            return self._decode(conv_in, dt, step, window, recurrent)
        y = self._prefill(conv_in[split:], dt[split:], step, window, recurrent)
        return torch.cat([self._decode(conv_in[:split], dt[:split], step, window, recurrent), y]) if split else y

    def _decode(
        self, conv_in: Tensor, dt: Tensor, step: StepInput, window: ConvWindow, recurrent: Snapshot | Replay
    ) -> Tensor:
        rows = step.num_decode_rows
        slots, counts = step.state_slots[:rows], step.committed.counts
        conv_in, dt = (t.unflatten(0, (rows, step.decode_width)) for t in (conv_in, dt))
        taps = self.conv1d_weight, self.conv1d_bias
        conv_out = causal_conv1d_update(conv_in, window.columns, *taps, slots, counts[window.newest][:rows])
        x, dt, B, C = self._scan_inputs(conv_out, dt)
        inputs: Any = (x, dt, self.A_log, B, C, self.D, self.dt_bias, self.dt_limit)
        if isinstance(recurrent, Snapshot):
            y = ssm_snapshot_update(recurrent.entries, slots, counts[recurrent.newest][:rows], *inputs)
        else:
            rings = recurrent.inputs("x"), recurrent.inputs("B"), recurrent.inputs("dt")
            lens = (step.context_lens[:rows], counts[recurrent.ring][:rows])
            y = ssm_replay_update(recurrent.folded, *rings, slots, *lens, *inputs)
        return y.flatten(0, 1)

    def _prefill(
        self, conv_in: Tensor, dt: Tensor, step: StepInput, window: ConvWindow, recurrent: Snapshot | Replay
    ) -> Tensor:
        """One chunk of each prefill row, [T', ...].

        A chunk never follows a decode step of the same request: what it continues is what a chunk left.
        """
        first = step.num_decode_rows
        rows = step.state_slots[first:], step.context_lens[first:]
        return self._rows(conv_in, dt, step.query_start[first:], (window.folded, recurrent.folded), *rows)

    def _depth(self, conv_in: Tensor, dt: Tensor, inputs: DepthInput) -> Tensor:
        """MTP depth k at every position i, continuing depth 1's state and window at i; see `DepthInput`.

        With S_i depth 1's state, S^k_i = a_k S^{k-1}_i + dt_k x_k B_k^T and S^1_i = S_i; so y^k_i is C_k's readout of
        S_i, decayed, plus one term for each of depths 2..k.
        """
        raw = inputs.leave(f"{self.layer_name}.conv", conv_in)
        if inputs.depth == 1:
            conv_out = causal_conv1d(conv_in, self.conv1d_weight, self.conv1d_bias, inputs.documents)
        else:
            conv_out = self._depth_conv(raw, inputs.documents)
        current = self._scan_inputs(conv_out, dt)
        first, *later = inputs.leave(self.layer_name, current)
        if not later:
            return self._scan(current, documents=inputs.documents)[0]
        A, rep = self._A, self.num_heads // self.num_groups
        readout, _ = ssd_chunk_scan(
            first.x.float(), first.dt, A, first.B, current.C, documents=inputs.documents, chunk_size=self.chunk_size
        )
        log_decay = torch.zeros_like(dt)  # from the depth at hand to depth k
        y = current.x.float() * self.D[:, None]
        for entry in reversed(later):
            score = (current.C.float() * entry.B.float()).sum(-1).repeat_interleave(rep, -1)
            y = y + (torch.exp(log_decay) * score * entry.dt)[..., None] * entry.x.float()
            log_decay = log_decay + entry.dt * A
        return (y + torch.exp(log_decay)[..., None] * readout).to(current.x.dtype)

    def _depth_conv(self, raw: list[Tensor], documents: Tensor | None) -> Tensor:
        """Convolution at depth k = len(raw): the latest taps read depths k, k - 1, .. 2 at i, the older ones depth 1 at
        i, i - 1, .. inside the document. raw[d - 1]: inputs of depth d, [b, s, c]."""
        first, length = raw[0], raw[0].shape[1]
        out: Tensor = self.conv1d_bias
        for lag in range(self.conv_kernel):
            back = lag - (len(raw) - 1)  # positions before i at depth 1; negative while later depths are read
            source = raw[len(raw) - 1 - lag] if back < 0 else F.pad(first, (0, 0, back, 0))[:, :length]
            if back > 0 and documents is not None:
                before = F.pad(documents, (back, 0), value=-1)[:, :length]
                source = source * (before == documents)[..., None]
            out = out + source * self.conv1d_weight[:, 0, -1 - lag]
        return F.silu(out)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Megatron's distributed-checkpoint entries: `in_proj` and the convolution split into their parts, so that a
        checkpoint loads at any tensor parallelism."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        conv = {"x": self.inner, "B": self.bc_width, "C": self.bc_width}
        for entry, parts in {
            "in_proj.weight": self._in_proj_parts(),
            "conv1d_weight": conv,
            "conv1d_bias": conv,
        }.items():
            key = prefix + entry
            entries[key].key = key.replace("conv1d_", "conv1d.")
            entries[key] = _split_tensor_factory(entries[key], list(parts.values()), list(parts), 0)
        return entries
