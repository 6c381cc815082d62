"""First-fit packing of documents into sequences of one length."""

from collections.abc import Iterator, Sequence

import numpy as np

from mtpkit.data.documents import Document


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items in each bin: an item goes, in order, to the first bin with room for it.

    Lengths are 1 .. capacity. Takes O(n log n): a tree over the bins holds the most room below each node.

    Example: first_fit([3, 3, 1, 2], capacity=4) == [[0, 2], [1], [3]]
    """
    size = 1 << max(0, len(lengths) - 1).bit_length()
    room = np.full(2 * size, capacity)
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
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
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def pack(documents: Sequence[Document], sequence_length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences of whole documents: token_ids [n, s] int32, loss_mask [n, s] bool, document index [n, s] int32.

    The index counts from 0 in each sequence; the padding that fills a sequence up is a last document, masked out.
    """
    bins = first_fit([len(document) for document in documents], sequence_length)
    shape = (len(bins), sequence_length)
    token_ids = np.full(shape, pad_id, dtype=np.int32)
    loss_mask = np.zeros(shape, dtype=bool)
    index = np.empty(shape, dtype=np.int32)
    for row, members in enumerate(bins):
        index[row] = len(members)
        for count, (part, document) in enumerate(_places(members, documents)):
            token_ids[row, part] = document.token_ids
            loss_mask[row, part] = document.loss_mask
            index[row, part] = count
    return token_ids, loss_mask, index


def _places(members: list[int], documents: Sequence[Document]) -> Iterator[tuple[slice, Document]]:
    start = 0
    for member in members:
        document = documents[member]
        yield slice(start, start + len(document)), document
        start += len(document)
