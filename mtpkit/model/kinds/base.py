"""What a layer kind answers for, so that the rest of the house need not know which kinds there are."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mtpkit.config import ModelConfig, Section
from mtpkit.model.backends import Backend
from mtpkit.model.state import StateSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    """Random numbers of one parameter."""

    generator: torch.Generator

    def normal(self, shape: torch.Size, std: float) -> Tensor:
        """Numbers of mean 0."""
        return torch.randn(shape, generator=self.generator, device=self.generator.device) * std

    def uniform(self, shape: torch.Size, low: float, high: float) -> Tensor:
        """Numbers from `low` to `high`."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device) * (high - low) + low


@dataclass(frozen=True)
class Experts:
    """Routed experts of one layer."""

    count: int = 0
    chosen: int = 0
    """Experts that a token is sent to."""
    names: tuple[str, ...] = ()
    """Those of `LayerKind.tensors` that hold their matrices, one expert after the other."""


@dataclass(frozen=True)
class Matrices:
    """Elements of the matrices of one layer."""

    always: int
    """Those that every token uses."""
    expert: int
    """Those of one routed expert."""
    experts: Experts

    @property
    def used(self) -> int:
        """Those that a token uses."""
        return self.always + self.expert * self.experts.chosen

    @property
    def held(self) -> int:
        """All of them."""
        return self.always + self.expert * self.experts.count

    def read(self, tokens: float) -> float:
        """How many `tokens` tokens read together, each with experts drawn at random."""
        if not self.experts.count:
            return self.always
        missed = (1 - self.experts.chosen / self.experts.count) ** tokens
        return self.always + self.expert * self.experts.count * (1 - missed)


@dataclass(frozen=True)
class Memory:
    """What one layer keeps of earlier tokens, and what reading it costs."""

    state: int = 0
    """Elements of recurrent state of a request."""
    state_flops: int = 0
    """FLOPs of updating and reading the state, for each token."""
    kv: int = 0
    """Elements of keys and values of a token."""
    score_flops: int = 0
    """FLOPs of a token for each one that it attends to."""


class LayerKind(ABC):
    """A kind of layers: what stands in a pattern as one letter. One instance of each subclass is in `KINDS`."""

    name: ClassVar[str]
    """In tables of weight names."""
    section: ClassVar[type[Section]]
    """Its sizes and switches, its letter and what people call it."""
    slot: ClassVar[str]
    """The letter of megatron-core's patterns whose place it takes there: its own, or that of a kind that is in no model
    with this one."""
    mixer: ClassVar[str] = ""
    """Module of a layer that keeps a state, or keys and values: it looks them up by its `layer_name`, which is set when
    a model is built. Empty: layers keep nothing of earlier tokens."""
    fp8_products: ClassVar[bool] = True
    """Whether Transformer Engine can multiply in fp8: each product then needs a multiple of 8 tokens."""
    writes_residual: ClassVar[tuple[str, ...]] = ()
    """Modules whose output is added to the residual stream."""
    divided: ClassVar[tuple[str, ...]] = ()
    """Fields of the section that tensor-parallel ranks divide among themselves."""
    divided_or_shared: ClassVar[tuple[str, ...]] = ()
    """Fields that tensor-parallel ranks divide, or of which several ranks share one."""

    @property
    def letter(self) -> str:
        """In patterns."""
        return self.section.letter

    @property
    def keeps_past(self) -> bool:
        """Whether layers keep something of earlier tokens."""
        return bool(self.mixer)

    @abstractmethod
    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        """How megatron-core builds a layer from a backend's modules."""

    @abstractmethod
    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        """Names and shapes of a layer's tensors in Megatron's checkpoints."""

    @abstractmethod
    def activations(self, config: ModelConfig) -> int:
        """Elements that a layer holds of a token at its widest point."""

    def experts(self, config: ModelConfig) -> Experts:
        """The routed experts of a layer."""
        return Experts()

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        """States that a layer keeps on one of so many tensor-parallel ranks."""
        return ()

    def memory(self, config: ModelConfig) -> Memory:
        """Elements that a layer keeps of earlier tokens, and FLOPs of reading them."""
        return Memory()

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """Fields of megatron-core's `TransformerConfig` that only models with such layers need."""
        return {}

    def initial(self, name: str, shape: torch.Size, config: ModelConfig, draw: Draw) -> Tensor | None:
        """Initial values of the parameter that a layer's module calls `name`; None: those that any parameter gets."""
        return None

    def blocks(self, name: str, config: ModelConfig) -> int:
        """Equal parts of the parameter `name`, each of which is divided among tensor-parallel ranks."""
        return 1

    def depend_on_context(self, layer: nn.Module, config: ModelConfig, draw: Draw) -> None:
        """Change a layer's random weights so that what it gives depends on all of the tokens before."""
        return

    def matrices(self, config: ModelConfig) -> Matrices:
        """Elements of a layer's matrices."""
        experts, tensors = self.experts(config), self.tensors(config)
        always = sum(math.prod(shape) for shape in tensors.values() if len(shape) == 2)
        return Matrices(always, sum(math.prod(tensors[name][1:]) for name in experts.names), experts)

    def vectors(self, config: ModelConfig) -> int:
        """Elements of a layer's other parameters: norms, biases, convolutions, rates of heads."""
        names = self.experts(config).names
        shapes = [shape for name, shape in self.tensors(config).items() if name not in names]
        return sum(math.prod(shape) for shape in shapes if len(shape) != 2)
