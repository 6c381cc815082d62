"""Stopping a run cleanly when the scheduler asks for it."""

import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist


class StopSignal:
    """While entered, SIGTERM is noted instead of ending the process.

    A launcher that is told to stop tells its workers, and a scheduler may tell both: a second signal says nothing new.
    """

    def __init__(self) -> None:
        self._noted = False
        self._previous: signal.Handlers | object = signal.SIG_DFL

    def __enter__(self) -> "StopSignal":
        self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._previous)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def on_any_rank(self, device: torch.device) -> bool:
        """Whether any rank was signalled; all ranks get the same answer. Collective."""
        noted = torch.tensor(float(self._noted), device=device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        return bool(noted)
