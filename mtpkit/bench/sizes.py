"""Sizes of published models, for benchmarks with random weights, by the name that commands take for
a directory."""

from mtpkit.config import ModelConfig

NEMOTRON_H_8B = ModelConfig.of(
    family="",
    vocab_size=131072,
    hidden_size=4096,
    pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    max_position_embeddings=8192,
    mtp_pattern="*",
    mtp_num_depths=3,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=21504,
    mamba_num_heads=128,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
)
"""NVIDIA's Nemotron-H-8B (arXiv:2504.03624) with one repeated attention-only head, as in
docs/performance.md."""

NEMOTRON_H_TINY = NEMOTRON_H_8B.replace(
    vocab_size=512,
    hidden_size=64,
    pattern="M-M*-M-",
    max_position_embeddings=1024,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=256,
    mamba_num_heads=8,
    mamba_head_dim=16,
    mamba_state_dim=16,
    mamba_num_groups=2,
)
"""The layer kinds of `NEMOTRON_H_8B`, small enough for a CPU to decode with in a test."""

NEMOTRON_3_NANO = NEMOTRON_H_8B.replace(
    hidden_size=2688,
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    max_position_embeddings=262144,
    num_query_groups=2,
    ffn_hidden_size=0,
    mamba_num_heads=64,
    num_moe_experts=128,
    moe_router_topk=6,
    moe_ffn_hidden_size=1856,
    moe_shared_expert_intermediate_size=3712,
    moe_router_topk_scaling_factor=2.5,
)
"""NVIDIA's Nemotron 3 Nano 30B-A3B (arXiv:2512.20848), with the same head. A random router gives
all experts about the same number of tokens, so that a batch reads more experts than a batch of real
text does."""

NEMOTRON_3_5_LIGHTNING = NEMOTRON_3_NANO.replace(mtp_pattern="*E", mtp_num_depths=7)
"""NVIDIA's Nemotron 3.5 Lightning 30B-A3B: the sizes of Nano, and a repeated head with experts of
its own."""

NEMOTRON_3_TINY = NEMOTRON_H_TINY.replace(
    pattern="ME*E",
    ffn_hidden_size=0,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=64,
    moe_router_topk_scaling_factor=2.5,
)
"""The layer kinds of `NEMOTRON_3_NANO`, small enough for a CPU."""

DEEPSEEK_V3 = ModelConfig.of(
    family="",
    vocab_size=129280,
    hidden_size=7168,
    pattern="+-" * 3 + "+E" * 58,
    max_position_embeddings=163840,
    mtp_pattern="+E",
    mtp_num_depths=1,
    num_attention_heads=128,
    qk_layernorm=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    mscale_all_dim=1.0,
    ffn_hidden_size=18432,
    activation="swiglu",
    num_moe_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk_scaling_factor=2.5,
    moe_router_num_groups=8,
    moe_router_group_topk=4,
    layernorm_epsilon=1e-6,
)
"""DeepSeek-V3 (arXiv:2412.19437), 671 billion weights, and 14 billion more in its one head; for
`bench roofline`."""

DEEPSEEK_V3_SLICE = DEEPSEEK_V3.replace(pattern="+-" * 3 + "+E")
"""First four layers of `DEEPSEEK_V3`, with the head: 53 GB in bf16, and 15 GB more while experts
are stacked."""

DEEPSEEK_V3_TINY = DEEPSEEK_V3.replace(
    vocab_size=512,
    hidden_size=64,
    pattern="+-+E",
    max_position_embeddings=1024,
    mtp_num_depths=3,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    ffn_hidden_size=96,
    num_moe_experts=8,
    moe_router_topk=4,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
)
"""The layer kinds of `DEEPSEEK_V3`, small enough for a CPU."""

QWEN3_NEXT_SLICE = ModelConfig.of(
    family="",
    vocab_size=151936,
    hidden_size=2048,
    pattern="GEGEGE*E" * 4,
    max_position_embeddings=262144,
    mtp_pattern="*E",
    mtp_num_depths=3,
    num_attention_heads=16,
    num_query_groups=2,
    kv_channels=256,
    attention_output_gate=True,
    qk_layernorm=True,
    position_embedding_type="rope",
    rotary_base=1e7,
    rotary_percent=0.25,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    activation="swiglu",
    num_moe_experts=512,
    moe_router_topk=10,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_router_score_function="softmax",
    moe_router_enable_expert_bias=False,
    moe_shared_expert_gate=True,
    layernorm_zero_centered_gamma=True,
    layernorm_epsilon=1e-6,
)
"""16 of the 48 layers of Qwen3-Next-80B-A3B with its head: what one H200 holds in bf16. A random
router gives all experts about the same number of tokens."""

QWEN3_5_SLICE = QWEN3_NEXT_SLICE.replace(
    vocab_size=248320,
    hidden_size=5120,
    pattern="G-G-G-*-" * 6,
    mtp_pattern="*-",
    num_attention_heads=24,
    num_query_groups=4,
    linear_num_value_heads=48,
    ffn_hidden_size=17408,
    num_moe_experts=0,
    moe_ffn_hidden_size=0,
    moe_shared_expert_intermediate_size=0,
    moe_shared_expert_gate=False,
)
"""24 of the 64 layers of Qwen3.6-27B with its head."""

QWEN3_NEXT_TINY = QWEN3_NEXT_SLICE.replace(
    vocab_size=512,
    hidden_size=64,
    pattern="GEGE*E",
    max_position_embeddings=1024,
    num_attention_heads=4,
    kv_channels=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=64,
)
"""The layer kinds of `QWEN3_NEXT_SLICE`, small enough for a CPU."""

SHAPES = {
    "nemotron-h-8b": NEMOTRON_H_8B,
    "nemotron-3-nano": NEMOTRON_3_NANO,
    "nemotron-3.5-lightning": NEMOTRON_3_5_LIGHTNING,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3-slice": DEEPSEEK_V3_SLICE,
    "qwen3-next-slice": QWEN3_NEXT_SLICE,
    "qwen3.5-slice": QWEN3_5_SLICE,
    "nemotron-h-tiny": NEMOTRON_H_TINY,
    "nemotron-3-tiny": NEMOTRON_3_TINY,
    "deepseek-v3-tiny": DEEPSEEK_V3_TINY,
    "qwen3-next-tiny": QWEN3_NEXT_TINY,
}
"""The shapes by the name that commands take in place of a model directory, one of `LARGE_SHAPES`
or `SMALL_SHAPES`."""
