"""CUDA graphs: how functions are captured, and functions of a few rows of numbers with one graph per number of rows."""

from collections.abc import Callable, Sequence
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.platform import to_device

_WARM_UPS = 1
"""Runs before a capture, in which kernels are compiled and libraries choose their algorithms."""
_MOST_ROWS = 32
"""Rows of the largest graph of `RowGraphs`; more rows are replayed in turns."""
NO_ROW = -1
"""What null rows have in place of each number."""


class Capture:
    """Captures functions whose graphs share their memory: what one returns is valid until the next replay."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def graph[R](self, function: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
        """The graph of a function, and what the function returned, which each replay writes again.

        Args:
            function: runs without a host-device sync; it is called before the capture, too.
        """
        torch.cuda.synchronize()
        # One stream for all graphs: libraries keep a workspace for each.
        stream = self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Beside NCCL, whose own thread asks for events meanwhile.
        mode = "thread_local" if dist.is_initialized() and dist.get_world_size() > 1 else "global"
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            result = function()
        self._pool = self._pool or graph.pool()
        return graph, result


class RowGraphs:
    """Replays functions of rows of numbers: one graph for each function and each power of two of rows, filled up with
    null rows.

    A function gets a tensor [columns, R] int64, of which it leaves out rows that are `NO_ROW`, and returns nothing. It
    is not stored, since it refers to what holds these graphs, which would then keep itself alive.

    Args:
        rows: as many as there may be at once; more run in turns, as do more than `_MOST_ROWS`.
        columns: the most numbers of a row.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.sizes = [1]
        """The captured numbers of rows, ascending."""
        while self.sizes[-1] < min(rows, _MOST_ROWS):
            self.sizes.append(2 * self.sizes[-1])
        self._numbers = {size: torch.full((columns, size), NO_ROW, device=device) for size in self.sizes}
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._capture = Capture()

    def run(self, function: Callable[[Tensor], None], rows: Sequence[Sequence[int]]) -> None:
        """Run a function for rows, which all have the same number of numbers, without waiting for the device."""
        for some in batched(rows, self.sizes[-1]):
            size = next(size for size in self.sizes if size >= len(some))
            graph = self._captured(function, size)
            self._fill(size, some)
            graph.replay()

    def capture_all(self, function: Callable[[Tensor], None]) -> None:
        """Capture a function for all numbers of rows, the largest first, so that the others share its memory."""
        for size in reversed(self.sizes):
            self._captured(function, size)

    def _captured(self, function: Callable[[Tensor], None], size: int) -> torch.cuda.CUDAGraph:
        key = function.__name__, size
        if key not in self._graphs:
            self._fill(size)
            self._graphs[key], _ = self._capture.graph(lambda: function(self._numbers[size]))
        return self._graphs[key]

    def _fill(self, size: int, rows: Sequence[Sequence[int]] = ()) -> None:
        """Set what a graph reads: the rows, and null rows after them."""
        held = self._numbers[size]
        null = [NO_ROW] * len(held)
        columns = list(zip(*rows, *[null] * (size - len(rows)), strict=True))
        held.copy_(to_device(columns, torch.int64, held.device))
