"""Conversations of several turns without and with the prefix cache: time to first token, and
recomputed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from mtpkit.bench.load.serving import Clock, Stream, percentiles_ms, serve
from mtpkit.bench.load.workload import Drafts, Workload, start_engine
from mtpkit.bench.report import Column
from mtpkit.bench.settings import LoadConfig, TurnsConfig
from mtpkit.bench.shapes import random_prompts
from mtpkit.engine import LLM
from mtpkit.errors import MtpkitError
from mtpkit.model.hybrid import HybridModel

Case = tuple[Drafts, bool]
"""K, and whether there is a cache."""


@dataclass(frozen=True)
class TurnsRow:
    """All conversations with one engine, after an untimed run with other tokens."""

    k: Annotated[Drafts, Column("K", key=True)]
    cached: Annotated[bool, Column("cache", lambda row: "on" if row.cached else "off", key=True)]
    prompt_tokens: Annotated[int, Column("prompt tokens", ",")]
    prefilled_tokens: Annotated[int, Column("prefilled", ",")]
    """Prompt tokens that were computed."""
    hit_share: Annotated[float, Column("of the shareable hit", ".1%")]
    """Tokens that the cache had, as a share of those that earlier turns of the conversation had
    computed."""
    ttft_p50_ms: Annotated[float, Column("TTFT ms p50", ".1f")]
    """Time to first token of the turns after the first, from their arrival."""
    ttft_p99_ms: Annotated[float, Column("p99", ".1f")]
    seconds: Annotated[float, Column("s", ".2f")]
    """From the first arrival to the last output."""
    acceptance_length: Annotated[
        float,
        Column("acceptance length", lambda row: f"{row.acceptance_length:.2f}" if row.k else "-"),
    ]
    identical: Annotated[float | None, Column("same outputs", ".0%")] = None
    """Share of the conversations whose outputs equal those without the cache; None: without it, or
    with drawn experts, which differ from run to run."""


class Turns(Workload[TurnsRow]):
    """Conversations with every K, without and with the cache.

    In fp32 the outputs must not differ with the cache, unless experts are drawn.
    """

    name = "load_turns"
    row = TurnsRow

    def __init__(
        self, model: HybridModel, config: LoadConfig, rule: TurnsConfig, clock: Clock
    ) -> None:
        super().__init__(model, config, rule, clock)
        self.plain: dict[Drafts, list[list[int]]] = {}
        """Tokens of the conversations without the cache."""

    @property
    def cases(self) -> Sequence[Case]:
        """Each K, without and with the cache."""
        # Without the cache first: with the cache, outputs are compared with those.
        return [(k, cached) for k in super().cases for cached in (False, True)]

    def label(self, case: Case) -> str:
        """See `Workload.label`."""
        return f"K = {case[0]}, cache {'on' if case[1] else 'off'}"

    def title(self, name: str) -> str:
        """See `Workload.title`."""
        rule = self.rule
        return (
            f"{rule.conversations} conversations of {rule.turns} turns, {rule.turn_length:,} new"
            f" tokens and {rule.output_len:,} output tokens each, {rule.shared:.0%} shared: {name}"
        )

    @property
    def about(self) -> dict[str, object]:
        """See `Workload.about`."""
        return {"output_len": self.rule.output_len}

    def measure(self, case: Case) -> TurnsRow:
        """Hold all conversations twice, with different tokens, the first time untimed."""
        k, cached = case
        rule = self.rule
        llm = start_engine(
            self.model,
            self.config,
            k,
            max_model_len=rule.longest,
            max_num_seqs=rule.conversations,
            enable_prefix_caching=cached,
        )
        # Other tokens than in the timed run, or its prompts would be in the cache already.
        _converse(llm, rule, self.config.seed, self.clock)
        llm.reset_stats()
        with self.draws:
            seconds, streams, histories = _converse(llm, rule, self.config.seed + 1, self.clock)
        row = _row(llm, streams, seconds, k, cached)
        if self.config.random_experts:
            return row
        if cached:
            return replace(row, identical=self._require_same(k, histories))
        self.plain[k] = histories
        return row

    def _require_same(self, k: Drafts, histories: list[list[int]]) -> float:
        """Return the share of conversations whose tokens are those without the cache; refuse
        another share than 1 where all is exact."""
        pairs = zip(histories, self.plain[k], strict=True)
        same = sum(one == other for one, other in pairs) / len(histories)
        exact = (
            self.dtype == torch.float32
            and self.config.engine.state_dtype == "float32"
            and self.config.engine.kv_cache_dtype == "auto"
            and self.config.engine.prefix_cache_dtype in ("auto", "float32")
        )
        if exact and same < 1:
            raise MtpkitError(
                f"K = {k}: {1 - same:.0%} of the conversations differ with the prefix cache"
            )
        return same


def _row(
    llm: LLM, streams: list[list[Stream]], seconds: float, k: Drafts, cached: bool
) -> TurnsRow:
    stats = llm.stats()
    first, last = percentiles_ms([one.first_seconds for stream in streams for one in stream[1:]])
    assert first is not None and last is not None
    # The last token of an output was never fed to the model.
    before = sum(len(one.prompt) + one.max_tokens - 1 for stream in streams for one in stream[:-1])
    return TurnsRow(
        k=k,
        cached=cached,
        prompt_tokens=stats.prompt_tokens,
        prefilled_tokens=stats.prefilled_tokens,
        hit_share=stats.cached_tokens / before,
        ttft_p50_ms=first,
        ttft_p99_ms=last,
        seconds=seconds,
        acceptance_length=stats.acceptance_length,
    )


def _converse(
    llm: LLM, rule: TurnsConfig, seed: int, clock: Clock
) -> tuple[float, list[list[Stream]], list[list[int]]]:
    """Hold all conversations; a turn arrives when the one before ends.

    Returns:
        Seconds, the streams of each conversation's turns, and its tokens.
    """
    size = rule.turn_length
    vocab_size = llm.model.mtpkit_config.vocab_size
    drawn = random_prompts(rule.conversations, rule.turns * size, vocab_size, seed)
    histories = [list(new[:size]) for new in drawn]
    streams = [[Stream(0.0, list(history), rule.output_len)] for history in histories]

    def next_turn(ended: Stream, now: float) -> Stream | None:
        # By identity: streams with equal tokens are equal.
        index = next(index for index, turns in enumerate(streams) if turns[-1] is ended)
        histories[index] += ended.tokens
        turn = len(streams[index])
        if turn == rule.turns:
            return None
        histories[index] += drawn[index][turn * size : (turn + 1) * size]
        stream = Stream(now, list(histories[index]), rule.output_len)
        streams[index].append(stream)
        return stream

    seconds = serve(llm.engine, [turns[0] for turns in streams], clock, next_turn)
    return seconds, streams, histories
