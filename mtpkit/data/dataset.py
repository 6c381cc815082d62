"""Packed sequences in memory, and batches of them."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mtpkit.data.documents import Document, tokenize
from mtpkit.data.packing import pack
from mtpkit.data.sources import Columns, find_files, read_samples
from mtpkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedBatch:
    """b packed sequences of s tokens.

    Example, documents A B C and D E in a sequence of 7:
        documents [0, 0, 0, 1, 1, 2, 2], positions [0, 1, 2, 0, 1, 0, 1]
    """

    token_ids: Tensor
    """[b, s] int64."""
    loss_mask: Tensor
    """[b, s] bool, True where the token is wanted as a prediction target; False for prompts and padding."""
    documents: Tensor
    """[b, s] int32, non-decreasing index of the document within its sequence; padding is a last document."""
    positions: Tensor
    """[b, s] int64, position of each token inside its document."""

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on `device`."""
        return PackedBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))


class PackedDataset:
    """Sequences of one length, packed from documents, held in memory (9 bytes a token)."""

    def __init__(self, documents: Iterable[Document], sequence_length: int, pad_id: int) -> None:
        """Split the documents that are too long and pack all parts that have something to learn.

        Raises:
            UserError: nothing to learn, or not enough tokens for one sequence.
        """
        if sequence_length < 2:
            raise UserError(f"sequence length {sequence_length} is too short; it must be at least 2")
        self.num_documents = 0
        self.num_empty_documents = 0
        parts: list[Document] = []
        for document in documents:
            self.num_documents += 1
            usable = [part for part in document.split(sequence_length) if part.has_targets]
            self.num_empty_documents += not usable
            parts += usable
        self.num_tokens = sum(map(len, parts))
        """Tokens in the sequences, padding not counted."""
        if not parts:
            raise UserError(
                f"data: no usable documents: all {self.num_documents} have an empty text or response; check the columns"
            )
        if self.num_empty_documents:
            logger.warning(
                "data: %d of %d documents have no token to learn and are left out",
                self.num_empty_documents,
                self.num_documents,
            )
        if self.num_tokens < sequence_length:
            raise UserError(
                f"data: {self.num_tokens} tokens do not fill one sequence of {sequence_length};"
                " add data or lower the sequence length"
            )
        self._token_ids, self._loss_mask, self._documents = pack(parts, sequence_length, pad_id)

    def __len__(self) -> int:
        """Number of packed sequences."""
        return len(self._token_ids)

    @property
    def sequence_length(self) -> int:
        """Tokens in a sequence, s."""
        return self._token_ids.shape[1]

    @property
    def num_target_tokens(self) -> int:
        """Tokens that are wanted as predictions."""
        return int(self._loss_mask.sum())

    def batch(self, indices: Sequence[int] | np.ndarray) -> PackedBatch:
        """The sequences at `indices` as one batch."""
        rows = np.asarray(indices, dtype=np.int64)
        documents = self._documents[rows]
        return PackedBatch(
            token_ids=torch.from_numpy(self._token_ids[rows].astype(np.int64)),
            loss_mask=torch.from_numpy(self._loss_mask[rows]),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(_positions(documents)),
        )

    def batches(self, size: int) -> Iterator[PackedBatch]:
        """All sequences once, in order, `size` at a time; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))


def build_dataset(
    paths: Iterable[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    sequence_length: int,
    columns: Columns | None = None,
) -> PackedDataset:
    """Read, tokenise and pack the files, folders and globs of `paths`, with a progress bar.

    Raises:
        UserError: from any of the stages; see `find_files`, `read_samples`, `tokenize`, `PackedDataset`.
    """
    from tqdm import tqdm

    documents = tokenize(read_samples(find_files(paths), columns), tokenizer)
    # disable=None: silent where stderr is not a terminal.
    progress = tqdm(documents, desc="tokenising", unit=" documents", disable=None, leave=False)
    return PackedDataset(progress, sequence_length, pad_id=tokenizer.eos_token_id)


def _positions(documents: np.ndarray) -> np.ndarray:
    """[b, s] int64, distance of each token from the start of its document."""
    place = np.arange(documents.shape[1])
    starts = np.diff(documents, axis=1, prepend=-1) != 0
    return place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
