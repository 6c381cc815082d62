"""Optimizer state on the host, copied to the GPU and back piece by piece while the GPU computes
something else.

Copy engines use both directions of the bus at once and no multiprocessor. One stream copies a piece
to the GPU, a second one updates the previous piece, and a third one copies the piece before that
back to the host. A thread issues the copies of a piece only when earlier pieces have left the GPU:
streams may share the queue of a copy engine, in which the trainer's small copies would wait behind
all issued pieces.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 8 << 20
"""Elements of each tensor per piece, enough for the full rate of the bus: 48 GB/s each way on an
H200."""
PIECES = 6
"""Number of pieces on the GPU at a time, some of them spare in case the thread is late. With three
pieces the heads' backward pass waited 7 ms for the update at the sizes of an 8B model; with six it
does not wait."""


@dataclass(frozen=True)
class Part:
    """An update of optimizer state."""

    update: Callable[..., None]
    """Takes a gradient [n], which it may overwrite, and n elements of each state tensor, which it
    updates in place."""
    grad: Tensor
    """[n] on the current GPU."""
    state: Sequence[Tensor]
    """[n] each, fp32 in pinned memory of the host."""


class HostState:
    """Runs the updates of parts concurrently with the current stream.

    Between `start` and `finish` the host must not use the parts' state, and the current stream must
    not use their gradients.
    """

    def __init__(self) -> None:
        self._inward, self._outward = torch.cuda.Stream(), torch.cuda.Stream()
        # High priority: updates are short, and copies wait for them.
        self._update = torch.cuda.Stream(priority=-1)
        self._thread = ThreadPoolExecutor(1, "offload")
        self._job: Future[None] | None = None
        self._room: Tensor | None = None

    def start(self, parts: Sequence[Part]) -> None:
        """Update all parts after the work that is queued on the current stream."""
        longest = max((len(part.grad) for part in parts), default=0)
        if longest:
            # Allocated on the current stream, which can reuse the memory after `finish`.
            count = max(len(part.state) for part in parts)
            device = parts[0].grad.device
            self._room = torch.empty(PIECES, count, min(PIECE, longest), device=device)
            self._inward.wait_stream(torch.cuda.current_stream())
            self._job = self._thread.submit(self._run, parts, self._room)

    def finish(self) -> None:
        """Let the current stream wait for the updates, and free their memory on the GPU.

        Raises:
            Exception: the error of an update; raised again at every later call, since the state is
                only partly updated.
        """
        if self._job is not None:
            self._job.result()
            torch.cuda.current_stream().wait_stream(self._outward)
            self._job = self._room = None

    def synchronize(self) -> None:
        """Let the host wait for the updates, so that it can read the state."""
        self._outward.synchronize()

    @torch.no_grad()
    def _run(self, parts: Sequence[Part], room: Tensor) -> None:
        torch.cuda.set_device(room.device)  # each thread has its own current device
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
        for grad, *state in zip(
            part.grad.split(PIECE), *(tensor.split(PIECE) for tensor in part.state), strict=True
        ):
            yield part.update, grad, state


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
