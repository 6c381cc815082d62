"""Choice of the drafts of each step: always the same ones, or those with the highest expected tokens per second."""

from collections.abc import Mapping, Sequence

from mtpkit.engine.tree import DraftShape, depth_of

_DECAY = 0.99
"""Factor on the acceptance counts per step."""
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
"""Acceptance rate assumed for a depth that has not been tried, and the number of drafts this assumption counts for."""
_PRIOR_MENDED = 0.37
"""Where the first candidate is wrong, how often another one of a tree is assumed to be right: the share of second
candidates that others have measured."""
_PROBE_INTERVAL, _PROBE_STEPS = 256, 2
"""Acceptance is only learnt from drafts that are verified, so in every 256 steps of a batch 2 verify other drafts than
the best ones. The first of them finds stale drafts. If a probe takes twice the time of a plain step, the two cost
1%."""
_GAIN = 1.01
"""More drafts are chosen if their expected speed is more than this factor higher."""


class FixedSpeculation:
    """The same drafts in every step."""

    def __init__(self, drafts: DraftShape) -> None:
        self.drafts = drafts

    def choose(self, num_rows: int) -> DraftShape:
        """K, or the tree, of a step with `num_rows` decode rows."""
        return self.drafts

    def observe(self, accepted: Sequence[int], fresh: Sequence[int]) -> None:
        """Ignore the acceptance of a step."""

    def observe_trees(self, ranks: Sequence[Sequence[int]]) -> None:
        """Ignore the acceptance of a step."""


class _Acceptance:
    """Running conditional acceptance per depth."""

    def __init__(self, depths: int, prior: float) -> None:
        self._reached = [_PRIOR_WEIGHT] * depths
        self._accepted = [_PRIOR_WEIGHT * prior] * depths

    @property
    def rates(self) -> list[float]:
        return [a / r for a, r in zip(self._accepted, self._reached, strict=True)]

    def expected_length(self, depths: int) -> float:
        """Expected tokens per row of a step, its own one and accepted drafts up to a depth."""
        length, product = 1.0, 1.0
        for rate in self.rates[:depths]:
            product *= rate
            length += product
        return length

    def observe(self, accepted: Sequence[int], known: Sequence[int]) -> None:
        """Count the accepted drafts of rows, and of each row no more depths than are `known`."""
        for depth in range(min(max(known, default=0), len(self._reached))):
            counted = [a for a, most in zip(accepted, known, strict=True) if most > depth]
            if counted:
                self._reached[depth] = self._reached[depth] * _DECAY + sum(a >= depth for a in counted)
                self._accepted[depth] = self._accepted[depth] * _DECAY + sum(a > depth for a in counted)

    def age(self) -> None:
        """Note a step that said nothing of these drafts: rates stay, and count for less beside the next ones."""
        for depth, reached in enumerate(self._reached):
            kept = max(_DECAY, _PRIOR_WEIGHT / reached)
            self._reached[depth], self._accepted[depth] = reached * kept, self._accepted[depth] * kept


class AdaptiveSpeculation:
    """The drafts with the most expected tokens per second and row: (1 + r_1 + r_1 r_2 + ..) / step time.

    The rates r_k are running conditional acceptances: of a chain those of first candidates, which trees tell, too; of a
    tree those at which any candidate of a depth is accepted. The step times are measured before the first request.

    Args:
        step_times: (rows, drafts) -> seconds of a step, for K from 0 to the largest, perhaps a tree of that depth, and
            some numbers of rows.
        batches: batches whose steps take turns. A probe is one of all of them, since a step that finds stale drafts
            must be followed by one of the same batch.
    """

    def __init__(self, step_times: Mapping[tuple[int, DraftShape], float], batches: int = 1) -> None:
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
        """Running conditional acceptance per depth of chains."""
        return self._chain.rates

    def expected_length(self, drafts: DraftShape) -> float:
        """Expected tokens per row of a step with these drafts."""
        return (self._chain if isinstance(drafts, int) else self._tree).expected_length(depth_of(drafts))

    def choose(self, num_rows: int) -> DraftShape:
        """K, or the tree, of a step, where all batches together have `num_rows` decode rows."""
        size = next((size for size in self._sizes if size >= num_rows), self._sizes[-1])
        best: DraftShape = 0
        for drafts in self._shapes:
            if self._speed(size, drafts) > _GAIN * self._speed(size, best):
                best = drafts
        self._steps += 1
        others = self._untold(best)
        probe, step = divmod(self._steps // self._batches, _PROBE_INTERVAL)
        if others and probe and step < _PROBE_STEPS:
            return others[(probe - 1) % len(others)]
        return best

    def _speed(self, size: int, drafts: DraftShape) -> float:
        return self.expected_length(drafts) / self.step_times[size, drafts]

    def _untold(self, best: DraftShape) -> list[DraftShape]:
        """Drafts that tell what steps of the best ones do not, for probes in turn: one more depth, where a gain shows
        first; all depths, which may pay off only together; a tree."""
        if not isinstance(best, int):
            return []
        deeper = [best + 1, self.max_depth] if best < self.max_depth else []
        return list(dict.fromkeys([*deeper, *self._trees]))

    def observe(self, accepted: Sequence[int], fresh: Sequence[int]) -> None:
        """Update the acceptance rates from a step of chains.

        Args:
            accepted: accepted drafts of each decode row.
            fresh: for each row, the drafts that its previous step made and this step verified. Deeper drafts are
                stale, and their acceptance says nothing.
        """
        self._chain.observe(accepted, fresh)
        self._tree.age()

    def observe_trees(self, ranks: Sequence[Sequence[int]]) -> None:
        """Update the acceptance rates from a step of trees that the previous steps made.

        Args:
            ranks: of each row and depth that of the accepted candidate, see `Verdict.ranks`.
        """
        self._tree.observe([sum(rank >= 0 for rank in row) for row in ranks], [len(row) for row in ranks])
        # Along the first candidates a row is a chain, as far as it is known whether they were right.
        firsts = [next((depth for depth, rank in enumerate(row) if rank), len(row)) for row in ranks]
        known = [first + (row[first : first + 1] not in ([], [-2])) for first, row in zip(firsts, ranks, strict=True)]
        self._chain.observe(firsts, known)


Speculation = FixedSpeculation | AdaptiveSpeculation
