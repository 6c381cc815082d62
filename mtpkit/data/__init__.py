"""Text to packed sequences of tokens: sources -> documents -> dataset -> loader; and the base's own answers.

`prepare` does the steps up to packing once and writes a directory that `build_dataset` memory-maps.
"""

from mtpkit.data.build import build_dataset
from mtpkit.data.dataset import PackedBatch, PackedDataset, SourceCounts
from mtpkit.data.documents import Document, tokenize
from mtpkit.data.loader import PackedLoader
from mtpkit.data.prepare import prepare
from mtpkit.data.prepared import read_manifest
from mtpkit.data.samples import Columns, Sample, read_samples
from mtpkit.data.sources import find_files, find_sources
from mtpkit.data.tokenizer import load_tokenizer

__all__ = [
    "Columns",
    "Document",
    "PackedBatch",
    "PackedDataset",
    "PackedLoader",
    "Sample",
    "SourceCounts",
    "build_dataset",
    "find_files",
    "find_sources",
    "load_tokenizer",
    "prepare",
    "read_manifest",
    "read_samples",
    "tokenize",
]
