"""Runs inside torchrun's own process: the one line of an mtpkit command stays the only one.

torchrun reports a process that failed with a traceback of its own, some thirty lines that say
nothing of the reason. It loads this module through the entry point `torchrun.handlers`, which is
meant for rendezvous backends. For a command of mtpkit whose processes have reported their error,
the report is left out; torchrun still exits with 1. Other programs, crashes and bugs are reported
as ever.
"""

import logging
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mtpkit.cli.errors import REPORTED

_ITS_LOGGER = "torch.distributed.elastic.multiprocessing"
"""Logger of torchrun that says which process it ends, and how each ended."""
_ENDED_BY_TORCHRUN = (-signal.SIGTERM, -signal.SIGKILL)


def handler() -> object:
    """Prepare torchrun's process if it starts a command of mtpkit; the entry point."""
    if any(map(_is_own, sys.argv[1:])):
        sys.excepthook = _report
        logger: logging.Logger | None = logging.getLogger(_ITS_LOGGER)
        # A logger's records also reach the handlers of its parents.
        while logger is not None:
            for shown in logger.handlers:
                shown.addFilter(lambda record: not record.name.startswith(_ITS_LOGGER))
            logger = logger.parent
    return _refuse


def _is_own(word: str) -> bool:
    """Whether a word of the command line is the command mtpkit, or a script that runs a part of
    it."""
    path = Path(word)
    if path.suffix != ".py":
        return path.name == "mtpkit" or word.startswith("mtpkit.")
    try:
        return "mtpkit.cli" in path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    failures = list(error.failures.values()) if isinstance(error, ChildFailedError) else []
    if not any(map(_is_reported, failures)) or not all(map(_is_explained, failures)):
        sys.__excepthook__(kind, error, trace)


def _is_reported(failure: ProcessFailure) -> bool:
    return bool(failure.error_file_data.get(REPORTED))


def _is_explained(failure: ProcessFailure) -> bool:
    # When one process fails, torchrun ends the others, which then have nothing to report.
    return _is_reported(failure) or failure.exitcode in _ENDED_BY_TORCHRUN


def _refuse(parameters: object) -> NoReturn:
    raise ValueError("mtpkit is no rendezvous backend: leave --rdzv-backend out")
