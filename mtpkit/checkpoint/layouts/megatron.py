"""Megatron's names: every tensor of a model with its shape, as `torch_dist` checkpoints store them.

Stacked experts appear as one tensor per expert: `...experts.linear_fc1.weight[3]` is slice 3 of dimension 0.

The layers of an MTP depth have one of two styles of names. `HybridModel` numbers them, as mtpkit does:
`mtp.layers.0.mtp_model_layer.layers.1.mlp...`. `GPTModel` has one transformer layer per depth, with attention and MLP
in it: `mtp.layers.0.transformer_layer.mlp...` on disk, `mtp_model_layer` in memory.
"""

import re
from collections.abc import Iterator, Mapping

from mtpkit.checkpoint.tensors import Shape
from mtpkit.config import ModelConfig
from mtpkit.model.kinds import KINDS

EMBEDDING, FINAL_NORM, OUTPUT = "embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"

TRAINING_STATE = ("optimizer", "chained_", "rng_state", "rerun_state_machine")
"""Prefixes of tensors that belong to a training run and not to the model."""

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
    kind = KINDS[letter]
    stacked = kind.experts(config).names
    for name, shape in kind.tensors(config).items():
        if name not in stacked:
            yield prefix + name, shape
        else:
            yield from ((f"{prefix}{name}[{expert}]", shape[1:]) for expert in range(shape[0]))


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
