"""Read text and JSON files, with errors that name the file; write files and directories whole or
not at all."""

import glob
import json
import os
import platform
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtpkit.errors import MtpkitError, StorageError, UserError, shown

JsonObject = dict[str, Any]
"""A JSON object, as `parse_json` returns it."""


def require_file(path: Path | str) -> Path:
    """Check that a path is a file that opens without blocking, as a shell's `<(...)` and /dev/stdin
    do; return it.

    Raises:
        UserError: it does not exist, or is a directory, a link to itself, or a pipe that may have
            no writer.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise UserError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} cannot be read: it is a directory, not a file")
    real = Path(os.path.realpath(path))  # does not exist for pipes that a shell opened
    if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and real.exists()):
        raise UserError(f"{path} cannot be read: it is a pipe, not a file")
    return path


def is_there(path: Path | str) -> bool:
    """Whether a path exists, broken links included, so that callers try to read a broken link and
    fail, not skip it."""
    return os.path.lexists(path)


def read_text(path: Path | str) -> str:
    """Read a UTF-8 file, without its byte order mark.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    try:
        return require_file(path).read_text(encoding="utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from error


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON; `where` names file and line for the error.

    Raises:
        UserError: the text is not JSON, is nested too deeply, or has a number with too many digits
            or a repeated key.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        raise UserError(f"{where} cannot be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} cannot be read as JSON: {error}") from error


def _distinct(pairs: list[tuple[str, object]]) -> JsonObject:
    """Make a dict from the entries of a JSON object, unless a key is repeated."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {shown(twice)} is repeated")
    return values


def read_json(path: Path | str) -> JsonObject:
    """Read the JSON object of a UTF-8 file.

    Raises:
        UserError: the file cannot be read, or holds no JSON object.
    """
    values = parse_json(read_text(path), str(path))
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object")
    return values


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a failure of the file system, however deeply torch and megatron-core wrapped it, into a
    `StorageError`."""
    try:
        yield
    except MtpkitError:
        raise
    except BaseException as error:
        from torch.distributed.checkpoint.api import CheckpointException

        from_torch = isinstance(error, CheckpointException)  # not a subclass of Exception
        if not from_torch and not isinstance(error, Exception):
            raise
        causes = list(_causes(error))
        for cause in causes:
            # An error from reading the source while writing the destination; or Ctrl-C, which torch
            # wraps too.
            if isinstance(cause, MtpkitError | KeyboardInterrupt):
                raise cause from error
        failed: BaseException | None = next((c for c in causes if isinstance(c, OSError)), None)
        if failed is None and from_torch:  # torch's writer hides the system's error
            failed = next((c for c in causes if isinstance(c, RuntimeError)), None)
        if failed is None:
            raise
        reason = getattr(failed, "strerror", None) or str(failed).split("\n")[0]
        free = f"{shutil.disk_usage(_existing(path)).free / 2**20:.0f} MiB free there"
        raise StorageError(
            f"{path}: cannot write: {reason} ({free}); nothing was left behind"
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it wraps; errors of ranks come before the exception that
    wraps them."""
    while error is not None:
        # torch's CheckpointException: rank -> (error, trace)
        for wrapped in getattr(error, "failures", {}).values():
            yield from _causes(wrapped[0])
        yield error
        error = error.__cause__ or (error.__context__ if isinstance(error, RuntimeError) else None)


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def refuse_broken_links(path: Path) -> None:
    """Refuse an output path that leads through a symbolic link to nowhere, or to itself.

    Raises:
        UserError: there is such a link, which the message names.
    """
    for part in (path.absolute(), *path.absolute().parents):
        if part.is_symlink() and not part.exists():
            raise UserError(
                f"output {path}: {part} is a symbolic link that leads nowhere; name another output"
            )


def check_writable(path: Path, file: bool = False, replace: bool = True) -> None:
    """Refuse an output directory, or file, that could not be written when the work is done; leave
    nothing behind.

    Args:
        file: the output is a file, in a directory that exists.
        replace: an existing file may be replaced.

    Raises:
        UserError: a file stands where a directory should be, or the other way round; or a link
            leads nowhere.
        StorageError: nothing can be written there.
    """
    refuse_broken_links(path)
    if path.is_dir() if file else path.is_file():
        raise UserError(
            f"output {path} is a {'directory; name a file' if file else 'file; name a directory'}"
        )
    if file and (not path.absolute().parent.is_dir() or (path.exists() and not path.is_file())):
        raise UserError(f"output {path} must be a file in a directory that exists")
    if not replace and path.exists():
        raise UserError(f"output {path} is there already; name another file, or add --force")
    with (
        storage_errors(path),
        tempfile.TemporaryFile(dir=path.absolute().parent if file else _existing(path)),
    ):
        pass


def check_destination(path: Path, force: bool, what: str, marks: Sequence[str]) -> None:
    """Refuse an output directory whose content must not be replaced.

    Args:
        force: the content of the directory may be replaced.
        what: name of the content that the directory may hold, for messages.
        marks: names of files, any one of which shows that the directory holds `what`.

    Raises:
        UserError: `path` is a file or lies below one, holds something else, or holds `what` without
            `force`; or it leads through a link to nowhere.
    """
    refuse_broken_links(path)
    if path.name in ("", ".."):
        raise UserError(f"output {str(path)!r} is not the name of a directory to write; name one")
    if not _existing(path).is_dir():
        raise UserError(f"output {path}: {_existing(path)} is a file; name a directory")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not any((path / mark).exists() for mark in marks):
        raise UserError(f"output {path} holds files other than {what}; name another directory")
    if not force:
        raise UserError(
            f"output {path} holds {what} already; name another directory, or add --force"
        )


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends, and vanishes if
    the block fails.

    If the block fails, parent directories that were created for it vanish too. The content at
    `path`, or where a link at `path` leads, is replaced; `check_destination` refuses to replace
    other content. Temporary directories for `path` that killed processes of this machine left are
    removed.

    Raises:
        StorageError: writing failed, for instance on a full disk; the content at `path` is
            unchanged.
        UserError: `path` is a link that leads nowhere.
    """
    import psutil  # takes a tenth of a command's `--help`, which writes nothing

    refuse_broken_links(path)
    path = path.resolve()
    prefix = f".{path.name}.writing-{platform.node()}-"
    staging = path.parent / f"{prefix}{os.getpid()}"
    missing = [parent for parent in path.parents if not parent.exists()]
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(prefix)}*"):
            owner = left.name.removeprefix(prefix)
            if left == staging or (owner.isdecimal() and not psutil.pid_exists(int(owner))):
                shutil.rmtree(left, ignore_errors=True)
        staging.mkdir()
        try:
            yield staging
            # Before the rename: after a crash of the machine, the name must not stand for empty
            # files.
            fsync_tree(staging)
            replace_directory(staging, path)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            for parent in missing:
                with suppress(OSError):  # somebody else has put something there
                    parent.rmdir()
            raise


def replace_directory(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; a previous directory of that name is deleted only after the new
    one is in place."""
    previous = path.parent / f".{path.name}.replaced-{os.getpid()}"
    # A rename cannot replace a directory that has files.
    if path.exists():
        path.rename(previous)
    staging.rename(path)
    fsync_path(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends, and vanishes if the
    block fails.

    Raises:
        StorageError: writing failed; the file at `path` is unchanged.
    """
    staging = path.with_name(f".{path.name}.writing-{os.getpid()}")
    with storage_errors(path):
        try:
            yield staging
            fsync_path(staging)
            staging.replace(path)
            fsync_path(path.parent)
        finally:
            staging.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Replace a small text file in one step."""
    with staged_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def copy_file(source: Path, path: Path) -> None:
    """Copy a small file over another in one step."""
    with staged_file(path) as staging:
        shutil.copyfile(source, staging)


def fsync_tree(root: Path) -> None:
    """Flush every file below `root`, and `root` itself, to the disk."""
    for path in root.rglob("*"):
        fsync_path(path)
    fsync_path(root)


def fsync_path(path: Path) -> None:
    """Flush one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
