"""The faults fit the package, and the tool that counts them sees what it should."""

import shutil
from pathlib import Path

import pytest

from tests import faults
from tests.faults import Fault

SOURCE = "def least(a, b):\n    if a < b:\n        return a\n    return b\n"
TESTS = """from package import least


def test_equal():
    assert least(1, 1) == 1


def test_less():
    assert least(1, 2) == 1


def test_nothing():
    pass
"""
REVERSED = Fault("package.py", "if a < b:", "if a > b:")
EQUIVALENT = Fault("package.py", "if a < b:", "if a <= b:")


def test_each_fault_changes_one_line():
    found = faults.read_faults()
    assert len({fault.name for fault in found}) == len(found) >= 100
    for fault in found:
        broken = fault.broken(faults.ROOT)
        compile(broken, fault.file, "exec")
        before = (faults.ROOT / fault.file).read_text().splitlines()
        changed = [
            line for line in zip(before, broken.splitlines(), strict=True) if len({*line}) > 1
        ]
        assert len(changed) == 1, fault.name


def test_faults_are_in_all_rooms():
    rooms = {fault.room for fault in faults.read_faults()}
    engine = {f"engine/{path.parent.name}" for path in Path("mtpkit/engine").glob("*/__init__.py")}
    assert rooms >= engine | {"engine", "kernels", "model", "training", "data", "checkpoint"}
    assert rooms >= {"config", "cli"}


def test_a_line_that_is_gone_or_twice_there_is_named(tmp_path):
    (tmp_path / "package.py").write_text(SOURCE + SOURCE)
    with pytest.raises(ValueError, match=r"package.py has 2 lines 'if a < b:', not one"):
        REVERSED.broken(tmp_path)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A package of one file with tests, and notes and results of it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "package.py").write_text(SOURCE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts=--import-mode=importlib\npythonpath=.\n"
    )
    (tmp_path / "tests" / "test_package.py").write_text(TESTS)
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    monkeypatch.setattr(faults, "NOTES", tmp_path / "outputs" / "notes")
    monkeypatch.setattr(faults, "RESULTS", tmp_path / "outputs" / "results")
    monkeypatch.setattr(faults, "_tracked", lambda: ["package.py", "tests/test_package.py"])
    return tmp_path


def note(test: str, seconds: float, fast: bool = True, others: int = 0) -> None:
    runs = [REVERSED.place] + [""] * others
    entry = {"test": test, "seconds": seconds, "fast": fast, "runs": runs}
    faults.add_line(faults.NOTES, entry)


def outcomes() -> list[tuple[str, str, str]]:
    found = faults.read_lines(faults.RESULTS)
    return [(one["fault"], one["outcome"], one["test"]) for one in found]


def test_faults_are_caught_or_survive(tree):
    """What was done is not done again; the copy alone is broken, and whole for the next fault."""
    note("tests/test_package.py::test_less", 0.1)
    note("tests/test_package.py::test_equal", 0.2, fast=False)
    elsewhere = Fault("package.py", "return b", "return a")
    for _ in range(2):
        faults.measure([REVERSED, EQUIVALENT, elsewhere], "fast")
    faults.measure([REVERSED, EQUIVALENT], "all")
    assert outcomes() == [
        (REVERSED.name, "caught", "tests/test_package.py::test_less"),
        (EQUIVALENT.name, "survived", ""),
        (elsewhere.name, "unreached", ""),
        (REVERSED.name, "caught", "the fast tier"),
        (EQUIVALENT.name, "survived", ""),
    ]
    assert (tree / "package.py").read_text() == SOURCE


def test_the_quickest_tests_fill_the_time(tree):
    for test, seconds in (("slow", 40), ("quick", 5), ("middle", 30), ("slower", 50)):
        note(test, seconds, others=test == "quick")
    note("of the full tier", 1, fast=False)
    assert faults.choose_tests(REVERSED, "fast") == ["middle", "quick"]
    assert faults.choose_tests(REVERSED, "all") == ["of the full tier"]


PROCESS = """import subprocess
import sys


def test_process():
    subprocess.run([sys.executable, "-c", "import package; package.least(1, 2)"], check=True)


def test_fails():
    from package import least

    assert least(1, 2) == 2
"""


def test_tests_that_run_a_line_are_noted(tree):
    for name in ("line_notes.py", "slow.txt", "tiers.py"):
        shutil.copy(Path(__file__).with_name(name), tree / "tests")
    (tree / "tests" / "test_process.py").write_text(PROCESS)
    option = "def pytest_addoption(parser):\n    parser.addoption('--tier')\n"
    (tree / "tests" / "conftest.py").write_text(option)
    places = [Fault("package.py", line, "") for line in ("if a < b:", "return a", "return b")]
    faults.record(places, "all")
    noted = [entry for entry in faults.read_lines(faults.NOTES) if "test" in entry]
    condition, smaller, other = [place.place for place in places]
    assert {Path(entry["test"]).name: (entry["runs"], entry["fast"]) for entry in noted} == {
        "test_package.py::test_equal": ([condition, other], True),
        "test_package.py::test_less": ([condition, smaller], True),
        "test_process.py::test_process": ([condition, smaller], False),
    }
    size = faults.NOTES.stat().st_size
    faults.record(places, "all")
    assert faults.NOTES.stat().st_size == size
