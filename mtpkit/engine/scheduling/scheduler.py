"""Continuous batching with chunked prefill. Only the scheduler changes requests, blocks and
slots."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from mtpkit.engine.requests.options import EngineConfig
from mtpkit.engine.requests.params import MOST_END_TOKENS
from mtpkit.engine.requests.request import (
    AcceptanceStats,
    BadDraft,
    FinishReason,
    PromptError,
    Request,
)
from mtpkit.engine.requests.tree import DraftShape, depth_of
from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.engine.scheduling.pacing import Pacing
from mtpkit.engine.scheduling.prefix_cache import Hit, PrefixCache
from mtpkit.engine.steps.plan import Plan, Restore, Row, Save, StepResult
from mtpkit.errors import MtpkitError, UserError

_arrival = attrgetter("arrival")
_GATHER_STEPS = 16
_GATHER_SLOTS = 8
"""Prompts gather for at most `_GATHER_STEPS` steps, while fewer than 1 / `_GATHER_SLOTS` of the
slots are free."""


class Scheduler:
    """Plans each step and commits its results.

    Requests run in order of arrival. A request is admitted when a slot is free and there are blocks
    for its whole prefill and one decode step. Each decode step reserves blocks for the positions
    that it may write; its commit releases the blocks that rejected drafts leave empty. If blocks
    run out in decoding, the youngest running request is preempted: it gives up its blocks and waits
    to be recomputed. The oldest request therefore always proceeds.

    If more requests decode than the token budget allows in one step, they take turns: the next step
    has the requests that have waited longest. Where a step has room for m of n rows, a request
    waits at most ceil(n / m) steps.

    With several batches, each step belongs to one batch, and the batches take turns. A request is
    in batch `slot % num_batches`. A batch admits requests while it has fewer than its share of all
    requests, so that even a few requests are spread over the batches.

    With a prefix cache, a request begins at the longest checkpoint of its tokens, and leaves
    checkpoints itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: IdPool,
        slots: IdPool,
        eos_token_ids: Sequence[int] = (),
        block_bytes: int = 0,
        pacing: Pacing | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.config = config
        self.pacing = pacing
        """Bounds the prompt tokens of a step; None: they are bounded by the token budget alone."""
        self.blocks = blocks
        self.slots = slots
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefix = prefix
        self.block_bytes = block_bytes
        self.num_speculative_tokens = config.num_speculative_tokens
        """K of the next steps, at most the configured K."""
        self.trees = config.tree is not None
        """Whether the drafts of the next steps are trees."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._live_ids: set[str] = set()
        """Ids of waiting and running requests."""
        self._turn = 0
        """The batch that is planned next."""
        self._num_steps = 0
        """Number of steps planned so far, empty ones included."""
        self._steps_gathered = [0] * config.num_batches
        """For each batch, for how many steps prompts have been held back so that more of them run
        together."""
        self._saves: list[Save] = []
        self.reset_stats()

    def reset_stats(self) -> None:
        """Reset the totals."""
        self.num_preemptions = 0
        self.num_generated = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_prefilled = 0
        self.acceptance = AcceptanceStats.for_depths(
            self.config.num_speculative_tokens, self.config.tree
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def validate(self, request: Request) -> None:
        """Refuse a request that can never be served, or whose id is taken.

        Raises:
            PromptError: with the request's numbers and the limit that they exceed.
            UserError: the id is taken.
        """
        prompt = len(request.prompt_token_ids)
        output = request.max_tokens
        name = request.place or request.name
        if request.request_id in self._live_ids:
            raise UserError(
                f"{name}: an unfinished request has this id, choose another id or give none"
            )
        if not prompt:
            raise PromptError(f"{name}: the prompt is empty, give it at least one token")
        if not output:
            raise PromptError(
                f"{name}: {prompt} prompt tokens leave no room for output in max_model_len "
                f"{self.config.max_model_len}: shorten the prompt or raise max_model_len"
            )
        # Blocks are reserved for the whole prompt. The newest token is never cached, and the last
        # decode step starts before it.
        positions = self.config.reach(prompt + max(0, output - 2))
        if self._blocks_for(positions) > self.blocks.size:
            raise PromptError(
                f"{name}: {prompt} prompt tokens + {output} output tokens + lookahead"
                f" {self.config.lookahead} need {self._blocks_for(positions)} blocks of"
                f" {self.config.block_size}, the cache has {self.blocks.size}: shorten the prompt,"
                " lower max_tokens or raise num_blocks"
            )

    @property
    def num_decoding(self) -> int:
        """Requests of all batches that the next plans may decode."""
        return sum(request.decoding and not request.ends_in_flight for request in self.running)

    def take(self, drafts: DraftShape) -> None:
        """Set the shape of the drafts for the decode rows of the next plans."""
        self.num_speculative_tokens, self.trees = depth_of(drafts), not isinstance(drafts, int)

    def add(self, request: Request) -> None:
        """Validate a request and queue it."""
        self.validate(request)
        insort(self.waiting, request, key=_arrival)
        self._live_ids.add(request.request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request if it is unfinished, and ignore the results of its launched steps."""
        for request in [r for r in self.running if r.request_id == request_id]:
            self._free(request)
        self.waiting = [r for r in self.waiting if r.request_id != request_id]
        self._live_ids.discard(request_id)

    def plan(self) -> list[Plan]:
        """Plan a step of the batch whose turn it is, or of the next batch that has anything to run.

        At least one request must be unfinished. The list is empty if blocks must first be freed by
        committing the results of launched steps. The turn then stays with that batch: if other
        batches took the freed blocks, the oldest request might never proceed.
        """
        for _ in range(self.config.num_batches):
            plans = self._plan_batch()
            if plans is None:
                break
            self._turn = (self._turn + 1) % self.config.num_batches
            if plans:
                return plans
        return []

    def _plan_batch(self) -> list[Plan] | None:
        """Choose the rows that run next and reserve their blocks: decode rows, then chunks of
        prompts.

        Up to `max_mixed_tokens` chunk tokens share a forward pass with the decode rows, which saves
        reading the weights a second time. If there are more, all chunks run in a pass of their own
        after the decode rows.

        Returns:
            None if blocks must first be freed.
        """
        preemptions = self.num_preemptions
        self._num_steps += 1
        budget = self.config.max_num_batched_tokens
        if self.prefix:
            for request in self._batch:
                self.prefix.publish(request, request.num_computed)
        decode = self._plan_decode(budget)
        if decode is None:
            return None
        budget -= sum(row.length for row in decode)
        batch = self._batch
        begun = [request for request in batch if not request.decoding]
        free, due = self._room(len(batch))
        if self.pacing:
            budget = self._paced(self.pacing, budget, len(decode), begun, free, due)
        chunks = []
        restores = list[Restore]()
        resumed = list[Row]()
        for request in begun:
            if budget:
                chunks.append(self._chunk(request, budget))
                budget -= chunks[-1].length
        for _ in range(min(free, due)):
            if (
                not budget
                or preemptions != self.num_preemptions
                or not (admitted := self._admit(restores))
            ):
                break
            if admitted.num_computed and not (self.prefix and self.prefix.successors):
                resumed.append(self._resumed(admitted))
                budget -= 1
            if budget and not admitted.decoding:
                chunks.append(self._chunk(admitted, budget))
                budget -= chunks[-1].length
        chunks.sort(key=lambda row: not row.samples)
        plans = self._together_or_apart(decode, chunks)
        if restores:
            resumed.sort(key=lambda row: not row.samples)
            plans.insert(0, replace(self._together([], resumed), restores=tuple(restores)))
        for plan in plans:
            for row in plan.rows:
                row.request.in_flight += row.samples and row.emits
                if row.samples:
                    row.request.newest_step = self._num_steps
                    row.request.num_drafted = plan.num_speculative_tokens
                    row.request.drafted_tree = plan.trees
        for row in chunks:  # the length of a chunk is known before it runs
            row.request.num_computed += row.length
            self.num_prefilled += row.length
        return [self._with_saves(plan) for plan in plans if plan.rows or plan.restores]

    @property
    def _slots(self) -> range:
        """The slots of the batch whose turn it is."""
        return range(self._turn, self.config.max_num_seqs, self.config.num_batches)

    @property
    def _batch(self) -> list[Request]:
        """The running requests of the batch whose turn it is, the oldest first."""
        slots = self._slots
        return [request for request in self.running if request.slot in slots]

    def _room(self, num_running: int) -> tuple[int, int]:
        """Room of the batch whose turn it is, which has `num_running` running requests: the number
        of its free slots, and the number of waiting requests that it may admit within its share of
        all requests.

        While a request waits and a slot is free, some batch has room of both kinds: the smaller of
        a batch's slots and its share of all requests is its share of min(all slots, all requests),
        and fewer requests than that run.
        """
        share = len(
            range(self._turn, len(self.running) + len(self.waiting), self.config.num_batches)
        )
        return len(self._slots) - num_running, max(0, min(len(self.waiting), share - num_running))

    def _paced(
        self,
        pacing: Pacing,
        budget: int,
        num_decoding: int,
        begun: list[Request],
        free: int,
        due: int,
    ) -> int:
        """Most prompt tokens of a step with `num_decoding` decode rows; 0 while prompts gather. The
        prompts of `begun` requests are not computed in full yet; for `free` and `due` see `_room`.

        While more requests wait than slots are free, prompts are held back for some steps, until
        they fill a step or many slots are free. A longer step takes less time per prompt token, so
        that all of these prompts end sooner.
        """
        crowded = due > free
        elsewhere = (
            0 if num_decoding else -(-self.num_decoding // max(1, self.config.num_batches - 1))
        )
        budget = pacing.most_tokens(budget, num_decoding, due + len(begun), crowded, elsewhere)
        left = sum(request.prefill_end - request.num_computed for request in begun)
        left += sum(len(request.token_ids) for request in self.waiting[: min(free, due)])
        few_slots = free * _GATHER_SLOTS < len(self._slots)
        gathered = self._steps_gathered[self._turn]
        gather = (
            num_decoding and crowded and few_slots and left < budget and gathered < _GATHER_STEPS
        )
        self._steps_gathered[self._turn] = gathered + bool(left) if gather else 0
        return 0 if gather else budget

    def _with_saves(self, plan: Plan) -> Plan:
        """Add to a plan a checkpoint for each chunk that ends where a checkpoint is wanted."""
        if not self.prefix or plan.restores:
            return plan
        ends = ((row.request, row.start + row.length) for row in plan.chunks)
        kept = (
            self.prefix.keep(one, end) for one, end in ends if end in (one.prefill_end, *one.cuts)
        )
        return replace(plan, saves=tuple(save for save in kept if save))

    def _together_or_apart(self, decode: list[Row], chunks: list[Row]) -> list[Plan]:
        if sum(row.length for row in chunks) <= self.config.max_mixed_tokens:
            return [self._together(decode, chunks)]
        return [self._together(decode, []), self._together([], chunks)]

    def _together(self, decode: list[Row], chunks: list[Row]) -> Plan:
        rows = (*decode, *chunks)
        # Without decode rows, chunks make drafts for the configured K or tree, whatever decode rows
        # verify at present.
        drafts = self.config.drafts
        if decode and not self.trees:
            drafts = self.num_speculative_tokens
        samples = sum(row.samples for row in rows)
        return Plan(rows, len(decode), samples, drafts, batch=self._turn)

    def _plan_decode(self, budget: int) -> list[Row] | None:
        """Decode rows of the batch, the oldest request first; None if a row must wait for results
        of earlier steps."""
        width = self.config.decode_width if self.trees else 1 + self.num_speculative_tokens
        rows: list[Row] = []
        # All requests that were chosen may have been preempted, the last of them for want of
        # blocks: others take over.
        while not rows and (chosen := self._next_to_decode(budget // width)):
            for request in chosen:
                if not request.decoding:  # preempted for an older one
                    continue
                if self._make_room(request):
                    fresh = self._fresh_drafts(request)
                    rows.append(
                        Row(request, request.num_computed, width, samples=True, fresh_drafts=fresh)
                    )
                elif any(other.in_flight for other in self.running):
                    return None
        return rows

    def _next_to_decode(self, most: int) -> list[Request]:
        """At most `most` decoding requests of the batch, those that have waited longest, in order
        of arrival.

        Blocks are reserved in order of arrival, so that no request of a step is preempted for a
        later one of the step.
        """
        ready = [
            request for request in self._batch if request.decoding and not request.ends_in_flight
        ]
        longest_first = sorted(ready, key=attrgetter("newest_step", "arrival"))
        return sorted(longest_first[:most], key=_arrival)

    def _fresh_drafts(self, request: Request) -> int:
        """See `Row.fresh_drafts`. A chain after a step of trees has one fresh draft, the first one
        of the tree. A tree after a step of chains has none, since the places of its siblings hold
        no drafts."""
        fresh = min(self.num_speculative_tokens, request.num_drafted)
        if request.drafted_tree == self.trees:
            return fresh
        return 0 if self.trees else min(1, fresh)

    def _chunk(self, request: Request, budget: int) -> Row:
        """The next chunk of a prompt."""
        stops = (*(cut for cut in request.cuts if cut > request.num_computed), request.prefill_end)
        length = min(budget, stops[0] - request.num_computed)
        ends = request.num_computed + length == request.prefill_end
        return Row(
            request, request.num_computed, length, samples=ends, emits=not request.num_output
        )

    @staticmethod
    def _resumed(request: Request) -> Row:
        """The row of a request that was admitted at a checkpoint, see `Plan`."""
        return Row(
            request,
            request.num_computed - 1,
            1,
            samples=request.decoding,
            emits=not request.num_output,
        )

    def _admit(self, restores: list[Restore]) -> Request | None:
        """Admit the oldest waiting request, if there are enough blocks, to a slot of the batch,
        which must have a free one. If the request begins at a checkpoint, the copies that it needs
        are appended to `restores`."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        request.prefill_end = len(request.token_ids) - (request.num_output > 0)
        hit = self.prefix.match(request) if self.prefix else None
        if not self._reserve(request, self.config.reach(request.prefill_end), hit):
            return None
        request.slot = self.slots.allocate_from(self._slots)
        if self.prefix:
            request.num_computed = hit.length if hit else 0
            request.cuts = self.prefix.cuts(request, request.num_computed)
            if hit:
                restores.append(self.prefix.resume(hit, request))
        if request.stats.num_cached_tokens is None:
            request.stats.num_cached_tokens = request.num_computed
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.num_computed
        self.waiting.pop(0)
        insort(self.running, request, key=_arrival)
        return request

    def _make_room(self, request: Request) -> bool:
        """Reserve blocks for a decode step, preempting the youngest requests if needed.

        No request is preempted while launched steps are uncommitted, since their results may free
        blocks and their tokens must not be lost.

        Returns:
            False if `request` itself was preempted or must wait.
        """
        under_way = request.in_flight * (1 + self.config.num_speculative_tokens)
        while not self._reserve(request, self.config.reach(request.num_computed + under_way)):
            if any(other.in_flight for other in self.running):
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _reserve(self, request: Request, positions: int, hit: Hit | None = None) -> bool:
        """Give a request the blocks that it still lacks for `positions` positions; at admission,
        the hit's shared blocks come first. False if too few blocks are free."""
        shared = hit.shared if hit else ()
        needed = self._blocks_for(positions) - len(request.block_table) - len(shared)
        if needed > self.blocks.num_free:
            return False
        for block in shared:
            self.blocks.share(block)
        # some of the shared blocks were idle, and counted as free
        if needed > self.blocks.num_free:
            self.blocks.release(reversed(shared))
            return False
        request.block_table.extend(shared)
        request.block_table.extend(self.blocks.allocate(max(0, needed)))
        request.stats.kv_bytes = max(
            request.stats.kv_bytes, len(request.block_table) * self.block_bytes
        )
        return True

    def _preempt(self, request: Request) -> None:
        """Release the blocks and the slot of a request and let it wait again; it keeps its
        tokens."""
        self._free(request)
        request.num_computed = 0
        request.stats.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_arrival)

    def _free(self, request: Request) -> None:
        assert request.slot is not None
        if self.prefix:
            self.prefix.publish(request, request.num_computed)
        self.blocks.release(reversed(request.block_table))  # the last blocks are evicted first
        self.slots.release([request.slot])
        del request.block_table[:]
        request.slot = None
        request.in_flight = 0
        request.num_published = 0
        request.bad_draft = None
        self.running.remove(request)

    def _blocks_for(self, positions: int) -> int:
        return -(-positions // self.config.block_size)

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
        changed = []
        arrays = (result.accepted, result.token_ids, result.num_tokens, result.bad_draft)
        rows = zip(plan.rows, *(array.tolist() for array in arrays), strict=False)
        for index, (row, accepted, token_ids, num_tokens, bad_draft) in enumerate(rows):
            request = row.request
            valid = num_tokens == 1 + accepted
            if request.slot is None or not (row.emits or bad_draft):
                continue
            request.in_flight -= row.emits
            count = self._emit(request, token_ids[:num_tokens]) if row.emits else 0
            if index < plan.num_decode_rows:
                request.num_computed += accepted + 1
                if valid:
                    for stats in (request.stats, self.acceptance):
                        if result.ranks is not None:
                            stats.record_tree(
                                result.ranks[index].tolist(),
                                count,
                                row.length - 1 if row.fresh_drafts else 0,
                            )
                        else:
                            stats.record(accepted, count, row.fresh_drafts)
            self.num_generated += count
            if not request.finished:
                ranks = None if result.ranks is None else result.ranks[index].tolist()
                self._fail_if_invalid(request, accepted, ranks, valid, bad_draft)
            if self.prefix and request.finish_reason in ("stop", "length"):
                self._keep_end(request, whole=count == 1 + accepted)
            self._settle(request)
            changed.append(request)
        return changed

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

    def _fail_if_invalid(
        self, request: Request, accepted: int, ranks: list[int] | None, valid: bool, bad_draft: int
    ) -> None:
        """End a request with an error if logits that matter are not finite; its valid tokens are
        already appended.

        What the heads compute after a draft has no effect unless the base accepts that draft.

        Args:
            accepted: drafts of the step before that the base accepted.
            ranks: if these were a tree, one per depth, see `Verdict.ranks`.
            valid: whether all logits of the base that were used are finite.
            bad_draft: the first depth, from 1, at which the logits of the heads are not finite; 0:
                none.
        """
        earlier = request.bad_draft
        request.bad_draft = None
        if bad_draft:
            position = len(request.token_ids) + bad_draft - 1
            request.bad_draft = BadDraft(bad_draft, position, request.num_output)

        if not valid:
            request.fail(
                f"the logits for position {len(request.token_ids)}, after {request.num_output}"
                " output tokens, are NaN or infinite: weights or activations of the base are not"
                " finite; check the checkpoint, or try dtype float32"
            )
        elif earlier and self._is_reached(earlier, accepted, ranks):
            self._fail_for_draft(request, earlier)
        # no draft comes before it that the base could reject
        elif request.bad_draft and bad_draft == 1:
            self._fail_for_draft(request, request.bad_draft)

    @staticmethod
    def _is_reached(bad: BadDraft, accepted: int, ranks: list[int] | None) -> bool:
        """Whether the base accepted the drafts before a bad one. In a tree the last of them must
        have children: the bad ones may be those of a sibling that the base rejected."""
        return bad.depth <= 1 + accepted and (ranks is None or ranks[bad.depth - 1] >= -1)

    @staticmethod
    def _fail_for_draft(request: Request, bad: BadDraft) -> None:
        request.fail(
            f"draft {bad.depth} for position {bad.position}, after {bad.num_output} output tokens,"
            " has logits that are NaN or infinite: weights or activations of the MTP heads are not"
            " finite; check the heads, or decode without them (K = 0)"
        )

    def _emit(self, request: Request, token_ids: list[int]) -> int:
        """Append tokens until one ends the request; return the number of appended tokens."""
        for count, token_id in enumerate(token_ids, 1):
            request.token_ids.append(token_id)
            request.finish_reason = self._finish_reason(request, token_id)
            if request.finished:
                return count
        return len(token_ids)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """The reason if the newest token ends the request, else None; stop tokens are left out of
        the text."""
        if token_id in request.end_token_ids:
            return "stop"
        if request.detokenizer and request.detokenizer.append(token_id):
            return "stop"
        return "length" if request.num_output == request.max_tokens else None

    def _settle(self, request: Request) -> None:
        """Release all that a finished request holds, or the blocks that the rewind of an unfinished
        one empties."""
        if request.finished:
            if (
                request.detokenizer
                and request.detokenizer.flush()
                and request.finish_reason == "length"
            ):
                request.finish_reason = "stop"
            self._free(request)
            self._live_ids.remove(request.request_id)
            return
        # A launched step starts at num_computed, and all positions that it writes may be kept.
        computed = request.num_computed
        keep = self._blocks_for(self.config.reach(computed) if request.in_flight else computed)
        self.blocks.release(request.block_table[keep:])
        del request.block_table[keep:]

    def check_integrity(self) -> None:
        """Compare the allocators with the blocks and slots of the requests.

        Raises:
            MtpkitError: they disagree, a waiting request holds blocks or a slot, or the set of live
                ids is wrong.
        """
        self.blocks.check_integrity(
            [block for request in self.running for block in request.block_table]
        )
        if self.prefix:
            self.prefix.check_integrity()
        self.slots.check_integrity(
            [request.slot for request in self.running if request.slot is not None]
        )
        holders = [r.request_id for r in self.waiting if r.block_table or r.slot is not None]
        if holders or any(r.slot is None for r in self.running):
            raise MtpkitError(
                f"waiting requests hold blocks or slots: {holders}, or a running one has no slot"
            )
        ids = sorted(request.request_id for request in self.running + self.waiting)
        if ids != sorted(self._live_ids):
            raise MtpkitError(
                f"requests {ids} are unfinished, but ids {sorted(self._live_ids)} are taken"
            )
