"""The step loop: requests in, plans made, launched and committed, outputs out."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from mtpkit.engine.device.executor import Executor, Launched, Verifier
from mtpkit.engine.device.pipeline import StageExecutor
from mtpkit.engine.device.runner import StepRunner
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.intake import Intake
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.parallel import outputs_after
from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.request import Request, RequestOutput
from mtpkit.engine.requests.stats import EngineStats, StepTokens
from mtpkit.engine.requests.token_texts import Tokenizer
from mtpkit.engine.requests.tree import DraftShape, width_of
from mtpkit.engine.scheduling.adaptive import AdaptiveSpeculation, FixedSpeculation, Speculation
from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.engine.scheduling.budget import BudgetedSpeculation, SplitTimes
from mtpkit.engine.scheduling.pacing import pacing_for
from mtpkit.engine.scheduling.prefix_blocks import CachedBlocks
from mtpkit.engine.scheduling.prefix_cache import PrefixCache
from mtpkit.engine.scheduling.scheduler import Scheduler
from mtpkit.engine.steps.plan import Plan, StepResult, StepShape
from mtpkit.errors import MtpkitError
from mtpkit.model.state import StateLayout


class Engine:
    """Runs requests step by step; reads no files and has no command line.

    With `async_scheduling`, a step is launched before the results of the previous one are read:
    unless blocks run out, or many requests are constrained (`Scheduler.batch_to_await`), the device
    does not wait for the host, and the host learns one step late that a request has stopped. With
    several batches, each step belongs to one batch, and its
    previous step is that of the same batch: until the results of a batch arrive, steps of the other
    batches are planned and launched. With `graphs`, steps are replayed CUDA graphs.
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
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        verifier: Verifier | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.ranks = ranks or Ranks()
        self.intake = Intake(
            config, num_blocks, vocab_size, tokenizer, eos_token_ids, layout.slot_bytes
        )
        executor = StageExecutor if self.ranks.stage.stages > 1 else Executor
        self.executor = executor(
            config, layout, num_blocks, runner, drafter, vocab_size, device, verifier, self.ranks
        )
        blocks = IdPool(num_blocks)
        prefix = None
        if config.enable_prefix_caching:
            blocks = CachedBlocks(num_blocks)
            prefix = self._prefix_cache(blocks, drafter)
        slots = IdPool(config.max_num_seqs)
        graphs = self.executor.graphs
        sizes = (graphs.chunk_sizes, graphs.sizes_beside) if graphs else ()
        self.pacing = pacing_for(config, device.type == "cuda", *sizes)
        self.scheduler = Scheduler(config, blocks, slots, layout.block_bytes, self.pacing, prefix)

        self._arrived = 0.0
        """When the newest results arrived."""
        self._seconds = 0.0
        """Wall time of the steps."""
        self._step_tokens = StepTokens()
        self._under_way: deque[list[Launched]] = deque()
        """Launched steps whose results are not committed, the oldest first."""
        self._aborted: list[Request] = []
        """Outputs that `abort` has ended since the last step, which the next one returns."""
        self.speculation: Speculation = FixedSpeculation(config.drafts)

    def _prefix_cache(self, blocks: CachedBlocks, drafter: Drafter) -> PrefixCache:
        """The prefix cache, which finds the same prefixes on all ranks, although only the last
        pipeline stage has heads."""
        config = self.config
        following = self.ranks.all_reduce_max(drafter.span.after)
        successors = following > 0 and self.layout.head_slot_bytes > 0
        return PrefixCache(
            blocks,
            config.block_size,
            config.num_checkpoints,
            following,
            config.prefix_cache_interval,
            successors=bool(self.ranks.all_reduce_max(int(successors))),
        )

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        prompt: str | None = None,
        checkpoint_at: int | None = None,
    ) -> str:
        """Queue a request; see `Intake.make`.

        Returns:
            The request's id; by default requests are numbered.

        Raises:
            UserError: the request can never be served, or an unfinished request has the same id.
        """
        request = self.intake.make(
            prompt_token_ids, params, request_id, prompt, checkpoint_at=checkpoint_at
        )
        self.scheduler.add(request)
        return request.request_id

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or the end of an aborted output was not returned."""
        return self.scheduler.has_unfinished or bool(self._aborted)

    @torch.inference_mode()
    def step(self, finished_only: bool = False) -> list[RequestOutput]:
        """Launch a step of one batch, and commit the results of the batch's previous step (with
        `async_scheduling`) or of this step.

        Args:
            finished_only: return outputs of finished requests only, whatever their output kind; the
                text of unfinished requests is then not decoded.

        Returns:
            One output for each prompt whose requests emitted tokens.
        """
        began = time.perf_counter()
        known = self.scheduler.num_tokens
        changed = self._aborted
        self._aborted = []
        if not self.scheduler.has_unfinished:
            return outputs_after(changed, finished_only)

        with self.ranks.working():
            if not self.config.async_scheduling:
                changed += self._collect()

            self._wait_for_grammars()
            if (awaited := self.scheduler.batch_to_await()) is not None:
                changed += self._collect(awaited, left=0)
            plans = self.ranks.plan(self.scheduler, self.speculation)
            if not plans and not self._under_way and self.scheduler.has_unfinished:
                raise MtpkitError(
                    "requests are unfinished, but no step is running and none can be planned"
                )
            if plans:
                launched = [self.executor.launch(plan) for plan in plans]
                self._under_way.append([one for one in launched if one is not None])

            if plans and self.config.async_scheduling:
                changed += self._collect(plans[0].batch)
            else:
                # Without plans, the blocks that the next plans need may only be freed by the
                # results of all steps under way.
                changed += self._collect()

            if not self.scheduler.has_unfinished:
                self._drain()
                self._under_way.clear()
        self._seconds += time.perf_counter() - began
        self._step_tokens.observe(self.scheduler.num_tokens - known)

        return outputs_after(changed, finished_only)

    def _wait_for_grammars(self) -> None:
        """Where nothing else can be done, wait for the grammar of the oldest waiting request."""
        scheduler = self.scheduler
        idle = not scheduler.running and not self._under_way
        if idle and not any(request.may_begin for request in scheduler.waiting):
            for request in scheduler.waiting[:1]:
                assert request.constraint is not None
                request.constraint.wait()

    def warm_up(self, shapes: Sequence[DraftShape]) -> None:
        """See `Executor.warm_up`. No request may wait or run."""
        assert not self.has_unfinished
        self.executor.warm_up(shapes)

    def adapt(self, batch_sizes: Sequence[int], repeats: int = 5, budget: bool = False) -> None:
        """Time steps of these batch sizes with each of `draft_shapes`, and from then on choose
        drafts by these times. No request may wait or run.

        Args:
            budget: also choose which requests verify fewer drafts.
        """
        assert not self.has_unfinished
        shapes = self.draft_shapes
        times = {
            (size, drafts): self._time(size, drafts, repeats)
            for size in batch_sizes
            for drafts in shapes
        }
        if not budget:
            self.speculation = AdaptiveSpeculation(times, self.config.num_batches)
            return
        most = self.config.num_speculative_tokens
        split = {
            size: SplitTimes(
                self._time(size, most, repeats, short=size),
                [self._time(size, k, repeats, short=size // 2) for k in range(1, 1 + most)],
            )
            for size in batch_sizes
            if size > 1
        }
        # Drafts that were drawn in an earlier step than the last one have no distribution to be
        # verified by: each step must make as many as the next one verifies.
        self.speculation = BudgetedSpeculation(
            times, split, self.config.num_batches, fixed=self.config.draft_sampling
        )

    def _time(self, rows: int, drafts: DraftShape, repeats: int, short: int = 0) -> float:
        """Seconds from one step of a request to its next while `rows` requests decode. With
        pipeline stages it is the time of the slowest stage for all batches or the time of one batch
        through all stages, whichever is longer. Rows of a batch that do not fit into the token
        budget together take turns, in steps of equal size. Of all rows, `short` verify no
        drafts."""
        batches = min(rows, self.config.num_batches)
        rows_of_batch = -(-rows // batches)
        rows_that_fit = self.config.max_num_batched_tokens // width_of(drafts)
        turns = -(-rows_of_batch // rows_that_fit)
        at_once = -(-rows_of_batch // turns)
        shape = StepShape.decoding(at_once, drafts, (at_once * short // rows, 0))
        seconds = turns * self.executor.time_step(shape, repeats)

        # Ranks exchange integers.
        own = round(1e9 * seconds)
        slowest = self.ranks.all_reduce_max(own)
        through_all = self.ranks.sum_over_stages(own)
        return max(batches * slowest, through_all) / 1e9

    @property
    def draft_shapes(self) -> list[DraftShape]:
        """The shapes of drafts to choose from: chains of K = 0 and more, then the tree, if there is
        one."""
        chains = list[DraftShape](range(self.config.num_speculative_tokens + 1))
        return chains + ([self.config.tree] if self.config.tree else [])

    @torch.inference_mode()
    def _drain(self) -> None:
        """Complete all exchanges with other ranks that are under way, before any rank may end."""
        self.executor.drain()
        self.ranks.wait_for_sends()

    def _collect(self, batch: int | None = None, left: int = 1) -> list[Request]:
        """Commit the results of steps under way, the oldest first: all, or until `left` steps of
        `batch` are left."""
        changed = []
        while self._under_way and (batch is None or self._num_under_way(batch) > left):
            step = self._under_way.popleft()
            plans = [launched.plan for launched in step]
            results = self.executor.collect(step)

            # A step that was launched while another ran began when that one ended.
            began = max(self._arrived, step[0].began)
            self._arrived = time.perf_counter()
            if self.pacing:
                self.pacing.observe(plans, self._arrived - began)

            for plan, result in zip(plans, results, strict=True):
                # Before the commit, which may end requests of these rows with an error.
                if plan.num_decode_rows:
                    self._observe(plan, result)
                changed += self.scheduler.commit(plan, result)
                self.executor.save(self.scheduler.take_saves())
        return changed

    def _num_under_way(self, batch: int) -> int:
        return sum(step[0].plan.batch == batch for step in self._under_way)

    def _observe(self, plan: Plan, result: StepResult) -> None:
        """Report the accepted drafts of decode rows to `speculation`, except for rows whose logits
        are invalid."""
        accepted = result.accepted.tolist()
        counts = result.num_tokens.tolist()
        valid = [
            index
            for index, row in enumerate(plan.decode_rows)
            if counts[index] == 1 + accepted[index] and row.request.error is None
        ]
        fresh = [plan.rows[index].fresh_drafts for index in valid]
        if result.ranks is None:
            rates = [plan.rows[index].request.history.rate for index in valid]
            self.speculation.observe([accepted[index] for index in valid], fresh, rates)
        else:
            ranks = result.ranks.tolist()
            self.speculation.observe_trees(
                [ranks[index] for index, made in zip(valid, fresh, strict=True) if made]
            )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request; the id of a finished or unknown request is ignored.

        Args:
            index: end only this one of the outputs of its prompt, with finish reason "abort". The
                next step returns it. Log-probabilities of the prompt come with output 0 alone: what
                has not been computed of them then is missing.
        """
        aborted = self.scheduler.abort(request_id, index)
        if aborted is not None:
            self._aborted.append(aborted)
        elif index is None:
            # Nothing of the request is returned any more.
            self._aborted = [one for one in self._aborted if one.request_id != request_id]
        # Perhaps no further step comes in which exchanges with other ranks would be completed.
        if not self.scheduler.has_unfinished:
            with self.ranks.working():
                self._drain()

    def stats(self) -> EngineStats:
        """Totals since the engine was made or `reset_stats` was called."""
        scheduler = self.scheduler
        return EngineStats(
            acceptance=scheduler.acceptance,
            generated_tokens=scheduler.num_generated,
            seconds=self._seconds,
            preemptions=scheduler.admission.num_preemptions,
            state_bytes=self.layout.slot_bytes * scheduler.slots.size,
            state_bytes_per_request=self.layout.slot_bytes,
            kv_bytes=self.layout.block_bytes * scheduler.blocks.size,
            prompt_tokens=scheduler.admission.num_prompt_tokens,
            cached_tokens=scheduler.admission.num_cached_tokens,
            prefilled_tokens=scheduler.num_prefilled,
            returned_bytes=self.executor.stage.returned_bytes
            / max(1, self.executor.stage.returned_rows),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=scheduler.blocks.size,
            used_blocks=scheduler.blocks.size - scheduler.blocks.num_free,
            step_tokens=replace(self._step_tokens, counts=list(self._step_tokens.counts)),
        )

    def reset_stats(self) -> None:
        """Reset the totals, for instance after a warm-up."""
        self._seconds = 0.0
        self._step_tokens = StepTokens()
        self.scheduler.reset_stats()
