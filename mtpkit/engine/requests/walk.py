"""Walks of grammars along the drafts of a step: which drafts are legal, what takes the place of
others, and the masks of tokens that may follow.

The drafts of a request are a tree, of which a chain is the simplest, see
`mtpkit.engine.requests.tree`. A walk goes along all paths and cuts drafts that are not legal, with
what follows them. Masks take far longer than the walk itself. Those of all requests are therefore
computed together, by the threads of llguidance.

Shape legend: T tokens of a tree, M masks, W integers per mask.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


_THREADS = max(1, (os.cpu_count() or 1) // 2)
"""Threads that compute masks. The other half of the processor's is for whatever else runs."""


class _Run(NamedTuple):
    """Tokens of a tree, each a child of the one before, whose masks one call computes."""

    path: tuple[int, ...]
    """What the grammar reads before the masks begin: the drafts up to the run's first token."""
    places: list[int]
    """The tokens of the run."""
    drafts: list[int]
    """The drafts at these places but the first."""


class Position(NamedTuple):
    """Where the grammar of a request is after all output tokens."""

    matcher: "LLMatcher | None"
    """None: the grammar can say nothing, so that only an end may follow."""
    start_after: int | None
    """Token after which the grammar begins; None: it has begun."""
    end_token_ids: frozenset[int]
    """Tokens that end an output."""
    end_mask: np.ndarray
    """[W] int32, the mask of these tokens."""


class Walk:
    """Walk of one request's grammar along its drafts.

    Args:
        token_ids: T tokens, the newest output token first, see `TokenTree`. Drafts are replaced
            where the grammar forces text.
        parents: T indices of tokens.
        depth: most drafts of a path that are verified.
        writes: whether drafts may be replaced.
        runners_up: for the tokens after the newest output token, what the heads found best after
            the draft. The first that is legal replaces a draft that is not. Chains may have them.

    Attributes:
        places: for each mask, the token of the tree that it follows. Tokens that are left out are
            not legal, or follow one that is not.
        written: places of the drafts that were replaced, or that the grammar forces.
    """

    def __init__(
        self,
        position: Position,
        token_ids: list[int],
        parents: Sequence[int],
        depth: int,
        writes: bool = True,
        runners_up: Sequence[Sequence[int]] = (),
    ) -> None:
        self.token_ids = token_ids
        self.written: list[int] = []
        self._position = position
        self._matcher = position.matcher
        self._writes = writes
        self._runners_up = runners_up if writes else ()
        self._runs: list[_Run] = []
        self._free: list[int] = []
        """Tokens that any token may follow, as the grammar has not begun."""
        self._ended: list[int] = []
        """Tokens that only an end may follow."""
        self._children: list[list[int]] = [[] for _ in parents]
        for child, parent in enumerate(parents[1:], 1):
            self._children[parent].append(child)

        if position.matcher is None:
            self._ended.append(0)
        elif position.start_after is not None:
            self._go_freely(0, depth)
        else:
            self._go(0, depth, (), ())
        followed = [place for run in self._runs for place in run.places]
        self.places = [*followed, *self._ended, *self._free]

    def _go_freely(self, place: int, depth: int) -> None:
        """Walk on from a token before the grammar begins: every draft is legal."""
        self._free.append(place)
        for child in self._children[place] if depth else ():
            if self.token_ids[child] == self._position.start_after:
                self._go(child, depth - 1, (), ())
            else:
                self._go_freely(child, depth - 1)

    def _go(
        self,
        place: int,
        depth: int,
        path: tuple[int, ...],
        forced: Sequence[int],
        run: _Run | None = None,
    ) -> None:
        """Walk on from a token that the matcher has read.

        Args:
            depth: most drafts that may follow.
            path: what the matcher has read since the newest output token.
            forced: the next tokens that are forced, as far as they are known.
            run: the run of the token's parent, if the token continues it.
        """
        matcher = self._matcher
        assert matcher is not None
        if matcher.is_stopped():
            self._end(place, depth)
            return

        if run is None:
            run = _Run(path, [place], [])
            self._runs.append(run)
        else:
            run.places.append(place)
            run.drafts.append(path[-1])

        children = self._children[place] if depth else []
        if children and self._writes:
            forced = forced or matcher.compute_ff_tokens()
            if forced:
                self._write(children, forced[0])
        following: _Run | None = run
        for child in children:
            if not self._is_legal(matcher, child):
                continue
            token = self.token_ids[child]
            if token in self._position.end_token_ids:
                # Reading an end cannot be undone in all states, and says nothing that is not known.
                self._end(child, depth - 1)
                continue
            matcher.consume_token(token)
            rest = forced[1:] if forced and token == forced[0] else ()
            self._go(child, depth - 1, (*path, token), rest, following)
            matcher.rollback(1)
            # Siblings begin runs of their own.
            following = None

    def _is_legal(self, matcher: "LLMatcher", place: int) -> bool:
        """Whether the draft at a place is legal, or a runner-up that replaces it."""
        others = self._runners_up[place - 1] if place <= len(self._runners_up) else ()
        for token in (self.token_ids[place], *others):
            if matcher.validate_tokens([token]):
                if token != self.token_ids[place]:
                    self.token_ids[place] = token
                    self.written.append(place)
                return True
        return False

    def _write(self, children: list[int], token: int) -> None:
        """Let one of several drafts be the token that is forced there."""
        place = next((one for one in children if self.token_ids[one] == token), children[0])
        self.token_ids[place] = token
        self.written.append(place)

    def _end(self, place: int, depth: int) -> None:
        """Walk on from a token that only an end may follow."""
        self._ended.append(place)
        children = self._children[place] if depth else []
        ends = self._position.end_token_ids
        if (
            children
            and self._writes
            and not any(self.token_ids[child] in ends for child in children)
        ):
            # Which end it is, the base says. Most models have one.
            self._write(children, min(ends))
        for child in children:
            if self.token_ids[child] in ends:
                self._end(child, depth - 1)

    @property
    def num_runs(self) -> int:
        """Number of calls that the masks take."""
        return len(self._runs)

    def prepare(self, masks: np.ndarray) -> None:
        """Write what is known without a call to the walk's part of the masks [len(places), W]."""
        # Where the grammar fails while it computes masks, an end is what they say, too.
        masks[:] = self._position.end_mask
        masks[len(masks) - len(self._free) :] = -1

    def begin(self, number: int) -> tuple["LLMatcher", int, list[int]]:
        """Bring the matcher to the beginning of a run, until `end` is called.

        Returns:
            The matcher, the place of the run's first mask among those of the walk, and the drafts
            along which the others are.
        """
        assert self._matcher is not None
        run = self._runs[number]
        self._matcher.consume_tokens(list(run.path))
        return self._matcher, sum(len(one.places) for one in self._runs[:number]), run.drafts

    def end(self, number: int) -> None:
        """Bring the matcher back from a run."""
        assert self._matcher is not None
        self._matcher.rollback(len(self._runs[number].path))


def masks_along(walks: Sequence[Walk], words: int) -> np.ndarray:
    """[M, W] int32, the masks after the tokens at `places` of each walk, one walk after another. A
    bit is set for each token that may follow."""
    counts = [len(walk.places) for walk in walks]
    masks = np.empty((sum(counts), words), np.int32)
    firsts = np.cumsum([0, *counts]).tolist()
    for walk, first, count in zip(walks, firsts, counts, strict=False):
        walk.prepare(masks[first : first + count])

    # A matcher reads one path at a time: each round has one run of each request.
    for number in range(max((walk.num_runs for walk in walks), default=0)):
        alone = []
        longer = []
        taking = [pair for pair in zip(walks, firsts, strict=False) if number < pair[0].num_runs]
        for walk, first in taking:
            matcher, place, drafts = walk.begin(number)
            if drafts:
                longer.append((matcher, first + place, drafts))
            else:
                alone.append((matcher, first + place))
        where = (masks.ctypes.data, words * masks.itemsize, len(masks))
        for along_drafts in _calls(longer):
            _executor().unsafe_compute_mask_ptr_with_draft_token(along_drafts, *where)
        for jobs in _calls(alone):
            _executor().unsafe_compute_mask_ptr(jobs, *where)
        for walk, _ in taking:
            walk.end(number)
    return masks


def _calls[Job](jobs: list[Job]) -> list[list[Job]]:
    """Jobs by the calls that they share: one, or one each if there is no second thread to share the
    work with. A single job runs in this thread, while waking others takes longer than a mask."""
    if _THREADS > 1:
        return [jobs] if jobs else []
    return [[job] for job in jobs]


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(_THREADS)
