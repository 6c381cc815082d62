"""Data sets that tests make of documents."""

from collections.abc import Iterable

from mtpkit.data.build import pack_documents
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.documents import Document


def in_memory(documents: Iterable[Document], sequence_length: int, pad_id: int) -> PackedDataset:
    """A data set of one source."""
    return PackedDataset(
        [pack_documents("data", documents, sequence_length)], sequence_length, pad_id
    )
