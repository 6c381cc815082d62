"""Choice of K for each step: a fixed K, or the K with the highest expected tokens per second."""

from collections.abc import Mapping, Sequence

_DECAY = 0.99
"""Factor on the acceptance counts per step."""
_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
"""Acceptance rate assumed for a depth that has not been tried, and the number of drafts this assumption counts for."""
_PROBE_INTERVAL, _PROBE_STEPS = 256, 2
"""Acceptance is only learnt from drafts that are verified, so in every 256 steps 2 verify more drafts than the best K.
The first of them finds stale drafts. If a probe takes twice the time of a plain step, the two cost 1%."""
_GAIN = 1.01
"""A larger K is chosen if its expected speed is more than this factor higher."""


class FixedSpeculation:
    """The same K in every step."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def choose(self, num_rows: int) -> int:
        """K of a step with `num_rows` decode rows."""
        return self.num_speculative_tokens

    def observe(self, accepted: Sequence[int], fresh: Sequence[int]) -> None:
        """Ignore the acceptance of a step."""


class AdaptiveSpeculation:
    """The K with the most expected tokens per second and row: (1 + r_1 + r_1 r_2 + ..) / step time.

    The rates r_k are running conditional acceptances. The step times are measured before the first request.

    Args:
        step_times: (rows, K) -> seconds of a step, for K from 0 to the largest and some numbers of rows.
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
        """Running conditional acceptance per depth."""
        return [a / r for a, r in zip(self._accepted, self._reached, strict=True)]

    def expected_length(self, depths: int) -> float:
        """Expected tokens per row of a step with K = `depths`."""
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
                # Probes alternate between one more depth, where a gain shows first, and all depths, which may pay off
                # only together.
                return best + 1 if probe % 2 else self.max_depth
        return best

    def observe(self, accepted: Sequence[int], fresh: Sequence[int]) -> None:
        """Update the acceptance rates from a step.

        Args:
            accepted: accepted drafts of each decode row.
            fresh: for each row, the drafts that its previous step made and this step verified. Deeper drafts are
                stale, and their acceptance says nothing.
        """
        for depth in range(min(max(fresh, default=0), self.max_depth)):
            known = [a for a, made in zip(accepted, fresh, strict=True) if made > depth]
            if known:
                self._reached[depth] = self._reached[depth] * _DECAY + sum(a >= depth for a in known)
                self._accepted[depth] = self._accepted[depth] * _DECAY + sum(a > depth for a in known)


Speculation = FixedSpeculation | AdaptiveSpeculation
