"""Write files in several threads, with a bound on the memory that they hold together."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

THREADS = 4
"""Number of files that are written at once."""
HELD_BYTES = 2**30
"""Most bytes of tensors that all threads hold together; a larger tensor is held alone."""


class Stopped(Exception):
    """Raised in a thread after another thread failed, which makes its work pointless."""


class Budget:
    """A limit on the bytes that several threads hold together."""

    def __init__(self, nbytes: int = HELD_BYTES) -> None:
        self._most = self._free = nbytes
        self._changed = threading.Condition()
        self._stopped = False

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes`, or at most the whole budget, are free; hold them inside the `with`
        block.

        Raises:
            Stopped: `stop` was called.
        """
        taken = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._free >= taken)
            if self._stopped:
                raise Stopped
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()

    def stop(self) -> None:
        """Make every thread that asks or waits for bytes fail with `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def write_all[Job, Done](write: Callable[[Job, Budget], Done], jobs: Sequence[Job]) -> list[Done]:
    """Call `write` for all jobs, several at once; the first failure stops the others and is
    raised."""
    budget = Budget()
    with ThreadPoolExecutor(THREADS) as pool:  # waits for all threads when it ends
        futures = [pool.submit(write, job, budget) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also on Ctrl-C
            if not all(future.done() and future.exception() is None for future in futures):
                budget.stop()
    for error in (future.exception() for future in futures):
        if error is not None and not isinstance(error, Stopped):
            raise error
    return [future.result() for future in futures]
