"""First-fit packing of documents into sequences of one length, as Arrow tables.

A row is one packed sequence: `input_ids` (list of int32) and `loss_mask` (list of bool) of its concatenated documents,
and `document_lengths` (list of int32). Padding is not stored.
"""

import hashlib
from collections.abc import Sequence
from itertools import batched, chain
from typing import TYPE_CHECKING

import numpy as np

from mtpkit.data.documents import Document

if TYPE_CHECKING:
    import pyarrow

ROWS = 1000
"""Sequences per record batch, in which Arrow counts tokens with 32 bits."""


def first_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put items into bins, in order, each into the first bin with room for it; return the indices of each bin's items.

    Lengths are 1 .. capacity. Takes O(n log n): each node of a tree over the bins holds the most room below it.

    Example: first_fit([3, 3, 1, 2], capacity=4) == [[0, 2], [1], [3]]
    """
    size = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * size)
    bins: list[list[int]] = []
    for item, length in enumerate(map(int, lengths)):
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(item)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return bins


def pack(documents: Sequence[Document], sequence_length: int) -> "pyarrow.Table":
    """Pack whole documents, none longer than `sequence_length`, into a table of sequences."""
    import pyarrow as pa

    bins = first_fit([len(document) for document in documents], sequence_length)
    tables = []
    for group in batched(bins, ROWS):
        members = [documents[index] for index in chain.from_iterable(group)]
        token_ids = np.concatenate([document.token_ids for document in members])
        loss_mask = np.concatenate([document.loss_mask for document in members])
        lengths = np.array([len(document) for document in members], dtype=np.int32)
        tables.append(join(token_ids, loss_mask, lengths, [len(sequence) for sequence in group]))
    return pa.concat_tables(tables)


def join(token_ids: np.ndarray, loss_mask: np.ndarray, lengths: np.ndarray, counts: Sequence[int]) -> "pyarrow.Table":
    """Make a table of sequences from concatenated documents.

    Args:
        token_ids: [n] int32, tokens of all documents.
        loss_mask: [n] bool.
        lengths: number of tokens of each document.
        counts: number of documents of each sequence.

    Example: join([1, 2, 3, 4, 5, 6], ..., lengths=[3, 1, 2], counts=[2, 1]) has the sequences [1, 2, 3, 4] and [5, 6]
    """
    import pyarrow as pa

    documents = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.concatenate([[0], np.cumsum(lengths)])[documents].astype(np.int32)
    columns = {
        "input_ids": pa.ListArray.from_arrays(tokens, pa.array(token_ids, pa.int32())),
        "loss_mask": pa.ListArray.from_arrays(tokens, pa.array(loss_mask, pa.bool_())),
        "document_lengths": pa.ListArray.from_arrays(documents, pa.array(lengths, pa.int32())),
    }
    return pa.table(columns)


def fingerprint(table: "pyarrow.Table") -> str:
    """32 hexadecimal digits that are equal for tables of equal sequences, however they are cut into record batches."""
    hashes = []
    for column in ("input_ids", "loss_mask", "document_lengths"):
        for counted in (False, True):  # contents of the lists, then their lengths
            digest = hashlib.blake2b(digest_size=16)
            for chunk in table.column(column).chunks:
                values = chunk.value_lengths() if counted else chunk.flatten()
                digest.update(values.to_numpy(zero_copy_only=False).tobytes())
            hashes.append(digest.hexdigest())
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
