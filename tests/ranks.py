"""Processes that compute one thing together, for tests of what ranks share."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mtpkit.platform import close_distributed


def fork(function: Callable[..., object], *args: object) -> ForkServerProcess:
    """Start a function of args in a process that has the imports behind it, which take seconds of a
    new one."""
    preload(function.__module__)
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
    process.start()
    return process


def run_ranks(
    function: Callable[..., object], *args: object, ranks: int = 2, device: str = "cpu"
) -> None:
    """Call a function of (rank, *args) in so many new processes, in the environment that torchrun
    would give them.

    They are forked from one that has imported what the first caller needs: each would take 10 s for
    it. Where there is a GPU the imports look for it, after which CUDA cannot be used in a fork.
    Their environment is that of the first.
    """
    method = "forkserver" if device == "cpu" else "spawn"
    if device == "cpu":
        preload(function.__module__)
    mp.start_processes(
        in_rank, (ranks, free_port(), function, args), nprocs=ranks, start_method=method
    )


def fork_ranks(
    function: Callable[..., object], *args: object, ranks: int = 2
) -> list[ForkServerProcess]:
    """Start a function of args in so many processes at once, in the environment that torchrun would
    give them."""
    preload(function.__module__)
    port = free_port()
    return [fork(as_rank, rank, ranks, port, function, *args) for rank in range(ranks)]


def preload(module: str) -> None:
    """Start the process that others are forked from, unless there is one, and import a module
    there."""
    mp.get_context("forkserver").set_forkserver_preload(["tests.preload", module])
    forkserver.ensure_running()


def in_rank(rank: int, ranks: int, port: int, function: Callable[..., object], args: tuple) -> None:
    """What a process of `run_ranks` does."""
    as_rank(rank, ranks, port, function, rank, *args)
    close_distributed()


def as_rank(
    rank: int, ranks: int, port: int, function: Callable[..., object], *args: object
) -> None:
    """Call a function of args in the environment of a rank. If there are fewer GPUs than ranks,
    several ranks share one as if they were on several hosts: NCCL then connects them by sockets,
    and does not refuse."""
    gpus = torch.cuda.device_count() or ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % gpus), "WORLD_SIZE": str(ranks)}
    if ranks > gpus:
        os.environ |= {"NCCL_HOSTID": f"host {rank // gpus}", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        function(*args)
    except Exception:  # said at once: the others may wait for this one until somebody ends them
        traceback.print_exc()
        sys.stderr.flush()
        raise


def share_device(device: str) -> None:
    """Join the others by gloo, on the CPU or on the GPU that `as_rank` has given, which ranks may
    share."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")


def need_gpus(count: int, device: str = "cuda") -> None:
    """Skip a test of processes on GPUs where there are too few of them."""
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
