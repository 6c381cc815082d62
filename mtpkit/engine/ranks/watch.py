"""Notices when a rank dies, and ends all other ranks.

A rank that waits in an all-reduce cannot notice this by itself. Each rank therefore has a
connection to rank 0, on which a thread listens. The operating system closes the connections of a
process that ends, for whatever reason, and within seconds those to a host that is gone. A busy rank
is never taken for a dead one, since no rank has to answer anything.
"""

import atexit
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
"""Seconds in which a process that connects must say which rank it is."""
SECRET_LENGTH = 16
"""Bytes of the secret by which rank 0 tells connections of ranks from those of other programs."""
_LONGEST = 400
"""Most bytes of a message."""
_LEFT = b"L"
_FAILED = b"F"


def listen() -> socket.socket:
    """Open rank 0's socket, on a free port."""
    return socket.create_server(("", 0), backlog=1024)


class Watch:
    """Watches the other ranks from a thread of its own, until the process ends.

    Args:
        server: the socket of `listen`, on rank 0.
        address: host and port of rank 0's socket, on the other ranks.
        secret: `SECRET_LENGTH` bytes that only the ranks know.

    Raises:
        MtpkitError: not all ranks connect in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        server: socket.socket | None,
        address: tuple[str, int],
        secret: bytes,
    ) -> None:
        self.rank = rank
        self._secret = secret
        self._busy_since: float | None = None
        self._ending, self._gone = threading.Event(), threading.Event()
        self._peers = self._accept(server, size) if server else {0: self._connect(address)}
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._peers.items():
            _notice_lost_hosts(connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)
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
        if not self._ending.is_set():
            time.sleep(_PATIENCE + _GRACE if self._gone.wait(_GRACE) else 0.0)

    def _accept(self, server: socket.socket, size: int) -> dict[int, socket.socket]:
        peers: dict[int, socket.socket] = {}
        end = time.monotonic() + _CONNECTING
        with server:
            while len(peers) < size - 1:
                try:
                    server.settimeout(max(0.01, end - time.monotonic()))
                    connection, _ = server.accept()
                except TimeoutError as error:
                    missing = sorted(set(range(1, size)) - peers.keys())
                    raise MtpkitError(
                        f"ranks {missing} did not connect within {_CONNECTING:.0f} s"
                    ) from error
                rank = self._rank_of(connection)
                if rank is None:
                    connection.close()
                else:
                    peers[rank] = connection
        return peers

    def _rank_of(self, connection: socket.socket) -> int | None:
        """The rank that has connected; None: it is another program, such as a port scan."""
        connection.settimeout(_SAYING_WHO)
        said = b""
        with suppress(OSError):
            while len(said) < SECRET_LENGTH + 4 and (
                more := connection.recv(SECRET_LENGTH + 4 - len(said))
            ):
                said += more
        known = len(said) == SECRET_LENGTH + 4 and said.startswith(self._secret)
        return int.from_bytes(said[SECRET_LENGTH:], "big") if known else None

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        try:
            connection = socket.create_connection(address, timeout=_CONNECTING)
        except OSError as error:
            raise MtpkitError(
                f"rank {self.rank} cannot reach rank 0 at {address[0]}:{address[1]}: {error}"
            ) from error
        connection.sendall(self._secret + self.rank.to_bytes(4, "big"))
        return connection

    def _listen(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                connection = key.fileobj
                peer = key.data
                assert isinstance(connection, socket.socket)
                try:
                    message = connection.recv(_LONGEST)
                except OSError:
                    message = b""
                self._selector.unregister(connection)
                if self._ending.is_set():
                    return
                self._gone.set()
                if message[:1] == _LEFT:
                    self._require_no_work(peer)
                elif message[:1] == _FAILED:
                    self._end_after(
                        message[1:].decode(errors="replace"), _GRACE, aloud=self.rank == 0
                    )
                else:
                    self._end_after(
                        f"rank {peer} has died; its own output may say why", 0.0, aloud=True
                    )

    def _require_no_work(self, peer: int) -> None:
        """End this process once it has needed the rank `peer`, which has left, for too long."""

        def wait() -> None:
            while not self._ending.is_set():
                since = self._busy_since
                if since is not None and time.monotonic() - since > _PATIENCE:
                    self._end_after(
                        f"rank {peer} has ended while rank {self.rank} decodes", 0.0, aloud=True
                    )
                time.sleep(0.2)

        threading.Thread(target=wait, daemon=True).start()

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

    def _send(self, kind: bytes, text: str) -> None:
        for connection in self._peers.values():
            with suppress(OSError):
                connection.sendall((kind + text.encode())[:_LONGEST])


def _notice_lost_hosts(connection: socket.socket) -> None:
    """Have the system probe the other end of an idle connection each second, and give up after five
    probes."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
