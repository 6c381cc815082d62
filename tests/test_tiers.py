"""The cases of the fast tier."""

import importlib
from types import SimpleNamespace

import pytest

from tests import ranks
from tests.tiers import HANDFUL, fast, function_name


class Inside:
    @staticmethod
    def starts() -> None:
        def later() -> None:
            ranks_of_two()

        later()


def ranks_of_two() -> None:
    ranks.run_ranks(print, ranks=2)


def through_a_class() -> None:
    Inside.starts()


def plain() -> None:
    made = SimpleNamespace(ranks=2)
    assert made.ranks == 2


def closing_over(function):
    return lambda: function()


def item(name: str, function=plain, gpu: bool = False, fixtures=()) -> SimpleNamespace:
    return SimpleNamespace(
        nodeid=name,
        function=function,
        get_closest_marker=lambda mark: gpu and mark == "gpu",
        _fixtureinfo=SimpleNamespace(name2fixturedefs={"made": fixtures}),
    )


def chosen(*items: SimpleNamespace) -> list[str]:
    return [one.nodeid for one in fast(items)]


def test_the_first_and_the_last_case_of_each_function():
    names = [f"a.py::test_one[{case}]" for case in range(5)] + ["a.py::test_two", "b.py::test_one"]
    assert chosen(*map(item, names)) == [names[0], names[4], *names[5:]]
    assert chosen(*map(item, names[:2])) == names[:2]


def test_cases_for_a_gpu_do_not_count():
    cases = [item(f"a.py::test[{case}]", gpu=case in (0, 3)) for case in range(4)]
    assert chosen(*cases) == ["a.py::test[1]", "a.py::test[2]"]


@pytest.mark.parametrize(
    "function", [ranks_of_two, through_a_class, Inside.starts, closing_over(ranks_of_two)]
)
def test_functions_that_start_processes_are_left_out(function):
    fixture = SimpleNamespace(func=function)
    assert chosen(item("a.py::test", function)) == []
    assert chosen(item("a.py::test", fixtures=[fixture])) == []
    assert chosen(item(HANDFUL[0], function)) == [HANDFUL[0]]
    assert chosen(item("a.py::test", closing_over(plain))) == ["a.py::test"]


def test_the_handful_exists():
    for name in HANDFUL:
        file, _, function = name.partition("::")
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert callable(getattr(module, function))


def test_names_have_no_parameters(request):
    assert function_name(request.node) == request.node.nodeid
