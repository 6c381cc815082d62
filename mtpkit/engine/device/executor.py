"""Execution of steps on the device: base, verification, drafting and state, with CUDA graphs and
pipeline stages."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.device.capture import RowGraphs
from mtpkit.engine.device.checkpoints import CheckpointStore
from mtpkit.engine.device.graphs import Sent, StepGraphs, largest_step
from mtpkit.engine.device.runner import CachingRunner, CapturedRunner, Runner, StepRunner
from mtpkit.engine.drafting import Drafter
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.ranks.returned import (
    Column,
    check_returned,
    columns_of,
    from_bytes,
    nbytes_of,
    pack_returned,
    to_bytes,
    unpack_returned,
)
from mtpkit.engine.requests.options import EngineConfig
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.steps.batch import BatchBuilder
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import (
    Batch,
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
        return StepResult.unpack(
            packed, plan.num_speculative_tokens, plan.trees and plan.num_decode_rows > 0
        )


class _Open(NamedTuple):
    """A plan that a pipeline stage has run, but whose results it has not stored yet."""

    launched: Launched
    slots: frozenset[int | None]
    """The slots of its rows: until the results are stored, no other plan with any of these slots
    may begin."""
    held: list[int | None]
    """The slots of its decode rows in order, if their drafts are trees; else empty."""
    store: Callable[[Tensor], Tensor]
    """Stores the results, given the message [S, bytes] uint8; returns what goes to the host."""

    @property
    def is_left(self) -> bool:
        """Whether a request whose drafts are a tree has left its slot. Its blocks may then get
        another owner, so the plan must be stored first: this moves entries within the blocks."""
        return any(
            row.request.slot != slot
            for row, slot in zip(self.launched.plan.decode_rows, self.held, strict=False)
        )


class Executor:
    """Runs plans on the device. Allocates everything that a step reads and writes there, and
    decides nothing.

    Attributes:
        states: caches of the layers.
        state: what the device knows of the requests.
        checkpoints: the checkpoints of the prefix cache, if there is one.
        graphs: the captured steps, if there are graphs.
        stores: on pipeline stages before the last one, the captured functions that store the
            results of steps.
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
        null = int(config.graphs)
        cached = config.enable_prefix_caching
        self.states = layout.allocate(num_blocks + null, config.max_num_seqs, device)
        self.state = DeviceState.allocate(
            config.max_num_seqs + int(config.graphs or cached),
            config,
            ranks.vocabulary(vocab_size),
            device,
            counters=layout.counters,
            earlier=drafter.earlier,
            dtype=layout.sizes.dtype,
            hidden_size=(
                cast(CachingRunner, runner).hidden_size if cached and self.stage.last else 0
            ),
        )
        self.builder = BatchBuilder(config.block_size, self.states, self.state, device, config.tree)
        self.checkpoints: CheckpointStore | None = None
        if cached:
            kept = getattr(torch, config.prefix_cache_dtype)
            fold = cast(CachingRunner, runner).fold
            rows = RowGraphs(config.max_num_seqs, 2, device) if config.graphs else None
            self.checkpoints = CheckpointStore(
                layout, self.states, self.state, config.num_checkpoints, kept, fold, graphs=rows
            )
        self.graphs = self.stores = None
        if config.graphs:
            width = -(
                -(config.max_model_len + config.decode_width + config.lookahead)
                // config.block_size
            )
            self.graphs = StepGraphs(
                self.builder, config, width, num_blocks, cast(CapturedRunner, runner).shortened
            )
            if not self.stage.last:
                self.stores = StepGraphs(self.builder, config, width, num_blocks)
                nbytes = nbytes_of(self._columns_of(StepShape.decoding(1, config.drafts)))
                self._message = torch.zeros(
                    largest_step(config)[2], nbytes, dtype=torch.uint8, device=device
                )
                """Fixed tensor that `stores` read: each row of a message at its row of the step,
                and zeros in null rows."""
        self._open: deque[_Open] = deque()
        # one step per batch, as one plan of decode rows and one of chunks
        self._most_open = 2 * self.stage.stages

    def launch(self, plan: Plan) -> Launched | None:
        """Launch a plan; returns None if the plan has no rows but only restores checkpoints."""
        slots = frozenset(
            [*(row.request.slot for row in plan.rows), *(one.slot for one in plan.restores)]
        )
        while self._open and (
            len(self._open) >= self._most_open
            or any(slots & one.slots or one.is_left for one in self._open)
        ):
            self._store_first()
        self.state.admit(plan.sampling_requests[plan.num_decode_rows :])
        if plan.restores and self.checkpoints:
            self.checkpoints.restore(plan.restores)
            if not plan.rows:
                return None
            return self._launch_resumed(plan, slots)
        if self.stage.stages > 1:
            launched = self._launch_stage(plan, slots)
        elif self.graphs:
            launched = Launched(plan, self.graphs.run(self._execute, plan))
        else:
            launched = Launched(plan, self._execute(self.builder.build(plan)))
        self.save(plan.saves)
        return launched

    def save(self, saves: Sequence[Save]) -> None:
        """Save checkpoints of requests as they are after the last launched step."""
        if saves and self.checkpoints:
            self.checkpoints.save(saves)

    def _launch_resumed(self, plan: Plan, slots: frozenset[int | None]) -> Launched:
        """Launch a step of rows that begin at checkpoints, see `Plan`. Stages exchange no hidden
        states for it."""
        batch = self.builder.build(plan)
        if not self.stage.last:
            return self._opened(plan, slots, partial(self._store, batch))
        packed = self._resume(batch)
        if self.stage.stages > 1:
            self.stage.send_results(to_bytes(packed, self._columns_of(batch.shape)))
        return Launched(plan, packed)

    def _opened(
        self, plan: Plan, slots: frozenset[int | None], store: Callable[[Tensor], Tensor]
    ) -> Launched:
        """Keep a plan open until the last stage sends its results, see `_Open`; returns the plan as
        launched."""
        launched = Launched(plan)
        self._open.append(
            _Open(
                launched, slots, [row.request.slot for row in plan.decode_rows if plan.trees], store
            )
        )
        return launched

    def _resume(self, batch: Batch) -> Tensor:
        """Run a step of rows that begin at checkpoints, without the base; see `Plan`."""
        runner = cast(CachingRunner, self.runner)
        hidden = batch.resumed_hidden
        assert hidden is not None
        return self._finish(
            batch, StepOutput(runner.logits(hidden[batch.logit_indices, 0]), hidden)
        )

    def _launch_stage(self, plan: Plan, slots: frozenset[int | None]) -> Launched:
        """Launch this pipeline stage's part of a plan. All transfers are outside of graphs."""
        shape = self.graphs.shape_for(plan) if self.graphs else StepShape.of(plan)
        cast(Runner, self.runner).receive(shape.tokens)
        if self.stage.last:
            packed = (
                self.graphs.run(self._execute, plan)
                if self.graphs
                else self._execute(self.builder.build(plan))
            )
            self.stage.send_results(to_bytes(packed, self._columns_of(StepShape.of(plan))))
            return Launched(plan, packed)
        # Requests may have changed when the results arrive, so what is stored then must be built
        # now. On the device, these slots do not change until then.
        if self.graphs:
            sent = self.graphs.send(plan)
            hidden = self.graphs.replay(self._execute, plan, sent)
            store = partial(self._replay_store, plan, sent)
        else:
            batch = self.builder.build(plan)
            hidden = self._execute(batch)
            store = partial(self._store, batch)
        self.stage.send(hidden.clone())
        return self._opened(plan, slots, store)

    def collect(self, launched: Sequence[Launched]) -> list[StepResult]:
        """Wait for the results of launched plans, which are the oldest under way."""
        while not all(one.fetched for one in launched):
            self._store_first()
        return [one.wait(self._check if self.stage.stages > 1 else None) for one in launched]

    def _check(self, packed: np.ndarray, plan: Plan) -> None:
        """Check results that came from another stage, see `check_returned`."""
        check_returned(packed, self._columns_of(StepShape.of(plan)))

    def _columns_of(self, shape: StepShape) -> dict[str, Column]:
        return columns_of(shape.drafts, shape.decode_rows > 0, self.vocab_size)

    def drain(self) -> None:
        """Complete all exchanges with other pipeline stages that are under way."""
        while self._open:
            self._store_first()
        self.stage.wait_for_sends()

    def _store_first(self) -> None:
        """Receive the results of the first open plan from the last stage, store them, and begin to
        copy them to the host."""
        first = self._open.popleft()
        plan = first.launched.plan
        columns = self._columns_of(StepShape.of(plan))
        message = self.stage.receive_results(
            plan.num_sampling_rows, nbytes_of(columns), self.builder.device
        )
        first.launched.fetch(first.store(message))

    def _replay_store(self, plan: Plan, sent: Sent, message: Tensor) -> Tensor:
        """Store the results of a plan by a graph, given what `StepGraphs.send` returned for the
        plan."""
        assert self.stores is not None
        shape = self.stores.shape_for(plan)
        decoded = plan.num_decode_rows
        rows = self._message[: shape.rows, : message.shape[1]].zero_()
        rows[:decoded] = message[:decoded]
        rows[shape.decode_rows :][: len(message) - decoded] = message[decoded:]
        return self.stores.run(self._store, plan, sent)

    def _store(self, batch: Batch, message: Tensor | None = None) -> Tensor:
        """Store the results of a batch.

        Args:
            message: [S, bytes] uint8; None: read the fixed tensor `_message`, as graphs do.

        Returns:
            [S, columns] int64, the results for the host.
        """
        columns = self._columns_of(batch.shape)
        if message is None:
            message = self._message[: batch.shape.sampling_rows, : nbytes_of(columns)]
        packed = from_bytes(message, columns)
        verdict, drafts = unpack_returned(packed, batch)
        batch, _ = batch.along(verdict)
        self.state.step(batch, verdict, drafts)
        return packed

    def _execute(self, batch: Batch) -> Tensor:
        """Run the device's part of a step; returns the packed results, see `_finish`. A pipeline
        stage before the last one returns the hidden states for the next stage instead."""
        out = self.runner.run(batch)
        return self._finish(batch, out) if self.stage.last else out.hidden

    def _finish(self, batch: Batch, out: StepOutput) -> Tensor:
        """Verify, draft and store, given the results of the base; returns `pack_returned` or,
        without stages, `pack_result`."""
        verdict = self.verifier(out.logits, batch)
        batch, order = batch.along(verdict)
        hidden = out.hidden if order is None else out.hidden[order]
        drafts = self.drafter.draft(hidden, batch, verdict)
        self.state.step(batch, verdict, drafts, hidden)
        return (
            pack_returned(verdict, drafts)
            if self.stage.stages > 1
            else pack_result(verdict, drafts)
        )

    @torch.inference_mode()
    def warm_up(self, shapes: Sequence[DraftShape]) -> None:
        """If there are CUDA graphs, capture steps of all sizes for each of these shapes of drafts.
        With a prefix cache, capture its copies, and compile the code that it runs without graphs.

        Slots and blocks must be free.
        """
        if self.checkpoints:
            self.checkpoints.warm_up()
        if self.checkpoints and self.stage.last:
            shape = StepShape(0, 1, 1, 1, self.config.drafts, resumed=True)
            numbers = self.builder.ints(self.builder.numbers(shape))
            tables = numbers.new_zeros(1, self.config.decode_width + self.config.lookahead)
            self._resume(self.builder.assemble(shape, numbers, tables, GREEDY))
        if self.graphs:
            self.graphs.capture_all(self._execute, shapes)
        if self.stores:
            self.stores.capture_all(self._store, shapes)

    @torch.inference_mode()
    def time_step(self, rows: int, drafts: DraftShape, repeats: int) -> float:
        """Median seconds of `repeats` greedy decode steps on free slots; as for `warm_up`, slots
        and blocks must be free."""

        def step() -> None:
            if self.graphs:
                self.graphs.replay_free_slots(self._execute, rows, drafts)
                if self.stores:
                    self.stores.replay_free_slots(self._store, rows, drafts)
            else:
                shape = StepShape.decoding(rows, drafts)
                self.state.restart()
                numbers = self.builder.ints(self.builder.null_numbers(shape, range(rows)))
                tables = numbers.new_zeros(rows, self.config.decode_width + self.config.lookahead)
                self._execute(self.builder.assemble(shape, numbers, tables, GREEDY))
            if self.builder.device.type == "cuda":
                torch.cuda.synchronize()

        step()
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)
