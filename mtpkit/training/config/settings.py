"""The settings of a training run by section, with the range of each and what does not go together.

Bounds are far beyond what any run needs: they end nonsense early, and values that torch cannot hold.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from mtpkit.config.checked import checked
from mtpkit.model.stages import Balance
from mtpkit.training.loss import LossKind
from mtpkit.training.mixing import MixKind

HeadAttention = Literal["auto", "serving", "per_depth"]

Count = Annotated[int, Field(ge=1, le=2**40)]
Amount = Annotated[int, Field(ge=0, le=2**40)]
Ranks = Annotated[int, Field(ge=1, le=2**20)]
Decay = Annotated[float, Field(ge=0, lt=1)]

_FILES = "a list of files: put names in quotes, data.train=['a[0-9].jsonl']"


@checked("data settings")
class DataConfig:
    """What the heads are trained and evaluated on."""

    train: tuple[str, ...] = Field(title=_FILES)
    """Files, folders and globs of text, jsonl, csv or parquet, and directories of `mtpkit data prepare`. Each is a
    source, called after its file or folder, or as `name=path` says."""
    eval: tuple[str, ...] = Field(default=(), title=_FILES.replace("train", "eval"))
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
    sequence_length: Annotated[int, Field(ge=3, le=2**24)] = 1024
    """Tokens of a packed sequence."""
    micro_batch_size: Ranks = 1
    """Sequences of one forward and backward on one rank."""
    global_batch_size: Ranks = 8
    """Sequences of one optimizer step over all ranks; a multiple of micro_batch_size times the number of ranks."""
    eval_sequences: Count = 32
    """Held-out sequences of each source that are read at each evaluation, over all ranks."""

    @field_validator("train", "eval")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if "" in names:
            raise ValueError(f"must be {_FILES}")
        return names

    @field_validator("train")
    @classmethod
    def _check_train(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError("is empty: name at least one file")
        return names

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be run."""
        if self.global_batch_size % self.micro_batch_size:
            yield (
                f"global_batch_size {self.global_batch_size} is not a multiple of data.micro_batch_size "
                f"{self.micro_batch_size}"
            )


@checked("heads settings")
class HeadsConfig:
    """Which heads are trained, and how they see the past."""

    num_depths: Annotated[int, Field(ge=1, le=256)] = 3
    """K, the number of tokens the heads learn to predict beyond the base's own."""
    init: Literal["auto", "checkpoint", "fresh", "base"] = "auto"
    """`checkpoint`: go on from the heads that the model has. `fresh`: new ones at random. `base`: new ones that start
    as copies of the base's last layers, which learn in fewer steps. `auto`: its own if it has any, else `fresh`."""
    fit_tokens: Amount = 65536
    """Tokens of the training data by which `init: base` fits the projection of a head's inputs, see `fit`; 0: it starts
    as the sum of embedding and hidden state."""
    pattern: str = "auto"
    """Layers of one depth of new heads: M Mamba2, * attention, - MLP, E mixture of experts. `auto`: as the model's own
    heads, else by what the base has: `*-`, or `*E` where it has experts and no MLPs."""
    repeated: bool = True
    """Fresh heads share one block over all depths, rather than one per depth."""
    attention: HeadAttention = "auto"
    """`serving`: each depth sees what it will see when decoding. `per_depth`: plain causal attention over each depth's
    own stream. `auto`: `serving` for a repeated head; for distinct heads, whose depths have caches of their own,
    `per_depth` is what serving does."""
    recompute: bool = False
    """Run each depth again in the backward rather than keep its activations: a third more of the heads' work, memory
    for one depth instead of K."""


@checked("loss settings")
class LossConfig:
    """What the heads learn."""

    kind: LossKind = "kl"
    """`kl` forward KL to the base's distribution, `tv` total variation distance to it, `ce` against the tokens."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Of both distributions in `kl`."""
    depth_weights: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] = ()
    """Weight of each depth, normalised to sum to 1; empty: beta^(k-1)."""
    beta: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Decay of the default depth weights."""
    top_k: Amount = 0
    """Learn only so many of the base's most likely tokens in `kl`; its distribution over them is made to sum to 1, and
    the probability it gives to others is left out. 0: all tokens."""
    hidden_mix: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the base's own hidden states in what each depth after the first reads in training, see `HiddenMix`; 0:
    the head's own alone, as in decoding."""
    hidden_mix_kind: MixKind = "sample"
    """`sample`: each position reads one or the other, at random. `blend`: each reads the weighted sum."""
    chunk_size: Amount = 0
    """Tokens whose logits are held at once; 0: as many as 384 MiB hold on a GPU, 16 MiB on a CPU, at least 64."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be run."""
        for name, value, neutral in (("temperature", self.temperature, 1), ("top_k", self.top_k, 0)):
            if value != neutral and self.kind != "kl":
                yield (f"{name} has no effect on loss.kind={self.kind}: set loss.{name}={neutral} or loss.kind=kl")
        if self.depth_weights and not sum(self.depth_weights):
            yield "depth_weights must not all be zero"

    def weights(self, num_depths: int) -> tuple[float, ...]:
        """One weight per depth, summing to 1."""
        weights = self.depth_weights or tuple(self.beta**depth for depth in range(num_depths))
        return tuple(weight / sum(weights) for weight in weights)


@checked("optimizer settings")
class OptimizerConfig:
    """AdamW or Muon, with linear warm-up and cosine decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for matrices, AdamW for the rest; takes fewer steps, each with some work more."""
    lr: Annotated[float, Field(ge=1e-30, le=10)] = 1e-3
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0, le=10)] = 1e-4
    """Learning rate of the last step."""
    warmup_steps: Amount = 20
    """Steps from zero to `lr`."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    """Applies to matrices; norms and biases do not decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    momentum: Decay = 0.95
    """Used by Muon."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    distributed: bool = True
    """Each data-parallel rank keeps its share of the fp32 weights and moments, rather than all of them."""
    offload: bool = False
    """Keep AdamW's fp32 weights and moments in the host's memory rather than the GPU's: 12 bytes per parameter there,
    and up to 24 here, where torch rounds page-locked tensors up to powers of two. The update goes on while the base
    runs on the next batch."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be run."""
        if self.offload and self.kind != "adamw":
            yield (
                f"offload is for AdamW, not optimizer.kind={self.kind}: set optimizer.offload=false or "
                "optimizer.kind=adamw"
            )
        if self.min_lr > self.lr:
            yield f"min_lr {self.min_lr} exceeds optimizer.lr {self.lr}"


@checked("parallel settings")
class ParallelConfig:
    """How the model is split over processes; what is left of them is data-parallel, each with its own sequences."""

    tensor: Ranks = 1
    """Ranks that split matrices, attention heads and the vocabulary, and the sequence between them."""
    pipeline: Ranks = 1
    """Stages of the base's layers. The last one trains the heads; the others only run forward, ahead of it."""
    expert: Ranks = 1
    """Data-parallel ranks that split the experts of a mixture among themselves."""
    balance: Balance = "memory"
    """Balance pipeline stages by memory or by time. `time` gives the last stage, which trains the heads besides, fewer
    layers still, and the others more to hold: faster where that fits."""


@checked("log settings")
class LogConfig:
    """Where metrics go besides `metrics.jsonl`, `report.html` and TensorBoard."""

    wandb: str = ""
    """Project of Weights & Biases to report to; needs the package wandb. Empty: none."""


@checked("training config")
class TrainConfig:
    """All settings of a run. Read one with `load_config`.

    Raises:
        UserError: settings that cannot be run, all of them named.
    """

    model: str
    """Directory of the base, in the Hugging Face or the Megatron layout."""
    output: str
    """Directory of the run: checkpoints, resolved config, metrics."""
    data: DataConfig
    heads: HeadsConfig = HeadsConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    steps: Count = 1000
    """Optimizer steps of the whole run."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of fresh heads, of the order of the data and of torch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; the optimizer works in fp32 either way."""
    backend: Literal["auto", "local", "te"] = "auto"
    """What layers are built from: `local`, mtpkit's own kernels and torch; `te`, Transformer Engine. `auto`: `te` where
    it and a GPU are there. Checkpoints are the same."""
    base_fp8: bool = False
    """Multiply in fp8 in the frozen base. Backend `local` keeps its weights in fp8 alone, in half the memory (those in
    checkpoints stay what they were); `te` keeps both."""
    cache: str = ""
    """Directory of the base's final hidden states of all sequences. They are written first where they are missing.
    Heads are then trained without the base in memory; `heads.init: base` alone still loads it, to start from. See
    `mtpkit data cache`. Empty: the base runs along."""
    cache_dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn"] = "auto"
    """Of the cache; `float8_e4m3fn` has a scale for each token. `auto`: `dtype`, with which losses are the same."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How fp32 matrices are multiplied, in torch's words (`torch.set_float32_matmul_precision`): `high` takes TF32 and
    `medium` bf16 inside, where the hardware has them, which is faster. Transformer Engine takes TF32 regardless."""
    log_interval: Count = 10
    """Steps between lines in the metrics files, and in what is printed where stderr is no terminal."""
    log: LogConfig = LogConfig()
    eval_interval: Count = 100
    """Steps between evaluations; there is always one after the last step."""
    save_interval: Count = 200
    """Steps between checkpoints; there is always one after the last step."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Save a checkpoint after each evaluation with the best acceptance length so far, and keep it until one is better:
    OUTPUT/best, a model directory."""
    resume: bool = True
    """Go on from the newest checkpoint in `output`, if there is one."""

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: str) -> str:
        if not output:
            raise ValueError("is empty: name a directory")
        return output

    def problems(self) -> Iterator[str]:
        """Yield one clause for every setting that cannot be run together with others."""
        data, depths, loss, optimizer = self.data, self.heads.num_depths, self.loss, self.optimizer
        if data.sequence_length < depths + 2:
            yield (
                f"data.sequence_length must be at least {depths + 2}, heads.num_depths and two more, not "
                f"{data.sequence_length}"
            )
        if self.cache and self.parallel.pipeline > 1:
            yield "parallel.pipeline splits a base that a cache replaces: set parallel.pipeline=1, or cache= to nothing"
        if data.sequence_length % self.parallel.tensor:
            yield (
                f"data.sequence_length {data.sequence_length} cannot be split over parallel.tensor="
                f"{self.parallel.tensor} ranks: make it a multiple"
            )
        if loss.hidden_mix and depths == 1:
            yield "loss.hidden_mix has no effect on one depth: set loss.hidden_mix=0 or heads.num_depths=2 or more"
        if self.base_fp8 and self.dtype != "bfloat16":
            yield "base_fp8 needs dtype=bfloat16: set it, or base_fp8=false"
        if self.cache_dtype != "auto" and not self.cache:
            yield f"cache_dtype={self.cache_dtype} has no effect without a cache: set cache=DIR or cache_dtype=auto"
        if loss.depth_weights and len(loss.depth_weights) != depths:
            yield f"loss.depth_weights has {len(loss.depth_weights)} entries for heads.num_depths={depths}"
        if optimizer.warmup_steps > self.steps:
            yield (
                f"optimizer.warmup_steps {optimizer.warmup_steps} exceeds steps {self.steps}: set "
                f"optimizer.warmup_steps={self.steps} or raise steps"
            )

    def depth_weights(self) -> tuple[float, ...]:
        """One weight per depth, summing to 1."""
        return self.loss.weights(self.heads.num_depths)
