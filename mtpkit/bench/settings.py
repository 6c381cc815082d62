"""Settings of the benchmarks, each declared once: commands make their options from these fields.

Torch is not imported here, so that `--help` answers at once.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mtpkit.config import LARGEST_COUNT, Balance, LossKind, MtpConfig
from mtpkit.config.checked import checked, field_of, keys_of
from mtpkit.engine import EngineOptions, SamplingParams
from mtpkit.engine.options import Count, Drafts, Rollback
from mtpkit.engine.tree import parse_tree
from mtpkit.training.config.settings import HeadAttention, HeadsConfig, ParallelConfig, TrainConfig

MOST_RANDOM_TOKENS = 2**28
"""Most tokens of all random prompts together: as Python lists they take some 10 GB."""

Positive = Annotated[int, Field(ge=1)]
Length = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
FromZero = Annotated[int, Field(ge=0)]
Spread = Annotated[float, Field(ge=0, le=10)]
Rate = Annotated[float, Field(ge=0, le=1)]
FirstSeed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Counts = Annotated[tuple[Positive, ...], Field(min_length=1, title="a list of one or more whole numbers")]
StateDtype = Literal["float32", "bfloat16"]

BATCH_SIZES = (1, 4, 16, 32, 64, 128)
USUAL_DRAFTS, SPEEDUP_DRAFTS, LOAD_DRAFTS = (0, 1, 3), (0, 1, 2, 3), (0, 3)
"""K by default of `bench`, of `speedup` and of `bench load`, as far as the heads were trained."""


def _with_plain(ks: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if ks is None else tuple(sorted({0, *ks}))


def _sorted(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


def asked_ks[K](ks: tuple[K, ...] | None, tree: object) -> tuple[K | int, ...] | None:
    """`ks`, or else 0 and the depth of a `speculative_token_tree`; None: neither is given."""
    return (0, parse_tree(tree).depth) if ks is None and tree is not None else ks


def tree_settings(k: int | Literal["auto"]) -> dict[str, None]:
    """Settings of an engine with K that leave trees of drafts out where there are no drafts."""
    names = ("speculative_token_tree", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return {} if k else dict.fromkeys(names)


@checked("speedup")
class SpeedupConfig:
    """What `measure_speedup` measures."""

    ks: Annotated[tuple[Drafts, ...] | None, AfterValidator(_with_plain)] = Field(
        default=None, validation_alias="num_speculative_tokens"
    )
    """Drafts per step; 0 is always measured. By default 0 to 3, as far as the heads were trained."""
    batch_sizes: Annotated[Counts, AfterValidator(_sorted)] = Field(default=(1, 8), validation_alias="batch_size")
    """Requests at once, at most the prompts."""
    repeats: Positive = 3
    """Times that everything is measured; the median counts."""
    sampling: SamplingParams = SamplingParams(temperature=0, max_tokens=128)
    """Its seed, 0 if None, is the first prompt's; each further prompt has the next one."""
    block_size: int = field_of(EngineOptions, "block_size")
    max_model_len: int | None = field_of(EngineOptions, "max_model_len")
    max_num_batched_tokens: int | None = field_of(EngineOptions, "max_num_batched_tokens")
    gpu_memory_utilization: float = field_of(EngineOptions, "gpu_memory_utilization")
    state_rollback: Rollback = field_of(EngineOptions, "state_rollback")
    state_dtype: StateDtype = field_of(EngineOptions, "state_dtype")
    draft_sampling: bool = field_of(EngineOptions, "draft_sampling")
    draft_vocab: str | Path | list[Any] | tuple[Any, ...] | frozenset[Any] | None = field_of(
        EngineOptions, "draft_vocab"
    )
    draft_embedding_dtype: Literal["auto", "int8", "int4"] = field_of(EngineOptions, "draft_embedding_dtype")
    speculative_token_tree: str | list | tuple | None = field_of(EngineOptions, "speculative_token_tree")
    speculative_eagle_topk: int | None = field_of(EngineOptions, "speculative_eagle_topk")
    speculative_num_draft_tokens: int | None = field_of(EngineOptions, "speculative_num_draft_tokens")
    enable_prefix_caching: bool = field_of(EngineOptions, "enable_prefix_caching", default=False)
    """Let prompts go on from what earlier requests left. Off by default, since repeats would find their own prompts."""
    enforce_eager: bool = field_of(EngineOptions, "enforce_eager")
    tensor_parallel_size: int = field_of(EngineOptions, "tensor_parallel_size")
    pipeline_parallel_size: int = field_of(EngineOptions, "pipeline_parallel_size")
    enable_expert_parallel: bool = field_of(EngineOptions, "enable_expert_parallel")
    disable_custom_all_reduce: bool = field_of(EngineOptions, "disable_custom_all_reduce")

    @property
    def asked_ks(self) -> tuple[int, ...] | None:
        """See `asked_ks`."""
        return asked_ks(self.ks, self.speculative_token_tree)


@checked("decode benchmark")
class DecodeConfig:
    """What `measure_decode` measures."""

    batch_sizes: Counts = Field(default=BATCH_SIZES, validation_alias="batch_size")
    """Requests that run at once."""
    ks: Annotated[tuple[Drafts | Literal["auto"], ...] | None, Field(min_length=1)] = Field(
        default=None, validation_alias="num_speculative_tokens", title="a list of one or more numbers or 'auto'"
    )
    """Drafts per step; auto: as the engine chooses. By default 0, 1 and 3, as far as the heads were trained."""
    prompt_len: Positive = Field(default=512, validation_alias="prompt_length")
    """Tokens of a random prompt."""
    max_tokens: Annotated[int, Field(ge=2)] = 256
    """Tokens generated for each prompt."""
    acceptance: tuple[Rate, ...] | None = (0.85,)
    """Synthetic: rate at which each depth is accepted where all before it were; the last one holds for all further
    depths. None: drafts are verified."""
    draft_vocab: Path | Positive | None = None
    """File of the tokens to draft among, or how many of the first ones. By default all tokens."""
    draft_embedding_dtype: Literal["auto", "int8", "int4"] = field_of(EngineOptions, "draft_embedding_dtype")
    speculative_token_tree: str | list | tuple | None = field_of(EngineOptions, "speculative_token_tree")
    speculative_eagle_topk: int | None = field_of(EngineOptions, "speculative_eagle_topk")
    speculative_num_draft_tokens: int | None = field_of(EngineOptions, "speculative_num_draft_tokens")
    presence_penalty: float = field_of(SamplingParams, "presence_penalty")
    frequency_penalty: float = field_of(SamplingParams, "frequency_penalty")
    repetition_penalty: float = field_of(SamplingParams, "repetition_penalty")
    repeats: Positive = 3
    """Measurements, added up."""
    state_dtype: StateDtype = field_of(EngineOptions, "state_dtype")
    state_rollback: Rollback = field_of(EngineOptions, "state_rollback")
    block_size: int = field_of(EngineOptions, "block_size")
    max_num_batched_tokens: int | None = field_of(EngineOptions, "max_num_batched_tokens", default=8192)
    """Most tokens of a prefill step. More than an engine's 2048, since prompts are not timed."""
    enforce_eager: bool = field_of(EngineOptions, "enforce_eager")
    tensor_parallel_size: int = field_of(EngineOptions, "tensor_parallel_size")
    pipeline_parallel_size: int = field_of(EngineOptions, "pipeline_parallel_size")
    enable_expert_parallel: bool = field_of(EngineOptions, "enable_expert_parallel")
    disable_custom_all_reduce: bool = field_of(EngineOptions, "disable_custom_all_reduce")
    trace: bool = True
    """On a GPU, trace kernels when all is timed; without it there are no host gaps."""
    seed: FirstSeed = 0
    """Seed of the random prompts."""

    @property
    def asked_ks(self) -> tuple[int | Literal["auto"], ...] | None:
        """See `asked_ks`."""
        return asked_ks(self.ks, self.speculative_token_tree)

    def largest(self, k: int | Literal["auto"], heads: MtpConfig) -> int:
        """The largest K of a step."""
        if k != "auto":
            return k
        tree = self.speculative_token_tree
        return heads.most_adaptive_drafts if tree is None else parse_tree(tree).depth

    def spine(self, k: int) -> int:
        """Drafts that are sure to be on the path of first children, of which synthetic acceptance accepts some."""
        if self.speculative_token_tree is not None:
            return parse_tree(self.speculative_token_tree).spine
        return k if self.speculative_eagle_topk is None else 1

    @property
    def sampling(self) -> SamplingParams:
        """Greedy sampling of all requests, with the penalties."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
        )

    def rates(self, k: int) -> list[float] | None:
        """Synthetic acceptance of K depths."""
        return None if self.acceptance is None else depth_rates(self.acceptance, k)


@checked("prefill benchmark")
class PrefillConfig:
    """What `measure_prefill` measures."""

    batch_size: Positive = 64
    """Prompts."""
    prompt_len: Positive = Field(default=512, validation_alias="prompt_length")
    """Tokens of a prompt."""
    max_num_batched_tokens: Count = 8192
    """Most tokens of a step. More than an engine's 2048, so that matrix products are large."""
    k: Drafts = Field(default=0, validation_alias="num_speculative_tokens")
    """Drafts made after each prompt."""
    repeats: Positive = 5
    """Measurements; the median counts."""
    seed: FirstSeed = 0
    """Seed of the random prompts."""

    def problems(self) -> Iterator[str]:
        """Yield a clause where the random prompts are too many tokens."""
        yield from too_many_tokens(self.prompt_len, self.batch_size, self.repeats)


@checked("conversion benchmark")
class ConvertBenchConfig:
    """What `measure_conversion` measures."""

    gigabytes: Annotated[float, Field(gt=0, le=100_000)] = 2.0
    """Size of the synthetic checkpoint, in 10^9 bytes; the disk must have room for twice as much."""


@checked("load benchmark")
class LoadConfig:
    """What `measure_load` measures: requests whose lengths are lognormal, by default as in docs/performance.md."""

    num_prompts: Positive = 512
    """Requests of a run."""
    prompt_median: Length = 400
    """Median tokens of a prompt, whose lengths are lognormal."""
    prompt_sigma: Spread = 0.9
    """Standard deviation of the logarithm of its length."""
    prompt_min: Length = 16
    """Shorter prompts get this length."""
    prompt_max: Length = 4000
    """Longer prompts get this length."""
    output_median: Length = 200
    """Median tokens of an output, whose lengths are lognormal."""
    output_sigma: Spread = 0.7
    """Standard deviation of the logarithm of its length."""
    output_min: Length = 8
    """Shorter outputs get this length."""
    output_max: Length = 1000
    """Longer outputs get this length."""
    request_rates: Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=True)], ...],
        Field(min_length=1, title="a list of one or more positive numbers"),
    ] = Field(default=(math.inf,), validation_alias="request_rate")
    """Requests per second, which arrive as a Poisson process; inf: all are queued at once."""
    ks: Annotated[tuple[Drafts | Literal["auto"], ...] | None, Field(min_length=1)] = Field(
        default=None, validation_alias="num_speculative_tokens", title="a list of one or more numbers or 'auto'"
    )
    """Drafts per step; auto: as the engine chooses. By default 0 and 3, as far as the heads were trained."""
    acceptance: Annotated[tuple[Rate, ...], Field(min_length=1)] = (0.85,)
    """Synthetic: rate at which each depth is accepted where all before it were; the last one holds for all further
    depths."""
    max_num_seqs: int = field_of(EngineOptions, "max_num_seqs", default=128)
    """Most requests that run at once. More than an engine's 64, since a load is measured for its throughput."""
    max_num_batched_tokens: Count = 8192
    """Most tokens of a step. More than an engine's 2048, for the same reason."""
    max_mixed_tokens: int = field_of(EngineOptions, "max_mixed_tokens")
    max_inter_token_latency: float | None = field_of(EngineOptions, "max_inter_token_latency")
    repeats: Positive = 3
    """Runs of each engine after its start; the first one is reported apart from the others."""
    state_dtype: StateDtype = field_of(EngineOptions, "state_dtype")
    state_rollback: Rollback = field_of(EngineOptions, "state_rollback")
    enable_prefix_caching: bool = field_of(EngineOptions, "enable_prefix_caching", default=False)
    """Keep what earlier requests left. Off by default, since the prompts of the load share nothing."""
    prefix_cache_bytes: int | None = field_of(EngineOptions, "prefix_cache_bytes")
    prefix_cache_dtype: Literal["auto", "float32", "bfloat16"] = field_of(EngineOptions, "prefix_cache_dtype")
    prefix_cache_interval: int = field_of(EngineOptions, "prefix_cache_interval")
    block_size: int = field_of(EngineOptions, "block_size")
    gpu_memory_utilization: float = field_of(EngineOptions, "gpu_memory_utilization")
    enforce_eager: bool = field_of(EngineOptions, "enforce_eager")
    warm_up: bool = field_of(EngineOptions, "warm_up")
    trace: bool = True
    """On a GPU, trace kernels when all is timed; without it the GPU's idle share is not known."""
    seed: FirstSeed = 7
    """Seed of lengths, tokens and arrivals. The default makes 305,049 prompt and 124,407 output tokens."""

    def problems(self) -> Iterator[str]:
        """Yield a clause for each range of lengths that is empty, and where the prompts may be too many tokens."""
        for least, most in (("prompt_min", "prompt_max"), ("output_min", "output_max")):
            if getattr(self, least) > getattr(self, most):
                yield f"{least} is {getattr(self, least)}, must be at most {most}, {getattr(self, most)}"
        yield from too_many_tokens(self.prompt_max, self.num_prompts, 0, "prompt_max or num_prompts")

    def rates(self, k: int) -> list[float]:
        """Synthetic acceptance of K depths."""
        return depth_rates(self.acceptance, k)


@checked("stall benchmark")
class StallConfig:
    """What `measure_stall` measures; all else as in a `LoadConfig`."""

    decoding_requests: Positive = 16
    """Requests that decode, with --stall."""
    arriving_prompts: Positive = 8
    """Prompts that arrive meanwhile, each when the one before has its first token, with --stall."""
    arriving_length: Length = 4096
    """Tokens of each, with --stall."""
    lone_lengths: Annotated[tuple[Length, ...], Field(min_length=1, title="a list of one or more whole numbers")] = (
        Field(default=(128, 4096), validation_alias="lone_length")
    )
    """Tokens of prompts that arrive when nothing else runs, with --stall."""

    def problems(self) -> Iterator[str]:
        """Yield a clause where the prompts are too many tokens."""
        yield from too_many_tokens(self.arriving_length, self.arriving_prompts, 0, "arriving_length")
        yield from too_many_tokens(max(self.lone_lengths), 1, 0, "lone_length")


@checked("turns benchmark")
class TurnsConfig:
    """What `measure_turns` measures; all else as in a `LoadConfig`."""

    turns: FromZero = 0
    """In place of the load, measure conversations of so many turns without and with the prefix cache: each turn's
    prompt is all of the conversation so far and new tokens."""
    shared: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of the prompts' tokens that an earlier turn of the conversation had, with --turns: outputs are as long as
    makes it so."""
    turn_length: Length = 512
    """New tokens of each turn, with --turns."""
    conversations: Positive = 8
    """Conversations at once, with --turns; the next turn of each begins when its last one has ended."""

    @property
    def output_len(self) -> int:
        """Tokens of each output. With n turns of u new tokens and outputs of o tokens, the prompts have n u + (u + o) n
        (n - 1) / 2 tokens, of which n u are new."""
        ratio = 2 * self.shared / ((1 - self.shared) * max(1, self.turns - 1)) - 1
        return round(self.turn_length * ratio)

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.turn_length + self.output_len)

    def problems(self) -> Iterator[str]:
        """Yield a clause where the conversations cannot be had."""
        if self.turns == 1:
            yield "turns is 1, must be 0 or at least 2"
        elif self.turns and self.output_len < 1:
            yield (
                f"{self.turns} turns share more than {self.shared} of their prompts whatever the outputs: raise shared "
                "or lower turns"
            )
        elif self.turns:
            yield from too_many_tokens(self.longest, self.conversations, 0, "turn_length or conversations")


@checked("training benchmark")
class TrainBenchConfig:
    """What `measure_training` measures: one row per sequence length and loss."""

    sequence_lengths: Annotated[
        tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1, title="a list of one or more whole numbers")
    ] = Field(default=(4096,), validation_alias="sequence_length")
    """Tokens of a packed sequence."""
    losses: Annotated[tuple[LossKind, ...], Field(min_length=1)] = Field(default=("kl",), validation_alias="loss")
    """What the heads learn: kl, tv, ce."""
    k: Annotated[Drafts, Field(ge=1)] = Field(default=3, validation_alias="num_depths")
    """Depths."""
    pattern: str | None = None
    """Layers of one depth; by default those of the model's heads, or those that the trainer gives new heads."""
    distinct: bool = False
    """A block for each depth, with `per_depth` attention."""
    attention: HeadAttention = field_of(HeadsConfig, "attention")
    dtype: Literal["auto", "float32", "bfloat16"] = field_of(EngineOptions, "dtype")
    micro_batch_size: Positive = 1
    """Sequences of one forward and backward."""
    micro_batches: Positive = 1
    """Micro-batches per optimizer step on each data-parallel rank."""
    document_len: Positive | None = Field(default=None, validation_alias="document_length")
    """Tokens of a document; by default one per sequence."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the heads."""
    offload: bool = False
    """AdamW's state is in the host's memory. Its update overlaps the next step's base, whose time has the rest."""
    recompute: bool = False
    """Run each depth again in the backward."""
    cached: bool = False
    """Take the base's hidden states from the host's memory; no base."""
    tensor_parallel_size: int = field_of(ParallelConfig, "tensor")
    pipeline_parallel_size: int = field_of(ParallelConfig, "pipeline")
    balance: Balance = field_of(ParallelConfig, "balance")
    expert_parallel_size: int = field_of(ParallelConfig, "expert")
    backend: Literal["auto", "local", "te"] = field_of(TrainConfig, "backend", default="local")
    """Implementation of the layers, as in training. `local` by default, where training has `auto`: a command then
    measures the same layers on every GPU, with Transformer Engine or without."""
    base_fp8: bool = False
    """The base multiplies in fp8."""
    steps: Positive = 5
    """Optimizer steps; the median counts."""
    warm_up_steps: FromZero = 3
    """Steps before them."""
    seed: FirstSeed = 0
    """Seed of the random tokens."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for each pair of settings that exclude each other."""
        if self.attention == "serving" and self.distinct:
            yield "serving attention is for one repeated head; take per_depth for distinct ones"
        if self.offload and not self.warm_up_steps:
            yield "offload moves a step's update into the next step: take warm_up_steps of 1 or more"
        if self.cached and self.base_fp8:
            yield "cached hidden states leave no base for base_fp8; take one of them"


@checked("kernel benchmark")
class KernelConfig:
    """What `measure_kernels` measures."""

    rows: Counts = BATCH_SIZES[:3] + BATCH_SIZES[4:]
    """Requests of a step."""
    k: Drafts = Field(default=3, validation_alias="num_speculative_tokens")
    """Drafts per step: each request brings 1 + K tokens."""
    context_len: Positive = Field(default=512, validation_alias="context_length")
    """Tokens that each request has behind it; of prompts; training sequences have 8 x."""
    ops: tuple[str, ...] = ()
    """Only these."""
    state_dtype: StateDtype = field_of(EngineOptions, "state_dtype")
    draft_vocab_size: Positive | None = None
    """Draft among this many of the first tokens."""
    repeats: Positive = 20
    """Timings; the median counts."""


@checked("roofline")
class RooflineConfig:
    """What `mtpkit bench roofline` computes."""

    batch_sizes: Counts = Field(default=BATCH_SIZES, validation_alias="batch_size")
    """Requests that run at once."""
    ks: Annotated[tuple[Drafts, ...] | None, Field(min_length=1)] = Field(
        default=None, validation_alias="num_speculative_tokens", title="a list of one or more whole numbers"
    )
    """Drafts per step; by default 0, 1 and 3, as far as the heads were trained."""
    acceptance: Annotated[tuple[Rate, ...], Field(min_length=1)] = (0.85,)
    """Rate at which each depth is accepted where all before it were; the last one holds for all further depths."""
    context_len: Annotated[float, Field(ge=0)] = Field(default=512, validation_alias="context_length")
    """Mean tokens that a request attends to."""
    dtype: StateDtype = "bfloat16"
    """Type of weights, keys and values."""
    state_dtype: StateDtype = field_of(EngineOptions, "state_dtype")
    state_rollback: Rollback = field_of(EngineOptions, "state_rollback")
    ring_entries: Positive | None = None
    """Committed entries that a replay ring holds; by default as the engine's for K."""
    draft_vocab_size: Positive | None = None
    """Draft among this many of the first tokens."""
    bandwidth: Annotated[float, Field(ge=0.001)] = 4.3
    """TB/s; a copy reaches the default on an H200."""
    matrix_rate: Annotated[float, Field(ge=0.001)] = 790.0
    """TFLOP/s; an 8192^3 product in bf16 reaches the default on an H200."""


def engine_settings(config: object, **others: object) -> dict[str, Any]:
    """The settings that `LLM` has by the same names, and others in their place. Where none of them says otherwise there
    is no prefix cache, so that all prompts are computed."""
    shared = {name: value for name, value in vars(config).items() if name in keys_of(EngineOptions)}
    return {"enable_prefix_caching": False} | shared | others


def depth_rates(acceptance: tuple[float, ...] | list[float], k: int) -> list[float]:
    """[K] conditional acceptance of each depth; the last one given holds for all further depths."""
    return [acceptance[min(depth, len(acceptance) - 1)] for depth in range(k)]


def too_many_tokens(prompt_len: int, batch_size: int, repeats: int, lower: str = "prompt_length") -> list[str]:
    """A clause if random prompts for a warm-up and so many repeats are too many tokens, else none.

    Args:
        lower: the setting that makes them fewer.
    """
    count = prompt_len * batch_size * (repeats + 1)
    if count <= MOST_RANDOM_TOKENS:
        return []
    return [f"the random prompts have {count:,} tokens in all, must be at most {MOST_RANDOM_TOKENS:,}: lower {lower}"]
