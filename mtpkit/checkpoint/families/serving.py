"""Expectations of servers about a family's directory: facts that `mtpkit.checkpoint.lint` checks,
and further rules.

The facts hold for vLLM 0.33.0 and SGLang 0.5.23 and were read in their sources: each family's
classes, their loaders, `layers/quantization/`, and what runs the heads
(`v1/worker/gpu/spec_decode/`, `speculative/`). Each family names its classes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from mtpkit.checkpoint.families.keys import Settings
from mtpkit.checkpoint.tensors import Shape, TensorInfo
from mtpkit.config import ModelConfig

Server = Literal["vllm", "sglang"]
VERSIONS: dict[Server, str] = {"vllm": "vLLM 0.33", "sglang": "SGLang 0.5.23"}
"""The supported servers, each with the version whose sources the facts come from."""
SERVERS: tuple[Server, ...] = tuple(VERSIONS)


@dataclass(frozen=True)
class Finding:
    """A property of a directory that causes a problem in a server."""

    text: str
    fatal: bool = True
    """Whether the server would fail to load the directory, or would draft wrongly."""
    servers: tuple[Server, ...] = SERVERS


@dataclass(frozen=True)
class Subject:
    """A Hugging Face directory, as it is passed to rules."""

    directory: Path
    hf: Settings
    """Its `config.json`."""
    quantization: object
    """Its `quantization_config`, or ModelOpt's settings beside `config.json`; None without
    either."""
    modelopt: Settings
    """ModelOpt's settings beside `config.json`; empty if there are none."""
    config: ModelConfig
    found: Mapping[str, TensorInfo]
    """The tensors of its files, without those that the family carries (`Family.carried`)."""
    expected: Mapping[str, Shape]
    """Tensors that its config calls for."""
    heads: frozenset[str]
    """The names of `expected` that belong to the heads."""
    quantized: Mapping[str, frozenset[str]]
    """The names of `expected` that are stored quantised, each with the tensors stored beside or in
    place of it."""
    carried: frozenset[str]
    """Names of the tensors that the family carries."""
    read: Callable[[str], Tensor]
    """Reads a tensor of `found`."""
    ranks: int
    """Tensor-parallel ranks of the server."""

    def setting(self, key: str) -> object:
        """A value of the config by its path, such as `text_config.dtype`; None if it is absent."""
        value: object = self.hf
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


Rule = Callable[[Subject], Iterable[Finding]]


@dataclass(frozen=True)
class Need:
    """A key that `config.json` must have."""

    key: str
    """Its path, such as `text_config.mtp_num_hidden_layers`."""
    why: str
    """The consequence if the key is missing or wrong, for the message."""
    value: object = None
    """The value that the key must have; None: any."""
    fatal: bool = True
    servers: tuple[Server, ...] = SERVERS
    kind: str = ""
    """Name of a layer kind; the key is needed in models that have such layers. Empty: in all
    models."""


@dataclass(frozen=True)
class Unquantized:
    """Head modules that servers build without quantisation, whatever the config says about them."""

    pattern: str
    """A regular expression for the names of the modules."""
    servers: tuple[Server, ...] = SERVERS
    algorithm: str = ""
    """Part of the names of ModelOpt's `quant_algo` to which this applies; empty: every
    quantisation."""


Called = Callable[[str, int], str]
"""Makes a server's name for a module of the heads. Called as (name in the file, letters of the
base's pattern)."""

OUTPUT_LAYER = "lm_head.weight"
"""End of the name of the output layer, in every family."""
OUTPUT_COPY = r"\.shared_head\.head$"
"""Name of the copy of the output layer that some families store with a head."""


def renaming(pattern: str, replacement: str) -> Called:
    """Names that differ by a regular expression."""
    return lambda name, letters: re.sub(pattern, replacement, name)


@dataclass(frozen=True)
class Serving:
    """Expectations of servers about a family's directory. Names of tensors are matched by regular
    expressions."""

    count_key: str = "num_nextn_predict_layers"
    """Path of the key that counts physical MTP layers."""
    count_default: int = 0
    """The count that servers assume if that key is absent."""
    head_patterns: tuple[str, ...] = ()
    """Layer patterns of a depth that servers can build; empty: every pattern made of
    `head_letters`."""
    head_letters: str = ""
    """Letters of layers that servers can build in a depth, in any order; empty: all."""
    ties: tuple[Server, ...] = ()
    """Servers that tie the embeddings of this family."""
    norm_means: tuple[tuple[str, float], ...] = ((r"norm", 1.0),)
    """Pairs of a pattern for norm names and the usual mean of their weights; the first match
    applies."""
    fp32: tuple[str, ...] = ()
    """Names of tensors that lose essential precision when rounded to bf16."""
    no_linears: tuple[str, ...] = (r"embed", r"[._]gate$", r"conv1d", r"lm_head")
    """Names of modules with matrices that no server quantises: embeddings, routers, gates of shared
    experts, convolutions, output layers."""
    unquantized: tuple["Unquantized", ...] = ()
    """Head modules that servers build without quantisation."""
    called: Mapping[Server, Called] = field(default_factory=dict)
    """Server -> its own names for the modules of heads, if these differ from the names in the
    files. The server looks for its own names in the list of modules that are not quantised."""
    renamed: Mapping[Server, tuple[str, str]] = field(default_factory=dict)
    """Server -> (text, replacement) that it applies to the entries of that list, with some
    quantisation methods."""
    no_table: Mapping[Server, tuple[str, ...]] = field(default_factory=dict)
    """Server -> matrices of which its model does not say what modules they consist of."""
    depths: tuple[Server, ...] = ()
    """Servers that run several stored depths as distinct heads, one after another."""
    split_rows: tuple[str, ...] = (r"\.(q|k|v|q_b|kv_b|gate|up)_proj$", r"\.in_proj_(qkvz|z)$")
    """Modules whose rows are split over tensor-parallel ranks."""
    split_columns: tuple[str, ...] = (r"\.(o|down|out)_proj$",)
    """Modules whose columns are split over tensor-parallel ranks."""
    split_input: tuple[Server, ...] = ()
    """Servers that split the rows of the heads' input projection over tensor-parallel ranks."""
    split_groups: tuple[str, ...] = (r"\.[kv]_proj$",)
    """Modules of `split_rows` that are split by query groups. With more ranks than groups, ranks
    hold copies."""
    feeds: Mapping[Server, Settings] = field(default_factory=dict)
    """Server -> rules for what it feeds the heads that differ from the defaults of `MtpConfig`,
    under keys such as `mtp_reads_of_base`."""
    needs: tuple[Need, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Checks that the other fields cannot express."""

    def builds(self, pattern: str) -> bool:
        """Whether servers can build heads with this layer pattern."""
        if self.head_patterns and pattern not in self.head_patterns:
            return False
        return not self.head_letters or not set(pattern) - set(self.head_letters)


WITH_NVFP4 = Unquantized("", ("sglang",), "NVFP4")
"""SGLang builds the heads of some families without quantisation if ModelOpt has quantised the base
to four bits (NVFP4, NVFP4_AWQ, W4A16_NVFP4)."""

USUAL = Serving()
"""Expectations for a family that states none of its own: servers load it as they load others."""
