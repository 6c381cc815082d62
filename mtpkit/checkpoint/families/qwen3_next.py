"""Qwen3-Next: config keys, weight names, and the parts that Qwen3.5 shares: layers, gated
attention, heads.

Each layer is a gated delta net or attention, then experts or an MLP. All norms multiply by 1 +
their weights in both layouts, except for the output norm of a gated delta net, see `Centered`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtpkit.checkpoint.families import blocks, qwen_serving
from mtpkit.checkpoint.families.family import Family
from mtpkit.checkpoint.families.keys import (
    EndTokens,
    Fixed,
    Heads,
    Key,
    Line,
    Quantization,
    Settings,
)
from mtpkit.checkpoint.families.serving import USUAL, Serving, Unquantized, renaming
from mtpkit.checkpoint.families.table import Entry, FuseQKV, Rounding, Split, Ways, one
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.config.sections import AttentionConfig, GatedDeltaNetConfig, MlpConfig, MoeConfig
from mtpkit.errors import shown
from mtpkit.model.kinds import gated_delta_net as delta

DELTA = GatedDeltaNetConfig.letter
ATTENTION = AttentionConfig.letter
DENSE = MlpConfig.letter
EXPERTS = MoeConfig.letter
MIXERS = {"linear_attention": DELTA, "full_attention": ATTENTION}
"""Names in `layer_types`."""


@dataclass(frozen=True)
class FuseGatedQKV:
    """Fuses q_proj, k_proj and v_proj into Megatron's one tensor, whose rows are [queries of the
    group, their gates, k, v] for each group in turn. The rows of q_proj alternate between the query
    and the gate of each head.

    Example, 4 heads in 2 groups: rows [q0 g0 q1 g1 q2 g2 q3 g3], [k0 k1], [v0 v1] become [q0 q1 g0
    g1 k0 v0 q2 q3 ...].
    """

    groups: int
    heads_per_group: int
    head_dim: int

    @property
    def _fused(self) -> FuseQKV:
        return FuseQKV(self.groups, 2 * self.heads_per_group, self.head_dim)

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._fused.to_megatron(
            [self._turned(tensors[0], self.heads_per_group, 2), *tensors[1:]]
        )

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = self._fused.to_hf(tensors)
        return [self._turned(q, 2, self.heads_per_group), k, v]

    def _turned(self, q: Tensor, first: int, second: int) -> Tensor:
        columns = q.shape[1:]
        return (
            q.reshape(self.groups, first, second, self.head_dim, *columns)
            .transpose(1, 2)
            .reshape(-1, *columns)
        )


@dataclass(frozen=True)
class Ungroup:
    """One tensor that holds several parts interleaved by key head; Megatron stores one tensor per
    part.

    Example with three parts for each of 2 key heads: rows [a0 b0 c0 a1 b1 c1] become [a0 a1], [b0
    b1] and [c0 c1].
    """

    heads: int
    rows: tuple[int, ...]
    """Rows of each part for one key head."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (fused,) = tensors
        columns = fused.shape[1:]
        parts = fused.reshape(self.heads, -1, *columns).split(self.rows, 1)
        return [part.reshape(-1, *columns) for part in parts]

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        columns = tensors[0].shape[1:]
        return [
            torch.cat([t.reshape(self.heads, -1, *columns) for t in tensors], 1).reshape(
                -1, *columns
            )
        ]


@dataclass(frozen=True)
class Centered(Rounding):
    """A norm's weight w, which Megatron stores as w - 1 since its norm multiplies by 1 + the
    weight.

    Both directions compute and return fp32: in bf16, w - 1 is rounded for w below 0.5, and 1 + a
    small weight always. An export restores the dtype and the values of the original, see
    `Stored.rounded`.
    """

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_widened(tensor) - 1 for tensor in tensors]

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_widened(tensor) + 1 for tensor in tensors]


def _widened(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True)
class Layers(Line):
    """The number of layers, which of them are attention, and which have experts.

    Attributes:
        experts: which layers have experts: `all`, `none`, or `some`, by `mlp_only_layers` and
            `decoder_sparse_step`.
        count_key: key that counts physical MTP layers; `count_default` is its value if the key is
            absent.
    """

    experts: Literal["all", "some", "none"]
    count_key: str
    count_default: int = 0

    def names(self) -> Mapping[str, str]:
        return {"pattern": "layer_types"}

    def patterns(self, file: Values) -> tuple[str, str]:
        """Layer patterns of the base and of one MTP depth, for `Family.read_patterns`."""
        count = file.typed("num_hidden_layers", 0)
        if not 0 < count <= megatron.MOST_LAYERS:
            file.problems.append(
                f"num_hidden_layers {shown(count)} must be from 1 to {megatron.MOST_LAYERS}"
            )
            count = 1
        feed = self._feed_forward(file, count)
        pattern = "".join(map("".join, zip(self._mixers(file, count), feed, strict=True)))
        heads = file.typed(self.count_key, self.count_default)
        return pattern, _head(feed) if heads else ""

    def _mixers(self, file: Values, count: int) -> str:
        interval = file.typed("full_attention_interval", qwen_serving.INTERVAL)
        regular = _every(interval or count + 1, count)
        types = file.get("layer_types")
        if types is None:
            return regular
        if (
            not isinstance(types, list)
            or len(types) != count
            or not all(t in MIXERS for t in map(str, types))
        ):
            known = ", ".join(MIXERS)
            file.problems.append(
                f"layer_types {shown(types)} must be one of {known} for each of {count} layers"
            )
            return regular
        named = "".join(MIXERS[str(t)] for t in types)
        if file.get("full_attention_interval") is not None and named != regular:
            file.problems.append(
                f"layer_types and full_attention_interval {interval} contradict each other"
            )
        return named

    def _feed_forward(self, file: Values, count: int) -> str:
        if self.experts != "some":
            return (EXPERTS if self.experts == "all" else DENSE) * count
        step = file.typed("decoder_sparse_step", 1)
        dense = file.get("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(type(n) is int for n in dense) or step < 1:
            file.problems.append(
                f"mlp_only_layers {shown(dense)} must list layers, decoder_sparse_step be at"
                " least 1"
            )
            return EXPERTS * count
        return "".join(DENSE if n in dense or (n + 1) % step else EXPERTS for n in range(count))

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        mixers = config.pattern[::2]
        feed = config.pattern[1::2]
        types = {letter: name for name, letter in MIXERS.items()}
        written: dict[str, object] = {
            "num_hidden_layers": len(mixers),
            "layer_types": [types[m] for m in mixers],
        }
        first = mixers.find(ATTENTION) + 1 or len(mixers) + 1
        interval = None if original is None else original.get("full_attention_interval")
        for every in (interval, first):  # SGLang reads only the interval
            if type(every) is int and every > 0 and _every(every, len(mixers)) == mixers:
                written["full_attention_interval"] = every
                break
        else:
            written["full_attention_interval"] = None
        if self.experts == "some":
            kept = Values(original or {}, "original")
            if original is None or self._feed_forward(kept, len(feed)) != feed:
                dense = [n for n, letter in enumerate(feed) if letter == DENSE]
                written |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        return written

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        mixers = config.pattern[::2]
        feed = config.pattern[1::2]
        known = {"all": EXPERTS, "none": DENSE, "some": DENSE + EXPERTS}[self.experts]
        if len(config.pattern) % 2 or set(mixers) - set(MIXERS.values()) or set(feed) - set(known):
            yield f"layers {shown(config.pattern)}"
        if config.mtp.pattern not in ("", _head(feed)):
            yield f"heads of layers {shown(config.mtp.pattern)}, only {_head(feed)!r}"
        if config.mtp.num_layers > 1:
            yield f"{config.mtp.num_layers} physical heads, only one"


@dataclass(frozen=True)
class Router(Line):
    """Softmax over all experts. The weights of the chosen experts are divided by their sum unless
    `key` is false. The shared expert has a gate.

    Attributes:
        key: `norm_topk_prob`, or empty if the family always divides by the sum.
    """

    key: str = ""
    kind: str = "moe"

    def fields(self) -> Collection[str]:
        settings = (
            "score_function",
            "enable_expert_bias",
            "pre_softmax",
            "normalize",
            "group_best",
        )
        return (*(f"moe_router_{name}" for name in settings), "moe_shared_expert_gate")

    def read(self, file: Values) -> Settings:
        return {
            "moe_router_score_function": "softmax",
            "moe_router_enable_expert_bias": False,
            "moe_router_pre_softmax": not file.typed(self.key, True) if self.key else False,
            "moe_shared_expert_gate": True,
        }

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        return {self.key: config.moe.routing.normalize} if self.key else {}

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        sizes = config.moe
        if sizes.router_score_function != "softmax":
            yield f"moe_router_score_function {sizes.router_score_function}"
        if not sizes.shared_expert_gate:
            yield "experts without a gated shared expert"
        if not self.key and not sizes.routing.normalize:
            yield "moe_router_pre_softmax True"


def expert_lines(router: Router) -> tuple[Line, ...]:
    """Lines of models with experts."""
    return (
        Fixed("", None, "moe_latent_size", 0, kind="moe"),
        Fixed("", None, "moe_router_num_groups", 1, kind="moe"),
        Fixed("", None, "moe_router_topk_scaling_factor", 1.0, kind="moe"),
        Key("num_experts", "num_moe_experts", "moe"),
        Key("num_experts_per_tok", "moe_router_topk", "moe"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", "moe"),
        Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "moe"),
        router,
    )


def _every(interval: int, count: int) -> str:
    """Mixer letters of `count` layers, of which every `interval`-th is attention."""
    return "".join(ATTENTION if (n + 1) % interval == 0 else DELTA for n in range(count))


def _head(feed: str) -> str:
    """Layer letters of a head; `feed` has the second letters of the base's layers. With experts if
    the base has any."""
    return ATTENTION + (EXPERTS if EXPERTS in feed else DENSE)


def shared_lines(layers: Layers, heads: Heads) -> tuple[Line, ...]:
    """Lines of the config that Qwen3-Next and Qwen3.5 share."""
    return (
        Fixed("hidden_act", "silu", "activation", "swiglu"),
        Fixed("attention_bias", False, "add_qkv_bias", False, "attention"),
        Fixed("", None, "qk_layernorm", True, "attention"),
        Fixed("", None, "attention_output_gate", True, "attention"),
        Fixed("", None, "layernorm_zero_centered_gamma", True),
        Quantization(),
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("max_position_embeddings", "max_position_embeddings", default=32768),
        Key("rms_norm_eps", "layernorm_epsilon", default=1e-6),
        Key("initializer_range", "init_std", default=0.02),
        Key("bos_token_id", "bos_token_id", default=None),
        Key("pad_token_id", "pad_token_id", default=None),
        Key("tie_word_embeddings", "tie_word_embeddings", default=False),
        Key("num_attention_heads", "num_attention_heads", "attention"),
        Key("num_key_value_heads", "num_query_groups", "attention"),
        Key("head_dim", "kv_channels", "attention", default=256),
        blocks.Rotary(percent=0.25),
        Key("linear_num_key_heads", "linear_num_key_heads", "gated_delta_net"),
        Key("linear_num_value_heads", "linear_num_value_heads", "gated_delta_net"),
        Key("linear_key_head_dim", "linear_key_head_dim", "gated_delta_net", default=128),
        Key("linear_value_head_dim", "linear_value_head_dim", "gated_delta_net", default=128),
        Key("linear_conv_kernel_dim", "linear_conv_kernel_dim", "gated_delta_net", default=4),
        layers,
        EndTokens(),
        heads,
    )


def attention(config: ModelConfig) -> Iterator[Entry]:
    """Attention with a gate per head, which is part of the query projection."""
    sizes = config.attention
    gated = FuseGatedQKV(
        sizes.num_query_groups,
        sizes.num_attention_heads // sizes.num_query_groups,
        sizes.kv_channels,
    )
    for entry in blocks.attention(config):
        yield (
            Entry(entry.hf, entry.megatron, gated)
            if isinstance(entry.transform, FuseQKV)
            else entry
        )


def delta_net(config: ModelConfig, projections: Iterable[Entry]) -> Iterator[Entry]:
    """A gated delta net with the given input projections, which differ between families."""
    sizes = config.gated_delta_net
    own = "self_attention."
    yield one("input_layernorm.weight", f"{own}in_proj.layer_norm_weight")
    yield from (entry.under("linear_attn.", own) for entry in projections)
    channels = tuple(f"{own}conv1d.weight.{part}" for part in delta.CHANNELS)
    yield Entry(
        ("linear_attn.conv1d.weight",),
        channels,
        Split((sizes.key_width, sizes.key_width, sizes.value_width)),
    )
    yield from (
        one(f"linear_attn.{name}", f"{own}{name}")
        for name in ("A_log", "dt_bias", "out_proj.weight")
    )
    yield one("linear_attn.norm.weight", f"{own}out_norm.weight", Centered())


def _delta_net(config: ModelConfig) -> Iterator[Entry]:
    """A gated delta net with two projections by key head: queries, keys, values and gates; betas,
    then alphas."""
    sizes = config.gated_delta_net
    rep = sizes.num_value_heads // sizes.num_key_heads
    names = [f"in_proj.weight.{part}" for part in delta.ROWS]
    keys = sizes.key_head_dim
    values = rep * sizes.value_head_dim
    qkvz = Ungroup(sizes.num_key_heads, (keys, keys, values, values))
    ba = Ungroup(sizes.num_key_heads, (rep, rep))
    projections = (
        Entry(("in_proj_qkvz.weight",), tuple(names[:4]), qkvz),
        Entry(("in_proj_ba.weight",), tuple(names[4:]), ba),
    )
    yield from delta_net(config, projections)


def moe(config: ModelConfig) -> Iterator[Entry | Ways]:
    """Routed experts, which files hold one by one or packed, and the shared one with its gate."""
    yield from blocks.experts(config)
    yield from blocks.network("mlp.shared_expert.", "mlp.shared_experts.")
    yield one("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight")


def outside(prefix: str) -> tuple[Entry, ...]:
    """The base's tensors outside its layers. All but the output layer have the prefix of the text
    model."""
    return (
        one(f"{prefix}embed_tokens.weight", megatron.EMBEDDING),
        one(f"{prefix}norm.weight", megatron.FINAL_NORM),
        one("lm_head.weight", megatron.OUTPUT),
    )


def mtp_outside(config: ModelConfig, depth: int) -> Iterator[Entry]:
    """The tensors of the one physical MTP depth outside its layers."""
    names = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "final_layernorm",
    }
    yield from (
        one(f"mtp.{hf}.weight", f"{megatron.mtp_depth(depth)}{own}.weight")
        for hf, own in names.items()
    )


def mtp_layer(config: ModelConfig, depth: int, number: int) -> str:
    """Prefix of the tensor names of both letters of the one physical MTP depth."""
    return f"mtp.layers.{depth}."


NORM_MEANS = ((r"linear_attn\.norm\.", 1.0), (r"norm", 0.0))
"""Pairs of a pattern for norm names and the usual mean of their weights; the first match
applies."""

PROJECTION = Unquantized(r"^mtp\.fc$", ("sglang",))
"""The head's input projection: SGLang never quantises it, vLLM does unless the config leaves it
out."""
PROJECTION_WITH_NVFP4 = Unquantized(r"^mtp\.fc$", ("vllm",), "NVFP4")
"""With ModelOpt's four bits, vLLM does not quantise it either."""

SPLIT_ROWS = (*USUAL.split_rows, r"^mtp\.fc$")
"""vLLM splits the head's input projection too."""

_LAYERS = Layers("some", "num_nextn_predict_layers", count_default=1)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read_patterns=_LAYERS.patterns,
    lines=(
        *shared_lines(_LAYERS, Heads(default=1)),
        *expert_lines(Router("norm_topk_prob")),
        Key("intermediate_size", "ffn_hidden_size", "mlp"),
    ),
    replaced=("mtpkit",),
    outside=outside("model."),
    layers={"attention": attention, "gated_delta_net": _delta_net, "mlp": blocks.mlp, "moe": moe},
    base_layer=blocks.base_layer,
    mtp_outside=mtp_outside,
    mtp_layer=mtp_layer,
    serving=Serving(  # read in qwen3_next_mtp.py of both servers
        count_default=1,
        head_patterns=("*E",),
        norm_means=NORM_MEANS,
        fp32=(r"A_log$",),
        split_rows=SPLIT_ROWS,
        split_input=("vllm",),
        unquantized=(
            PROJECTION,
            PROJECTION_WITH_NVFP4,
            Unquantized(r"self_attn\.[qkv]_proj$", ("sglang",), "NVFP4"),
        ),
        called={"sglang": renaming(r"^mtp\.", "model.")},
        rules=(qwen_serving.interval(), qwen_serving.dense_layers, qwen_serving.no_packed_experts),
    ),
)
"""Published configs lack `num_nextn_predict_layers`; servers then assume 1, and so does mtpkit. In
a file without heads the key is 0."""
