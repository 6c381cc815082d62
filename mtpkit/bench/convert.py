"""Speed and memory of converting a synthetic checkpoint, compared with a copy of its files in the
same run."""

import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import torch
from torch import Tensor

from mtpkit.bench.machine import measure_machine
from mtpkit.bench.report import Column, Result
from mtpkit.bench.settings import ConvertBenchConfig
from mtpkit.bench.sizes import NEMOTRON_3_NANO, NEMOTRON_3_TINY
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.families import Family, find_family
from mtpkit.checkpoint.layouts.huggingface import MAX_SHARD_BYTES, HFReader, write_hf
from mtpkit.checkpoint.layouts.megatron import parameters
from mtpkit.checkpoint.stitch import stitch
from mtpkit.checkpoint.tensors import TensorInfo
from mtpkit.config import ModelConfig
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.files import fsync_tree

_UNIT = "ME*E"
_SMALL = 10**9
"""Checkpoints below this number of bytes get tiny layers, so that they have many of them."""
_SHARDS = 16
_COMPARED = 64
_POOL = 2**25
"""Number of random numbers in the pool that all tensors are cut from."""
_SPARE = 1.05


@dataclass(frozen=True)
class ConvertRow:
    """One conversion of the whole checkpoint, to the last byte on the disk."""

    stage: Annotated[str, Column("stage", key=True)]
    nbytes: Annotated[int, Column("GB", lambda row: f"{row.nbytes / 1e9:.2f}")]
    """Bytes of the checkpoint."""
    written: Annotated[int, Column("GB written", lambda row: f"{row.written / 1e9:.2f}")]
    seconds: Annotated[float, Column("s", ".1f")]
    bytes_per_s: Annotated[float, Column("GB/s", lambda row: f"{row.bytes_per_s / 1e9:.3f}")]
    """Bytes of the checkpoint per second, whether they were written or linked."""
    copy_share: Annotated[float, Column("of the copy rate", ".0%")]
    """Share of the rate at which the system copies the files of the checkpoint to the same disk."""
    peak_memory: Annotated[
        int, Column("peak GB in memory", lambda row: f"{row.peak_memory / 1e9:.2f}")
    ]
    """Most resident bytes of the process, mapped files included."""


def measure_conversion(config: ConvertBenchConfig, directory: Path) -> Result[ConvertRow]:
    """Make a checkpoint with heads in a new folder, copy, import, stitch and export it, and remove
    everything.

    Files are not in the system's cache when a stage begins, and are on the disk when it ends.
    Tensors of the export are compared with the original's.

    Args:
        directory: place on the disk to measure.

    Raises:
        UserError: the place is no directory, or has too little room.
        MtpkitError: an exported tensor differs from the original.
    """
    wanted = int(config.gigabytes * 1e9)
    if not directory.is_dir():
        raise UserError(
            f"{directory} is no directory: make it, or name another place on the disk by"
            " --directory"
        )
    free = shutil.disk_usage(directory).free
    if free < 2 * _SPARE * wanted:
        raise UserError(
            f"{directory} has {free / 1e9:.1f} GB free, too little for twice {config.gigabytes} GB"
        )
    machine = measure_machine(torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=directory, prefix="mtpkit-bench-") as name:
        rows = list(_stages(Path(name), wanted))
    title = f"conversion of {rows[0].nbytes / 1e9:.1f} GB, {machine.device}"
    return Result("convert", title, ConvertRow, rows, machine, asdict(config))


def _stages(root: Path, wanted: int) -> Iterator[ConvertRow]:
    source, copied, megatron, back, stitched = (
        root / name for name in ("hf", "copy", "megatron", "back", "stitched")
    )
    model = _choose_layers(wanted)
    family = find_family(model)
    random = _Random(model, family)
    total = sum(info.nbytes for info in random.tensors.values())
    source.mkdir()
    write_hf(source, family.config_to_hf(model), random, min(MAX_SHARD_BYTES, total // _SHARDS))
    fsync_tree(source)
    digests = _digests(source)
    copy_rate = 0.0

    def stage(name: str, action: Callable[[], object], target: Path) -> ConvertRow:
        nonlocal copy_rate
        _forget(root)
        with _watch() as usage:
            action()
            fsync_tree(target)
        copy_rate = copy_rate or total / usage.seconds
        written = sum(
            path.stat().st_size
            for path in target.rglob("*")
            if path.is_file() and path.stat().st_nlink == 1
        )
        rate = total / usage.seconds
        return ConvertRow(name, total, written, usage.seconds, rate, rate / copy_rate, usage.peak)

    yield stage("copy of the files", lambda: shutil.copytree(source, copied), copied)
    shutil.rmtree(copied)
    yield stage("import", lambda: import_checkpoint(source, megatron), megatron)
    yield stage("stitch --link", lambda: stitch(source, megatron, stitched, link=True), stitched)
    shutil.rmtree(stitched)
    shutil.rmtree(source)  # room for the export
    yield stage("export", lambda: export_checkpoint(megatron, back), back)
    if odd := [name for name, digest in _digests(back).items() if digest != digests[name]]:
        raise MtpkitError(f"exported tensors differ from the original's: {listed(odd)}")


def _choose_layers(wanted: int) -> ModelConfig:
    """A model with as many layers as a checkpoint of about `wanted` bytes in bf16 has room for."""
    nano = NEMOTRON_3_NANO.replace(num_moe_experts=16, mtp_pattern="*E", mtp_num_depths=2)
    shape = NEMOTRON_3_TINY.replace(mtp_pattern="*E", mtp_num_depths=2) if wanted < _SMALL else nano

    def nbytes(units: int) -> int:
        return 2 * sum(
            torch.Size(size).numel()
            for size in parameters(shape.replace(pattern=_UNIT * units)).values()
        )

    one = nbytes(1)
    return shape.replace(pattern=_UNIT * max(1, 1 + round((wanted - one) / (nbytes(2) - one))))


class _Random:
    """Tensors of a model in the Hugging Face layout, in bf16, cut from one pool of random
    numbers."""

    def __init__(self, model: ModelConfig, family: Family) -> None:
        self._pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).bfloat16()
        shapes = family.table(model).hf_shapes()
        self.tensors = {
            name: TensorInfo(tuple(shape), torch.bfloat16) for name, shape in shapes.items()
        }
        self._starts = {name: 9973 * number % _POOL for number, name in enumerate(shapes)}

    def read(self, name: str) -> Tensor:
        shape = self.tensors[name].shape
        start = self._starts[name]
        result = torch.empty(shape, dtype=torch.bfloat16)
        left = result.view(-1)
        while left.numel():
            part = self._pool[start : start + left.numel()]
            left[: part.numel()] = part
            left = left[part.numel() :]
            start = 0
        return result

    def require_finite(self) -> None:
        """Do nothing: all tensors are finite."""


def _digests(directory: Path) -> dict[str, bytes]:
    """Digests of some tensors of a directory, spread evenly over their names."""
    reader = HFReader(directory)
    names = sorted(reader.tensors)
    chosen = names[:: max(1, len(names) // _COMPARED)]
    return {
        name: hashlib.sha256(reader.read(name).view(torch.uint8).numpy().tobytes()).digest()
        for name in chosen
    }


def _forget(root: Path) -> None:
    """Drop the files below a directory from the system's cache, if the system has a call for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass
class _Usage:
    """Time and memory of a piece of work."""

    seconds: float = 0.0
    peak: int = 0
    done: threading.Event = field(default_factory=threading.Event)


@contextmanager
def _watch() -> Iterator[_Usage]:
    """Measure the code inside: its seconds, and the most resident memory, sampled every 10 ms."""
    usage = _Usage()
    process = psutil.Process()

    def look() -> None:
        while True:
            usage.peak = max(usage.peak, process.memory_info().rss)
            if usage.done.wait(0.01):
                return

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.perf_counter()
    try:
        yield usage
    finally:
        usage.seconds = time.perf_counter() - began
        usage.done.set()
        watcher.join()
