"""The settings of a training run: a YAML file, `key=value` overrides, and checks that name the key that mends them."""

import dataclasses
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, cast

from mtpkit.checkpoint.atomic import write_file
from mtpkit.errors import UserError, listed, raise_problems, shown
from mtpkit.files import read_text
from mtpkit.model.stages import Balance
from mtpkit.training.loss import LossKind
from mtpkit.training.mixing import MixKind
from mtpkit.training.patterns import quote_patterns
from mtpkit.training.unknown import describe_unknown


@dataclass(frozen=True)
class DataConfig:
    """What the heads are trained and evaluated on."""

    train: tuple[str, ...]
    """Files, folders and globs of text, jsonl, csv or parquet, and directories of `mtpkit data prepare`. Each is a
    source, called after its file or folder, or as `name=path` says."""
    eval: tuple[str, ...] = ()
    """Held-out data of the same kinds, for acceptance during training; empty: no evaluation."""
    text_column: str = "text"
    """Column of jsonl, csv and parquet that holds plain text; every token of it is trained on."""
    prompt_column: str = "prompt"
    """Column of the prompt in prompt/response data; its tokens are read but not trained on."""
    response_column: str = "response"
    """Column of the response in prompt/response data; its tokens are trained on."""
    messages_column: str = "messages"
    """Column of the conversations in chat data, rendered by the tokenizer's chat template; what the assistant says is
    trained on. Prepared data has its columns chosen already."""
    sequence_length: int = 1024
    """Tokens of a packed sequence."""
    micro_batch_size: int = 1
    """Sequences of one forward and backward on one rank."""
    global_batch_size: int = 8
    """Sequences of one optimizer step over all ranks; a multiple of micro_batch_size times the number of ranks."""
    eval_sequences: int = 32
    """Held-out sequences of each source that are read at each evaluation, over all ranks."""


HeadAttention = Literal["auto", "serving", "per_depth"]


@dataclass(frozen=True)
class HeadsConfig:
    """Which heads are trained, and how they see the past."""

    num_depths: int = 3
    """K, the number of tokens the heads learn to predict beyond the base's own."""
    init: Literal["auto", "checkpoint", "fresh", "base"] = "auto"
    """`checkpoint`: go on from the heads that the model has. `fresh`: new ones at random. `base`: new ones that start
    as copies of the base's last layers, which learn in fewer steps. `auto`: its own if it has any, else `fresh`."""
    fit_tokens: int = 65536
    """Tokens of the training data by which `init: base` fits the projection of a head's inputs, see `fit`; 0: it starts
    as the sum of embedding and hidden state."""
    pattern: str = "auto"
    """Layers of one depth of new heads: M Mamba2, * attention, - MLP, E mixture of experts. `auto`: as the model's own
    heads, else by what the base has: `*-`, or `*E` where it has experts and no MLPs."""
    repeated: bool = True
    """Fresh heads share one block over all depths, rather than one a depth."""
    attention: HeadAttention = "auto"
    """`serving`: each depth sees what it will see when decoding. `per_depth`: plain causal attention over each depth's
    own stream. `auto`: `serving` for a repeated head; for distinct heads, whose depths have caches of their own,
    `per_depth` is what serving does."""
    recompute: bool = False
    """Run each depth again in the backward rather than keep its activations: a third more of the heads' work, memory
    for one depth instead of K."""


@dataclass(frozen=True)
class LossConfig:
    """What the heads learn."""

    kind: LossKind = "kl"
    """`kl` forward KL to the base's distribution, `tv` total variation distance to it, `ce` against the tokens."""
    temperature: float = 1.0
    """Of both distributions in `kl`."""
    depth_weights: tuple[float, ...] = ()
    """Weight of each depth, normalised to sum to 1; empty: beta^(k-1)."""
    beta: float = 0.6
    """Decay of the default depth weights."""
    top_k: int = 0
    """Of `kl`: learn only the base's so many most likely tokens, its distribution over them made to sum to 1; what it
    gives the others is left out. 0: all tokens."""
    hidden_mix: float = 0.0
    """Share of the base's own hidden states in what each depth after the first reads in training, see `HiddenMix`; 0:
    the head's own alone, as in decoding."""
    hidden_mix_kind: MixKind = "sample"
    """`sample`: each position reads one or the other, at random. `blend`: each reads the weighted sum."""
    chunk_size: int = 0
    """Tokens whose logits are held at once; 0: as many as 384 MiB hold on a GPU, 16 MiB on a CPU, at least 64."""

    def weights(self, num_depths: int) -> tuple[float, ...]:
        """One weight a depth, summing to 1."""
        weights = self.depth_weights or tuple(self.beta**depth for depth in range(num_depths))
        return tuple(weight / sum(weights) for weight in weights)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, with linear warm-up and cosine decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for matrices, AdamW for the rest; takes fewer steps, each with some work more."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Learning rate of the last step."""
    warmup_steps: int = 20
    """Steps from zero to `lr`."""
    weight_decay: float = 0.01
    """Of matrices; norms and biases do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    momentum: float = 0.95
    """Of Muon."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    distributed: bool = True
    """Each data-parallel rank keeps its share of the fp32 weights and moments, rather than all of them."""
    offload: bool = False
    """Keep AdamW's fp32 weights and moments in the host's memory rather than the GPU's: 12 bytes a parameter there, and
    up to 24 here, where torch rounds page-locked tensors up to powers of two. The update goes on while the base runs on
    the next batch."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is split over processes; what is left of them is data-parallel, each with its own sequences."""

    tensor: int = 1
    """Ranks that split matrices, attention heads and the vocabulary, and the sequence between them."""
    pipeline: int = 1
    """Stages of the base's layers. The last one trains the heads; the others only run forward, ahead of it."""
    expert: int = 1
    """Data-parallel ranks that split the experts of a mixture among themselves."""
    balance: Balance = "memory"
    """What pipeline stages have equally much of. `time` gives the last one, which trains the heads besides, fewer
    layers still, and the others more to hold: faster where that fits."""


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides `metrics.jsonl`, `report.html` and TensorBoard."""

    wandb: str = ""
    """Project of Weights & Biases to report to; needs the package wandb. Empty: none."""


MOST: dict[str, float] = {
    "data.sequence_length": 2**24,
    **dict.fromkeys(("data.micro_batch_size", "data.global_batch_size"), 2**20),
    "heads.num_depths": 256,
    **dict.fromkeys(("data.eval_sequences", "heads.fit_tokens", "loss.top_k", "loss.chunk_size"), 2**40),
    **dict.fromkeys(("loss.temperature", "loss.depth_weights", "optimizer.clip_grad"), 1e6),
    **dict.fromkeys(("loss.beta", "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay"), 10),
    **dict.fromkeys(("loss.hidden_mix", "optimizer.betas", "optimizer.momentum", "optimizer.eps"), 1),
    **dict.fromkeys(("parallel.tensor", "parallel.pipeline", "parallel.expert"), 2**20),
    **dict.fromkeys(("steps", "optimizer.warmup_steps", "keep_checkpoints"), 2**40),
    **dict.fromkeys(("log_interval", "eval_interval", "save_interval"), 2**40),
    "seed": 2**63 - 1,
}
"""Largest value of each number among the settings: what no run needs to exceed, and what torch can hold."""


SECTIONS = {
    "data": "train=[FILE]",
    "heads": "num_depths=3",
    "loss": "kind=kl",
    "optimizer": "lr=1e-3",
    "parallel": "tensor=1",
    "log": "wandb=PROJECT",
}
"""Sections of the settings, each with an example of what is in it."""
MOST_BRACKETS = 100
"""Brackets that may be open at once in settings: the time of YAML's scanner grows with the square of their depth."""
MOST_VALUES = 10_000
"""Values that a file of settings may have."""


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Read one with `load_config`; construction checks it.

    Raises:
        UserError: settings that cannot be run, all of them named.
    """

    model: str
    """Directory of the base, in the Hugging Face or the Megatron layout."""
    output: str
    """Directory of the run: checkpoints, resolved config, metrics."""
    data: DataConfig
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    steps: int = 1000
    """Optimizer steps of the whole run."""
    seed: int = 0
    """Of fresh heads, of the order of the data and of torch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; the optimizer works in fp32 either way."""
    backend: Literal["auto", "local", "te"] = "auto"
    """What layers are built from: `local`, mtpkit's own kernels and torch; `te`, Transformer Engine. `auto`: `te` where
    it and a GPU are there. Checkpoints are the same."""
    base_fp8: bool = False
    """Multiply in fp8 in the frozen base. Backend `local` keeps its weights in fp8 alone, in half the memory (those in
    checkpoints stay what they were); `te` keeps both."""
    cache: str = ""
    """Directory of the base's final hidden states, of all sequences, written first where they are not there yet: heads
    are then trained without the base in memory, which `heads.init: base` alone still loads, to start from. See
    `mtpkit data cache`. Empty: the base runs along."""
    cache_dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn"] = "auto"
    """Of the cache; `float8_e4m3fn` has a scale for each token. `auto`: `dtype`, with which losses are the same."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How fp32 matrices are multiplied, in torch's words (`torch.set_float32_matmul_precision`): `high` takes TF32 and
    `medium` bf16 inside, where the hardware has them, which is faster. Not of Transformer Engine, which takes TF32."""
    log_interval: int = 10
    """Steps between lines in the metrics files, and in what is printed where stderr is no terminal."""
    log: LogConfig = field(default_factory=LogConfig)
    eval_interval: int = 100
    """Steps between evaluations; there is always one after the last step."""
    save_interval: int = 200
    """Steps between checkpoints; there is always one after the last step."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Save a checkpoint after each evaluation with the best acceptance length so far, and keep it until one is better:
    OUTPUT/best, a model directory."""
    resume: bool = True
    """Go on from the newest checkpoint in `output`, if there is one."""

    def __post_init__(self) -> None:
        raise_problems("training config", list(self._out_of_range()) or list(self._problems()))

    def _out_of_range(self) -> Iterator[str]:
        """Yield one clause for every number that is none, or that exceeds MOST."""
        for key, value in _numbers(dataclasses.asdict(self)):
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{key} must be a finite number, not {value}"
            elif value > MOST[key]:
                yield f"{key} must be at most {MOST[key]:,}, not {shown(value)}"

    def _problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be run."""
        data, heads, loss, optimizer = self.data, self.heads, self.loss, self.optimizer
        least = {
            "data.sequence_length": heads.num_depths + 2,
            **dict.fromkeys(("data.micro_batch_size", "data.global_batch_size", "data.eval_sequences"), 1),
            **dict.fromkeys(("heads.num_depths", "steps", "keep_checkpoints"), 1),
            **dict.fromkeys(("log_interval", "eval_interval", "save_interval"), 1),
            **dict.fromkeys(("optimizer.warmup_steps", "optimizer.clip_grad", "optimizer.min_lr"), 0),
            **dict.fromkeys(("optimizer.weight_decay", "loss.beta", "heads.fit_tokens", "seed"), 0),
            **dict.fromkeys(("loss.chunk_size", "loss.top_k"), 0),
            **dict.fromkeys(("parallel.tensor", "parallel.pipeline", "parallel.expert"), 1),
        }
        for key, smallest in least.items():
            value = self._get(key)
            if value < smallest:
                yield f"{key} must be at least {smallest}, not {shown(value)}"
        for key, above in {"loss.temperature": 1e-3, "optimizer.lr": 1e-30, "optimizer.eps": 1e-30}.items():
            value = self._get(key)
            if value < above:
                yield f"{key} must be {'positive' if value <= 0 else f'at least {above}'}, not {value}"
        if not self.output:
            yield "output is empty: name a directory"
        if not data.train:
            yield "data.train is empty: name at least one file"
        for key, names in (("data.train", data.train), ("data.eval", data.eval)):
            if wrong := [name for name in names if not isinstance(name, str) or not name]:
                yield f"{key} has {wrong[0]!r}, which is no file: put names in quotes, {key}=['a[0-9].jsonl']"
        if self.cache and self.parallel.pipeline > 1:
            yield "parallel.pipeline splits a base that a cache replaces: set parallel.pipeline=1, or cache= to nothing"
        if data.sequence_length % max(1, self.parallel.tensor):
            yield (
                f"data.sequence_length {data.sequence_length} cannot be split over parallel.tensor="
                f"{self.parallel.tensor} ranks: make it a multiple"
            )
        if data.global_batch_size % max(1, data.micro_batch_size):
            yield (
                f"data.global_batch_size {data.global_batch_size} is not a multiple of "
                f"data.micro_batch_size {data.micro_batch_size}"
            )
        if loss.temperature != 1 and loss.kind != "kl":
            yield f"loss.temperature has no effect on loss.kind={loss.kind}: set loss.temperature=1 or loss.kind=kl"
        if loss.top_k and loss.kind != "kl":
            yield f"loss.top_k has no effect on loss.kind={loss.kind}: set loss.top_k=0 or loss.kind=kl"
        if not 0 <= loss.hidden_mix <= 1:
            yield f"loss.hidden_mix must be between 0 and 1, not {loss.hidden_mix}"
        if loss.hidden_mix and heads.num_depths == 1:
            yield "loss.hidden_mix has no effect on one depth: set loss.hidden_mix=0 or heads.num_depths=2 or more"
        if self.base_fp8 and self.dtype != "bfloat16":
            yield "base_fp8 needs dtype=bfloat16: set it, or base_fp8=false"
        if self.cache_dtype != "auto" and not self.cache:
            yield f"cache_dtype={self.cache_dtype} has no effect without a cache: set cache=DIR or cache_dtype=auto"
        if loss.depth_weights and len(loss.depth_weights) != heads.num_depths:
            yield f"loss.depth_weights has {len(loss.depth_weights)} entries for heads.num_depths={heads.num_depths}"
        if loss.depth_weights and (min(loss.depth_weights) < 0 or sum(loss.depth_weights) <= 0):
            yield "loss.depth_weights must not be negative, nor all zero"
        if optimizer.offload and optimizer.kind != "adamw":
            yield (
                f"optimizer.offload is for AdamW, not optimizer.kind={optimizer.kind}: set optimizer.offload=false or "
                "optimizer.kind=adamw"
            )
        if 0 < optimizer.lr < optimizer.min_lr:
            yield f"optimizer.min_lr {optimizer.min_lr} exceeds optimizer.lr {optimizer.lr}"
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"optimizer.betas must be at least 0 and below 1, not {list(optimizer.betas)}"
        if not 0 <= optimizer.momentum < 1:
            yield f"optimizer.momentum must be at least 0 and below 1, not {optimizer.momentum}"
        if optimizer.warmup_steps > self.steps:
            yield (
                f"optimizer.warmup_steps {optimizer.warmup_steps} exceeds steps {self.steps}: set "
                f"optimizer.warmup_steps={max(0, self.steps)} or raise steps"
            )

    def _get(self, key: str) -> Any:
        value: Any = self
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def depth_weights(self) -> tuple[float, ...]:
        """One weight a depth, summing to 1."""
        return self.loss.weights(self.heads.num_depths)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested settings, by key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{key}.{name}" if key else name)
    elif isinstance(value, tuple):
        for part in value:
            yield from _numbers(part, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def load_config(path: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
    """Read a YAML file and put `key=value` overrides on top, such as `loss.kind=tv` or `data.train=[a.txt,b.txt]`.

    Raises:
        UserError: an unreadable file, an unknown key, a missing or wrongly typed value, settings that clash.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    malformed = [override for override in overrides if "=" not in override]
    if malformed:
        raise UserError(f"overrides must be key=value, such as steps=100, not {listed(malformed)}")
    try:
        text = read_text(path) if path is not None else "{}"
        _require_shallow(text)
        text = quote_patterns(text)
        if _size(yaml.compose(text)) > MOST_VALUES:
            raise ValueError("its anchors stand for too much; write the settings out")
        from_file = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"config {path} is not YAML: {_cut(reason, 200)}") from error
    if not OmegaConf.is_dict(from_file):
        raise UserError(f"config {path} is a list, must be settings as key: value")
    source = "config overrides" if path is None else f"config {path}"
    try:
        return cast(TrainConfig, OmegaConf.to_object(_merge(source, from_file, overrides)))
    except MissingMandatoryValue as error:
        example = "data.train=[FILE]" if error.full_key in ("data", "data.train") else None
        raise UserError(f"{source}: {error.full_key} is required, set {example or f'{error.full_key}=...'}") from error
    except OmegaConfBaseException as error:  # an interpolation
        raise UserError(f"{source}: {_one_line(error)}") from error


def _require_shallow(text: str) -> None:
    """Check the depth of brackets before YAML is read, see MOST_BRACKETS.

    Raises:
        RecursionError: too many brackets are open at once.
    """
    opened = accumulate((sign in "[{") - (sign in "]}") for sign in text)
    if max(opened, default=0) > MOST_BRACKETS:
        raise RecursionError("it is nested too deeply")


def _size(node: Any, known: dict[int, float] | None = None) -> float:
    """Values in a YAML document with its anchors written out; infinity of one that holds itself."""
    known = {} if known is None else known
    if id(node) not in known:
        known[id(node)] = math.inf  # while its parts are counted
        parts = node.value if node is not None and not isinstance(node.value, str) else []
        each = (part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,)))
        known[id(node)] = 1 + sum(_size(part, known) for part in each)
    return known[id(node)]


def _merge(source: str, from_file: Any, overrides: list[str] | tuple[str, ...]) -> Any:
    """The settings of a file with the overrides on top.

    An override may index into the list of an earlier one, so that each is read together with those before it.

    Raises:
        UserError: some of them do not fit; it names all that do not.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    # The last four: an object where a list should be, numbers of too many digits, too deep nesting.
    unfit = OmegaConfBaseException, YAMLError, TypeError, ValueError, OverflowError, RecursionError
    settings, problems = OmegaConf.structured(TrainConfig), []
    good: list[str] = []
    try:
        settings = OmegaConf.merge(settings, _with_lists(from_file))
    except unfit as error:
        problems.append(f"{source}: {_one_line(error)}")
    merged = settings
    for text in overrides:
        try:
            _require_shallow(text)
            if text.split("=", 1)[0] in SECTIONS:
                _with_lists(OmegaConf.from_dotlist([text]))
            tried = [*good, _quoted(text)]
            merged = OmegaConf.merge(settings, _with_lists(OmegaConf.from_dotlist(tried)))
        except unfit as error:
            hint = ": put names in quotes, ['a[0-9].jsonl']" if text.startswith(("data.train=", "data.eval=")) else ""
            problems.append(f"override {_cut(text, 80)}: {_one_line(error)}{hint}")
        else:
            good = tried
    if problems:
        raise UserError(listed(problems, width=1000, separator="; "))
    return merged


def _with_lists(config: Any) -> Any:
    """Settings with a single file of data as a list of one, and an empty text as a list of none.

    Raises:
        TypeError: something else stands in the place of a section.
    """
    from omegaconf import OmegaConf

    for section, example in SECTIONS.items() if OmegaConf.is_dict(config) else ():
        if section not in config or OmegaConf.is_interpolation(config, section):
            continue
        if not OmegaConf.is_dict(config[section]):
            raise TypeError(f"{section} is a section of settings: set {section}.{example}, and so on")
    data = config.get("data")
    for key in ("train", "eval") if OmegaConf.is_dict(data) else ():
        if not OmegaConf.is_interpolation(data, key) and isinstance(value := data.get(key), str):
            data[key] = [value] if value else []
    return config


def _quoted(override: str) -> str:
    """`key=value` with texts in quotes that YAML would take for something else: nothing, `*.jsonl`, and `-`.

    Raises:
        YAMLError: the value is no YAML.
    """
    key, value = override.split("=", 1)
    if not value or (key == "heads.pattern" and value[0] not in "'\""):
        return f"{key}='{value}'"
    return f"{key}={quote_patterns(value, names=key in ('data.train', 'data.eval'))}"


def _one_line(error: Exception) -> str:
    """OmegaConf's message without its internals; it spreads them over lines."""
    from omegaconf.errors import ConfigKeyError

    if isinstance(error, ConfigKeyError):
        return describe_unknown(TrainConfig, str(error.full_key))
    message, *details = str(error).splitlines()
    key = next((line.split(":", 1)[1].strip() for line in details if line.strip().startswith("full_key")), "")
    return _cut(f"{key}: {message}" if key and f"'{key}'" not in message else message, 240)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved config as YAML, whole or not at all."""
    import yaml

    write_file(path, yaml.safe_dump(plain_values(dataclasses.asdict(config)), sort_keys=False))


def plain_values(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, dict):
        return {key: plain_values(entry) for key, entry in value.items()}
    return [plain_values(entry) for entry in value] if isinstance(value, (tuple, list)) else value
