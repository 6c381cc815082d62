"""The frozen description of a model, whichever checkpoint layout it came from."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from mtpkit.errors import UserError, listed, raise_problems, shown

LAYER_KINDS = {"M": "Mamba2", "*": "attention", "-": "MLP", "E": "mixture of experts"}
"""Letters of a layer pattern that can be built."""

CACHING_KINDS = "M*"
"""Those of layers that keep something of earlier tokens: a state, or keys and values."""

LARGEST_COUNT = 2**31 - 1
"""The largest value of a setting that counts something."""

MOST_DRAFTS = 1000
"""The most drafts of a step, whatever the heads."""

RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "max_position_embeddings": (1, 2**30),
    "mtp_num_depths": (0, 64),
    "num_attention_heads": (0, 2**16),
    "num_query_groups": (0, 2**16),
    "kv_channels": (0, 2**16),
    "rotary_base": (1, 1e15),
    "rotary_percent": (1e-6, 1),
    "ffn_hidden_size": (0, 2**24),
    "mamba_num_heads": (0, 2**16),
    "mamba_head_dim": (0, 2**16),
    "mamba_state_dim": (0, 2**16),
    "mamba_num_groups": (0, 2**16),
    "mamba_conv_kernel": (0, 2**10),
    "mamba_chunk_size": (0, 2**12),
    "num_moe_experts": (0, 2**14),
    "moe_router_topk": (0, 2**14),
    "moe_ffn_hidden_size": (0, 2**24),
    "moe_shared_expert_intermediate_size": (0, 2**24),
    "moe_latent_size": (0, 2**20),
    "moe_router_topk_scaling_factor": (1e-6, 1e6),
    "moe_router_num_groups": (0, 2**14),
    "moe_router_group_topk": (0, 2**14),
    "layernorm_epsilon": (1e-20, 1),
    "init_std": (0, 1e3),
}
"""Least and largest value of each number: far beyond all models that exist, so that nonsense ends before it is built.
Token ids lie in the vocabulary."""

MOST_LAYERS = {"pattern": 2048, "mtp_pattern": 64}
MOST_EXPERTS = 2**17
"""The most experts of all layers together."""

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
    if type(value) is int:
        return abs(value) <= 2**53  # all of which a float holds; torch takes none beyond 64 bits
    return type(value) is float and value == value  # NaN equals nothing


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
                yield f"{field.name} {shown(value)} is not {expected}"
            elif get_origin(field.type) is Literal and value not in get_args(field.type):
                yield f"{field.name} {shown(value)} is unknown; known: {', '.join(get_args(field.type))}"

    def _out_of_range(self) -> Iterator[str]:
        """Yield one clause for every value that no model has, whatever the others are."""
        for field, most in MOST_LAYERS.items():
            letters = getattr(self, field)
            unknown = sorted(set(letters) - set(LAYER_KINDS))
            if unknown:
                known = ", ".join(f"{letter} ({name})" for letter, name in LAYER_KINDS.items())
                yield f"{field} has unknown layer letter(s) {listed(map(repr, unknown), width=60)}; known: {known}"
            if len(letters) > most:
                yield f"{field} has {len(letters)} layers, more than {most}"
        if not self.pattern:
            yield "pattern is empty"
        for field, (low, high) in RANGES.items():
            value = getattr(self, field)
            if not low <= value <= high:
                yield f"{field} {shown(value)} is not in {low:.10g} to {high:.10g}"
        low, high = self.mamba_dt_limit
        if not 0 <= low < high or low > 1e6:
            yield f"mamba_dt_limit {shown(self.mamba_dt_limit)} must be 0 <= low < high, with low at most 1e6"
        ids = {"bos_token_id": (self.bos_token_id,), "eos_token_ids": self.eos_token_ids}
        for field, tokens in (ids | {"pad_token_id": (self.pad_token_id,)}).items():
            outside = [shown(token) for token in tokens if token is not None and not 0 <= token < self.vocab_size]
            if outside:
                yield f"{field} {listed(outside, width=60)} is not in the vocabulary of {shown(self.vocab_size)} tokens"

    def _problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be built."""
        out_of_range = list(self._out_of_range())
        yield from out_of_range
        if bool(self.mtp_pattern) != bool(self.mtp_num_depths):
            given = f"mtp_pattern {shown(self.mtp_pattern)} and mtp_num_depths {shown(self.mtp_num_depths)}"
            yield f"{given} must be set together"
        if not self.mtp_depths_known and not (self.mtp_num_depths == 1 and self.mtp_use_repeated_layer):
            yield "mtp_depths_known false is for one repeated head with mtp_num_depths 1"
        letters = [letter for letter in LAYER_KINDS if letter in self.pattern + self.mtp_pattern]
        missing = [field for letter in letters for field in LAYER_SIZES[letter] if getattr(self, field) <= 0]
        if missing:
            yield f"must be positive: {', '.join(missing)}"
        if missing or out_of_range:
            return
        experts = self.num_moe_experts * (self.pattern + self.mtp_pattern * self.num_mtp_layers).count("E")
        if experts > MOST_EXPERTS:
            yield f"num_moe_experts {self.num_moe_experts} in all layers are {experts}, more than {MOST_EXPERTS}"
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
    def from_dict(cls, values: dict[str, Any], where: object = "model config") -> "ModelConfig":
        """Build from `to_dict`'s values.

        Args:
            where: file of the values, for messages.

        Raises:
            UserError: unknown or missing keys, or wrong values, all of them named.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        missing = sorted(required - set(values))
        if unknown or missing:
            raise UserError(
                f"{where}: unknown keys: {listed(unknown, width=120) or 'none'}; "
                f"missing keys: {listed(missing, width=120) or 'none'}"
            )
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        if len(lists.get("mamba_dt_limit", ())) == 2:
            low, high = lists["mamba_dt_limit"]
            lists["mamba_dt_limit"] = (low, math.inf if high is None else high)
        return config_of_file(where, {}, values | lists)


def config_of_file(where: object, keys: Mapping[str, str], fields: Mapping[str, Any]) -> ModelConfig:
    """Build a config from what a file says, with messages that name the file and its own keys.

    Args:
        where: the file.
        keys: field of `ModelConfig` -> key of the file, where they differ.

    Raises:
        UserError: as `ModelConfig`.
    """
    try:
        return ModelConfig(**fields)
    except UserError as error:
        problems = str(error).removeprefix("model config: ")
        raise UserError(f"{where}: " + re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), problems)) from None
