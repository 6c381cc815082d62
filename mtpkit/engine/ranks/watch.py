"""Notices when a rank dies, and ends all other ranks.

A rank that waits in an all-reduce cannot notice this by itself. Each rank therefore has a
connection to rank 0, on which a thread listens. The operating system closes the connections of a
process that ends, for whatever reason, and within seconds those to a host that is gone. A busy rank
is never taken for a dead one, since no rank has to answer anything.

What needs this module is a rank that is in no step, such as one whose program waits for its user:
after a rank under another torchrun agent was killed or failed, it was still there after 25 s
without this module, and ended within 5 s with it (gloo on CPUs, 2026-11-27). Ranks of one agent,
and ranks in a step, were also ended by torchrun or by broken connections, but with tracebacks of
gloo.
"""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from types import TracebackType
from typing import NoReturn

from mtpkit.errors import MtpkitError, on_failure

_PATIENCE = 8.0
"""Seconds that a rank may work on something that needs a rank that has left in good order, before
it is ended."""
_GRACE = 2.0
"""Seconds in which a rank may report its own failure, once another rank has reported one."""
_CONNECTING = 300.0
"""Seconds in which all ranks must connect."""
_SAYING_WHO = 10.0
"""Seconds in which a program that connects must say which rank it is, before others are heard."""
_LONGEST = 400
"""Most characters of a reason."""
_LEFT = "left"
_FAILED = "failed"


def listen(secret: bytes) -> Listener:
    """Open rank 0's socket, on a free port.

    Args:
        secret: bytes that only the ranks know, which tell their connections from those of other
            programs.
    """
    return Listener(("", 0), backlog=1024, authkey=secret)


def accept(listener: Listener, size: int) -> dict[int, Connection]:
    """Wait for all other ranks, and return rank 0's connections to them.

    Raises:
        MtpkitError: not all ranks connect in time.
    """
    peers: dict[int, Connection] = {}

    def accept_all() -> None:
        while len(peers) < size - 1:
            # Another program, such as a port scan, does not know the secret.
            with suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                peers[connection.recv()] = connection

    # A program that connects and says nothing blocks a thread in `Listener.accept`: another thread
    # then goes on, so that this costs the ranks seconds and not the start.
    end = time.monotonic() + _CONNECTING
    while len(peers) < size - 1 and time.monotonic() < end:
        accepting = threading.Thread(target=accept_all, daemon=True)
        accepting.start()
        accepting.join(min(_SAYING_WHO, _CONNECTING))
    missing = sorted(set(range(1, size)) - peers.keys())
    if missing:
        raise MtpkitError(f"ranks {missing} did not connect within {_CONNECTING:.0f} s")
    listener.close()
    return peers


def connect(rank: int, address: tuple[str, int], secret: bytes) -> dict[int, Connection]:
    """Connect to the listener of rank 0, and return the connection to it.

    Raises:
        MtpkitError: rank 0 cannot be reached.
    """
    try:
        connection = Client(address, authkey=secret)
        connection.send(rank)
    except (AuthenticationError, EOFError, OSError) as error:
        raise MtpkitError(
            f"rank {rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error}"
        ) from error
    return {0: connection}


class Watch:
    """Watches the other ranks from a thread of its own, until the process ends.

    Args:
        peers: the connections of `accept` or `connect`, by rank.
    """

    def __init__(self, rank: int, peers: dict[int, Connection]) -> None:
        self.rank = rank
        self._peers = peers
        self._busy_since: float | None = None
        self._ending = threading.Event()
        """Set when this rank has told the other ranks that it ends."""
        self._gone = threading.Event()
        """Set when another rank has ended."""
        for connection in peers.values():
            _notice_lost_hosts(connection)
        on_failure.append(self._report)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self.leave)
        threading.Thread(target=self._listen, name="mtpkit-watch", daemon=True).start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context in which this rank needs all other ranks. If an exchange fails, this rank waits
        to learn why."""
        before = self._busy_since
        self._busy_since = time.monotonic()
        try:
            yield
        except RuntimeError:  # torch raises it when a connection breaks
            self._wait_for_reason()
            raise
        finally:
            self._busy_since = before

    def _wait_for_reason(self) -> None:
        """Give the watch time to end this process, in case another rank caused the error here."""
        if not self._ending.is_set() and self._gone.wait(_GRACE):
            time.sleep(_PATIENCE + _GRACE)

    def _listen(self) -> None:
        connected = {connection: rank for rank, connection in self._peers.items()}
        while connected:
            for connection in wait(list(connected)):
                assert isinstance(connection, Connection)
                peer = connected.pop(connection)
                try:
                    what, reason = connection.recv()
                except (EOFError, OSError):
                    what = reason = ""
                if self._ending.is_set():
                    return
                self._gone.set()
                if what == _LEFT:
                    self._require_no_work(peer)
                elif what == _FAILED:
                    self._end_after(reason, _GRACE, aloud=self.rank == 0)
                else:
                    died = f"rank {peer} has died; its own output may say why"
                    self._end_after(died, 0.0, aloud=True)

    def _require_no_work(self, peer: int) -> None:
        """End this process once it has needed the rank `peer`, which has left, for too long."""

        def check() -> None:
            while not self._ending.is_set():
                since = self._busy_since
                if since is not None and time.monotonic() - since > _PATIENCE:
                    left = f"rank {peer} has ended while rank {self.rank} decodes"
                    self._end_after(left, 0.0, aloud=True)
                time.sleep(0.2)

        threading.Thread(target=check, daemon=True).start()

    def _end_after(self, reason: str, seconds: float, aloud: bool) -> NoReturn:
        """Wait `seconds`, tell the connected ranks the reason, and end this process, whatever its
        main thread does."""
        time.sleep(seconds)
        self._send(_FAILED, reason)
        if aloud and not self._ending.is_set() and sys.__stderr__ is not None:
            print(f"mtpkit: error: {reason}", file=sys.__stderr__, flush=True)
        os._exit(1)

    def _report(self, reason: str) -> None:
        """Tell the connected ranks that this rank fails."""
        if not self._ending.is_set():
            self._ending.set()
            self._send(_FAILED, f"rank {self.rank} failed: {reason}")

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, RuntimeError):
            self._wait_for_reason()
        self._report(f"{kind.__name__}: {error}")
        self._excepthook(kind, error, trace)

    def leave(self) -> None:
        """Tell the connected ranks that this rank ends in good order; they may continue without
        it."""
        if not self._ending.is_set():
            self._ending.set()
            self._send(_LEFT, "")

    def _send(self, what: str, reason: str) -> None:
        for connection in self._peers.values():
            with suppress(OSError):
                connection.send((what, reason[:_LONGEST]))


def _notice_lost_hosts(connection: Connection) -> None:
    """Have the system probe the other end of an idle connection each second, and give up after five
    probes."""
    # Options belong to the connection, which both descriptors stand for.
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, option):  # not on every system
                shared.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
