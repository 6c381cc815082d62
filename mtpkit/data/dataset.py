"""Packed sequences, in memory or memory-mapped, and batches of them."""

import copy
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from mtpkit.config.checked import checked
from mtpkit.data.documents import table_fingerprint
from mtpkit.data.tally import Tally
from mtpkit.errors import UserError, listed

if TYPE_CHECKING:
    import pyarrow


logger = logging.getLogger(__name__)


class StoredStates(Protocol):
    """The base's final hidden states of b sequences, in the form in which they are cached."""

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The states as a tensor [b, s, h] in `dtype`."""
        ...

    def map(self, change: Callable[[Tensor], Tensor]) -> "StoredStates":
        """Apply `change` to every tensor; the first dimension of each is the b sequences."""
        ...


ReadStates = Callable[[np.ndarray], StoredStates]
"""Reads the hidden states of sequences, given their indices [b] in a data set."""


@dataclass(frozen=True)
class PackedBatch:
    """b packed sequences of s tokens.

    Example, documents A B C and D E in a sequence of 7:
        documents [0, 0, 0, 1, 1, 2, 2], positions [0, 1, 2, 0, 1, 0, 1]
    """

    token_ids: Tensor
    """[b, s] int64."""
    loss_mask: Tensor
    """[b, s] bool, True where the token is a prediction target; False for prompts and padding."""
    documents: Tensor
    """[b, s] int32, non-decreasing index of the document within its sequence; padding counts as a
    last document."""
    positions: Tensor
    """[b, s] int64, position of each token inside its document."""
    document_lens: tuple[int, ...] | None = None
    """Lengths of the documents, row after row; None: they are computed from `documents`, with a
    host-device sync."""
    hidden: Callable[[], StoredStates] | None = None
    """Reads the base's final hidden states of these sequences, if they are cached."""

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy the batch to `device`; hidden states are read later."""
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            documents=self.documents.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
        )


Count = Annotated[int, Field(ge=0, lt=2**63)]


@checked("counts of a source")
class SourceCounts:
    """Counts of one source after packing."""

    name: str
    num_documents: Count
    num_left_out: Count
    """Documents without prediction targets."""
    num_sequences: Count
    num_tokens: Count
    """Tokens in the sequences, not counting padding."""
    num_target_tokens: Annotated[int, Field(ge=1)]
    """Prediction targets."""
    fingerprint: str
    """Fingerprint of the sequences."""
    max_token: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The largest token id; None: not recorded."""
    num_long: Count = 0
    """Conversations, and prompts with responses, that are longer than a sequence."""
    num_empty_answers: Count = 0
    """Answers and texts without any text, which are not learnt."""
    left_out_by_reason: dict[str, Count] = Field(default_factory=dict)
    """How many documents are left out for each reason."""

    @classmethod
    def of(cls, table: "pyarrow.Table", tally: Tally) -> "SourceCounts":
        """Count the contents of a table of `documents.pack`."""
        import pyarrow.compute as pc

        tokens = pc.sum(pc.list_value_length(table["input_ids"])).as_py() or 0
        targets = sum(chunk.flatten().true_count for chunk in table["loss_mask"].chunks)
        largest = max(
            (pc.max(chunk.flatten()).as_py() or 0 for chunk in table["input_ids"].chunks), default=0
        )
        return cls(
            name=tally.source,
            num_documents=tally.num_documents,
            num_left_out=len(tally.left_out),
            num_sequences=len(table),
            num_tokens=tokens,
            num_target_tokens=targets,
            fingerprint=table_fingerprint(table),
            max_token=largest,
            num_long=tally.num_long,
            num_empty_answers=tally.num_empty_answers,
            left_out_by_reason=tally.reasons,
        )


@dataclass(frozen=True)
class PackedSource:
    """The sequences of one source, a table of `documents.pack` in memory or memory-mapped, and its
    counts."""

    counts: SourceCounts
    table: "pyarrow.Table"
    place: str = ""
    """The directory of a memory-mapped table."""


class PackedDataset:
    """Sequences of one length, source after source; a sequence holds documents of one source only.

    Tables are not copied: prepared data stays on the disk until a batch reads it.
    """

    def __init__(
        self,
        sources: Sequence[PackedSource],
        sequence_length: int,
        pad_id: int,
        vocab_size: int | None = None,
    ) -> None:
        """Concatenate packed sources.

        Args:
            vocab_size: vocabulary size of the model that reads the data; None: not known.
        """
        self.sequence_length = sequence_length
        """Tokens in a sequence, s."""
        self.counts = [source.counts for source in sources]
        """Counts of each source; several sources may share a name."""
        self._read_hidden: ReadStates | None = None
        self._pad_id = pad_id
        self._vocab_size = vocab_size
        self._chunks = [
            (source, batch) for source in sources for batch in source.table.to_batches()
        ]
        self._starts = np.cumsum([0, *(batch.num_rows for _, batch in self._chunks)])
        if self.num_tokens < sequence_length:
            logger.warning(
                "data: %s: %d tokens do not fill one sequence of %d, which is padded",
                listed(self.sources),
                self.num_tokens,
                sequence_length,
            )

    def with_hidden(self, read: ReadStates) -> "PackedDataset":
        """A copy whose batches read the base's final hidden states with `read`."""
        # Shallow: both read the same tables.
        found = copy.copy(self)
        found._read_hidden = read
        return found

    def __len__(self) -> int:
        """Number of packed sequences."""
        return int(self._starts[-1])

    @property
    def num_tokens(self) -> int:
        """Tokens in the sequences, not counting padding."""
        return sum(counts.num_tokens for counts in self.counts)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that depend on all sequences and their order."""
        content = "".join(counts.fingerprint for counts in self.counts)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def sources(self) -> list[str]:
        """The names of the sources, each once, in order."""
        return list(dict.fromkeys(counts.name for counts in self.counts))

    def source_rows(self, source: str) -> np.ndarray:
        """Ascending indices of the sequences of a source, [n] int64."""
        chosen = [counts.name == source for counts in self.counts]
        return np.flatnonzero(np.repeat(chosen, [counts.num_sequences for counts in self.counts]))

    def batch(self, indices: Sequence[int] | np.ndarray) -> PackedBatch:
        """The sequences at `indices` as one batch.

        Raises:
            UserError: prepared data is damaged.
        """
        rows = np.asarray(indices, dtype=np.int64)
        shape = (len(rows), self.sequence_length)
        token_ids = np.full(shape, self._pad_id, dtype=np.int64)
        loss_mask = np.zeros(shape, dtype=bool)
        # Padding is a document of its own, so that no token attends to it.
        documents = np.empty(shape, dtype=np.int32)
        document_lens: list[int] = []
        for place, row in enumerate(rows):
            ids, mask, lengths = self._read(int(row))
            token_ids[place, : len(ids)] = ids
            loss_mask[place, : len(ids)] = mask
            documents[place] = len(lengths)
            documents[place, : len(ids)] = np.repeat(np.arange(len(lengths)), lengths)
            padding = self.sequence_length - len(ids)
            document_lens += [*lengths.tolist(), padding] if padding else lengths.tolist()
        return PackedBatch(
            token_ids=torch.from_numpy(token_ids),
            loss_mask=torch.from_numpy(loss_mask),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(_positions(documents)),
            document_lens=tuple(document_lens),
            hidden=None if self._read_hidden is None else partial(self._read_hidden, rows),
        )

    def _read(self, row: int) -> list[np.ndarray]:
        """Token ids, loss mask and document lengths of a sequence, checked against each other and
        the vocabulary."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        (source, batch), place = self._chunks[number], row - int(self._starts[number])
        columns = (
            batch.column(name)[place].values
            for name in ("input_ids", "loss_mask", "document_lengths")
        )
        ids, mask, lengths = (values.to_numpy(zero_copy_only=False) for values in columns)
        where = f"{source.place} {source.counts.name}".strip()
        damaged = f"data: {where} is damaged: sequence {row} has"
        if not len(mask) == len(ids) == lengths.sum() <= self.sequence_length or (
            len(lengths) and lengths.min() < 1
        ):
            raise UserError(
                f"{damaged} {len(ids)} tokens, a loss mask of {len(mask)} and documents of"
                f" {lengths.sum()} in all; these must be equal, and at most {self.sequence_length}:"
                " prepare the data again"
            )
        # A token beyond the embedding would end a run on a GPU with an assert that names no file.
        vocab_size = np.inf if self._vocab_size is None else self._vocab_size
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise UserError(
                f"{damaged} token {wrong}, which the model does not have; prepare the data again"
            )
        return [ids, mask, lengths]


def _positions(documents: np.ndarray) -> np.ndarray:
    """[b, s] int64, distance of each token from the start of its document."""
    place = np.arange(documents.shape[1])
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    return place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
