"""Megatron's names of tensors with their shapes, as `torch_dist` checkpoints store them; and
Megatron's settings.

Stacked experts appear as one tensor per expert: `...experts.linear_fc1.weight[3]` is slice 3 of
dimension 0.

A checkpoint has one of two styles of names. `HybridModel` numbers mixers and feed-forward networks
as separate layers, as mtpkit does: `decoder.layers.7.mlp...`,
`mtp.layers.0.mtp_model_layer.layers.1.mlp...`. `GPTModel` has both in one transformer layer:
`decoder.layers.3.mlp...`, or one stacked tensor for all layers, `decoder.layers.mlp...`. It calls
the final norm `decoder.final_layernorm`, and an MTP depth `mtp.layers.0.transformer_layer.mlp...`
on disk, `mtp_model_layer` in memory.
"""

import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor

from mtpkit.checkpoint.matrices import Weights
from mtpkit.checkpoint.tensors import Shape
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig, config_of_file
from mtpkit.config.checked import keys_of
from mtpkit.config.sections import sections_of
from mtpkit.errors import UserError, listed, raise_problems, shown
from mtpkit.model.formats import Quantized
from mtpkit.model.kinds import KINDS, kinds_in
from mtpkit.model.kinds.base import LayerKind
from mtpkit.model.kinds.settings import LayerMarks

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_norm.weight"
OUTPUT = "output_layer.weight"

MOST_LAYERS = 1024
"""Maximum number of layers of a model, each of two letters."""

TRAINING_STATE = ("optimizer", "chained_", "rng_state", "rerun_state_machine")
"""Prefixes of tensors that belong to a training run and not to the model."""

_SLICE = re.compile(r"(.+)\[(\d+)\]")
_GPT_FINAL_NORM = "decoder.final_layernorm."
_GPT_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,4})\.)?(.+)")
_TRANSFORMER_LAYER = re.compile(
    r"(mtp\.layers\.\d+\.)(?:transformer_layer|mtp_model_layer)\.(?!layers\.)(.+)"
)

OTHER_NAMES = {
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "layernorm_epsilon": ("layernorm_epsilon", "norm_epsilon"),
    "init_std": ("init_method_std",),
}
"""Key of `ModelConfig` -> Megatron's names for it; the first that is set wins. All other keys have
the same name in Megatron, except the `other_keys` of layer kinds."""

FIXED = {
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "window_size": None,
    "rotary_interleaved": False,
    "disable_bias_linear": True,
    "use_mup": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "moe_apply_probs_on_input": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "use_rope_scaling": False,
    "rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "mrope_section": None,
    "qk_l2_norm": False,
    "apply_residual_connection_post_layernorm": False,
    "heterogeneous_block_specs": False,
    "heterogeneous_layers_config_path": None,
}
"""Settings of which only one value is supported, whichever layers a model has."""

_HYBRID = (
    "is_hybrid_model",
    "hybrid_attention_ratio",
    "hybrid_mlp_ratio",
    "mtp_hybrid_override_pattern",
)
"""Settings that a `GPTModel` does not have."""

_ZERO_CENTERED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
"""The setting's name in a `TransformerConfig`, and the name of Megatron-LM's argument, which sets
the former."""


class WithoutPadding(Weights):
    """A checkpoint without the rows with which Megatron pads its vocabulary.

    Args:
        source: tensors under Megatron's names.
        vocab_size: number of tokens; the rows after them are left out.
    """

    def __init__(self, source: Weights, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self.tensors = dict(source.tensors)
        for name in self.tensors.keys() & {EMBEDDING, OUTPUT}:
            info = self.tensors[name]
            self.tensors[name] = info._replace(shape=(vocab_size, *info.shape[1:]))

    @property
    def matrices(self) -> Mapping[str, Quantized]:
        return {name: self._cut(name, each) for name, each in self._source.matrices.items()}

    def quantized(self, name: str) -> Quantized:
        return self._cut(name, self._source.quantized(name))

    def _cut(self, name: str, matrix: Quantized) -> Quantized:
        return matrix.narrow_rows(0, self._vocab_size) if name in (EMBEDDING, OUTPUT) else matrix

    def read(self, name: str) -> Tensor:
        tensor = self._source.read(name)
        return tensor[: self._vocab_size] if name in (EMBEDDING, OUTPUT) else tensor

    def require_finite(self) -> None:
        self._source.require_finite()


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
    hidden = config.hidden_size
    vocab = config.vocab_size
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


def hybrid_names(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """mtpkit's names for the tensors of a checkpoint of either style.

    Args:
        shapes: shapes of all tensors by their keys on disk.

    Returns:
        For each tensor its name, its key on disk, and its index in the first dimensions of what is
        stored under that key; the index is () if the tensor is all of it.
    """
    gpt_style = any(key.startswith(_GPT_FINAL_NORM) for key in shapes)
    for key, shape in shapes.items():
        known = _with_fused_norms(key, shapes)
        for name, index in _layers(known, shape) if gpt_style else [(_of_heads(known), ())]:
            if is_stacked(key):
                yield from (
                    (f"{name}[{expert}]", key, (*index, expert))
                    for expert in range(shape[len(index)])
                )
            else:
                yield name, key, index


def _with_fused_norms(key: str, keys: Container[str]) -> str:
    """The key, with an unfused norm renamed as in Transformer Engine's modules, whose names mtpkit
    follows."""
    for kind in KINDS.values():
        for norm in kind.unfused_norms:
            prefix = key.removesuffix(norm.name)
            if prefix != key and prefix + norm.beside in keys:
                return prefix + norm.fused
    return key


def is_of_all_layers(key: str) -> bool:
    """Whether a key holds one tensor of `GPTModel`'s layers, stacked for all of them."""
    match = _GPT_LAYER.fullmatch(key)
    return match is not None and match[1] is None


def _of_heads(key: str) -> str:
    match = _TRANSFORMER_LAYER.fullmatch(key)
    if match is None:
        return key
    return f"{match[1]}mtp_model_layer.layers.{_half(match[2])}.{match[2]}"


def _layers(key: str, shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names for a tensor of `GPTModel`, each with the index of its layer's part."""
    match = _GPT_LAYER.fullmatch(key)
    if match is None:
        yield _of_heads(key.replace(_GPT_FINAL_NORM, FINAL_NORM.removesuffix("weight"), 1)), ()
    elif match[1] is not None:
        yield f"{base_layer(2 * int(match[1]) + _half(match[2]))}{match[2]}", ()
    else:
        for layer in range(shape[0]):
            yield f"{base_layer(2 * layer + _half(match[2]))}{match[2]}", (layer,)


def _half(name: str) -> int:
    """0 if a tensor of a transformer layer belongs to its mixer, 1 if it belongs to the
    feed-forward part after it."""
    return int(any(name.startswith(kind.feed_forward) for kind in KINDS.values()))


def is_stacked(key: str) -> bool:
    """Whether a key on disk holds the weights of all experts of a layer."""
    return ".experts.experts." in key


def split_slice(name: str) -> tuple[str, int | None]:
    """`key[3]` -> (`key`, 3); any other name -> (name, None)."""
    match = _SLICE.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def extra_states(counts: Mapping[str, int]) -> list[str]:
    """Names of the `_extra_state` objects that Transformer Engine's modules leave in a checkpoint.

    A Megatron model built from those modules asks for them when it loads. `counts` maps each key to
    its number of experts, 1 for all but stacked ones.
    """
    # modules that are not Transformer Engine's
    plain = ("word_embeddings", "router", "conv1d", "mixer.norm")
    names = []
    for key, count in counts.items():
        match = re.fullmatch(r"(.+)\.weight(\.z)?", key)
        if match and not match[1].endswith(plain):
            names += [f"{match[1]}._extra_state/shard_{i}_{count}" for i in range(count)]
    return names


def config_from_megatron(values: object, where: object = "Megatron config") -> ModelConfig:
    """Read a `TransformerConfig` as a dictionary, or the namespace `args` of a Megatron-LM
    checkpoint as one.

    Megatron's `mtp_num_layers` counts depths. Its vocabulary is taken with its padding: those rows
    are in the weights. The family of the config stays empty.

    Args:
        where: the file, for messages.

    Raises:
        UserError: `values` is no dictionary, or settings are wrong or unsupported; the message
            names them all.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: {shown(values)} is not an object of Megatron's settings")
    file = Values(values, where)
    pattern, mtp_pattern, depths = _patterns(file)
    letters = pattern + mtp_pattern
    for fixed in (FIXED, *(kind.fixed_settings(kind.letter in letters) for kind in KINDS.values())):
        for key, value in fixed.items():
            file.require(key, value)
    names = _names(letters)
    keys = {field: file.first(*names[field]) for field in names}
    for field in ("vocab_size", "hidden_size"):
        if keys[field] is None:
            file.problems.append(f"{' or '.join(names[field])} is missing")
    hidden = file.typed("hidden_size", 0)
    heads = file.typed("num_attention_heads", 0) or 1
    groups = file.typed("num_query_groups", 0) if file.typed("group_query_attention", True) else 0
    fields: dict[str, object] = {}
    for kind in kinds_in(letters):
        fields |= kind.derived_settings(file, hidden)
    fields |= {field: file.get(key) for field, key in keys.items() if key is not None}
    for ignored in itertools.chain.from_iterable(
        kind.ignored_settings(file) for kind in KINDS.values()
    ):
        fields.pop(ignored, None)
    fields |= dict(
        family="",
        pattern=pattern,
        mtp_pattern=mtp_pattern,
        mtp_num_depths=depths,
        mtp_use_repeated_layer=file.typed("mtp_use_repeated_layer", False) if depths else True,
        num_query_groups=groups or heads,
        kv_channels=file.typed("kv_channels", 0) or hidden // heads,
        activation=_activation(file),
        layernorm_zero_centered_gamma=_zero_centered(file),
        tie_word_embeddings=not file.typed("untie_embeddings_and_output_weights", True),
    )
    raise_problems(file.where, file.problems)
    shown_as = {field: key or names[field][0] for field, key in keys.items()}
    shown_as |= dict(pattern="hybrid_layer_pattern", mtp_num_depths="mtp_num_layers")
    return config_of_file(where, shown_as, fields)


def _names(letters: str) -> dict[str, tuple[str, ...]]:
    """Key of `ModelConfig` -> Megatron's names for it, including keys of the layer kinds that a
    file contains."""
    same = [key for section in sections_of(letters) for key in keys_of(section).values()]
    others = {
        names[0]: names for kind in KINDS.values() for names in kind.other_keys if names[0] in same
    }
    return (
        {key: (key,) for key in ("hidden_size", "max_position_embeddings", *same)}
        | OTHER_NAMES
        | others
    )


def _patterns(file: Values) -> tuple[str, str, int]:
    """(base pattern, pattern of one MTP depth, depths), from `M-*-/*-/*-`, from separate settings,
    or from those of a `GPTModel`."""
    key = file.first("hybrid_layer_pattern", "hybrid_override_pattern") or "hybrid_layer_pattern"
    text = file.typed(key, "")
    depths = file.typed("mtp_num_layers", 0)
    if file.get(key, "") == "":
        base = _gpt_pattern(file)
        # Megatron's heads have the base's last layer
        return base, base[-2:] if depths else "", depths
    base, *heads = text.replace("|", "").split("/")  # | marks pipeline stages
    depths = depths or len(heads)
    own = set(heads) or {file.typed("mtp_hybrid_override_pattern", "")}
    if len(own) > 1 or len(heads) not in (0, depths):
        file.problems.append(f"{shown(text)} must give one pattern to all {shown(depths)} depths")
    return base, own.pop() if depths else "", depths


def _gpt_pattern(file: Values) -> str:
    """The pattern of a `GPTModel`: two letters for each of its layers."""
    layers = file.typed("num_layers", 0)
    problem = ""
    if hybrid := [key for key in _HYBRID if file.get(key)]:
        problem = f"hybrid_layer_pattern is missing, though {listed(hybrid)} is set"
    elif file.first("num_layers") is None:
        problem = (
            "hybrid_layer_pattern is missing, and num_layers, which a GPTModel has in its place"
        )
    elif not 0 < layers <= MOST_LAYERS:
        problem = f"num_layers {shown(file.get('num_layers'))} must be from 1 to {MOST_LAYERS}"
    if problem:
        file.problems.append(problem)
        return ""
    mixers = _letters(file, layers, [kind for kind in KINDS.values() if kind.keeps_past])
    known = [kind.attention_variant for kind in KINDS.values() if kind.attention_variant]
    if (variant := file.get("experimental_attention_variant")) is not None and variant not in known:
        file.problems.append(
            f"experimental_attention_variant {shown(variant)} is not supported, only"
            f" {listed(known)}"
        )
    others = _letters(file, layers, [kind for kind in KINDS.values() if not kind.keeps_past])
    return "".join(itertools.chain.from_iterable(zip(mixers, others, strict=True)))


def _letters(file: Values, layers: int, kinds: Sequence[LayerKind]) -> list[str]:
    """Letters of `kinds` for each layer of a `GPTModel`: its mixers, or its feed-forward parts."""
    letters = [""] * layers
    for kind in kinds:
        marks = kind.gpt_layers(file)
        own = _marked(file, marks, layers) if isinstance(marks, LayerMarks) else [marks] * layers
        letters = [
            kind.letter if mark else letter for mark, letter in zip(own, letters, strict=True)
        ]
    return letters


def _marked(file: Values, marks: LayerMarks, layers: int) -> Sequence[bool]:
    """Whether a setting marks each layer, given by a list of zeros and ones or derived from a
    number."""
    key = marks.key
    value = file.get(marks.key, marks.default)
    if type(value) is int and value > 0:
        return [marks.of_number(layer, value) for layer in range(layers)]
    if isinstance(value, list) and len(value) == layers and all(one in (0, 1) for one in value):
        return [bool(one) for one in value]
    file.problems.append(
        f"{key} {shown(value)} is neither a number from 1 nor a list of {layers} zeros and ones"
    )
    return [False] * layers


def _zero_centered(file: Values) -> bool:
    flags = [file.typed(key, False) for key in _ZERO_CENTERED]  # reading both checks both
    return any(flags)


def _activation(file: Values) -> Literal["relu2", "swiglu"]:
    """The activation of a feed-forward layer; any other than these two is recorded as a problem."""
    function = file.get("activation_func", "")
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    swiglu = file.typed("swiglu", False)
    gated = file.typed("gated_linear_unit", False) or swiglu
    if swiglu or (gated and "silu" in name):
        return "swiglu"
    if gated or not (file.typed("squared_relu", False) or "squared_relu" in name):
        file.problems.append(
            f"activation_func {shown(function or 'gelu')}: only squared ReLU and SwiGLU are"
            " supported"
        )
    return "relu2"
