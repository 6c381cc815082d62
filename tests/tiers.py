"""Which cases of the tests the two tiers run.

    make test PYTEST_ARGS=--durations=0 > LOG; python -m tests.tiers LOG

finds the slow functions anew and rewrites slow.txt.
"""

import itertools
import multiprocessing
import re
import subprocess
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch.multiprocessing

from tests.shared import few_with_all

STARTERS = (subprocess, multiprocessing, torch.multiprocessing)
"""A test whose code names one of these modules, or leads to code that does, starts processes."""
HANDFUL = (
    "tests/cli/test_boundary.py::test_exit_code_and_line",
    "tests/engine/test_replicas.py::test_tokens_are_those_of_one_engine",
    "tests/engine/test_stages.py::test_two_ranks_decode_what_one_does",
    "tests/model/test_parallel.py::test_tensor_parallel",
    "tests/server/test_client.py::test_several_prompts_have_one_choice_each",
    "tests/training/test_kill.py::test_a_killed_run_goes_on_bit_for_bit",
    "tests/training/test_run.py::test_two_ranks_train_to_the_losses_of_one",
)
"""Functions of the fast tier that start processes, of which each costs seconds: one for each way
that the package has of being several processes."""


_SLOW = Path(__file__).with_name("slow.txt")
SLOW = frozenset(_SLOW.read_text().split())
"""Functions of which each case takes `SECONDS` or more. The fast tier runs their first case."""
SECONDS = 0.3


def function_name(item: pytest.Item) -> str:
    """The id of a case without its parameters."""
    return item.nodeid.partition("[")[0]


def fast(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The first and the last case of each function, of slow ones the first alone, without functions
    that start processes.

    Between these two every parameter of a full product has two values. Cases that need a GPU do not
    count, since they are skipped, nor do those of a reference twin beside cases of its kernel: the
    engine's tests run the twins.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("gpu"):
            functions[function_name(item)].append(item)

    chosen = []
    for name, cases in functions.items():
        cases = [case for case in cases if not _of_twin(case)] or cases
        if name in HANDFUL or not starts_processes(cases[0]):
            chosen.append(cases[0])
            if len(cases) > 1 and name not in SLOW:
                chosen.append(cases[-1])
    return chosen


def _of_twin(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("twin") == "reference"


def thinned(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Few cases of each function of the kernels' tests: every two values of different parameters
    that were together in a case, the twin among them, are together in one that remains.

    A full product of four parameters takes five times as long, and kernels break at a value or at
    two of them. Cases that need a GPU remain: there a product costs little.
    """
    functions: dict[str, dict[str, set]] = defaultdict(dict)
    for item in items:
        parametrized = hasattr(item, "callspec") and not item.get_closest_marker("gpu")
        if parametrized and item.nodeid.startswith("tests/kernels/"):
            values = sorted((name, repr(value)) for name, value in item.callspec.params.items())
            pairs = set(itertools.combinations(values, 2))
            functions[function_name(item)][item.nodeid] = pairs or set(values)

    left_out = set()
    for cases in functions.values():
        # of a product the first and the last case share no value: both remain, as in `fast`
        first, *others = cases.items()
        last = others[-1:]
        left_out |= cases.keys() - set(few_with_all(dict([first, *last, *others[:-1]])))
    return [item for item in items if item.nodeid not in left_out]


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test or a fixture of it has code that names a module which starts processes."""
    seen: set[object] = set()
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(fixture.func for made in fixtures for fixture in made)]
    return any(_leads_to_processes(function, seen) for function in functions)


def _leads_to_processes(value: object, seen: set[object]) -> bool:
    """Whether a module starts processes, or the code of a function or class of the tests does."""
    if isinstance(value, types.ModuleType):
        return value in STARTERS
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, types.FunctionType | type) or value in seen:
        return False
    if not value.__module__.startswith("tests"):
        return False
    seen.add(value)
    parts = vars(value).values() if isinstance(value, type) else _named(value)
    return any(_leads_to_processes(part, seen) for part in parts)


def _named(function: types.FunctionType) -> Iterator[object]:
    """What the code of a function names outside of it: globals, and variables of the function
    around it."""
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # a variable that is not assigned yet
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for scope in (function.__globals__, *_modules(function, code)):
            yield from (scope.get(name) for name in code.co_names)


def _modules(function: types.FunctionType, code: types.CodeType) -> Iterator[dict[str, object]]:
    """The globals of modules of the tests that code names, since it may name what is in them."""
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and value.__name__.startswith("tests"):
            yield vars(value)


def slow(log: str, before: Iterable[str]) -> list[str]:
    """The slow functions by the durations that pytest printed. Those that were slow before have one
    case in the log, as functions that have no more; so they remain unless their case is quick."""
    seconds: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for time, phase, name in re.findall(r"^\s*([\d.]+)s (\w+)\s+(\S+::\S+)", log, re.MULTILINE):
        function = name.partition("[")[0]
        seconds[function] += float(time)
        cases[function] += phase == "call"
    known = set(before)
    return sorted(
        function
        for function, count in cases.items()
        if (count > 1 or function in known) and seconds[function] >= SECONDS * count
    )


if __name__ == "__main__":
    found = slow(Path(sys.argv[1]).read_text(), SLOW)
    _SLOW.write_text("".join(f"{name}\n" for name in found))
