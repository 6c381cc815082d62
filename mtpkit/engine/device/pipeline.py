"""Execution of steps on one of several pipeline stages.

A stage before the last one launches its layers and hands the hidden states on. The results come
back later: until then the plan is open, and everything that the stage must store with them was
built at the launch. All transfers are outside of graphs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.device.executor import Executor, Launched, Verifier
from mtpkit.engine.device.graphs import Sent, StepGraphs, largest_step
from mtpkit.engine.device.runner import StepRunner
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.ranks.returned import (
    Column,
    check_returned,
    columns_of,
    num_columns,
    pack_returned,
    unpack_returned,
)
from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.steps import log_probs, runners_up
from mtpkit.engine.steps.plan import Batch, Drafts, Plan, StepResult, StepShape, Verdict
from mtpkit.model.state import StateLayout

_NULL = -1
"""Every integer in the results of a null row: no token, no parent, and a count of 0 once it is
clamped to its column."""


class _Open(NamedTuple):
    """A plan that a pipeline stage has run, but whose results it has not stored yet."""

    launched: Launched
    slots: frozenset[int | None]
    """The slots of its rows: until the results are stored, no other plan with any of these slots
    may begin."""
    held: list[int | None]
    """The slots of its decode rows in order, if their drafts are trees; else empty."""
    store: Callable[[Tensor], Tensor]
    """Stores the results, given the message [S, columns] int32; returns what goes to the host."""

    @property
    def is_left(self) -> bool:
        """Whether a request whose drafts are a tree has left its slot. Its blocks may then get
        another owner, so the plan must be stored first: this moves entries within the blocks."""
        return any(
            row.request.slot != slot
            for row, slot in zip(self.launched.plan.decode_rows, self.held, strict=False)
        )


class StageExecutor(Executor):
    """Runs one pipeline stage's part of plans.

    Attributes:
        stores: on stages before the last one, the captured functions that store the results of
            steps, if there are graphs.
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
        super().__init__(
            config, layout, num_blocks, runner, drafter, vocab_size, device, verifier, ranks
        )
        self.stores: StepGraphs | None = None
        if self.graphs and not self.stage.last:
            self.stores = StepGraphs(self.builder, self.config, self.num_blocks)
            rows = largest_step(self.config)[2]
            columns = self._columns_of(StepShape.decoding(1, self.config.drafts))
            self._message = torch.full(
                (rows, num_columns(columns)), _NULL, dtype=torch.int32, device=self.builder.device
            )
            """Fixed tensor that `stores` read: each row of a message at its row of the step, and
            `_NULL` in null rows."""
        self._open: deque[_Open] = deque()
        # one step per batch, as one plan of decode rows and one of chunks
        self._most_open = 2 * self.stage.stages

    def launch(self, plan: Plan) -> Launched | None:
        """See `Executor.launch`. Resumed rows need no hidden states from the stage before."""
        slots = frozenset(
            [*(row.request.slot for row in plan.rows), *(one.slot for one in plan.restores)]
        )
        while self._open and (
            len(self._open) >= self._most_open
            or any(slots & one.slots or one.is_left for one in self._open)
        ):
            self._store_first()
        self.prepare(plan)
        if not plan.rows:
            return None
        if not plan.restores:
            shape = StepShape.of(plan)
            if self.graphs and self._as_graph(plan):
                shape = self.graphs.shape_for(plan)
            self.runner.receive(shape.tokens)
        launched = self._launch_last(plan) if self.stage.last else self._launch_before(plan, slots)
        self.save(plan.saves)
        return launched

    def _launch_last(self, plan: Plan) -> Launched:
        """Launch the last stage's part of a plan and send its results to the other stages."""
        packed, of_prompts = self._run(plan)
        # A copy, since the next step writes to the same buffer while this one is sent.
        self.stage.send_results(packed.to(torch.int32, copy=True))
        if of_prompts is not None:
            self.stage.send_results(of_prompts.to(torch.int32))
        launched = Launched(plan)
        launched.fetch(packed, of_prompts, self.trees_of(launched))
        return launched

    def _launch_before(self, plan: Plan, slots: frozenset[int | None]) -> Launched:
        """Launch the part of a plan on a stage before the last one, and keep the plan open until
        the last stage sends its results.

        Requests may have changed when the results arrive, so what is stored then must be built now.
        On the device, these slots do not change until then.
        """
        if plan.restores:
            store = partial(self._store, self.builder.build(plan))
        elif self.graphs and self._as_graph(plan):
            sent = self.graphs.send(plan)
            # A copy, since the next step writes to the same buffer while this one is sent.
            self.stage.send(self.graphs.replay(self.execute, sent).clone())
            store = partial(self._replay_store, plan, sent)
        else:
            batch = self.builder.build(plan)
            self.stage.send(self.execute(batch).clone())
            store = partial(self._store, batch)
        return self._opened(plan, slots, store)

    def _opened(
        self, plan: Plan, slots: frozenset[int | None], store: Callable[[Tensor], Tensor]
    ) -> Launched:
        """Keep a plan open, see `_Open`; returns the plan as launched."""
        launched = Launched(plan)
        held = [row.request.slot for row in plan.decode_rows if plan.trees]
        self._open.append(_Open(launched, slots, held, store))
        return launched

    def execute(self, batch: Batch) -> Tensor:
        """See `Executor.execute`. A stage before the last one returns the hidden states for the
        next stage instead."""
        if self.stage.last:
            return super().execute(batch)
        return self.runner.run(batch).hidden

    def pack(self, verdict: Verdict, drafts: Drafts) -> Tensor:
        """See `pack_returned`."""
        return pack_returned(verdict, drafts)

    def collect(self, launched: Sequence[Launched]) -> list[StepResult]:
        """See `Executor.collect`; checks the results, which came from another stage."""
        while not all(one.fetched for one in launched):
            self._store_first()
        return [one.wait(self._check) for one in launched]

    def _check(self, packed: np.ndarray, plan: Plan) -> None:
        columns = self._columns_of(StepShape.of(plan))
        check_returned(packed[:, : num_columns(columns)], columns)

    def _columns_of(self, shape: StepShape) -> dict[str, Column]:
        """See `columns_of`; what only the host reads follows these columns."""
        return columns_of(shape.drafts, shape.decode_rows > 0, self.vocab_size)

    def drain(self) -> None:
        """See `Executor.drain`."""
        while self._open:
            self._store_first()
        self.stage.wait_for_sends()

    def _store_first(self) -> None:
        """Receive the results of the first open plan from the last stage, store them, and begin to
        copy them to the host."""
        first = self._open.popleft()
        plan = first.launched.plan
        stored = num_columns(self._columns_of(StepShape.of(plan)))
        reported = log_probs.columns_of(plan.processors, plan.num_speculative_tokens)
        reported += runners_up.columns_of(plan.processors, plan.drafts)
        message = self.stage.receive_results(
            plan.num_sampling_rows, stored + reported, self.builder.device
        )
        values = first.store(message[:, :stored])
        if reported:
            values = torch.cat([values, message[:, stored:].long()], 1)
        of_prompts = None
        if plan.num_reported:
            of_prompts = self.stage.receive_results(
                plan.num_reported, log_probs.COLUMNS, self.builder.device
            ).long()
        first.launched.fetch(values, of_prompts, self.trees_of(first.launched))

    def _replay_store(self, plan: Plan, sent: Sent, message: Tensor) -> Tensor:
        """Store the results of a plan by a graph, given what `StepGraphs.send` returned for the
        plan."""
        assert self.stores is not None
        shape = sent.shape
        decoded = plan.num_decode_rows
        rows = self._message[: shape.rows, : message.shape[1]].fill_(_NULL)
        rows[:decoded] = message[:decoded]
        rows[shape.decode_rows :][: len(message) - decoded] = message[decoded:]
        return self.stores.sampling_rows(self.stores.replay(self._store, sent), shape, plan)

    def _store(self, batch: Batch, message: Tensor | None = None) -> Tensor:
        """Store the results of a batch.

        Args:
            message: [S, columns] int32; None: read the fixed tensor `_message`, as graphs do.

        Returns:
            [S, columns] int64, the results for the host.
        """
        if message is None:
            columns = num_columns(self._columns_of(batch.shape))
            message = self._message[: batch.shape.sampling_rows, :columns]
        packed = message.long()
        verdict, drafts = unpack_returned(packed, batch)
        batch, _ = batch.along(verdict)
        self.state.step(batch, verdict, drafts)
        return packed

    @torch.inference_mode()
    def warm_up(self, shapes: Sequence[DraftShape]) -> None:
        """See `Executor.warm_up`."""
        super().warm_up(shapes)
        if self.stores:
            self.stores.capture_all(self._store, shapes)

    def step_free_slots(self, shape: StepShape) -> None:
        """See `Executor.step_free_slots`."""
        super().step_free_slots(shape)
        if self.stores:
            self.stores.replay_free_slots(self._store, shape)
