"""Parts shared by families whose layers are two letters each: a mixer, then an MLP or a mixture of
experts.

Layer n in Hugging Face is letters 2n and 2n + 1 of a pattern, both under the prefix
`model.layers.n.`. Names are those of Qwen2, except for experts and heads after the last layer,
which have the names of DeepSeek-V3.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtpkit.checkpoint.families.keys import Line, Settings
from mtpkit.checkpoint.families.table import Entry, FuseQKV, Join, Ways, expert_ways, one
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.config.sections import AttentionConfig
from mtpkit.errors import shown
from mtpkit.model.layers.rotary import yarn_scale

OUTSIDE = (
    one("model.embed_tokens.weight", megatron.EMBEDDING),
    one("model.norm.weight", megatron.FINAL_NORM),
    one("lm_head.weight", megatron.OUTPUT),
)


def base_layer(number: int) -> str:
    """Prefix of the tensor names of letter `number` of the base's pattern."""
    return f"model.layers.{number // 2}."


def after_base(config: ModelConfig, depth: int, number: int = 0) -> str:
    """Prefix of all tensors of a physical MTP depth, which is numbered as a layer after the base's
    last."""
    return f"model.layers.{len(config.pattern) // 2 + depth}."


def heads_after_base(config: ModelConfig, depth: int) -> Iterator[Entry]:
    """The tensors of an MTP depth of DeepSeek-V3 outside its layers."""
    hf = after_base(config, depth)
    own = megatron.mtp_depth(depth)
    yield from (
        one(f"{hf}{name}.weight", f"{own}{name}.weight") for name in ("enorm", "hnorm", "eh_proj")
    )
    yield one(f"{hf}shared_head.norm.weight", f"{own}final_layernorm.weight")


def shared_with_base(config: ModelConfig) -> dict[str, str]:
    """The copies of embedding and output layer that DeepSeek-V3 stores with every MTP depth, see
    `Family.copies`."""
    pairs = {"embed_tokens.weight": OUTSIDE[0], "shared_head.head.weight": OUTSIDE[2]}
    depths = range(config.mtp.num_layers)
    return {
        after_base(config, depth) + name: entry.hf[0]
        for depth in depths
        for name, entry in pairs.items()
    }


def attention(config: ModelConfig) -> Iterator[Entry]:
    """Grouped-query attention, with or without biases and norms of queries and keys."""
    sizes = config.attention
    parts = FuseQKV(
        sizes.num_query_groups,
        sizes.num_attention_heads // sizes.num_query_groups,
        sizes.kv_channels,
    )
    yield one("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    for name in ("weight", "bias"):
        theirs = tuple(f"self_attn.{part}_proj.{name}" for part in "qkv")
        yield Entry(theirs, (f"self_attention.linear_qkv.{name}",), parts)
    for part in "qk":
        yield one(f"self_attn.{part}_norm.weight", f"self_attention.{part}_layernorm.weight")
    yield one("self_attn.o_proj.weight", "self_attention.linear_proj.weight")


def network(hf: str, own: str, expert: str = "") -> Iterator[Entry]:
    """Both matrices of a gated feed-forward network; `expert` is `[3]` for expert 3 of a stack."""
    yield Entry(
        (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"),
        (f"{own}linear_fc1.weight{expert}",),
        Join(),
    )
    yield one(f"{hf}down_proj.weight", f"{own}linear_fc2.weight{expert}")


def mlp(_: ModelConfig) -> Iterator[Entry]:
    """A feed-forward network."""
    yield one("post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    yield from network("mlp.", "mlp.")


def experts(config: ModelConfig) -> Iterator[Entry | Ways]:
    """Norm, router and routed experts, which files hold one by one or packed."""
    yield one("post_attention_layernorm.weight", "pre_mlp_layernorm.weight")
    yield one("mlp.gate.weight", "mlp.router.weight")
    yield one("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias")
    own = "mlp.experts.experts."
    count = config.moe.num_experts
    both = [list(network(f"mlp.experts.{e}.", own, f"[{e}]")) for e in range(count)]
    for packed, fc, place in (("gate_up_proj", "linear_fc1", 0), ("down_proj", "linear_fc2", 1)):
        one_by_one = [entries[place] for entries in both]
        yield expert_ways(count, f"mlp.experts.{packed}", f"{own}{fc}.weight", one_by_one)


def moe(config: ModelConfig) -> Iterator[Entry | Ways]:
    """Routed experts, and DeepSeek-V3's shared experts, which are stored as one network."""
    yield from experts(config)
    yield from network("mlp.shared_experts.", "mlp.shared_experts.")


@dataclass(frozen=True)
class Layers(Line):
    """The number of layers. The first few may have an MLP, and the rest experts.

    Attributes:
        mixer: letter of the first half of a layer.
        dense_key: key that counts the layers with an MLP; empty: all layers have an MLP.
        count_key: key that counts physical MTP layers; these have experts if the family has any.
    """

    mixer: str = "*"
    dense_key: str = ""
    count_key: str = "num_nextn_predict_layers"

    def _pattern(self, dense: int, count: int) -> str:
        return f"{self.mixer}-" * dense + f"{self.mixer}E" * (count - dense)

    def _dense(self, config: ModelConfig) -> int:
        """The number of layers before the first one with experts."""
        first, _, _ = config.pattern.partition("E")
        return len(first) // 2

    @property
    def _head(self) -> str:
        return self.mixer + ("E" if self.dense_key else "-")

    def names(self) -> Mapping[str, str]:
        return {"pattern": "num_hidden_layers"}

    def patterns(self, file: Values) -> tuple[str, str]:
        """Layer patterns of the base and of one MTP depth, for `Family.read_patterns`."""
        count = file.typed("num_hidden_layers", 0)
        if not 0 < count <= megatron.MOST_LAYERS:
            file.problems.append(
                f"num_hidden_layers {shown(count)} must be from 1 to {megatron.MOST_LAYERS}"
            )
            count = 1
        dense = min(count, file.typed(self.dense_key, 0)) if self.dense_key else count
        return self._pattern(dense, count), self._head if file.get(self.count_key) else ""

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        written: dict[str, object] = {"num_hidden_layers": len(config.pattern) // 2}
        if self.dense_key:
            written[self.dense_key] = self._dense(config)
        return written

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        dense = self._dense(config) if self.dense_key else len(config.pattern) // 2
        if config.pattern != self._pattern(dense, len(config.pattern) // 2):
            yield f"layers {shown(config.pattern)}"
        if config.mtp.pattern not in ("", self._head):
            yield f"heads of layers {shown(config.mtp.pattern)}, only {self._head!r}"


@dataclass(frozen=True)
class HeadDim(Line):
    """The width of an attention head; without the key, the hidden size divided by the number of
    heads."""

    kind: str = "attention"

    def names(self) -> Mapping[str, str]:
        return {"kv_channels": "head_dim"}

    def read(self, file: Values) -> Settings:
        derived = file.typed("hidden_size", 0) // max(1, file.typed("num_attention_heads", 0))
        return {"kv_channels": file.get("head_dim", derived)}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        return {"head_dim": config.attention.kv_channels}


def read_rope(file: Values) -> dict[str, object]:
    """The settings of rotary embedding: those of `rope_parameters` or the older `rope_scaling`,
    else the top level's.

    Their kind is under `rope_type`, `default` if none is given. A file may have both objects, such
    as one written for older and newer readers; these must then say the same, since readers differ
    in which one they take.
    """
    found: dict[str, dict[str, object]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        own = file.get(name, {})
        if not isinstance(own, Mapping):
            file.problems.append(f"{name} {shown(own)} is not an object")
        elif own:
            given = {key: value for key, value in own.items() if value is not None}
            found[name] = {"rope_type": given.pop("type", "default")} | given
    if len(found) == 2 and (clauses := list(_contradictions(*found.values()))):
        file.problems.append(
            f"rope_scaling and rope_parameters contradict each other: {', '.join(clauses)}"
        )
    top = {
        "rope_theta": file.get("rope_theta", 10000.0),
        "partial_rotary_factor": file.get("partial_rotary_factor"),
    }
    merged = {key: value for own in found.values() for key, value in own.items()}
    return {"rope_type": "default"} | top | merged


def _contradictions(older: Settings, newer: Settings) -> Iterator[str]:
    """Yield a clause for each key with two values; a reader of YaRN in one object takes defaults
    for keys it lacks."""
    both_yarn = older["rope_type"] == newer["rope_type"] == "yarn"
    for key in {**older, **newer}:
        usual = _USUAL.get(key)
        values = older.get(key, usual), newer.get(key, usual)
        compared = (key in older and key in newer) or (
            both_yarn and key in (*_YARN, *_USUAL, *_SCALES)
        )
        if compared and values[0] != values[1]:
            yield f"{key} {shown(values[0])} and {shown(values[1])}"


_YARN = {
    "factor": "yarn_factor",
    "original_max_position_embeddings": "yarn_original_context",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Key of `rope_parameters` or `rope_scaling` -> field."""
_SCALES = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys that determine `yarn_attention_factor`."""
_USUAL = {"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0, "truncate": True}
"""Values of the keys of YaRN that may be absent."""


def _attention_factor(rope: Settings) -> object:
    """The factor of rotated channels, as transformers derives it."""
    given = rope.get("attention_factor")
    factor = rope.get("factor")
    scales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
    if given is not None or not isinstance(factor, int | float):
        return 1.0 if given is None else given
    if all(isinstance(scale, int | float) and scale for scale in scales):
        above, below = (
            yarn_scale(factor, scale) for scale in scales if isinstance(scale, int | float)
        )
        return above / below
    return yarn_scale(factor, 1.0)


@dataclass(frozen=True)
class Rotary(Line):
    """Rotary embedding: base, fraction of rotated channels, and YaRN. See `read_rope`.

    Attributes:
        percent: fraction if no key gives it; None: the family always rotates all channels.
    """

    percent: float | None = None
    kind: str = "attention"

    def names(self) -> Mapping[str, str]:
        own = {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"}
        return (
            own
            | {field: key for key, field in _YARN.items()}
            | {"yarn_attention_factor": "attention_factor"}
        )

    def fields(self) -> Collection[str]:
        return (*self.names(), "position_embedding_type")

    def read(self, file: Values) -> Settings:
        rope = read_rope(file)
        fields: dict[str, object] = {
            "position_embedding_type": "rope",
            "rotary_base": rope["rope_theta"],
        }
        if self.percent is not None:
            given = rope["partial_rotary_factor"]
            fields["rotary_percent"] = self.percent if given is None else given
        if rope["rope_type"] == "default":
            return fields
        problems = []
        place = "rope_parameters" if file.get("rope_parameters") else "rope_scaling"
        if rope["rope_type"] != "yarn":
            kind = shown(rope["rope_type"])
            problems.append(
                f"{place} of rope_type {kind} is not supported, only 'default' and 'yarn'"
            )
        else:
            required = ("factor", "original_max_position_embeddings")
            problems += [
                f"{place} of rope_type 'yarn' lacks {key}" for key in required if key not in rope
            ]
        if rope.get("truncate", True) is not True:
            problems.append(
                f"{place}.truncate {shown(rope['truncate'])} is not supported, only true"
            )
        file.problems.extend(problems)
        if problems:
            return fields
        # zero counts as absent
        fields |= {field: rope[key] for key, field in _YARN.items() if rope.get(key)}
        return fields | {"yarn_attention_factor": _attention_factor(rope)}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        """Write under the keys that the original has; without an original, under both, for older
        and newer readers."""
        found: dict[str, object] = {"rope_theta": config.attention.rotary_base}
        if self.percent is not None:
            found["partial_rotary_factor"] = config.attention.rotary_percent
        before = original or {}
        nested = before.get("rope_parameters")
        older = before.get("rope_scaling")
        written: dict[str, object] = {}
        if original is None or isinstance(nested, Mapping):
            written["rope_parameters"] = _scaled(config, nested) | found
        if not isinstance(nested, Mapping) or found.keys() & before.keys():
            written |= found
        if older is not None or (_is_scaled(config) and not isinstance(nested, Mapping)):
            written["rope_scaling"] = _scaled(config, older) if _is_scaled(config) else None
        return written

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.attention.position_embedding_type != "rope":
            yield f"position_embedding_type {config.attention.position_embedding_type}"
        if self.percent is None and config.attention.rotary_percent != 1:
            yield f"rotary_percent {config.attention.rotary_percent}"


def _is_scaled(config: ModelConfig) -> bool:
    """Whether a model has YaRN."""
    return config.attention.yarn_factor != 1 or config.attention.yarn_attention_factor != 1


def _scaled(config: ModelConfig, original: object) -> dict[str, object]:
    """The kind of rotary embedding and YaRN's settings, with the other keys of an object of the
    original."""
    kept = dict(original) if isinstance(original, Mapping) else {}
    kind = "type" if "type" in kept and "rope_type" not in kept else "rope_type"
    if not _is_scaled(config):
        return {key: value for key, value in kept.items() if key not in (*_YARN, *_SCALES)} | {
            kind: "default"
        }
    usual = AttentionConfig.default()
    yarn = {key: getattr(config.attention, field) for key, field in _YARN.items()}
    odd = {
        key: value
        for key, value in yarn.items()
        if key in kept or value != getattr(usual, _YARN[key])
    }
    scaled = (
        kept
        | odd
        | {key: yarn[key] for key in ("factor", "original_max_position_embeddings")}
        | {kind: "yarn"}
    )
    if _attention_factor(scaled) != config.attention.yarn_attention_factor:
        scaled["attention_factor"] = config.attention.yarn_attention_factor
    return scaled


@dataclass(frozen=True)
class SharedExperts(Line):
    """`n_shared_experts`: the number of shared experts, each as wide as a routed one, stored as one
    network."""

    kind: str = "moe"

    def names(self) -> Mapping[str, str]:
        return {"moe_shared_expert_intermediate_size": "n_shared_experts"}

    def read(self, file: Values) -> Settings:
        count = file.typed("n_shared_experts", 1)
        if count < 1:
            file.problems.append("n_shared_experts must be at least 1")
        return {
            "moe_shared_expert_intermediate_size": count * file.typed("moe_intermediate_size", 0)
        }

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        return {
            "n_shared_experts": (
                config.moe.shared_expert_intermediate_size // config.moe.ffn_hidden_size
            )
        }

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        width = config.moe.ffn_hidden_size
        shared = config.moe.shared_expert_intermediate_size
        if not shared or shared % max(1, width):
            yield (
                f"shared experts of width {shared}, which must be a multiple of the experts'"
                f" {width} and not 0"
            )
