"""Tensors in the files of a `torch_dist` checkpoint, mapped into memory, each as `torch.save` wrote
it.

A file holds one archive after another, which `torch.load` can only copy into memory: its
`mmap=True` takes the path of a file that is a single archive. Here only the pickle of an archive is
read, as the arguments of one tensor, and its values stay where they are; whatever is not exactly
such an archive is left to torch.
"""

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mtpkit.checkpoint.layouts.mapped import Mappings, as_tensor

_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.uint8: "ByteStorage",
    torch.int32: "IntStorage",
    torch.int64: "LongStorage",
    torch.float8_e4m3fn: "UntypedStorage",
}
"""Type of the storage in an archive. Untyped ones count bytes, and their tensors have their dtype
among the arguments."""


class MappedFiles:
    """The files of a directory, each mapped when it is first read. Several threads may read from
    it."""

    def __init__(self, directory: Path) -> None:
        self._maps = Mappings(directory)

    def read(
        self, file: str, start: int, length: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """The tensor that `torch.save` wrote into some bytes of a file; a view of the file if it is
        aligned.

        Returns:
            None if these bytes are not one contiguous tensor of that shape and dtype, as far as can
            be told without reading its values.
        """
        try:
            content = _values(self._maps.view(file, start, length), shape, dtype)
        except Exception:  # damaged bytes can raise anything
            return None
        return None if content is None else as_tensor(content, tuple(shape), dtype)


def _values(archive: memoryview, shape: Sequence[int], dtype: torch.dtype) -> memoryview | None:
    """The values of an archive's only tensor; None in the cases that `MappedFiles.read` lists."""
    with zipfile.ZipFile(_File(archive)) as file:
        records = file.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        return None
    contents = {record.filename.partition("/")[2]: _content(archive, record) for record in records}
    (key,) = (name.removeprefix("data/") for name in contents if name.startswith("data/"))
    values = contents[f"data/{key}"]
    count = math.prod(shape)
    # A transposed or shared storage has the right bytes in the wrong places.
    strides = torch.empty(tuple(shape), device="meta").stride()
    storage, *rest = _Arguments(io.BytesIO(contents["data.pkl"])).load()[:4]
    same = (
        storage[1:3] == (_STORAGES[dtype], key)
        and storage[4] == count
        and rest == [0, tuple(shape), strides]
    )
    # Files of older versions of torch have no such record.
    native = bytes(contents.get("byteorder", b"little")) == b"little"
    return values if same and native and 0 < len(values) == count * dtype.itemsize else None


def _content(archive: memoryview, record: zipfile.ZipInfo) -> memoryview:
    """The bytes of a record, which follow its header, its name and the padding to an aligned
    address."""
    name, filler = struct.unpack_from("<HH", archive, record.header_offset + 26)
    begin = record.header_offset + 30 + name + filler
    return archive[begin : begin + record.file_size]


class _Arguments(pickle.Unpickler):
    """Unpickles a tensor as the arguments that torch would rebuild it from: (storage, offset,
    shape, strides, ...)."""

    def persistent_load(self, storage: object) -> object:
        """("storage", type, key of its record, device, number of elements)."""
        return storage

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _with_dtype
        if (module, name) == ("torch", "float8_e4m3fn"):
            return torch.float8_e4m3fn
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name in _STORAGES.values():
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")


def _with_dtype(*arguments: Any) -> tuple[Any, ...]:
    """Arguments of a tensor whose storage is untyped, as those of a typed one: the size of the
    storage in elements."""
    storage, offset, shape, strides, *_, dtype = arguments
    kind, name, key, device, nbytes = storage
    if name != _STORAGES[dtype]:
        raise pickle.UnpicklingError(f"{name} of {dtype}")
    return (kind, name, key, device, nbytes // dtype.itemsize), offset, shape, strides


class _File(io.RawIOBase, IO[bytes]):
    """A part of a mapped file as a separate file object."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, len(self._content))[whence]
        if self._at < 0:
            raise ValueError(f"position {self._at}")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
