"""Text to packed sequences of tokens: sources -> documents -> dataset -> loader; and the base's own answers.

`mtpkit.data.prepare` does the steps up to packing once and writes a directory that `build_dataset` memory-maps. What
reads and packs is imported, and torch with it, on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpkit.data.build import build_dataset
    from mtpkit.data.dataset import PackedBatch, PackedDataset, SourceCounts
    from mtpkit.data.documents import Document, tokenize
    from mtpkit.data.loader import PackedLoader
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
    "read_manifest",
    "read_samples",
    "tokenize",
]

_MODULES = {
    "build": ("build_dataset",),
    "dataset": ("PackedBatch", "PackedDataset", "SourceCounts"),
    "documents": ("Document", "tokenize"),
    "loader": ("PackedLoader",),
    "prepared": ("read_manifest",),
    "samples": ("Columns", "Sample", "read_samples"),
    "sources": ("find_files", "find_sources"),
    "tokenizer": ("load_tokenizer",),
}


def __getattr__(name: str) -> Any:
    """Import what `_MODULES` lists on first use."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
