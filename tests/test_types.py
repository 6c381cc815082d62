"""Functions have types, but those that Triton compiles."""

import ast
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import mtpkit

ROOT = Path(mtpkit.__file__).parent.parent


def module_sources() -> dict[str, str]:
    """The source of every module by its dotted name."""
    paths = sorted((ROOT / "mtpkit").rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths
    }


def functions(source: str, compiled: bool) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods that Triton compiles, or all others."""
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        one
        for one in found
        if any("triton.jit" in ast.unparse(d) for d in one.decorator_list) == compiled
    ]


def untyped(source: str) -> list[str]:
    """`line: name` of functions that lack a type; `self` and `cls` need none, nor the result of
    `__init__`."""
    lacking = []
    for one in functions(source, compiled=False):
        given = one.args
        arguments = [
            *given.posonlyargs,
            *given.args,
            *given.kwonlyargs,
            *filter(None, (given.vararg, given.kwarg)),
        ]
        typed = all(
            argument.annotation or argument.arg in ("self", "cls") for argument in arguments
        )
        if not typed or (one.returns is None and one.name != "__init__"):
            lacking.append(f"{one.lineno}: {one.name}")
    return lacking


@pytest.mark.parametrize(
    ("source", "lacks"),
    [
        ("def f(x: int) -> int: ...", False),
        ("def f(x) -> int: ...", True),
        ("def f(x: int): ...", True),
        ("def f(*x, y: int) -> int: ...", True),
        ("def f(**x) -> int: ...", True),
        ("class A:\n    def __init__(self, x: int): ...", False),
        ("class A:\n    @staticmethod\n    def f(ctx, x): ...", True),
        ("@triton.jit\ndef f(x): ...", False),
        ("@Early\n@triton.jit(do_not_specialize=['n'])\ndef f(x, n): ...", False),
        ("@Early\ndef f(x): ...", True),
    ],
)
def test_missing_types_are_seen(source: str, lacks: bool) -> None:
    assert bool(untyped(source)) == lacks


def test_all_functions_but_kernels_have_types() -> None:
    assert not {
        name: lacking for name, source in module_sources().items() if (lacking := untyped(source))
    }


def test_modules_without_kernels_are_not_exempt_from_types() -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    exempt = [
        name
        for one in overrides
        if "no-untyped-def" in one.get("disable_error_code", ())
        for name in one["module"]
    ]
    kernels = {
        name for name, source in module_sources().items() if functions(source, compiled=True)
    }
    assert sorted(exempt) == sorted(
        {"mtpkit.kernels.*.triton" if fnmatch(name, "*.triton") else name for name in kernels}
    )
