"""The log of a run: OUTPUT/train.log keeps what a run says, each line with date and time."""

import contextlib
import logging
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import TextIO

from mtpkit.files import storage_errors

LOG = "train.log"
"""File of a run that holds its header and all messages, warnings and errors, also those of earlier
parts."""


def keep(directory: Path, text: str) -> None:
    """Append the lines of a text to a run's log.

    Raises:
        StorageError: the file cannot be written.
    """
    path = directory / LOG
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = "".join(f"{now}  {line}\n" for line in text.splitlines())
    with storage_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(lines)


class Warnings(logging.Handler):
    """A context that also keeps warnings, of the modules `logging` and `warnings`, in a run's log.

    Warnings are shown as they would be without it. Those from before `keep_in` are held back until
    then.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._directory: Path | None = None
        self._held: list[str] = []

    def __enter__(self) -> "Warnings":
        self._alone = not logging.root.handlers
        self._show = warnings.showwarning
        logging.root.addHandler(self)
        warnings.showwarning = self._showwarning
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        warnings.showwarning = self._show
        logging.root.removeHandler(self)

    def keep_in(self, directory: Path) -> None:
        """Keep warnings in this run's log from now on, and those that were held back."""
        self._directory = directory
        for text in self._held:
            keep(directory, text)
        self._held.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; show it as well if no other handler does, as Python would without this
        one."""
        if self._alone and logging.lastResort is not None:
            logging.lastResort.handle(record)
        self._keep(f"{record.levelname.lower()}: {record.getMessage()}")

    def _showwarning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._show(message, category, filename, lineno, file, line)
        self._keep(f"warning: {message}")

    def _keep(self, text: str) -> None:
        if self._directory is None:
            self._held.append(text)
            return
        with contextlib.suppress(OSError):  # a warning never ends a run
            keep(self._directory, text)
