"""Latency of running requests while prompts of other requests arrive, and of prompts while nothing
else runs."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from mtpkit.bench.load.serving import Clock, Stream, percentiles_ms, take
from mtpkit.bench.load.workload import Drafts, Workload, most_drafts, start_engine
from mtpkit.bench.report import Column
from mtpkit.bench.settings import LoadConfig, StallConfig
from mtpkit.bench.shapes import random_prompts
from mtpkit.bench.timing import synchronize
from mtpkit.engine.requests.options import DEFAULT_BUDGET
from mtpkit.errors import UserError
from mtpkit.model.hybrid import HybridModel

_PROMPT_LEN = 128
"""Prompt length of the requests that decode."""
_QUIET_STEPS = 128
_SETTLING_STEPS = 8
"""Steps in which nothing arrives: timed steps, and untimed steps before them."""
_LONE_TOKENS = 8
_LONE_REPEATS = 5
"""Tokens generated for a lone prompt, and how often each length is timed."""
_SHORTEST_CHUNK = 64
_STEPS_OF_PROMPT = 4
"""Shortest prefill chunk of a step that has room for it, and further steps that each prompt may
take."""


@dataclass(frozen=True)
class StallRow:
    """Latencies of requests that decode without and with prompts arriving one after another, and of
    lone prompts."""

    k: Annotated[Drafts, Column("K", key=True)]
    quiet_p50_ms: Annotated[float | None, Column("ITL ms p50", ".2f")]
    """Inter-token latency of the decoding requests while nothing arrives."""
    quiet_p99_ms: Annotated[float | None, Column("p99", ".2f")]
    stalled_p50_ms: Annotated[float | None, Column("with prompts: p50", ".2f")]
    """The same latency from the first prompt's arrival to the last prompt's first token."""
    stalled_p99_ms: Annotated[float | None, Column("p99 with prompts", ".2f")]
    stall: Annotated[float | None, Column("ratio of p99", ".2f")]
    """p99 with prompts over p99 without."""
    lone_ms: Annotated[
        list[float],
        Column("lone prompts: TTFT ms", lambda row: " / ".join(f"{ms:.1f}" for ms in row.lone_ms)),
    ]
    """Median time to first token of prompts on their own, in the order of `lone_length`."""


class Stall(Workload[StallRow]):
    """Prompts that arrive while requests decode, and lone prompts, with every K, after an untimed
    run of the whole measurement."""

    name = "load_stall"
    row = StallRow

    def title(self, name: str) -> str:
        """See `Workload.title`."""
        rule = self.rule
        return (
            f"{rule.decoding_requests} requests decode while {rule.arriving_prompts} prompts of"
            f" {rule.arriving_length:,} tokens arrive; lone prompts of"
            f" {' / '.join(f'{n:,}' for n in rule.lone_length)} tokens: {name}"
        )

    def measure(self, case: Drafts) -> StallRow:
        """Time the running requests and the prompts of one K."""
        bench = _Bench(self.model, self.config, self.rule, case, self.clock)
        bench.warm_up()
        with self.draws:
            return bench.measure()


class _Bench:
    """One engine, its running requests and its prompts."""

    def __init__(
        self,
        model: HybridModel,
        config: LoadConfig,
        stall: StallConfig,
        k: Drafts,
        clock: Clock,
    ) -> None:
        self.config = config
        self.stall = stall
        self.k = k
        self.clock = clock
        self.device = next(model.parameters()).device
        depths = most_drafts(model, k)
        longest = max(stall.arriving_length, *stall.lone_length)
        # Decoding requests have room for all tokens that they can make in the steps which the
        # measurement takes.
        budget = config.engine.max_num_batched_tokens or DEFAULT_BUDGET
        left = budget - stall.decoding_requests * (1 + depths)
        chunk = max(1, min(_SHORTEST_CHUNK, left))
        steps = sum(
            count * (_STEPS_OF_PROMPT + math.ceil(length / chunk))
            for count, length in (
                (stall.decoding_requests, _PROMPT_LEN),
                (stall.arriving_prompts, stall.arriving_length),
            )
        )
        self.room = (1 + depths) * (1 + _SETTLING_STEPS + _QUIET_STEPS + steps)
        self.llm = start_engine(
            model,
            config,
            k,
            max_model_len=max(longest + _LONE_TOKENS, _PROMPT_LEN + self.room),
            max_num_seqs=1 + stall.decoding_requests,
        )
        self.streams: dict[str, Stream] = {}
        self.seed = config.seed

    def warm_up(self) -> None:
        """Run the whole measurement once, so that kernels are compiled and graphs captured."""
        self.measure(lone_repeats=1)

    def measure(self, lone_repeats: int = _LONE_REPEATS) -> StallRow:
        """Time lone prompts, then decoding requests without and with arriving prompts."""
        lone = [
            statistics.median(self._lone(length) for _ in range(lone_repeats)) * 1e3
            for length in self.stall.lone_length
        ]
        decoding = [self._add(_PROMPT_LEN, self.room) for _ in range(self.stall.decoding_requests)]
        while not all(self.streams[one].times for one in decoding):
            self._step()
        self._steps(decoding, _SETTLING_STEPS)
        quiet = percentiles_ms(self._gaps(decoding, lambda: self._steps(decoding, _QUIET_STEPS)))
        stalled = percentiles_ms(self._gaps(decoding, lambda: self._arrivals(decoding)))
        # They have room for more tokens than this took: the rest would run beside the next
        # measurement.
        for request_id in decoding:
            self.llm.engine.abort(request_id)
        while self.llm.engine.has_unfinished:
            self._step()
        ratio = stalled[1] / quiet[1] if stalled[1] is not None and quiet[1] else None
        return StallRow(self.k, quiet[0], quiet[1], stalled[0], stalled[1], ratio, lone)

    def _lone(self, length: int) -> float:
        """Seconds to the first token of a prompt while nothing else runs, not even a step that was
        launched before the last request had ended."""
        synchronize(self.device)
        stream = self.streams[self._add(length, _LONE_TOKENS)]
        while self.llm.engine.has_unfinished:
            self._step()
        return stream.first_seconds

    def _arrivals(self, decoding: list[str]) -> None:
        """Let the prompts arrive, each when the prompt before has its first token."""
        for _ in range(self.stall.arriving_prompts):
            arrived = self._add(self.stall.arriving_length, 1)
            while not self.streams[arrived].times:
                self._steps(decoding, 1)

    def _gaps(self, decoding: list[str], window: Callable[[], None]) -> list[float]:
        """Seconds between consecutive outputs of the decoding requests, the later output being in
        the window."""
        streams = [self.streams[one] for one in decoding]
        # Gap i lies between outputs i and i + 1: the first one that ends in the window is count -
        # 1.
        before = [len(stream.times) for stream in streams]
        window()
        return [
            gap
            for stream, count in zip(streams, before, strict=True)
            for gap in stream.gaps[count - 1 :]
        ]

    def _steps(self, decoding: list[str], count: int) -> None:
        """Step `count` times.

        Raises:
            UserError: a decoding request has ended.
        """
        for _ in range(count):
            self._step()
            if any(len(self.streams[one].tokens) >= self.room for one in decoding):
                raise UserError(
                    f"K = {self.k}: requests decoded {self.room} tokens before all prompts had"
                    f" arrived; lower arriving_prompts ({self.stall.arriving_prompts})"
                )

    def _step(self) -> None:
        take(self.llm.engine.step(), self.streams, self.clock.now())

    def _add(self, prompt_len: int, max_tokens: int) -> str:
        """Add a request with other tokens than all before; returns its id."""
        self.seed += 1
        (prompt,) = random_prompts(
            1, prompt_len, self.llm.model.mtpkit_config.vocab_size, self.seed
        )
        stream = Stream(self.clock.now(), prompt, max_tokens)
        request_id = self.llm.engine.add_request(prompt, stream.params)
        self.streams[request_id] = stream
        return request_id
