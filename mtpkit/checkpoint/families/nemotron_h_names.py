"""Weight names of Nemotron-H and Nemotron 3: one table for both directions, base and MTP heads.

Gated activations, norms of queries and keys, and tied embeddings have Megatron names alone: no config of this family
in the Hugging Face layout asks for them, see `nemotron_h.config_to_hf`.
"""

import re

from mtpkit.checkpoint.families.table import Entry, FuseQKV, Split, Table
from mtpkit.checkpoint.tensors import Shape
from mtpkit.config import ModelConfig


def canonical_hf_name(name: str) -> str:
    """The published name of a tensor: transformers 5 calls the `backbone.` prefix `model.` in memory."""
    return re.sub(r"^model\.", "backbone.", name)


def table(config: ModelConfig) -> Table:
    """Every tensor of the model, base and heads, under both names."""
    hidden, vocab = config.hidden_size, config.vocab_size
    entries = [_one("backbone.embeddings.weight", "embedding.word_embeddings.weight", (vocab, hidden))]
    for n, letter in enumerate(config.pattern):
        entries += _layer(letter, f"backbone.layers.{n}.", f"decoder.layers.{n}.", config)
    entries.append(_one("backbone.norm_f.weight", "decoder.final_norm.weight", (hidden,)))
    if not config.tie_word_embeddings:
        entries.append(_one("lm_head.weight", "output_layer.weight", (vocab, hidden)))
    for depth in range(config.num_mtp_layers):
        entries += _mtp_layer(depth, config)
    return Table(tuple(entries))


def _mtp_layer(depth: int, config: ModelConfig) -> list[Entry]:
    """One physical MTP layer. Hugging Face numbers sublayers flat: n = depth * L + i, L = len(pattern)."""
    hidden, length = config.hidden_size, len(config.mtp_pattern)
    first, last = f"mtp.layers.{depth * length}.", f"mtp.layers.{depth * length + length - 1}."
    megatron = f"mtp.layers.{depth}."
    entries = [
        _one(f"{first}enorm.weight", f"{megatron}enorm.weight", (hidden,)),
        _one(f"{first}hnorm.weight", f"{megatron}hnorm.weight", (hidden,)),
        _one(f"{first}eh_proj.weight", f"{megatron}eh_proj.weight", (hidden, 2 * hidden)),
    ]
    for i, letter in enumerate(config.mtp_pattern):
        prefix = f"{megatron}mtp_model_layer.layers.{i}."
        entries += _layer(letter, f"mtp.layers.{depth * length + i}.", prefix, config)
    return [*entries, _one(f"{last}final_layernorm.weight", f"{megatron}final_layernorm.weight", (hidden,))]


def _one(hf: str, megatron: str, shape: Shape) -> Entry:
    return Entry({hf: shape}, (megatron,))


def _layer(letter: str, hf: str, megatron: str, config: ModelConfig) -> list[Entry]:
    """The lines of one layer, under the prefixes of both sides."""
    lines = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}[letter](config)
    return [
        Entry(
            {hf + name: shape for name, shape in line.hf.items()},
            tuple(megatron + name for name in line.megatron),
            line.transform,
        )
        for line in lines
    ]


def _mamba(c: ModelConfig) -> list[Entry]:
    inner, bc = c.mamba_num_heads * c.mamba_head_dim, c.mamba_num_groups * c.mamba_state_dim
    heads, conv = c.mamba_num_heads, inner + 2 * bc
    rows = Split((inner, inner, bc, bc, heads))
    channels = Split((inner, bc, bc))
    return [
        _one("norm.weight", "mixer.in_proj.layer_norm_weight", (c.hidden_size,)),
        Entry(
            {"mixer.in_proj.weight": (inner + conv + heads, c.hidden_size)},
            tuple(f"mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")),
            rows,
        ),
        Entry(
            {"mixer.conv1d.weight": (conv, 1, c.mamba_conv_kernel)},
            tuple(f"mixer.conv1d.weight.{part}" for part in ("x", "B", "C")),
            channels,
        ),
        Entry({"mixer.conv1d.bias": (conv,)}, tuple(f"mixer.conv1d.bias.{part}" for part in ("x", "B", "C")), channels),
        _one("mixer.A_log", "mixer.A_log", (heads,)),
        _one("mixer.D", "mixer.D", (heads,)),
        _one("mixer.dt_bias", "mixer.dt_bias", (heads,)),
        _one("mixer.norm.weight", "mixer.norm.weight", (inner,)),
        _one("mixer.out_proj.weight", "mixer.out_proj.weight", (c.hidden_size, inner)),
    ]


def _attention(c: ModelConfig) -> list[Entry]:
    queries, keys = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    fuse = FuseQKV(c.num_query_groups, c.num_attention_heads // c.num_query_groups, c.kv_channels)
    norms = ("q", "k") if c.qk_layernorm else ()
    return [
        *(_one(f"mixer.{x}_norm.weight", f"self_attention.{x}_layernorm.weight", (c.kv_channels,)) for x in norms),
        _one("norm.weight", "self_attention.linear_qkv.layer_norm_weight", (c.hidden_size,)),
        Entry(
            {f"mixer.{name}.weight": (rows, c.hidden_size) for name, rows in projections.items()},
            ("self_attention.linear_qkv.weight",),
            fuse,
        ),
        _one("mixer.o_proj.weight", "self_attention.linear_proj.weight", (c.hidden_size, queries)),
    ]


def _mlp(c: ModelConfig) -> list[Entry]:
    return [
        _one("norm.weight", "mlp.linear_fc1.layer_norm_weight", (c.hidden_size,)),
        _one("mixer.up_proj.weight", "mlp.linear_fc1.weight", (_gated(c) * c.ffn_hidden_size, c.hidden_size)),
        _one("mixer.down_proj.weight", "mlp.linear_fc2.weight", (c.hidden_size, c.ffn_hidden_size)),
    ]


def _gated(c: ModelConfig) -> int:
    """Rows of the first matrix of an MLP for each of the second one's columns."""
    return 2 if c.activation == "swiglu" else 1


def _moe(c: ModelConfig) -> list[Entry]:
    hidden, experts, width = c.hidden_size, c.num_moe_experts, c.moe_ffn_hidden_size
    latent, shared = c.moe_latent_size or hidden, c.moe_shared_expert_intermediate_size
    entries = [
        _one("norm.weight", "pre_mlp_layernorm.weight", (hidden,)),
        _one("mixer.gate.weight", "mlp.router.weight", (experts, hidden)),
        _one("mixer.gate.e_score_correction_bias", "mlp.router.expert_bias", (experts,)),
    ]
    shapes = {("linear_fc1", "up_proj"): (_gated(c) * width, latent), ("linear_fc2", "down_proj"): (latent, width)}
    for (fc, name), shape in shapes.items():
        for e in range(experts):
            entries.append(_one(f"mixer.experts.{e}.{name}.weight", f"mlp.experts.experts.{fc}.weight[{e}]", shape))
    if c.moe_latent_size:
        entries += [
            _one("mixer.fc1_latent_proj.weight", "mlp.fc1_latent_proj.weight", (latent, hidden)),
            _one("mixer.fc2_latent_proj.weight", "mlp.fc2_latent_proj.weight", (hidden, latent)),
        ]
    if shared:
        entries += [
            _one(
                "mixer.shared_experts.up_proj.weight",
                "mlp.shared_experts.linear_fc1.weight",
                (_gated(c) * shared, hidden),
            ),
            _one("mixer.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", (hidden, shared)),
        ]
    return entries
