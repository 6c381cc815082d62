"""The cases of the two tiers."""

import importlib
import itertools
from types import SimpleNamespace

import pytest

from tests import ranks
from tests.shared import each
from tests.tiers import HANDFUL, SLOW, fast, function_name, slow, thinned


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
    named = [f"{min(SLOW)}[{case}]" for case in range(3)]
    assert chosen(*map(item, named)) == named[:1]


def test_slow_functions_are_those_whose_cases_take_long():
    log = """
    0.40s call     tests/a.py::test_slow[1]
    0.20s setup    tests/a.py::test_slow[1]
    0.10s call     tests/a.py::test_slow[2-tests/b.py::x]
    9.00s call     tests/a.py::test_of_one_case
    0.29s call     tests/a.py::test_quick[1]
    0.29s call     tests/a.py::test_quick[2]
    0.31s call     tests/a.py::test_before[1]
    0.10s call     tests/a.py::test_no_longer[1]
    """
    before = ["tests/a.py::test_before", "tests/a.py::test_no_longer", "tests/a.py::test_gone"]
    assert slow(log, before) == ["tests/a.py::test_before", "tests/a.py::test_slow"]


def test_cases_for_a_gpu_do_not_count():
    cases = [item(f"a.py::test[{case}]", gpu=case in (0, 3)) for case in range(4)]
    assert chosen(*cases) == ["a.py::test[1]", "a.py::test[2]"]


def case(name: str, gpu: bool = False, **params: object) -> SimpleNamespace:
    made = item(f"{name}[{params}]", gpu=gpu)
    made.callspec = SimpleNamespace(params=params)
    return made


def test_cases_of_a_kernel_stand_for_those_of_its_twin():
    twins = [case("a.py::test", twin="reference", a=a) for a in range(3)]
    kernels = [case("a.py::test", twin="interpreter", a=a) for a in range(3)]
    assert chosen(*twins, *kernels) == [kernels[0].nodeid, kernels[2].nodeid]
    assert chosen(*twins) == [twins[0].nodeid, twins[2].nodeid]


def test_parameters_of_kernels_meet_in_pairs():
    """Of a product those few cases; what is no product, what has one parameter, what needs a GPU
    and what is no kernel's remains."""
    name = "tests/kernels/test_a.py::test"
    product = [case(name, a=a, b=b, c=c) for a in range(4) for b in "xyz" for c in (None, [3], [4])]
    few = thinned(product)
    assert (few[0], few[-1]) == (product[0], product[-1]) and len(few) < len(product) / 2
    for one, other in itertools.combinations("abc", 2):
        met = [
            {(repr(made.callspec.params[one]), repr(made.callspec.params[other])) for made in cases}
            for cases in (few, product)
        ]
        assert met[0] == met[1]
    others = [
        item("tests/kernels/test_a.py::test_alone"),
        *(case(f"{name}_some", a=a, b=a) for a in range(3)),
        *(case(f"{name}_one", a=a) for a in range(3)),
        *(case(f"{name}_gpu", gpu=True, a=a, b=b, c=c) for a in "ab" for b in "ab" for c in "ab"),
        *(
            case("tests/model/test_a.py::test", a=a, b=b, c=c)
            for a in "ab"
            for b in "ab"
            for c in "ab"
        ),
    ]
    assert thinned([*product, *others]) == [*few, *others]


@pytest.mark.parametrize(
    "function", [ranks_of_two, through_a_class, Inside.starts, closing_over(ranks_of_two)]
)
def test_functions_that_start_processes_are_left_out(function):
    fixture = SimpleNamespace(func=function)
    assert chosen(item("a.py::test", function)) == []
    assert chosen(item("a.py::test", fixtures=[fixture])) == []
    assert chosen(item(HANDFUL[0], function)) == [HANDFUL[0]]
    assert chosen(item("a.py::test", closing_over(plain))) == ["a.py::test"]


def test_a_table_in_one_case_fails_with_its_row():
    seen = []

    @each(("one", "other"), [(1, 2), (3, 3), (4, 5)])
    def test_they_differ(one, other):
        seen.append(one)
        assert one != other

    with pytest.raises(AssertionError) as caught:
        test_they_differ()
    assert caught.value.__notes__ == ["row: (3, 3)"] and seen == [1, 3]


@each("number", range(2))
def test_rows_of_a_table_have_fixtures_and_a_directory_each(tmp_path, request, number):
    assert not list(tmp_path.iterdir()) and request.node.name == request.function.__name__
    (tmp_path / "file").touch()


def test_the_handful_and_the_slow_exist():
    for name in (*HANDFUL, *SLOW):
        file, _, function = name.partition("::")
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert callable(getattr(module, function))


def test_names_have_no_parameters(request):
    assert function_name(request.node) == request.node.nodeid
