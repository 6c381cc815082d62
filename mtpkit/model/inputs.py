"""Inputs of a layer besides its hidden states, as frozen dataclasses of tensors.

megatron-core's wrappers pass such an input to each layer unchanged as `inference_context`; no layer
knows who made it.

Shape legend: T tokens of a step, R rows (requests) of a step, s sequence, b batch, K speculative
tokens.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.attention.reference import AttentionWindow
from mtpkit.model.state import Committed, States, StepPlaces
from mtpkit.platform import to_device


class LayerInput:
    """Base class of the inputs below, with the methods that megatron-core's wrappers call on an
    inference context."""

    def is_static_batching(self) -> bool:
        """Return False, so that megatron-core does not read attributes of its own contexts."""
        return False

    def is_decode_only(self) -> bool:
        """Return False, which disables megatron-core's own prefill chunking of MLPs."""
        return False

    def positions_in(self, batch: int, length: int, device: torch.device) -> Tensor:
        """[b, s] int64, position of each token in its document or request, plus `depth` - 1 with a
        `DepthInput`."""
        raise NotImplementedError


@dataclass(frozen=True)
class SequenceInput(LayerInput):
    """Whole sequences at once, as in training and teacher forcing.

    `documents` [b, s] int: non-decreasing index of the document a token belongs to; attention,
    convolution and state never cross from one document to the next. None: each row is one document.
    `positions` [b, s] int: rotary position of each token inside its document. None: 0, 1, 2, ...
    `document_lens`: lengths of the documents, row after row. None: computed from `documents` when
    needed. `window`: see `StepInput`.
    """

    documents: Tensor | None = None
    positions: Tensor | None = None
    document_lens: tuple[int, ...] | None = None
    window: AttentionWindow | None = None

    def starts(self, batch: int, length: int, device: torch.device) -> Tensor:
        """First token of each document of `batch` rows of `length` tokens, row after row, then the
        number of tokens.

        Waits for the device once if only the device knows the lengths of the documents.

        Returns:
            [documents + 1] int64.
        """
        return _starts(
            (length,) * batch if self.documents is None else self.document_lens or self._lens,
            device,
        )

    def positions_in(self, batch: int, length: int, device: torch.device) -> Tensor:
        if self.positions is not None:
            return self.positions
        return torch.arange(length, device=device).expand(batch, -1)

    @cached_property
    def _lens(self) -> tuple[int, ...]:
        assert self.documents is not None
        documents = self.documents.cpu()
        # A row always begins a document, even if the row before it ends with the same index.
        first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True).flatten()
        places = [*first.nonzero()[:, 0].tolist(), first.numel()]
        return tuple(end - start for start, end in pairwise(places))


@lru_cache(maxsize=8)  # all layers of a forward pass share the result
def _starts(lens: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device([*accumulate(lens, initial=0)], torch.int64, device)


class DepthStreams:
    """Entries that the depths of one forward pass leave for later depths: for each name, one entry
    per depth. This is the only input that layers write to."""

    def __init__(self) -> None:
        self._entries: dict[str, list[object]] = {}

    def leave(self, name: str, depth: int, entry: object) -> None:
        """Keep the entry of a depth, counted from 1; a second entry of the same depth is
        dropped."""
        entries = self._entries.setdefault(name, [])
        if len(entries) < depth:
            entries.append(entry)

    def before(self, name: str, depth: int) -> list[object]:
        """Entries of the depths before `depth`, in order."""
        return self._entries.get(name, [])[: depth - 1]


@dataclass(frozen=True)
class DepthInput(SequenceInput):
    """Sequences at MTP depth `depth` under serving attention: a query at i sees depth 1's entries j
    <= i and the entries of depths 2..depth at i. All depths of a forward pass share one `streams`.
    """

    depth: int = 1
    streams: DepthStreams = field(default_factory=DepthStreams)

    def positions_in(self, batch: int, length: int, device: torch.device) -> Tensor:
        return super().positions_in(batch, length, device) + self.depth - 1

    def leave[T](self, name: str, entry: T) -> list[T]:
        """Leave `entry` for the later depths of layer `name`.

        Returns:
            Entries of depths 1..depth in order. If activation recomputation runs a depth again in
            the backward, that leaves no second entry, and the depth sees the same entries of
            earlier depths.
        """
        self.streams.leave(name, self.depth, entry)
        return [*cast(list[T], self.streams.before(name, self.depth)), entry]

    def left[T](self, name: str, kind: type[T], first: int = 1) -> list[T]:
        """Entries that depths first..depth - 1 left under `name`, in order, all of one type."""
        entries = self.streams.before(name, self.depth)[first - 1 :]
        found = [entry for entry in entries if isinstance(entry, kind)]
        assert len(found) == len(entries), f"{name} holds other entries than {kind.__name__}"
        return found


@dataclass(frozen=True)
class TreeInput:
    """Trees of tokens that the decode rows of a step feed, R rows of T tokens each; see
    `mtpkit.kernels.ancestors`.

    Entry j of row r's tree has position starts[r] + j in the KV cache. A tree may be fed level by
    level: each token is then a separate row, which continues the recurrent states of its parent.
    """

    ancestors: Tensor
    """[R, T] int64, bit masks of the tree entries that each token sees."""
    starts: Tensor
    """[R] int64, position of each tree's entry 0 in the KV cache."""
    parents: Tensor | None = None
    """[R, T] int64, index in its row of each token's parent; -1: the last committed token. None:
    one token per row."""
    earlier: int = 0
    """Number of tree entries that come before this step's tokens."""
    children: Tensor | None = None
    """[T, C] int64, the children of each token in order, then -1. Only for a tree that all rows
    share."""
    draft_index: Tensor | None = None
    """[T] int64, index of each token among the tokens with children; 0 for tokens without. Only for
    a shared tree."""


class DecodeGroup(NamedTuple):
    """Decode rows of a step that have equally many tokens."""

    rows: slice
    tokens: slice
    width: int
    """Tokens per row."""

    @property
    def num_rows(self) -> int:
        """Number of the rows."""
        return self.rows.stop - self.rows.start


def decode_groups(rows: int, width: int, short: tuple[int, int] = (0, 0)) -> list[DecodeGroup]:
    """The groups of a step's decode rows, without empty ones.

    Args:
        rows: number of rows.
        width: tokens of each of the first ones.
        short: number of the last rows, which have fewer tokens, and how many.
    """
    groups = []
    first_row = first_token = 0
    for count, tokens in ((rows - short[0], width), short):
        if count:
            last_row = first_row + count
            last_token = first_token + count * tokens
            of_rows = slice(first_row, last_row)
            groups.append(DecodeGroup(of_rows, slice(first_token, last_token), tokens))
            first_row, first_token = last_row, last_token
    return groups


@dataclass(frozen=True)
class StepInput(LayerInput):
    """One step of the engine over a flat batch of T tokens in R rows. Only the device knows the
    chunks' lengths.

    Rows 0 .. num_decode_rows - 1 are decode rows with `decode_width` tokens each, of which the last
    ones may have fewer, see `short`; the other rows are prefill chunks. Row r's tokens are
    `query_start[r] .. query_start[r + 1] - 1`. A decode row may continue a chunk of the same
    request, so layers compute chunks first.

    A chunk may be empty; at context 0 it then sets the states of its request to zero. A null row,
    with state slot -1, belongs to no request: it pads a captured step. Its tokens touch no state,
    and layers return zeros for them.

    Example, K = 2, one decode row with 10 cached tokens and one first prefill chunk of 4 tokens:
        query_start [0, 3, 7], context_lens [10, 0], positions [10, 11, 12, 0, 1, 2, 3],
        num_decode_rows 1, decode_width 3
    """

    positions: Tensor
    """[T] int64, position of each token in its request."""
    query_start: Tensor
    """[R + 1] int64."""
    context_lens: Tensor
    """[R] int64, tokens of the request that are committed in the states before this step; 0: a zero
    state. -1: a null row among the chunks."""
    block_tables: Tensor
    """[R, B] int64, blocks of each row in order; entries past a row's last block may name any block
    and are never read."""
    kv_slots: Tensor
    """[T] int64, slot mapping: block * block_size + offset of each token's key and value; -1: not
    stored."""
    state_slots: Tensor
    """[R] int64, each row's slot in the states that have one slot per request; -1: a null row."""
    committed: Committed
    """The committed part of the states, for each of the R rows."""
    num_decode_rows: int
    decode_width: int
    states: States
    """States of each layer, by its `layer_name`."""
    keep: Tensor | None = None
    """[N] int64, the tokens that a layer computes results for, see `LayerKind.narrows`; None:
    all."""
    tree: TreeInput | None = None
    """None: every row is a chain, in which each token follows the one before it."""
    noise_keys: Tensor | None = None
    """[R] int64, `Noise.requests` of the rows; None: no state is in float16."""
    window: AttentionWindow | None = None
    """What queries of attention layers see; None: all of their document. Only heads have
    windows."""
    short: tuple[int, int] = (0, 0)
    """Number of the last decode rows, which have fewer tokens, and how many each has."""

    def positions_in(self, batch: int, length: int, device: torch.device) -> Tensor:
        return self.positions[None]

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, which come first."""
        rows, width = self.short
        return (self.num_decode_rows - rows) * self.decode_width + rows * width

    @property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decode rows by their number of tokens, without empty groups."""
        return decode_groups(self.num_decode_rows, self.decode_width, self.short)

    @property
    def num_chunk_rows(self) -> int:
        """Rows that are chunks, which come last; any of them may be empty."""
        return len(self.state_slots) - self.num_decode_rows

    def attended(self, group: DecodeGroup) -> tuple[Tensor, Tensor | None, int]:
        """Arguments of attention for decode rows: [R] context lengths, their trees' masks [R, T] or
        None, and the number of the trees' earlier entries."""
        if self.tree is None:
            return self.context_lens[group.rows], None, 0
        return self.tree.starts, self.tree.ancestors, self.tree.earlier

    def committed_after(self, new: Tensor) -> Committed:
        """Return the committed part of the states of this step's first S rows after the step.

        Args:
            new: [S] int64, number of accepted tokens of each of these rows; ignored for chunks,
                which are committed whole.
        """
        # Chunks are committed whole, so their counts are those after any chunk.
        if not self.num_decode_rows:
            return Committed.none(self.committed.counts, len(new), new.device)
        parts = []
        for group in self.decode_groups:
            held = self.committed.at(group.rows)
            context_lens = self.context_lens[group.rows]
            own = new[group.rows]
            parts.append(held.after(context_lens, group.width, own, self.decode_width))
        decoded = Committed.joined(parts)
        chunks = len(new) - self.num_decode_rows
        return decoded.followed_by(chunks) if chunks else decoded

    def continued(self, accepted: Tensor) -> "StepInput":
        """Turn the first S rows into rows of one token each, which follows the newest token that
        the row accepted.

        The states of MTP layers are copies of those that depth 1 left, so that deeper depths can
        change them. Positions, context lengths and KV slots are still those of this step.

        Args:
            accepted: [S] int64, number of accepted drafts of each of these rows; 0 for a chunk.
        """
        count = len(accepted)
        device = accepted.device
        return replace(
            self,
            query_start=torch.arange(count + 1, device=device),
            block_tables=self.block_tables[:count],
            state_slots=torch.arange(count, device=device),
            committed=self.committed_after(accepted + 1),
            num_decode_rows=count,
            decode_width=1,
            short=(0, 0),
            states=self.states.fork_heads(self.state_slots[:count]),
            noise_keys=None if self.noise_keys is None else self.noise_keys[:count],
        )

    def keep_path(self, path: Tensor, accepted: Tensor) -> None:
        """Turn the accepted tree paths of the decode rows into chains in the states, see
        `States.keep_path`."""
        rows = slice(self.num_decode_rows)
        slots = self.kv_slots[: self.num_decode_tokens]
        places = StepPlaces(
            self.context_lens[rows],
            slots.unflatten(0, (self.num_decode_rows, -1)),
            self.state_slots[rows],
        )
        self.states.keep_path(places, path, accepted)

    def branched(self, rows: Tensor, committed: Committed | None = None) -> "StepInput":
        """Make rows of one token each, which continue copies of the MTP layers' states of the rows
        `rows` [n]. Context lengths and block tables are those of these rows; positions and KV slots
        are still those of this step.

        Args:
            committed: the committed part of the states of this step's rows; None: `self.committed`.
        """
        return replace(
            self,
            query_start=torch.arange(len(rows) + 1, device=rows.device),
            context_lens=self.context_lens[rows],
            block_tables=self.block_tables[rows],
            state_slots=torch.arange(len(rows), device=rows.device),
            committed=(committed or self.committed).at(rows),
            num_decode_rows=len(rows),
            decode_width=1,
            short=(0, 0),
            tree=None,
            states=self.states.fork_heads(self.state_slots[rows]),
            noise_keys=None if self.noise_keys is None else self.noise_keys[rows],
        )

    def advanced(self) -> "StepInput":
        """Return these rows of one token each with that token counted as committed, once their
        states contain it."""
        new = torch.ones_like(self.context_lens)
        return replace(self, committed=self.committed.after(self.context_lens, 1, new))
