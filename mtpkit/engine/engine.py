"""The step loop: the engine and the runner of its base model."""

import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from mtpkit.config.checked import are_whole, is_whole
from mtpkit.engine.adaptive import AdaptiveSpeculation, FixedSpeculation, Speculation
from mtpkit.engine.batch import NULL_SLOT, BatchBuilder, StepShape
from mtpkit.engine.blocks import IdPool
from mtpkit.engine.detokenizer import Detokenizer
from mtpkit.engine.device_state import DeviceState
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.graphs import StepGraphs
from mtpkit.engine.options import EngineConfig
from mtpkit.engine.pacing import pacing_for
from mtpkit.engine.params import SEED_BITS, SamplingParams
from mtpkit.engine.prefix import CachedBlocks, CheckpointStore, PrefixCache
from mtpkit.engine.processors import GREEDY, processors_of
from mtpkit.engine.ranks import Ranks, Stage
from mtpkit.engine.request import AcceptanceStats, EngineStats, Request, RequestOutput, RequestStats
from mtpkit.engine.scheduler import Scheduler
from mtpkit.engine.step import Batch, Plan, Restore, StepOutput, StepResult, Verdict, pack_result, unpack_result
from mtpkit.engine.tree import DraftShape
from mtpkit.engine.verifier import verify
from mtpkit.errors import MtpkitError, UserError, shown
from mtpkit.model import base_forward, fold_rings, local_logits, normed_states
from mtpkit.model.state import Committed, StateLayout, States

_LONG_NUMBER = 18
"""Numeric ids of this many digits or more do not affect the numbering; no count reaches them."""
_logger = logging.getLogger(__name__)

Verifier = Callable[[Tensor, Batch], Verdict]


class StepRunner(Protocol):
    """Runs the base over a batch: `Runner`, or a stand-in for a model in tests."""

    def run(self, batch: Batch) -> StepOutput:
        """Compute hidden states of all tokens and logits at `batch.logit_indices`."""
        ...


class CachingRunner(StepRunner, Protocol):
    """What a prefix cache needs besides."""

    hidden_size: int

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] the logits of hidden states [N, h], as the base hands them on."""
        ...

    def fold(self, states: States, slots: Tensor, context_lens: Tensor, committed: Committed) -> None:
        """See `mtpkit.model.fold_rings`."""
        ...


class Runner:
    """Runs a base model, or the layers of it that a pipeline stage has.

    Args:
        most_tokens: the most tokens of a step, where there are several stages.
    """

    def __init__(self, model: Any, stage: Stage | None = None, most_tokens: int = 0) -> None:
        self.model, self.stage = model, stage or Stage()
        self.hidden_size: int = model.mtpkit_config.hidden_size
        weight, stage = next(model.parameters()), self.stage

        def buffer(tokens: int) -> Tensor:  # zeros, as graphs are captured with it
            size = tokens, 1, self.hidden_size
            return torch.zeros(size, dtype=model.config.params_dtype, device=weight.device)

        self._received = buffer(0 if stage.first else most_tokens)
        """Hidden states of the stage before."""
        self._handed_on = buffer(0 if stage.last else most_tokens)
        """Those for the next stage; each graph would keep its own otherwise."""

    def receive(self, tokens: int) -> None:
        """Take the hidden states of a step from the pipeline stage before, if there is one; `run` reads them."""
        if not self.stage.first:
            self.stage.receive(self._received[:tokens])

    def run(self, batch: Batch) -> StepOutput:
        """Run one forward pass; it writes keys, values and states to the caches in `batch.inputs`. Only the last stage
        has logits; what another one hands on is valid until the next run."""
        if not self.stage.first:
            # A copy: layers add to it in place, also where a graph is captured between a transfer and its replay.
            self.model.set_input_tensor(self._received[: len(batch.token_ids)].clone())
        hidden = base_forward(self.model, batch.token_ids[None], batch.inputs)
        if not self.stage.last:
            return StepOutput(hidden.new_empty(0, 0), self._handed_on[: len(hidden)].copy_(hidden))
        return StepOutput(self.logits(hidden[batch.logit_indices, 0]), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CachingRunner.logits`."""
        return local_logits(self.model, normed_states(self.model, hidden))

    def fold(self, states: States, slots: Tensor, context_lens: Tensor, committed: Committed) -> None:
        """See `CachingRunner.fold`."""
        fold_rings(self.model, states, slots, context_lens, committed)


class _Launched:
    """A launched plan, whose result is being copied to the host or, on an earlier pipeline stage, has yet to come."""

    def __init__(self, plan: Plan, values: Tensor | None = None) -> None:
        self.plan = plan
        self.began = time.perf_counter()
        self.fetched = False
        """Whether the result is being copied."""
        if values is not None:
            self.fetch(values)

    def fetch(self, values: Tensor) -> None:
        """Begin to copy the result."""
        self.fetched = True
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self, check: Callable[[np.ndarray, int], None] | None = None) -> StepResult:
        """Wait for the result and return it.

        Args:
            check: refuses what no step with K drafts results in, given [S, 2 + 2K] and K.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        packed, depths = self._values.numpy(), self.plan.num_speculative_tokens
        if check is not None:
            check(packed, depths)
        return StepResult.unpack(packed, depths, self.plan.trees)


class _Open(NamedTuple):
    """A plan that a pipeline stage has run and whose results it has not stored."""

    launched: _Launched
    slots: frozenset[int | None]
    """Of its rows: until it is stored no other plan with one of them may begin."""
    batch: Batch


class Engine:
    """Runs requests step by step; reads no files and has no command line.

    With `async_scheduling`, a step is launched before the results of the previous one are read: unless blocks run out,
    the device does not wait for the host, and the host learns one step late that a request has stopped. With `graphs`,
    decode steps are replayed CUDA graphs.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: StateLayout,
        num_blocks: int,
        runner: StepRunner,
        drafter: Drafter,
        vocab_size: int,
        device: torch.device,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        verifier: Verifier | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.runner = runner
        self.drafter = drafter
        self.verifier = verifier or verify
        self.vocab_size = vocab_size
        self.ranks = ranks or Ranks()
        self.stage = self.ranks.stage
        self.tokenizer = tokenizer
        null, cached = int(config.graphs), config.enable_prefix_caching
        self.states = layout.allocate(num_blocks + null, config.max_num_seqs, device)
        self.state = DeviceState.allocate(
            config.max_num_seqs + int(config.graphs or cached),
            config,
            self.ranks.vocabulary(vocab_size),
            device,
            counters=layout.counters,
            earlier=drafter.earlier,
            dtype=layout.sizes.dtype,
            hidden_size=cast(CachingRunner, runner).hidden_size if cached else 0,
        )
        self.builder = BatchBuilder(config.block_size, self.states, self.state, device, config.tree)
        blocks, slots = IdPool(num_blocks), IdPool(config.max_num_seqs)
        prefix = None
        self.checkpoints: CheckpointStore | None = None
        if cached:
            blocks = CachedBlocks(num_blocks)
            ahead = drafter.earlier[0] + 1 if config.num_speculative_tokens else 0
            room = config.num_checkpoints, ahead, config.prefix_cache_interval
            prefix = PrefixCache(blocks, config.block_size, *room, bool(ahead and layout.head_slot_bytes))
            kept = getattr(torch, config.prefix_cache_dtype)
            fold = cast(CachingRunner, runner).fold
            self.checkpoints = CheckpointStore(layout, self.states, self.state, config.num_checkpoints, kept, fold)
        self.graphs = None
        if config.graphs:
            width = -(-(config.max_model_len + config.decode_width + config.lookahead) // config.block_size)
            self.graphs = StepGraphs(self.builder, config, width, num_blocks)
        sizes = (self.graphs.chunk_sizes, self.graphs.sizes_beside) if self.graphs else ()
        self.pacing = pacing_for(config, device, *sizes)
        self.scheduler = Scheduler(config, blocks, slots, eos_token_ids, layout.block_bytes, self.pacing, prefix)
        self._arrived = 0.0
        """When the newest results arrived."""
        self._seeds = random.Random(config.seed)
        self._num_requests = self._next_number = 0
        self._seconds = 0.0
        self._under_way: deque[list[_Launched]] = deque()
        self._open: deque[_Open] = deque()
        self.speculation: Speculation = FixedSpeculation(config.drafts)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        checkpoint_at: int | None = None,
    ) -> str:
        """Queue a request; see `make_request`.

        Returns:
            The request's id; by default requests are numbered.

        Raises:
            UserError: the request can never be served, or an unfinished request has the same id.
        """
        request = self.make_request(prompt_token_ids, params, request_id, prompt, checkpoint_at=checkpoint_at)
        self.scheduler.add(request)
        return request.request_id

    def make_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        place: str | None = None,
        checkpoint_at: int | None = None,
    ) -> Request:
        """Make a request without queueing it.

        Args:
            place: name of the request in messages, such as its place in a list or in a file.
            checkpoint_at: tokens of the prompt after which the prefix cache keeps a checkpoint, besides those that it
                keeps anyway.

        Raises:
            UserError: as in `add_request`.
        """
        name = self._name(request_id)
        where = place or f"request {name}"
        if not isinstance(params, SamplingParams):
            raise UserError(f"{where}: params is {shown(params)}, give SamplingParams(...)")
        arrival, self._num_requests = self._num_requests, self._num_requests + 1
        tokens = list(prompt_token_ids)
        if not are_whole(tokens) or not 0 <= min(tokens, default=0) <= max(tokens, default=0) < self.vocab_size:
            foreign = [token for token in tokens if not is_whole(token) or not 0 <= token < self.vocab_size]
            raise UserError(f"{where}: tokens {foreign[:5]} are outside the vocabulary of {self.vocab_size}")
        unknown = [token for token in params.stop_token_ids or () if not 0 <= token < self.vocab_size]
        if unknown:
            _logger.warning(
                "stop_token_ids %s have no effect: the vocabulary has %d tokens", unknown[:5], self.vocab_size
            )
        if params.stop_strings and self.tokenizer is None:
            raise UserError(f"{where}: stop strings need a tokenizer, use stop_token_ids or give one")
        counts = AcceptanceStats.for_depths(self.config.num_speculative_tokens, self.config.tree)
        request = Request(
            request_id=name,
            prompt_token_ids=list(map(int, tokens)),
            params=params,
            seed=(self._seeds.getrandbits(SEED_BITS) if params.seed is None else params.seed) % (1 << SEED_BITS),
            arrival=arrival,
            stats=RequestStats(**vars(counts), state_bytes=self.layout.slot_bytes),
            processors=processors_of(params, self.vocab_size),
            prompt=prompt,
            detokenizer=self.tokenizer and Detokenizer(self.tokenizer, tokens, params.stop_strings),
            place=place,
            end_token_ids=frozenset(params.stop_token_ids or ())
            | (frozenset() if params.ignore_eos else self.scheduler.eos_token_ids),
            checkpoint_at=checkpoint_at,
        )
        self.scheduler.validate(request)
        return request

    def _name(self, request_id: str | None) -> str:
        """The given id, or else the next number; numbering continues above given numbers, so that ids are unique."""
        name = str(self._next_number) if request_id is None else request_id
        if not isinstance(name, str):
            raise UserError(f"request_id is {shown(name)}, must be a text: leave it out to have requests numbered")
        if name.isdecimal() and len(name) < _LONG_NUMBER:
            self._next_number = max(self._next_number, int(name) + 1)
        return name

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished

    @torch.inference_mode()
    def step(self, finished_only: bool = False) -> list[RequestOutput]:
        """Launch a step, and commit the results of the previous one (with `async_scheduling`) or of this one.

        Args:
            finished_only: return outputs of finished requests only; the text of the others is not decoded then.

        Returns:
            Outputs of the requests that emitted tokens.
        """
        began = time.perf_counter()
        with self.ranks.working():
            changed = self._step()
        self._seconds += time.perf_counter() - began
        once = {request.request_id: request for request in changed}  # results of two steps may have been committed
        wanted = (request for request in once.values() if request.finished or not finished_only)
        return [RequestOutput.of(request) for request in wanted]

    def _step(self) -> list[Request]:
        """Launch a step and commit results; returns the requests that changed, twice if two steps changed them."""
        changed = []
        ahead = self.config.async_scheduling
        if not ahead:
            changed += self._take_up(0)
        plans = self.ranks.plan(self.scheduler, self.speculation.choose)
        if not plans and not self._under_way and self.scheduler.has_unfinished:
            raise MtpkitError("requests are unfinished, but none can run and no step is under way")
        if plans:
            launched = (self._launch(plan) for plan in plans)
            self._under_way.append([one for one in launched if one is not None])
        changed += self._take_up(1 if ahead and plans else 0)
        if not self.scheduler.has_unfinished:
            self._settle()
            self._under_way.clear()
        return changed

    @torch.inference_mode()
    def warm_up(self, shapes: Sequence[DraftShape]) -> None:
        """Capture the CUDA graphs of steps of all sizes, if there are graphs, for each of these shapes of drafts. With
        a prefix cache, compile what it runs without graphs.

        No request may wait or run.
        """
        assert not self.has_unfinished
        if self.checkpoints:
            self.checkpoints.warm_up()
            shape = StepShape(0, 1, 1)
            numbers = self.builder.ints(self.builder.null_numbers(shape))
            plan = replace(Plan.without_rows(0, 1, self.config.drafts), restores=(Restore(0, NULL_SLOT, 1),))
            tables = numbers.new_zeros(1, self.config.decode_width + self.config.lookahead)
            self._resume(self.builder.assemble(plan, shape, numbers, tables, GREEDY))
        if self.graphs:
            self.graphs.capture_all(self._execute, shapes)

    def adapt(self, batch_sizes: Sequence[int], repeats: int = 5) -> None:
        """Time steps of these batch sizes with each of `draft_shapes`, and choose among these by the times. No request
        may wait or run."""
        assert not self.has_unfinished
        shapes = self.draft_shapes
        times = {(size, drafts): self._time_step(size, drafts, repeats) for size in batch_sizes for drafts in shapes}
        self.speculation = AdaptiveSpeculation(times)

    @property
    def draft_shapes(self) -> list[DraftShape]:
        """What can be chosen among: chains of K = 0 and more, then the tree, if there is one."""
        chains = list[DraftShape](range(self.config.num_speculative_tokens + 1))
        return chains + ([self.config.tree] if self.config.tree else [])

    @torch.inference_mode()
    def _time_step(self, rows: int, drafts: DraftShape, repeats: int) -> float:
        """Seconds of a greedy decode step on free slots, the median of `repeats`."""

        def step() -> None:
            if self.graphs:
                self.graphs.replay_free_slots(self._execute, rows, drafts)
            else:
                shape, plan = StepShape(rows, 0, 0), Plan.without_rows(rows, rows, drafts)
                self.state.restart()
                numbers = self.builder.ints(self.builder.null_numbers(shape, range(rows)))
                tables = numbers.new_zeros(rows, self.config.decode_width + self.config.lookahead)
                self._execute(self.builder.assemble(plan, shape, numbers, tables, GREEDY))
            if self.builder.device.type == "cuda":
                torch.cuda.synchronize()

        step()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def _launch(self, plan: Plan) -> _Launched | None:
        slots = frozenset(row.request.slot for row in plan.rows)
        while self._open and (len(self._open) >= self.stage.stages or any(slots & one.slots for one in self._open)):
            self._store_first()
        self.state.admit(plan.sampling_requests[plan.num_decode_rows :])
        if plan.restores and self.checkpoints:
            self.checkpoints.restore(plan.restores)
            if not plan.rows:
                return None
            return _Launched(plan, self._resume(self.builder.build(plan)))
        if self.stage.stages > 1:
            launched = self._launch_stage(plan, slots)
        elif self.graphs:
            launched = _Launched(plan, self.graphs.run(self._execute, plan))
        else:
            launched = _Launched(plan, self._execute(self.builder.build(plan)))
        if plan.saves and self.checkpoints:
            self.checkpoints.save(plan.saves)
        return launched

    def _resume(self, batch: Batch) -> Tensor:
        """Run a step of rows that begin at checkpoints, without the base; see `Plan`."""
        runner, earlier = cast(CachingRunner, self.runner), self.state.earlier
        assert earlier is not None
        hidden = earlier.hidden[batch.inputs.state_slots, -1][:, None]
        return self._finish(batch, StepOutput(runner.logits(hidden[batch.logit_indices, 0]), hidden))

    def _launch_stage(self, plan: Plan, slots: frozenset[int | None]) -> _Launched:
        """Launch what a pipeline stage does of a plan: all transfers are outside of graphs."""
        shape = self.graphs.shape_for(plan) if self.graphs else StepShape.of(plan)
        cast(Runner, self.runner).receive(shape.tokens(1 + plan.num_speculative_tokens))
        if self.stage.last:
            packed = self.graphs.run(self._execute, plan) if self.graphs else self._execute(self.builder.build(plan))
            self.stage.tell(packed)
            return _Launched(plan, packed)
        # What is stored later is built now: replays of other plans overwrite what this one's leaves.
        launched, batch = _Launched(plan), self.builder.build(plan)
        hidden = self.graphs.replay(self._execute, plan) if self.graphs else self._execute(batch)
        self.stage.send(hidden.clone())
        self._open.append(_Open(launched, slots, batch))
        return launched

    @torch.inference_mode()
    def _settle(self) -> None:
        """Exchange with other ranks all that is under way, before any of them may end."""
        while self._open:
            self._store_first()
        self.stage.settle()
        self.ranks.settle()

    def _store_first(self) -> None:
        """Store the results of the first open plan, which the last stage tells, and begin to copy them to the host."""
        launched, _, batch = self._open.popleft()
        packed = self.stage.hear(batch)
        self.state.step(batch, *unpack_result(packed, batch))
        launched.fetch(packed)

    def _execute(self, batch: Batch) -> Tensor:
        """Run the device's part of a step; returns the tensor of `pack_result`, but on a pipeline stage before the last
        one the hidden states that it hands on."""
        out = self.runner.run(batch)
        return self._finish(batch, out) if self.stage.last else out.hidden

    def _finish(self, batch: Batch, out: StepOutput) -> Tensor:
        """Verify, draft and store, given the results of the base."""
        verdict = self.verifier(out.logits, batch)
        batch, hidden = batch.along(verdict, out.hidden)
        drafts = self.drafter.draft(hidden, batch, verdict)
        self.state.step(batch, verdict, drafts, hidden)
        return pack_result(verdict, drafts)

    def _take_up(self, keep: int) -> list[Request]:
        """Commit the results of all but the latest `keep` steps, the oldest first."""
        changed = []
        while len(self._under_way) > keep:
            step = self._under_way.popleft()
            while not all(launched.fetched for launched in step):
                self._store_first()
            results = [launched.wait(partial(self.stage.check, vocab_size=self.vocab_size)) for launched in step]
            began, self._arrived = max(self._arrived, step[0].began), time.perf_counter()
            if self.pacing:
                self.pacing.observe([launched.plan for launched in step], self._arrived - began)
            for plan, result in zip((launched.plan for launched in step), results, strict=True):
                if plan.num_decode_rows:
                    self._observe(plan, result)
                changed += self.scheduler.commit(plan, result)
                if (saves := self.scheduler.take_saves()) and self.checkpoints:
                    self.checkpoints.save(saves)
        return changed

    def _observe(self, plan: Plan, result: StepResult) -> None:
        """Report the accepted drafts of decode rows to the choice of drafts, without rows whose logits are invalid."""
        accepted, counts = result.accepted.tolist(), result.num_tokens.tolist()
        valid = [
            index
            for index, row in enumerate(plan.decode_rows)
            if counts[index] == 1 + accepted[index] and row.request.error is None
        ]
        fresh = [plan.rows[index].fresh_drafts for index in valid]
        if result.ranks is None:
            self.speculation.observe([accepted[index] for index in valid], fresh)
        else:
            ranks = result.ranks.tolist()
            self.speculation.observe_trees([ranks[index] for index, made in zip(valid, fresh, strict=True) if made])

    def abort(self, request_id: str) -> None:
        """Drop a request; an id that is finished or unknown is ignored."""
        self.scheduler.abort(request_id)
        if not self.scheduler.has_unfinished:
            with self.ranks.working():
                self._settle()

    def stats(self) -> EngineStats:
        """Totals since the engine was made or `reset_stats` was called."""
        scheduler = self.scheduler
        return EngineStats(
            acceptance=scheduler.acceptance,
            generated_tokens=scheduler.num_generated,
            seconds=self._seconds,
            preemptions=scheduler.num_preemptions,
            state_bytes=self.layout.slot_bytes * scheduler.slots.size,
            state_bytes_per_request=self.layout.slot_bytes,
            kv_bytes=self.layout.block_bytes * scheduler.blocks.size,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            prefilled_tokens=scheduler.num_prefilled,
            returned_bytes=self.stage.returned_bytes / max(1, self.stage.returned_rows),
        )

    def reset_stats(self) -> None:
        """Reset the totals, for instance after a warm-up."""
        self._seconds = 0.0
        self.scheduler.reset_stats()
