"""The frozen description of a model, whichever checkpoint layout it came from."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from mtpkit.errors import UserError, raise_problems

LAYER_KINDS = {"M": "Mamba2", "*": "attention", "-": "MLP", "E": "mixture of experts"}
"""Letters of a layer pattern that can be built."""

CACHING_KINDS = "M*"
"""Those of layers that keep something of earlier tokens: a state, or keys and values."""

SIZES = ("vocab_size", "hidden_size", "max_position_embeddings")
"""Fields that must be positive in every model."""

LAYER_SIZES = {
    "M": (
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_state_dim",
        "mamba_num_groups",
        "mamba_conv_kernel",
        "mamba_chunk_size",
    ),
    "*": ("num_attention_heads", "num_query_groups", "kv_channels"),
    "-": ("ffn_hidden_size",),
    "E": (
        "num_moe_experts",
        "moe_ffn_hidden_size",
        "moe_router_topk",
        "moe_router_num_groups",
        "moe_router_group_topk",
    ),
}
"""Fields that must be positive where the pattern has the letter."""

MULTIPLES = (
    ("*", "num_attention_heads", "num_query_groups"),
    ("M", "mamba_num_heads", "mamba_num_groups"),
    ("E", "num_moe_experts", "moe_router_num_groups"),
)
"""(letter, field, field that divides it)"""

AT_MOST = (
    ("E", "moe_router_topk", "num_moe_experts"),
    ("E", "moe_router_group_topk", "moe_router_num_groups"),
)
"""(letter, field, field that it may not exceed)"""

UNKNOWN_DEPTHS_DEFAULT, UNKNOWN_DEPTHS_MOST = 3, 7
"""K by default, and the largest K of `auto`, for a repeated head of which nobody says how deep it was trained."""


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


VALUES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", _is_whole),
    int | None: ("a whole number, or nothing", lambda value: value is None or _is_whole(value)),
    float: ("a number", _is_number),
    bool: ("true or false", lambda value: type(value) is bool),
    str: ("a text", lambda value: isinstance(value, str)),
    tuple[int, ...]: ("whole numbers", lambda value: isinstance(value, tuple) and all(map(_is_whole, value))),
    tuple[float, float]: (
        "two numbers",
        lambda value: isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value)),
    ),
}
"""Type of a field -> what its values are, and whether one is."""


def caching_length(pattern: str) -> int:
    """How many layers of a pattern there are up to the last one that keeps something of earlier tokens."""
    return 1 + max(map(pattern.rfind, CACHING_KINDS))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a hybrid language model with multi-token-prediction (MTP) heads.

    Field names are megatron-core's where it has one. Instances are checked on construction; `UserError` names every
    offending field.
    """

    family: str
    """Name of the weight-name table in `mtpkit.checkpoint.families`, such as `nemotron_h`."""
    vocab_size: int
    hidden_size: int
    pattern: str
    """One letter a base layer, see `LAYER_KINDS`."""
    max_position_embeddings: int = 4096

    mtp_pattern: str = ""
    """Layers of one MTP depth; empty when the model has no heads."""
    mtp_num_depths: int = 0
    """K, the number of depths the heads are trained for. A repeated head may be unrolled further when serving."""
    mtp_depths_known: bool = True
    """False: nothing says for how many depths a repeated head was trained; `mtp_num_depths` is 1 then."""
    mtp_use_repeated_layer: bool = True
    """One physical layer shared by all depths (Nemotron 3), rather than one a depth (DeepSeek-V3)."""

    num_attention_heads: int = 1
    num_query_groups: int = 1
    kv_channels: int = 64
    """Width of one attention head."""
    position_embedding_type: Literal["none", "rope"] = "none"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    qk_layernorm: bool = False

    ffn_hidden_size: int = 0
    activation: Literal["relu2", "swiglu"] = "relu2"

    mamba_num_heads: int = 0
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_groups: int = 1
    mamba_conv_kernel: int = 4
    mamba_chunk_size: int = 128
    mamba_dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Clamp of dt after its softplus."""

    num_moe_experts: int = 0
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    """0: no shared expert."""
    moe_latent_size: int = 0
    """Width the routed experts work in (Nemotron 3 Super); 0: the hidden size."""
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_num_groups: int = 1
    moe_router_group_topk: int = 1

    layernorm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    init_std: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        problems = list(self._wrong_values()) or list(self._problems())
        raise_problems("model config", problems)

    def _wrong_values(self) -> Iterator[str]:
        """Yield one clause for every value of the wrong type or outside its choices."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            expected, fits = VALUES.get(field.type, ("", None))
            if fits and not fits(value):
                yield f"{field.name} {value!r} is not {expected}"
            elif get_origin(field.type) is Literal and value not in get_args(field.type):
                yield f"{field.name} {value!r} is unknown; known: {', '.join(get_args(field.type))}"

    def _problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be built."""
        for field in ("pattern", "mtp_pattern"):
            unknown = sorted(set(getattr(self, field)) - set(LAYER_KINDS))
            if unknown:
                known = ", ".join(f"{letter} ({name})" for letter, name in LAYER_KINDS.items())
                yield f"{field} has unknown layer letter(s) {', '.join(map(repr, unknown))}; known: {known}"
        if not self.pattern:
            yield "pattern is empty"
        if self.mtp_num_depths < 0:
            yield f"mtp_num_depths {self.mtp_num_depths} is negative"
        elif bool(self.mtp_pattern) != bool(self.mtp_num_depths):
            yield f"mtp_pattern {self.mtp_pattern!r} and mtp_num_depths {self.mtp_num_depths} must be set together"
        if not self.mtp_depths_known and not (self.mtp_num_depths == 1 and self.mtp_use_repeated_layer):
            yield "mtp_depths_known false is for one repeated head with mtp_num_depths 1"
        letters = [letter for letter in LAYER_KINDS if letter in self.pattern + self.mtp_pattern]
        required = [*SIZES, *(field for letter in letters for field in LAYER_SIZES[letter])]
        missing = [field for field in required if getattr(self, field) <= 0]
        if missing:
            yield f"must be positive: {', '.join(missing)}"
            return
        for letter, whole, part in MULTIPLES:
            if letter in letters and getattr(self, whole) % getattr(self, part):
                yield f"{whole} {getattr(self, whole)} is not a multiple of {part} {getattr(self, part)}"
        for letter, low, high in AT_MOST:
            if letter in letters and getattr(self, low) > getattr(self, high):
                yield f"{low} {getattr(self, low)} exceeds {high} {getattr(self, high)}"

    @property
    def num_mtp_layers(self) -> int:
        """Number of physical MTP layers: 1 when repeated, one a depth otherwise, 0 without heads."""
        return min(1, self.mtp_num_depths) if self.mtp_use_repeated_layer else self.mtp_num_depths

    @property
    def default_num_speculative_tokens(self) -> int:
        """K where nobody sets it: the depths the heads are trained for, or 3 where those are unknown."""
        return self.mtp_num_depths if self.mtp_depths_known else UNKNOWN_DEPTHS_DEFAULT

    @property
    def max_adaptive_tokens(self) -> int:
        """The largest K that `auto` tries: the depths the heads are trained for, or 7 where those are unknown."""
        return self.mtp_num_depths if self.mtp_depths_known else UNKNOWN_DEPTHS_MOST

    @property
    def hybrid_layer_pattern(self) -> str:
        """Megatron's unified pattern, such as `M-*-/*-/*-` for two depths."""
        return "/".join([self.pattern, *[self.mtp_pattern] * self.mtp_num_depths])

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed. A number of depths that is given is known."""
        if "mtp_num_depths" in changes:
            changes = {"mtp_depths_known": True} | changes
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able values; `from_dict` reads them back."""
        values = dataclasses.asdict(self)
        values["mamba_dt_limit"] = [None if bound == float("inf") else bound for bound in self.mamba_dt_limit]
        values["eos_token_ids"] = list(self.eos_token_ids)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Build from `to_dict`'s values.

        Raises:
            UserError: unknown or missing keys, all of them named.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        missing = sorted(required - set(values))
        if unknown or missing:
            raise UserError(f"model config: unknown keys {unknown}, missing keys {missing}")
        values = dict(values)
        if "mamba_dt_limit" in values:
            low, high = values["mamba_dt_limit"]
            values["mamba_dt_limit"] = (low, math.inf if high is None else high)
        if "eos_token_ids" in values:
            values["eos_token_ids"] = tuple(values["eos_token_ids"])
        return cls(**values)
