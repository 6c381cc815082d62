"""A layer kind that mtpkit does not have: a moving average of each channel with a learned decay."""

import contextlib
import math
from collections.abc import Iterator
from typing import Annotated, Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from pydantic import Field
from torch import Tensor

from mtpkit.config import SECTIONS, ModelConfig, Section
from mtpkit.config.checked import checked
from mtpkit.kernels.ring import ring_base
from mtpkit.model.inputs import DepthInput, SequenceInput, StepInput
from mtpkit.model.kinds import KINDS, register
from mtpkit.model.kinds.base import Draw, LayerKind, Memory, Shape, Slot
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.base import SplitOverRanks, split_parameter
from mtpkit.model.state import Part, RecurrentSpec, Replay, Snapshot, StateSpec

LETTER = "A"


@checked("model config", prefix="average_")
class AverageConfig(Section):
    """Settings of moving averages."""

    letter = LETTER
    title = "moving average"

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of the average that each token leaves, at the start."""


class Mixer(SplitOverRanks, MegatronModule):
    """m_t = a m_{t-1} + (1 - a) x_t in each channel, with x the norm of the input. Ranks have their
    own channels."""

    layer_name: str

    def __init__(self, config: Any, norm: type, row_linear: type, ranks: Any) -> None:
        super().__init__(config)
        self.tp_group = ranks
        width = config.hidden_size
        self.norm = norm(config=config, hidden_size=width, eps=config.layernorm_epsilon)
        self.decay = split_parameter(torch.zeros(width // ranks.size()))
        self.out_proj = row_linear(
            width,
            width,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=ranks,
        )

    def _own_channels(self, x: Tensor) -> Tensor:
        """x [s / tp or s, b, h] to the channels of this rank at all places, [s, b, h / tp]."""
        if self.tp_group.size() == 1:
            return x
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x)
        else:
            x = copy_to_tensor_model_parallel_region(x)
        return x.chunk(self.tp_group.size(), -1)[self.tp_group.rank()]

    def forward(self, hidden: Tensor, inputs: Any) -> Tensor:
        """hidden [s, b, h] (s / tp under sequence parallelism) to the same shape."""
        x = self._own_channels(self.norm(hidden))
        if isinstance(inputs, StepInput):
            means = self._step(x[:, 0], inputs)[:, None]
        elif isinstance(inputs, DepthInput):
            first, *later = inputs.leave(self.layer_name, x)
            means = self._scan(first, inputs.documents)
            for x in later:
                means = self._next(means, x)
        else:
            means = self._scan(x, inputs.documents)
        return self.out_proj(means)[0]

    def _next(self, mean: Tensor, x: Tensor) -> Tensor:
        kept = torch.sigmoid(self.decay)
        return kept * mean + (1 - kept) * x

    def _scan(self, x: Tensor, documents: Tensor | None) -> Tensor:
        mean = torch.zeros_like(x[0])
        means = []
        for place, now in enumerate(x):
            if documents is not None and place:
                mean = mean * (documents[:, place] == documents[:, place - 1])[:, None]
            mean = self._next(mean, now)
            means.append(mean)
        return torch.stack(means)

    def _step(self, x: Tensor, step: StepInput) -> Tensor:
        (state,) = step.states[self.layer_name]
        rows = zip(
            step.query_start.tolist(),
            step.query_start[1:].tolist(),
            step.state_slots.tolist(),
            strict=False,
        )
        means = torch.empty_like(x)
        chunks_first = sorted(enumerate(rows), key=lambda row: row[0] < step.num_decode_rows)
        for row, (start, end, slot) in chunks_first:
            before = int(step.context_lens[row])
            if row >= step.num_decode_rows:
                mean = state.folded[slot].clone() if before else torch.zeros_like(x[0])
                for place in range(start, end):
                    means[place] = mean = self._next(mean, x[place])
                state.folded[slot] = mean
            elif isinstance(state, Snapshot):
                mean = state.entries[slot, int(step.committed.counts[state.newest][row])].clone()
                for place in range(start, end):
                    means[place] = mean = self._next(mean, x[place])
                    state.entries[slot, place - start] = mean
            else:
                means[start:end] = self._replay(x[start:end], state, step, row, slot, before)
        return means

    def _replay(
        self, x: Tensor, state: Replay, step: StepInput, row: int, slot: int, before: int
    ) -> Tensor:
        count = step.committed.counts[state.ring][row]
        ring = state.inputs("x")
        length = state.ring.length
        mean = state.folded[slot].clone()
        means = torch.empty_like(x)
        for position in range(before - int(count), before):
            mean = self._next(mean, ring[slot, position % length])
        if count and not ring_base(count, step.decode_width, length):
            state.folded[slot] = mean
        for place, now in enumerate(x):
            means[place] = mean = self._next(mean, now)
            ring[slot, (before + place) % length] = now
        return means

    def fold(
        self, recurrent: Replay, slots: Tensor, lens: tuple[Tensor, Tensor], noise: object = None
    ) -> None:
        """See `RecurrentMixer.fold`."""
        ring = recurrent.inputs("x")
        for slot, before, count in zip(*(one.tolist() for one in (slots, *lens)), strict=True):
            for position in range(before - count, before) if slot >= 0 else ():
                recurrent.folded[slot] = self._next(
                    recurrent.folded[slot], ring[slot, position % recurrent.ring.length]
                )


class AverageLayer(MegatronModule):
    """A moving average and its residual connection."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: Any,
        norm: type,
        row_linear: type,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.mixer = Mixer(config, norm, row_linear, pg_collection.tp)

    def forward(
        self, hidden_states: Tensor, *_: Any, inference_context: Any = None, **__: Any
    ) -> Tensor:
        """hidden_states [s, b, h] to the same shape."""
        return hidden_states + self.mixer(hidden_states, inference_context or SequenceInput())


class Average(LayerKind):
    """A moving average of each channel."""

    name = "average"
    section = AverageConfig
    mixer = "mixer"
    slot = Slot("G", "gdn_layer")
    writes_residual = ("out_proj",)

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        return ModuleSpec(
            module=AverageLayer, params={"norm": backend.norm, "row_linear": backend.row_linear}
        )

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        width = config.hidden_size
        return {
            "mixer.decay": (width,),
            "mixer.norm.weight": (width,),
            "mixer.out_proj.weight": (width, width),
        }

    def activations(self, config: ModelConfig) -> int:
        return 3 * config.hidden_size

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        """One vector for each request."""
        width = config.hidden_size // ranks
        return (RecurrentSpec((width,), {"x": Part((width,))}),)

    def memory(self, config: ModelConfig) -> Memory:
        """One vector."""
        return Memory(state=config.hidden_size, state_flops=3 * config.hidden_size)

    def initial(
        self, name: str, shape: torch.Size, config: ModelConfig, draw: Draw
    ) -> Tensor | None:
        """The decay as the config has it."""
        if not name.endswith(".decay"):
            return None
        decay = config.section(AverageConfig).decay
        return torch.full(shape, math.log(decay / (1 - decay)))


@contextlib.contextmanager
def known() -> Iterator[None]:
    """The kind is there inside."""
    register(Average())
    try:
        yield
    finally:
        del KINDS[LETTER], SECTIONS[LETTER]
