"""Qwen3.5 and Qwen3.6 with experts: like the dense models, except for the second half of each
layer."""

from mtpkit.checkpoint.families import qwen3_5, qwen3_next, qwen_serving
from mtpkit.checkpoint.families.family import Family
from mtpkit.checkpoint.families.serving import SERVERS, Serving

_LAYERS = qwen3_next.Layers("all", qwen3_5.COUNT)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    read_patterns=_LAYERS.patterns,
    lines=(*qwen3_5.lines(_LAYERS), *qwen3_next.expert_lines(qwen3_next.Router())),
    replaced=("mtpkit",),
    outside=qwen3_next.outside("model.language_model."),
    layers={
        "attention": qwen3_next.attention,
        "gated_delta_net": qwen3_5.delta_net,
        "moe": qwen3_next.moe,
    },
    base_layer=qwen3_5.base_layer,
    mtp_outside=qwen3_next.mtp_outside,
    mtp_layer=qwen3_next.mtp_layer,
    nested=qwen3_5.nested("qwen3_5_moe_text"),
    serving=Serving(
        f"text_config.{qwen3_5.COUNT}",
        head_patterns=("*E",),
        ties=SERVERS,
        norm_means=qwen3_next.NORM_MEANS,
        fp32=qwen3_5.FP32,
        split_rows=qwen3_next.SPLIT_ROWS,
        split_input=("vllm",),
        unquantized=qwen3_5.UNQUANTIZED,
        needs=(qwen_serving.state_dtype("text_config."),),
        rules=qwen3_5.RULES,
    ),
    carried=qwen3_5.CARRIED,
)
"""Published files hold the base's experts packed, and the heads' experts one by one (3.5) or packed
(3.6)."""

QWEN3_5_MOE_TEXT = qwen3_5.text_alone(QWEN3_5_MOE, "Qwen3_5MoeForCausalLM")
