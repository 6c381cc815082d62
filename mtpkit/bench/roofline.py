"""Bytes and FLOPs of decoding and prefill, and the time that they take at a given bandwidth and
matrix rate.

A phase (the verification of a step, each draft after it) is a list of works. Each work needs the
results of the ones before it, so that it takes the longer of its bytes over the bandwidth and its
FLOPs over the matrix rate, and the times of all add up. Weights count once per phase; the committed
recurrent state and the keys and values of the context count too. Activations, the convolution's
window and the replay ring are left out: they are small, and their size is up to the engine.

The bandwidth is by custom that of a copy, half of whose bytes are written. Decoding reads nearly
all of its bytes, which some machines do faster, so the limits are a yardstick, not a law.

Shape legend: R rows (requests), T = 1 + K tokens per row, E = accepted drafts + 1, L committed
entries of a ring.
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import torch

from mtpkit.bench.report import Column, Result, significant
from mtpkit.bench.settings import USUAL_DRAFTS, RooflineConfig, depth_rates
from mtpkit.bench.shapes import choose_drafts
from mtpkit.bench.weights import LayerWeights, ModelWeights, draft_row_bytes
from mtpkit.config import ModelConfig
from mtpkit.engine.drafting import check_depths
from mtpkit.engine.loading import KV_DTYPES, windowed
from mtpkit.engine.requests.options import EngineOptions, Rollback
from mtpkit.errors import UserError
from mtpkit.kernels.ring import ring_capacity, ring_length
from mtpkit.model.flops import FORWARD, eh_proj_matrix
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import KINDS, caching_length

Part = Literal["attention", "state", "experts", "lm_head", "other matrices"]
"""What bytes belong to: keys and values, recurrent state, routed experts, the lm_head, and all
other matrices."""

_Layer = tuple[str, LayerWeights]
"""Letter of a layer, and its matrices in memory."""


@dataclass(frozen=True)
class Work:
    """Kernels of one kind."""

    name: Literal["matrices", "state", "attention"]
    bytes: float
    flops: float
    fp8_flops: float = 0.0
    """Those of `flops` that multiply in fp8, both weights and inputs."""
    parts: Mapping[Part, float] = field(default_factory=dict)
    """The bytes by what they belong to."""

    def seconds(self, bandwidth: float, matrix_rate: float, fp8_rate: float | None = None) -> float:
        """Time at these rates: that of the bytes or that of the FLOPs, whichever is longer.

        Args:
            fp8_rate: FLOPs per second of products in fp8; None: they run at `matrix_rate`.
        """
        others = self.flops - self.fp8_flops
        multiplied = others / matrix_rate + self.fp8_flops / (fp8_rate or matrix_rate)
        return max(self.bytes / bandwidth, multiplied)


@dataclass(frozen=True)
class Cost:
    """The cost of computing some tokens."""

    phases: Mapping[str, Sequence[Work]]
    """Works of each phase by its name; phases run one after another, too."""
    tokens: float

    @property
    def works(self) -> Iterator[Work]:
        """Works of all phases."""
        return itertools.chain.from_iterable(self.phases.values())

    @property
    def bytes(self) -> float:
        """Bytes moved in all."""
        return sum(work.bytes for work in self.works)

    @property
    def flops(self) -> float:
        """FLOPs in all; a multiplication and an addition are two."""
        return sum(work.flops for work in self.works)

    def seconds(self, bandwidth: float, matrix_rate: float, fp8_rate: float | None = None) -> float:
        """Time at these rates, in bytes and FLOPs per second; see `Work.seconds`."""
        return sum(work.seconds(bandwidth, matrix_rate, fp8_rate) for work in self.works)

    def parts(self, drafts: bool) -> Mapping[Part, float]:
        """Bytes by what they belong to, of the drafts or of everything else."""
        found = Counter[Part]()
        for phase, works in self.phases.items():
            if phase.startswith("draft") == drafts:
                for work in works:
                    found.update(work.parts)
        return found

    def limit_tokens_per_s(
        self, bandwidth: float, matrix_rate: float, fp8_rate: float | None = None
    ) -> float:
        """Tokens per second at these rates, in bytes and FLOPs per second; see `Work.seconds`."""
        return self.tokens / self.seconds(bandwidth, matrix_rate, fp8_rate)


def expected_length(acceptance: Sequence[float]) -> float:
    """E, tokens per step, from the conditional acceptance of each depth: 1 + a_1 + a_1 a_2 + ..."""
    length = 1.0
    reached = 1.0
    for rate in acceptance:
        reached *= rate
        length += reached
    return length


def length_deviation(acceptance: Sequence[float]) -> float:
    """Standard deviation of the tokens per step."""
    reached = list(itertools.accumulate(acceptance, operator.mul))
    # E[n^2] of the accepted drafts n is the sum of (2 d - 1) P(n >= d) over depths d; 1 + n has the
    # same variance as n.
    square = sum((2 * depth - 1) * share for depth, share in enumerate(reached, 1))
    return math.sqrt(max(0.0, square - sum(reached) ** 2))


def check_draft_vocab_size(size: int | None, config: ModelConfig) -> None:
    """Refuse a draft vocabulary larger than the model's.

    Raises:
        UserError: it is larger.
    """
    if size is not None and size > config.vocab_size:
        raise UserError(
            f"draft vocabulary of {size} tokens, but the model has {config.vocab_size}: give at"
            " most those"
        )


@dataclass(frozen=True)
class Roofline:
    """Costs of a model with activations of `dtype`, keys and values of `kv_dtype` and recurrent
    state of `state_dtype`.

    Raises:
        UserError: the draft vocabulary is larger than the model's.
    """

    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    state_rollback: Rollback = "replay"
    """Replay reads the state every step and writes it once per L tokens; snapshot writes it after
    each of T tokens."""
    ring_entries: int | None = None
    """L; None: as many as the engine's ring for T tokens holds."""
    draft_vocab_size: int | None = None
    """Rows of the lm_head that drafts read, in `dtype`; None: all, as they are held."""
    kv_dtype: torch.dtype | None = None
    """None: `dtype`."""
    draft_row_bytes: float | None = None
    """Bytes of a row of a copy of the lm_head that drafts read; None: there is no copy."""
    held: ModelWeights | None = None
    """The matrices in memory; None: all are in `dtype`."""

    def __post_init__(self) -> None:
        check_draft_vocab_size(self.draft_vocab_size, self.config)

    @classmethod
    def of(cls, model: HybridModel, engine: EngineOptions, **others: Any) -> "Roofline":
        """Costs of a model as memory holds it, in an engine with these options. Collective over
        pipeline stages.

        Args:
            others: `ring_entries` and `draft_vocab_size`.
        """
        weights = ModelWeights.of(model)
        copied: str | None = engine.draft_lm_head_dtype
        if copied == "auto" or weights.output_quantized:
            copied = None
        return cls(
            windowed(model.mtpkit_config, engine),
            next(model.parameters()).dtype,
            getattr(torch, engine.state_dtype),
            engine.state_rollback,
            kv_dtype=KV_DTYPES[engine.kv_cache_dtype],
            draft_row_bytes=None if copied is None else draft_row_bytes(model, copied),
            held=weights,
            **others,
        )

    @cached_property
    def weights(self) -> ModelWeights:
        """The matrices in memory."""
        return self.held or ModelWeights.in_dtype(self.config, self.dtype)

    def entries(self, k: int) -> int:
        """L of steps with K drafts."""
        return self.ring_entries or ring_capacity(ring_length(1 + k))

    def decode(
        self, batch_size: int, acceptance: Sequence[float] = (), context_len: float = 512
    ) -> Cost:
        """Cost of one decode step, which verifies K drafts of every row and then makes K new ones.

        Args:
            acceptance: [K] conditional acceptance of each depth; empty: plain decoding.
            context_len: mean tokens that a row attends to.

        Raises:
            UserError: the model's heads cannot make K drafts.
        """
        if acceptance:
            check_depths(self.config, len(acceptance))
        tokens = 1 + len(acceptance)
        length = expected_length(acceptance)
        config = self.config
        cached = batch_size * context_len

        def state_moves(again: int = 0) -> float:
            """Number of state reads and writes in a step that feeds each row T tokens and `again`
            of them twice."""
            written = (
                length / self.entries(tokens - 1 + again)
                if self.state_rollback == "replay"
                else tokens + again
            )
            return batch_size * (1 + written)

        def draft(depth: int) -> list[Work]:
            # Entries of the newly accepted tokens are made at depth 1; distinct heads make some
            # again at each depth.
            if config.mtp.repeated:
                entries, moved = (length, state_moves()) if depth == 1 else (1.0, float(batch_size))
            else:
                entries = length + depth - 1
                moved = state_moves(again=tokens - 2)
            sizes = batch_size * entries, batch_size, context_len, cached, moved
            return self._head(depth, *sizes)

        fed = batch_size * tokens
        base = self._layers(self._base, fed, context_len, cached, state_moves())
        phases = {"verify": _join([*base, self._output(fed)])}
        return Cost(
            phases | {f"draft {depth}": draft(depth) for depth in range(1, tokens)},
            batch_size * length,
        )

    def prefill(
        self,
        num_prompts: int,
        prompt_len: float,
        k: int = 0,
        max_num_batched_tokens: int | None = None,
        cached_len: float = 0,
    ) -> Cost:
        """Cost of prompts up to their first token; with K > 0 also of the heads' entries for them
        and K drafts each.

        Args:
            prompt_len: mean tokens of a prompt that are computed.
            cached_len: mean tokens before those, which a prefix cache has.
            max_num_batched_tokens: tokens of a step; every step reads all weights. None: one step
                for all.

        Raises:
            UserError: the model's heads cannot make K drafts.
        """
        if k:
            check_depths(self.config, k)
        config = self.config
        fed = num_prompts * prompt_len
        # Each token attends to those before it: to half of the new ones in the mean.
        context = cached_len + prompt_len / 2
        kept = num_prompts * (cached_len + prompt_len)
        passes = math.ceil(fed / (max_num_batched_tokens or fed))
        base = self._layers(
            self._base, fed, context, kept, num_prompts, passes, prompt=not cached_len
        )
        phases = {"base": _join([*base, self._output(num_prompts, passes)])}
        for depth in range(1, k + 1):
            # In a repeated head, depth 1 alone makes the entries of the prompt; each further depth
            # runs on one draft per prompt.
            if depth == 1 or not config.mtp.repeated:
                works = self._head(depth, fed, num_prompts, context, kept, num_prompts, passes)
            else:
                seen = cached_len + prompt_len
                works = self._head(depth, num_prompts, num_prompts, seen, kept, num_prompts)
            phases[f"draft {depth}"] = works
        return Cost(phases, fed)

    @property
    def _base(self) -> list[_Layer]:
        return [*zip(self.config.pattern, self.weights.base, strict=True)]

    def _head(
        self,
        depth: int,
        fed: float,
        drafted: int,
        context_len: float,
        cached: float,
        states: float,
        passes: int = 1,
    ) -> list[Work]:
        """Works of a depth, counted from 1, over `fed` tokens, of which `drafted` go through the
        lm_head; the rest as in `_layers`.

        In a repeated head, only the `drafted` tokens go through the layers after the last cache,
        see `mtp_forward`.
        """
        heads = self.config.mtp
        if heads.attention_window:
            seen = min(context_len, heads.attention_window + heads.attention_sinks)
            cached *= seen / max(1.0, context_len)
            context_len = seen
        pattern = self.config.mtp.pattern
        repeated = self.config.mtp.repeated
        head = self.weights.heads[0 if repeated else depth - 1]
        layers = [*zip(pattern, head.layers, strict=True)]
        cut = caching_length(pattern) if repeated else len(pattern)
        works = [
            _multiplied(
                {"other matrices": passes * head.eh_proj.bytes},
                eh_proj_matrix(self.config),
                head.eh_proj.fp8,
                fed,
            ),
            *self._layers(layers[:cut], fed, context_len, cached, states, passes),
            *self._layers(
                layers[cut:], drafted, context_len, cached, states, min(passes, math.ceil(drafted))
            ),
            self._draft_output(drafted, passes),
        ]
        return _join(works)

    def _layers(
        self,
        layers: Sequence[_Layer],
        fed: float,
        context_len: float,
        cached: float,
        states: float,
        passes: int = 1,
        prompt: bool = False,
    ) -> Iterator[Work]:
        """Works of layers over `fed` tokens.

        Args:
            context_len: mean number of tokens that each token attends to.
            cached: tokens whose keys and values are read or written.
            states: times that a request's state is read or written.
            passes: times that the weights are read.
            prompt: whether the tokens attend only to one another.
        """
        for letter, held in layers:
            # Of the experts, a pass reads only those that its tokens choose, fewer with fewer
            # tokens.
            read: dict[Part, float] = {
                "experts": passes * held.experts_read(fed / passes),
                "other matrices": passes * held.always.bytes,
            }
            used = KINDS[letter].matrices(self.config).used
            yield _multiplied(read, used, held.fp8, fed)
        kept = [KINDS[letter].memory(self.config) for letter, _ in layers]
        if update := sum(layer.state_flops for layer in kept):
            state_bytes = sum(layer.state for layer in kept) * self.state_dtype.itemsize
            moved = states * state_bytes
            yield Work("state", moved, fed * update, parts={"state": moved})
        # Latent attention takes fewer FLOPs among the tokens of one prompt, where keys and values
        # are expanded, than on cached latents.
        if scores := sum(
            (prompt and layer.prompt_score_flops) or layer.score_flops for layer in kept
        ):
            kv_bytes = sum(layer.kv for layer in kept) * (self.kv_dtype or self.dtype).itemsize
            read_kv = cached * kv_bytes
            flops = fed * scores * context_len
            yield Work("attention", read_kv, flops, parts={"attention": read_kv})

    def _output(self, fed: float, passes: int = 1) -> Work:
        """Work of the lm_head over `fed` tokens; a pass without any of the tokens reads nothing."""
        held = self.weights.output
        elements = self.config.vocab_size * self.config.hidden_size
        read = min(passes, math.ceil(fed)) * held.bytes
        return _multiplied({"lm_head": read}, elements, held.fp8, fed)

    def _draft_output(self, fed: float, passes: int) -> Work:
        """Work of the rows that drafts are chosen by over `fed` tokens, as in `_output`."""
        if self.draft_vocab_size is None and self.draft_row_bytes is None:
            return self._output(fed, passes)
        hidden = self.config.hidden_size
        rows = self.draft_vocab_size or self.config.vocab_size
        held = rows * (self.draft_row_bytes or hidden * self.dtype.itemsize)
        read = min(passes, math.ceil(fed)) * held
        return _multiplied({"lm_head": read}, rows * hidden, 0.0, fed)


def _multiplied(read: Mapping[Part, float], used: float, fp8: float, fed: float) -> Work:
    """Work of matrices: bytes that are read, and products of `fed` tokens with `used` elements, of
    which `fp8` have inputs in fp8."""
    return Work("matrices", sum(read.values()), FORWARD * used * fed, FORWARD * fp8 * fed, read)


def _join(works: Sequence[Work]) -> list[Work]:
    """Add up the works of a phase that have the same name."""
    groups: dict[str, list[Work]] = {}
    for work in works:
        groups.setdefault(work.name, []).append(work)
    joined = []
    for own in groups.values():
        parts = Counter[Part]()
        for work in own:
            parts.update(work.parts)
        joined.append(
            Work(
                own[0].name,
                sum(w.bytes for w in own),
                sum(w.flops for w in own),
                sum(w.fp8_flops for w in own),
                parts,
            )
        )
    return joined


@dataclass(frozen=True)
class StepRow:
    """The decode step of one batch size and K."""

    batch_size: Annotated[int, Column("batch", key=True)]
    k: Annotated[int, Column("K", key=True)]
    acceptance_length: Annotated[float, Column("acceptance length", ".2f")]
    bytes: Annotated[float, Column("GB per step", lambda row: significant(row.bytes / 1e9))]
    flops: Annotated[float, Column("GFLOP per step", lambda row: significant(row.flops / 1e9))]
    seconds: Annotated[float, Column("ms per step", lambda row: significant(row.seconds * 1e3))]
    limit_tokens_per_s: Annotated[float, Column("tokens/s", ".0f")]
    """Tokens per second at the given bandwidth and matrix rate."""


@dataclass(frozen=True)
class WorkRow:
    """One work of a decode step."""

    batch_size: Annotated[int, Column("batch", key=True)]
    k: Annotated[int, Column("K", key=True)]
    phase: Annotated[str, Column("phase", key=True)]
    work: Annotated[str, Column("work", key=True)]
    bytes: Annotated[float, Column("MB", lambda row: significant(row.bytes / 1e6))]
    flops: Annotated[float, Column("GFLOP", lambda row: significant(row.flops / 1e9))]
    seconds: Annotated[float, Column("ms", lambda row: significant(row.seconds * 1e3))]
    bound: Annotated[str, Column("bound by")]
    """Whether the bandwidth or the matrix rate sets the time."""


def tabulate_limits(
    model: ModelConfig,
    config: RooflineConfig,
    name: str = "model",
    weights: ModelWeights | None = None,
) -> tuple[Result[StepRow], Result[WorkRow]]:
    """Tabulate the decode steps of each batch size and K, and their works.

    Args:
        name: the model's name in the report.
        weights: its matrices in memory; None: all are in `config.dtype`.

    Raises:
        UserError: the heads cannot make K drafts, or the draft vocabulary is larger than the
            model's.
    """
    dtypes = getattr(torch, config.dtype), getattr(torch, config.engine.state_dtype)
    roofline = Roofline(
        model,
        *dtypes,
        config.engine.state_rollback,
        config.ring_entries,
        config.draft_vocab_size,
        KV_DTYPES[config.engine.kv_cache_dtype],
        held=weights,
    )
    acceptance = [
        depth_rates(config.acceptance, k)
        for k in choose_drafts(model, config.num_speculative_tokens, USUAL_DRAFTS)
    ]
    rates = config.rates
    bandwidth, matrix_rate, fp8_rate = rates
    held = roofline.weights
    settings = {
        "model": name,
        "context_length": config.context_length,
        "bandwidth": bandwidth,
        "matrix_rate": matrix_rate,
        "fp8_rate": fp8_rate,
        "weight_formats": [*held.formats],
        "acceptance": acceptance,
        "kv_cache_dtype": config.engine.kv_cache_dtype,
        "state_rollback": config.engine.state_rollback,
        "ring_entries": [roofline.entries(len(one)) for one in acceptance],
        "draft_vocab_size": config.draft_vocab_size,
    }
    steps = []
    works = []
    for size, drawn in itertools.product(config.batch_size, acceptance):
        cost = roofline.decode(size, drawn, config.context_length)
        k = len(drawn)
        totals = (cost.bytes, cost.flops, cost.seconds(*rates), cost.limit_tokens_per_s(*rates))
        steps.append(StepRow(size, k, cost.tokens / size, *totals))
        for phase, own in cost.phases.items():
            for work in own:
                seconds = work.seconds(*rates)
                bound = "matrix rate" if seconds > work.bytes / bandwidth else "bandwidth"
                numbers = (work.bytes, work.flops, seconds)
                works.append(WorkRow(size, k, phase, work.name, *numbers, bound))
    speeds = (
        f"{significant(bandwidth / 1e12, 3)} TB/s and {significant(matrix_rate / 1e12, 3)} TFLOP/s"
    )
    if any(work.fp8_flops for work in roofline.decode(1).works):
        speeds += f" ({significant(fp8_rate / 1e12, 3)} in fp8)"
    matrices = held.said(dtypes[0]) if held.formats else f"all matrices in {config.dtype}"
    title = f"decoding at {speeds}: {name}, {matrices}"
    return (
        Result("roofline", title, StepRow, steps, settings=settings),
        Result("works", f"works of each step: {name}", WorkRow, works, settings=settings),
    )
