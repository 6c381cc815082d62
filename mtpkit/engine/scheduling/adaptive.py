"""Choice of the drafts of each step: always the same ones, or those with the highest expected
tokens per second.

A step verifies as many drafts as it makes for the next one, see `Plan.drafts`. After a step with
K = 0 the next step of its batch therefore has none to verify, whatever its own K is.
"""

from collections.abc import Mapping, Sequence

from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import DraftShape, depth_of

_DECAY = 0.99
"""Decay factor of the acceptance counts per step."""
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 4.0
"""Acceptance rate assumed for a depth that has not been tried, and the number of drafts this
assumption counts for."""
_PRIOR_MENDED = 0.37
"""Assumed probability that another candidate of a tree is right when the first one is wrong: the
rate that others have measured for second candidates."""
_PROBE_INTERVAL = 256
_PROBE_STEPS = 2
"""Acceptance is learnt only from drafts that are verified, so 2 of every 256 steps of a batch are
probes, which verify other drafts than the best ones. The first of the two finds stale drafts. If a
probe takes twice the time of a plain step, the two probes cost 1%."""
GAIN = 1.01
"""More drafts are chosen only if their expected speed exceeds that of fewer drafts by more than
this factor."""


class FixedSpeculation:
    """The same drafts in every step."""

    def __init__(self, drafts: DraftShape) -> None:
        self.drafts = drafts

    def choose(self, num_rows: int) -> DraftShape:
        """Return K, or the tree, for a step with `num_rows` decode rows: the drafts that it
        verifies and makes."""
        return self.drafts

    def decide(self, requests: Sequence[Request]) -> tuple[DraftShape, tuple[int, int]]:
        """The drafts of a step with these decode rows, and `Decision.short`."""
        return self.choose(len(requests)), (0, 0)

    def observe(
        self, accepted: Sequence[int], fresh: Sequence[int], rates: Sequence[float] = ()
    ) -> None:
        """Ignore the acceptance of a step."""

    def observe_trees(self, ranks: Sequence[Sequence[int]]) -> None:
        """Ignore the acceptance of a step."""


class _Acceptance:
    """Running conditional acceptance rates, one per depth."""

    def __init__(self, depths: int, prior: float) -> None:
        self._reached = [_PRIOR_WEIGHT] * depths
        self._accepted = [_PRIOR_WEIGHT * prior] * depths

    @property
    def rates(self) -> list[float]:
        return [a / r for a, r in zip(self._accepted, self._reached, strict=True)]

    def expected_length(self, depths: int) -> float:
        """Expected tokens per row of a step: the base's own token, and accepted drafts of the first
        `depths` depths."""
        length = 1.0
        product = 1.0
        for rate in self.rates[:depths]:
            product *= rate
            length += product
        return length

    def observe(self, accepted: Sequence[int], known: Sequence[int]) -> None:
        """Count the accepted drafts of each row, at as many depths as the row's entry in `known`
        says."""
        for depth in range(min(max(known, default=0), len(self._reached))):
            counted = [a for a, most in zip(accepted, known, strict=True) if most > depth]
            if not counted:
                continue
            reached = sum(a >= depth for a in counted)
            accepted_here = sum(a > depth for a in counted)
            self._reached[depth] = self._reached[depth] * _DECAY + reached
            self._accepted[depth] = self._accepted[depth] * _DECAY + accepted_here

    def age(self) -> None:
        """Age the counts after a step without such drafts: the rates stay, but weigh less against
        later ones."""
        for depth, reached in enumerate(self._reached):
            # Not below the weight of the prior, or the next few drafts would decide alone.
            kept = max(_DECAY, _PRIOR_WEIGHT / reached)
            self._reached[depth] = reached * kept
            self._accepted[depth] *= kept


class AdaptiveSpeculation:
    """Chooses the drafts with the most expected tokens per second and row: (1 + r_1 + r_1 r_2 + ..)
    / step time.

    The rates r_k are running conditional acceptance rates. For a chain, r_k is the rate of the
    first candidate at depth k, which steps with trees also show. For a tree, it is the rate at
    which any candidate at depth k is accepted. The step times are measured before the first
    request.

    Args:
        step_times: seconds of a step by (rows, drafts), for several numbers of rows, each K from 0
            to the largest, and optionally a tree of the largest depth.
        batches: number of batches whose steps take turns. A probe runs in one step of each batch,
            since a step that finds stale drafts must be followed by a step of the same batch.
    """

    def __init__(
        self, step_times: Mapping[tuple[int, DraftShape], float], batches: int = 1
    ) -> None:
        self.step_times = dict(step_times)
        self._batches = batches
        self._sizes = sorted({rows for rows, _ in step_times})
        shapes = list(dict.fromkeys(drafts for _, drafts in step_times))
        self._trees = [drafts for drafts in shapes if not isinstance(drafts, int)]
        self.max_depth = max(depth_of(drafts) for drafts in shapes)
        self._shapes = [*range(self.max_depth + 1), *self._trees]
        self._chain = _Acceptance(self.max_depth, _PRIOR_RATE)
        self._tree = _Acceptance(self.max_depth, 1 - (1 - _PRIOR_RATE) * (1 - _PRIOR_MENDED))
        self._steps = 0

    @property
    def rates(self) -> list[float]:
        """Running conditional acceptance rates of chains, one per depth."""
        return self._chain.rates

    def expected_length(self, drafts: DraftShape) -> float:
        """Expected tokens per row of a step with these drafts."""
        acceptance = self._chain if isinstance(drafts, int) else self._tree
        return acceptance.expected_length(depth_of(drafts))

    def choose(self, num_rows: int) -> DraftShape:
        """Return K, or the tree, for a step: the drafts that it verifies and makes. `num_rows`
        counts the decode rows of all batches."""
        best = self._best(self._size(num_rows))
        probe = self._probe(best)
        return best if probe is None else probe

    def decide(self, requests: Sequence[Request]) -> tuple[DraftShape, tuple[int, int]]:
        """The drafts of a step with these decode rows, and `Decision.short`."""
        return self.choose(len(requests)), (0, 0)

    def _size(self, num_rows: int) -> int:
        """The measured number of rows that stands for `num_rows`."""
        return next((size for size in self._sizes if size >= num_rows), self._sizes[-1])

    def _best(self, size: int) -> DraftShape:
        """The drafts with the most expected tokens per second."""
        best: DraftShape = 0
        for drafts in self._shapes:
            if self._speed(size, drafts) > GAIN * self._speed(size, best):
                best = drafts
        return best

    def _probe(self, best: DraftShape) -> DraftShape | None:
        """What this step verifies instead, if it is a probe; counts the step."""
        self._steps += 1
        others = self._unobserved(best)
        probe, step = divmod(self._steps // self._batches, _PROBE_INTERVAL)
        if others and probe and step < _PROBE_STEPS:
            return others[(probe - 1) % len(others)]
        return None

    def _speed(self, size: int, drafts: DraftShape) -> float:
        return self.expected_length(drafts) / self.step_times[size, drafts]

    def _unobserved(self, best: DraftShape) -> list[DraftShape]:
        """List the drafts whose acceptance does not show in steps of the best drafts, for probes to
        try in turn: one more depth, where a gain shows first; all depths, which may pay off only
        together; a tree."""
        if not isinstance(best, int):
            return []
        deeper = [best + 1, self.max_depth] if best < self.max_depth else []
        return list(dict.fromkeys([*deeper, *self._trees]))

    def observe(
        self, accepted: Sequence[int], fresh: Sequence[int], rates: Sequence[float] = ()
    ) -> None:
        """Update the acceptance rates from a step of chains.

        Args:
            accepted: accepted drafts of each decode row.
            fresh: for each row, the number of drafts that its previous step made and this step
                verified. Deeper drafts are stale, and their acceptance says nothing.
            rates: what was known of each row's acceptance, see `BudgetedSpeculation.observe`.
        """
        self._chain.observe(accepted, fresh)
        self._tree.age()

    def observe_trees(self, ranks: Sequence[Sequence[int]]) -> None:
        """Update the acceptance rates from a step of trees that the previous steps made.

        Args:
            ranks: the rank of the accepted candidate, for each row and depth; see `Verdict.ranks`.
        """
        self._tree.observe(
            [sum(rank >= 0 for rank in row) for row in ranks], [len(row) for row in ranks]
        )
        # The first candidates of a row form a chain, which counts as far as it is known whether
        # they were right.
        firsts = [
            next((depth for depth, rank in enumerate(row) if rank), len(row)) for row in ranks
        ]
        known = [
            first + (row[first : first + 1] not in ([], [-2]))
            for first, row in zip(firsts, ranks, strict=True)
        ]
        self._chain.observe(firsts, known)


Speculation = FixedSpeculation | AdaptiveSpeculation
"""The rule of an engine, `Engine.speculation`: `Engine.step` asks it for the drafts of each step,
and reports what was accepted."""
