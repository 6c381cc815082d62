"""The sizes of published models: as many tensors of heads as their files hold, and their keys as
they are."""

import math

import pytest

from mtpkit.checkpoint.families import get_family
from mtpkit.checkpoint.layouts.megatron import parameters
from mtpkit.errors import UserError
from tests.shared import each

AIR = dict(
    model_type="glm4_moe",
    vocab_size=151552,
    hidden_size=4096,
    num_hidden_layers=46,
    first_k_dense_replace=1,
    num_attention_heads=96,
    num_key_value_heads=8,
    head_dim=128,
    attention_bias=True,
    partial_rotary_factor=0.5,
    rope_theta=1000000,
    rope_scaling=None,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    num_experts_per_tok=8,
    n_shared_experts=1,
    num_nextn_predict_layers=1,
    eos_token_id=[151329, 151336, 151338],
)
MIMO_7B = dict(
    model_type="mimo",
    vocab_size=151680,
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    attention_bias=True,
    rope_theta=640000,
    intermediate_size=11008,
    rms_norm_eps=1e-5,
    use_sliding_window=False,
    sliding_window=32768,
    num_nextn_predict_layers=1,
    eos_token_id=151645,
)
NEXT_80B = dict(
    model_type="qwen3_next",
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    full_attention_interval=4,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    partial_rotary_factor=0.25,
    rope_theta=10000000,
    rope_scaling=None,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    intermediate_size=5120,
    mlp_only_layers=[],
    decoder_sparse_step=1,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    eos_token_id=151645,
)
OF_35 = dict(
    vocab_size=248320,
    full_attention_interval=4,
    head_dim=256,
    rope_parameters=dict(rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25),
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    rms_norm_eps=1e-6,
    mtp_num_hidden_layers=1,
)
QWEN_4B = dict(
    model_type="qwen3_5",
    tie_word_embeddings=True,
    text_config=OF_35
    | dict(
        model_type="qwen3_5_text",
        hidden_size=2560,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=9216,
        tie_word_embeddings=True,
    ),
)
QWEN_35B = dict(
    model_type="qwen3_5_moe",
    tie_word_embeddings=False,
    text_config=OF_35
    | dict(
        model_type="qwen3_5_moe_text",
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
)
DEEPSEEK = dict(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=10000,
    intermediate_size=18432,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_intermediate_size=2048,
    n_shared_experts=1,
    rms_norm_eps=1e-6,
    num_nextn_predict_layers=1,
)
SUPER = dict(
    model_type="nemotron_h",
    vocab_size=131072,
    hidden_size=4096,
    num_hidden_layers=88,
    hybrid_override_pattern="MEMEM*E" * 12 + "MEME",
    mtp_hybrid_override_pattern="*E",
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    conv_kernel=4,
    moe_latent_size=1024,
    n_routed_experts=512,
    num_experts_per_tok=22,
    moe_intermediate_size=2688,
    n_shared_experts=1,
    moe_shared_expert_intermediate_size=5376,
    routed_scaling_factor=5.0,
    layer_norm_epsilon=1e-5,
    num_nextn_predict_layers=1,
    eos_token_id=[2, 11],
)
"""The order of the base's layers is another one."""


@pytest.mark.parametrize(
    ("hf", "prefix", "heads", "projection"),
    [
        (AIR, "model.layers.46.", 404, (14336, 4096)),
        (MIMO_7B, "model.mtp_layers.0.", 16, (6144, 4096)),
        (NEXT_80B, "mtp.", 1553, (9216, 2048)),
        (QWEN_4B, "mtp.", 15, (10240, 2560)),
        (QWEN_35B, "mtp.", 785, (9216, 2048)),
        (DEEPSEEK, "model.layers.61.", 788, (32768, 512)),
        (SUPER, "mtp.layers.", 1040, (4608, 4096)),
    ],
    ids=["glm", "mimo", "qwen next", "qwen 3.5", "qwen 3.5 moe", "deepseek", "nemotron"],
)
def test_published_models_have_as_many_tensors_as_are_expected(hf, prefix, heads, projection):
    """Their keys are kept as they are, and nothing is written at another place."""
    family = get_family(hf["model_type"])
    config = family.config_from_hf(hf)
    assert sum(name.startswith(prefix) for name in family.table(config).hf_shapes()) == heads
    linear = (
        "self_attention.linear_kv_up_proj.weight"
        if hf is DEEPSEEK
        else "self_attention.linear_qkv.weight"
    )
    found = parameters(config)
    assert {found[name] for name in found if name.endswith(linear)} == {projection}
    written = family.config_to_hf(config, hf)
    assert hf | {key: written[key] for key in hf.keys() - {"text_config"}} == hf
    inner, again = (values.get("text_config", values) for values in (hf, written))
    assert {key: again[key] for key in inner} == inner
    assert ("rope_parameters" in again) == ("rope_parameters" in inner)


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
ROPE = dict(rope_type="linear", factor=2.0)
REFUSED = [
    *(
        (AIR, change)
        for change in (
            dict(rope_scaling=ROPE),
            dict(scoring_func="softmax"),
            dict(topk_method="greedy"),
        )
    ),
    *(
        (AIR, change)
        for change in (
            dict(tie_word_embeddings=True),
            dict(n_shared_experts=0),
            dict(hidden_act="gelu"),
        )
    ),
    *(
        (MIMO_7B, change)
        for change in (dict(rope_scaling=ROPE), dict(attention_bias=False), dict(hidden_act="gelu"))
    ),
    (MIMO_7B, dict(use_sliding_window=True)),
    *(
        (NEXT_80B, change)
        for change in (dict(rope_scaling=ROPE), dict(attention_bias=True), dict(hidden_act="gelu"))
    ),
    *(
        (QWEN_4B, change)
        for change in (
            dict(rope_parameters=ROPE),
            dict(attention_bias=True),
            dict(hidden_act="gelu"),
        )
    ),
    (QWEN_4B, dict(output_gate_type="sigmoid")),
    (QWEN_35B, dict(attn_output_gate=False)),
    (QWEN_35B, dict(mtp_use_dedicated_embeddings=True)),
    (DEEPSEEK, dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    (DEEPSEEK, dict(rope_scaling=YARN | dict(attention_factor=1.2))),
    (DEEPSEEK, dict(rope_scaling=YARN | dict(truncate=False))),
    *((DEEPSEEK, {key: True}) for key in ("attention_bias", "tie_word_embeddings")),
    *((DEEPSEEK, {key: 2}) for key in ("num_key_value_heads", "moe_layer_freq")),
    *((DEEPSEEK, {key: "x"}) for key in ("scoring_func", "topk_method", "hidden_act")),
    (DEEPSEEK, dict(rope_interleave=False)),
    *(
        (SUPER, {key: True})
        for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
    ),
    *((SUPER, {key: "gelu"}) for key in ("mlp_hidden_act", "mamba_hidden_act")),
    *((SUPER, change) for change in (dict(use_conv_bias=False), dict(sliding_window=128))),
    *((SUPER, change) for change in (dict(tie_word_embeddings=True), dict(n_shared_experts=0))),
]


@each(
    ("hf", "key"),
    [
        (AIR, "rope_scaling"),
        (MIMO_7B, "rope_scaling"),
        (NEXT_80B, "rope_scaling"),
        (QWEN_4B, "rope_parameters"),
    ],
)
def test_longer_contexts_are_those_of_yarn(hf, key):
    """With the key that model cards say to add."""
    inner = hf.get("text_config", hf)
    changed = inner | {key: YARN | (inner[key] | YARN if inner.get(key) else {})}
    config = get_family(hf["model_type"]).config_from_hf(
        {**hf, "text_config": changed} if inner is not hf else changed
    )
    sizes = config.attention
    assert (sizes.yarn_factor, sizes.yarn_original_context) == (4, 32768)
    assert sizes.yarn_attention_factor == pytest.approx(1 + 0.1 * math.log(4))


@each(
    ("hf", "change"),
    REFUSED,
)
def test_what_is_refused_is_named(hf, change):
    """See docs/families.md."""
    changed = (
        {**hf, "text_config": {**hf["text_config"], **change}}
        if "text_config" in hf
        else {**hf, **change}
    )
    with pytest.raises(UserError, match="|".join(change)):
        get_family(hf["model_type"]).config_from_hf(changed)
