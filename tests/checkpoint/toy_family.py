"""A family that mtpkit does not have: its own keys, names and numbering of layers, and tensors in
other forms."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.checkpoint.families import FAMILIES, Family
from mtpkit.checkpoint.families.keys import EndTokens, Fixed, Heads, Key, Line, Settings
from mtpkit.checkpoint.families.table import Entry, FuseQKV, one
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from tests import toy_kind

BLOCKS = {"look": "*", "think": "-", "drift": "A"}
"""Names of layers in the config of the family; `drift` is the moving average of `toy_kind`."""


@dataclass(frozen=True)
class Transposed:
    """Matrices with their columns first."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.t().contiguous() for tensor in tensors]

    to_hf = to_megatron


@dataclass(frozen=True)
class SwapHalves:
    """Columns for the hidden state before those for the embedding."""

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(reversed(tensor.chunk(2, dim=1))), dim=1) for tensor in tensors]

    to_hf = to_megatron


@dataclass(frozen=True)
class PackedQKV:
    """One tensor with all rows of q, then those of k and v."""

    parts: FuseQKV

    def to_megatron(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (packed,) = tensors
        keys = self.parts.groups * self.parts.head_dim
        return self.parts.to_megatron(packed.split([len(packed) - 2 * keys, keys, keys]))

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(self.parts.to_hf(tensors))]


@dataclass(frozen=True)
class Blocks(Line):
    """The layers in words."""

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        words = {letter: word for word, letter in BLOCKS.items()}
        return {
            "blocks": [words[letter] for letter in config.pattern],
            "drafter": [words[letter] for letter in config.mtp.pattern],
        }


def read_patterns(file: Values) -> tuple[str, str]:
    blocks = file.get("blocks")
    drafter = file.get("drafter")
    assert isinstance(blocks, list) and isinstance(drafter, list)
    return "".join(BLOCKS[word] for word in blocks), "".join(BLOCKS[word] for word in drafter)


def attention(c: ModelConfig) -> Iterator[Entry]:
    sizes = c.attention
    heads = FuseQKV(
        sizes.num_query_groups,
        sizes.num_attention_heads // sizes.num_query_groups,
        sizes.kv_channels,
    )
    yield one("before.scale", "self_attention.linear_qkv.layer_norm_weight")
    yield Entry(("packed.weight",), ("self_attention.linear_qkv.weight",), PackedQKV(heads))
    yield one("after.weight", "self_attention.linear_proj.weight", Transposed())


def mlp(_: ModelConfig) -> Iterator[Entry]:
    yield one("before.scale", "mlp.linear_fc1.layer_norm_weight")
    yield one("wide.weight", "mlp.linear_fc1.weight", Transposed())
    yield one("narrow.weight", "mlp.linear_fc2.weight")


def average(_: ModelConfig) -> Iterator[Entry]:
    yield one("before.scale", "mixer.norm.weight")
    yield one("fade", "mixer.decay")
    yield one("after.weight", "mixer.out_proj.weight", Transposed())


def mtp_outside(config: ModelConfig, depth: int) -> Iterator[Entry]:
    own = megatron.mtp_depth(depth)
    yield one(f"drafter.{depth}.join.weight", f"{own}eh_proj.weight", SwapHalves())
    for name, theirs in (("token", "enorm"), ("state", "hnorm"), ("last", "final_layernorm")):
        yield one(f"drafter.{depth}.{name}.scale", f"{own}{theirs}.weight")


TOY = Family(
    model_type="toy",
    architecture="ToyForCausalLM",
    read_patterns=read_patterns,
    lines=(
        Key("tokens", "vocab_size"),
        Key("width", "hidden_size"),
        Key("queries", "num_attention_heads", "attention"),
        Key("memories", "num_query_groups", "attention"),
        Key("head", "kv_channels", "attention", older="head_size"),
        Key("inner", "ffn_hidden_size", "mlp"),
        Key("noise", "init_std", default=0.02),
        Key("fade", "average_decay", "average"),
        Fixed("squared", True, "activation", "relu2"),
        Blocks(),
        EndTokens("stop"),
        Heads("drafters"),
    ),
    replaced=(),
    outside=(
        one("tokens.weight", megatron.EMBEDDING),
        one("scale", megatron.FINAL_NORM),
        one("scores.weight", megatron.OUTPUT),
    ),
    layers={"attention": attention, "mlp": mlp, "average": average},
    base_layer="block_{}.".format,
    mtp_outside=mtp_outside,
    mtp_layer=lambda config, depth, number: f"drafter.{depth}.{'abc'[number]}.",
)


@contextlib.contextmanager
def known() -> Iterator[None]:
    """The family and the layer kind that it names are there inside."""
    with toy_kind.known():
        FAMILIES[TOY.model_type] = TOY
        try:
            yield
        finally:
            del FAMILIES[TOY.model_type]
