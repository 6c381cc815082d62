"""Chooses K for each step: what the drafts bring against what verifying them costs."""

from collections.abc import Mapping, Sequence

_DECAY = 0.99
"""Of the acceptance counts, a step."""
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
"""What is assumed of a depth before it was tried, and the drafts that this counts for."""
_PROBE_INTERVAL, _PROBE_STEPS = 256, 2
"""Of drafts that are not verified nothing is learnt: so many steps in so many verify more. The first of them finds
stale drafts; at twice the time of a plain step the two cost 1%."""
_GAIN = 1.01
"""A larger K must promise more than this."""


class FixedSpeculation:
    """The same K in every step."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def choose(self, num_rows: int) -> int:
        """K of a step with `num_rows` decode rows."""
        return self.num_speculative_tokens

    def observe(self, accepted: Sequence[int], fresh: Sequence[int]) -> None:
        """Take note of accepted drafts."""


class AdaptiveSpeculation:
    """The K whose expected tokens a second are most: (1 + r_1 + r_1 r_2 + ..) / step time.

    The rates r_k are running conditional acceptances; the times are measured before the first request.

    Args:
        step_times: seconds of a step by (rows, K), for K = 0 .. the largest and some numbers of rows.
    """

    def __init__(self, step_times: Mapping[tuple[int, int], float]) -> None:
        self.step_times = dict(step_times)
        self._sizes = sorted({rows for rows, _ in step_times})
        self.max_depth = max(depth for _, depth in step_times)
        self._reached = [_PRIOR_WEIGHT] * self.max_depth
        self._accepted = [_PRIOR_WEIGHT * _PRIOR_RATE] * self.max_depth
        self._steps = 0

    @property
    def rates(self) -> list[float]:
        """Running conditional acceptance a depth."""
        return [a / r for a, r in zip(self._accepted, self._reached, strict=True)]

    def expected_length(self, depths: int) -> float:
        """Tokens that a step with K = `depths` is expected to give a row."""
        length, product = 1.0, 1.0
        for rate in self.rates[:depths]:
            product *= rate
            length += product
        return length

    def choose(self, num_rows: int) -> int:
        """K of a step with `num_rows` decode rows."""
        size = next((size for size in self._sizes if size >= num_rows), self._sizes[-1])
        speeds = [self.expected_length(k) / self.step_times[size, k] for k in range(self.max_depth + 1)]
        best = 0
        for depths, speed in enumerate(speeds):
            if speed > _GAIN * speeds[best]:
                best = depths
        self._steps += 1
        if best < self.max_depth and self._steps >= _PROBE_INTERVAL:
            probe, step = divmod(self._steps, _PROBE_INTERVAL)
            if step < _PROBE_STEPS:
                # In turn one depth more, of which a gain may be seen first, and all of them, which may pay together.
                return best + 1 if probe % 2 else self.max_depth
        return best

    def observe(self, accepted: Sequence[int], fresh: Sequence[int]) -> None:
        """Take note of a step.

        Args:
            accepted: accepted drafts of each decode row.
            fresh: drafts of each row that its last step made and this one verified; deeper ones say nothing.
        """
        for depth in range(min(max(fresh, default=0), self.max_depth)):
            known = [a for a, made in zip(accepted, fresh, strict=True) if made > depth]
            if known:
                self._reached[depth] = self._reached[depth] * _DECAY + sum(a >= depth for a in known)
                self._accepted[depth] = self._accepted[depth] * _DECAY + sum(a > depth for a in known)


Speculation = FixedSpeculation | AdaptiveSpeculation
