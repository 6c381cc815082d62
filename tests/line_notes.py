"""A plugin of pytest that notes which tests run the lines that `tests.faults` breaks.

It looks at code of these files alone, so that a run takes little longer. Processes that tests start
note lines too, but not for which test: a line that one of them runs counts for all tests of the
file that start processes.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

VARIABLE = "MTPKIT_LINE_NOTES"
"""Its value: the file of notes, and for each place of a fault its file and line number."""
IN_CHILDREN = "MTPKIT_LINE_NOTES_OF_CHILDREN"
"""The file to which processes that tests start add the places."""

_TOOL = sys.monitoring.COVERAGE_ID
_places: dict[tuple[str, int], list[str]] = defaultdict(list)
_seen: set[str] = set()


def watch() -> Path:
    """Begin to collect places in `_seen`; returns the file of notes."""
    notes, wanted = json.loads(os.environ[VARIABLE])
    for place, (file, number) in wanted.items():
        _places[file, number].append(place)
    files = {file for file, _ in _places}
    monitoring = sys.monitoring

    def started(code: CodeType, offset: int) -> object:
        if code.co_filename in files:
            monitoring.set_local_events(_TOOL, code, monitoring.events.LINE)
        return monitoring.DISABLE

    def at_line(code: CodeType, number: int) -> object:
        places = _places.get((code.co_filename, number))
        if places is None:
            return monitoring.DISABLE
        _seen.update(places)
        return None

    monitoring.use_tool_id(_TOOL, "line notes")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, started)
    monitoring.register_callback(_TOOL, monitoring.events.LINE, at_line)
    monitoring.set_events(_TOOL, monitoring.events.PY_START)
    return Path(notes)


def watch_in_child() -> None:
    """Begin to add places to the file of children, each once; a killed process keeps its notes."""

    class Added(set[str]):
        def update(self, places: list[str]) -> None:
            for place in places:
                if place not in self:
                    self.add(place)
                    with Path(os.environ[IN_CHILDREN]).open("a") as file:
                        file.write(place + "\n")

    global _seen
    _seen = Added()
    watch()


class Notes:
    """Hooks that write one line for each test that passes."""

    def __init__(self, path: Path, of_children: Path) -> None:
        self._path = path
        self._of_children = of_children
        self._fast: set[str] = set()
        self._starting: set[str] = set()
        self._module: object = None
        self._entries: list[dict] = []
        """Of the tests of this module, so far."""
        self._seconds = 0.0
        self._passed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from tests import tiers

        self._fast = {item.nodeid for item in tiers.fast(items)}
        self._starting = {item.nodeid for item in items if tiers.starts_processes(item)}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if item.module is not self._module:
            self._write()
            self._module = item.module
        _seen.clear()
        self._seconds = 0.0
        self._passed = False
        outcome = yield
        if self._passed:
            self._entries.append(
                {
                    "test": item.nodeid,
                    "fast": item.nodeid in self._fast,
                    "seconds": round(self._seconds, 3),
                    "runs": sorted(_seen),
                }
            )
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.when == "call":
            self._passed = report.passed

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        """Write the notes of a module, when its processes have added theirs."""
        in_children = self._of_children.read_text().splitlines()
        self._of_children.write_text("")
        with self._path.open("a") as file:
            for entry in self._entries:
                if entry["test"] in self._starting:
                    entry["runs"] = sorted({*entry["runs"], *in_children})
                if entry["runs"]:
                    file.write(json.dumps(entry) + "\n")
        self._entries.clear()


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "sitecustomize.py").write_text(
        "from tests.line_notes import watch_in_child\n\nwatch_in_child()\n"
    )
    of_children = folder / "places"
    of_children.touch()
    os.environ[IN_CHILDREN] = str(of_children)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    path = watch()
    path.parent.mkdir(parents=True, exist_ok=True)
    config.pluginmanager.register(Notes(path, of_children))
