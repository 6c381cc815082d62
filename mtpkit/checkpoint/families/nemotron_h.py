"""Nemotron-H and Nemotron 3: config keys, as published and as transformers 5 saves them, and weight
names."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

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
from mtpkit.checkpoint.families.routers import SigmoidRouter
from mtpkit.checkpoint.families.serving import SERVERS, USUAL, Finding, Need, Serving, Subject
from mtpkit.checkpoint.families.table import Entry, FuseQKV, Split, one
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.config.sections import AttentionConfig
from mtpkit.errors import UserError, listed, shown
from mtpkit.model.kinds import mamba2

LETTERS = "M*-E"
BLOCK_TYPES = {
    "linear_attention": "M",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
    "mamba": "M",
    "attention": "*",
}
"""Names in `layers_block_type`: those of transformers 5, followed by the older ones."""

DT_LIMIT = (0.0, math.inf)
"""Default range of the step size dt."""

INFINITY = {"__float__": "Infinity"}
"""The notation of transformers 5 for infinity, which JSON lacks."""


def _read_patterns(file: Values) -> tuple[str, str]:
    pattern = _read_pattern(file, "hybrid_override_pattern", "layers_block_type")
    if file.typed("num_hidden_layers", len(pattern)) != len(pattern):
        count = shown(file.get("num_hidden_layers"))
        file.problems.append(f"num_hidden_layers {count} but the pattern has {len(pattern)} layers")
    if not file.get("num_nextn_predict_layers"):
        return pattern, ""
    return pattern, _read_pattern(file, "mtp_hybrid_override_pattern", "mtp_layers_block_type")


def _read_pattern(file: Values, letters_key: str, blocks_key: str) -> str:
    """Read a layer pattern, as letters, from whichever of its two keys is present."""
    key = file.first(letters_key, blocks_key)
    if key is None:
        raise UserError(f"{file.where}: missing key {letters_key} (or {blocks_key})")
    as_letters = key == letters_key
    layers = file.get(key)
    if not isinstance(layers, str if as_letters else list):
        kind = "text of layer letters" if as_letters else "list of layers"
        raise UserError(f"{file.where}: {key} {shown(layers)} is not a {kind}")
    assert isinstance(layers, str | list)
    known = {letter: letter for letter in LETTERS} if as_letters else BLOCK_TYPES
    unknown = [shown(layer) for layer in layers if not isinstance(layer, str) or layer not in known]
    if unknown:
        odd = listed(dict.fromkeys(unknown), width=120)
        raise UserError(f"{file.where}: {key} has unknown layers {odd}; known: {listed(known)}")
    return "".join(known[layer] for layer in layers)


@dataclass(frozen=True)
class _Pattern(Line):
    """Writes the base's layers; `_read_patterns` reads them."""

    def names(self) -> Mapping[str, str]:
        return {"pattern": "hybrid_override_pattern", "mtp_pattern": "mtp_hybrid_override_pattern"}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        return {"num_hidden_layers": len(config.pattern), "hybrid_override_pattern": config.pattern}


@dataclass(frozen=True)
class _NoPositions(Fixed):
    """Attention without position embeddings, in which settings of rotary embeddings do nothing."""

    def fields(self) -> Collection[str]:
        return (self.field, "rotary_base", "rotary_percent")


@dataclass(frozen=True)
class _StepSize(Line):
    """The range that clamps Mamba2's step size dt after its softplus.

    Megatron-LM, vLLM and the published code use `time_step_limit`, by default (0, inf): no clamp.
    The weights were trained that way. Transformers instead clamps at `time_step_min` (seen up to
    5.23), a bound that is meant only for the initial values of dt's bias; on Nemotron 3 Nano this
    changes the output by a mean KL divergence of 0.03.
    """

    kind: str = "mamba2"

    def fields(self) -> Collection[str]:
        return ("mamba_dt_limit",)

    def read(self, file: Values) -> Settings:
        limit = _dt_limit(file.get("time_step_limit"))
        if limit is None:
            odd = shown(file.get("time_step_limit"))
            file.problems.append(
                f"time_step_limit {odd} is not a list of two numbers, 0 <= low < high"
            )
        return {"mamba_dt_limit": limit}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        """Write no keys if `original` has the same range, so that its own keys stay.

        Otherwise `time_step_min` is set to the low end of the range, since Transformers clamps
        there.
        """
        if (
            original is not None
            and _dt_limit(original.get("time_step_limit")) == config.mamba2.dt_limit
        ):
            return {}
        low, high = config.mamba2.dt_limit
        return {
            "time_step_limit": [low, INFINITY if high == math.inf else high],
            "time_step_min": low,
        }


def _dt_limit(limit: object) -> tuple[float, float] | None:
    """(low, high) from a `time_step_limit`, by default `DT_LIMIT`; None if the value is not such a
    pair."""
    if limit is None:
        return DT_LIMIT
    if not isinstance(limit, list) or len(limit) != 2:
        return None
    low, high = (math.inf if bound == INFINITY else bound for bound in limit)
    if any(type(bound) not in (int, float) for bound in (low, high)) or not 0 <= low < high:
        return None
    try:
        return float(low), float(high)
    except OverflowError:  # an integer too large for a float
        return None


@dataclass(frozen=True)
class _SharedExperts(Line):
    """The width of each of the `n_shared_experts` shared experts, which together are one network.

    vLLM and SGLang multiply width and number; transformers builds one expert of that width,
    whatever the number is.
    """

    kind: str = "moe"
    key: str = "moe_shared_expert_intermediate_size"

    def names(self) -> Mapping[str, str]:
        return {self.key: self.key}

    def read(self, file: Values) -> Settings:
        count = file.typed("n_shared_experts", 1)
        width = file.typed(self.key, 0)
        if file.get(self.key) is None:
            file.problems.append(f"missing key {self.key}")
        elif not count or not width:
            file.problems.append(
                f"n_shared_experts {count} of width {width}: both must be positive"
            )
        return {self.key: count * width}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        """Keep the original's number of shared experts if it divides the total width; otherwise
        write 1."""
        width = config.moe.shared_expert_intermediate_size
        count = (original or {}).get("n_shared_experts", 1)
        count = count if isinstance(count, int) and count > 0 and width % count == 0 else 1
        return {self.key: width // count, "n_shared_experts": count}

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if not config.moe.shared_expert_intermediate_size:
            yield "experts without a shared expert"


LINES = (
    Fixed("attention_bias", False),
    Fixed("mlp_bias", False),
    Fixed("use_bias", False),
    Fixed("mamba_proj_bias", False),
    Fixed("use_conv_bias", True),
    Fixed("mlp_hidden_act", "relu2", "activation", "relu2"),
    Fixed("mamba_hidden_act", "silu"),
    Fixed("tie_word_embeddings", False, "tie_word_embeddings", False),
    Fixed("sliding_window"),
    Quantization(),
    _NoPositions("", None, "position_embedding_type", "none"),
    Fixed("", None, "qk_layernorm", False),
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "hidden_size"),
    Key("max_position_embeddings", "max_position_embeddings", default=4096),
    Key("layer_norm_epsilon", "layernorm_epsilon", default=1e-5),
    Key("initializer_range", "init_std", default=0.02),
    Key("bos_token_id", "bos_token_id", default=None),
    Key("pad_token_id", "pad_token_id", default=None),
    Key("num_attention_heads", "num_attention_heads", "attention"),
    Key("num_key_value_heads", "num_query_groups", "attention"),
    Key("head_dim", "kv_channels", "attention", older="attention_head_dim"),
    Key("intermediate_size", "ffn_hidden_size", "mlp"),
    Key("n_routed_experts", "num_moe_experts", "moe"),
    Key("num_experts_per_tok", "moe_router_topk", "moe"),
    Key("moe_intermediate_size", "moe_ffn_hidden_size", "moe"),
    Key("moe_latent_size", "moe_latent_size", "moe", default=0, null=0),
    Key("mamba_num_heads", "mamba_num_heads", "mamba2"),
    Key("mamba_head_dim", "mamba_head_dim", "mamba2"),
    Key("ssm_state_size", "mamba_state_dim", "mamba2"),
    Key("n_groups", "mamba_num_groups", "mamba2"),
    Key("conv_kernel", "mamba_conv_kernel", "mamba2", default=4),
    Key("chunk_size", "mamba_chunk_size", "mamba2", default=128),
    _Pattern(),
    _StepSize(),
    _SharedExperts(),
    SigmoidRouter(),
    EndTokens(),
    Heads("num_nextn_predict_layers", "mtp_hybrid_override_pattern"),
)
"""Transformers never ties Nemotron-H's embeddings; defaults are those of transformers."""


def _heads_without_attention(subject: Subject) -> Iterator[Finding]:
    """vLLM's older model runner finds the heads by their KV cache (`validate_same_kv_cache_group`);
    its V2 runner, the default, does not."""
    pattern = subject.config.mtp.pattern
    if pattern and AttentionConfig.letter not in pattern:
        text = (
            f"heads of layers {pattern!r}: without attention they run with the V2 model runner only"
        )
        yield Finding(text, False, ("vllm",))


def _words(subject: Subject) -> Iterator[Finding]:
    """SGLang's config class knows only the older words for layers, and prefers words to letters;
    vLLM has the class of transformers, which knows both."""
    for key, letters in (
        ("layers_block_type", "hybrid_override_pattern"),
        ("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    ):
        words = subject.setting(key)
        if isinstance(words, list) and not {*map(str, words)} <= {
            "mamba",
            "attention",
            "mlp",
            "moe",
        }:
            text = (
                f"{key} has words that the server refuses: write letters, as {letters}, in its"
                " place"
            )
            yield Finding(text, True, ("sglang",))


def _published_name(name: str) -> str:
    """Transformers 5 calls the `backbone.` prefix `model.` in memory."""
    return re.sub(r"^model\.", "backbone.", name)


def _mtp_layer(config: ModelConfig, depth: int, number: int) -> str:
    """Hugging Face numbers the layers of all depths consecutively: n = depth * L + i, L =
    len(pattern)."""
    return f"mtp.layers.{depth * len(config.mtp.pattern) + number}."


def _mtp_outside(config: ModelConfig, depth: int) -> Iterator[Entry]:
    """The tensors of a depth's input belong to its first layer, the final norm to its last."""
    prefix = megatron.mtp_depth(depth)
    for number, names in (
        (0, ("enorm", "hnorm", "eh_proj")),
        (len(config.mtp.pattern) - 1, ("final_layernorm",)),
    ):
        yield from (
            one(f"{_mtp_layer(config, depth, number)}{n}.weight", f"{prefix}{n}.weight")
            for n in names
        )


def _mamba2(c: ModelConfig) -> Iterator[Entry]:
    inner = c.mamba2.inner
    bc = c.mamba2.bc_width
    channels = Split((inner, bc, bc))
    yield one("norm.weight", "mixer.in_proj.layer_norm_weight")
    yield Entry(
        ("mixer.in_proj.weight",),
        tuple(f"mixer.in_proj.weight.{part}" for part in mamba2.ROWS),
        Split((inner, inner, bc, bc, c.mamba2.num_heads)),
    )
    for name in ("mixer.conv1d.weight", "mixer.conv1d.bias"):
        yield Entry((name,), tuple(f"{name}.{part}" for part in mamba2.CHANNELS), channels)
    for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"):
        yield one(f"mixer.{name}", f"mixer.{name}")


def _attention(c: ModelConfig) -> Iterator[Entry]:
    sizes = c.attention
    yield one("norm.weight", "self_attention.linear_qkv.layer_norm_weight")
    yield Entry(
        ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
        ("self_attention.linear_qkv.weight",),
        FuseQKV(
            sizes.num_query_groups,
            sizes.num_attention_heads // sizes.num_query_groups,
            sizes.kv_channels,
        ),
    )
    yield one("mixer.o_proj.weight", "self_attention.linear_proj.weight")


def _mlp(_: ModelConfig) -> Iterator[Entry]:
    yield one("norm.weight", "mlp.linear_fc1.layer_norm_weight")
    yield one("mixer.up_proj.weight", "mlp.linear_fc1.weight")
    yield one("mixer.down_proj.weight", "mlp.linear_fc2.weight")


def _moe(c: ModelConfig) -> Iterator[Entry]:
    yield one("norm.weight", "pre_mlp_layernorm.weight")
    yield one("mixer.gate.weight", "mlp.router.weight")
    yield one("mixer.gate.e_score_correction_bias", "mlp.router.expert_bias")
    for name, fc in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        for e in range(c.moe.num_experts):
            yield one(f"mixer.experts.{e}.{name}.weight", f"mlp.experts.experts.{fc}.weight[{e}]")
    for name in ("fc1_latent_proj", "fc2_latent_proj"):
        yield one(f"mixer.{name}.weight", f"mlp.{name}.weight")
    for name, fc in (("up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        yield one(f"mixer.shared_experts.{name}.weight", f"mlp.shared_experts.{fc}.weight")


SERVING = Serving(
    head_letters="*E",
    fp32=(r"e_score_correction_bias$", r"A_log$"),
    needs=(
        Need(
            "mamba_ssm_cache_dtype",
            "servers choose the dtype of Mamba's state",
            fatal=False,
            kind="mamba2",
        ),
    ),
    split_rows=(*USUAL.split_rows, r"\.eh_proj$"),
    split_input=SERVERS,
    rules=(_heads_without_attention, _words),
)
"""vLLM 0.33 and SGLang 0.5.23 build only heads of attention and experts, one layer per letter: read
in nemotron_h_mtp.py of both, and in SGLang's configs/nemotron_h.py."""

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    read_patterns=_read_patterns,
    lines=LINES,
    replaced=(
        "layers_block_type",
        "layer_types",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
        "mtpkit",
    ),
    outside=(
        one("backbone.embeddings.weight", megatron.EMBEDDING),
        one("backbone.norm_f.weight", megatron.FINAL_NORM),
        one("lm_head.weight", megatron.OUTPUT),
    ),
    layers={"mamba2": _mamba2, "attention": _attention, "mlp": _mlp, "moe": _moe},
    base_layer="backbone.layers.{}.".format,
    mtp_outside=_mtp_outside,
    mtp_layer=_mtp_layer,
    published_name=_published_name,
    serving=SERVING,
)
