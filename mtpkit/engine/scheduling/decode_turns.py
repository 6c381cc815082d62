"""Decode turns: which running requests decode in a step, and the blocks that they need for it."""

from operator import attrgetter

from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import DraftShape, depth_of, width_of
from mtpkit.engine.scheduling.admission import Admission, by_arrival
from mtpkit.engine.steps.plan import Row

_longest_wait = attrgetter("newest_step", "arrival")


class DecodeTurns:
    """Chooses the decode rows of each step.

    If more requests decode than the token budget allows in one step, they take turns: the next step
    has the requests that have waited longest. Where a step has room for m of n rows, a request
    waits at most ceil(n / m) steps.

    Each row reserves blocks for the positions that it may write. If blocks run out, the youngest
    running request is preempted, so that the oldest request always proceeds.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.max_drafts = admission.config.num_speculative_tokens

    def plan(self, batch: int, drafts: DraftShape, budget: int) -> list[Row] | None:
        """Decode rows of a batch within a budget of tokens, the oldest request first; None if a row
        must wait for blocks that the results of launched steps may free."""
        width = width_of(drafts)
        rows: list[Row] = []
        # All requests that were chosen may have been preempted, the last of them for want of
        # blocks: others take over.
        while not rows and (chosen := self._next(batch, budget // width)):
            for request in chosen:
                if not request.decoding:  # preempted for an older one
                    continue
                if self._make_room(request):
                    fresh = fresh_drafts(request, drafts)
                    start = request.num_computed
                    rows.append(Row(request, start, width, samples=True, fresh_drafts=fresh))
                elif self._any_in_flight():
                    return None
        return rows

    def _next(self, batch: int, limit: int) -> list[Request]:
        """At most `limit` decoding requests of a batch, those that have waited longest, in order of
        arrival.

        Blocks are reserved in order of arrival, so that no request of a step is preempted for a
        later one of the step.
        """
        ready = [one for one in self.admission.running_in(batch) if one.ready_to_decode]
        longest_first = sorted(ready, key=_longest_wait)
        return sorted(longest_first[:limit], key=by_arrival)

    def _make_room(self, request: Request) -> bool:
        """Reserve blocks for a decode step, preempting the youngest requests if needed.

        No request is preempted while launched steps are uncommitted, since their results may free
        blocks and their tokens must not be lost.

        Returns:
            False if `request` itself was preempted or must wait.
        """
        # The launched steps of the request may accept all their drafts.
        uncommitted = request.in_flight * (1 + self.max_drafts)
        positions = self.admission.config.reach(request.num_computed + uncommitted)
        while not self.admission.reserve(request, positions):
            if self._any_in_flight():
                return False
            youngest = self.admission.running[-1]
            self.admission.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _any_in_flight(self) -> bool:
        return any(request.in_flight for request in self.admission.running)


def fresh_drafts(request: Request, drafts: DraftShape) -> int:
    """Number of drafts, per path, of a request's next decode row that its previous step made, see
    `Row.fresh_drafts`; 0 for a request that does not speculate."""
    if not request.params.speculate:
        return 0
    made = request.newest_drafts
    fresh = min(depth_of(drafts), depth_of(made))
    if isinstance(drafts, int) == isinstance(made, int):
        return fresh
    # The places of a tree's siblings hold no drafts after a step of chains.
    if isinstance(made, int):
        return 0
    # Only the first draft of a tree lies where that of a chain does.
    return min(1, fresh)
