"""What servers expect of a family's directory, as facts that `mtpkit.checkpoint.lint` checks, and rules of its own.

The facts are those of vLLM 0.24 and SGLang 0.5.23, read in their sources.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from mtpkit.checkpoint.families.keys import Settings
from mtpkit.checkpoint.tensors import Shape, TensorInfo
from mtpkit.config import ModelConfig

Server = Literal["vllm", "sglang"]
VERSIONS: dict[Server, str] = {"vllm": "vLLM 0.24", "sglang": "SGLang 0.5.23"}
"""The servers that are known, with the version whose sources the facts come from."""
SERVERS: tuple[Server, ...] = tuple(VERSIONS)


@dataclass(frozen=True)
class Finding:
    """Something about a directory that a server would stumble over."""

    text: str
    fatal: bool = True
    """Whether the server would not load the directory, or would draft wrongly."""
    servers: tuple[Server, ...] = SERVERS


@dataclass(frozen=True)
class Subject:
    """A Hugging Face directory as rules see it."""

    directory: Path
    hf: Settings
    """Its `config.json`."""
    config: ModelConfig
    found: Mapping[str, TensorInfo]
    """The tensors of its files, without those that the family carries."""
    expected: Mapping[str, Shape]
    """Tensors that its config calls for."""
    heads: frozenset[str]
    """The names of `expected` that belong to the heads."""
    quantized: Mapping[str, frozenset[str]]
    """The names of `expected` that are stored quantised, each with the further tensors that this takes."""
    carried: frozenset[str]
    """Names of the tensors that the family carries."""
    read: Callable[[str], Tensor]
    """Reads a tensor of `found`."""
    ranks: int
    """Tensor-parallel ranks of the server."""

    def setting(self, key: str) -> object:
        """A value of the config by its path, such as `text_config.dtype`; None where it is absent."""
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
    """What happens without it."""
    value: object = None
    """The value that it must have; None: any."""
    fatal: bool = True
    servers: tuple[Server, ...] = SERVERS
    heads_only: bool = False
    """Whether it is needed only where there are heads."""
    kind: str = ""
    """Name of a layer kind; the key is needed in models that have such layers. Empty: in all models."""


@dataclass(frozen=True)
class Unquantized:
    """Modules of heads that servers build without quantisation, whatever the config says of them."""

    pattern: str
    """A regular expression for their names."""
    servers: tuple[Server, ...] = SERVERS
    algorithm: str = ""
    """The `quant_algo` of ModelOpt with which this is so; empty: with every quantisation."""


@dataclass(frozen=True)
class Serving:
    """What servers expect of a family's directory. Names of tensors are matched by regular expressions."""

    count_key: str = "num_nextn_predict_layers"
    """Path of the key that counts physical MTP layers."""
    count_default: int = 0
    """What servers take where that key is absent."""
    head_patterns: tuple[str, ...] = ()
    """Patterns of a depth that servers can build; empty: every pattern of `head_letters`."""
    head_letters: str = ""
    """Letters of layers that servers can build in a depth, in any order; empty: all."""
    ties: tuple[Server, ...] = ()
    """Servers that tie the embeddings of this family."""
    norm_means: tuple[tuple[str, float], ...] = ((r"norm", 1.0),)
    """Names of norms -> about what the mean of their weights is; the first that matches counts."""
    fp32: tuple[str, ...] = ()
    """Names of tensors that lose what they say when rounded to bf16."""
    no_linears: tuple[str, ...] = (r"embed", r"\.gate$", r"conv1d", r"lm_head", r"\.head$")
    """Names of modules with matrices that no server quantises: embeddings, routers, convolutions, output layers."""
    unquantized: tuple["Unquantized", ...] = ()
    """Modules of heads that are built without quantisation."""
    called: Mapping[Server, tuple[str, str]] = field(default_factory=dict)
    """What a server calls the modules of heads, where that is not the name in the files: pattern and replacement. It
    looks for these names in the list of modules that are not quantised."""
    split_rows: tuple[str, ...] = (r"\.(q|k|v|q_b|kv_b|gate|up)_proj$", r"\.in_proj_(qkvz|z)$")
    """Modules whose rows tensor-parallel ranks share."""
    split_columns: tuple[str, ...] = (r"\.(o|down|out)_proj$",)
    """Modules whose columns they share."""
    split_groups: tuple[str, ...] = (r"\.[kv]_proj$",)
    """Those of `split_rows` that are shared by groups of query heads, of which more ranks have copies."""
    feeds: Mapping[Server, Settings] = field(default_factory=dict)
    """What servers feed the heads where that differs from the defaults of `MtpConfig`, by keys such as
    `mtp_reads_of_base`."""
    needs: tuple[Need, ...] = ()
    rules: tuple[Rule, ...] = ()
    """What the other fields cannot say."""


WITH_NVFP4 = Unquantized("", ("sglang",), "NVFP4")
"""SGLang builds the heads of some families without quantisation on a base that ModelOpt has quantised to four bits."""

USUAL = Serving()
"""What holds where a family states nothing."""
