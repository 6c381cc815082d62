"""Things that tests of several workers use, made by the worker that needs them first."""

import gc
import inspect
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that `make` fills, once in a session."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # common to all workers
    path = folder / name
    done = folder / f"{name}.done"
    with FileLock(folder / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            make(path)
            done.touch()
    return path


def covering(*axes: Iterable, meet: int = 2) -> list[tuple]:
    """Few of all combinations of a value of each axis: every `meet` values of different axes are
    together in one.

    Settings that a test varies break each other two or three at a time; all of them together cost a
    multiple.

    Example: covering("ab", "cd", "ef") == [("a", "c", "e"), ("a", "d", "f"), ("b", "c", "f"), ("b",
    "d", "e")]
    """
    axes = [list(axis) for axis in axes]
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = list(itertools.combinations(range(len(axes)), meet))

    def together(place: tuple[int, ...]) -> set[tuple]:
        return {(some, tuple(place[axis] for axis in some)) for some in chosen}

    found = few_with_all({place: together(place) for place in places})
    return [tuple(axis[index] for axis, index in zip(axes, place, strict=True)) for place in found]


def few_with_all[T](parts: dict[T, set]) -> list[T]:
    """Keys whose sets have together what all sets have: one by one, the first that adds most."""
    missing: set = set().union(*parts.values())
    found = []
    while missing:
        best = max(parts, key=lambda key: len(parts[key] & missing))
        missing -= parts[best]
        found.append(best)
    return found


def each(names: str | tuple[str, ...], rows: Iterable) -> Callable[[Callable], Callable[..., None]]:
    """Run a test on each row of a table in one case, as `pytest.mark.parametrize` does in many.

    For tables of quick checks of which each is about something else, such as refused values: the
    fast tier, which runs two cases of a function, has all of them then. A failure names its row.
    The rows share the test's fixtures, but for `tmp_path`.
    """
    names = (names,) if isinstance(names, str) else names
    rows = list(rows)
    assert rows, "a test without rows cannot fail"

    def decorate(check: Callable) -> Callable[..., None]:
        parameters = inspect.signature(check).parameters.values()
        fixtures = [one for one in parameters if one.name not in names]

        def test(**shared: Any) -> None:
            for number, row in enumerate(rows):
                given = dict(shared)
                if "tmp_path" in shared:
                    given["tmp_path"] = shared["tmp_path"] / f"row{number}"
                    given["tmp_path"].mkdir()
                values = (row,) if len(names) == 1 else row
                try:
                    check(**given, **dict(zip(names, values, strict=True)))
                except BaseException as error:  # pytest's own too
                    error.add_note(f"row: {row!r}")
                    raise

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        test.__module__ = check.__module__
        test.pytestmark = getattr(check, "pytestmark", [])  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return test

    return decorate


TIER = "MTPKIT_TEST_TIER"
"""Variable of the environment with the tier that runs."""


def examples(count: int) -> int:
    """How many random histories a test plays: in the fast tier a third of `count`."""
    return count // 3 if os.environ.get(TIER) == "fast" else count


def told_length(message: object) -> int:
    """Characters of a message on one line, in which files of tests have names without
    directories."""
    files = rf"{re.escape(tempfile.gettempdir())}/\S*/"
    return len(re.sub(files, "", " ".join(str(message).split())))


def look_at_new_objects() -> None:
    """Have engines that this process builds collect garbage among new objects alone, all but one in
    100.

    `LLM` unfreezes all objects before it looks for garbage, which takes half a second with all
    that torch imports and tests collect, and tests build more than a thousand engines.
    """
    unfreeze = gc.unfreeze
    calls = itertools.count(1)
    gc.unfreeze = lambda: unfreeze() if next(calls) % 100 == 0 else None
