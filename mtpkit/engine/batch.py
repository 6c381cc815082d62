"""Tensors of a step, built from its plan."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.device_state import DeviceState
from mtpkit.engine.processors import Use
from mtpkit.engine.request import Request
from mtpkit.engine.step import Batch, Earlier, Plan
from mtpkit.model.inputs import StepInput
from mtpkit.model.state import Committed, States
from mtpkit.platform import to_device


class BatchBuilder:
    """Builds batches from plans; reads `DeviceState` and the states of the layers, and writes neither."""

    def __init__(self, block_size: int, states: States, state: DeviceState, device: torch.device) -> None:
        self.block_size = block_size
        self.states = states
        self.state = state
        self.device = device
        self._lookahead = max(1, state.tokens.shape[1] - 1)

    def build(self, plan: Plan) -> Batch:
        """Build the tensors of `plan`, all on the device."""
        requests = [row.request for row in plan.rows]
        slots, tables = self.ints([request.slot for request in requests]), self.ints(block_tables(requests))
        if plan.num_decode_rows:
            return self.decode(plan, slots, tables, plan.processors)
        return self._prefill(plan, slots, tables, plan.processors)

    def decode(self, plan: Plan, slots: Tensor, tables: Tensor, use: Use) -> Batch:
        """Build decode rows at `slots` [R] with block tables [R, B]; only the device knows their tokens."""
        rows, depths = len(slots), plan.num_speculative_tokens
        width = 1 + depths
        token_ids = self.state.tokens[slots, :width]
        context_lens = self.state.num_computed[slots]
        positions = (context_lens[:, None] + torch.arange(width, device=self.device)).flatten()
        indices = torch.arange(rows * width, device=self.device)
        row_of_token = indices // width
        probs = self.state.draft_probs
        inputs = StepInput(
            positions=positions,
            query_start=torch.arange(0, rows * width + 1, width, device=self.device),
            context_lens=context_lens,
            block_tables=tables,
            kv_slots=kv_slots(tables, row_of_token, positions, self.block_size),
            state_slots=slots,
            committed=self.state.committed.at(slots),
            num_decode_rows=rows,
            decode_width=width,
            prefill_lens=(),
            states=self.states,
        )
        return Batch(
            plan=plan,
            token_ids=token_ids.flatten(),
            inputs=inputs,
            sampling=self.state.sampling(slots, use),
            logit_indices=indices,
            logit_rows=row_of_token,
            drafts=token_ids[:, 1:],
            draft_probs=None if probs is None else probs[slots, :depths],
            lookahead=token_ids.new_full((rows, self._lookahead), -1),
            earlier=self._earlier(slots),
        )

    def _earlier(self, slots: Tensor) -> Earlier | None:
        kept = self.state.earlier
        return kept and Earlier(kept.token_ids[slots], kept.hidden[slots])

    def _prefill(self, plan: Plan, slots: Tensor, tables: Tensor, use: Use) -> Batch:
        rows, depths = plan.rows, plan.num_speculative_tokens
        lengths = [row.length for row in rows]
        ends = list(itertools.accumulate(lengths))
        positions = self.ints([p for row in rows for p in range(row.start, row.start + row.length)])
        row_of_token = self.ints([index for index, length in enumerate(lengths) for _ in range(length)])
        count = plan.num_sampling_rows
        inputs = StepInput(
            positions=positions,
            query_start=self.ints([0, *ends]),
            context_lens=self.ints([row.start for row in rows]),
            block_tables=tables,
            kv_slots=kv_slots(tables, row_of_token, positions, self.block_size),
            state_slots=slots,
            committed=Committed.none(self.state.committed.counts, len(rows), self.device),
            num_decode_rows=0,
            decode_width=1 + depths,
            prefill_lens=tuple(lengths),
            states=self.states,
        )
        return Batch(
            plan=plan,
            token_ids=self.ints([token for row in rows for token in row.token_ids]),
            inputs=inputs,
            sampling=self.state.sampling(slots[:count], use),
            logit_indices=self.ints([end - 1 for end in ends[:count]]),
            logit_rows=torch.arange(count, device=self.device),
            drafts=slots.new_zeros(0, depths),
            draft_probs=None,
            lookahead=self.ints([row.known_after(self._lookahead) for row in rows]),
            earlier=self._earlier(slots),
        )

    def ints(self, values: list | np.ndarray) -> Tensor:
        """`values` as an int64 tensor on the device, copied without a host-device sync."""
        return to_device(values, torch.int64, self.device)


def block_tables(requests: Sequence[Request], fill: int = 0) -> np.ndarray:
    """[R, B] int64, the blocks of each request, padded with `fill` to the longest row."""
    tables = np.full((len(requests), max(len(request.block_table) for request in requests)), fill, dtype=np.int64)
    for row, request in zip(tables, requests, strict=True):
        row[: len(request.block_table)] = request.block_table
    return tables


def kv_slots(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[T] slot mapping: the cache entries of tokens at `positions` [T] of `rows` [T], given `block_tables` [R, B]."""
    return block_tables[rows, positions // block_size] * block_size + positions % block_size
