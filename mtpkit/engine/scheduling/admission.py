"""Admission: which requests wait, which run, and which slots and blocks the running ones hold."""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from mtpkit.engine.requests.config import EngineConfig
from mtpkit.engine.requests.request import Request
from mtpkit.engine.scheduling.blocks import IdPool
from mtpkit.engine.scheduling.prefix_cache import Hit, PrefixCache
from mtpkit.engine.steps.plan import Restore
from mtpkit.errors import MtpkitError, UserError

by_arrival = attrgetter("arrival")


class Room(NamedTuple):
    """Room of a batch for more requests.

    While a request waits and a slot is free, some batch has room of both kinds: the smaller of a
    batch's slots and its share of all requests is its share of min(all slots, all requests), and
    fewer requests than that run.
    """

    free: int
    """Free slots of the batch."""
    due: int
    """Waiting requests that the batch may admit within its share of all requests."""

    @property
    def num_admissible(self) -> int:
        """Most requests that the batch may admit."""
        return min(self.free, self.due)

    @property
    def crowded(self) -> bool:
        """Whether some of the requests that are due must wait for running ones to end."""
        return self.due > self.free


class Admitted(NamedTuple):
    """A request that has just got its slot and its first blocks."""

    request: Request
    restore: Restore | None
    """Copies from the checkpoint at which the request begins; None: it begins at position 0."""


class Admission:
    """Waiting and running requests, in order of arrival.

    A request is admitted when its batch has a free slot and there are blocks for its whole prefill
    and one decode step. A running request reserves further blocks before each decode step. A
    request that is preempted gives up its slot and all blocks, and waits at its old place in the
    order of arrival. It is then admitted like any other, with its output as part of what prefill
    computes; its slot may be in another batch.

    A request is in batch `slot % num_batches`. A batch admits requests while it has fewer than its
    share of all requests, so that even a few requests are spread over the batches.

    With a prefix cache, a request begins at the longest checkpoint of its tokens. Of siblings,
    which have the same prompt, one computes it and the others are held back until it has.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: IdPool,
        slots: IdPool,
        block_bytes: int = 0,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.slots = slots
        self.prefix = prefix
        self.block_bytes = block_bytes
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._live_ids = Counter[str]()
        """Ids of waiting and running requests; siblings have the same one."""
        self.reset_stats()

    def reset_stats(self) -> None:
        """Reset the totals."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    @property
    def num_ready_to_decode(self) -> int:
        """Requests of all batches that the next plans may decode."""
        return sum(request.ready_to_decode for request in self.running)

    def add(self, request: Request) -> None:
        """Queue a request and its siblings at their places in the order of arrival.

        Raises:
            UserError: a waiting or running request has the same id.
        """
        if request.request_id in self._live_ids:
            raise UserError(
                f"{request.place or request.name}: an unfinished request has this id, choose"
                " another id or give none"
            )
        for sibling in request.all_of_prompt:
            insort(self.waiting, sibling, key=by_arrival)
            self._live_ids[sibling.request_id] += 1

    def drop(self, request_id: str) -> None:
        """Forget a request and its siblings, whether they wait or run; an unknown id is ignored."""
        for request in [one for one in self.running if one.request_id == request_id]:
            self.release(request)
        self.waiting[:] = [one for one in self.waiting if one.request_id != request_id]
        del self._live_ids[request_id]

    def abort(self, request: Request) -> None:
        """End a waiting or running request, and leave its siblings alone."""
        request.abort()
        if request.slot is None:
            self.waiting.remove(request)
            self._forget_id(request)
        else:
            self.end(request)

    def slots_of(self, batch: int) -> range:
        """The slots of a batch."""
        return range(batch, self.config.max_num_seqs, self.config.num_batches)

    def running_in(self, batch: int) -> list[Request]:
        """The running requests of a batch, the oldest first."""
        slots = self.slots_of(batch)
        return [request for request in self.running if request.slot in slots]

    def room(self, batch: int) -> Room:
        """Room of a batch for more requests."""
        num_running = len(self.running_in(batch))
        num_requests = len(self.running) + len(self.waiting)
        share = len(range(batch, num_requests, self.config.num_batches))
        due = max(0, min(len(self.waiting), share - num_running))
        return Room(len(self.slots_of(batch)) - num_running, due)

    def admit(self, batch: int) -> Admitted | None:
        """Admit the oldest waiting request that may begin and is not held back to a slot of a
        batch, which must have a free one; None if there is none or there are too few blocks."""
        held = self._held_back()
        may_begin = (one for one in self.waiting if one.may_begin and one.request_id not in held)
        request = next(may_begin, None)
        if request is None:
            return None

        # A younger request that needs fewer blocks does not overtake this one, which might
        # otherwise wait forever.
        has_output = request.num_output > 0
        request.prefill_end = len(request.token_ids) - has_output

        hit = None
        if self.prefix and request.reads_prefix_cache:
            hit = self.prefix.match(request)
        if not self.reserve(request, self.config.reach(request.prefill_end), hit):
            return None
        request.slot = self.slots.allocate_from(self.slots_of(batch))
        restore = self._begin(request, hit)

        self.waiting.remove(request)
        insort(self.running, request, key=by_arrival)
        return Admitted(request, restore)

    def _held_back(self) -> set[str]:
        """Ids of requests that are not admitted, because a running sibling computes their prompt
        and will leave a checkpoint at its end.

        Only a running request holds others back: it has all blocks that its prompt needs, and if it
        loses them or is dropped, the next sibling takes its place.
        """
        if self.prefix is None or not self.prefix.slots.size:
            return set()
        return {one.request_id for one in self.running if one.siblings and one.computes_prompt}

    def _begin(self, request: Request, hit: Hit | None) -> Restore | None:
        """Set where a request that has its slot and blocks begins; returns the copies from the
        checkpoint, if it begins at one."""
        restore = None
        if self.prefix:
            request.num_computed = hit.length if hit else 0
            request.cuts = self.prefix.cuts(request, request.num_computed)
            if hit:
                restore = self.prefix.resume(hit, request)

        request.metrics.note_scheduled()
        # A preempted request mostly finds what it computed itself, which is no hit of its prompt.
        if request.stats.num_cached_tokens is None:
            request.stats.num_cached_tokens = request.num_computed
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.num_computed
        return restore

    def reserve(self, request: Request, positions: int, hit: Hit | None = None) -> bool:
        """Give a request the blocks that it still lacks for a number of positions; at admission,
        the hit's shared blocks come first.

        Returns:
            False if too few blocks are free; the request then has what it had.
        """
        shared: Sequence[int] = hit.shared if hit else ()
        lacking = self.config.blocks_for(positions) - len(request.block_table) - len(shared)
        if lacking > self.blocks.num_free:
            return False

        # Sharing comes before allocating, which could evict the blocks of the hit. It takes idle
        # blocks out of those that counted as free, so that there may be too few after all.
        for block in shared:
            self.blocks.share(block)
        if lacking > self.blocks.num_free:
            self.blocks.release(reversed(shared))
            return False

        request.block_table.extend(shared)
        request.block_table.extend(self.blocks.allocate(max(0, lacking)))
        held_bytes = len(request.block_table) * self.block_bytes
        request.stats.kv_bytes = max(request.stats.kv_bytes, held_bytes)
        return True

    def trim(self, request: Request) -> None:
        """Release the blocks of a running request that rejected drafts leave empty."""
        kept = request.num_computed
        if request.in_flight:
            # A launched step starts there, and all positions that it writes may be kept.
            kept = self.config.reach(kept)
        count = self.config.blocks_for(kept)
        self.blocks.release(request.block_table[count:])
        del request.block_table[count:]

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a running request and let it wait again; it keeps its
        tokens."""
        self.release(request)
        request.num_computed = 0
        request.stats.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=by_arrival)

    def end(self, request: Request) -> None:
        """Release all that a finished request holds, its id included."""
        self.release(request)
        self._forget_id(request)

    def _forget_id(self, request: Request) -> None:
        """Let go of a request's id, which is free again after its last sibling."""
        self._live_ids[request.request_id] -= 1
        if not self._live_ids[request.request_id]:
            del self._live_ids[request.request_id]

    def release(self, request: Request) -> None:
        """Release the slot and the blocks of a running request, which then no longer runs."""
        assert request.slot is not None
        if self.prefix:
            self.prefix.publish(request, request.num_computed)
        # Blocks are evicted in the order of their release. A block is of use only with all those
        # before it, so the last ones go first.
        self.blocks.release(reversed(request.block_table))
        self.slots.release([request.slot])
        request.leave_slot()
        self.running.remove(request)

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
        ids = Counter(request.request_id for request in self.running + self.waiting)
        if ids != self._live_ids:
            raise MtpkitError(
                f"requests {sorted(ids.elements())} are unfinished, but ids"
                f" {sorted(self._live_ids.elements())} are taken"
            )
