"""One engine of the decode benchmark: its timed runs, and the checks before them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mtpkit.bench.experts import ExpertDraws
from mtpkit.bench.machine import Machine
from mtpkit.bench.plain import check_greedy, kv_as_cached
from mtpkit.bench.roofline import Cost, Roofline, expected_length, length_deviation
from mtpkit.bench.settings import DecodeConfig, engine_arguments
from mtpkit.bench.shapes import random_prompts
from mtpkit.bench.timing import Trace, release_memory, synchronize, trace_kernels
from mtpkit.engine import LLM, require_whole
from mtpkit.engine.device.graphs import StepGraphs
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.loading import KV_DTYPES, draft_token_ids
from mtpkit.engine.requests.stats import AcceptanceStats
from mtpkit.engine.steps.plan import Batch, Drafts, Verdict
from mtpkit.errors import MtpkitError, UserError
from mtpkit.kernels.ring import ring_capacity, ring_length
from mtpkit.model.hybrid import HybridModel

_TOLERANCE = 0.03
"""Largest relative error of a synthetic acceptance length, unless four standard errors of the draws
are more."""
_SETTLING_STEPS = 3
_TRACED_STEPS = 10
_PATIENCE = 60.0
"""Largest inter-token latency in seconds, so long that requests wait for all prompts and then
decode together."""


@dataclass(frozen=True)
class Window:
    """Steps in which all requests decoded."""

    seconds: float
    steps: int
    counts: Sequence[int]
    """Generated tokens, decode steps of all requests, accepted drafts of each depth, reached drafts
    of each depth."""

    @classmethod
    def join(cls, windows: Sequence["Window"]) -> "Window":
        """Add up several windows."""
        counts = [sum(each) for each in zip(*(window.counts for window in windows), strict=True)]
        return cls(
            sum(window.seconds for window in windows),
            sum(window.steps for window in windows),
            counts,
        )

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests per second."""
        return self.counts[0] / self.seconds

    @property
    def acceptance(self) -> AcceptanceStats:
        """The drafts' counts as the engine's `AcceptanceStats`."""
        _, steps, *drafts = self.counts
        k = len(drafts) // 2
        return AcceptanceStats(steps, steps * k, drafts[:k], drafts[k:])


class _Undrafted:
    """Makes no drafts where a drafter would."""

    def __init__(self, drafter: Drafter) -> None:
        self.span = drafter.span
        self.head_bytes = drafter.head_bytes
        self.widened_bytes = drafter.widened_bytes

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """[S, K] zeros."""
        shape = batch.shape
        rows = shape.sampling_rows
        return Drafts(verdict.token_ids.new_zeros(rows, shape.num_speculative_tokens))


class Contender:
    """One batch size and K: its engine, and its runs."""

    def __init__(
        self,
        model: HybridModel,
        config: DecodeConfig,
        batch_size: int,
        k: int | Literal["auto"],
        prompts: Sequence[Sequence[int]] | None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size
        self.k = k
        self.model_config = model.mtpkit_config
        self.depths = config.largest(k, self.model_config.mtp)
        """The largest K of a step."""
        self.device = next(model.parameters()).device
        vocab_size = self.model_config.vocab_size
        # Each run has its own prompts: nothing that an engine keeps of earlier runs must help.
        count = batch_size * (config.repeats + 1)
        self.prompts = prompts or random_prompts(
            count, config.prompt_length, vocab_size, config.seed
        )
        self.runs = 0
        self.outputs: dict[str, list[int]] = {}
        """Tokens of the newest run's requests so far, in the order of its prompts."""
        self.lengths: dict[str, list[int]] = {}
        """Number of tokens that each of these requests had after each of its steps."""
        self.draft_vocab = _draft_vocab(config, vocab_size) if self.depths else None
        self.draws = ExpertDraws(model, config.random_experts)
        settings = engine_arguments(
            config.engine,
            k,
            max_model_len=max(map(len, self.prompts)) + config.max_tokens,
            max_num_seqs=batch_size,
            draft_vocab=self.draft_vocab,
            synthetic_acceptance=config.all_rates(self.depths) if self.depths else None,
            warm_up=False,  # the first run, which is not timed, captures what the others need
            max_inter_token_latency=_PATIENCE,
        )
        self.llm = LLM(model, **settings)

    def warm_up(self) -> None:
        """Decode once, so that kernels are compiled and graphs captured.

        Raises:
            MtpkitError: outputs have another length than requested, synthetic acceptance misses its
                rates, or a plain forward pass would not choose the tokens.
        """
        self.check(self._window())
        self._finish()
        self._check_last_row()

    def trace(self) -> tuple[Trace, int]:
        """Trace some steps in which all requests decode, and count them. Nothing can be timed
        afterwards."""
        with self.draws:
            self._start()
            self._steps(_SETTLING_STEPS)
            trace_kernels(lambda: self._steps(1), self.device)  # the tracer itself has to warm up
            # `trace_kernels` drops what the function returns: the count leaves it in a list.
            steps = [0]
            trace = trace_kernels(lambda: steps.append(self._steps(_TRACED_STEPS)), self.device)
        return trace, steps[-1]

    def same_tokens(self, plain: Sequence[Sequence[int]] | None) -> float | None:
        """Share of the newest run's outputs that equal those of K = 0 on the same prompts, token
        for token; None if there is nothing to compare.

        Raises:
            MtpkitError: an output differs in fp32.
        """
        if plain is None or not self.depths or self.config.acceptance is not None:
            return None
        same = [
            list(mine) == list(theirs)
            for mine, theirs in zip(self.outputs.values(), plain, strict=True)
        ]
        # In bf16, steps of another width round otherwise, which changes near ties; in fp32 no token
        # may change.
        if not all(same) and next(self.llm.model.parameters()).dtype == torch.float32:
            raise MtpkitError(
                f"batch {self.batch_size}, K = {self.k}: {same.count(False)} of {len(same)} outputs"
                " are not those of K = 0: drafts change what the model says"
            )
        return sum(same) / len(same)

    def run(self) -> Window:
        """Decode one prompt per row to its end, and time the steps in which all requests decode.

        Raises:
            UserError: there is no such step.
            MtpkitError: outputs have another length than requested.
        """
        with self.draws:
            window = self._window()
            self._finish()
        if not window.steps:
            raise UserError(
                f"batch {self.batch_size}, K = {self.k}: no step lies between the last request's"
                f" first token and the first one's end; raise max-tokens ({self.config.max_tokens})"
                " or max-num-batched-tokens"
            )
        return window

    @property
    def drafts_a_chain(self) -> bool:
        """Whether every step makes a chain of K drafts, on the only pipeline stage."""
        engine = self.config.engine
        chain = engine.speculative_token_tree is None and engine.speculative_eagle_topk is None
        alone = chain and engine.pipeline_parallel_size == 1
        return alone and self.k != 0 and not self.chooses

    @property
    def chooses(self) -> bool:
        """Whether the engine chooses the drafts of each step."""
        budget = self.config.engine.speculative_budget is not None
        return self.k == "auto" or (self.k != 0 and budget)

    def without_drafting(self) -> Window:
        """A run whose steps verify as many drafts and make none; its tokens mean nothing. The
        engine drafts again afterwards, and captures its graphs anew."""
        executor = self.llm.engine.executor
        drafter = executor.drafter
        executor.drafter = _Undrafted(drafter)
        self._forget_graphs()
        try:
            # The first run captures what the second one is timed with.
            self._window()
            self._finish()
            return self.run()
        finally:
            executor.drafter = drafter
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Capture all steps anew. There is memory for one set of graphs."""
        executor = self.llm.engine.executor
        if executor.graphs is None:
            return
        executor.graphs = None
        release_memory(self.device)
        executor.graphs = StepGraphs(
            executor.builder,
            self.llm.engine.config,
            executor.num_blocks,
            executor.runner.shortened,
        )

    def limit(self, machine: Machine, rates: Sequence[float]) -> float:
        """Tokens per second at the machine's copy bandwidth and matrix rates, at the mean context
        of a run; for trees, the tokens per second of the chain inside. Matrices count as memory
        holds them, and products with inputs in fp8 at the fp8 rate.

        Tensor-parallel ranks count as one device with the sum of their rates, and exchange nothing.
        Requests are divided into up to n batches for n pipeline stages. Each stage takes an equal
        part of every step, for one batch at a time, and each batch reads the weights.
        """
        ks = range(self.depths + 1) if self.chooses else [self.depths]
        limits = machine.rates(self.llm.ranks.tensor_size)
        speeds = (self.cost(rates[:k]).limit_tokens_per_s(*limits) for k in ks)
        return self.batch_size / self._rows * max(speeds)

    def cost(self, rates: Sequence[float]) -> Cost:
        """Bytes and FLOPs of a step of one batch at these rates of acceptance [K], at the mean
        context of a run."""
        # Outputs grow from nothing to `max_tokens`: half of it is the mean over a run.
        context_len = sum(map(len, self.prompts)) / len(self.prompts) + self.config.max_tokens / 2
        roofline = Roofline.of(
            self.llm.model,
            self.config.engine,
            ring_entries=ring_capacity(ring_length(1 + self.depths)),
            draft_vocab_size=None if self.draft_vocab is None else len(self.draft_vocab),
        )
        return roofline.decode(self._rows, rates, context_len)

    @property
    def _rows(self) -> int:
        """Requests of the largest batch."""
        return -(-self.batch_size // min(self.batch_size, self.llm.ranks.stage.stages))

    def _window(self) -> Window:
        """Start a run and step while all of its requests decode."""
        self._start()
        before = self._counts()
        began = time.perf_counter()
        steps = self._steps()
        # The last steps may still run on the GPU.
        synchronize(self.device)
        seconds = time.perf_counter() - began
        return Window(
            seconds, steps, [new - old for new, old in zip(self._counts(), before, strict=True)]
        )

    def _start(self) -> None:
        """Add the requests of a run and step until all of them decode."""
        first = self.runs * self.batch_size
        self.runs += 1
        engine = self.llm.engine
        chosen = [self.prompts[(first + row) % len(self.prompts)] for row in range(self.batch_size)]
        # The seed says which rates of acceptance a request has.
        params = [replace(self.config.sampling, seed=2 * first + row) for row in range(len(chosen))]
        self.outputs = {
            engine.add_request(prompt, one): [] for prompt, one in zip(chosen, params, strict=True)
        }
        self.lengths = {name: [] for name in self.outputs}
        # The window begins when the last prompt has its first token. If another request is near its
        # end by then, no step is left to time, which `run` reports.
        while engine.has_unfinished and not all(self.outputs.values()):
            self._step()
        synchronize(self.device)

    def _step(self) -> None:
        outputs = self.llm.engine.step()
        require_whole(outputs)
        for output in outputs:
            self.outputs[output.request_id] = output.outputs[0].token_ids
            self.lengths[output.request_id].append(len(output.outputs[0].token_ids))

    def _steps(self, most: float = math.inf) -> int:
        """Step until a request may end with the next step or with the one in progress. Returns the
        number of steps that each request took; with pipeline stages, each step of the engine is for
        one batch only."""
        steps = 0
        # The next step may emit 1 + K tokens, and so may the step that was launched ahead of it.
        longest = self.config.max_tokens - 2 * (1 + self.depths)
        batches = min(self.batch_size, self.llm.engine.config.num_batches)
        while (
            steps < most
            and max(map(len, self.outputs.values())) <= longest
            and self.llm.engine.has_unfinished
        ):
            for _ in range(batches):
                self._step()
            steps += 1
        return steps

    def _finish(self) -> None:
        """Step until all requests have ended, and refuse outputs of another length than
        requested."""
        while self.llm.engine.has_unfinished:
            self._step()
        wrong = {len(tokens) for tokens in self.outputs.values()} - {self.config.max_tokens}
        if wrong:
            raise MtpkitError(
                f"outputs of {sorted(wrong)} tokens where {self.config.max_tokens} were asked for"
            )

    def _check_last_row(self) -> None:
        """Refuse tokens of the newest run's last request that a plain forward pass would not
        choose.

        With synthetic acceptance, only the last token of each step is the base's choice, except in
        a step that max_tokens cut short.
        """
        model = self.llm.model
        name = list(self.outputs)[-1]
        prompt = self.prompts[(self.runs * self.batch_size - 1) % len(self.prompts)]
        drawn = self.depths and self.config.acceptance is not None
        places = (
            [end - 1 for end in self.lengths[name][:-1]]
            if drawn
            else range(len(self.outputs[name]))
        )
        kv_dtype = KV_DTYPES[self.config.engine.kv_cache_dtype]
        state_dtype = getattr(torch, self.config.engine.state_dtype)
        dtypes = (next(model.parameters()).dtype, state_dtype, kv_dtype)
        # A state in 16 bits brings near ties to an fp32 model, too. So do keys that lie between two
        # numbers of fp8, of which the plain pass may take the other.
        precision = torch.float32 if {*dtypes} <= {torch.float32, None} else torch.bfloat16
        try:
            with kv_as_cached(model, kv_dtype):
                check_greedy(
                    model, prompt, self.outputs[name], places, precision, self.config.sampling
                )
        except MtpkitError as error:
            raise MtpkitError(f"batch {self.batch_size}, K = {self.k}: {error}") from error

    def _counts(self) -> list[int]:
        """Tokens, decode steps of all requests, accepted and reached drafts of each depth."""
        stats = self.llm.stats()
        drafts = stats.acceptance
        return [
            stats.generated_tokens,
            drafts.steps,
            *drafts.accepted_per_depth,
            *drafts.reached_per_depth,
        ]

    def check(self, window: Window) -> None:
        """Refuse synthetic acceptance that differs from the requested rates by more than chance
        explains."""
        rates = self.config.all_rates(self.depths)
        stats = window.acceptance
        # No single length is expected where K changes between steps, or where the tree's path of
        # first children may end before K.
        if not rates or self.chooses or self.config.spine(self.depths) < self.depths:
            return
        lengths = [expected_length(one) for one in rates]
        expected = sum(lengths) / len(lengths)
        squares = [
            length_deviation(one) ** 2 + (length - expected) ** 2
            for one, length in zip(rates, lengths, strict=True)
        ]
        deviation = math.sqrt(sum(squares) / len(squares))
        # An odd number of requests has one more of the first kind.
        uneven = (max(lengths) - expected) / self.batch_size
        allowed = (
            max(_TOLERANCE * expected, 4 * deviation / math.sqrt(max(1, stats.steps))) + uneven
        )
        if abs(stats.acceptance_length - expected) > allowed:
            raise MtpkitError(
                f"batch {self.batch_size}, K = {self.k}: acceptance length"
                f" {stats.acceptance_length:.3f} over {stats.steps} steps, but synthetic rates"
                f" {rates} make {expected:.3f}: the engine does not draw them"
            )


def _draft_vocab(config: DecodeConfig, vocab_size: int) -> list[int] | None:
    """Tokens to draft among; None: all.

    Raises:
        UserError: see `draft_token_ids`.
    """
    if config.draft_vocab_size is not None:
        return list(range(config.draft_vocab_size))
    ids = draft_token_ids(config.engine.draft_vocab, vocab_size)
    return None if ids is None else ids.tolist()
