"""The package imports exactly the dependencies that pyproject.toml declares."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import mtpkit

ROOT = Path(mtpkit.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "megatron": "megatron-core",
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "transformer_engine": "transformer-engine",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",  # which pins it
    "starlette": "fastapi",  # which is made of it
}
"""Packages that are called otherwise than what is imported."""
NOT_IMPORTED = {
    "httptools": "uvicorn reads requests with it",
    "jinja2": "transformers renders chat templates with it",
    "uvloop": "uvicorn's event loop, where there is one for the system",
    "tensorboard": "torch.utils.tensorboard writes with it",
}
"""Runtime dependencies that no module imports by name, and what they are for."""
LOADED_ON_DEMAND = {"mtpkit/model/layers/te.py"}
"""Modules that `mtpkit.model.backends` imports when they are chosen."""


def names(requirements: list[str]) -> set[str]:
    """Distributions of requirements such as `triton>=3.6; platform_system == "Linux"`."""
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


RUNTIME = names(PROJECT["dependencies"])
OPTIONAL = PROJECT["optional-dependencies"]
EXTRAS = names([one for extra in OPTIONAL.keys() - {"test", "dev"} for one in OPTIONAL[extra]])


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """(distribution, whether it is imported with the module) of every third-party import."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for root in {module.split(".")[0] for module in modules}:
            if root not in sys.stdlib_module_names | {"mtpkit", "_typeshed"}:
                yield DISTRIBUTIONS.get(root, root), id(node) not in inside


@functools.cache
def imported() -> dict[str, set[str]]:
    """Distributions with the modules that import them."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "mtpkit").rglob("*.py")):
        for name, _ in imports(path.read_text()):
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_the_walker_sees_imports_anywhere() -> None:
    source = "import os, torch.nn\nfrom yaml import load\ndef late():\n    import wandb\n"
    assert sorted(imports(source)) == [("pyyaml", True), ("torch", True), ("wandb", False)]


def test_every_import_is_declared() -> None:
    undeclared = {name: where for name, where in imported().items() if name not in RUNTIME | EXTRAS}
    assert not undeclared


def test_every_declared_package_is_imported() -> None:
    assert not RUNTIME - imported().keys() - NOT_IMPORTED.keys()
    assert not EXTRAS - imported().keys()
    assert NOT_IMPORTED.keys() <= RUNTIME and not imported().keys() & NOT_IMPORTED.keys()


def test_extras_are_imported_where_they_are_used() -> None:
    """So that the package works without them."""
    for path in (ROOT / "mtpkit").rglob("*.py"):
        if str(path.relative_to(ROOT)) not in LOADED_ON_DEMAND:
            assert not [
                name
                for name, early in imports(path.read_text())
                if early and name in EXTRAS - RUNTIME
            ], path
