"""Memory-mapped files of a checkpoint, of which only little stays resident, however much is
read."""

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor

RESIDENT_BYTES = 2**28
"""Bytes that are handed out before the pages of the files are released. When a released page is
used again, the system maps it again, from its cache."""


_trim = getattr(ctypes.pythonapi, "malloc_trim", None)
"""glibc's function that releases the memory that freed tensors of up to 32 MiB leave in the heaps
of threads."""


class Mappings:
    """The files of a directory, each mapped when it is first read.

    Several threads may read from it. Do not write to tensors and views: changes may be lost.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self._handed_out = 0

    def view(self, file: str, start: int, length: int) -> memoryview:
        """View some bytes of a file.

        Raises:
            OSError: the file cannot be opened.
            ValueError: the file is empty.
        """
        # Counted without a lock: threads may lose some bytes, which only delays a release.
        self._handed_out += length
        if self._handed_out > RESIDENT_BYTES:
            self._handed_out = length
            self.give_back()
        if file not in self._maps:
            # mapped for writing, since torch warns otherwise
            with (self._directory / file).open("rb") as stream:
                self._maps.setdefault(file, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        mapped = self._maps[file]
        if hasattr(mmap, "MADV_WILLNEED") and 0 <= start < start + length <= len(mapped):
            page = start - start % mmap.PAGESIZE
            # read at once, not page by page
            mapped.madvise(mmap.MADV_WILLNEED, page, start + length - page)
        return memoryview(mapped)[start : start + length]

    def give_back(self) -> None:
        """Release the pages of all files, and the memory of freed tensors; views stay valid."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in list(self._maps.values()):
                mapped.madvise(mmap.MADV_DONTNEED)
        if _trim is not None:
            _trim(0)

    def tensor(self, file: str, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose values are contiguous in a file: a view of the file if they are
        aligned."""
        length = torch.Size(shape).numel() * dtype.itemsize
        return as_tensor(self.view(file, start, length), shape, dtype)


def as_tensor(content: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Bytes as a tensor, without a copy if they are aligned."""
    if not content:
        return torch.empty(shape, dtype=dtype)
    values = torch.frombuffer(content, dtype=torch.uint8)
    if values.data_ptr() % dtype.itemsize:
        values = values.clone()
    return values.view(dtype).view(shape)
