"""The settings of a training run by section, with the range of each and the combinations that are refused.

Bounds are far beyond the needs of any run: they refuse typing errors, and values that torch cannot hold.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from mtpkit.config import Balance, HiddenState, LossKind
from mtpkit.config.checked import checked

HeadAttention = Literal["auto", "serving", "per_depth"]
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
    """Files, folders and globs of text, jsonl, csv or parquet, and directories of `mtpkit data prepare`. Each is a
    source, named after its file or folder, or by `name=path`."""
    eval: tuple[str, ...] = Field(default=(), title=_FILES.replace("train", "eval"))
    """Held-out data of the same kinds, to measure acceptance during training; empty: no evaluation."""
    text_column: str = "text"
    """Column of plain text in jsonl, csv and parquet; every token of it is trained on."""
    prompt_column: str = "prompt"
    """Column of the prompt in prompt/response data; its tokens are read but not trained on."""
    response_column: str = "response"
    """Column of the response in prompt/response data; its tokens are trained on."""
    messages_column: str = "messages"
    """Column of the conversations in chat data, rendered by the tokenizer's chat template; the assistant's messages are
    trained on. The columns of prepared data were chosen when it was prepared."""
    sequence_length: Annotated[int, Field(ge=3, le=2**24)] = 1024
    """Tokens of a packed sequence."""
    micro_batch_size: Ranks = 1
    """Sequences per forward and backward pass on one rank."""
    global_batch_size: Ranks = 8
    """Sequences per optimizer step over all ranks; a multiple of micro_batch_size times the number of ranks."""
    eval_sequences: Count = 32
    """Held-out sequences per source and evaluation, over all ranks."""

    @field_validator("train", "eval")
    @classmethod
    def _check_names(cls, names: tuple[str, ...], field: ValidationInfo) -> tuple[str, ...]:
        if "" in names:
            raise ValueError(f"must be {_FILES}")
        if field.field_name == "train" and not names:
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
    """The heads that are trained, and how they attend to the past."""

    num_depths: Annotated[int, Field(ge=1, le=256)] = 3
    """K, the number of tokens the heads learn to predict beyond the base's own."""
    init: Literal["auto", "checkpoint", "fresh", "base"] = "auto"
    """`checkpoint`: continue from the model's heads. `fresh`: new heads with random weights. `base`: new heads that
    start as copies of the base's last layers and learn in fewer steps. `auto`: `checkpoint` if the model has heads,
    else `fresh`."""
    fit_tokens: Amount = 65536
    """Tokens of the training data on which `init: base` fits the input projection of a head; 0: it starts as the sum of
    embedding and hidden state."""
    pattern: str = "auto"
    """Layers of one depth of new heads: M Mamba2, G gated delta net, * attention, + latent attention, - MLP, E mixture
    of experts. `auto`: the pattern of the model's heads; without heads that of its family, if all heads of the family
    have the same, else `*-`, or `*E` for a base with experts and no MLPs, with `+` in place of `*` for a base with
    latent attention."""
    repeated: bool = True
    """Fresh heads share one block over all depths, rather than one per depth."""
    attention: HeadAttention = "auto"
    """`serving`: each depth attends to what it attends to in decoding. `per_depth`: causal attention over each depth's
    own stream, which for distinct heads is the same as in decoding. `auto`: `serving` for a repeated head, `per_depth`
    for distinct heads."""
    reads_of_base: Literal["auto"] | HiddenState = "auto"
    """The hidden state of the base that the first depth reads: `after_final_norm` or `before_final_norm`; what is
    served must read the same. `auto`: that of the model's heads, or of its family where it has none."""
    reads_of_depth: Literal["auto"] | HiddenState = "auto"
    """The hidden state of a depth that the next depth reads, alike."""
    zero_first_embedding: Literal["auto"] | bool = "auto"
    """Depths read zeros in place of the embedding at position 0 of each document, as vLLM has it for some families.
    `auto`: as for `reads_of_base`."""
    recompute: bool = False
    """Recompute each depth's activations in the backward pass: a third more work in the heads, and memory for the
    activations of one depth instead of K."""


@checked("loss settings")
class LossConfig:
    """The training loss."""

    kind: LossKind = "kl"
    """`kl` forward KL to the base's distribution, `tv` total variation distance to it, `ce` against the tokens."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Temperature of both distributions in `kl`."""
    depth_weights: tuple[Annotated[float, Field(ge=0, le=1e6)], ...] = ()
    """Weight of each depth, normalised to sum to 1; empty: beta^(k-1)."""
    beta: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Decay of the default depth weights."""
    top_k: Amount = 0
    """Restrict the base's distribution in `kl` to its k most likely tokens, renormalised. 0: all tokens."""
    hidden_mix: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the base's hidden states in the inputs of each depth after the first in training; 0: the head's own
    hidden states alone, as in decoding."""
    hidden_mix_kind: MixKind = "sample"
    """`sample`: each position reads one of the two at random. `blend`: each position reads the weighted sum."""
    chunk_size: Amount = 0
    """Tokens whose logits are in memory at once; 0: as many as fit in 384 MiB on a GPU or 16 MiB on a CPU, at least
    64."""

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
    """`muon`: Muon for matrices and AdamW for the rest, which needs fewer but costlier steps."""
    lr: Annotated[float, Field(ge=1e-30, le=10)] = 1e-3
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0, le=10)] = 1e-4
    """Learning rate of the last step."""
    warmup_steps: Amount = 20
    """Steps in which the learning rate rises from zero to `lr`."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.01
    """Applies to matrices; norms and biases do not decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    momentum: Decay = 0.95
    """Decay rate of Muon's momentum."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    clip_grad: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Largest global norm of the gradient; 0: no clipping."""
    distributed: bool = True
    """Shard the fp32 weights and moments over data-parallel ranks."""
    offload: bool = False
    """Keep AdamW's fp32 weights and moments in host memory: saves 12 bytes per parameter on the GPU, and takes up to 24
    on the host, since torch rounds page-locked tensors up to powers of two. The update runs while the base runs on the
    next batch."""

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
    """Sizes of the parallel groups. The remaining factor of the number of processes is data-parallel."""

    tensor: Ranks = 1
    """Tensor-parallel ranks: they split matrices, attention heads and vocabulary, and between layers the sequence."""
    pipeline: Ranks = 1
    """Pipeline stages of the base's layers. In training the last one trains the heads; the others only run forward,
    ahead of it."""
    expert: Ranks = 1
    """Expert-parallel ranks: data-parallel ranks that split the experts of each layer."""
    balance: Balance = "memory"
    """Balance pipeline stages by memory or by time. `time` gives fewer layers to the last stage, which also trains the
    heads, and more to the others: faster if the memory suffices."""


@checked("log settings")
class LogConfig:
    """Destinations of metrics besides `metrics.jsonl`, `report.html` and TensorBoard."""

    wandb: str = ""
    """Weights & Biases project; needs the package wandb. Empty: none."""


@checked("training config")
class TrainConfig:
    """All settings of a run. Read one with `load_config`.

    Raises:
        UserError: wrong settings; names all of them.
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
    """Seed of new heads, of the order of the data, and of torch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and activations. `auto`: bfloat16 on a GPU, float32 on a CPU. The optimizer keeps gradients,
    master weights and moments of the heads in fp32 in either case."""
    backend: Literal["auto", "local", "te"] = "auto"
    """Implementation of the layers: `local`, mtpkit's kernels and torch; `te`, Transformer Engine. `auto`: `te` if
    it is installed and there is a GPU. Checkpoints are the same."""
    base_fp8: bool = False
    """Multiply in fp8 in the frozen base. Backend `local` keeps the base's matrices in fp8 only, in half the memory;
    `te` keeps bf16 copies too. Checkpoints hold the original weights."""
    cache: str = ""
    """Directory of the base's hidden states of all sequences, as heads read them. Missing ones are written first; then
    heads are trained without the base in memory (`heads.init: base` still loads it for the initial weights). See
    `mtpkit data cache`. Empty: the base runs in every step."""
    cache_dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn"] = "auto"
    """Dtype of the cache; `float8_e4m3fn` has a scale per token. `auto`: `dtype`, which leaves losses the same."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of fp32 matrix products, as in `torch.set_float32_matmul_precision`: `high` uses TF32 and `medium` bf16
    internally if the hardware has them, which is faster. Transformer Engine uses TF32 regardless."""
    log_interval: Count = 10
    """Steps between lines in the metrics files, and between printed lines if stderr is not a terminal."""
    log: LogConfig = LogConfig()
    eval_interval: Count = 100
    """Steps between evaluations; the last step is always followed by one."""
    save_interval: Count = 200
    """Steps between checkpoints; the last step is always followed by one."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Save a checkpoint after each evaluation with the best acceptance length so far, and keep it until a better one:
    OUTPUT/best, a model directory."""
    resume: bool = True
    """Continue from the newest checkpoint in `output`, if any."""

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
        if self.base_fp8 and self.dtype == "float32":  # of `auto` too, once it is resolved
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
