"""Types with which layer kinds describe Megatron's settings and names."""

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Settings(Protocol):
    """Settings of a checkpoint by key; a setting of null counts as absent."""

    def first(self, *keys: str) -> str | None:
        """Return the first of these keys that is set."""

    def get(self, key: str, default: object = None) -> object:
        """Return a setting of any type."""

    def typed[T: (int, bool, str)](self, key: str, default: T) -> T:
        """Return a setting of the default's type; for one of another type, record a problem and
        return the default."""


class LayerMarks(NamedTuple):
    """A setting that says which layers of a `GPTModel` have a kind, by a list of zeros and ones or
    by a number."""

    key: str
    default: int | None
    of_number: Callable[[int, int], bool]
    """Function of a layer's index, from 0, and the setting's number that says whether the layer has
    the kind."""


class UnfusedNorm(NamedTuple):
    """A norm of a `GPTModel` without Transformer Engine."""

    name: str
    beside: str
    """A tensor of the same layer that says which norm it is."""
    fused: str
    """The norm's name with Transformer Engine."""
