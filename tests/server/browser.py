"""A headless Chromium, driven by the DevTools protocol over two pipes, which needs no library."""

import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
"""The browser's program; None: it is not installed."""
_OPTIONS = (
    *("--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-sandbox", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
)
_PATIENCE = 120.0
"""Seconds for which an answer is waited for: the machine may be busy."""


class Browser:
    """A running browser. Use it as a context manager.

    Args:
        profile: directory for what it writes.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._to = _pipe()
        self._from, theirs_out = _pipe()
        # It reads from descriptor 3 and writes to 4. All others of this process end at its start.
        silence = os.open(profile / "log", os.O_WRONLY | os.O_CREAT)
        self._pid = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            os.environ | {"HOME": str(profile)},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, silence, stream) for stream in (1, 2)),
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
            ],
            setpgroup=0,
        )
        for one in (theirs_in, theirs_out, silence):
            os.close(one)
        self._numbers = itertools.count(1)
        self._read = b""

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        # If it ends by itself, it removes its directory below /tmp.
        with suppress(AssertionError, OSError):
            self.call("Browser.close")
            while True:
                self._next()
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str) -> "Page":
        """Open a page in a tab of its own, and wait until it is there."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        page.call("Page.navigate", url=url)
        page.wait_for("location.href != 'about:blank' && document.readyState == 'complete'")
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next message of the browser, an answer or an event."""
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            new = os.read(self._from, 2**16)
            assert new, "the browser has ended"
            self._read += new
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


class Page:
    """A page in a tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = _PATIENCE) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            text = self.evaluate("document.body?.innerText")
            assert time.monotonic() < deadline, f"{expression} is not true of: {text}"
            time.sleep(0.1)

    def text(self, element: str) -> str:
        """The text of an element, by its id."""
        return self.evaluate(f"document.getElementById({element!r}).innerText")


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are neither descriptor 3 nor 4, which it may have to replace."""
    low = os.pipe()
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in low]
    for one in low:
        os.close(one)
    return high[0], high[1]
