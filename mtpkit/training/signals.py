"""Stop a run cleanly at SIGTERM or Ctrl-C."""

import contextlib
import os
import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist


def _say(number: int) -> None:
    """Print the effect of a signal, on rank 0; not with `print`, which the signal may have
    interrupted."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        more = "; a second Ctrl-C ends it at once" if number == signal.SIGINT else ""
        # the terminal may be gone: the run is saved all the same
        with contextlib.suppress(OSError):
            os.write(2, f"\nmtpkit: the run saves and ends after this step{more}\n".encode())


class StopSignal:
    """A context in which SIGTERM and the first SIGINT (Ctrl-C) are noted with a message and do not
    end the process.

    Further SIGTERMs are ignored until the process ends, after the context too: a scheduler may
    signal a launcher and its workers, the launcher then signals the workers again, and a run that
    is saved by then must not end as a killed one. A second SIGINT has its usual effect. torchrun
    kills its workers 30 s after a signal; if a save takes longer, signal only the workers.
    """

    def __init__(self) -> None:
        self.interrupted = False
        """Whether a SIGINT was noted."""
        self._noted = False
        self._terminated = False
        self._previous: dict[int, signal.Handlers | object] = {}
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> "StopSignal":
        self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        # a shell ignores it for background jobs
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(signal.SIGINT)
        if self._terminated:
            # not a function, which is no longer called while Python ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            self._restore(signal.SIGTERM)
        # A reduction left open would meet the next collective of other ranks; after an error they
        # may never join it.
        if error is None and self._asked is not None:
            self._asked[1].wait()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or not self._noted:
            _say(number)
        self._noted = True
        self._terminated |= number == signal.SIGTERM
        if number == signal.SIGINT:
            self.interrupted = True
            self._restore(number)

    def _restore(self, number: int) -> None:
        """Restore a signal's previous handler. Idempotent, since a SIGINT may come in between, and
        `_note` restores too."""
        previous = self._previous.get(number)
        if previous is not None:
            signal.signal(number, previous)  # type: ignore[arg-type]
            self._previous.pop(number, None)

    def on_any_rank(self, device: torch.device) -> bool:
        """Whether any rank was signalled before the previous call; the same on all ranks.
        Collective.

        Each call returns the result of the reduction that the previous call started. So no rank
        waits for the slowest one, and the first stages of a pipeline can run ahead of the last.
        """
        asked = self._asked
        noted = torch.tensor(float(self._noted), device=device)
        work = dist.all_reduce(noted, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._asked = noted, work
        # All ranks are at their first call, so all of them return the same.
        if asked is None:
            return False
        asked[1].wait()
        return bool(asked[0])
