"""Joins the processes that decode with one model, and refuses ranks that differ from rank 0."""

import hashlib
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from mtpkit.config import ModelConfig
from mtpkit.engine.ranks.follow import Ranks, SplitRanks
from mtpkit.engine.ranks.stages import PipelineStage, Stage
from mtpkit.engine.ranks.watch import Watch, accept, connect, listen
from mtpkit.engine.requests.model_factory import ModelFactory
from mtpkit.engine.requests.options import LLMOptions
from mtpkit.errors import UserError, counted, listed, raise_problems
from mtpkit.model.kinds import UnevenSize, kinds_in, uneven_sizes
from mtpkit.platform import (
    before_closing,
    ensure_distributed,
    init_processes,
    num_processes,
    on_first_rank,
)
from mtpkit.version import __version__

_OWN = ("model", "download_dir", "device", "tokenizer")
"""Options that may differ between ranks: where a rank finds its model and its tokenizer, and its
device."""
_END = 2**16
"""Files are compared by their sizes and by this many bytes at both ends. The first ones hold the
index of a file's tensors; the last ones hold weights of the heads where mtpkit converted or
stitched the model, which differ between two trainings on one base."""
_NOT_WEIGHTS = {".md", ".txt", ".py", ".png"}


def reports(tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> bool:
    """Whether this process is the one that prints and writes, of those that run one command. All
    other processes are silent from now on.

    Commands call this before they look for a device.

    Raises:
        UserError: there are fewer processes than ranks, or more processes, which would all do and
            print the same.
    """
    processes = num_processes()
    if processes == 1:
        _require_processes(tensor_parallel_size, pipeline_parallel_size)
        return True

    asked = tensor_parallel_size * pipeline_parallel_size
    if processes != asked:
        sizes = f"is {tensor_parallel_size}"
        remedy = f"set it to {processes}"
        if pipeline_parallel_size > 1:
            sizes = (
                f"{tensor_parallel_size} x --pipeline-parallel-size {pipeline_parallel_size} is"
                f" {asked}"
            )
            remedy = f"choose sizes whose product is {processes}"
        raise UserError(
            f"there are {processes} processes, but --tensor-parallel-size {sizes}: {remedy}, or"
            f" start {asked}"
        )

    init_processes()
    if dist.get_rank() == 0:
        return True
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    return False


def _require_processes(size: int, stages: int) -> None:
    """Refuse a number of processes that is not the number of ranks."""
    processes = num_processes()
    if processes != size * stages:
        named = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
        asked = " x ".join(f"{name} {value}" for name, value in named.items() if value > 1)
        raise UserError(
            f"{asked} needs {size * stages} processes, but there"
            f" {'is' if processes == 1 else 'are'} {processes}: start them with torchrun"
            f" --standalone --nproc-per-node {size * stages}"
        )


def run_on_first_rank[T](processes: int, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone, and return its result on all ranks of a command. Call it after
    `reports`.

    Raises:
        MtpkitError, OSError: what rank 0 raised.
    """
    return action() if processes == 1 else on_first_rank(action)


def join(options: LLMOptions, config: ModelConfig) -> Ranks:
    """Bring the ranks together that decode with one model.

    Raises:
        UserError: sizes that cannot be split, a number of processes that is not that of the ranks,
            or a rank whose model, config, versions or options differ from rank 0's. Every rank
            raises the same error.
    """
    size, stages, whole_experts = _asked_sizes(options)
    if not isinstance(options.model, str | Path | ModelFactory):
        size, stages, whole_experts = _sizes_of(options)
    if size * stages == 1:
        return Ranks()
    raise_problems(f"tensor_parallel_size {size}", list(_problems(config, size, whole_experts)))
    if stages > len(config.pattern):
        raise UserError(
            f"pipeline_parallel_size {stages}: the model's base has"
            f" {counted(len(config.pattern), 'layer')}; take no more stages"
        )
    _require_processes(size, stages)
    init_processes()
    control = _control_group()
    _compare(control, _entries(options, config))
    watch = _watch(control)
    ensure_distributed(size, stages, size if whole_experts else 1, 1 if whole_experts else None)
    from megatron.core import parallel_state

    tensor_group = parallel_state.get_tensor_model_parallel_group()
    return SplitRanks(tensor_group, control, watch, _stage())


def _asked_sizes(options: LLMOptions) -> tuple[int, int, bool]:
    """Tensor-parallel ranks, pipeline stages, and whether each expert belongs to one rank."""
    return (
        options.tensor_parallel_size,
        options.pipeline_parallel_size,
        options.enable_expert_parallel,
    )


def _sizes_of(options: LLMOptions) -> tuple[int, int, bool]:
    """The values of `_asked_sizes` for a model that is given as an object."""
    config = options.model.config
    size = config.tensor_model_parallel_size
    stages = config.pipeline_model_parallel_size
    experts = config.expert_model_parallel_size
    if config.sequence_parallel or experts not in (1, size):
        raise UserError(
            "the model given is split over sequences, or over experts without the other matrices:"
            " build it with sequence_parallel=False, and for experts expert_tensor_parallel=1"
        )
    if _asked_sizes(options) not in ((1, 1, False), (size, stages, experts > 1)):
        raise UserError(
            f"the model given is split over {size} ranks, experts over {experts}, layers over"
            f" {stages} stages: leave all sizes out"
        )
    return size, stages, experts > 1


def _stage() -> Stage:
    """The pipeline stage of this rank."""
    from megatron.core import parallel_state

    forward = parallel_state.get_pipeline_model_parallel_group()
    if forward.size() == 1:
        return Stage()
    return PipelineStage(forward, _group_back(forward, dist.get_world_size()))


@cache
def _group_back(forward: ProcessGroup, processes: int) -> ProcessGroup:
    """A second group of the ranks that hold the stages of one model. Every rank helps to make all
    these groups."""
    before_closing.append(_group_back.cache_clear)
    apart = processes // forward.size()
    groups = [dist.new_group(range(first, processes, apart)) for first in range(apart)]
    return groups[dist.get_rank() % apart]


def _problems(config: ModelConfig, ranks: int, whole_experts: bool) -> Iterator[str]:
    """The sizes of a model that `ranks` ranks cannot share, in words."""
    whole = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    uneven = [UnevenSize(key, size, False) for key, size in whole.items() if size % ranks]
    for key, size, shared in (*uneven, *uneven_sizes(config, ranks, whole_experts)):
        if shared:
            yield (
                f"the model's {key} {size} do not divide each other; take a divisor or a multiple"
                " of it"
            )
        else:
            yield f"the model's {key} {size} cannot be divided evenly; take a divisor of it"

    if not whole_experts:
        return
    counts = [count for kind in kinds_in(config.letters) if (count := kind.experts(config).count)]
    if not counts:
        yield "enable_expert_parallel is set, but the model has no experts; leave it out"
    for count in counts:
        if count % ranks:
            yield (
                f"the model's {count} experts cannot be shared out; leave"
                " enable_expert_parallel out"
            )


@cache
def _control_group() -> ProcessGroup:
    """The gloo group of all ranks, made with the first engine."""
    before_closing.append(_control_group.cache_clear)
    return dist.new_group(backend="gloo")


@cache
def _watch(control: ProcessGroup) -> Watch:
    """The watch of this process, made with the first engine."""
    rank = dist.get_rank()
    if rank == 0:
        secret = secrets.token_bytes(16)
        listener = listen(secret)
        dist.broadcast_object_list([listener.address[1], secret], group=control, group_src=0)
        peers = accept(listener, dist.get_world_size())
    else:
        sent: list[Any] = [None, None]
        dist.broadcast_object_list(sent, group=control, group_src=0)
        port, secret = sent
        host = os.environ.get("MASTER_ADDR", "localhost")
        peers = connect(rank, (host, port), secret)
    watch = Watch(rank, peers)
    before_closing.extend([_watch.cache_clear, watch.leave])
    return watch


def _compare(control: ProcessGroup, own: dict[str, str]) -> None:
    """Refuse ranks that differ from rank 0."""
    every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own, group=control)
    for rank, theirs in enumerate(every):
        keys = [key for key in every[0] | theirs if every[0].get(key) != theirs.get(key)]
        if keys:
            wrong = [
                f"{key} is {theirs.get(key, 'not there')}, not {every[0].get(key, 'not there')}"
                for key in keys
            ]
            raise UserError(
                f"rank {rank} differs from rank 0: {listed(wrong)}; start all ranks alike"
            )


def _entries(options: LLMOptions, config: ModelConfig) -> dict[str, str]:
    """Values that must be the same on all ranks, by their names in error messages."""
    # mtpkit may run from its sources, where no package is installed.
    versions = {"mtpkit": __version__} | {
        name: importlib.metadata.version(name) for name in ("torch", "megatron-core")
    }
    entries = {f"version of {name}": version for name, version in versions.items()}
    entries |= {name: repr(value) for name, value in vars(options).items() if name not in _OWN}
    entries |= dict(_flat(config, "the model's "))
    if isinstance(options.model, str | Path):
        entries["the content of the model's files"] = _digest(Path(options.model))
    if isinstance(options.model, ModelFactory):
        entries["the model"] = repr(options.model)
    return entries


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Names and values of a dataclass's fields, including the fields of inner dataclasses."""
    if not is_dataclass(value):
        return
    for name, inner in vars(value).items():
        if is_dataclass(inner) and not isinstance(inner, type):
            yield from ((f"{prefix}{name}.{key}", repr(one)) for key, one in asdict(inner).items())
        elif not name.startswith("_"):
            yield f"{prefix}{name}", repr(inner)


def _digest(directory: Path) -> str:
    """Hash of all files that may hold a model: their names, sizes, and both ends.

    Modification times do not count, since each host may have its own copy. Files of one size that
    differ only in the middle are taken for equal, such as a copy that a disk has damaged.
    """
    found = hashlib.blake2b(digest_size=8)
    files = (path for path in directory.rglob("*") if path.is_file())
    for path in sorted(path for path in files if path.suffix not in _NOT_WEIGHTS):
        size = path.stat().st_size
        found.update(f"{path.relative_to(directory)} {size}".encode())
        with path.open("rb") as file:
            found.update(file.read(_END))
            file.seek(max(0, size - _END))
            found.update(file.read(_END))
    return found.hexdigest()
