"""What a case is: an op, its inputs, and the bytes that it must move; and the sizes of a model and
a step that cases are made for."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtpkit.config import ModelConfig
from mtpkit.model.kinds import kinds_in
from mtpkit.model.kinds.base import LayerKind
from mtpkit.model.state import RecurrentSpec

Args = tuple[Any, ...]

BLOCK_SIZE = 16
"""Tokens of a block of keys and values."""


@dataclass(frozen=True)
class Case:
    """An op at one shape."""

    call: Callable[..., Any]
    shape: str
    make: Callable[[], Args]
    """Fresh inputs."""
    bytes: Callable[[Args], float]
    """Bytes that the op must read and write at least."""
    flops: float = 0.0
    """FLOPs on the matrix units."""
    name: str = ""
    """Name of the case, if it differs from the op's."""
    judge: Callable[[Args, Any], Tensor] | None = None
    """Selects what twins must agree in, for outputs whose ties may be broken either way; None: the
    whole output."""
    reference: Callable[..., Any] | None = None
    """Reference twin; None: the twin that the op was picked from."""
    tolerance: float | None = None
    """Largest relative error that passes; None: the default of the dtype."""
    note: Callable[[float], str] | None = None
    """Makes a note on the op, given the bytes that it moves."""
    more: Callable[[Args], Args] | None = None
    """Makes more inputs, which share with given ones the tensors that a model has once; None: they
    share nothing."""
    scratch: tuple[int, ...] = ()
    """Indices of inputs whose contents after the call are not compared."""
    capture: bool = True
    """Whether the op is timed in a CUDA graph, as decode steps run."""

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.name or self.call.__name__

    @property
    def twin(self) -> Callable[..., Any]:
        """The plain-PyTorch implementation."""
        return self.reference or inspect.unwrap(self.call)

    def beside(self, args: Args) -> Args:
        """Inputs to be used in turn with `args`."""
        return self.more(args) if self.more else self.make()


def size(*args: object) -> int:
    """Bytes of all tensors among the arguments."""
    return sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor))


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model and of a step."""

    config: ModelConfig
    rows: int
    k: int
    context_len: int
    device: torch.device
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    draft_vocab_size: int | None = None

    @property
    def tokens(self) -> int:
        """T, tokens per row."""
        return 1 + self.k

    @property
    def count(self) -> int:
        """N, tokens of a step."""
        return self.rows * self.tokens

    @property
    def step(self) -> str:
        """R and T as text."""
        return f"R = {self.rows}, T = {self.tokens}"

    @property
    def kinds(self) -> list[LayerKind]:
        """The layer kinds of the model, first those that keep something of earlier tokens."""
        return sorted(kinds_in(self.config.letters), key=lambda kind: not kind.keeps_past)

    @property
    def recurrent_kinds(self) -> list[LayerKind]:
        """Kinds of layers that keep a recurrent state."""
        return [
            kind
            for kind in self.kinds
            if any(isinstance(state, RecurrentSpec) for state in kind.states(self.config))
        ]

    @property
    def step_kinds(self) -> list[LayerKind]:
        """The layer kinds in the order of a step's cases: recurrent ones first."""
        recurrent = self.recurrent_kinds
        return recurrent + [kind for kind in self.kinds if kind not in recurrent]

    @cached_property
    def generator(self) -> torch.Generator:
        """Source of the random inputs, on the device."""
        return torch.Generator(self.device).manual_seed(0)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal random numbers."""
        value = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return value.normal_(0, std, generator=self.generator)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Random numbers in 0 .. 1."""
        return torch.rand(*shape, dtype=dtype, device=self.device, generator=self.generator)

    def ints(self, high: int, *shape: int) -> Tensor:
        """Random int64 below `high`."""
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def permutation(self, count: int) -> Tensor:
        """0 .. count - 1 in random order."""
        return torch.randperm(count, device=self.device, generator=self.generator)

    def full(self, value: int, *shape: int) -> Tensor:
        """An int64 tensor filled with `value`."""
        return torch.full(shape, value, dtype=torch.int64, device=self.device)
