"""Text to packed sequences of tokens: sources -> documents -> packing -> dataset -> loader."""

from mtpkit.data.dataset import PackedBatch, PackedDataset, build_dataset
from mtpkit.data.documents import Document, tokenize
from mtpkit.data.loader import PackedLoader
from mtpkit.data.sources import Columns, Sample, find_files, read_samples
from mtpkit.data.tokenizer import load_tokenizer

__all__ = [
    "Columns",
    "Document",
    "PackedBatch",
    "PackedDataset",
    "PackedLoader",
    "Sample",
    "build_dataset",
    "find_files",
    "load_tokenizer",
    "read_samples",
    "tokenize",
]
