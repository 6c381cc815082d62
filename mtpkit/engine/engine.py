"""The step loop."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mtpkit.engine.batch import BatchBuilder
from mtpkit.engine.blocks import IdPool
from mtpkit.engine.detokenizer import Detokenizer
from mtpkit.engine.drafter import Drafter
from mtpkit.engine.params import EngineConfig, SamplingParams
from mtpkit.engine.request import AcceptanceStats, Request, RequestOutput, RequestStats
from mtpkit.engine.scheduler import Scheduler
from mtpkit.engine.states import CacheLayout
from mtpkit.engine.step import Batch, StepOutput
from mtpkit.engine.verifier import verify
from mtpkit.errors import UserError

_SEED_BITS = 63


class StepRunner(Protocol):
    """Anything that computes a step: `Runner`, or a stand-in for a model in tests."""

    def run(self, batch: Batch) -> StepOutput:
        """Logits of `batch.logit_indices` and hidden states of all tokens."""
        ...


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made or its statistics were reset."""

    acceptance: AcceptanceStats
    """Over the decode steps of all requests."""
    generated_tokens: int
    seconds: float
    """Spent in steps."""
    preemptions: int
    state_bytes: int
    """Recurrent state of all slots."""
    state_bytes_per_request: int
    kv_bytes: int
    """All blocks of keys and values."""

    @property
    def acceptance_length(self) -> float:
        """1 + mean accepted drafts a decode step and request."""
        return self.acceptance.acceptance_length

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per depth, the rate at which a reached draft is accepted."""
        return self.acceptance.conditional_acceptance

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class Engine:
    """Runs requests step by step; knows no files and no command line."""

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        num_blocks: int,
        runner: StepRunner,
        drafter: Drafter,
        vocab_size: int,
        device: torch.device,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.layout = layout
        self.runner = runner
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.caches = layout.allocate(num_blocks, config.max_num_seqs, device)
        self.builder = BatchBuilder(config.num_speculative_tokens, config.block_size, vocab_size, self.caches, device)
        blocks, slots = IdPool(num_blocks), IdPool(config.max_num_seqs)
        self.scheduler = Scheduler(config, blocks, slots, layout.ring_length, eos_token_ids, layout.block_bytes)
        self._seeds = random.Random(config.seed)
        self._num_requests = 0
        self._seconds = 0.0

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> str:
        """Queue a request.

        Returns:
            Its id; arrivals are numbered when none is given.

        Raises:
            UserError: it can never be served.
        """
        request = self.make_request(prompt_token_ids, params, request_id, prompt)
        self.scheduler.add(request)
        return request.request_id

    def make_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> Request:
        """A request that can be served, not yet queued.

        Raises:
            UserError: it can never be served.
        """
        arrival, self._num_requests = self._num_requests, self._num_requests + 1
        name = str(arrival) if request_id is None else request_id
        foreign = [token for token in prompt_token_ids if not 0 <= token < self.vocab_size]
        if foreign:
            raise UserError(f"request {name}: tokens {foreign[:5]} are outside the vocabulary of {self.vocab_size}")
        if params.stop_strings and self.tokenizer is None:
            raise UserError(f"request {name}: stop strings need a tokenizer, use stop_token_ids or give one")
        depths = [0] * self.config.num_speculative_tokens
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=(self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed) % (1 << _SEED_BITS),
            arrival=arrival,
            stats=RequestStats(0, 0, depths, list(depths), state_bytes=self.layout.slot_bytes),
            prompt=prompt,
            detokenizer=self.tokenizer and Detokenizer(self.tokenizer, list(prompt_token_ids), params.stop_strings),
        )
        self.scheduler.validate(request)
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work."""
        return self.scheduler.has_unfinished

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that emitted tokens."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        batch = self.builder.build(plan)
        out = self.runner.run(batch)
        verdict = verify(out.logits, batch)
        drafts = self.drafter.draft(out.hidden, batch, verdict)
        changed = self.scheduler.commit(plan, verdict, drafts)
        self._seconds += time.perf_counter() - began
        return [RequestOutput.of(request) for request in changed]

    def abort(self, request_id: str) -> None:
        """Forget a request; one that is finished or unknown is ignored."""
        self.scheduler.abort(request_id)

    def stats(self) -> EngineStats:
        """Totals so far."""
        scheduler = self.scheduler
        return EngineStats(
            acceptance=scheduler.acceptance,
            generated_tokens=scheduler.num_generated,
            seconds=self._seconds,
            preemptions=scheduler.num_preemptions,
            state_bytes=self.layout.slot_bytes * scheduler.slots.size,
            state_bytes_per_request=self.layout.slot_bytes,
            kv_bytes=self.layout.block_bytes * scheduler.blocks.size,
        )

    def reset_stats(self) -> None:
        """Start the totals anew, for instance after a warm-up."""
        self._seconds = 0.0
        self.scheduler.reset_stats()
