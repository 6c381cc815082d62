"""One engine of the load benchmark: its timed runs, and the checks of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtpkit.bench.experts import ExpertDraws
from mtpkit.bench.load.requests import LoadRequest, draw_prompts, draw_requests
from mtpkit.bench.load.serving import Clock, Stream, serve, take
from mtpkit.bench.load.workload import Drafts, most_drafts, start_engine
from mtpkit.bench.plain import check_greedy, kv_as_cached
from mtpkit.bench.settings import LoadConfig
from mtpkit.bench.timing import Trace, synchronize, trace_kernels
from mtpkit.engine import EngineStats
from mtpkit.engine.loading import KV_DTYPES
from mtpkit.engine.requests.stats import AcceptanceStats
from mtpkit.errors import MtpkitError
from mtpkit.model.hybrid import HybridModel

_TOLERANCE = 0.03
"""Largest relative error of a synthetic acceptance rate, unless four standard errors of the draws
are more."""
_TRACED_FROM = 1 / 3
_TRACED_STEPS = 64
"""Share of the requests that have ended when tracing begins, and number of steps that are
traced."""


@dataclass(frozen=True)
class Run:
    """One run of the load."""

    seconds: float
    """From the first arrival to the last output."""
    streams: Sequence[Stream]
    """The requests, in the order of their arrival."""
    stats: EngineStats


class LoadEngine:
    """An engine and the load that it serves.

    Raises:
        UserError: the model lacks the heads, or the requests do not fit.
    """

    def __init__(
        self,
        model: HybridModel,
        config: LoadConfig,
        k: Drafts,
        clock: Clock,
        draws: ExpertDraws,
    ) -> None:
        self.config = config
        self.k = k
        self.clock = clock
        self.draws = draws
        self.requests: list[LoadRequest] = draw_requests(config)
        self.depths = most_drafts(model, k)
        """The largest K of a step."""
        self.device = next(model.parameters()).device
        self.runs = 0
        # The time of the engine alone, without what drawing or loading the model has left to do.
        synchronize(self.device)
        began = clock.now()
        longest = max(one.prompt_len + one.max_tokens for one in self.requests)
        self.llm = start_engine(model, config, k, max_model_len=longest)
        synchronize(self.device)
        self.start_seconds = clock.now() - began
        """Seconds that the engine needs from its construction until it is ready."""

    def run(self, rate: float) -> Run:
        """Serve the load at `rate` requests per second; each run has other tokens, so that nothing
        that an engine keeps of an earlier run helps.

        Raises:
            RequestError: the logits of a request are NaN or infinite.
            MtpkitError: outputs have another length than requested, synthetic acceptance misses its
                rates, or, in the first run, a plain forward pass would not choose the tokens of the
                last request.
        """
        with self.draws:
            run = self._serve(rate)
        # One plain pass is enough: later runs differ from the first in their random tokens alone.
        if self.runs == 1 and not self.config.random_experts:
            self._check_tokens(run.streams[-1])
        return run

    def check(self) -> None:
        """If experts were drawn, which no plain forward pass would choose, serve the load once more
        with the routers' own and check that run as a first one. For after all timing.

        Raises:
            MtpkitError: as for `run`.
        """
        if self.config.random_experts:
            self._check_tokens(self._serve(math.inf).streams[-1])

    def _serve(self, rate: float) -> Run:
        streams = self._streams(rate)
        self.llm.reset_stats()
        run = Run(serve(self.llm.engine, streams, self.clock), streams, self.llm.stats())
        if self.k != "auto":
            check_acceptance(run.stats.acceptance, self.config.rates(self.depths))
        return run

    def trace(self) -> Trace:
        """Trace some steps in the middle of a run whose requests are all queued at once. Nothing
        can be timed afterwards."""
        engine = self.llm.engine
        streams = {
            engine.add_request(one.prompt, one.params): one for one in self._streams(math.inf)
        }

        def steps(most: int) -> None:
            while most and engine.has_unfinished:
                take(engine.step(), streams, self.clock.now())
                most -= 1

        while sum(one.ended for one in streams.values()) < _TRACED_FROM * len(streams):
            steps(1)
        with self.draws:
            trace_kernels(lambda: steps(1), self.device)  # the tracer itself has to warm up
            return trace_kernels(lambda: steps(_TRACED_STEPS), self.device)

    def _streams(self, rate: float) -> list[Stream]:
        """The requests of the next run, as streams without outputs."""
        vocab_size = self.llm.model.mtpkit_config.vocab_size
        prompts = draw_prompts(self.requests, vocab_size, self.config.seed + self.runs)
        self.runs += 1
        return [
            Stream(one.arrival / rate, prompt, one.max_tokens)
            for one, prompt in zip(self.requests, prompts, strict=True)
        ]

    def _check_tokens(self, stream: Stream) -> None:
        """Refuse tokens that a plain forward pass would not choose.

        With synthetic acceptance, only the last token of each step is the base's choice, except in
        a step that max_tokens cut short.
        """
        model = self.llm.model
        places = (
            [end - 1 for end in stream.lengths[:-1]] if self.depths else range(len(stream.tokens))
        )
        kv_dtype = KV_DTYPES[self.config.engine.kv_cache_dtype]
        state_dtype = getattr(torch, self.config.engine.state_dtype)
        dtypes = (next(model.parameters()).dtype, state_dtype, kv_dtype)
        precision = torch.float32 if {*dtypes} <= {torch.float32, None} else torch.bfloat16
        try:
            with kv_as_cached(model, kv_dtype):
                check_greedy(model, stream.prompt, stream.tokens, places, precision, stream.params)
        except MtpkitError as error:
            raise MtpkitError(f"K = {self.k}: {error}") from error


def check_acceptance(stats: AcceptanceStats, rates: Sequence[float]) -> None:
    """Refuse synthetic acceptance that differs from the requested rates [K] by more than chance
    explains.

    Each depth is checked by itself: steps that max_tokens cuts lower the acceptance length, but not
    the rates.

    Raises:
        MtpkitError: it differs.
    """
    for depth, rate in enumerate(rates):
        found = stats.conditional_acceptance[depth]
        reached = stats.reached_per_depth[depth]
        error = 4 * math.sqrt(rate * (1 - rate) / max(1, reached))
        if reached and abs(found - rate) > max(_TOLERANCE * rate, error):
            raise MtpkitError(
                f"K = {len(rates)}: draft {1 + depth} was accepted at a rate of {found:.3f} over"
                f" {reached} steps, but {rate} was asked for: the engine does not draw it"
            )
