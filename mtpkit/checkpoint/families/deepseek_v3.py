"""DeepSeek-V3, R1 and V3.1 (arXiv:2412.19437): config keys and weight names. Heads lie after the
base's last layer.

transformers normalises low-rank queries and keys/values with an epsilon of 1e-6, whatever
`rms_norm_eps` says; Megatron, vLLM and mtpkit use `rms_norm_eps`. In published models both are
1e-6.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtpkit.checkpoint.families import blocks
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
from mtpkit.checkpoint.families.serving import (
    OUTPUT_COPY,
    WITH_NVFP4,
    Finding,
    Need,
    Serving,
    Subject,
    Unquantized,
    renaming,
)
from mtpkit.checkpoint.families.table import Entry, one
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.config.sections import MlaConfig
from mtpkit.errors import shown

LAYERS = blocks.Layers(mixer="+", dense_key="first_k_dense_replace")

_YARN = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""Key of `rope_scaling` -> (field, value if the key is absent). None: the key is required."""

_PLAIN = {field: getattr(MlaConfig(), field) for field, _ in _YARN.values()} | {
    "rotary_scaling_factor": 1
}
"""Values of YaRN's fields for plain rotary embedding, which ignores them."""


@dataclass(frozen=True)
class _Rotary(Line):
    """Rotary base and YaRN: `rope_theta` and `rope_scaling` as published, or `rope_parameters` of
    transformers 5."""

    kind: str = "mla"

    def names(self) -> Mapping[str, str]:
        return {"rotary_base": "rope_theta"} | {field: key for key, (field, _) in _YARN.items()}

    def fields(self) -> Collection[str]:
        return (*self.names(), "rope_type")

    def read(self, file: Values) -> Settings:
        found = blocks.read_rope(file)
        base = {"rotary_base": found["rope_theta"]}
        kind = found["rope_type"]
        if kind == "default":
            return base | {"rope_type": "rope"} | _PLAIN
        problems = (
            [f"rope_scaling {shown(kind)} is not supported, only 'yarn'"] if kind != "yarn" else []
        )
        problems += [
            f"rope_scaling lacks {key}"
            for key, (_, usual) in _YARN.items()
            if usual is None and key not in found
        ]
        odd = [
            key
            for key, usual in (("attention_factor", None), ("truncate", True))
            if found.get(key, usual) != usual
        ]
        problems += [f"rope_scaling.{key} {shown(found[key])} is not supported" for key in odd]
        # If only one of mscale and mscale_all_dim is set, transformers ignores it, but Megatron
        # does not.
        if found.get("mscale", 1) != 1 and not found.get("mscale_all_dim"):
            problems.append("rope_scaling.mscale other than 1 needs mscale_all_dim")
        if found.get("mscale_all_dim") and "mscale" not in found:
            problems.append("rope_scaling.mscale_all_dim needs mscale")
        file.problems.extend(problems)
        if problems:
            return base
        return (
            base
            | {"rope_type": "yarn"}
            | {field: found.get(key, usual) for key, (field, usual) in _YARN.items()}
        )

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        """Write under the keys that the original has; without an original, under both, for older
        and newer readers."""
        base = config.attention.rotary_base
        nested = (original or {}).get("rope_parameters")
        yarn: dict[str, object] = {}
        if config.mla.rope_type == "yarn":
            yarn = {key: getattr(config.mla, field) for key, (field, _) in _YARN.items()}
        written: dict[str, object] = {}
        if original is None or isinstance(nested, Mapping):
            kept = dict(nested) if isinstance(nested, Mapping) else {}
            written["rope_parameters"] = (
                kept | {"rope_theta": base, "rope_type": "yarn" if yarn else "default"} | yarn
            )
        if not isinstance(nested, Mapping) or "rope_theta" in (original or {}):
            written["rope_theta"] = base
        if not isinstance(nested, Mapping) or (original or {}).get("rope_scaling") is not None:
            written["rope_scaling"] = yarn | {"type": "yarn"} if yarn else None
        return written

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        sizes = config.mla
        if sizes.rope_type == "rope" and sizes.mscale_all_dim and sizes.rotary_scaling_factor > 1:
            yield f"rope_type rope with mscale_all_dim {sizes.mscale_all_dim}"
        if sizes.rope_type == "yarn" and sizes.mscale != 1 and not sizes.mscale_all_dim:
            yield f"mscale {sizes.mscale} with mscale_all_dim 0"


@dataclass(frozen=True)
class _KeyHeads(Line):
    """`num_key_value_heads`, which has no meaning of its own and must equal the number of heads."""

    kind: str = "mla"

    def read(self, file: Values) -> Settings:
        heads = file.typed("num_attention_heads", 0)
        if file.typed("num_key_value_heads", heads) != heads:
            file.problems.append(f"num_key_value_heads must be num_attention_heads {heads}")
        return {}

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        return {"num_key_value_heads": config.attention.num_attention_heads}


def _mla(_: ModelConfig) -> Iterator[Entry]:
    """Multi-head latent attention, with or without a low-rank projection of the queries."""
    own = "self_attention."
    yield one("input_layernorm.weight", "input_layernorm.weight")
    yield one("self_attn.q_proj.weight", f"{own}linear_q_proj.weight")
    for part, down in (("q", "q_a_proj"), ("kv", "kv_a_proj_with_mqa")):
        yield one(f"self_attn.{down}.weight", f"{own}linear_{part}_down_proj.weight")
        yield one(
            f"self_attn.{part}_a_layernorm.weight", f"{own}linear_{part}_up_proj.layer_norm_weight"
        )
        yield one(f"self_attn.{part}_b_proj.weight", f"{own}linear_{part}_up_proj.weight")
    yield one("self_attn.o_proj.weight", f"{own}linear_proj.weight")


def _sglang_kernel(subject: Subject) -> Iterator[Finding]:
    """SGLang's kernel for the head's input supports only some widths."""
    hidden = subject.config.hidden_size
    if subject.config.mtp.num_layers and (hidden % 256 or not 256 < hidden <= 8192):
        text = f"hidden_size {hidden}: on CUDA the head needs a multiple of 256 from 512 to 8192"
        yield Finding(text, servers=("sglang",))


# Read in vLLM's deepseek_mtp.py and SGLang's deepseek_nextn.py.
SERVING = Serving(
    feeds={"vllm": {"mtp_zero_first_embedding": True}},
    head_patterns=("+E",),
    fp32=(r"e_score_correction_bias$",),
    unquantized=(Unquantized(r"eh_proj$"), WITH_NVFP4),
    called={
        "vllm": renaming(OUTPUT_COPY, ".head"),
        "sglang": renaming(r"^model\.layers\.\d+\.", "model.decoder."),
    },
    # the published depth, whatever the model's
    renamed={"sglang": ("model.layers.61", "model.decoder")},
    no_table={"sglang": ("gate_up_proj",)},
    depths=("vllm",),
    needs=(
        Need("scoring_func", "vLLM routes by softmax without it", "sigmoid", kind="moe"),
        Need("topk_method", "without it servers build no router bias", "noaux_tc", kind="moe"),
    ),
    rules=(_sglang_kernel,),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_patterns=LAYERS.patterns,
    lines=(
        Fixed("hidden_act", "silu", "activation", "swiglu"),
        Fixed("tie_word_embeddings", False, "tie_word_embeddings", False),
        Fixed("attention_bias", False),
        Fixed("rope_interleave", True),
        Fixed("moe_layer_freq", 1),
        Fixed("", None, "moe_latent_size", 0, kind="moe"),
        Fixed("", None, "qk_layernorm", True, kind="mla"),
        Fixed("", None, "q_proj_layernorm", False, kind="mla"),
        Quantization(),
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("max_position_embeddings", "max_position_embeddings", default=4096),
        Key("rms_norm_eps", "layernorm_epsilon", default=1e-6),
        Key("initializer_range", "init_std", default=0.02),
        Key("bos_token_id", "bos_token_id", default=None),
        Key("pad_token_id", "pad_token_id", default=None),
        Key("num_attention_heads", "num_attention_heads", "mla"),
        _KeyHeads(),
        Key("q_lora_rank", "q_lora_rank", "mla", default=0, null=0),
        Key("kv_lora_rank", "kv_lora_rank", "mla"),
        Key("qk_nope_head_dim", "qk_head_dim", "mla"),
        Key("qk_rope_head_dim", "qk_pos_emb_head_dim", "mla"),
        Key("v_head_dim", "v_head_dim", "mla"),
        _Rotary(),
        Key("intermediate_size", "ffn_hidden_size", "mlp"),
        Key("n_routed_experts", "num_moe_experts", "moe"),
        Key("num_experts_per_tok", "moe_router_topk", "moe"),
        Key("moe_intermediate_size", "moe_ffn_hidden_size", "moe"),
        Fixed("scoring_func", "sigmoid", kind="moe"),
        Fixed("topk_method", "noaux_tc", kind="moe"),
        blocks.SharedExperts(),
        SigmoidRouter(),
        LAYERS,
        EndTokens(),
        Heads(),
    ),
    replaced=("mtpkit",),
    outside=blocks.OUTSIDE,
    layers={"mla": _mla, "mlp": blocks.mlp, "moe": blocks.moe},
    base_layer=blocks.base_layer,
    mtp_outside=blocks.heads_after_base,
    mtp_layer=blocks.after_base,
    copies=blocks.shared_with_base,
    serving=SERVING,
)
"""Defaults are those of transformers, which never ties the embeddings."""
