"""Base class of mixers with a recurrent state: projections, causal convolution, and how a layer
runs each input."""

from abc import abstractmethod
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from mtpkit.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update, causal_conv1d_varlen
from mtpkit.kernels.dispatch import no_grad, on_kernels
from mtpkit.kernels.rounding import Noise
from mtpkit.model.inputs import DecodeGroup, DepthInput, SequenceInput, StepInput, TreeInput
from mtpkit.model.layers.base import SplitOverRanks, split_parameter
from mtpkit.model.state import Committed, ConvWindow, Replay, Ring, Snapshot, States
from mtpkit.model.transformer_config import TransformerConfig


class Places(NamedTuple):
    """Places where R rows read the states that they continue, and write the states after them."""

    states: Tensor
    """States of all slots."""
    slots: Tensor
    """[R] slots of the rows."""
    context_lens: Tensor
    """[R] lengths of the rows' contexts."""
    noise: Noise | None = None
    """Noise for the states after the rows; None: they are rounded to nearest, or not at all."""


def fold_rings(
    model: nn.Module,
    states: States,
    slots: Tensor,
    context_lens: Tensor,
    committed: Committed,
    noise_keys: Tensor | None = None,
) -> None:
    """Fold the committed entries of all rings of base and heads into the states, as a chunk would
    have left them.

    The counts of the rings are 0 afterwards, which the caller must write. Does not wait for the
    device.

    Args:
        slots: [R] int64, each slot once; -1: a null row.
        context_lens: [R] int64, number of committed positions.
        committed: the committed part of these R rows.
        noise_keys: [R] int64, see `StepInput.noise_keys`.

    Raises:
        NotImplementedError: a layer that keeps a ring cannot fold it.
    """
    # Layers with equal rings share the counts, so that these are computed once.
    lens: dict[Ring, tuple[Tensor, Tensor]] = {}
    for mixer in model.modules():
        name = getattr(mixer, "layer_name", "")
        for recurrent in states[name] if name in states.layers else ():
            if not isinstance(recurrent, Replay):
                continue
            if (fold := getattr(mixer, "fold", None)) is None:
                kind = type(mixer).__name__
                raise NotImplementedError(
                    f"{kind} keeps a ring, so a prefix cache needs its `fold`, see"
                    " RecurrentMixer.fold; write one, or decode with enable_prefix_caching=False"
                )
            ring = recurrent.ring
            if ring not in lens:
                lens[ring] = (context_lens - ring.behind).clamp_min(0), committed.counts[ring]
            fold(recurrent, slots, lens[ring], recurrent.noise(noise_keys))


class RecurrentMixer(SplitOverRanks, MegatronModule):
    """A mixer of five parts: `in_proj`, a depthwise causal convolution of a part of its output, a
    recurrence over the convolution's output, a gated norm, and `out_proj`.

    The output of `in_proj` has three pieces: the input of the convolution, the gate, and the rates
    at which the recurrence forgets and learns.

    Shape legend: b batch, s sequence, T tokens of concatenated rows, R rows, h heads, p head width,
    c channels of the convolution; `inner` = h p.
    """

    pieces: ClassVar[tuple[str, str, str]]
    """`gate`, `conv` and `rates`, in their order in the output of `in_proj`."""
    layer_name: str
    """Key of this layer in `StepInput.states` and `DepthInput.streams`, set when the model is
    built."""
    conv1d_bias: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules | GatedDeltaNetSubmodules,
        pg_collection: ProcessGroupCollection,
        rows: dict[str, int],
        channels: dict[str, int],
        inner: int,
        conv_kernel: int,
        conv_bias: bool,
    ) -> None:
        """Args:
        rows: rows of `in_proj` on this rank, by the names of their parts, in order.
        channels: channels of the convolution on this rank, likewise.
        """
        super().__init__(config)
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp
        self.rows = rows
        self.channels = channels
        self.inner = inner
        self.conv_kernel = conv_kernel
        conv_dim = sum(channels.values())
        ranks = self.tp_group.size()
        widths = {"gate": inner, "conv": conv_dim, "rates": sum(rows.values()) - inner - conv_dim}
        self._widths = [widths[piece] for piece in self.pieces]
        common = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            ranks * sum(rows.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        zeros = partial(torch.zeros, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.conv1d_weight = split_parameter(zeros(conv_dim, 1, conv_kernel))
        self.conv1d_bias = split_parameter(zeros(conv_dim)) if conv_bias else None
        self.out_proj = build_module(
            submodules.out_proj,
            ranks * inner,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    @abstractmethod
    def normed(self, y: Tensor, z: Tensor) -> Tensor:
        """Norm y with the gate z, both [..., inner]; returns the same shape."""

    @abstractmethod
    def scan(self, conv_out: Tensor, rates: Tensor, inputs: SequenceInput) -> Tensor:
        """Run whole sequences, differentiably: conv_out [b, s, c], rates [b, s, ...] to y [b, s, h,
        p]."""

    @abstractmethod
    def scan_depth(self, conv_out: Tensor, rates: Tensor, inputs: DepthInput) -> Tensor:
        """Run MTP depth k at every position i, continuing depth 1's state at i, see `DepthInput`;
        shapes as in `scan`."""

    @abstractmethod
    def scan_rows(
        self, conv_out: Tensor, rates: Tensor, starts: Tensor, places: Places | None
    ) -> Tensor:
        """Run rows that begin at `starts` [R + 1], without a gradient: conv_out [T, c], rates [T,
        ...] to y [T, h, p]. Without `places`, all rows begin with zero states."""

    @abstractmethod
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
        """Run decode rows: conv_out [R, T, c], rates [R, T, ...] to y [R, T, h, p].

        Args:
            slots: [R], slots of the rows' states.
            lens: [R] context lengths, and [R] counts of the state's counter.
            tree: the rows' trees, with `parents`; None: the rows are chains.
            noise: noise for the states, for snapshots with positions; None: as in `Places`.
        """

    @abstractmethod
    def fold(
        self,
        recurrent: Replay,
        slots: Tensor,
        lens: tuple[Tensor, Tensor],
        noise: Noise | None = None,
    ) -> None:
        """Fold the committed entries of rings into the states at `slots` [R]; `lens` and `noise` as
        for `update`."""

    def forward(
        self,
        hidden_states: Tensor,
        *_: object,
        inference_context: SequenceInput | StepInput | None = None,
        residual: Tensor | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix along the sequence.

        Args:
            hidden_states: [s, b, h].
            inference_context: a `SequenceInput`, `DepthInput` or `StepInput` (then b = 1, s = T).
            residual: [s, b, h], to which the output is added; may be overwritten by the sum.

        Returns:
            ([s, b, h], or [N, 1, h] for the tokens `StepInput.keep`; bias or None).
        """
        inputs = SequenceInput() if inference_context is None else inference_context
        projected = self.in_proj(hidden_states)[0].transpose(0, 1)  # [b, s, ...]
        z, conv_in, rates = self._split(projected)
        if isinstance(inputs, StepInput):
            y = self._step(conv_in[0], rates[0], inputs).flatten(-2)[:, None]
            z = z.transpose(0, 1)
            if (keep := inputs.keep) is not None:
                # Only now: states and windows must advance by all tokens.
                y = y[keep]
                z = z[keep]
                residual = None if residual is None else residual[keep]
                if not len(y) and residual is not None:
                    return residual, None
            return self._finish_step(y, z, residual)
        if isinstance(inputs, DepthInput):
            y = self._depth(conv_in, rates, inputs)
        elif self._as_prefill(conv_in):
            y = self._documents(conv_in, rates, inputs)
        else:
            conv_out = causal_conv1d(
                conv_in, self.conv1d_weight, self.conv1d_bias, inputs.documents
            )
            y = self.scan(conv_out, rates, inputs)
        return self.out_proj(
            self.normed(y.flatten(-2).transpose(0, 1), z.transpose(0, 1)), residual
        )

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of `in_proj` into the gate, the input of the convolution, and the
        rates."""
        found = dict(zip(self.pieces, projected.split(self._widths, -1), strict=True))
        return found["gate"], found["conv"], found["rates"]

    def _finish_step(
        self, y: Tensor, z: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.out_proj(self.normed(y, z), residual)

    def _as_prefill(self, conv_in: Tensor) -> bool:
        """Whether sequences run through prefill's kernels, which have no backward and multiply in
        low precision."""
        if conv_in.dtype == torch.float32:
            return False
        return on_kernels(conv_in) and no_grad(conv_in, *self.parameters(recurse=False))

    def _documents(self, conv_in: Tensor, rates: Tensor, inputs: SequenceInput) -> Tensor:
        """Run whole sequences, one document after the other: conv_in [b, s, c], rates [b, s, ...]
        to y [b, s, h, p]."""
        shape = conv_in.shape[:2]
        starts = inputs.starts(shape[0], shape[1], conv_in.device)
        return self._rows(conv_in.flatten(0, 1), rates.flatten(0, 1), starts).unflatten(0, shape)

    def _rows(
        self,
        conv_in: Tensor,
        rates: Tensor,
        starts: Tensor,
        window: Tensor | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """Run rows that begin at `starts` [R + 1]: conv_in [T, c] and rates [T, ...] to y [T, h,
        p].

        Args:
            window: windows of all slots, which the rows continue and update; given together with
                `places`. None: windows and states begin at zero.
        """
        _, slots, context_lens, _ = places or (None, None, None, None)
        conv_out = causal_conv1d_varlen(
            conv_in, self.conv1d_weight, self.conv1d_bias, starts, window, slots, context_lens
        )
        return self.scan_rows(conv_out, rates, starts, places)

    def _step(self, conv_in: Tensor, rates: Tensor, step: StepInput) -> Tensor:
        """Run prefill chunks, then decode rows, which come first in conv_in [T, c], rates [T, ...]
        and y [T, h, p]."""
        window, recurrent = step.states[self.layer_name]
        assert isinstance(window, ConvWindow) and isinstance(recurrent, Snapshot | Replay)
        split = step.num_decode_tokens
        # First the chunks: a decode row of the heads' windows may continue a chunk of its request.
        prefilled = []
        if step.num_chunk_rows:
            prefilled = [self._prefill(conv_in[split:], rates[split:], step, window, recurrent)]
        decoded = [
            self._decode(conv_in, rates, step, group, window, recurrent)
            for group in step.decode_groups
        ]
        outputs = decoded + prefilled
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _decode(
        self,
        conv_in: Tensor,
        rates: Tensor,
        step: StepInput,
        group: DecodeGroup,
        window: ConvWindow,
        recurrent: Snapshot | Replay,
    ) -> Tensor:
        """Run some decode rows, [T', ...], given conv_in [T, c] and rates [T, ...] of the step."""
        rows = group.rows
        slots = step.state_slots[rows]
        counts = step.committed.counts
        conv_in, rates = (
            t[group.tokens].unflatten(0, (group.num_rows, group.width)) for t in (conv_in, rates)
        )
        # Rows of one token are chains, whatever tree their requests have.
        tree = step.tree if step.tree is not None and step.tree.parents is not None else None
        parents = None if tree is None else tree.parents
        newest = counts[window.newest][rows]
        taps = self.conv1d_weight, self.conv1d_bias
        conv_out = causal_conv1d_update(conv_in, window.columns, *taps, slots, newest, parents)
        counter = recurrent.newest if isinstance(recurrent, Snapshot) else recurrent.ring
        lens = step.context_lens[rows], counts[counter][rows]
        noise = None
        if step.noise_keys is not None:
            positions = step.positions[group.tokens].view(group.num_rows, -1)
            noise = recurrent.noise(step.noise_keys[rows], positions)
        return self.update(conv_out, rates, recurrent, slots, lens, tree, noise).flatten(0, 1)

    def _prefill(
        self,
        conv_in: Tensor,
        rates: Tensor,
        step: StepInput,
        window: ConvWindow,
        recurrent: Snapshot | Replay,
    ) -> Tensor:
        """Run one chunk of each prefill row, [T', ...].

        A chunk never follows a decode step of the same request: it continues the states as a chunk
        leaves them.
        """
        first = step.num_decode_rows
        keys = None if step.noise_keys is None else step.noise_keys[first:]
        places = Places(
            recurrent.folded,
            step.state_slots[first:],
            step.context_lens[first:],
            recurrent.noise(keys),
        )
        return self._rows(conv_in, rates, step.query_start[first:], window.folded, places)

    def _depth(self, conv_in: Tensor, rates: Tensor, inputs: DepthInput) -> Tensor:
        """Run MTP depth k at every position i, continuing depth 1's state and window at i; see
        `DepthInput`."""
        raw = inputs.leave(f"{self.layer_name}.conv", conv_in)
        if inputs.depth == 1:
            conv_out = causal_conv1d(
                conv_in, self.conv1d_weight, self.conv1d_bias, inputs.documents
            )
        else:
            conv_out = self._depth_conv(raw, inputs.documents)
        return self.scan_depth(conv_out, rates, inputs)

    def _depth_conv(self, raw: list[Tensor], documents: Tensor | None) -> Tensor:
        """Run the convolution at depth k = len(raw): the latest taps read depths k, k - 1, .. 2 at
        i, the older taps read depth 1 at i, i - 1, .. inside the document. raw[d - 1]: inputs of
        depth d, [b, s, c]."""
        first = raw[0]
        length = raw[0].shape[1]
        out: Tensor = first.new_zeros(()) if self.conv1d_bias is None else self.conv1d_bias
        for lag in range(self.conv_kernel):
            # positions before i at depth 1; negative while later depths are read
            back = lag - (len(raw) - 1)
            if back < 0:
                source = raw[len(raw) - 1 - lag]
            else:
                source = F.pad(first, (0, 0, back, 0))[:, :length]
            # Later depths at i are of i's document; an older position may be of the one before.
            if back > 0 and documents is not None:
                before = F.pad(documents, (back, 0), value=-1)[:, :length]
                source = source * (before == documents)[..., None]
            out = out + source * self.conv1d_weight[:, 0, -1 - lag]
        return F.silu(out)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return Megatron's distributed-checkpoint entries, with `in_proj` and the convolution
        split into their parts, so that a checkpoint loads at any tensor parallelism."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for entry in ("in_proj.weight", "conv1d_weight", "conv1d_bias"):
            parts = self.channels if entry.startswith("conv1d") else self.rows
            if (key := prefix + entry) in entries:
                entries[key].key = key.replace("conv1d_", "conv1d.")
                entries[key] = _split_tensor_factory(
                    entries[key], list(parts.values()), list(parts), 0
                )
        return entries
