"""Damaged files of every kind, thrown at the commands that read them.

What is owed: exit code 2 with one line on stderr that names the file or the key, shorter than 400
characters, within 30 seconds and with nothing left behind; or exit code 0, where a rule (not the
result) says that the file still means something valid. Exit code 1 and a traceback are faults. See
`hostile/`, and `python -m tests.integration.hostile` for one case by its name. `MTPKIT_HOSTILE=all`
runs all cases, which takes some ten minutes on a core; otherwise a part of each kind, in which
every class of damage is.
"""

import ast
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hostile.cases import CONTROL, Case, Kind, Mutation, Verdict, judge
from tests.integration.hostile.kinds import KINDS, READERS, chosen
from tests.integration.hostile.runner import Runner, build_world, load_imported, run_cases
from tests.shared import made_once

ROOT = Path(__file__).parents[2]
ALL = os.environ.get("MTPKIT_HOSTILE") == "all"
LEAST = 500
"""Damaged files in all."""


def run_kind(name: str, world: Path, work: Path) -> list[Verdict]:
    """All verdicts on the chosen cases of a kind; in the process of a `Runner`."""
    kind = next(kind for kind in KINDS if kind.name == name)
    return [
        judge(case, outcome) for case, outcome in run_cases(chosen(kind, world, ALL), world, work)
    ]


def count_cases(world: Path) -> dict[str, int]:
    """Chosen cases of each kind, controls left out."""
    return {
        kind.name: sum(case.mutation is not CONTROL for case in chosen(kind, world, ALL))
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Path:
    folder = made_once(
        tmp_path_factory, "hostile-world", lambda folder: runner.ask(build_world, folder)
    )
    runner.ask(load_imported, folder)
    return folder


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_damaged_files_are_refused_in_one_line(
    kind: str, runner: Runner, world: Path, tmp_path: Path
) -> None:
    verdicts = runner.ask(run_kind, kind, world, tmp_path / "work")
    red = [str(verdict) for verdict in verdicts if verdict.problems]
    assert not red, f"{len(red)} of {len(verdicts)} cases\n" + "\n".join(red[:20])


def test_there_are_many_cases_of_every_kind(runner: Runner, world: Path) -> None:
    counts = runner.ask(count_cases, world)
    assert sum(counts.values()) >= LEAST and min(counts.values()) >= 5, counts


# --- the table is complete ---

CALLS = {
    "open",
    "read_text",
    "read_bytes",
    "read_json",
    "from_json",
    "parse_json",
    "loads",
    "safe_open",
    "load_dataset",
    "load_from_disk",
    "from_pretrained",
    "read_metadata",
    "FileSystemReader",
    "safe_load",
}
"""Functions and methods that read what a user may have given."""
QUALIFIED = {
    ("json", "load"),
    ("torch", "load"),
    ("OmegaConf", "load"),
    ("dist_checkpointing", "load"),
    ("pickle", "load"),
    ("stdin", "read"),
}


def readers() -> set[str]:
    """Modules that call any of these."""
    found = set()
    for path in sorted((ROOT / "mtpkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Name) and function.id in CALLS:
                found.add(str(path.relative_to(ROOT / "mtpkit")))
            if isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                owner = getattr(function.value, "attr", owner)
                if function.attr in CALLS or (owner, function.attr) in QUALIFIED:
                    found.add(str(path.relative_to(ROOT / "mtpkit")))
    return found


def test_every_module_that_reads_files_is_in_the_table() -> None:
    names = {kind.name for kind in KINDS}
    assert {kind for kinds in READERS.values() for kind in kinds} <= names
    assert readers() == set(READERS), (
        "a module reads files: name the kinds in hostile/kinds.py that it reads"
    )


# --- the harness sees faults ---


def fine(arguments: list[str]) -> None:
    print("mtpkit: error: model.txt is damaged", file=sys.stderr)
    sys.exit(2)


def raises(arguments: list[str]) -> None:
    raise KeyError("a bug")


def raises_and_exits(arguments: list[str]) -> None:
    import traceback

    try:
        raise KeyError("a bug")
    except KeyError:
        traceback.print_exc()
        fine(arguments)


def leaves_a_file(arguments: list[str]) -> None:
    Path(".out.writing-1").write_text("")
    fine(arguments)


def changes_the_input(arguments: list[str]) -> None:
    Path("model.txt").write_text("other")
    fine(arguments)


def accepts(arguments: list[str]) -> None:
    sys.exit(0)


def fails_with_1(arguments: list[str]) -> None:
    print("mtpkit: error: model.txt is damaged", file=sys.stderr)
    sys.exit(1)


def says_too_much(arguments: list[str]) -> None:
    print("mtpkit: error: model.txt" + " is damaged" * 60, file=sys.stderr)
    sys.exit(2)


def says_two_lines(arguments: list[str]) -> None:
    print("warning: something", file=sys.stderr)
    fine(arguments)


def says_nothing(arguments: list[str]) -> None:
    sys.exit(2)


def names_nothing(arguments: list[str]) -> None:
    print("mtpkit: error: something is damaged", file=sys.stderr)
    sys.exit(2)


def crashes(arguments: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def aborts(arguments: list[str]) -> None:
    os._exit(2)


def hangs(arguments: list[str]) -> None:
    time.sleep(60)


FAULTS = {
    raises: "a traceback, exit code 1",
    raises_and_exits: "a traceback, exit code 2",
    leaves_a_file: "left behind .out.writing-1",
    changes_the_input: "left behind model.txt",
    accepts: "exit code 0, where 2 is right",
    fails_with_1: "exit code 1, where 2 is right",
    says_too_much: "an error of 6",
    says_two_lines: "2 lines on stderr",
    says_nothing: "0 lines of error",
    names_nothing: "names neither the file nor the key",
    crashes: "the process ended with SIGSEGV",
    aborts: "the process ended with code 2",
    hangs: "no end after 1 s",
}
DAMAGED = Mutation("damaged", lambda root: (root / "model.txt").write_text("damaged"))
FAKE = Kind("fake", "model.txt", ("model.txt",), {"read": "read model.txt"}, lambda _: iter(()))


def judge_faults(world: Path, work: Path) -> dict[str, list[Verdict]]:
    """Verdicts on each faulty command between two right ones: a fork that dies takes none along."""
    found = {}
    for fault in FAULTS:
        order = {"first": fine, "second": fault, "third": fine}
        cases = [
            Case(Kind(**{**vars(FAKE), "commands": {name: name}}), DAMAGED, name) for name in order
        ]
        outcomes = run_cases(
            cases,
            world,
            work,
            lambda arguments, order=order: order[arguments[0]](arguments),
            longest=1,
        )
        found[fault.__name__] = [judge(case, outcome) for case, outcome in outcomes]
    return found


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> dict[str, list[Verdict]]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.txt").write_text("fine")
    return runner.ask(judge_faults, folder, folder.with_name("faults-work"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_harness_sees_a_command_that(fault, faults: dict[str, list[Verdict]]) -> None:
    before, verdict, after = faults[fault.__name__]
    assert any(FAULTS[fault] in problem for problem in verdict.problems), verdict
    assert not before.problems and not after.problems, (before, after)
    assert "python -m tests.integration.hostile fake/damaged/second" in str(verdict)


def test_a_valid_file_must_be_accepted(tmp_path: Path) -> None:
    """The other direction: a command that refuses everything is red, too."""
    from tests.integration.hostile.cases import Outcome

    case = Case(FAKE, CONTROL, "read")
    assert judge(case, Outcome(2, "mtpkit: error: model.txt is damaged\n")).problems
    assert not judge(case, Outcome(0)).problems
    assert judge(case, Outcome(0, changed=("model.txt",))).problems
