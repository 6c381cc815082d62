"""Runs cases in forked processes: what kills or hangs a process is a fault of the case that it was
at.

`Runner` starts one process that imports what commands need and then does nothing but fork, so that
no thread is running when it does. Each fork runs one case after the other and reports each over a
pipe.
"""

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import resource
import select
import shutil
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.integration.hostile.cases import LONGEST_RUN, Case, Outcome
from tests.shared import look_at_new_objects

MEMORY = 4 * 2**30
"""Bytes that a command may take beyond what the process has when it starts."""
LARGEST_FILE = 2**28
IMPORTED = "imported.txt"
"""File beside the valid ones: names of the modules that making them took."""

Command = Callable[[list[str]], object]
"""Runs a command line in this process; ends with SystemExit, as `mtpkit.cli.run` does."""


def run_mtpkit(arguments: list[str]) -> None:
    """The command line itself."""
    from mtpkit.cli import run
    from mtpkit.cli.main import app

    run(app, arguments)


def run_cases(
    cases: Sequence[Case],
    world: Path,
    work: Path,
    command: Command = run_mtpkit,
    longest: float = LONGEST_RUN,
) -> Iterator[tuple[Case, Outcome]]:
    """Fork this process as often as it takes to run all cases."""
    done = 0
    while done < len(cases):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _work(cases[done:], world, work, command, writer)
        os.close(writer)
        for outcome in _outcomes(reader, child, longest, len(cases) - done):
            yield cases[done], outcome
            done += 1
        os.close(reader)
        shutil.rmtree(work, ignore_errors=True)


def _outcomes(reader: int, child: int, longest: float, count: int) -> Iterator[Outcome]:
    """Yield the outcomes that a fork reports; the last is its end, if it ended early."""
    held = b""
    received = 0
    while received < count:
        ready, _, _ = select.select([reader], [], [], longest + 1)
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            yield Outcome(None, died=f"no end after {longest:.0f} s")
            return
        part = os.read(reader, 2**16)
        if not part:
            break
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            values = json.loads(line)
            yield Outcome(**values | {"changed": tuple(values["changed"])})
            received += 1
    _, status = os.waitpid(child, 0)
    if received < count:
        how = (
            signal.Signals(os.WTERMSIG(status)).name
            if os.WIFSIGNALED(status)
            else f"code {os.WEXITSTATUS(status)}"
        )
        yield Outcome(None, died=f"the process ended with {how}")


def _work(cases: Iterable[Case], world: Path, work: Path, command: Command, writer: int) -> None:
    """The life of a fork."""
    code = 1
    try:
        _limit()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for case in cases:
            outcome = run_case(case, world, work, command)
            os.write(writer, json.dumps(vars(outcome)).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without the ends of threads and of the parent's objects


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()


def run_case(case: Case, world: Path, work: Path, command: Command) -> Outcome:
    """Copy what the command needs, damage it, run the command there, and look at what it left."""
    prepare(case, world, work)
    before = snapshot(work)
    said = work.with_name(f"{work.name}.stderr")
    began = time.monotonic()
    with _inside(work), _captured(said):
        code = _exit_code(command, case.arguments)
    seconds = time.monotonic() - began
    after = snapshot(work)
    changed = sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )
    shutil.rmtree(work)
    text = said.read_text(encoding="utf-8", errors="replace")
    return Outcome(code, text, seconds, tuple(changed))


def prepare(case: Case, world: Path, work: Path) -> None:
    """The files of a case in a new directory `work`."""
    work.mkdir(parents=True)
    for name in case.kind.needs:
        source = world / name
        target = work / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
    case.mutation.apply(work)
    damaged = work / case.kind.file
    if case.kind.relocated and damaged.is_file() and not damaged.is_symlink():
        damaged.write_bytes(
            damaged.read_bytes().replace(bytes(world.resolve()), bytes(work.resolve()))
        )


def _exit_code(command: Command, arguments: list[str]) -> int:
    try:
        # Which warnings were shown already is forgotten at both ends.
        with warnings.catch_warnings():
            command(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _captured(stderr: Path) -> Iterator[None]:
    """Redirect the output of this process and its libraries to a file, and stdout to nowhere; stdin
    is empty."""
    saved = os.dup(1), os.dup(2)
    streams = sys.stdin, sys.stdout, sys.stderr
    for number, path in ((1, os.devnull), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = io.TextIOWrapper(
        io.BytesIO(Path("stdin").read_bytes() if Path("stdin").is_file() else b"")
    )
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = streams
        for number, kept in zip((1, 2), saved, strict=True):
            os.dup2(kept, number)
            os.close(kept)


def snapshot(root: Path) -> dict[str, str]:
    """Everything below a directory: what it is, and what is in it. Opens nothing but ordinary
    files."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            mode = path.lstat().st_mode
            content = ""
            if stat.S_ISREG(mode):
                content = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            elif stat.S_ISLNK(mode):
                content = os.readlink(path)
            found[str(path.relative_to(root))] = f"{stat.S_IFMT(mode)} {content}"
    return found


class Runner:
    """The process that forks, and what it is asked over a pipe."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=False)
        self._process.start()
        other.close()

    def ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """What a function of some module makes of the arguments, in that process.

        Raises:
            RuntimeError: it raised.
        """
        self._connection.send((function, arguments))
        failed, answer = self._connection.recv()
        if failed:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def _serve(connection: Any) -> None:
    load_commands()
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = False, function(*arguments)
        except BaseException:
            answer = True, traceback.format_exc()
        connection.send(answer)


def build_world(world: Path) -> None:
    """Build the valid files in a fork, which starts threads, once."""
    from tests.integration.hostile.world import build

    child = os.fork()
    if not child:
        code = 1
        try:
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
            build(world)
            (world / IMPORTED).write_text(
                "\n".join(name for name in sys.modules if not name.startswith("__"))
            )
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("the valid files cannot be made, see above")


def load_imported(world: Path) -> None:
    """Import what the commands that built the valid files did at last, which each fork would else
    do anew."""
    for name in (world / IMPORTED).read_text().split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def load_commands() -> None:
    """Import what commands import, which takes seconds, and start no thread."""
    look_at_new_objects()
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning
    )
    import datasets  # noqa: F401
    import torch.utils.tensorboard
    import transformers  # noqa: F401

    import mtpkit.bench.shapes
    import mtpkit.bench.speedup
    import mtpkit.checkpoint.convert
    import mtpkit.checkpoint.verify
    import mtpkit.cli.acceptance
    import mtpkit.cli.bench
    import mtpkit.cli.convert
    import mtpkit.cli.data
    import mtpkit.cli.generate
    import mtpkit.cli.main
    import mtpkit.cli.speedup
    import mtpkit.cli.train
    import mtpkit.engine
    import mtpkit.training.evaluation
    import mtpkit.training.loop  # noqa: F401
