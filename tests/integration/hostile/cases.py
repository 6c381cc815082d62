"""Hostile files, the commands that read them, and the required outcome."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Expect = Literal["refused", "accepted", "either"]
"""`refused`: exit code 2 and one line. `accepted`: the file still means something valid, exit code
0. `either`: one of the two, for libraries' own formats and for values about which reasonable
programs differ; never anything else."""

LONGEST_LINE = 400
"""Characters of an error."""
LONGEST_RUN = 30.0
"""Seconds that a command may take over a damaged file."""


@dataclass(frozen=True)
class Mutation:
    """One damage to the files of a case; `apply` gets the directory that the command runs in."""

    name: str
    apply: Callable[[Path], object]
    expect: Expect = "refused"
    names: tuple[str, ...] = ()
    """Texts of which the error must have one: the key that is damaged; the kind adds its file and
    directory."""
    more: tuple[str, ...] = ()
    """Arguments that are added to the command's."""


def untouched(_: Path) -> None:
    """No damage: the control."""


CONTROL = Mutation("as it is", untouched, "accepted")


@dataclass(frozen=True)
class Kind:
    """Files of one kind: where one lies among valid files, how it is damaged, and which commands
    read it."""

    name: str
    file: str
    """Relative path of the file that is damaged."""
    needs: tuple[str, ...]
    """Files and directories that are copied for each case, from those of `world`."""
    commands: dict[str, str]
    """Arguments of `mtpkit`, by a short name. The first one reads every mutation, each of the
    others its share."""
    mutations: Callable[[Path], Iterator[Mutation]]
    """From the directory with the valid files."""
    makes: tuple[str, ...] = ()
    """What the commands write when they succeed."""
    ignores: tuple[str, ...] = ()
    """Commands, of those above, that need not look at the file: whatever is in it, they may
    succeed."""
    control: bool = True
    """There is a valid file of this kind."""
    names: tuple[str, ...] = ()
    """Texts, beside the file's name and its directory's, of which an error must have one."""
    relocated: bool = False
    """The file holds the absolute path of the directory that it lies in."""

    def cases(self, world: Path) -> Iterator["Case"]:
        """The control by every command, then each mutation by the first command and by one of the
        others in turn."""
        first, *others = self.commands
        if self.control:
            yield from (Case(self, CONTROL, command) for command in self.commands)
        for number, mutation in enumerate(self.mutations(world)):
            yield Case(self, mutation, first)
            if others:
                yield Case(self, mutation, others[number % len(others)])


@dataclass(frozen=True)
class Case:
    """One damaged file and one command."""

    kind: Kind
    mutation: Mutation
    command: str

    @property
    def name(self) -> str:
        return f"{self.kind.name}/{self.mutation.name}/{self.command}"

    @property
    def arguments(self) -> list[str]:
        return [*shlex.split(self.kind.commands[self.command]), *self.mutation.more]

    @property
    def expect(self) -> Expect:
        """Required outcome; a command that need not read the file may also succeed."""
        if self.command in self.kind.ignores and self.mutation.expect == "refused":
            return "either"
        return self.mutation.expect

    def names(self) -> tuple[str, ...]:
        """Texts of which an error must have one."""
        path = Path(self.kind.file)
        return (*self.mutation.names, *self.kind.names, path.name, path.stem, *path.parts[:-1])


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command."""

    code: int | None
    """Exit code; None: the process died, or was stopped."""
    stderr: str = ""
    seconds: float = 0.0
    changed: tuple[str, ...] = ()
    """Paths that came, went or changed."""
    died: str = ""
    """How the process ended, where it did."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of an outcome; it is as required if `problems` is empty."""

    name: str
    arguments: str
    problems: tuple[str, ...] = ()
    stderr: str = ""

    def __str__(self) -> str:
        said = self.stderr.strip().splitlines() or ["(no message)"]
        shown = said if len(said) < 3 else [said[0], said[-1]]
        problems = "; ".join(self.problems)
        return (
            f"{self.name}: {problems}\n    mtpkit {self.arguments}\n    python -m"
            f" tests.integration.hostile {shlex.quote(self.name)}\n"
            + "\n".join(f"    | {line[:300]}" for line in shown)
        )


def judge(case: Case, outcome: Outcome) -> Verdict:
    """Hold an outcome against what is owed."""
    return Verdict(
        case.name, shlex.join(case.arguments), tuple(_problems(case, outcome)), outcome.stderr
    )


def _problems(case: Case, outcome: Outcome) -> Iterator[str]:
    if outcome.died:
        yield outcome.died
        return
    if outcome.seconds > LONGEST_RUN:
        yield f"took {outcome.seconds:.0f} s"
    if "Traceback (most recent call last)" in outcome.stderr:
        yield f"a traceback, exit code {outcome.code}"
        return
    if case.expect != "accepted" and outcome.code == 1 and _refused_one_by_one(outcome.stderr):
        return
    allowed = {"refused": (2,), "accepted": (0,), "either": (0, 2)}[case.expect]
    if outcome.code not in allowed:
        yield f"exit code {outcome.code}, where {' or '.join(map(str, allowed))} is right"
    if outcome.code == 0:
        made = [path for path in outcome.changed if path.split("/")[0] not in case.kind.makes]
        if made or any(".writing" in path for path in outcome.changed):
            yield f"wrote {', '.join(made[:5])}"
        return
    if outcome.changed:
        yield f"left behind {', '.join(outcome.changed[:5])}"
    lines = _lines(outcome.stderr)
    errors = [line for line in lines if line.startswith("mtpkit: error: ")]
    if len(errors) != 1:
        yield f"{len(errors)} lines of error"
        return
    if len(lines) > 1:
        yield f"{len(lines)} lines on stderr"
    if len(errors[0]) >= LONGEST_LINE:
        yield f"an error of {len(errors[0])} characters"
    if not any(name in errors[0] for name in case.names()):
        yield "names neither the file nor the key"


def _lines(stderr: str) -> list[str]:
    """Lines of a run, without the warning that its texts are not conversations: most models here
    have a chat template."""
    warning = "raw text, but the tokenizer has a chat template"
    return [line for line in stderr.splitlines() if warning not in line]


def _refused_one_by_one(stderr: str) -> bool:
    """Whether `generate` named every prompt that it could not serve, on a line each, and then their
    number."""
    *named, last = [line for line in _lines(stderr.strip()) if not line.startswith("finish reason")]
    found = re.fullmatch(
        r"mtpkit: error: (\d+) of \d+ prompts ended with an error, named above", last
    )
    places = [line for line in named if re.match(r"prompts1\.\w+:\d+\b", line)]
    return found is not None and len(named) == len(places) == int(found[1])
