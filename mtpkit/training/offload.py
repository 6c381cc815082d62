"""Optimizer state on the host, brought to the GPU piece by piece and back while the GPU does something else.

The bus carries both directions at once, by copy engines that take no multiprocessor from what runs beside them: one
stream brings a piece, one updates the piece before, one takes the piece before that back.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 16 << 20
"""Elements of each tensor that are on their way at a time: enough for the bus' full rate, 48 GB/s each way on an H200,
and few enough that the host's calls, a fifth of a millisecond a piece, hold up little."""
PIECES = 3
"""On the GPU at a time: one that comes, one that is updated, one that leaves."""


@dataclass(frozen=True)
class Part:
    """An update of state on the host."""

    update: Callable[..., None]
    """Takes a gradient [n], which it may overwrite, and n elements of each state tensor on the same device, which it
    changes."""
    grad: Tensor
    """[n] on the current GPU."""
    state: Sequence[Tensor]
    """[n] each, fp32 in pinned memory of the host."""


class HostState:
    """Updates parts beside what the current stream does.

    Between `start` and `finish` the host must not touch their state, nor the current stream their gradients.
    """

    def __init__(self) -> None:
        self._inward, self._outward = torch.cuda.Stream(), torch.cuda.Stream()
        # First, or large products beside it would leave it no multiprocessor for many milliseconds.
        self._update = torch.cuda.Stream(priority=-1)
        self._room: Tensor | None = None

    def start(self, parts: Sequence[Part]) -> None:
        """Update all parts, after what the current stream has been asked for."""
        longest = max((len(part.grad) for part in parts), default=0)
        count = max((len(part.state) for part in parts), default=0)
        if not longest:
            return
        # Of the current stream's memory, so that it can be used there after `finish`.
        self._room = torch.empty(PIECES, count, min(PIECE, longest), device=parts[0].grad.device)
        for stream in (self._inward, self._update):
            stream.wait_stream(torch.cuda.current_stream())
        free: deque[torch.cuda.Event] = deque()
        for number, (update, grad, state) in enumerate(_pieces(parts)):
            room = [buffer[: len(grad)] for buffer in self._room[number % PIECES]]
            if len(free) == PIECES:
                self._inward.wait_event(free.popleft())
            with torch.cuda.stream(self._inward):
                _copy(room, state)
            self._update.wait_stream(self._inward)
            with torch.cuda.stream(self._update):
                update(grad, *room)
            self._outward.wait_stream(self._update)
            with torch.cuda.stream(self._outward):
                _copy(state, room)
                free.append(self._outward.record_event())

    def finish(self) -> None:
        """Have the current stream wait for the updates; the room that they took on the GPU is free again."""
        torch.cuda.current_stream().wait_stream(self._outward)
        self._room = None

    def synchronize(self) -> None:
        """Have the host wait for the updates, to read the state."""
        self._outward.synchronize()


def _pieces(parts: Iterable[Part]) -> Iterator[tuple[Callable[..., None], Tensor, list[Tensor]]]:
    for part in parts:
        for grad, *state in zip(part.grad.split(PIECE), *(tensor.split(PIECE) for tensor in part.state), strict=True):
            yield part.update, grad, state


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
