"""CUDA graphs: capture of functions, and replay of functions on a few rows of integers with one
graph per row count."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.platform import to_device

_MOST_ROWS = 32
"""Rows of the largest graph of `RowGraphs`; more rows take several replays."""
NO_ROW = -1
"""Value of every number in a null row."""


class Capture:
    """Captures functions as graphs that share their memory: a result is valid until any of them is
    replayed."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def graph[R](
        self, function: Callable[[], R], warming: Callable[[], AbstractContextManager] = nullcontext
    ) -> tuple[torch.cuda.CUDAGraph, R]:
        """Capture a function; returns the graph and the function's result, which each replay
        overwrites.

        Args:
            function: must run without a host-device sync. It is also called once before the
                capture, so that kernels are compiled and libraries choose their algorithms.
            warming: makes the context of that first call.
        """
        torch.cuda.synchronize()

        # One stream for all graphs, since libraries keep a workspace per stream.
        stream = self._stream = self._stream or torch.cuda.Stream()
        with torch.cuda.stream(stream), warming():
            function()
        stream.synchronize()

        graph = torch.cuda.CUDAGraph()
        # With several ranks, NCCL's own thread queries events during the capture, which "global"
        # would forbid.
        several = dist.is_initialized() and dist.get_world_size() > 1
        mode = "thread_local" if several else "global"
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            result = function()
        self._pool = self._pool or graph.pool()
        return graph, result


class RowGraphs:
    """Replays functions on rows of integers. There is one graph for each function and each power of
    two of rows, which null rows pad to.

    A function gets a tensor [columns, R] int64, skips the rows that are `NO_ROW`, and returns
    nothing. The function is not stored: it refers to the owner of these graphs, which would then
    keep itself alive.

    Args:
        rows: the most rows that a call usually has. More rows, or more than `_MOST_ROWS`, take
            several replays.
        columns: the number of integers in a row.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.sizes = [1]
        """The captured row counts, ascending."""
        while self.sizes[-1] < min(rows, _MOST_ROWS):
            self.sizes.append(2 * self.sizes[-1])
        self._numbers = {
            size: torch.full((columns, size), NO_ROW, device=device) for size in self.sizes
        }
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._capture = Capture()

    def run(self, function: Callable[[Tensor], None], rows: Sequence[Sequence[int]]) -> None:
        """Run a function on rows of `columns` integers each, without waiting for the device."""
        for some in batched(rows, self.sizes[-1]):
            size = next(size for size in self.sizes if size >= len(some))
            graph = self._captured(function, size)
            self._fill(size, some)
            graph.replay()

    def capture_all(self, function: Callable[[Tensor], None]) -> None:
        """Capture a function for all row counts, the largest first, so that the smaller graphs
        share its memory."""
        for size in reversed(self.sizes):
            self._captured(function, size)

    def _captured(self, function: Callable[[Tensor], None], size: int) -> torch.cuda.CUDAGraph:
        key = function.__name__, size
        if key not in self._graphs:
            self._fill(size)
            self._graphs[key], _ = self._capture.graph(lambda: function(self._numbers[size]))
        return self._graphs[key]

    def _fill(self, size: int, rows: Sequence[Sequence[int]] = ()) -> None:
        """Write the tensor that a graph reads: the rows, and null rows after them."""
        held = self._numbers[size]
        null = [NO_ROW] * len(held)
        padding = [null] * (size - len(rows))
        columns = list(zip(*rows, *padding, strict=True))
        held.copy_(to_device(columns, torch.int64, held.device))
