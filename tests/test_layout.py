"""The house keeps its order: imports go one way, and the scripts stay thin."""

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtpkit

ROOT = Path(mtpkit.__file__).parent.parent
ORDER = [
    {"errors", "files", "config", "platform", "version"},
    {"kernels", "data"},
    {"model"},
    {"checkpoint"},
    {"training", "engine"},
    {"bench"},
    {"cli"},
]
"""Layers from the bottom up. Those that share a line, but the first, do not import each other."""
RANK = {layer: rank for rank, layers in enumerate(ORDER) for layer in layers}
SCRIPT_LINES = 40
FILE_LINES, FUNCTION_LINES = 500, 70
WHY = "onger than 70 lines because"
"""What the docstring of a longer kernel says."""


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the source, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def violations(layer: str, source: str) -> list[str]:
    """Imports in a module of `layer` that the order forbids, as `line: name`."""
    return [f"{line}: {name}" for line, name in imported_modules(source) if not _allowed(layer, name)]


def _allowed(layer: str, name: str) -> bool:
    root, *rest = name.split(".")
    if root != "mtpkit":
        return root != ""  # a relative import hides where it goes
    target = rest[0] if rest else "__init__"
    # What the package exports lazily belongs to the layer that defines it.
    target = mtpkit._EXPORTS.get(target, f"mtpkit.{target}").split(".")[1]
    if target not in RANK:
        return target.startswith("__") and layer == "cli"
    return target == layer or RANK[target] < RANK[layer] or RANK[target] == RANK[layer] == 0


def package_modules() -> list[Path]:
    return sorted((ROOT / "mtpkit").rglob("*.py"))


def scripts() -> list[Path]:
    return sorted(path for folder in ("train", "infer", "convert") for path in (ROOT / folder).glob("*.py"))


def test_imports_go_one_way() -> None:
    found = []
    for path in package_modules():
        layer = path.relative_to(ROOT / "mtpkit").parts[0].removesuffix(".py")
        if layer != "__init__":
            assert layer in RANK, f"{path} is in no layer of the design"
            found += [f"{path.relative_to(ROOT)}:{violation}" for violation in violations(layer, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("training", "from mtpkit.engine import LLM"),
        ("engine", "import mtpkit.training.loop"),
        ("training", "from mtpkit import LLM"),
        ("training", "from mtpkit import engine"),
        ("kernels", "import mtpkit.data as data"),
        ("data", "from mtpkit.kernels.conv import reference"),
        ("data", "def late():\n    from mtpkit.model import build_model"),
        ("model", "from mtpkit.checkpoint import families"),
        ("config", "from mtpkit.model.inputs import StepInput"),
        ("bench", "from mtpkit.cli import run"),
        ("model", "from .inputs import StepInput"),
        ("model", "import mtpkit"),
        ("cli", "import mtpkit.nowhere"),
    ],
)
def test_walker_sees_a_violation(layer: str, source: str) -> None:
    assert violations(layer, source)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("config", "from mtpkit.errors import UserError"),
        ("engine", "from mtpkit.model import build_model\nimport torch, numpy"),
        ("engine", "from mtpkit.engine.blocks import Allocator"),
        ("cli", "from mtpkit import LLM, __version__"),
    ],
)
def test_walker_allows_the_order(layer: str, source: str) -> None:
    assert not violations(layer, source)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules that it imports, given their sources by dotted name."""

    def module(name: str) -> str:
        return name if name in sources else name.rpartition(".")[0]

    graph = {}
    for importer, source in sources.items():
        graph[importer] = {module(name) for _, name in imported_modules(source)} & sources.keys() - {importer}
    return graph


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import themselves by way of others."""
    reached = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    return sorted(name for name, targets in reached.items() if name in targets)


def test_no_modules_import_each_other() -> None:
    """Not inside functions or for type checking alone, either."""
    sources = {}
    for path in package_modules():
        parts = path.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    assert not circles(import_graph(sources))


def test_a_circle_is_found() -> None:
    late = "def late():\n    from mtpkit.a.b import name"
    sources = {"mtpkit.a.b": "from mtpkit.c import x", "mtpkit.c": "import mtpkit.d", "mtpkit.d": late, "mtpkit.e": ""}
    assert circles(import_graph(sources)) == ["mtpkit.a.b", "mtpkit.c", "mtpkit.d"]
    sources["mtpkit.d"] = "from mtpkit.e import y"
    assert not circles(import_graph(sources))


ENGINE_NEVER = ("ssm_update", "gated_delta_rule", "ring", "causal_conv1d", "kv_store", "attention")
"""Kernels of states: `mtpkit.model.state` and the layers know them."""


def state_imports(source: str) -> list[str]:
    """Imports of kernels of states and of layers, as `line: name`."""
    never = (*(f"mtpkit.kernels.{kernel}." for kernel in ENGINE_NEVER), "mtpkit.model.layers.")
    return [f"{line}: {name}" for line, name in imported_modules(source) if f"{name}.".startswith(never)]


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from mtpkit.kernels.ring import ring_base", True),
        ("from mtpkit.kernels import kv_store", True),
        ("def late():\n    import mtpkit.kernels.attention.decode", True),
        ("from mtpkit.model.layers.mamba import MambaMixer", True),
        ("from mtpkit.model import layers", True),
        ("from mtpkit.kernels.sampling import uniform\nfrom mtpkit.model.state import States", False),
    ],
)
def test_imports_of_states_are_seen(source: str, seen: bool) -> None:
    assert bool(state_imports(source)) == seen


def test_the_engine_knows_no_state_and_no_layer() -> None:
    paths = [path for path in package_modules() if path.is_relative_to(ROOT / "mtpkit" / "engine")]
    found = [f"{path}:{name}" for path in paths for name in state_imports(path.read_text())]
    assert paths and not found, "\n".join(found)


def joined_in_errors(source: str) -> list[int]:
    """Lines of `raise` statements that list things by `join`, however many there are."""
    return [
        call.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "join"
        and isinstance(call.func.value, ast.Constant)
        and call.func.value.value.strip()
    ]


LETTERS = "M*-EG"
MIXERS = {
    "RecurrentMixer",
    "MambaMixer",
    "GatedDeltaNet",
    "SelfAttention",
    "MLP",
    "MoELayer",
    "MambaLayer",
    "AttentionLayer",
    "MLPLayer",
    "MixtureLayer",
}
KIND_ROOMS = ("config/", "model/kinds/", "model/layers/")
"""Where letters of patterns and classes of mixers may be named."""


def kinds_named(source: str) -> Iterator[str]:
    """Yield `line: what` where a source tests or counts a letter of a pattern, or names the class of a mixer."""
    for node in ast.walk(ast.parse(source)):
        tested: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            tested = [node.left, *node.comparators]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("count", "find")
        ):
            tested = [node.func.value, *node.args]
        letters = [side for side in tested if isinstance(side, ast.Constant) and side.value in tuple(LETTERS)]
        if letters and any(word in ast.unparse(node) for word in ("pattern", "letter", "layer")):
            yield f"{node.lineno}: {ast.unparse(node)}"
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in MIXERS:
            yield f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "'M' in config.mtp.pattern",
        "letter == '*'",
        "n = pattern.count('E')",
        "isinstance(layer, MambaMixer)",
        "mamba.MLP",
    ],
)
def test_a_kind_that_is_named_is_seen(source: str) -> None:
    assert list(kinds_named(source))


def test_layer_kinds_are_named_in_their_rooms_alone() -> None:
    found = {}
    for path in package_modules():
        name = str(path.relative_to(ROOT / "mtpkit"))
        if not name.startswith(KIND_ROOMS) and (places := list(kinds_named(path.read_text()))):
            found[name] = places
    assert not found


def long_functions(source: str) -> list[str]:
    """Functions of more than `FUNCTION_LINES` lines, but kernels that say why they are."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    long = [one for one in functions if one.end_lineno - one.lineno + 1 > FUNCTION_LINES]
    return [one.name for one in long if not (one.name.endswith("_kernel") and WHY in (ast.get_docstring(one) or ""))]


def test_long_functions_are_seen() -> None:
    body = "    pass\n" * (FUNCTION_LINES - 1)
    assert not long_functions(f"def f():\n{body}") and long_functions(f"def f():\n    pass\n{body}") == ["f"]
    for name, text in (("f", WHY), ("f_kernel", "no reason")):
        assert long_functions(f"def {name}():\n    '{text}'\n{body}") == [name]
    assert not long_functions(f"def f_kernel():\n    'It is {WHY} of this.'\n{body}")


def test_files_and_functions_are_short() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in package_modules()}
    assert not [path for path, source in sources.items() if len(source.splitlines()) > FILE_LINES]
    assert not {path: names for path, source in sources.items() if (names := long_functions(source))}


def test_errors_list_things_by_listed() -> None:
    """Which cuts what would not fit a line."""
    assert joined_in_errors("raise UserError(f\"{', '.join(names)} are missing\")") == [1]
    assert not joined_in_errors("raise UserError(f\"{listed(names)}: {' '.join(text.split())}\")")
    found = {path: lines for path in package_modules() if (lines := joined_in_errors(path.read_text()))}
    assert not found, "list them by mtpkit.errors.listed"


def test_scripts_are_thin() -> None:
    for path in scripts():
        tree = ast.parse(path.read_text())
        assert len(path.read_text().splitlines()) <= SCRIPT_LINES, f"{path} does more than parse and call"
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], path


def test_the_page_of_every_file_is_current():
    tree = runpy.run_path(str(ROOT / "tools" / "tree.py"))["tree"]
    assert (ROOT / "docs" / "tree.md").read_text() == tree(), "run python tools/tree.py"
