"""Megatron's names: every tensor of a model with its shape, as `torch_dist` checkpoints store them.

Stacked experts appear as one tensor per expert: `...experts.linear_fc1.weight[3]` is slice 3 of dimension 0.

The layers of an MTP depth have one of two styles of names. `HybridModel` numbers them, as mtpkit does:
`mtp.layers.0.mtp_model_layer.layers.1.mlp...`. `GPTModel` has one transformer layer per depth, with attention and MLP
in it: `mtp.layers.0.transformer_layer.mlp...` on disk, `mtp_model_layer` in memory.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from mtpkit.checkpoint.tensors import Shape
from mtpkit.config import ModelConfig

EMBEDDING, FINAL_NORM, OUTPUT = "embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"

TRAINING_STATE = ("optimizer", "chained_", "rng_state", "rerun_state_machine")
"""Prefixes of tensors that belong to a training run and not to the model."""

MAMBA_ROWS, MAMBA_CHANNELS = ("z", "x", "B", "C", "dt"), ("x", "B", "C")
"""Parts of Mamba2's input projection and of its convolution, each a tensor of its own."""

_SLICE = re.compile(r"(.+)\[(\d+)\]")
_TRANSFORMER_LAYER = re.compile(r"(mtp\.layers\.\d+\.)(?:transformer_layer|mtp_model_layer)\.(?!layers\.)(.+)")
_FEED_FORWARD = ("mlp.", "pre_mlp_layernorm.")


def base_layer(number: int) -> str:
    """Prefix of the names of a base layer."""
    return f"decoder.layers.{number}."


def mtp_depth(depth: int) -> str:
    """Prefix of the names of a physical MTP layer."""
    return f"mtp.layers.{depth}."


def mtp_layer(depth: int, number: int) -> str:
    """Prefix of the names of one layer of an MTP depth."""
    return f"{mtp_depth(depth)}mtp_model_layer.layers.{number}."


def parameters(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors of a model, base and heads."""
    return dict(_parameters(config))


def _parameters(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield EMBEDDING, (vocab, hidden)
    for number, letter in enumerate(config.pattern):
        yield from _layer(base_layer(number), letter, config)
    yield FINAL_NORM, (hidden,)
    if not config.tie_word_embeddings:
        yield OUTPUT, (vocab, hidden)
    for depth in range(config.mtp.num_layers):
        prefix = mtp_depth(depth)
        yield f"{prefix}enorm.weight", (hidden,)
        yield f"{prefix}hnorm.weight", (hidden,)
        yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden)
        for number, letter in enumerate(config.mtp.pattern):
            yield from _layer(mtp_layer(depth, number), letter, config)
        yield f"{prefix}final_layernorm.weight", (hidden,)


def _layer(prefix: str, letter: str, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    return ((prefix + name, shape) for name, shape in LAYERS[KINDS[letter]](config).items())


def _mamba2(c: ModelConfig) -> dict[str, Shape]:
    inner, bc, heads = c.mamba2.inner, c.mamba2.bc_width, c.mamba2.num_heads
    rows = {"z": inner, "x": inner, "B": bc, "C": bc, "dt": heads}
    return {
        "mixer.in_proj.layer_norm_weight": (c.hidden_size,),
        **{f"mixer.in_proj.weight.{part}": (rows[part], c.hidden_size) for part in MAMBA_ROWS},
        **{f"mixer.conv1d.weight.{part}": (rows[part], 1, c.mamba2.conv_kernel) for part in MAMBA_CHANNELS},
        **{f"mixer.conv1d.bias.{part}": (rows[part],) for part in MAMBA_CHANNELS},
        **{f"mixer.{name}": (heads,) for name in ("A_log", "D", "dt_bias")},
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (c.hidden_size, inner),
    }


def _attention(c: ModelConfig) -> dict[str, Shape]:
    sizes = c.attention
    queries, keys = sizes.num_attention_heads * sizes.kv_channels, sizes.num_query_groups * sizes.kv_channels
    norms = ("q_layernorm", "k_layernorm") if sizes.qk_layernorm else ()
    return {
        "self_attention.linear_qkv.layer_norm_weight": (c.hidden_size,),
        "self_attention.linear_qkv.weight": (queries + 2 * keys, c.hidden_size),
        **{f"self_attention.{norm}.weight": (sizes.kv_channels,) for norm in norms},
        "self_attention.linear_proj.weight": (c.hidden_size, queries),
    }


def _mlp(c: ModelConfig) -> dict[str, Shape]:
    return {
        "mlp.linear_fc1.layer_norm_weight": (c.hidden_size,),
        **_feed_forward(c, "mlp.linear_fc{}.weight", c.hidden_size, c.mlp.ffn_hidden_size),
    }


def _moe(c: ModelConfig) -> dict[str, Shape]:
    hidden, experts, latent = c.hidden_size, c.moe.num_experts, c.moe.latent_size
    shapes: dict[str, Shape] = {
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.expert_bias": (experts,),
    }
    for name, shape in _feed_forward(
        c, "mlp.experts.experts.linear_fc{}.weight", latent or hidden, c.moe.ffn_hidden_size
    ).items():
        shapes |= {f"{name}[{expert}]": shape for expert in range(experts)}
    if latent:
        shapes |= {"mlp.fc1_latent_proj.weight": (latent, hidden), "mlp.fc2_latent_proj.weight": (hidden, latent)}
    if width := c.moe.shared_expert_intermediate_size:
        shapes |= _feed_forward(c, "mlp.shared_experts.linear_fc{}.weight", hidden, width)
    return shapes


def _feed_forward(c: ModelConfig, name: str, outer: int, inner: int) -> dict[str, Shape]:
    """Both matrices of an MLP; a gated one has the rows of its gate before those of the other half."""
    gated = 2 if c.mlp.activation == "swiglu" else 1
    return {name.format(1): (gated * inner, outer), name.format(2): (outer, inner)}


LAYERS: dict[str, Callable[[ModelConfig], dict[str, Shape]]] = {
    "mamba2": _mamba2,
    "attention": _attention,
    "mlp": _mlp,
    "moe": _moe,
}
"""Kind of a layer -> names and shapes of its tensors."""

KINDS = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


def hybrid_name(stored: str) -> str:
    """The name under which mtpkit knows a tensor of a checkpoint, whichever style its MTP layers have."""
    match = _TRANSFORMER_LAYER.fullmatch(stored)
    if match is None:
        return stored
    half = int(match[2].startswith(_FEED_FORWARD))
    return f"{match[1]}mtp_model_layer.layers.{half}.{match[2]}"


def is_stacked(key: str) -> bool:
    """Whether a key on disk holds the weights of all experts of a layer."""
    return ".experts.experts." in key


def split_slice(name: str) -> tuple[str, int | None]:
    """`key[3]` -> (`key`, 3); any other name -> (name, None)."""
    match = _SLICE.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def extra_states(counts: Mapping[str, int]) -> list[str]:
    """Names of the `_extra_state` objects that Transformer Engine's modules leave in a checkpoint.

    A Megatron model built from those modules asks for them when it loads. `counts` maps each key to its number of
    experts, 1 for all but stacked ones.
    """
    plain = ("word_embeddings", "router", "conv1d", "mixer.norm")  # modules that are not Transformer Engine's
    names = []
    for key, count in counts.items():
        match = re.fullmatch(r"(.+)\.weight(\.z)?", key)
        if match and not match[1].endswith(plain):
            names += [f"{match[1]}._extra_state/shard_{i}_{count}" for i in range(count)]
    return names
