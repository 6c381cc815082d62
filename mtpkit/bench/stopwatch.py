"""Time of named parts of a run, without making the device wait."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_Mark = float | torch.cuda.Event


class Stopwatch:
    """Adds up spans by name: on a GPU by its own clock, elsewhere by the wall's."""

    def __init__(self, device: torch.device):
        self._device = device
        self._spans: defaultdict[str, list[tuple[_Mark, _Mark]]] = defaultdict(list)
        self._open: dict[str, _Mark] = {}

    def start(self, name: str) -> None:
        """A span of this name begins."""
        self._open[name] = self._mark()

    def stop(self, name: str) -> None:
        """The span ends."""
        self._spans[name].append((self._open.pop(name), self._mark()))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What is inside."""
        self.start(name)
        yield
        self.stop(name)

    def take(self) -> dict[str, float]:
        """Seconds of each name since the last call. Waits for the spans to end, not for what goes on beside them."""
        sums = {name: sum(map(_seconds, spans)) for name, spans in self._spans.items()}
        self._spans.clear()
        return sums

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(span: tuple[_Mark, _Mark]) -> float:
    start, end = span
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    end.synchronize()
    return start.elapsed_time(end) / 1e3
