"""Copy tensors of memory-mapped files to a GPU: pages are read while the GPU fetches earlier
pages."""

from collections import deque

import torch
from torch import Tensor

BUFFERS = 4
BUFFER_BYTES = 16 * 2**20
"""Pinned memory that tensors pass through. The GPU fetches one buffer in about 0.3 ms."""


class Uploader:
    """Copies tensors to a GPU through a ring of pinned buffers, which torch's CPU threads fill in
    turn.

    Without the ring, the driver would stage a copy from unpinned memory in one thread. Only one
    thread at a time may use an uploader.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a CPU tensor on the device, for work on the device's current
        stream."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if not self._ring:
            self._ring.extend(self._new_buffer() for _ in range(BUFFERS))
        parts = (_bytes(t).split(BUFFER_BYTES) for t in (tensor.contiguous(), target))
        for source, destination in zip(*parts, strict=True):
            buffer, sent = self._ring[0]
            self._ring.rotate(-1)
            # until the GPU has fetched the buffer's content; returns at once for a new buffer
            sent.synchronize()
            buffer = buffer[: source.numel()].copy_(source)
            self._send(buffer, destination, sent)
        return target

    def _new_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    def _send(self, buffer: Tensor, destination: Tensor, sent: torch.cuda.Event) -> None:
        destination.copy_(buffer, non_blocking=True)
        sent.record(torch.cuda.current_stream(self._device))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
