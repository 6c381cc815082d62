"""The error boundary: turns an exception into one line on stderr and an exit code."""

import atexit
import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import typer

from mtpkit.cli.command import SHORT_NAMES
from mtpkit.errors import MtpkitError, on_failure

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
REPORTED = "reported by mtpkit"
"""Key in a process's error file for torchrun, where the reason has been printed; see
`mtpkit.cli.torchrun`."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable in which torchrun names a process's error file: ATTEMPT/RANK/error.json."""
_LONGEST = 380
"""Most characters of an error, not counting `mtpkit: error: `. `mtpkit.errors.listed` has already
cut long lists."""
_NO_PATHS = (errno.ELOOP, errno.ENAMETOOLONG)
"""System errors for a path that cannot exist: a loop of symbolic links, or a name that is too
long."""

# Looking for plugins of pydantic reads the metadata of every installed package, which takes a third
# of a command's `--help`.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Importing megatron-core warns about every optional package and device that it misses. The warnings
# are silenced here, not in `run`, because commands import megatron-core before they run.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def run(command: typer.Typer | Callable[[], object], args: Sequence[str] | None = None) -> NoReturn:
    """Run a command or a function of no arguments, and exit.

    Exit codes: 0; 2 for a wrong command line or other wrong input (`UserError`); 1 for any other
    failure; 130 when interrupted. A failure is reported as one line; `MTPKIT_TRACEBACK=1` adds its
    traceback. An exception that is neither `MtpkitError` nor `OSError` is a bug and keeps its
    traceback.

    Args:
        args: the command line of a typer command, by default that of the process.
    """
    code = 0
    if int(os.environ.get("RANK", 0)):
        _leave_warnings_to_the_first_rank()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # as stderr does: model output may not fit the encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if isinstance(command, typer.Typer):
            # Not standalone, so that usage errors reach the handlers below. Returns a
            # `typer.Exit`'s code, or None.
            code = typer.main.get_command(command)(args, standalone_mode=False) or 0
        else:
            command()
    except MtpkitError as error:
        _fail(_as_typed(str(error), args), error.exit_code)
    except typer.TyperException as error:
        # pydantic's prefix
        message = getattr(error, "format_message", error.__str__)().replace("Value error, ", "")
        if not message:  # a group without a command has already printed its help
            sys.exit(USAGE_EXIT_CODE)
        _fail(f"{_as_typed(message, args)} (see --help)", USAGE_EXIT_CODE)
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT_CODE  # the code that typer uses
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from failing once more when it
        # flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _fail(_describe(error), USAGE_EXIT_CODE if error.errno in _NO_PATHS else 1)
    if code == INTERRUPTED_EXIT_CODE and _speaks_for_all("interrupted"):
        print("mtpkit: interrupted", file=sys.stderr)
    if code == 0 and "mtpkit.platform" in sys.modules:
        from mtpkit.platform import close_distributed

        atexit.register(close_distributed)  # runs after the command's objects are freed
    sys.exit(code)


def _as_typed(message: str, args: Sequence[str] | None) -> str:
    """Name options in a message by the short names that the command line uses."""
    typed = {arg.partition("=")[0] for arg in (sys.argv[1:] if args is None else args)}
    for short in SHORT_NAMES.keys() & typed:
        message = re.sub(rf"(?:{'|'.join(SHORT_NAMES[short])})(?![\w-])", short, message)
    return message


def _fail(message: str, exit_code: int) -> NoReturn:
    if os.environ.get("MTPKIT_TRACEBACK") == "1":
        traceback.print_exc()
    line = " ".join(message.split())
    if len(line) > _LONGEST:  # keep both ends: the problem comes first, the remedy last
        line = f"{line[: 2 * _LONGEST // 3]} ... {line[-_LONGEST // 4 :]}"
    if _speaks_for_all(line):
        print("mtpkit: error:", line, file=sys.stderr)
    _tell_torchrun(line)
    for call in on_failure:
        call(line)
    sys.exit(exit_code)


def _leave_warnings_to_the_first_rank() -> None:
    """Show no warnings; all ranks would show the same."""
    logging.disable(logging.WARNING)
    warnings.showwarning = lambda *_args, **_named: None


def _speaks_for_all(line: str) -> bool:
    """Whether this process prints a line: of the processes of one torchrun with the same line, the
    first one does."""
    if not (file := os.environ.get(_ERROR_FILE)):
        return True
    said = (
        Path(file).parent.parent
        / f"mtpkit-{hashlib.blake2b(line.encode(), digest_size=8).hexdigest()}"
    )
    try:
        said.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # better twice than never
        return True
    return True


def _tell_torchrun(line: str) -> None:
    """Hand the line to torchrun in the form of its own error files, for its report."""
    if not (file := os.environ.get(_ERROR_FILE)):
        return
    details = {"py_callstack": line, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(file).write_text(
            json.dumps({"message": {"message": line, "extraInfo": details}, REPORTED: True})
        )


def _describe(error: OSError) -> str:
    """Describe a system error: the file, the system's message and, for a full disk, the remedy."""
    text = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        text = f"{error.filename}: {text}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; free some space and run again"
    return text
