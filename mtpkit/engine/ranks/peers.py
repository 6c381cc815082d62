"""Exchange of small tensors between tensor-parallel ranks in peer GPU memory, by kernels in place
of NCCL."""

import logging
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mtpkit.errors import listed
from mtpkit.kernels.dispatch import CHOICE, on_kernels
from mtpkit.kernels.exchange import (
    CHANNELS,
    MOST_RANKS,
    Windows,
    best_of_ranks,
    gather_ranks,
    sum_over_ranks,
)
from mtpkit.model.collectives import Exchange, use_exchange
from mtpkit.platform import before_closing, gpu_uuid, shares_memory

_MOST_OF_TWO = 8 << 20
"""Most bytes of a tensor that two ranks exchange here: each reads the other's tensor once, the
least possible."""
_MOST_READ = 2 << 20
"""Most bytes that each of more than two ranks reads. Each reads the tensors of all ranks, which is
slower than NCCL for larger tensors."""
_CLOSING = timedelta(seconds=5)
"""Longest time that an ending rank waits for all other ranks, which may still read its memory."""
_logger = logging.getLogger(__name__)


def limit_of(ranks: int) -> int:
    """Most bytes of a tensor that a group of `ranks` ranks exchanges in peer memory."""
    if ranks <= 2:
        return _MOST_OF_TWO
    return _MOST_READ // ranks


def exchange_in_peer_memory(
    group: ProcessGroup, control: ProcessGroup, weight: Tensor, wanted: bool
) -> None:
    """Choose how the functions of `collectives` exchange within a group. All ranks of `control`
    must call it together.

    If ranks of the group cannot reach each other's memory, a log line says why, and the group's
    backend exchanges.

    Args:
        group: this rank's tensor-parallel group.
        control: a group of all ranks that connects their hosts.
        weight: a tensor on this rank's device.
        wanted: whether small tensors are to be exchanged in peer memory.
    """
    if group.size() == 1:
        return
    peers = _peers(group, control, weight.device) if wanted else None
    use_exchange(group, peers)


class PeerMemory(Exchange):
    """Exchanges small tensors through windows of memory that all ranks map, all others by the
    group's backend."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def all_reduce(self, values: Tensor, group: ProcessGroup) -> Tensor:
        """See `Exchange.all_reduce`."""
        if not self._takes(values):
            return super().all_reduce(values, group)
        return sum_over_ranks(values.contiguous(), self.windows)

    def all_gather(self, values: Tensor, group: ProcessGroup) -> Tensor:
        """See `Exchange.all_gather`."""
        if not self._takes(values):
            return super().all_gather(values, group)
        return gather_ranks(values.contiguous(), self.windows)

    def best_of_ranks(
        self, values: Tensor, tokens: Tensor, first: int, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """See `Exchange.best_of_ranks`."""
        if not self._takes(values) or len(values) > self.windows.most_rows:
            return super().best_of_ranks(values, tokens, first, group)
        return best_of_ranks(values, tokens, first, self.windows)

    def _takes(self, values: Tensor) -> bool:
        return values.device == self.windows.epochs.device and self.windows.fit(values)


@cache
def _peers(group: ProcessGroup, control: ProcessGroup, device: torch.device) -> PeerMemory | None:
    """The peer memory of a group, made with the first engine that wants it; None: it is not
    possible for this group."""
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank()
    limit = limit_of(len(ranks))
    held: dict[int, Tensor] = {}
    offer = None

    # A rank with a problem goes on with an empty offer: it must take part in both exchanges below,
    # for which all ranks of `control` wait.
    problem = _own_problem(device, len(ranks))
    if not problem:
        try:
            held[me] = torch.zeros(Windows.nbytes(limit), dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # its flags must be zero before a peer sets one
            handle = held[me].untyped_storage()._share_cuda_()
            offer = gpu_uuid(device.index), handle
        except RuntimeError as error:
            problem = str(error).splitlines()[0]

    offers: list[Any] = _all_gather(control, offer)
    if all(offers[rank] for rank in ranks):
        try:
            held |= {rank: _open(offers[rank], device) for rank in ranks if rank != me}
        except RuntimeError as error:
            problem = str(error).splitlines()[0]

    # Even if this rank has no window: others wait for it at the barriers of `_close`.
    if any(offers):
        before_closing.append(partial(_close, group, control, held))

    # One rank that cannot exchange here decides for its group: ranks that exchange in different
    # ways would wait for each other.
    problems = _all_gather(control, problem)
    found = [f"rank {rank} {problems[rank]}" for rank in ranks if problems[rank]]
    if found:
        if me == ranks[0]:
            _logger.info(
                "ranks exchange data by %s instead of peer memory: %s",
                dist.get_backend(group),
                listed(found),
            )
        return None

    windows = tuple(held[rank] for rank in ranks)
    epochs = torch.zeros(CHANNELS, dtype=torch.int64, device=device)
    return PeerMemory(Windows(ranks.index(me), windows, epochs, limit))


def _own_problem(device: torch.device, ranks: int) -> str:
    """The reason why this rank cannot exchange in peer memory, whatever the other ranks offer;
    empty: it can."""
    if device.type != "cuda":
        return f"decodes on {device.type}"
    if ranks > MOST_RANKS:
        return f"is one of {ranks}, more than {MOST_RANKS}"
    if not on_kernels(torch.empty(0, device=device)):
        return f"has {CHOICE} set"
    return ""


def _open(offer: tuple[str, Any], device: torch.device) -> Tensor:
    """The window of another rank, in the address space of this process.

    Args:
        offer: the GPU that holds the window, and the handle of its storage, as `_share_cuda_`
            returns it.

    Raises:
        RuntimeError: this process cannot reach that GPU's memory.
    """
    gpu, handle = offer
    # By identity: with CUDA_VISIBLE_DEVICES, one GPU has different numbers in different processes.
    visible = {gpu_uuid(index): index for index in range(torch.cuda.device_count())}
    index = visible.get(gpu)
    if index is None:
        raise RuntimeError(
            f"does not see GPU {gpu}, which is on another host or hidden by CUDA_VISIBLE_DEVICES"
        )
    if not shares_memory(device.index, index):
        raise RuntimeError(f"has no peer access from GPU {device.index} to GPU {index}")

    # Opened on this device, which maps the other GPU's memory. There is no event of another stream
    # to wait for.
    _, *place, _ = handle
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *place, False)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _all_gather[T](control: ProcessGroup, own: T) -> list[T]:
    """The value `own` of each rank, in the order of the ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own, group=control)
    return every


def _close(group: ProcessGroup, control: ProcessGroup, held: dict[int, Tensor]) -> None:
    """Close the windows of other ranks once all ranks have finished reading; then free this rank's
    own window, once all ranks have closed it."""
    use_exchange(group, None)
    _peers.cache_clear()
    own = held.pop(dist.get_rank(), None)
    if own is not None:
        torch.cuda.synchronize(own.device)

    # At the first barrier all ranks have finished reading, at the second all have closed what they
    # opened.
    for _ in range(2):
        # a rank has failed or is busy; its memory is freed with its process
        with suppress(RuntimeError):
            dist.monitored_barrier(control, timeout=_CLOSING)
        held.clear()
