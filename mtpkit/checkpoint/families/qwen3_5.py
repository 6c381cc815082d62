"""Qwen3.5 and Qwen3.6, dense: config keys under `text_config`, and weight names beside those of a
vision tower."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtpkit.checkpoint.families import blocks, qwen3_next, qwen_serving
from mtpkit.checkpoint.families.family import Family
from mtpkit.checkpoint.families.keys import Fixed, Heads, Key, Line, Nested, Settings
from mtpkit.checkpoint.families.serving import SERVERS, WITH_NVFP4, Serving
from mtpkit.checkpoint.families.table import Entry, Split, one
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.errors import shown
from mtpkit.model.kinds import gated_delta_net as delta

COUNT = "mtp_num_hidden_layers"
"""Key that counts physical MTP layers."""


@dataclass(frozen=True)
class OutputGate(Line):
    """`output_gate_type` of gated delta nets (Qwen3.6): silu under either of its names. The key is
    kept unchanged."""

    kind: str = "gated_delta_net"

    def read(self, file: Values) -> Settings:
        gate = file.get("output_gate_type", "swish")
        if gate not in ("swish", "silu"):
            file.problems.append(f"output_gate_type {shown(gate)} is not supported, only 'swish'")
        return {}


def lines(layers: qwen3_next.Layers) -> tuple[Line, ...]:
    """Lines of the text model's config that dense models and models with experts share."""
    return (
        *qwen3_next.shared_lines(layers, Heads(COUNT)),
        Fixed("attn_output_gate", True, kind="attention"),
        Fixed("mtp_use_dedicated_embeddings", False),
        OutputGate(),
    )


def delta_net(config: ModelConfig) -> Iterator[Entry]:
    """A gated delta net: queries, keys and values share one projection; gates, betas and alphas
    have one each."""
    sizes = config.gated_delta_net
    query, key, value, *rest = (f"in_proj.weight.{part}" for part in delta.ROWS)
    together = Split((sizes.key_width, sizes.key_width, sizes.value_width))
    apart = (one(f"in_proj_{hf}.weight", own) for hf, own in zip("zba", rest, strict=True))
    yield from qwen3_next.delta_net(
        config, (Entry(("in_proj_qkv.weight",), (query, key, value), together), *apart)
    )


def base_layer(number: int) -> str:
    """Prefix of the tensor names of letter `number` of the base's pattern."""
    return f"model.language_model.layers.{number // 2}."


def nested(model_type: str) -> Nested:
    """Location of the text model's settings in `config.json`."""
    return Nested("text_config", model_type, at_both_levels=("tie_word_embeddings",))


UNQUANTIZED = (qwen3_next.PROJECTION, qwen3_next.PROJECTION_WITH_NVFP4, WITH_NVFP4)
RULES = (
    qwen_serving.interval("text_config."),
    qwen_serving.tied_at_both_levels,
    qwen_serving.vision_tower,
)
"""Lint rules for dense models and models with experts."""
CARRIED = (qwen_serving.VISION,)
"""Prefix of the vision tower's tensors."""
FP32 = (r"A_log$",)
"""Names of tensors that published files hold in fp32. The norm of gated delta nets is in bf16 in
some releases."""

_LAYERS = qwen3_next.Layers("none", COUNT)

QWEN3_5 = Family(
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    read_patterns=_LAYERS.patterns,
    lines=(*lines(_LAYERS), Key("intermediate_size", "ffn_hidden_size", "mlp")),
    replaced=("mtpkit",),
    outside=qwen3_next.outside("model.language_model."),
    layers={"attention": qwen3_next.attention, "gated_delta_net": delta_net, "mlp": blocks.mlp},
    base_layer=base_layer,
    mtp_outside=qwen3_next.mtp_outside,
    mtp_layer=qwen3_next.mtp_layer,
    nested=nested("qwen3_5_text"),
    serving=Serving(  # read in qwen3_5_mtp.py of both servers
        f"text_config.{COUNT}",
        head_patterns=("*-",),
        ties=SERVERS,
        norm_means=qwen3_next.NORM_MEANS,
        fp32=FP32,
        split_rows=qwen3_next.SPLIT_ROWS,
        split_input=("vllm",),
        unquantized=UNQUANTIZED,
        needs=(qwen_serving.state_dtype("text_config."),),
        rules=RULES,
    ),
    carried=CARRIED,
)


def text_alone(family: Family, architecture: str) -> Family:
    """The family of text models without a vision tower, as transformers saves them: their settings
    are at the top level of `config.json`, and their tensors have the names of Qwen3-Next's."""
    assert family.nested is not None
    return replace(
        family,
        model_type=family.nested.model_type,
        architecture=architecture,
        outside=qwen3_next.outside("model."),
        base_layer=blocks.base_layer,
        nested=None,
        carried=(),
        serving=replace(
            family.serving,
            count_key=COUNT,
            needs=(qwen_serving.state_dtype(),),
            rules=(qwen_serving.interval(),),
        ),
    )


QWEN3_5_TEXT = text_alone(QWEN3_5, "Qwen3_5ForCausalLM")
