"""Optimizer state on the host, brought to the GPU piece by piece and back while the GPU does something else.

The bus carries both directions at once, by copy engines that take no multiprocessor from what runs beside them: one
stream brings a piece, one updates the piece before, one takes the piece before that back. A thread asks for pieces only
as earlier ones leave: streams may share a queue of a copy engine, and whatever small copy the trainer makes meanwhile
would wait behind all that were asked for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 8 << 20
"""Elements of each tensor that are on their way at a time, enough for the bus' full rate: 48 GB/s each way beside an
H200."""
PIECES = 6
"""On the GPU at a time: some come, are updated or leave, and some are there for the thread to be late. With three the
heads' backward waited 7 ms for an 8B shape's update, with six it does not."""


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
        # Ahead of what runs beside it: it is short, and copies wait for it.
        self._update = torch.cuda.Stream(priority=-1)
        self._thread = ThreadPoolExecutor(1, "offload")
        self._job: Future[None] | None = None
        self._room: Tensor | None = None

    def start(self, parts: Sequence[Part]) -> None:
        """Update all parts, after what the current stream has been asked for."""
        longest = max((len(part.grad) for part in parts), default=0)
        if longest:
            # Of the current stream's memory, so that it can be used there after `finish`.
            count, device = max(len(part.state) for part in parts), parts[0].grad.device
            self._room = torch.empty(PIECES, count, min(PIECE, longest), device=device)
            self._inward.wait_stream(torch.cuda.current_stream())
            self._job = self._thread.submit(self._run, parts, self._room)

    def finish(self) -> None:
        """Have the current stream wait for the updates; the room that they took on the GPU is free again.

        Raises:
            Exception: what an update raised, here and at every later call: the state is between two steps.
        """
        if self._job is not None:
            self._job.result()
            torch.cuda.current_stream().wait_stream(self._outward)
            self._job = self._room = None

    def synchronize(self) -> None:
        """Have the host wait for the updates, to read the state."""
        self._outward.synchronize()

    @torch.no_grad()
    def _run(self, parts: Sequence[Part], room: Tensor) -> None:
        torch.cuda.set_device(room.device)  # this thread's
        leaving: deque[torch.cuda.Event] = deque()
        for number, (update, grad, state) in enumerate(_pieces(parts)):
            if len(leaving) == PIECES:
                leaving.popleft().synchronize()
            here = [buffer[: len(grad)] for buffer in room[number % PIECES]]
            with torch.cuda.stream(self._inward):
                _copy(here, state)
            self._update.wait_stream(self._inward)
            with torch.cuda.stream(self._update):
                update(grad, *here)
            self._outward.wait_stream(self._update)
            with torch.cuda.stream(self._outward):
                _copy(state, here)
                leaving.append(self._outward.record_event(torch.cuda.Event(blocking=True)))


def _pieces(parts: Iterable[Part]) -> Iterator[tuple[Callable[..., None], Tensor, list[Tensor]]]:
    for part in parts:
        for grad, *state in zip(part.grad.split(PIECE), *(tensor.split(PIECE) for tensor in part.state), strict=True):
            yield part.update, grad, state


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
