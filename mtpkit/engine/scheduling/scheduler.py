"""Continuous batching with chunked prefill: plans each step and commits its results. Only the
scheduler and its parts change requests, blocks and slots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.log_probs import TokenLogProbs
from mtpkit.engine.requests.params import MOST_END_TOKENS
from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.stats import AcceptanceStats
from mtpkit.engine.scheduling.admission import Admission, Room
from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.engine.scheduling.budget import by_acceptance, long_rows
from mtpkit.engine.scheduling.chunks import PromptBudget, PromptRows
from mtpkit.engine.scheduling.decision import Decision
from mtpkit.engine.scheduling.decode_turns import DecodeTurns
from mtpkit.engine.scheduling.pacing import Pacing
from mtpkit.engine.scheduling.prefix_cache import PrefixCache
from mtpkit.engine.steps.log_probs import unpack
from mtpkit.engine.steps.plan import Plan, Row, Save, StepResult


class _RowResult(NamedTuple):
    """Results of one row that samples."""

    accepted: int
    """See `StepResult.accepted`."""
    token_ids: list[int]
    """See `StepResult.token_ids`."""
    num_tokens: int
    """See `StepResult.num_tokens`."""
    bad_draft: int
    """See `StepResult.bad_draft`."""
    drafts: list[int]
    """See `StepResult.drafts`."""
    ranks: list[int] | None
    """For trees, one per depth, see `Verdict.ranks`."""
    runners_up: list[int] | None
    """See `StepResult.runners_up`."""
    log_probs: np.ndarray | None
    """[columns], see `StepResult.log_probs`."""

    @property
    def valid(self) -> bool:
        """Whether all logits of the base that were used are finite."""
        return self.num_tokens == 1 + self.accepted


class Scheduler:
    """Plans each step and commits its results.

    Each part of a step has a place of its own: `Admission` says which requests run, `DecodeTurns`
    which of them decode in a step, and `PromptBudget` how many prompt tokens the step computes.

    With several batches, each step belongs to one batch, and the batches take turns.

    With a prefix cache, requests leave checkpoints.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: IdPool,
        slots: IdPool,
        block_bytes: int = 0,
        pacing: Pacing | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.slots = slots
        self.prefix = prefix
        self.admission = Admission(config, blocks, slots, block_bytes, prefix)
        self.turns = DecodeTurns(self.admission)
        self.prompt_budget = PromptBudget(self.admission, pacing)
        self.decision = Decision(config.drafts)
        """The decision that the newest plans follow, with the limit that pacing chose for them."""
        self._batch = 0
        """The batch that is planned next."""
        self._num_steps = 0
        """Number of steps planned so far, empty ones included."""
        self._num_decided = 0
        """Requests that could decode when the newest decision was made."""
        self._saves: list[Save] = []
        self.reset_stats()

    def reset_stats(self) -> None:
        """Reset the totals."""
        self.admission.reset_stats()
        self.num_generated = 0
        self.num_prefilled = 0
        self.acceptance = AcceptanceStats.for_depths(
            self.config.num_speculative_tokens, self.config.tree
        )

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait to be admitted, the oldest first."""
        return self.admission.waiting

    @property
    def running(self) -> list[Request]:
        """Requests that hold a slot, the oldest first."""
        return self.admission.running

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed of prompts or added to outputs so far."""
        return self.num_prefilled + self.num_generated

    @property
    def decoding(self) -> list[Request]:
        """Requests of all batches that the next plans may decode."""
        return [request for request in self.running if request.ready_to_decode]

    @property
    def num_decoding(self) -> int:
        """Requests of all batches that the next plans may decode."""
        return self.admission.num_ready_to_decode

    def batch_to_await(self) -> int | None:
        """The batch that is planned next, if its launched steps are to be committed before; None:
        plan it at once.

        A plan that does not wait has none of the rows that need those results: constrained requests
        decode in every other step, or one half of them in each. Where at least half of all rows are
        constrained, a step of all of them is worth the wait for the host, since each step reads all
        weights.
        """
        count = self.config.num_batches
        for batch in ((self._batch + turn) % count for turn in range(count)):
            # One without requests is skipped.
            if running := self.admission.running_in(batch):
                return batch if self._gains_by_waiting(running) else None
        return None

    def _gains_by_waiting(self, running: Sequence[Request]) -> bool:
        """Whether a step of these requests is to wait for those that need results."""
        # Steps without constrained requests are to pay no more than this look.
        if not any(one.constraint for one in running):
            return False
        rows = [one for one in running if one.decodes_on]
        ready = sum(one.ready_to_decode for one in rows)
        constrained = sum(one.constraint is not None for one in rows)
        # A step that is full as it is has no room for more.
        room = self.config.max_num_batched_tokens // self.config.decode_width
        return ready < min(len(rows), room) and 2 * constrained >= len(rows)

    def add(self, request: Request) -> None:
        """Queue a request, see `Admission.add`."""
        self.admission.add(request)

    def abort(self, request_id: str, index: int | None = None) -> Request | None:
        """Drop a request if it is unfinished, and ignore the results of its launched steps.

        Args:
            index: end only this one of the outputs of its prompt.

        Returns:
            The request of that output; None if it is not unfinished.
        """
        if index is None:
            self.admission.drop(request_id)
            return None
        for request in [*self.running, *self.waiting]:
            if (request.request_id, request.index) == (request_id, index):
                self.admission.abort(request)
                return request
        return None

    def plan(self, decision: Decision) -> list[Plan]:
        """Plan a step of the batch whose turn it is, or of the next batch that has anything to run.

        At least one request must be unfinished. The list is empty if blocks must first be freed by
        committing the results of launched steps. The turn then stays with that batch: if other
        batches took the freed blocks, the oldest request might never proceed.
        """
        self.decision = decision
        self._num_decided = self.num_decoding
        for _ in range(self.config.num_batches):
            plans = self._plan_batch(self._batch, decision)
            if plans is None:
                break
            self._batch = (self._batch + 1) % self.config.num_batches
            if plans:
                return plans
        return []

    def _plan_batch(self, batch: int, decision: Decision) -> list[Plan] | None:
        """Choose the rows of a batch that run next and reserve their blocks: decode rows first,
        then chunks of prompts that have begun, then those of newly admitted requests.

        Returns:
            None if blocks must first be freed.
        """
        preemptions = self.admission.num_preemptions
        self._num_steps += 1
        self._publish_blocks(batch)

        decode = self.turns.plan(batch, decision.drafts, self.config.max_num_batched_tokens)
        if decode is None:
            return None
        preempted = self.admission.num_preemptions > preemptions
        prompts = self._plan_prompts(batch, decision, decode, preempted)

        plans = self._plans(batch, decision, decode, prompts)
        for plan in plans:
            self._note_launch(plan)
        return [self._with_saves(plan) for plan in plans if plan.rows or plan.restores]

    def _publish_blocks(self, batch: int) -> None:
        """Let other requests find the full blocks of a batch's running requests, before any is
        admitted or preempted."""
        if self.prefix:
            for request in self.admission.running_in(batch):
                self.prefix.publish(request, request.num_computed)

    def _plan_prompts(
        self, batch: int, decision: Decision, decode: list[Row], preempted: bool
    ) -> PromptRows:
        """Choose the chunks of a step, and admit requests.

        Args:
            preempted: whether the decode rows took blocks from other requests.
        """
        begun = [one for one in self.admission.running_in(batch) if not one.decoding]
        room = self.admission.room(batch)
        limit = decision.prompt_tokens
        if limit is None:
            limit = self.prompt_budget.limit(decode, begun, room)
        self.decision = replace(decision, prompt_tokens=limit)

        prompts = PromptRows(self.prompt_budget.tokens(batch, decode, begun, room, limit))
        for request in begun:
            prompts.add_chunk(request)
        # A request that lost its blocks in this step would take them again at once.
        if not preempted:
            self._admit(batch, room, prompts)
        prompts.sort()
        return prompts

    def _admit(self, batch: int, room: Room, prompts: PromptRows) -> None:
        """Admit requests while slots, blocks and the budget of prompt tokens last."""
        without_heads = self.prefix is not None and self.prefix.successors
        for _ in range(room.num_admissible):
            if not prompts.budget:
                return
            admitted = self.admission.admit(batch)
            if admitted is None:
                return
            prompts.add_admitted(admitted, without_heads)

    def _plans(
        self, batch: int, decision: Decision, decode: list[Row], prompts: PromptRows
    ) -> list[Plan]:
        """The forward passes of a step, in their order; some may have no rows.

        Up to `max_mixed_tokens` chunk tokens share a forward pass with the decode rows, which saves
        reading the weights a second time. If there are more, all chunks run in a pass of their own
        after the decode rows.
        """
        chunks = prompts.chunks
        if sum(row.length for row in chunks) <= self.config.max_mixed_tokens:
            plans = [self._pass(batch, decision, decode, chunks)]
        else:
            plans = [
                self._pass(batch, decision, decode, []),
                self._pass(batch, decision, [], chunks),
            ]
        # The chunks of resumed requests continue from the checkpoints.
        if prompts.restores:
            resumed = self._pass(batch, decision, [], prompts.resumed)
            plans.insert(0, replace(resumed, restores=tuple(prompts.restores)))
        return plans

    def _pass(self, batch: int, decision: Decision, decode: list[Row], chunks: list[Row]) -> Plan:
        """One forward pass. Beside chunks, all decode rows verify equally many drafts: steps of all
        sizes with chunks and short rows would be too many graphs."""
        drafts = decision.drafts
        short = 0, 0
        if decode and not chunks and not any(row.request.params.speculate for row in decode):
            # Beside others, rows keep the width that the step has; alone, they need no drafts.
            drafts = 0
            decode = [replace(row, length=1) for row in decode]
        elif not chunks and decision.short[0]:
            decode, short = self._shortened(decode, decision)
        if not decode:
            # Chunks then make drafts for the configured K or tree, whatever decode rows verify at
            # present: the number of drafts may have grown when these are verified.
            drafts = self.config.drafts
        rows = (*decode, *chunks)
        num_sampling = sum(row.samples for row in rows)
        return Plan(rows, len(decode), num_sampling, drafts, short, batch=batch)

    def _shortened(
        self, decode: list[Row], decision: Decision
    ) -> tuple[list[Row], tuple[int, int]]:
        """Decode rows of which some verify fewer drafts, those last; and how many, see
        `Plan.short`."""
        assert isinstance(decision.drafts, int)
        rows, drafts = decision.short
        # The decision is about all decode rows; a batch has its share of them.
        share = len(decode) * rows // self._num_decided
        count = len(decode) - long_rows(len(decode), len(decode) - share)
        ranked = by_acceptance([row.request for row in decode])
        shortened = {request.arrival for request in ranked[len(ranked) - count :]}
        whole = [row for row in decode if row.request.arrival not in shortened]
        short = [
            replace(row, length=1 + drafts, fresh_drafts=min(drafts, row.fresh_drafts))
            for row in decode
            if row.request.arrival in shortened
        ]
        return whole + short, (count, drafts if count else 0)

    def _note_launch(self, plan: Plan) -> None:
        """Bring requests to the state in which the launch of a plan leaves them."""
        for row in plan.rows:
            if row.samples:
                row.request.in_flight += row.emits
                row.request.drafts_in_flight += 1
                row.request.newest_step = self._num_steps
                row.request.newest_drafts = plan.drafts
        if plan.restores:
            return
        # The length of a chunk is known before it runs, that of a decode row is not.
        for row in plan.chunks:
            row.request.num_computed += row.length
            self.num_prefilled += row.length

    def _with_saves(self, plan: Plan) -> Plan:
        """Add to a plan a checkpoint for each chunk that ends where a checkpoint is wanted."""
        if not self.prefix or plan.restores:
            return plan
        saves = []
        for row in plan.chunks:
            end = row.start + row.length
            if end == row.request.prefill_end or end in row.request.cuts:
                saves.append(self.prefix.keep(row.request, end))
        return replace(plan, saves=tuple(save for save in saves if save))

    def commit(self, plan: Plan, result: StepResult) -> list[Request]:
        """Commit the results of a plan: append tokens, rewind rejected drafts, release blocks,
        finish requests.

        A request whose logits are invalid keeps the tokens before them and ends with an error,
        unless one of these tokens ends it. If the base's logits are invalid, the step does not
        count towards acceptance.

        Returns:
            The requests that emitted tokens or ended. Rows whose request ended after the launch are
            skipped.
        """
        self._report_prompts(plan, result)
        changed = []
        # The rows that sample come first: the others have no results.
        for index, (row, outcome) in enumerate(zip(plan.rows, _by_row(result), strict=False)):
            if row.request.slot is None:
                continue
            row.request.note_drafts(outcome.drafts, outcome.runners_up or [])
            if not row.request.params.speculate:
                # Its drafts are never read.
                outcome = outcome._replace(bad_draft=0)
            if not (row.emits or outcome.bad_draft):
                continue
            self._commit_row(row, outcome, decoded=index < plan.num_decode_rows)
            changed.append(row.request)
        self._note_trees(plan, result)
        return changed

    @staticmethod
    def _note_trees(plan: Plan, result: StepResult) -> None:
        """Hand the trees of drafts to constrained requests that still run."""
        if result.trees is None:
            return
        for request, drafts in zip(plan.constrained_requests, result.trees.tolist(), strict=True):
            if request.slot is not None:
                request.note_tree(drafts)

    def _report_prompts(self, plan: Plan, result: StepResult) -> None:
        """Hand the log-probabilities of prompts to the requests that ask for them."""
        if result.of_prompts is None:
            return
        found = unpack(result.of_prompts)
        for row in plan.chunks:
            if row.reported:
                row.request.report_prompt(row.start + 1, found[: row.reported])
                del found[: row.reported]

    def _commit_row(self, row: Row, outcome: _RowResult, decoded: bool) -> None:
        """Commit the results of one row."""
        request = row.request
        count = 0
        if row.emits:
            request.in_flight -= 1
            reported: Sequence[TokenLogProbs] = ()
            if request.params.logprobs is not None:
                assert outcome.log_probs is not None
                reported = unpack(outcome.log_probs)
            # A constraint that has failed allowed nothing but an end, which says nothing.
            failed = request.constraint.error if request.constraint else None
            tokens = [] if failed else outcome.token_ids[: outcome.num_tokens]
            count = request.emit(tokens, reported)
            self.num_generated += count
            if request.constraint and count:
                request.constraint.advance(request.token_ids[-count:])
            if failed is not None:
                request.fail(failed, refused=True)
        if decoded:
            request.num_computed += outcome.accepted + 1
            if outcome.valid:
                request.history.observe(outcome.accepted, row.fresh_drafts)
                _record(request.stats, row, outcome, count)
                if request.params.speculate:
                    _record(self.acceptance, row, outcome, count)

        if not request.finished:
            request.fail_if_invalid(
                outcome.accepted, outcome.ranks, outcome.valid, outcome.bad_draft
            )
        if not request.finished:
            self.admission.trim(request)
            return

        # A checkpoint needs the slot and the blocks, which the end of the request releases.
        if self.prefix and request.finish_reason != "error":
            self._keep_end(request, whole=count == 1 + outcome.accepted)
        request.end()
        self.admission.end(request)

    def _keep_end(self, request: Request, whole: bool) -> None:
        """Leave a checkpoint before the newest token of a request that has ended.

        The device itself notices ends by token or by length, and leaves the slot as it is there. It
        does not know stop strings: after one, the slot must hold all tokens of the step, and no
        later step may be in flight.

        Args:
            whole: whether the request keeps all tokens of the step.
        """
        assert self.prefix is not None
        ends = request.end_token_ids if len(request.end_token_ids) <= MOST_END_TOKENS else ()
        known = request.num_output == request.max_tokens or request.token_ids[-1] in ends
        if known or (whole and not request.in_flight):
            save = self.prefix.keep(request, len(request.token_ids) - 1, decoded=True)
            self._saves += [save] if save else []

    def take_saves(self) -> list[Save]:
        """Checkpoints that ended requests leave, to be written before the next launch; each is
        returned once."""
        saves = self._saves
        self._saves = []
        return saves

    def check_integrity(self) -> None:
        """See `Admission.check_integrity`."""
        self.admission.check_integrity()


def _by_row(result: StepResult) -> list[_RowResult]:
    """The results of each row that samples."""
    arrays = (
        result.accepted,
        result.token_ids,
        result.num_tokens,
        result.bad_draft,
        result.drafts,
    )
    columns = [array.tolist() for array in arrays]
    none = [None] * len(result.token_ids)
    ranks = none if result.ranks is None else result.ranks.tolist()
    others = none if result.runners_up is None else result.runners_up.tolist()
    log_probs = none if result.log_probs is None else list(result.log_probs)
    return [_RowResult(*values) for values in zip(*columns, ranks, others, log_probs, strict=True)]


def _record(stats: AcceptanceStats, row: Row, outcome: _RowResult, num_emitted: int) -> None:
    """Count a decode step of a row."""
    if outcome.ranks is None:
        stats.record(outcome.accepted, num_emitted, row.fresh_drafts)
    else:
        num_drafts = row.length - 1 if row.fresh_drafts else 0
        stats.record_tree(outcome.ranks, num_emitted, num_drafts)
