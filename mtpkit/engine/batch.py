"""Turns a plan into the tensors of a step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mtpkit.engine.sampler import sampling_tensors
from mtpkit.engine.step import Batch, Plan
from mtpkit.model.inputs import LayerCache, StepInput


class BatchBuilder:
    """Knows the sizes and caches that every step shares."""

    def __init__(
        self,
        num_speculative_tokens: int,
        block_size: int,
        vocab_size: int,
        caches: Mapping[str, LayerCache],
        device: torch.device,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.caches = caches
        self.device = device

    def build(self, plan: Plan) -> Batch:
        """The tensors of `plan`, all on the device."""
        rows, depths = plan.rows, self.num_speculative_tokens
        sampling_requests = [row.request for row in rows[: plan.num_sampling_rows]]
        decode_requests = sampling_requests[: plan.num_decode_rows]
        probs = [request.draft_probs for request in decode_requests if request.draft_probs is not None]
        inputs = self._step_input(plan)
        indices, logit_rows = self._logits(plan, inputs)
        return Batch(
            plan=plan,
            token_ids=self._ints([token for row in rows for token in row.token_ids]),
            inputs=inputs,
            sampling=sampling_tensors(sampling_requests, self.vocab_size, self.device),
            logit_indices=indices,
            logit_rows=logit_rows,
            drafts=self._ints([request.drafts for request in decode_requests]).view(plan.num_decode_rows, depths),
            draft_probs=torch.stack(probs) if probs else None,
            lookahead=self._ints([row.known_after(max(1, depths)) for row in rows]),
        )

    def _step_input(self, plan: Plan) -> StepInput:
        rows = plan.rows
        lengths = self._ints([row.length for row in rows])
        query_start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        positions = self._ints([p for row in rows for p in range(row.start, row.start + row.length)])
        widest = max(len(row.request.block_table) for row in rows)
        tables = [row.request.block_table + [0] * (widest - len(row.request.block_table)) for row in rows]
        block_tables = self._ints(tables)
        row_of_token = torch.arange(len(rows), device=self.device).repeat_interleave(
            lengths, output_size=len(positions)
        )
        return StepInput(
            positions=positions,
            query_start=query_start,
            context_lens=self._ints([row.start for row in rows]),
            block_tables=block_tables,
            kv_slots=kv_slots(block_tables, row_of_token, positions, self.block_size),
            state_slots=self._ints([row.request.slot for row in rows]),
            committed=self._ints([row.request.committed for row in rows]),
            ring_lens=self._ints([row.request.ring_len for row in rows]),
            num_decode_rows=plan.num_decode_rows,
            decode_width=1 + self.num_speculative_tokens,
            prefill_lens=tuple(row.length for row in rows[plan.num_decode_rows :]),
            caches=self.caches,
        )

    def _logits(self, plan: Plan, inputs: StepInput) -> tuple[Tensor, Tensor]:
        """[N] tokens whose logits are needed, and the row of each."""
        decode = torch.arange(inputs.num_decode_tokens, device=self.device)
        chunks = torch.arange(plan.num_decode_rows, plan.num_sampling_rows, device=self.device)
        indices = torch.cat([decode, inputs.query_start[chunks + 1] - 1])
        return indices, torch.cat([decode // inputs.decode_width, chunks])

    def _ints(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def kv_slots(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[T] where tokens at `positions` [T] of `rows` [T] keep their keys and values, given `block_tables` [R, B]."""
    return block_tables[rows, positions // block_size] * block_size + positions % block_size
