"""Settings of the benchmarks, each declared once: commands make their options from these fields.

Torch is not imported here, so that `--help` answers at once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mtpkit.config import LARGEST_COUNT
from mtpkit.config.checked import checked
from mtpkit.config.parts import Part
from mtpkit.engine import COMMAND_DEFAULTS, NOT_OPTIONS, EngineOptions, SamplingParams
from mtpkit.engine.requests.options import Drafts
from mtpkit.engine.requests.tree import parse_tree

if TYPE_CHECKING:
    from mtpkit.config import MtpConfig

MOST_RANDOM_TOKENS = 2**28
"""Most tokens of all random prompts together: as Python lists they take some 10 GB."""

Positive = Annotated[int, Field(ge=1)]
Length = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
FromZero = Annotated[int, Field(ge=0)]
Spread = Annotated[float, Field(ge=0, le=10)]
Rate = Annotated[float, Field(ge=0, le=1)]
FirstSeed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Counts = Annotated[
    tuple[Positive, ...], Field(min_length=1, title="a list of one or more whole numbers")
]
Rates = Annotated[tuple[Rate, ...], Field(min_length=1)]
DraftCounts = Annotated[
    tuple[Drafts, ...] | None, Field(min_length=1, title="a list of one or more whole numbers")
]
DraftCountsOrAuto = Annotated[
    tuple[Drafts | Literal["auto"], ...] | None,
    Field(min_length=1, title="a list of one or more numbers or 'auto'"),
]
"""The engine's `num_speculative_tokens`, of which a benchmark measures several."""

LARGE_SHAPES = (
    "nemotron-h-8b",
    "nemotron-3-nano",
    "nemotron-3.5-lightning",
    "deepseek-v3",
    "deepseek-v3-slice",
    "qwen3-next-slice",
    "qwen3.5-slice",
)
"""Names of published sizes, which `mtpkit.bench.sizes` has: billions of weights, too many for a CPU
to hold, or to run in reasonable time."""

SMALL_SHAPES = ("nemotron-h-tiny", "nemotron-3-tiny", "deepseek-v3-tiny", "qwen3-next-tiny")
"""Names of small models with the layer kinds of large ones."""

PublishedFormat = Literal["fp8-blocks", "int4", "nvfp4", "nemotron-nvfp4"]
"""Formats of published checkpoints: fp8 in blocks of 128 x 128 with inputs in fp8 (DeepSeek-V3,
Qwen), int4 in groups with inputs as they are (W4A16), NVFP4 likewise, and what Nemotron 3.5
Lightning is published in: experts and lm_head in NVFP4, Mamba2's matrices in fp8 with one scale
and inputs in fp8, attention and heads in bf16."""

HeadFormat = Literal["fp8", "fp8-blocks", "int4", "nvfp4"]
"""Formats of the layers of heads: fp8 with a scale per row and inputs in fp8, and those of
`PublishedFormat`."""

USUAL_ACCEPTANCE = (0.85,)
"""Synthetic rate of every depth where none is given."""

USUAL_DRAFTS = (0, 1, 3)
SPEEDUP_DRAFTS = (0, 1, 2, 3)
LOAD_DRAFTS = (0, 3)
"""Default K of `bench`, of `speedup` and of `bench load`, limited to the depths that the heads were
trained for."""


def _with_plain(counts: tuple[int, ...] | None) -> tuple[int, ...] | None:
    # Speedups are over K = 0, which is measured even if it was not asked for.
    return None if counts is None else tuple(sorted({0, *counts}))


def _sorted(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


@checked("speedup")
class SpeedupConfig:
    """Settings of `measure_speedup`."""

    num_speculative_tokens: Annotated[DraftCounts, AfterValidator(_with_plain)] = None
    """Numbers of drafts per step (K); 0 is always measured. By default 0 to 3, up to the depths
    that the heads were trained for."""
    batch_size: Annotated[Counts, AfterValidator(_sorted)] = (1, 8)
    """Numbers of requests that run at once, at most the number of prompts."""
    repeats: Positive = 3
    """Number of measurements; their median is reported."""
    sampling: Annotated[SamplingParams, Part(without=NOT_OPTIONS)] = COMMAND_DEFAULTS
    """Sampling of the prompts. Its seed (0 if None) is the first prompt's; each further prompt has
    the next seed."""
    engine: Annotated[EngineOptions, Part(without=("max_num_seqs", "warm_up", "seed"))] = (
        EngineOptions(enable_prefix_caching=False)
    )
    """Options of all engines. The prefix cache is off, since repeats would find their own prompts.
    Requests have seeds, and each engine has room for one batch."""


@checked("decode steps")
class StepsConfig:
    """Settings of benchmarks of decode steps, measured or computed."""

    batch_size: Counts = (1, 4, 16, 32, 64, 128)
    """Numbers of requests that run at once."""
    draft_vocab_size: Positive | None = None
    """Draft only among this many first tokens of the vocabulary; by default among all."""


@checked("synthetic load")
class SyntheticConfig:
    """Settings of benchmarks whose requests mean nothing."""

    random_experts: bool = False
    """In what is timed, draw each token's experts at random, all equally likely, in place of the
    router's choice, as the limit counts them. Needs synthetic acceptance."""


@checked("decode benchmark")
class DecodeConfig(StepsConfig, SyntheticConfig):
    """Settings of `measure_decode`. Drafts are verified if `acceptance` is None."""

    num_speculative_tokens: DraftCountsOrAuto = None
    """Numbers of drafts per step (K); auto: the engine chooses. By default 0, 1 and 3, up to the
    depths that the heads were trained for."""
    prompt_length: Positive = 512
    """Tokens of a random prompt."""
    max_tokens: Annotated[int, Field(ge=2)] = 256
    """Tokens generated for each prompt."""
    acceptance: Rates | None = (0.85,)
    """Synthetic rate at which the draft of each depth is accepted, given that all before it were.
    The last rate holds for all further depths."""
    other_acceptance: Rates | None = None
    """The same of every second request, for requests that differ; by default all are alike."""
    penalties: Annotated[
        SamplingParams,
        Part(only=("presence_penalty", "frequency_penalty", "repetition_penalty")),
    ] = SamplingParams()
    """Penalties of the greedy sampling."""
    repeats: Positive = 3
    """Number of measurements, which are added up."""
    engine: Annotated[
        EngineOptions,
        Part(
            without=("max_model_len", "max_num_seqs", "max_inter_token_latency", "warm_up", "seed")
        ),
    ] = EngineOptions(max_num_batched_tokens=8192, enable_prefix_caching=False)
    """Options of all engines. Prompts are not timed, so that steps may have more of their tokens
    than by default, and all are computed."""
    draft_cost: bool = False
    """Time steps that verify drafts but make none, too, and report what drafts read and take beside
    verification; for chains on one pipeline stage."""
    trace: bool = True
    """On a GPU, trace kernels after all timing; without the trace, host gaps are not reported."""
    seed: FirstSeed = 0
    """Seed of the random prompts."""

    def problems(self) -> Iterator[str]:
        """Yield a clause if experts are drawn but drafts are verified, or if only every second
        request has synthetic acceptance."""
        if self.other_acceptance is not None and self.acceptance is None:
            yield "other_acceptance needs synthetic acceptance of the others: give acceptance"
        if self.random_experts and self.acceptance is None:
            yield (
                "random_experts needs synthetic acceptance, since what a model with other experts"
                " accepts means nothing: give the rates of acceptance"
            )

    def largest(self, k: int | Literal["auto"], heads: "MtpConfig") -> int:
        """The largest K of a step."""
        if k != "auto":
            return k
        tree = self.engine.speculative_token_tree
        return heads.most_adaptive_drafts if tree is None else parse_tree(tree).depth

    def spine(self, k: int) -> int:
        """Drafts that are sure to lie on the path of first children, where synthetic acceptance
        accepts drafts."""
        if self.engine.speculative_token_tree is not None:
            return parse_tree(self.engine.speculative_token_tree).spine
        return k if self.engine.speculative_eagle_topk is None else 1

    @property
    def sampling(self) -> SamplingParams:
        """Greedy sampling of all requests, with the penalties."""
        return replace(self.penalties, temperature=0, max_tokens=self.max_tokens, ignore_eos=True)

    def rates(self, k: int) -> list[float] | None:
        """Synthetic acceptance rates of K depths; None if drafts are verified."""
        return None if self.acceptance is None else depth_rates(self.acceptance, k)

    def all_rates(self, k: int) -> list[list[float]] | None:
        """`rates` of each kind of requests."""
        if self.acceptance is None:
            return None
        given = (self.acceptance, self.other_acceptance)
        return [depth_rates(one, k) for one in given if one is not None]


_NOT_IN_A_LOAD = (
    # One process serves a load.
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "disable_custom_all_reduce",
    "draft_embedding_dtype",
    # The limit of a load, and the checks of its acceptance, are those of chains that are alike.
    "speculative_budget",
    "speculative_token_tree",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    # The requests say how long they are and how they are drawn.
    "max_model_len",
    "seed",
)
"""Options of an engine that do not apply to a load, or that a load sets itself."""


@checked("load benchmark")
class LoadConfig(SyntheticConfig):
    """Settings of `measure_load`: the engine, and for the workload `mixed` requests of lognormal
    lengths, by default those of docs/performance.md."""

    num_prompts: Positive = 512
    """Number of requests in a run."""
    prompt_median: Length = 400
    """Median length of a prompt in tokens; lengths are lognormal."""
    prompt_sigma: Spread = 0.9
    """Standard deviation of the logarithm of a prompt's length."""
    prompt_min: Length = 16
    """Shortest prompt: prompts that are drawn shorter get this length."""
    prompt_max: Length = 4000
    """Longest prompt: prompts that are drawn longer get this length."""
    output_median: Length = 200
    """Median length of an output in tokens; lengths are lognormal."""
    output_sigma: Spread = 0.7
    """Standard deviation of the logarithm of an output's length."""
    output_min: Length = 8
    """Shortest output: outputs that are drawn shorter get this length."""
    output_max: Length = 1000
    """Longest output: outputs that are drawn longer get this length."""
    request_rate: Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=True)], ...],
        Field(min_length=1, title="a list of one or more positive numbers"),
    ] = (math.inf,)
    """Requests per second, arriving as a Poisson process; inf: all requests are queued at once."""
    num_speculative_tokens: DraftCountsOrAuto = None
    """Numbers of drafts per step (K); auto: the engine chooses. By default 0 and 3, up to the
    depths that the heads were trained for."""
    acceptance: Rates | None = None
    """Synthetic rate at which the draft of each depth is accepted, given that all before it were.
    The last rate holds for all further depths. By default 0.85; with --workload long-agent, what
    NVIDIA measures Nemotron 3.5 Lightning with."""
    repeats: Positive = 3
    """Runs of each engine after its start. The first run is reported separately from the later
    ones."""
    engine: Annotated[EngineOptions, Part(without=_NOT_IN_A_LOAD)] = EngineOptions(
        max_num_seqs=128, max_num_batched_tokens=8192, enable_prefix_caching=False
    )
    """Options of all engines. A load measures throughput, for which more requests run at once, and
    steps are larger, than by default. Its prompts share no prefixes that a cache could find."""
    trace: bool = True
    """On a GPU, trace kernels after all timing; without the trace, the GPU's idle share is not
    known."""
    seed: FirstSeed = 7
    """Seed of lengths, tokens and arrivals. The default makes 305,049 prompt and 124,407 output
    tokens."""

    def problems(self) -> Iterator[str]:
        """Yield a clause for each empty range of lengths, and one if the prompts may have too many
        tokens."""
        for least, most in (("prompt_min", "prompt_max"), ("output_min", "output_max")):
            if getattr(self, least) > getattr(self, most):
                yield (
                    f"{least} is {getattr(self, least)}, must be at most {most},"
                    f" {getattr(self, most)}"
                )
        # Each run draws its prompts when it begins, so that further runs need no more memory.
        yield from too_many_tokens(
            self.prompt_max, self.num_prompts, 0, "prompt_max or num_prompts"
        )

    def rates(self, k: int) -> list[float]:
        """Synthetic acceptance rates of K depths."""
        return depth_rates(self.usual_acceptance, k)

    @property
    def usual_acceptance(self) -> tuple[float, ...]:
        """`acceptance`, or where none is given that of all workloads but `long-agent`."""
        return self.acceptance or USUAL_ACCEPTANCE


OF_MIXED = frozenset(
    {
        "num_prompts",
        "prompt_median",
        "prompt_sigma",
        "prompt_min",
        "prompt_max",
        "output_median",
        "output_sigma",
        "output_min",
        "output_max",
        "request_rate",
        "max_num_seqs",
    }
)
"""Settings of a `LoadConfig` that only the workload `mixed` has: others say themselves which
requests arrive, and how many run at once."""


@checked("stall benchmark")
class StallConfig:
    """Settings of the workload `stall`, besides those of a `LoadConfig`."""

    decoding_requests: Positive = 16
    """Number of requests that decode while prompts arrive, with --workload stall."""
    arriving_prompts: Positive = 8
    """Number of prompts that arrive, each when the prompt before has its first token, with
    --workload stall."""
    arriving_length: Length = 4096
    """Tokens of each arriving prompt, with --workload stall."""
    lone_length: Annotated[
        tuple[Length, ...], Field(min_length=1, title="a list of one or more whole numbers")
    ] = (128, 4096)
    """Lengths in tokens of lone prompts, which arrive while nothing else runs, with --workload
    stall."""

    def problems(self) -> Iterator[str]:
        """Yield a clause for each setting that makes too many tokens of prompts."""
        yield from too_many_tokens(
            self.arriving_length, self.arriving_prompts, 0, "arriving_length"
        )
        yield from too_many_tokens(max(self.lone_length), 1, 0, "lone_length")


@checked("turns benchmark")
class TurnsConfig:
    """Settings of the workload `turns`, besides those of a `LoadConfig`."""

    turns: Annotated[int, Field(ge=2)] = 8
    """Turns per conversation, with --workload turns. Each turn's prompt is the whole conversation
    so far, followed by new tokens."""
    shared: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of the prompts' tokens that come from earlier turns of the conversation, with
    --workload turns. The length of outputs follows from it."""
    turn_length: Length = 512
    """New tokens of each turn, with --workload turns."""
    conversations: Positive = 8
    """Number of conversations at once, with --workload turns. Each begins its next turn when the
    turn before has ended."""

    @property
    def output_len(self) -> int:
        """Tokens of each output. With n turns of u new tokens and outputs of o tokens, the prompts
        have n u + (u + o) n (n - 1) / 2 tokens, of which n u are new."""
        # The sum above, of which n u is a share of 1 - shared, solved for o / u.
        ratio = 2 * self.shared / ((1 - self.shared) * (self.turns - 1)) - 1
        return round(self.turn_length * ratio)

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.turn_length + self.output_len)

    def problems(self) -> Iterator[str]:
        """Yield a clause if no conversations satisfy the settings."""
        if self.output_len < 1:
            yield (
                f"{self.turns} turns share more than {self.shared} of their prompts whatever the"
                " outputs: raise shared or lower turns"
            )
        else:
            yield from too_many_tokens(
                self.longest, self.conversations, 0, "turn_length or conversations"
            )


@checked("agent benchmark")
class AgentConfig:
    """Settings of the workload `long-agent`, besides those of a `LoadConfig`: as in the load that
    NVIDIA measures Nemotron 3.5 Lightning with."""

    concurrency: Counts = (1, 4, 12, 16, 20, 32)
    """Numbers of sessions at once, with --workload long-agent. Each session has one request under
    way, and begins its next one when that has ended."""
    prefix_length: Length = 58_982
    """Tokens of each session's own prefix, which the cache has before the requests arrive, with
    --workload long-agent."""
    fresh_length: Length = 6_554
    """Tokens of each prompt after the prefix, with --workload long-agent."""
    output_length: Annotated[int, Field(ge=2, le=LARGEST_COUNT)] = 400
    """Tokens of each output, with --workload long-agent."""
    session_requests: Annotated[int, Field(ge=2)] = 5
    """Requests of a session, with --workload long-agent. The first one is not counted."""

    @property
    def longest(self) -> int:
        """Tokens of a request with its output."""
        return self.prefix_length + self.fresh_length + self.output_length

    def problems(self) -> Iterator[str]:
        """Yield a clause if the random prompts have too many tokens."""
        tokens = self.prefix_length + self.session_requests * self.fresh_length
        yield from too_many_tokens(
            tokens, max(self.concurrency), 0, "prefix_length, fresh_length or concurrency"
        )

    def rates(self, k: int | Literal["auto"], depths: int) -> list[float]:
        """Synthetic acceptance rates of K drafts, of which the largest number is `depths`.

        NVIDIA's runs accept two drafts of seven, and a third one at a rate of 0.687, in every step.
        For other K the rates of the depths make the acceptance lengths that NVIDIA gives: 2.874,
        3.421 and 3.687 with three, five and seven drafts.
        """
        return depth_rates(_LIGHTNING_SEVEN if k == 7 else _LIGHTNING_RATES, depths)


@checked("prefill benchmark")
class PrefillConfig:
    """Settings of the workload `prefill`, besides those of a `LoadConfig`."""

    batch_size: Positive = 64
    """Number of prompts, with --workload prefill."""
    prompt_length: Positive = 512
    """Tokens of a prompt, with --workload prefill."""

    def problems(self) -> Iterator[str]:
        """Yield a clause if the random prompts of one run have too many tokens."""
        yield from too_many_tokens(self.prompt_length, self.batch_size, 0)


@checked("training benchmark")
class TrainBenchConfig:
    """Settings of `measure_training`, besides those of the trainer."""

    steps: Positive = 5
    """Timed optimizer steps; their median is reported."""
    warm_up_steps: FromZero = 3
    """Optimizer steps before the timed ones."""
    document_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a document; by default each sequence is one document."""


@checked("limits")
class LimitsConfig:
    """Settings of benchmarks that compute times from rates."""

    acceptance: Rates = USUAL_ACCEPTANCE
    """Rate at which the draft of each depth is accepted, given that all before it were. The last
    rate holds for all further depths."""
    context_length: Annotated[float, Field(ge=0)] = 512
    """Mean tokens that a request attends to."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations."""
    engine: Annotated[
        EngineOptions,
        Part(only=("kv_cache_dtype", "state_dtype", "state_rollback", "quantization")),
    ] = EngineOptions()
    """The options of an engine that change the work of a step."""
    ring_entries: Positive | None = None
    """Committed entries that a replay ring holds; by default as many as the engine's ring for K."""
    bandwidth: Annotated[float, Field(ge=0.001)] = 4.3
    """Memory bandwidth in TB/s; a copy reaches the default on an H200."""
    matrix_rate: Annotated[float, Field(ge=0.001)] = 790.0
    """Matrix rate in TFLOP/s; an 8192^3 product in bf16 reaches the default on an H200."""
    fp8_rate: Annotated[float, Field(ge=0.001)] | None = None
    """Matrix rate in TFLOP/s of products whose inputs are in fp8, too; by default twice the matrix
    rate."""

    @property
    def rates(self) -> tuple[float, float, float]:
        """Bandwidth, matrix rate and fp8 rate, in bytes and FLOPs per second."""
        fp8_rate = 2 * self.matrix_rate if self.fp8_rate is None else self.fp8_rate
        return self.bandwidth * 1e12, self.matrix_rate * 1e12, fp8_rate * 1e12


@checked("roofline")
class RooflineConfig(LimitsConfig, StepsConfig):
    """Settings of `mtpkit bench roofline`."""

    num_speculative_tokens: DraftCounts = None
    """Numbers of drafts per step (K); by default 0, 1 and 3, up to the depths that the heads were
    trained for."""


@checked("heads")
class HeadsConfig(LimitsConfig):
    """Settings of `mtpkit bench heads`."""

    head: Annotated[tuple[str, ...] | None, Field(min_length=1)] = None
    """Layers of heads, such as '*E', or '*-:3712' for a dense FFN of that width where the base has
    none. By default the model's own."""
    head_format: Annotated[tuple[HeadFormat, ...] | None, Field(min_length=1)] = None
    """Formats of the heads' layers, beside `dtype`, which is always listed."""
    batch_size: Counts = (1, 16, 64)
    """Numbers of requests that run at once."""
    most_drafts: Positive = 7
    """Largest number of drafts per step (K) to be considered."""
    draft_vocab_sizes: Annotated[tuple[FromZero, ...], Field(min_length=1)] = (0,)
    """Numbers of tokens that drafts are chosen among; 0: all."""
    attention_windows: Annotated[tuple[FromZero, ...], Field(min_length=1)] = (0,)
    """Positions that the heads' attention sees; 0: the whole context."""


_LIGHTNING_SEVEN = (1.0, 1.0, 0.687, 0.0)
_LIGHTNING_RATES = (0.7825, 0.7825, 0.7825, 0.6797, 0.6797, 0.7049)
"""Conditional acceptance per depth of Nemotron 3.5 Lightning's head, see `AgentConfig.rates`."""

ON_CPU: Mapping[type, Mapping[str, Any]] = {
    DecodeConfig: {"batch_size": (1, 4), "prompt_length": 64, "max_tokens": 32, "repeats": 1},
    LoadConfig: {
        "num_prompts": 16,
        "prompt_median": 40,
        "prompt_max": 400,
        "output_median": 20,
        "output_max": 100,
        "repeats": 1,
    },
    StallConfig: {
        "decoding_requests": 4,
        "arriving_prompts": 2,
        "arriving_length": 256,
        "lone_length": (32, 256),
    },
    TurnsConfig: {"turn_length": 16, "conversations": 2},
    PrefillConfig: {"batch_size": 4, "prompt_length": 128},
    AgentConfig: {
        "concurrency": (1, 2),
        "prefix_length": 96,
        "fresh_length": 24,
        "output_length": 24,
        "session_requests": 3,
    },
    TrainBenchConfig: {"steps": 3, "warm_up_steps": 1},
}
"""Settings that commands start with on a CPU, which would need hours for the defaults."""


_OF_DRAFTS = (
    "speculative_budget",
    "speculative_token_tree",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "draft_vocab",
    "draft_embedding_dtype",
    "draft_lm_head_dtype",
    "draft_attention_window",
    "draft_attention_sinks",
)


def asked_drafts[K](
    given: tuple[K, ...] | None, engine: EngineOptions
) -> tuple[K | int, ...] | None:
    """The K that are asked for: those given, or else 0 and the depth of a `speculative_token_tree`;
    None if there are neither."""
    tree = engine.speculative_token_tree
    return (0, parse_tree(tree).depth) if given is None and tree is not None else given


def engine_arguments(
    engine: EngineOptions, k: int | Literal["auto"], **own: object
) -> dict[str, Any]:
    """Arguments of `LLM` for K drafts: the options, without those of drafts if K is 0, and those
    that a benchmark sets itself."""
    # A fixed tree must have the depth K, and a warning would say that the others do nothing.
    chosen = engine if k else without_drafts(engine)
    return vars(chosen) | {"num_speculative_tokens": k} | own


def without_drafts(engine: EngineOptions) -> EngineOptions:
    """The options with the usual values of those that say what is drafted."""
    usual = EngineOptions()
    return replace(engine, **{name: getattr(usual, name) for name in _OF_DRAFTS})


def depth_rates(acceptance: tuple[float, ...] | list[float], k: int) -> list[float]:
    """[K] conditional acceptance of each depth; the last one given holds for all further depths."""
    return [acceptance[min(depth, len(acceptance) - 1)] for depth in range(k)]


def too_many_tokens(
    prompt_len: int, batch_size: int, repeats: int, lower: str = "prompt_length"
) -> list[str]:
    """Return a clause if the random prompts of a warm-up and `repeats` runs have too many tokens,
    else none.

    Args:
        lower: the setting that the clause says to lower.
    """
    count = prompt_len * batch_size * (repeats + 1)
    if count <= MOST_RANDOM_TOKENS:
        return []
    return [
        f"the random prompts have {count:,} tokens in all, must be at most {MOST_RANDOM_TOKENS:,}:"
        f" lower {lower}"
    ]
