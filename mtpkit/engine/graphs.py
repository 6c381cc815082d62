"""Decode steps as CUDA graphs, with one replay per step.

One graph is captured for each bucket of batch sizes, K and set of processors, when it is first needed. It reads the
slots and blocks of its rows from two fixed tensors, and everything else from `DeviceState`. Rows of the bucket without
a request are null rows: they have no recurrent state, and use a block of keys and an entry of `DeviceState` that no
request has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.batch import BatchBuilder, block_tables
from mtpkit.engine.processors import GREEDY, Use, for_graph
from mtpkit.engine.step import Batch, Plan

_WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries choose their algorithms."""

NULL_SLOT = -1
"""Slot of null rows: for the kernels of recurrent state no slot, for `DeviceState` the last entry."""

Key = tuple[int, int, Use]
Execute = Callable[[Batch], Tensor]


def bucket_size(rows: int) -> int:
    """The captured batch size for `rows`: a multiple of 1 up to 4, of 4 up to 16, of 8 up to 64, of 16 above."""
    step = next((step for limit, step in ((4, 1), (16, 4), (64, 8)) if rows <= limit), 16)
    return -(-rows // step) * step


class DecodeGraphs:
    """Captures decode steps and replays them.

    Each call gets the captured function as `execute`, the same one each time. It runs a batch without a host-device
    sync and returns the tensor that goes to the host, [R, ...]. It is not stored, since it refers to the engine, which
    would then keep itself alive.

    Args:
        table_width: blocks of the longest request.
        null_block: the block of null rows, to which all of them write.
    """

    def __init__(self, builder: BatchBuilder, max_num_seqs: int, table_width: int, null_block: int) -> None:
        self.builder = builder
        self.null_block = null_block
        rows, device = bucket_size(max_num_seqs), builder.device
        self._slots = torch.full((rows,), NULL_SLOT, dtype=torch.int64, device=device)
        self._tables = torch.full((rows, table_width), null_block, dtype=torch.int64, device=device)
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def run(self, execute: Execute, plan: Plan) -> Tensor:
        """Replay the decode rows of `plan`; returns [R, ...], the result of `execute`, valid until the next run."""
        requests = [row.request for row in plan.rows]
        rows = bucket_size(len(requests))
        key = (rows, plan.num_speculative_tokens, for_graph(plan.processors))
        graph, result = self.captured(execute, key)
        self._fill([request.slot for request in requests], block_tables(requests, fill=self.null_block), rows)
        graph.replay()
        return result[: len(requests)]

    def replay_free_slots(self, execute: Execute, rows: int, depths: int) -> None:
        """Replay a greedy step on the slots 0 .. rows - 1, for timing; no request may hold them."""
        graph, _ = self.captured(execute, (bucket_size(rows), depths, GREEDY))
        self.builder.state.restart()
        self._fill(range(rows), np.full((rows, self._tables.shape[1]), self.null_block), bucket_size(rows))
        graph.replay()

    def captured(self, execute: Execute, key: Key) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of a key and the tensor that holds its result after a replay."""
        if key not in self._graphs:
            self._graphs[key] = self._capture(execute, key)
        return self._graphs[key]

    def _fill(self, slots: Sequence[int | None], tables: np.ndarray, rows: int) -> None:
        """Set the first `rows` rows; those beyond the given ones become null rows."""
        given, width = tables.shape
        self._slots[:rows].copy_(self.builder.ints([*slots, *[NULL_SLOT] * (rows - given)]))
        self._tables[:given, :width].copy_(self.builder.ints(tables))
        self._tables[given:rows, :width] = self.null_block

    def _capture(self, execute: Execute, key: Key) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._slots.fill_(NULL_SLOT)
        self._tables.fill_(self.null_block)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._step(execute, key)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = self._step(execute, key)
        self._pool = self._pool or graph.pool()
        return graph, result

    def _step(self, execute: Execute, key: Key) -> Tensor:
        rows, depths, use = key
        slots, tables = self._slots[:rows], self._tables[:rows]
        # Null rows advance in each step like all others, and are reset here.
        self.builder.state.restart(NULL_SLOT)
        return execute(self.builder.decode(Plan((), rows, rows, depths), slots, tables, use))
