"""The settings of a training run by section, with the range of each and the combinations that are
refused.

Bounds are far beyond the needs of any run: they refuse typing errors, and values that torch cannot
hold.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from mtpkit.config import Balance, HiddenState, LossKind
from mtpkit.config.checked import checked, field_of, keys_of
from mtpkit.config.words import LARGEST_COUNT
from mtpkit.data.options import DataOptions, LongConversations, Loss, OnBadRow

HeadAttention = Literal["auto", "serving", "per_depth"]
HeadInit = Literal["auto", "checkpoint", "fresh", "base"]
MixKind = Literal["sample", "blend"]

Count = Annotated[int, Field(ge=1, le=2**40)]
Amount = Annotated[int, Field(ge=0, le=2**40)]
Ranks = Annotated[int, Field(ge=1, le=2**20)]
Decay = Annotated[float, Field(ge=0, lt=1)]

_FILES = "a list of files: put names in quotes, data.train=['a[0-9].jsonl']"


@checked("data settings")
class DataConfig:
    """Data for training and evaluation."""

    train: tuple[str, ...] = Field(title=_FILES)
    """Training data: files, folders and globs of text, jsonl, csv or parquet, and directories
    written by `mtpkit data prepare`. Each entry is a source, named after its file or folder unless
    it is given as `name=path`."""
    eval: tuple[str, ...] = Field(default=(), title=_FILES.replace("train", "eval"))
    """Held-out data to measure acceptance during training, of the same kinds as `train`; empty: no
    evaluation."""
    text_column: str = "text"
    """Column of plain text in jsonl, csv and parquet; every token of it is trained on."""
    prompt_column: str = "prompt"
    """Column of the prompt in prompt/response data; its tokens are read but not trained on."""
    response_column: str = "response"
    """Column of the response in prompt/response data; its tokens are trained on."""
    messages_column: str = "messages"
    """Column of the conversations in chat data, rendered by the tokenizer's chat template; the
    assistant's messages are trained on. Columns have no effect on prepared data, since they were
    chosen when it was prepared."""
    loss: Loss = field_of(DataOptions, "loss")
    sample_per_turn: bool = field_of(DataOptions, "sample_per_turn")
    long_conversations: LongConversations = field_of(DataOptions, "long_conversations")
    on_bad_row: OnBadRow = field_of(DataOptions, "on_bad_row")
    bad_rows_allowed: float = field_of(DataOptions, "bad_rows_allowed")
    chat_template_kwargs: dict[str, Any] = field_of(DataOptions, "chat_template_kwargs")
    sequence_length: Annotated[int, Field(ge=3, le=2**24)] = 1024
    """Length of a packed sequence in tokens."""
    micro_batch_size: Ranks = 1
    """Sequences per forward and backward pass on one rank."""
    global_batch_size: Ranks = 8
    """Sequences per optimizer step over all ranks; a multiple of micro_batch_size times the number
    of ranks."""
    eval_sequences: Count = 32
    """Number of held-out sequences that each evaluation reads per source, over all ranks."""

    @field_validator("train", "eval")
    @classmethod
    def _check_names(cls, names: tuple[str, ...], field: ValidationInfo) -> tuple[str, ...]:
        if "" in names:
            raise ValueError(f"must be {_FILES}")
        if field.field_name == "train" and not names:
            raise ValueError("is empty: name at least one file")
        return names

    def problems(self) -> Iterator[str]:
        """Yield one clause for every wrong setting."""
        if self.global_batch_size % self.micro_batch_size:
            yield (
                f"global_batch_size {self.global_batch_size} is not a multiple of"
                f" data.micro_batch_size {self.micro_batch_size}"
            )
        yield from self.options.problems()

    @property
    def options(self) -> DataOptions:
        """The settings that say what is learnt."""
        return DataOptions(**{name: getattr(self, name) for name in keys_of(DataOptions)})


@checked("heads settings")
class HeadsConfig:
    """The heads that are trained, and how they attend to the past."""

    num_depths: Annotated[int, Field(ge=1, le=256)] = 3
    """K, the number of tokens that the heads learn to predict after the base's next token."""
    init: HeadInit = "auto"
    """`checkpoint`: continue from the model's heads. `fresh`: new heads with random weights.
    `base`: new heads that start as copies of the base's last layers and learn in fewer steps.
    `auto`: `checkpoint` if the model has heads, else `base` if the base has layers of all kinds in
    `pattern`, else `fresh`; the start of the log says which."""
    fit_tokens: Amount = 65536
    """Number of training tokens on which `init: base` fits the heads' input projection; 0: no fit,
    the projection starts as the sum of embedding and hidden state."""
    pattern: str = "auto"
    """Pattern of the layers of one depth of new heads: M Mamba2, G gated delta net, * attention, +
    latent attention, - MLP, E mixture of experts. `auto`: the pattern of the model's heads. For a
    model without heads: the base's `*` or `+` (M or G if the base has no attention), then `-`, or
    `E` if the base has no MLPs or if servers of its family build no heads with MLPs; for a
    Nemotron-H without experts `*` alone."""
    ffn_hidden_size: Literal["auto"] | Annotated[int, Field(ge=1, le=2**24)] = "auto"
    """Width of the MLPs in `pattern`, for bases without MLPs of their own: heads of a mixture of
    experts with an MLP in place of the experts read far less for each draft. `auto`: the width
    that the config of the base states."""
    repeated: bool = True
    """Let all depths of new heads share one block, instead of one block per depth."""
    attention: HeadAttention = "auto"
    """Attention of the heads in training. `serving`: each depth attends to the same past as in
    decoding. `per_depth`: causal attention over each depth's own stream, which for distinct heads
    is the same as in decoding. `auto`: `serving` for a repeated head, `per_depth` for distinct
    heads."""
    reads_of_base: Literal["auto"] | HiddenState = "auto"
    """Hidden state of the base that the first depth reads: `after_final_norm` or
    `before_final_norm`. The heads must read the same state when they are served. `auto`: the choice
    of the model's heads, or of its family if it has no heads."""
    reads_of_depth: Literal["auto"] | HiddenState = "auto"
    """Hidden state of a depth that the next depth reads, with the same choices as
    `reads_of_base`."""
    zero_first_embedding: Literal["auto"] | bool = "auto"
    """Let depths read zeros in place of the embedding at position 0 of each document, as vLLM does
    for some families. `auto`: as for `reads_of_base`."""
    attention_window: Literal["auto"] | Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = "auto"
    """Positions up to its own that a query of the heads' attention layers sees, in training as in
    decoding; 0: all. A draft then reads so many keys and values, however long the context is.
    `auto`: the choice of the model's heads; new heads have no window."""
    attention_sinks: Literal["auto"] | Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = "auto"
    """With a window: first positions of each document that queries see as well. `auto`: as for
    `attention_window`."""
    recompute: bool = False
    """Recompute each depth's activations in the backward pass. This adds a third to the work in the
    heads, and memory holds the activations of one depth instead of K."""


@checked("loss settings")
class LossConfig:
    """The training loss."""

    kind: LossKind = "kl"
    """Loss of each depth. `kl`: forward KL to the base's distribution. `tv`: total variation
    distance to it. `ce`: cross-entropy against the text's tokens."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Temperature of both distributions in `kl`."""
    depth_weights: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] = ()
    """Weight of each depth, normalised to sum to 1; empty: beta^(k-1) for depth k."""
    beta: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Decay of the default depth weights."""
    top_k: Amount = 0
    """Restrict the base's distribution in `kl` to its k most likely tokens, renormalised. 0: all
    tokens."""
    hidden_mix: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the base's hidden states in the training inputs of each depth after the first; 0:
    only the head's own hidden states, as in decoding."""
    hidden_mix_kind: MixKind = "sample"
    """Way of mixing the base's and the head's hidden states. `sample`: each position reads one of
    the two at random. `blend`: each position reads their weighted sum."""
    chunk_size: Amount = 0
    """Number of tokens whose logits are in memory at once; 0: as many as fit in 384 MiB on a GPU or
    16 MiB on a CPU, at least 64."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for every wrong setting."""
        for name, value, neutral in (
            ("temperature", self.temperature, 1),
            ("top_k", self.top_k, 0),
        ):
            if value != neutral and self.kind != "kl":
                yield (
                    f"{name} has no effect on loss.kind={self.kind}: set loss.{name}={neutral} or"
                    " loss.kind=kl"
                )
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
    """Optimizer of the heads. `muon`: Muon for matrices and AdamW for the rest; needs fewer but
    costlier steps."""
    lr: Annotated[float, Field(ge=1e-30, le=10)] = 1e-3
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0, le=10)] = 1e-4
    """Learning rate of the last step."""
    warmup_steps: Amount = 20
    """Steps in which the learning rate rises from zero to `lr`; at most `steps`, with a warning."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    """Weight decay of matrices; norms and biases do not decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    momentum: Decay = 0.95
    """Decay rate of Muon's momentum."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    clip_grad: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Global norm to which larger gradients are clipped; 0: no clipping."""
    distributed: bool = True
    """Shard the fp32 weights and moments over data-parallel ranks."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for every wrong setting."""
        if self.min_lr > self.lr:
            yield f"min_lr {self.min_lr} exceeds optimizer.lr {self.lr}"


@checked("parallel settings")
class ParallelConfig:
    """Sizes of the parallel groups. Data parallelism gets the remaining factor of the number of
    processes."""

    tensor: Ranks = 1
    """Number of tensor-parallel ranks, which split matrices, attention heads and vocabulary, and
    also the sequence between layers."""
    pipeline: Ranks = 1
    """Number of pipeline stages for the base's layers. In training the last stage trains the heads;
    the earlier stages only run forward, ahead of the last one."""
    expert: Ranks = 1
    """Number of expert-parallel ranks, which are data-parallel ranks that split the experts of each
    layer."""
    balance: Balance = "memory"
    """Balance pipeline stages by memory or by time. `time` gives fewer layers to the last stage,
    which also trains the heads, and more to the other stages, which is faster if the memory
    suffices."""


@checked("log settings")
class LogConfig:
    """Destinations of metrics besides `metrics.jsonl` and TensorBoard."""

    wandb: str = ""
    """Weights & Biases project that also gets the metrics; needs the package wandb. Empty: none."""


@checked("training config")
class TrainConfig:
    """All settings of a run. Read one with `load_config`.

    Raises:
        UserError: settings are wrong; names all of them.
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
    """Seed for the weights of new heads, the order of the data, and torch's generator."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations. `auto`: bfloat16 on a GPU, float32 on a CPU. The optimizer
    keeps gradients, master weights and moments of the heads in fp32 in either case."""
    backend: Literal["auto", "local", "te"] = "auto"
    """Implementation of the layers: `local`, mtpkit's kernels and torch; `te`, Transformer Engine.
    `auto`: `te` if it is installed and there is a GPU. Checkpoints do not depend on it."""
    base_fp8: bool = False
    """Quantise the linears and experts of a base in bf16 to fp8 while it is loaded, as
    `quantization="fp8"` of the engine does. Backend `local` keeps these matrices only in fp8, in
    half the memory; `te` has fp8 products of its own and keeps bf16 copies too. Checkpoints hold
    the original weights. A base that is stored quantised stays so in any case."""
    cache: str = ""
    """Directory that caches the base's hidden states of all sequences, as the heads read them.
    Missing states are written first; then the heads are trained without the base in memory
    (`heads.init: base` still loads it for the initial weights). See `mtpkit data cache`. Empty: the
    base runs in every step."""
    cache_dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn"] = "auto"
    """Dtype of the cache; `float8_e4m3fn` stores one scale per token. `auto`: the same as `dtype`,
    so that the losses do not change."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 matrix products, as in `torch.set_float32_matmul_precision`: `high` uses
    TF32 and `medium` bf16 internally if the hardware has them, which is faster. Transformer Engine
    uses TF32 regardless."""
    log_interval: Count = 10
    """Steps between lines in the metrics files, and between printed lines if stderr is not a
    terminal."""
    log: LogConfig = LogConfig()
    eval_interval: Count = 100
    """Steps between evaluations; the last step is always followed by one."""
    save_interval: Count = 200
    """Steps between checkpoints; the last step is always followed by one."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Save a checkpoint after each evaluation that gives the best acceptance length so far, and
    keep it until a better one is found. OUTPUT/best leads to it and is a model directory."""
    resume: bool = True
    """Continue from the newest checkpoint in `output`, if any."""

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: str) -> str:
        if not output:
            raise ValueError("is empty: name a directory")
        return output

    def problems(self) -> Iterator[str]:
        """Yield one clause for every wrong combination of settings."""
        data = self.data
        depths = self.heads.num_depths
        loss = self.loss
        if data.sequence_length < depths + 2:
            yield (
                f"data.sequence_length must be at least {depths + 2}, heads.num_depths and two"
                f" more, not {data.sequence_length}"
            )
        if self.cache and self.parallel.pipeline > 1:
            yield (
                "parallel.pipeline splits a base that a cache replaces: set parallel.pipeline=1, or"
                " an empty cache="
            )
        if data.sequence_length % self.parallel.tensor:
            yield (
                f"data.sequence_length {data.sequence_length} cannot be split over parallel.tensor="
                f"{self.parallel.tensor} ranks: make it a multiple"
            )
        if loss.hidden_mix and depths == 1:
            yield (
                "loss.hidden_mix has no effect on one depth: set loss.hidden_mix=0 or"
                " heads.num_depths=2 or more"
            )
        if self.base_fp8 and self.dtype == "float32":  # checked again once `auto` is resolved
            yield "base_fp8 needs dtype=bfloat16: set it, or base_fp8=false"
        if self.cache_dtype != "auto" and not self.cache:
            yield (
                f"cache_dtype={self.cache_dtype} has no effect without a cache: set cache=DIR or"
                " cache_dtype=auto"
            )
        if loss.depth_weights and len(loss.depth_weights) != depths:
            yield (
                f"loss.depth_weights has {len(loss.depth_weights)} entries for"
                f" heads.num_depths={depths}"
            )
