"""Break the package one line at a time and see which tests notice.

    python -m tests.faults --tier fast --record    run a tier; note which tests run the lines
    python -m tests.faults --tier fast             break each line in turn and run those tests
    python -m tests.faults --report                caught and survived, per room and tier

Of the tier `all`, only faults that the fast tier did not catch are tried, with the tests that the
fast tier leaves out.

`--only mtpkit/engine/steps` restricts any of them to faults in these files. Each command goes on
where an earlier one ended. Notes and results are under `outputs/faults`; remove a line there to do
it again.

The faults are in `faults.txt`: a file, a line of it without its indentation, and the line that
replaces it. Lines are known by their text, which must be in the file once.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUTS = ROOT / "outputs" / "faults"
NOTES = OUTPUTS / "lines.jsonl"
RESULTS = OUTPUTS / "results.jsonl"
TIERS = ("fast", "all")
SECONDS = 120
"""Time for one fault and tier."""
PLANNED = 60
"""Seconds that the chosen tests took when they were recorded; beyond it the quickest are chosen."""


@dataclass(frozen=True)
class Fault:
    """One line of a file, and what replaces it."""

    file: str
    line: str
    replacement: str

    @property
    def place(self) -> str:
        return f"{self.file}: {self.line}"

    @property
    def name(self) -> str:
        return f"{self.place} -> {self.replacement}"

    @property
    def room(self) -> str:
        """The part of the package: `engine/steps`, `kernels`."""
        folders = Path(self.file).parts[1:-1]
        return "/".join(folders[:2] if folders[0] == "engine" else folders[:1])

    def number(self, root: Path) -> int:
        """The line's number in the file, from 1.

        Raises:
            ValueError: it is not there, or more than once.
        """
        lines = (root / self.file).read_text().splitlines()
        found = [number for number, line in enumerate(lines, 1) if line.strip() == self.line]
        if len(found) != 1:
            raise ValueError(f"{self.file} has {len(found)} lines {self.line!r}, not one")
        return found[0]

    def broken(self, root: Path) -> str:
        """The file's text with the fault."""
        lines = (root / self.file).read_text().splitlines(keepends=True)
        index = self.number(root) - 1
        lines[index] = lines[index].replace(self.line, self.replacement)
        return "".join(lines)


def read_faults(only: str = "") -> list[Fault]:
    """The faults of `faults.txt`, in order, in files that begin with `only`."""
    faults = []
    file = line = ""
    for text in (ROOT / "tests" / "faults.txt").read_text().splitlines():
        if text.startswith("- "):
            line = text[2:]
        elif text.startswith("+ "):
            faults.append(Fault(file, line, text[2:]))
        elif text:
            file = text
    return [fault for fault in faults if fault.file.startswith(only)]


def read_lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_line(path: Path, entry: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def record(faults: list[Fault], tier: str) -> None:
    """Note for each folder of tests which of a tier run these faults' lines, unless that was
    done."""
    noted: dict[str, set[str]] = defaultdict(set)
    for entry in read_lines(NOTES):
        if entry.get("tier") == tier:
            noted[entry["folder"]] |= set(entry["recorded"])

    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = "/".join(path.relative_to(ROOT).parts[:2])
        # a file beside the folders is one of those of `tests` itself
        files[folder if (ROOT / folder).is_dir() else "tests"].append(str(path.relative_to(ROOT)))

    for folder, own in files.items():
        missing = [fault for fault in faults if fault.place not in noted[folder]]
        if missing:
            print(folder, flush=True)
            wanted = {
                fault.place: (str(ROOT / fault.file), fault.number(ROOT)) for fault in missing
            }
            environment = {**os.environ, "MTPKIT_LINE_NOTES": json.dumps([str(NOTES), wanted])}
            run_tests(["-p", "tests.line_notes", "--tier", tier, *own], ROOT, environment)
            add_line(NOTES, {"folder": folder, "tier": tier, "recorded": list(wanted)})


def run_tests(
    arguments: list[str], root: Path, environment: dict[str, str], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Call pytest in a directory whose package hides that of the environment.

    Raises:
        subprocess.TimeoutExpired: after so many seconds, with its processes ended.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**environment, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # with those that it started, which hold its output open
            raise
    return subprocess.CompletedProcess(command, process.returncode, printed, "")


def choose_tests(fault: Fault, tier: str) -> list[str]:
    """The quickest tests of a tier that ran the line, for `PLANNED` seconds.

    Those that run few of the lines come first: they are about this one. Those of the fast tier are
    not repeated in the full one: a fault that the fast tier catches is caught by both.
    """
    seconds = {}
    lines = {}
    for entry in read_lines(NOTES):
        if fault.place in entry.get("runs", ()) and entry["fast"] == (tier == "fast"):
            seconds[entry["test"]] = entry["seconds"]
            lines[entry["test"]] = len(entry["runs"])

    chosen = []
    left = PLANNED
    for test in sorted(seconds, key=seconds.__getitem__):
        if chosen and seconds[test] > left:
            break
        chosen.append(test)
        left -= seconds[test]
    return sorted(chosen, key=lines.__getitem__)


def measure(faults: list[Fault], tier: str) -> None:
    """Break each line in a copy of the tree and run its tests of a tier, unless that was done."""
    done = {(entry["fault"], entry["tier"]): entry["outcome"] for entry in read_lines(RESULTS)}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in _tracked():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)

        for fault in faults:
            if (fault.name, tier) in done:
                continue
            began = time.monotonic()
            if tier == "all" and done.get((fault.name, "fast")) == "caught":
                outcome, test = "caught", "the fast tier"
            else:
                outcome, test = _try(fault, choose_tests(fault, tier), copy)
            seconds = round(time.monotonic() - began, 1)
            add_line(
                RESULTS,
                {
                    "fault": fault.name,
                    "line": fault.number(copy),
                    "tier": tier,
                    "outcome": outcome,
                    "test": test,
                    "seconds": seconds,
                },
            )
            print(f"{outcome:9} {seconds:6} s  {fault.name}  {test}", flush=True)


def _tracked() -> Iterator[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return (name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


def _try(fault: Fault, tests: list[str], copy: Path) -> tuple[str, str]:
    """The outcome of a fault, and the test that failed first."""
    if not tests:
        return "unreached", ""
    whole = (copy / fault.file).read_text()
    (copy / fault.file).write_text(fault.broken(copy))
    try:
        done = run_tests(["-x", *tests], copy, dict(os.environ), SECONDS)
    except subprocess.TimeoutExpired:
        return "time", ""  # neither: the machine may be slow, or a test hang
    finally:
        (copy / fault.file).write_text(whole)
    if done.returncode == 0:
        return "survived", ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "caught", failed[0].split()[1] if failed else done.stdout[-300:]


def report(faults: list[Fault]) -> None:
    """Print outcomes per room and tier, and the lines that were not caught."""
    outcomes = {(entry["fault"], entry["tier"]): entry["outcome"] for entry in read_lines(RESULTS)}
    rooms = {fault.room: [one for one in faults if one.room == fault.room] for fault in faults}
    total: Counter[tuple[str, str]] = Counter()
    for room, own in rooms.items():
        counted = Counter(
            (tier, outcomes.get((one.name, tier), "-")) for one in own for tier in TIERS
        )
        total += counted
        print(f"{room:20} {len(own):3} faults  {_in_words(counted)}")
    print(f"{'all':20} {len(faults):3} faults  {_in_words(total)}")
    for fault in faults:
        found = [outcomes.get((fault.name, tier), "-") for tier in TIERS]
        if set(found) - {"caught", "-"}:
            print(f"{found[0]}, {found[1]}: {fault.file}:{fault.number(ROOT)}: {fault.replacement}")


def _in_words(counted: Counter[tuple[str, str]]) -> str:
    return "; ".join(
        f"{tier}: " + ", ".join(f"{n} {what}" for (of, what), n in counted.items() if of == tier)
        for tier in TIERS
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tier", choices=TIERS)
    what.add_argument("--report", action="store_true")
    parser.add_argument("--record", action="store_true", help="note the lines, break none")
    parser.add_argument("--only", default="", metavar="PATH", help="faults in mtpkit/config, say")
    arguments = parser.parse_args()
    faults = read_faults(arguments.only)
    if arguments.report:
        report(faults)
    elif arguments.record:
        record(faults, arguments.tier)
    else:
        measure(faults, arguments.tier)


if __name__ == "__main__":
    main()
