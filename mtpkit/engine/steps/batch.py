"""Tensors of a step, built from its plan.

The host sends all numbers in one copy and the block tables in another; everything else is computed
on the device. A step whose sizes are fixed can therefore be captured in a CUDA graph, see
`mtpkit.engine.device.graphs`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.requests.tree import TokenTree, Tree
from mtpkit.engine.steps.device_state import DeviceState
from mtpkit.engine.steps.plan import Batch, Plan, Row, StepShape
from mtpkit.engine.steps.processors import Use
from mtpkit.kernels.ancestors import ancestor_masks
from mtpkit.kernels.step_rows import decode_rows, kv_slots
from mtpkit.model.inputs import StepInput, TreeInput
from mtpkit.model.state import Committed, States
from mtpkit.platform import to_device

NULL_SLOT = -1
"""Slot of null rows. Kernels of recurrent state take it for no slot; in `DeviceState` it indexes
the last entry."""
NULL_CONTEXT = -1
"""Context length of null rows among the chunks, see `StepInput.context_lens`."""


class _Part(NamedTuple):
    """The decode rows of a step, or its chunks: R rows with T tokens and N logits."""

    token_ids: Tensor
    rows: Tensor
    """[T], the row of the step that each token belongs to."""
    positions: Tensor
    kv_slots: Tensor
    bounds: Tensor
    """[R + 1], the first token of each row of the step, and the end of the last one. For chunks
    after decode rows [R]: the decode rows already have the first entry, as the end of their last
    row."""
    context_lens: Tensor
    logit_indices: Tensor
    logit_rows: Tensor
    committed: Committed | None
    """Counters of the rows' committed positions; None: chunks after decode rows, whose counters
    `_joined` adds."""


def _moved(part: _Part, row: int, token: int) -> _Part:
    """Decode rows that are not the first of a step: they begin with this row and this token."""
    return part._replace(
        rows=part.rows + row,
        # The rows before have the first entry, as the end of their last row.
        bounds=part.bounds[1:] + token,
        logit_indices=part.logit_indices + token,
        logit_rows=part.logit_rows + row,
    )


def _joined(decoding: _Part, others: _Part) -> _Part:
    """Append more rows to decode rows."""
    tensors = [name for name in _Part._fields if name != "committed"]
    joined = {name: torch.cat([getattr(decoding, name), getattr(others, name)]) for name in tensors}
    assert decoding.committed is not None
    if others.committed is None:
        committed = decoding.committed.followed_by(len(others.context_lens))
    else:
        committed = Committed.joined([decoding.committed, others.committed])
    return _Part(**joined, committed=committed)


class _Trees(NamedTuple):
    """Trees of D decode rows, [D, T] each: see `TreeInput` and `ancestor_masks`."""

    parents: Tensor
    masks: Tensor
    depths: Tensor


class BatchBuilder:
    """Builds batches from plans; reads `DeviceState` and the states of the layers, and writes
    neither."""

    def __init__(
        self,
        block_size: int,
        states: States,
        state: DeviceState,
        device: torch.device,
        tree: Tree | None = None,
    ) -> None:
        self.block_size = block_size
        self.tree = tree
        self._static: tuple[Tensor, ...] | None = None
        self._families: tuple[Tensor, ...] = ()
        # A static tree is the same in every step, so that its tensors are made once.
        if isinstance(tree, TokenTree):
            parents = to_device([tree.parents], torch.int64, device)
            self._static = parents, *ancestor_masks(parents, tree.depth)
            families = [tree.children(token) for token in range(tree.tokens)]
            padded = [family + [-1] * (tree.most_children - len(family)) for family in families]
            places = [
                tree.expanded.index(token) if family else 0 for token, family in enumerate(families)
            ]
            self._families = (
                to_device(padded, torch.int64, device),
                to_device(places, torch.int64, device),
            )

        self.states = states
        self.state = state
        self.device = device
        # The deepest head reads K known tokens after a chunk. Without heads one is needed, too: the
        # next token of a preempted request.
        self._lookahead = max(1, state.tokens.shape[1] - 1)
        self._unknown = torch.full((1, self._lookahead), -1, device=device)

    def build(self, plan: Plan) -> Batch:
        """Build the tensors of `plan`, all on the device."""
        shape = StepShape.of(plan)
        numbers = self.ints(self.numbers(shape, plan.decode_rows, plan.chunks))
        tables = self.ints(block_tables(plan, shape))
        batch = self.assemble(shape, numbers, tables, plan.processors)
        return replace(batch, reported=self._reported(plan)) if plan.num_reported else batch

    def _reported(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """See `Batch.reported`."""
        first = StepShape.of(plan).decode_tokens
        places: list[int] = []
        following: list[int] = []
        for row in plan.chunks:
            places += range(first, first + row.reported)
            start = row.start + 1
            following += row.request.prompt_token_ids[start : start + row.reported]
            first += row.length
        return self.ints(places), self.ints(following)

    def count(self, shape: StepShape) -> int:
        """Length of `numbers` for a step of this shape."""
        return sum(self._counts(shape))

    def _counts(self, shape: StepShape) -> list[int]:
        """Lengths of the parts of `numbers`, in order: the slots of all rows, their noise keys if
        states are rounded with noise, then for the chunks their ends, context lengths, known tokens
        after them, and tokens."""
        chunks = shape.chunk_rows
        keys = shape.rows if self.states.noisy else 0
        return [shape.rows, keys, chunks, chunks, chunks * self._lookahead, shape.chunk_tokens]

    def numbers(
        self, shape: StepShape, decode_rows: Sequence[Row] = (), chunks: Sequence[Row] = ()
    ) -> np.ndarray:
        """[count(shape)] int64, everything that the host sends for a step except the block tables;
        all rows of the shape beyond the given ones are null rows."""
        slots = np.full(shape.rows, NULL_SLOT, np.int64)
        slots[: len(decode_rows)] = _slots(decode_rows)
        slots[shape.decode_rows :][: len(chunks)] = _slots(chunks)

        keys = np.zeros(shape.rows if self.states.noisy else 0, np.int64)
        if self.states.noisy:
            keys[: len(decode_rows)] = [row.request.noise_key for row in decode_rows]
            keys[shape.decode_rows :][: len(chunks)] = [row.request.noise_key for row in chunks]

        contexts = np.full(shape.chunk_rows, NULL_CONTEXT, np.int64)
        lookahead = np.full((shape.chunk_rows, self._lookahead), -1, np.int64)
        token_ids = np.zeros(shape.chunk_tokens, np.int64)
        # Null rows are empty, but for the last one, which has all padding tokens.
        ends = np.full(shape.chunk_rows, sum(row.length for row in chunks), np.int64)
        ends[: len(chunks)] = np.cumsum([row.length for row in chunks])
        ends[-1:] = shape.chunk_tokens
        for index, row in enumerate(chunks):
            token_ids[ends[index] - row.length : ends[index]] = row.token_ids
            contexts[index] = row.start
            lookahead[index] = row.known_after(self._lookahead)

        return np.concatenate([slots, keys, ends, contexts, lookahead.ravel(), token_ids])

    def null_numbers(self, shape: StepShape, slots: Sequence[int] = ()) -> np.ndarray:
        """`numbers` of a step in which all rows are null rows except the first decode rows, which
        are at `slots`."""
        numbers = self.numbers(shape)
        numbers[: len(slots)] = slots
        return numbers

    def assemble(self, shape: StepShape, numbers: Tensor, tables: Tensor, use: Use) -> Batch:
        """Build the tensors of a step on the device, without a host-device sync.

        Args:
            numbers: the result of the method `numbers`, on the device.
            tables: [R, B] int64, the blocks of each row.
            use: names of the processors that the step computes.
        """
        sent, keys, *chunks = numbers.split(self._counts(shape))
        decoding = shape.decode_rows
        depths = shape.num_speculative_tokens
        count = shape.sampling_rows
        # Requests that have ended still have their tokens, but no states that a step may change.
        slots = self.state.live(sent, decoding)

        tree = None
        width = 1 + depths
        parts = []
        if decoding and shape.trees:
            tree = self._trees(sent[:decoding])
            width = tree.parents.shape[1]
        for group in shape.decode_groups:
            rows = group.rows
            part = self._decode_rows(
                sent[rows], slots[rows], tables[rows], group.width, tree and tree.depths
            )
            parts.append(_moved(part, rows.start, group.tokens.start) if rows.start else part)
        if shape.chunk_rows:
            parts.append(self._chunks(shape, tables, shape.decode_tokens, count, chunks))
        joined = parts[0]
        for part in parts[1:]:
            joined = _joined(joined, part)
        assert joined.committed is not None

        tree_input = None
        if tree is not None:
            starts = joined.context_lens[:decoding]
            tree_input = TreeInput(tree.masks, starts, tree.parents, 0, *self._families)
        inputs = StepInput(
            positions=joined.positions,
            query_start=joined.bounds,
            context_lens=joined.context_lens,
            block_tables=tables,
            kv_slots=joined.kv_slots,
            state_slots=slots,
            committed=joined.committed,
            num_decode_rows=decoding,
            decode_width=width,
            short=(shape.short[0], 1 + shape.short[1]),
            states=self.states,
            tree=tree_input,
            noise_keys=keys if self.states.noisy else None,
        )

        draft_probs = None
        if self.state.draft_probs is not None:
            draft_probs = self.state.draft_probs[slots[:decoding], : None if tree else depths]
        if shape.short[0]:
            # Short rows feed fewer: whoever reads the drafts takes those of a group.
            drafts = self.state.tokens[sent[:decoding], 1:width]
        else:
            drafts = joined.token_ids[: decoding * width].view(decoding, width)[:, 1:]
        lookahead = self._unknown.expand(decoding, -1)
        if shape.chunk_rows:
            lookahead = torch.cat([lookahead, chunks[2].view(-1, self._lookahead)])
        return Batch(
            shape=shape,
            token_ids=joined.token_ids,
            rows=joined.rows,
            inputs=inputs,
            sampling=self.state.sampling(slots[:count], use),
            logit_indices=joined.logit_indices,
            logit_rows=joined.logit_rows,
            drafts=drafts,
            draft_probs=draft_probs,
            lookahead=lookahead,
            earlier=self.state.earlier_at(slots, behind=shape.resumed),
            resumed_hidden=self.state.newest_hidden(slots) if shape.resumed else None,
        )

    def _trees(self, slots: Tensor) -> _Trees:
        """The trees of decode rows at `slots` [D]."""
        if self._static is not None:
            return _Trees(*(part.expand(len(slots), -1).contiguous() for part in self._static))
        assert self.tree is not None and self.state.parents is not None
        parents = self.state.parents[slots]
        return _Trees(parents, *ancestor_masks(parents, self.tree.depth))

    def _decode_rows(
        self, slots: Tensor, live: Tensor, tables: Tensor, width: int, depths: Tensor | None = None
    ) -> _Part:
        """Gather decode rows at `slots` [D] with `width` tokens each; only the device knows these
        tokens.

        Args:
            live: [D] the same slots as `DeviceState.live` gives them.
            depths: [D, width] depths of the tokens of trees. They determine positions only: the
                caches still hold the tokens one after another.
        """
        state = self.state
        counted = self.state.committed.counts
        ended = None if state.ends is None else live
        held = tuple(counted.values())
        # One kernel: on a GPU, small ops in a row would cost more time than their work.
        found = decode_rows(
            slots, ended, state.num_computed, state.tokens, held, tables, width, self.block_size
        )
        positions = found.positions
        if depths is not None:
            positions = (found.context_lens[:, None] + depths).flatten()
        return _Part(
            token_ids=found.token_ids,
            rows=found.rows,
            positions=positions,
            kv_slots=found.kv_slots,
            bounds=found.starts,
            context_lens=found.context_lens,
            logit_indices=found.flat,
            logit_rows=found.rows,
            committed=Committed(dict(zip(counted, found.counts, strict=True))),
        )

    def _chunks(
        self, shape: StepShape, tables: Tensor, first: int, count: int, numbers: Iterable[Tensor]
    ) -> _Part:
        """Build the chunks, the first of which begins at token `first` of the step.

        Args:
            count: rows of the step that sample.
            numbers: the parts of `numbers` that belong to the chunks.
        """
        ends, context_lens, _, token_ids = numbers
        counted = self.state.committed.counts
        rows, index = token_rows(ends, shape.chunk_tokens)
        # A padding token gets a valid position, which indexes the block table, but no KV slot.
        null = context_lens[rows] < 0
        positions = torch.where(null, 0, context_lens[rows] + index)
        rows = rows + shape.decode_rows
        slots = kv_slots(tables, rows, positions, self.block_size)

        if shape.decode_rows:
            bounds = first + ends
            committed = None
        else:
            bounds = F.pad(ends, (1, 0))
            committed = Committed.none(counted, shape.chunk_rows, self.device)
        return _Part(
            token_ids=token_ids,
            rows=rows,
            positions=positions,
            kv_slots=torch.where(null, -1, slots),
            bounds=bounds,
            context_lens=context_lens,
            logit_indices=(first + ends[: count - shape.decode_rows] - 1).clamp_min(0),
            logit_rows=torch.arange(shape.decode_rows, count, device=self.device),
            committed=committed,
        )

    def ints(self, values: list | np.ndarray) -> Tensor:
        """`values` as an int64 tensor on the device, copied without a host-device sync."""
        return to_device(values, torch.int64, self.device)


def _slots(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row.request.slot for row in rows], np.int64)


def block_tables(plan: Plan, shape: StepShape, fill: int = 0) -> np.ndarray:
    """[R, B] int64, the blocks of each row of the shape, padded with `fill` to the longest row of
    the plan."""
    width = max(len(row.request.block_table) for row in plan.rows)
    tables = np.full((shape.rows, width), fill, dtype=np.int64)

    def put(places: np.ndarray, rows: Iterable[Row]) -> None:
        for place, row in zip(places, rows, strict=False):
            place[: len(row.request.block_table)] = row.request.block_table

    put(tables, plan.decode_rows)
    put(tables[shape.decode_rows :], plan.chunks)
    return tables


def token_rows(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """[tokens] the row of each token and its index within the row, for rows that end before tokens
    `ends` [R]."""
    index = torch.arange(tokens, device=ends.device)
    rows = torch.searchsorted(ends, index, right=True)
    return rows, index - F.pad(ends, (1, 0))[rows]
