"""Sizes and switches of each layer kind, and the table from letters of patterns to them."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from mtpkit.config.checked import checked, keys_of
from mtpkit.errors import listed

Number = int | float
"""A number that files keep as it was written: 1 is not written as 1.0."""


class Part:
    """Base of checked classes whose keys lie in files beside those of `ModelConfig`; all its fields have defaults."""

    added_later: ClassVar[tuple[str, ...]] = ()
    """Fields that files have only where they differ from their defaults, as older ones lack them."""

    @classmethod
    @functools.cache
    def default(cls) -> Self:
        """The part where nothing is given."""
        return cls()

    def stored(self) -> dict[str, Any]:
        """The values that files have, by their keys there."""
        old = type(self).default()
        values = {name: getattr(self, name) for name in keys_of(type(self))}
        return {
            keys_of(type(self))[name]: value
            for name, value in values.items()
            if name not in self.added_later or value != getattr(old, name)
        }

    @classmethod
    def from_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace values of a file, by key, that stand for values which JSON lacks."""
        return values


class Section(Part):
    """Base of the sizes and switches of one layer kind."""

    letter: ClassVar[str]
    """The layer kind's letter in patterns."""
    title: ClassVar[str]
    """Name of the kind in messages."""
    in_every_file: ClassVar[bool] = False
    """Whether files of models without such layers have its keys too, as they had when there were four kinds."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be positive where the model has such layers."""
    multiples: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(field, field that divides it)"""
    at_most: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(field, field that it may not exceed)"""

    def requirements(self, layers: int) -> Iterator[str]:
        """Yield one clause for every value that a model with so many such layers, heads included, cannot have."""
        keys = keys_of(type(self))
        values = {name: getattr(self, name) for name in keys}
        if missing := [keys[name] for name in self.positive if values[name] <= 0]:
            yield f"must be positive: {', '.join(missing)}"
            return
        for whole, part in self.multiples:
            if values[whole] % values[part]:
                yield f"{keys[whole]} {values[whole]} is not a multiple of {keys[part]} {values[part]}"
        for low, high in self.at_most:
            if values[low] > values[high]:
                yield f"{keys[low]} {values[low]} exceeds {keys[high]} {values[high]}"


SECTIONS: dict[str, type[Section]] = {}
"""Letter of a layer kind -> its section."""


def register_section(section: type[Section]) -> None:
    """Make the letter of a layer kind known, for patterns and for files."""
    assert section.letter not in SECTIONS, f"{section.letter} stands for {SECTIONS[section.letter].title}"
    SECTIONS[section.letter] = section


def known_letters() -> str:
    """The letters of all kinds with their names, for messages: `M (Mamba2), * (attention), ...`."""
    return ", ".join(f"{letter} ({section.title})" for letter, section in SECTIONS.items())


def _check_letters(pattern: str) -> str:
    if unknown := sorted(set(pattern) - SECTIONS.keys()):
        odd = listed(map(repr, unknown), width=60)
        raise ValueError(f"has unknown layer letter(s) {odd}; known: {known_letters()}")
    return pattern


def _check_length(most: int) -> Callable[[str], str]:
    def check(pattern: str) -> str:
        if len(pattern) > most:
            raise ValueError(f"has {len(pattern)} layers, more than {most}")
        return pattern

    return check


def up_to(most: int) -> Any:
    """Limits of a size: from 0, far beyond all models that exist, so that nonsense ends before it is built."""
    return Field(ge=0, le=most)


Width = Annotated[int, up_to(2**24)]
Count = Annotated[int, up_to(2**16)]
Pattern = Annotated[str, AfterValidator(_check_letters), AfterValidator(_check_length(2048))]
"""Layers of the base, a letter each."""
HeadPattern = Annotated[str, AfterValidator(_check_letters), AfterValidator(_check_length(64))]
"""Layers of one MTP depth, a letter each."""


@checked("model config")
class AttentionConfig(Section):
    """Grouped-query attention."""

    letter, title, in_every_file = "*", "attention", True
    positive = ("num_attention_heads", "num_query_groups", "kv_channels")
    multiples = (("num_attention_heads", "num_query_groups"),)

    num_attention_heads: Count = 1
    num_query_groups: Count = 1
    kv_channels: Count = 64
    """Width of one attention head."""
    position_embedding_type: Literal["none", "rope"] = "none"
    rotary_base: Annotated[Number, Field(ge=1, le=1e15)] = 10000.0
    rotary_percent: Annotated[Number, Field(ge=1e-6, le=1)] = 1.0
    qk_layernorm: bool = False


@checked("model config")
class MlpConfig(Section):
    """A feed-forward network."""

    letter, title, in_every_file = "-", "MLP", True
    positive = ("ffn_hidden_size",)

    ffn_hidden_size: Width = 0
    activation: Literal["relu2", "swiglu"] = "relu2"
    """Experts have it too."""

    @property
    def gated(self) -> bool:
        """Whether the first matrix makes gates besides values."""
        return self.activation == "swiglu"


_Limits = tuple[Number, int | Annotated[float, Field(allow_inf_nan=True)]]


def _check_range(limit: _Limits) -> _Limits:
    low, high = limit
    if not 0 <= low < high or low > 1e6 or 2**53 < high < math.inf:
        raise ValueError("must be 0 <= low < high, with low at most 1e6 and high at most 2^53 or infinite")
    return limit


@checked("model config", prefix="mamba_")
class Mamba2Config(Section):
    """Mamba2 (Dao and Gu 2024, arXiv:2405.21060)."""

    letter, title, in_every_file = "M", "Mamba2", True
    positive = ("num_heads", "head_dim", "state_dim", "num_groups", "conv_kernel", "chunk_size")
    multiples = (("num_heads", "num_groups"),)

    num_heads: Count = 0
    head_dim: Count = 64
    state_dim: Count = 128
    num_groups: Count = 1
    conv_kernel: Annotated[int, up_to(2**10)] = 4
    chunk_size: Annotated[int, up_to(2**12)] = 128
    dt_limit: Annotated[_Limits, AfterValidator(_check_range)] = (0.0, math.inf)
    """Clamp of dt after its softplus."""

    @property
    def inner(self) -> int:
        """Width of the values that the recurrence takes up, all heads together."""
        return self.num_heads * self.head_dim

    @property
    def bc_width(self) -> int:
        """Width of B, and of C, all groups together."""
        return self.num_groups * self.state_dim

    @property
    def projected(self) -> int:
        """Width of the input projection: z, x, B, C and dt."""
        return 2 * self.inner + 2 * self.bc_width + self.num_heads

    @classmethod
    def from_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read an upper limit of null as infinity."""
        match values.get("mamba_dt_limit"):
            case [low, None]:
                return values | {"mamba_dt_limit": (low, math.inf)}
        return values


MOST_IN_A_LAYER, _MOST_EXPERTS = 2**14, 2**17
"""The most experts of one layer, and of all layers together."""


@checked("model config", prefix="moe_")
class MoeConfig(Section):
    """Routed experts, with or without a shared one; their activation is `MlpConfig.activation`."""

    letter, title, in_every_file = "E", "mixture of experts", True
    positive = ("num_experts", "ffn_hidden_size", "router_topk", "router_num_groups", "router_group_topk")
    multiples = (("num_experts", "router_num_groups"),)
    at_most = (("router_topk", "num_experts"), ("router_group_topk", "router_num_groups"))

    num_experts: int = Field(default=0, validation_alias="num_moe_experts", ge=0, le=MOST_IN_A_LAYER)
    router_topk: Annotated[int, up_to(2**14)] = 2
    ffn_hidden_size: Width = 0
    shared_expert_intermediate_size: Width = 0
    """0: no shared expert."""
    latent_size: Annotated[int, up_to(2**20)] = 0
    """Width the routed experts work in (Nemotron 3 Super); 0: the hidden size."""
    router_topk_scaling_factor: Annotated[Number, Field(ge=1e-6, le=1e6)] = 1.0
    router_num_groups: Annotated[int, up_to(2**14)] = 1
    router_group_topk: Annotated[int, up_to(2**14)] = 1

    def requirements(self, layers: int) -> Iterator[str]:
        yield from super().requirements(layers)
        if (experts := self.num_experts * layers) > _MOST_EXPERTS:
            yield f"num_moe_experts {self.num_experts} in all layers are {experts}, more than {_MOST_EXPERTS}"


for _section in (AttentionConfig, MlpConfig, Mamba2Config, MoeConfig):  # in the order of files
    register_section(_section)
