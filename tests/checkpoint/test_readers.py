"""One reader for many workers: threads share it, and processes get a copy that opens the files
again."""

import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.checkpoint.directory import find_torch_dist, open_directory
from mtpkit.checkpoint.layouts.huggingface import HFReader
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.tensors import Tensors
from tests.checkpoint.builders import GOLDEN

CASE = GOLDEN / "tp2/moe"
"""Tensors in several pieces, stacked experts and parts that are joined."""


def read(source: Tensors, name: str) -> bytes:
    return source.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def open_hf(directory: Path) -> Tensors:
    export_checkpoint(CASE, directory / "hf", max_shard_bytes=100_000)
    return HFReader(directory / "hf")


def open_mapped(directory: Path) -> Tensors:
    export_checkpoint(CASE, directory / "hf", max_shard_bytes=100_000)
    return open_directory(directory / "hf").weights()


READERS: dict[str, Callable[[Path], Tensors]] = {
    "safetensors": open_hf,
    "safetensors under Megatron's names": open_mapped,
    "torch_dist": lambda _: MegatronReader(find_torch_dist(CASE)),
    "checked torch_dist": lambda _: open_directory(CASE).weights(),
}


@pytest.fixture(params=READERS.values(), ids=READERS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Tensors:
    return request.param(tmp_path)


def test_threads_read_the_same(source):
    names = list(source.tensors)
    want = [read(source, name) for name in names]
    assert len(set(want)) > 20
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(partial(read, source), names * 4)) == want * 4


def test_processes_read_the_same(tmp_path):
    """Forked from a process that has imported this module, but opened no file."""
    sources = [make(tmp_path / str(number)) for number, make in enumerate(READERS.values())]
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(2, context) as pool:
        for source in sources:
            names = list(source.tensors)
            have = list(pool.map(partial(read, source), names, chunksize=len(names) // 4))
            assert have == [read(source, name) for name in names]
            assert pickle.loads(pickle.dumps(source)).tensors == source.tensors


def test_a_copy_brings_no_tensors_along(tmp_path):
    source = open_mapped(tmp_path)
    before = len(pickle.dumps(source))
    source.read("output_layer.weight")
    assert len(pickle.dumps(source)) == before
