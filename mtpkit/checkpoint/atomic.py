"""Directories and files that appear whole or not at all."""

import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from torch.distributed.checkpoint.api import CheckpointException

from mtpkit.errors import MtpkitError, StorageError, UserError


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a failure of the file system, however deeply torch and megatron-core wrapped it, into a `StorageError`."""
    try:
        yield
    except MtpkitError:
        raise
    except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
        causes = list(_causes(error))
        for cause in causes:
            # From reading the source while writing the destination; or Ctrl-C, which torch wraps, too.
            if isinstance(cause, MtpkitError | KeyboardInterrupt):
                raise cause from error
        failed: BaseException | None = next((c for c in causes if isinstance(c, OSError)), None)
        if failed is None and isinstance(error, CheckpointException):  # torch's writer hides the system's error
            failed = next((c for c in causes if isinstance(c, RuntimeError)), None)
        if failed is None:
            raise
        reason = getattr(failed, "strerror", None) or str(failed).split("\n")[0]
        raise StorageError(f"{path}: cannot write: {reason} ({_free(path)}); nothing was left behind") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exceptions that one wraps, innermost ranks first."""
    while error is not None:
        for wrapped in getattr(error, "failures", {}).values():  # torch's CheckpointException: rank -> (error, trace)
            yield from _causes(wrapped[0])
        yield error
        error = error.__cause__ or (error.__context__ if isinstance(error, RuntimeError) else None)


def _free(path: Path) -> str:
    """Free space where `path` would be."""
    return f"{shutil.disk_usage(_existing(path)).free / 2**20:.0f} MiB free there"


def _existing(path: Path) -> Path:
    """`path`, or what there is on the way to it."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def refuse_broken_links(path: Path) -> None:
    """Refuse a path that leads through a symbolic link to nowhere, or to itself: nothing can be written there.

    Raises:
        UserError: names the link.
    """
    for part in (path.absolute(), *path.absolute().parents):
        if part.is_symlink() and not part.exists():
            raise UserError(f"{part} is a symbolic link that leads nowhere; remove it, or name another place")


def check_writable(path: Path, file: bool = False) -> None:
    """Refuse a directory, or a file, that could not be written when the work is done; leaves nothing behind.

    Raises:
        UserError: there is a file where a directory should be, or the other way round; or a link that leads nowhere.
        StorageError: nothing can be written there.
    """
    refuse_broken_links(path)
    if path.is_dir() if file else path.is_file():
        raise UserError(f"{path} is a {'directory; name a file' if file else 'file; name a directory'}")
    with storage_errors(path), tempfile.TemporaryFile(dir=path.absolute().parent if file else _existing(path)):
        pass


def check_destination(path: Path, force: bool) -> None:
    """Refuse to write over what is there.

    Raises:
        UserError: `path` is a file, or a directory with content and not `force`, or not a checkpoint at all; or a link
            that leads nowhere.
    """
    refuse_broken_links(path)
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; name a directory")
    if not any(path.iterdir()):
        return
    if not force:
        raise UserError(f"{path} is not empty; name another directory, or replace it with --force")
    if not any((path / name).exists() for name in ("config.json", "mtpkit.json", "metadata.json", ".metadata")):
        raise UserError(f"{path} does not hold a checkpoint; remove it by hand if it is to be replaced")


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends, and vanishes if the block fails.

    Directories that were missing on the way to it vanish with it. What was at `path`, or where a link at `path` leads,
    is replaced; see `check_destination` for when not to. What processes of this machine left there when they were
    killed is removed.

    Raises:
        StorageError: writing failed, for instance on a full disk; what was at `path` still is.
        UserError: `path` is a link that leads nowhere.
    """
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
            fsync_tree(staging)
            replace_directory(staging, path)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            for parent in missing:
                with suppress(OSError):  # somebody else has put something there
                    parent.rmdir()
            raise


def replace_directory(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; a previous directory of that name is gone only after the new one stands."""
    previous = path.parent / f".{path.name}.replaced-{os.getpid()}"
    if path.exists():
        path.rename(previous)
    staging.rename(path)
    fsync_path(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends, and vanishes if the block fails.

    Raises:
        StorageError: writing failed; what was at `path` still is.
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
