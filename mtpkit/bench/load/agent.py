"""Sessions with long prefixes that the prefix cache has: the load of an agent that reads much and
writes little, in a closed loop.

Each session has its own prefix and one request under way. A request's prompt is the prefix and new
tokens; its end lets the session's next one arrive, so that the number of requests stays the same.
As in the load that NVIDIA measures Nemotron 3.5 Lightning with, a session's first request is not
counted: all of them arrive at once.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from mtpkit.bench.load.run import check_acceptance
from mtpkit.bench.load.serving import Clock, Stream, percentiles_ms, serve
from mtpkit.bench.load.workload import (
    Drafts,
    Workload,
    draft_vocab_size,
    most_drafts,
    start_engine,
)
from mtpkit.bench.report import Column, significant
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import AgentConfig, LoadConfig, depth_rates
from mtpkit.bench.shapes import random_prompts
from mtpkit.engine import LLM
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model.hybrid import HybridModel

Case = tuple[int, Drafts]
"""Number of sessions, and K."""
_Sessions = Sequence[Sequence[Stream]]
"""The requests of each session, in order."""


@dataclass(frozen=True)
class AgentRow:
    """All sessions with one engine."""

    sessions: Annotated[int, Column("sessions", key=True)]
    k: Annotated[Drafts, Column("K", key=True)]
    tokens_per_s: Annotated[float, Column("tokens/s per GPU", ",.0f")]
    """Output tokens of the counted requests, over the time from the arrival of the first of them to
    the end of the last."""
    user_tokens_per_s: Annotated[float, Column("per user", ".1f")]
    """The same over the number of sessions, so that the time to first token is part of it."""
    ttft_p50_ms: Annotated[float, Column("TTFT ms p50", ".1f")]
    """Time to first token of the counted requests, from their arrival."""
    ttft_p99_ms: Annotated[float, Column("p99", ".1f")]
    hit_share: Annotated[float, Column("hit", ".1%")]
    """Share of all prompts' tokens that the cache had."""
    acceptance_length: Annotated[
        float,
        Column("acceptance length", lambda row: f"{row.acceptance_length:.3f}" if row.k else "-"),
    ]
    limit_share: Annotated[float, Column("of the limit", ".0%")]
    """Share of the speed of the limit: the matrices and the attention of the new prompt tokens at
    the matrix rate, and decoding all sessions' requests at the copy bandwidth, one after the
    other."""
    prefill_share: Annotated[float, Column("of it prefill", ".0%")]
    """Share of the limit's time that the prompts take."""
    step_ms: Annotated[float | None, Column("decoding alone, ms", lambda row: _ms(row.step_ms))]
    """Milliseconds per step while all sessions decode and no prompt is computed; None if there was
    no such step."""
    step_limit_ms: Annotated[float, Column("its limit, ms", lambda row: _ms(row.step_limit_ms))]
    """Milliseconds that the bytes and FLOPs of such a step take."""
    seconds: Annotated[float, Column("s", ".2f")]
    """The time that `tokens_per_s` is over."""


def _ms(value: float | None) -> str:
    return "-" if value is None else significant(value, 3)


class LongAgent(Workload[AgentRow]):
    """Sessions with long prefixes, every number of them with every K.

    All outputs must have the requested length, synthetic acceptance must match its rates, and the
    cache must have all prefixes.
    """

    name = "load_long_agent"
    row = AgentRow
    rule: AgentConfig

    def __init__(
        self, model: HybridModel, config: LoadConfig, rule: AgentConfig, clock: Clock
    ) -> None:
        if config.engine.prefix_cache_bytes == 0:
            raise UserError(
                "prefix_cache_bytes is 0, but the workload long-agent goes on from prefixes in the"
                " cache: leave it out"
            )
        super().__init__(model, config, rule, clock)

    @property
    def cases(self) -> Sequence[Case]:
        """Each number of sessions with each K."""
        return [(count, k) for count in self.rule.concurrency for k in super().cases]

    def label(self, case: Case) -> str:
        """See `Workload.label`."""
        return f"{case[0]} sessions, K = {case[1]}"

    def title(self, name: str) -> str:
        """See `Workload.title`."""
        rule = self.rule
        return (
            f"sessions of {rule.session_requests} requests, each with {rule.prefix_length:,} prompt"
            f" tokens in the cache, {rule.fresh_length:,} new ones and {rule.output_length:,}"
            f" output tokens: {name}, synthetic acceptance"
        )

    @property
    def about(self) -> dict[str, object]:
        """See `Workload.about`."""
        return {"acceptance": {str(k): self._rates(k) for k in super().cases}}

    def measure(self, case: Case) -> AgentRow:
        """Compute the prefixes, serve all sessions, then their last prompts once more, which the
        cache has whole."""
        count, k = case
        rates = self._rates(k)
        llm = start_engine(
            self.model,
            self.config,
            k,
            max_model_len=self.rule.longest,
            max_num_seqs=count,
            enable_prefix_caching=True,
            synthetic_acceptance=rates or None,
        )
        with self.draws:
            sessions = self._converse(llm, count)
            stats = llm.stats()
            step = self._decode_alone(llm, sessions)
        if k != "auto":
            check_acceptance(stats.acceptance, rates)
        hit = stats.cached_tokens / stats.prompt_tokens
        self._require_hits(case, stats.cached_tokens, hit, stats.preemptions)
        return self._row(case, sessions, step, hit, stats.acceptance_length)

    def _rates(self, k: Drafts) -> list[float]:
        """Synthetic acceptance of each depth."""
        depths = most_drafts(self.model, k)
        if self.config.acceptance is not None:
            return depth_rates(self.config.acceptance, depths)
        return self.rule.rates(k, depths)

    def _converse(self, llm: LLM, count: int) -> _Sessions:
        """Serve all sessions, after untimed requests that end with the prefixes."""
        rule = self.rule
        vocab_size = llm.model.mtpkit_config.vocab_size
        fresh = rule.session_requests * rule.fresh_length
        drawn = random_prompts(count, rule.prefix_length + fresh, vocab_size, self.config.seed)
        prefixes = [tokens[: rule.prefix_length] for tokens in drawn]
        serve(llm.engine, [Stream(0.0, prefix, 1) for prefix in prefixes], self.clock)
        llm.reset_stats()

        sessions: list[list[Stream]] = [[] for _ in range(count)]
        session_of: dict[int, int] = {}

        def next_request(index: int, now: float) -> Stream:
            first = rule.prefix_length + len(sessions[index]) * rule.fresh_length
            prompt = prefixes[index] + drawn[index][first : first + rule.fresh_length]
            stream = Stream(now, prompt, rule.output_length)
            sessions[index].append(stream)
            session_of[id(stream)] = index
            return stream

        def follow(ended: Stream, now: float) -> Stream | None:
            index = session_of[id(ended)]
            if len(sessions[index]) == rule.session_requests:
                return None
            return next_request(index, now)

        serve(llm.engine, [next_request(index, 0.0) for index in range(count)], self.clock, follow)
        return sessions

    def _decode_alone(self, llm: LLM, sessions: _Sessions) -> float | None:
        """Mean seconds of a step while the last requests of all sessions decode together."""
        last = [session[-1] for session in sessions]
        streams = [Stream(0.0, one.prompt, one.max_tokens) for one in last]
        serve(llm.engine, streams, self.clock)
        began = max(stream.times[0] for stream in streams)
        ended = min(stream.times[-1] for stream in streams)
        gaps = [
            after - before
            for stream in streams
            for before, after in pairwise(stream.times)
            if before >= began and after <= ended
        ]
        return statistics.mean(gaps) if gaps else None

    def _require_hits(self, case: Case, cached: int, hit: float, preemptions: int) -> None:
        """Refuse a run in which prefixes were computed once more."""
        wanted = case[0] * self.rule.session_requests * self.rule.prefix_length
        # A preempted request would count its tokens twice.
        if cached < wanted or preemptions:
            raise MtpkitError(
                f"{self.label(case)}: the prefix cache had {hit:.1%} of the prompts' tokens, fewer"
                " than the prefixes have: there is too little room for it, lower --concurrency or"
                " raise --gpu-memory-utilization, --num-blocks or --prefix-cache-bytes"
            )

    def _row(
        self, case: Case, sessions: _Sessions, step: float | None, hit: float, length: float
    ) -> AgentRow:
        count, k = case
        counted = [stream for session in sessions for stream in session[1:]]
        began = min(stream.arrival for stream in counted)
        seconds = max(stream.times[-1] for stream in counted) - began
        tokens = sum(stream.max_tokens for stream in counted)
        first, last = percentiles_ms([stream.first_seconds for stream in counted])
        assert first is not None and last is not None
        step_limit, prefill, decoding = self._limit(count, k, len(counted))
        return AgentRow(
            sessions=count,
            k=k,
            tokens_per_s=tokens / seconds,
            user_tokens_per_s=tokens / seconds / count,
            ttft_p50_ms=first,
            ttft_p99_ms=last,
            hit_share=hit,
            acceptance_length=length,
            limit_share=(prefill + decoding) / seconds,
            prefill_share=prefill / (prefill + decoding),
            step_ms=None if step is None else step * 1e3,
            step_limit_ms=step_limit * 1e3,
            seconds=seconds,
        )

    def _limit(self, count: int, k: Drafts, counted: int) -> tuple[float, float, float]:
        """Least seconds of a step of all sessions, of the counted prompts, and of decoding the
        counted outputs; for "auto" those of the K with the least sum."""
        rule = self.rule
        roofline = Roofline.of(
            self.model,
            self.config.engine,
            draft_vocab_size=draft_vocab_size(self.model, self.config),
        )
        rates = self.machine.rates()
        context = rule.prefix_length + rule.fresh_length + rule.output_length / 2
        found = []
        for drafts in range(most_drafts(self.model, k) + 1) if k == "auto" else [k]:
            prompt = roofline.prefill(1, rule.fresh_length, drafts, cached_len=rule.prefix_length)
            step = roofline.decode(count, self._rates(k)[:drafts], context)
            outputs = counted * (rule.output_length - 1)
            # Prompts are computed beside steps, which read the weights.
            prefill = counted * sum(
                work.seconds(math.inf, *rates[1:]) for work in prompt.works if work.name != "state"
            )
            found.append((step.seconds(*rates), prefill, outputs / step.limit_tokens_per_s(*rates)))
        return min(found, key=lambda one: one[1] + one[2])
