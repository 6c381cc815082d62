"""Execution of steps on the device: base, verification, drafting and state, as one CUDA graph if
there are graphs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.device.capture import RowGraphs
from mtpkit.engine.device.checkpoints import COLUMNS, CheckpointStore
from mtpkit.engine.device.graphs import StepGraphs
from mtpkit.engine.device.runner import StepRunner
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.steps import log_probs, runners_up
from mtpkit.engine.steps.batch import BatchBuilder
from mtpkit.engine.steps.constrained import constrained_rows, slots_of
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import (
    Batch,
    Drafts,
    Plan,
    Save,
    StepOutput,
    StepResult,
    StepShape,
    Verdict,
    pack_result,
)
from mtpkit.engine.steps.processors import GREEDY
from mtpkit.engine.steps.verifier import verify
from mtpkit.model.state import StateLayout

Verifier = Callable[[Tensor, Batch], Verdict]


class Launched:
    """A launched plan. Its result is being copied to the host or, on a stage before the last one,
    has yet to arrive."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.constrained_slots = slots_of(plan.constrained_requests)
        """Slots of the constrained requests that the plan samples for. The requests may have left
        them when the result arrives."""
        self.began = time.perf_counter()
        self.fetched = False
        """Whether the result is being copied."""

    def fetch(
        self, values: Tensor, of_prompts: Tensor | None = None, trees: Tensor | None = None
    ) -> None:
        """Begin to copy the result.

        Args:
            of_prompts, trees: see `StepResult`.
        """
        self.fetched = True
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        self._values = _copied(values)
        self._of_prompts = None if of_prompts is None else _copied(of_prompts)
        self._trees = None if trees is None else _copied(trees)
        # Recorded before the next step is launched, so that `wait` waits for this step alone.
        if self._arrived is not None:
            self._arrived.record()

    def wait(self, check: Callable[[np.ndarray, Plan], None] | None = None) -> StepResult:
        """Wait for the result and return it.

        Args:
            check: raises an error if no step of the plan can have these results, given the results
                [S, columns] and the plan.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        packed = self._values.numpy()
        plan = self.plan
        if check is not None:
            check(packed, plan)
        ranked = plan.trees and plan.num_decode_rows > 0
        depths = plan.num_speculative_tokens
        result = StepResult.unpack(
            packed,
            depths,
            ranked,
            runners_up=runners_up.columns_of(plan.processors, plan.drafts),
            reported=log_probs.columns_of(plan.processors, depths),
        )
        if self._of_prompts is not None:
            result = replace(result, of_prompts=self._of_prompts.numpy())
        if self._trees is not None:
            result = replace(result, trees=self._trees.numpy())
        return result


def _copied(values: Tensor) -> Tensor:
    """A copy on the host, which is complete once the device has come this far."""
    # A copy to memory that is not pinned would wait for the device.
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copy.copy_(values, non_blocking=True)


class Executor:
    """Runs plans on the device. Allocates everything that a step reads and writes there, and
    decides nothing.

    Attributes:
        states: caches of the layers.
        state: what the device knows of the requests.
        checkpoints: the checkpoints of the prefix cache, if there is one.
        graphs: the captured steps, if there are graphs.
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
        verifier: Verifier | None,
        ranks: Ranks,
    ) -> None:
        self.config = config
        self.runner = runner
        self.drafter = drafter
        self.verifier = verifier or verify
        self.stage = ranks.stage
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        cached = config.enable_prefix_caching

        # Null rows write to a block and a slot of `DeviceState` that no request has. Graphs have
        # them, and so has the step that `warm_up` runs for the prefix cache: a chunk, which writes
        # to no block.
        null_blocks = int(config.graphs)
        null_slots = int(config.graphs or cached)
        self.states = layout.allocate(num_blocks + null_blocks, config.max_num_seqs, device)
        self.state = DeviceState.allocate(
            config.max_num_seqs + null_slots,
            config,
            ranks.vocabulary(vocab_size),
            device,
            counters=layout.counters,
            span=drafter.span,
            dtype=layout.sizes.dtype,
            hidden_size=runner.hidden_size if cached and self.stage.last else 0,
        )
        self.builder = BatchBuilder(config.block_size, self.states, self.state, device, config.tree)

        self.checkpoints: CheckpointStore | None = None
        if cached:
            kept = getattr(torch, config.prefix_cache_dtype)
            rows = RowGraphs(config.max_num_seqs, COLUMNS, device) if config.graphs else None
            self.checkpoints = CheckpointStore(
                layout,
                self.states,
                self.state,
                config.num_checkpoints,
                kept,
                runner.fold,
                graphs=rows,
            )

        self.graphs: StepGraphs | None = None
        if config.graphs:
            self.graphs = StepGraphs(self.builder, config, num_blocks, runner.shortened)

    def launch(self, plan: Plan) -> Launched | None:
        """Launch a plan; returns None if the plan has no rows but only restores checkpoints."""
        self.prepare(plan)
        if not plan.rows:
            return None

        # The copy to the host comes before the checkpoints, which the host does not wait for.
        launched = Launched(plan)
        values, of_prompts = self._run(plan)
        launched.fetch(values, of_prompts, self.trees_of(launched))
        self.save(plan.saves)
        return launched

    def trees_of(self, launched: Launched) -> Tensor | None:
        """See `StepResult.trees`, once the step has stored its results."""
        slots = launched.constrained_slots
        return self.state.drafts_at(slots) if self.config.tree and slots else None

    def _run(self, plan: Plan) -> tuple[Tensor, Tensor | None]:
        """The results of a plan's rows, and of prompts, see `execute` and `StepResult`."""
        if self._as_graph(plan):
            assert self.graphs is not None
            return self.graphs.run(self.execute, plan), None
        batch = self.builder.build(plan)
        if batch.reported is None:
            return self.execute(batch), None
        out = self.runner.run(batch)
        of_prompts = log_probs.pack_prompts(self.runner.logits, out.hidden, batch)
        return self._decide(batch, out), of_prompts

    def _as_graph(self, plan: Plan) -> bool:
        """Whether a plan is run as a graph: resumed rows are few, and no graph is captured for
        them."""
        return self.graphs is not None and not plan.restores and not plan.num_reported

    def execute(self, batch: Batch) -> Tensor:
        """Run a step on the device: base, verification, drafts, and the state that the next step
        reads. Graphs capture this function, so that nothing in it waits for the device.

        Returns:
            The results for the host, see `pack`, followed by runners-up of drafts and by
            log-probabilities, see `steps.runners_up.pack` and `steps.log_probs.pack_chosen`.
        """
        return self._decide(batch, self.runner.run(batch))

    def _decide(self, batch: Batch, out: StepOutput) -> Tensor:
        """Verify and draft, given what the base computed."""
        verdict = self.verifier(out.logits, batch)
        reported = log_probs.pack_chosen(out.logits, batch, verdict, self.config.logprobs_mode)

        # From here on an accepted path of a tree is a chain, for the heads and for the next step.
        batch, order = batch.along(verdict)
        hidden = out.hidden if order is None else out.hidden[order]

        drafts = self.drafter.draft(hidden, batch, verdict)
        self.state.step(batch, verdict, drafts, hidden)
        parts = [self.pack(verdict, drafts), runners_up.pack(drafts, batch), reported]
        return torch.cat([part for part in parts if part is not None], 1)

    def pack(self, verdict: Verdict, drafts: Drafts) -> Tensor:
        """Pack the results of a step that all steps have, see `pack_result`."""
        return pack_result(verdict, drafts)

    def prepare(self, plan: Plan) -> None:
        """Write what the rows of a plan read besides their tokens: sampling parameters of requests
        that begin to sample, masks and drafts of constrained ones, and restored checkpoints."""
        self.state.admit(plan.sampling_requests[plan.num_decode_rows :])
        constrained = constrained_rows(plan, self.vocab_size, self.config.draft_sampling)
        if constrained:
            masks, drafts = constrained
            self.state.write_masks(masks)
            if drafts:
                self.state.write_drafts(drafts)
        if plan.restores and self.checkpoints:
            self.checkpoints.restore(plan.restores)

    def save(self, saves: Sequence[Save]) -> None:
        """Save checkpoints of requests as they are after the last launched step."""
        if saves and self.checkpoints:
            self.checkpoints.save(saves)

    def collect(self, launched: Sequence[Launched]) -> list[StepResult]:
        """Wait for the results of launched plans, which are the oldest under way."""
        return [one.wait() for one in launched]

    def drain(self) -> None:
        """Complete all exchanges with other pipeline stages that are under way."""

    @torch.inference_mode()
    def warm_up(self, shapes: Sequence[DraftShape]) -> None:
        """If there are CUDA graphs, capture steps of all sizes for each of these shapes of drafts.
        With a prefix cache, capture its copies, and compile the code that it runs without graphs.

        Slots and blocks must be free.
        """
        if self.checkpoints:
            self.checkpoints.warm_up()
        if self.checkpoints and self.stage.last:
            self._execute_null_rows(StepShape(0, 1, 1, 1, self.config.drafts, resumed=True))
        if self.graphs:
            self.graphs.capture_all(self.execute, shapes)

    @torch.inference_mode()
    def time_step(self, shape: StepShape, repeats: int) -> float:
        """Median seconds of `repeats` greedy steps of decode rows alone on free slots; as for
        `warm_up`, slots and blocks must be free."""
        seconds = []
        # The first step compiles, captures or loads what it needs, and is not timed.
        for _ in range(1 + repeats):
            began = time.perf_counter()
            self.step_free_slots(shape)
            if self.builder.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)

        return statistics.median(seconds[1:])

    def step_free_slots(self, shape: StepShape) -> None:
        """Run a greedy step of decode rows on the slots from 0 on, which no request may hold."""
        if self.graphs:
            self.graphs.replay_free_slots(self.execute, shape)
            return
        self.state.pretend(self.config.timed_position)
        self._execute_null_rows(shape, range(shape.decode_rows))

    def _execute_null_rows(self, shape: StepShape, slots: Sequence[int] = ()) -> None:
        """Run a greedy step without graphs in which the first decode rows are at `slots`, and all
        other rows are null rows."""
        numbers = self.builder.ints(self.builder.null_numbers(shape, slots))
        positions = self.config.timed_position + self.config.decode_width + self.config.lookahead
        tables = numbers.new_zeros(shape.rows, self.config.blocks_for(positions))
        self.execute(self.builder.assemble(shape, numbers, tables, GREEDY))
