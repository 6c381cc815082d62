"""Interface of layer kinds: other packages call its methods instead of testing which kind a layer
has."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mtpkit.config import ModelConfig, Section
from mtpkit.config.checked import keys_of
from mtpkit.model.kinds.settings import LayerMarks, Settings, UnfusedNorm
from mtpkit.model.layers.backend import Backend
from mtpkit.model.state import StateSpec

Shape = tuple[int, ...]

_MATRIX = re.compile(r"(.+)\.weight(\.[^.]+)?")
"""Name of a linear's weight, or of one of the parts that checkpoints split it into."""


@dataclass(frozen=True)
class Draw:
    """Draws the initial values of one parameter."""

    generator: torch.Generator

    def normal(self, shape: torch.Size, std: float) -> Tensor:
        """Draw normal numbers of mean 0."""
        return torch.randn(shape, generator=self.generator, device=self.generator.device) * std

    def uniform(self, shape: torch.Size, low: float, high: float) -> Tensor:
        """Draw uniform numbers from `low` to `high`."""
        return (
            torch.rand(shape, generator=self.generator, device=self.generator.device) * (high - low)
            + low
        )


@dataclass(frozen=True)
class Experts:
    """Counts and tensor names of one layer's routed experts."""

    count: int = 0
    chosen: int = 0
    """Experts that a token is routed to."""
    names: tuple[str, ...] = ()
    """Names in `LayerKind.tensors` of the tensors that hold the experts' matrices, one expert after
    the other."""

    def touched(self, tokens: float) -> float:
        """Return the expected number of experts that a batch of `tokens` tokens is routed to if
        each token draws experts at random."""
        if not self.count:
            return 0.0
        # The probability that no token chooses a given expert.
        missed = (1 - self.chosen / self.count) ** tokens
        return self.count * (1 - missed)


@dataclass(frozen=True)
class Matrices:
    """Counts of the elements of one layer's matrices."""

    always: int
    """Elements that every token uses."""
    expert: int
    """Elements of one routed expert."""
    experts: Experts

    @property
    def used(self) -> int:
        """Elements that a token uses."""
        return self.always + self.expert * self.experts.chosen

    @property
    def held(self) -> int:
        """All elements."""
        return self.always + self.expert * self.experts.count

    def read(self, tokens: float) -> float:
        """Return the expected elements that a batch of `tokens` tokens reads, see
        `Experts.touched`."""
        return self.always + self.expert * self.experts.touched(tokens)


class GatedNorm(NamedTuple):
    """Sizes of a grouped norm of a linear's input times silu(gate)."""

    group_size: int
    projected: int
    """Width of the rows whose first channels are the gate."""


@dataclass(frozen=True)
class Linear:
    """A linear as decoding calls it: the sizes of its weight [outputs, width], and the operations
    around it."""

    name: str
    outputs: int
    width: int
    norm: bool = False
    """Whether it norms its input."""
    gated_norm: GatedNorm | None = None
    activation: Literal["relu2"] | None = None
    """An activation that its kernel may fuse."""
    residual: bool = False
    """Whether its output is added to the residual stream."""
    bias: bool = False


@dataclass(frozen=True)
class Memory:
    """Sizes of the states and caches that one layer keeps of earlier tokens, and FLOPs of reading
    them."""

    state: int = 0
    """Elements of recurrent state per request."""
    state_flops: int = 0
    """FLOPs per token of updating and reading the state."""
    kv: int = 0
    """Elements of keys and values per token."""
    score_flops: int = 0
    """FLOPs per token for each token that it attends to."""
    prompt_score_flops: int = 0
    """`score_flops` if both tokens belong to a prompt that is computed at once; 0: the same as
    `score_flops`."""


class Slot(NamedTuple):
    """A layer type of megatron-core's hybrid stack that can be built from any spec."""

    letter: str
    """Its letter in megatron-core's patterns."""
    field: str
    """Its field of megatron-core's `HybridStackSubmodules`."""


class LayerKind(ABC):
    """A kind of layer, written as one letter in patterns. `KINDS` holds one instance of each
    subclass.

    All layers of a kind in a base are alike but for their weights: the same sizes, switches and
    kernels.
    """

    name: ClassVar[str]
    """Key of the kind in tables of weight names."""
    section: ClassVar[type[Section]]
    """Class of the kind's sizes and switches, which also has its letter and title."""
    slot: ClassVar[Slot]
    """Layer type of megatron-core's stack that it is built as; kinds with the same slot never share
    a model."""
    mixer: ClassVar[str] = ""
    """Name of the layer's module that keeps a state, or keys and values. The module looks them up
    by its `layer_name`, which is set when a model is built. If its states have a ring, it has a
    `fold`, see `RecurrentMixer.fold`. Empty: layers keep nothing of earlier tokens."""
    narrows: ClassVar[bool] = False
    """Whether a layer computes results only for the tokens `StepInput.keep`, while all tokens
    update its state. Layers of other kinds compute all results, some of which may then be
    dropped."""
    fp8_products: ClassVar[bool] = True
    """Whether Transformer Engine can run the layer's products in fp8, which need a multiple of 8
    tokens each."""
    writes_residual: ClassVar[tuple[str, ...]] = ()
    """Modules whose output is added to the residual stream."""
    divided: ClassVar[tuple[str, ...]] = ()
    """Fields of the section that tensor-parallel ranks divide among themselves, see
    `divided_sizes`."""
    divided_experts: ClassVar[tuple[str, ...]] = ()
    """Fields in `divided` that are sizes of a routed expert."""
    divided_or_shared: ClassVar[tuple[str, ...]] = ()
    """Fields that tensor-parallel ranks divide; with more ranks than the size, several ranks share
    one part."""

    other_keys: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Megatron's alternative names of a setting, one tuple each, the section's key first; the first
    name set wins."""
    attention_variant: ClassVar[str] = ""
    """Megatron's `experimental_attention_variant` of models with such layers."""
    feed_forward: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the kind's tensor names, if layers of a `GPTModel` have it after the mixer."""
    unfused_norms: ClassVar[tuple[UnfusedNorm, ...]] = ()
    """Norms that have other names in a `GPTModel` without Transformer Engine."""

    @property
    def letter(self) -> str:
        """The kind's letter in patterns."""
        return self.section.letter

    @property
    def keeps_past(self) -> bool:
        """Whether layers keep something of earlier tokens."""
        return bool(self.mixer)

    @abstractmethod
    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        """Return the spec from which megatron-core builds a layer with a backend's modules."""

    @abstractmethod
    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        """Return the names and shapes of a layer's tensors in Megatron's checkpoints."""

    @abstractmethod
    def activations(self, config: ModelConfig) -> int:
        """Count the elements that a layer holds per token at its widest point."""

    def divided_sizes(self, config: ModelConfig, whole_experts: bool = False) -> Mapping[str, int]:
        """Return the sizes, by their keys in files, that tensor-parallel ranks divide among
        themselves.

        Args:
            whole_experts: each routed expert is whole on one rank.
        """
        section = config.section(self.section)
        keys = keys_of(self.section)
        divided = [
            name for name in self.divided if not (whole_experts and name in self.divided_experts)
        ]
        return {keys[name]: getattr(section, name) for name in divided}

    def experts(self, config: ModelConfig) -> Experts:
        """Describe the routed experts of a layer."""
        return Experts()

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        """Return the states that a layer keeps on each of `ranks` tensor-parallel ranks."""
        return ()

    def memory(self, config: ModelConfig) -> Memory:
        """Count what a layer keeps of earlier tokens over all ranks, and the FLOPs of reading
        it."""
        return Memory()

    def settings(self, config: ModelConfig) -> dict[str, object]:
        """Return fields of megatron-core's `TransformerConfig` that only models with such layers
        need."""
        return {}

    def fixed_settings(self, there: bool) -> Mapping[str, object]:
        """Return Megatron's settings for which only one value is supported, with that value.

        Args:
            there: whether the model has layers of this kind.
        """
        return {}

    def derived_settings(self, settings: Settings, hidden_size: int) -> Mapping[str, object]:
        """Return values, by keys in files, that Megatron derives from other settings if those keys
        are not set."""
        return {}

    def ignored_settings(self, settings: Settings) -> Collection[str]:
        """Return the keys that Megatron ignores, given these settings."""
        return ()

    def gpt_layers(self, settings: Settings) -> LayerMarks | bool:
        """Return which layers of a `GPTModel` have this kind: a setting that marks them, True for
        all, or False for none. If several mixer kinds, or several feed-forward kinds, claim a
        layer, the last one in `KINDS` gets it."""
        return False

    def initial(
        self, name: str, shape: torch.Size, config: ModelConfig, draw: Draw
    ) -> Tensor | None:
        """Draw the initial values of the parameter `name` of a model; None: the parameter gets the
        usual ones."""
        return None

    def parts(self, name: str, size: int, config: ModelConfig) -> list[int]:
        """Return the sizes of the parts of the parameter `name`, along the dimension that
        tensor-parallel ranks split, which has length `size`. Each part is split by itself."""
        return [size]

    def depend_on_context(self, layer: nn.Module, config: ModelConfig, draw: Draw) -> None:
        """Change a layer's random weights so that its output depends on all earlier tokens."""
        return

    def matrices(self, config: ModelConfig) -> Matrices:
        """Count the elements of a layer's matrices."""
        experts = self.experts(config)
        tensors = self.tensors(config)
        # Tensors of routed experts have three dimensions, the first of which counts experts.
        always = sum(math.prod(shape) for shape in tensors.values() if len(shape) == 2)
        return Matrices(
            always, sum(math.prod(tensors[name][1:]) for name in experts.names), experts
        )

    def linears(self, config: ModelConfig) -> Sequence[Linear]:
        """Return the linears that a layer calls in decoding, derived from the names of its
        tensors."""
        tensors = self.tensors(config)
        matrices = dict[str, list[Shape]]()
        for tensor, shape in tensors.items():
            if len(shape) == 2 and (match := _MATRIX.fullmatch(tensor)):
                matrices.setdefault(match[1], []).append(shape)
        return [
            Linear(
                name := module.rpartition(".")[2],
                outputs=sum(outputs for outputs, _ in parts),
                width=parts[0][1],
                norm=f"{module}.layer_norm_weight" in tensors,
                residual=name in self.writes_residual,
                bias=f"{module}.bias" in tensors,
            )
            for module, parts in matrices.items()
        ]

    def vectors(self, config: ModelConfig) -> int:
        """Count the elements of a layer's other parameters: norms, biases, convolutions, rates of
        heads."""
        names = self.experts(config).names
        shapes = [shape for name, shape in self.tensors(config).items() if name not in names]
        return sum(math.prod(shape) for shape in shapes if len(shape) != 2)
