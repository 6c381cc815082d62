"""The house keeps its order: who may name layer kinds and kernels, and scripts that stay thin.

Which packages may import which, `make lint` checks: see `tool.importlinter` in pyproject.toml.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import mtpkit
from mtpkit.config import SECTIONS, ModelConfig
from mtpkit.model.kinds import KINDS

ROOT = Path(mtpkit.__file__).parent.parent
SCRIPT_LINES = 40


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the source, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def package_modules() -> list[Path]:
    return sorted((ROOT / "mtpkit").rglob("*.py"))


def scripts() -> list[Path]:
    return sorted(
        path for folder in ("train", "infer", "convert") for path in (ROOT / folder).glob("*.py")
    )


ENGINE_KERNELS = (
    *("NO_TOKEN", "MOST_TREE_TOKENS", "dispatch", "exchange", "integer_rows"),
    *("acceptance", "ancestors", "draft_head", "linear", "sampling"),
    *("step_rows.decode_rows", "step_rows.kv_slots", "step_rows.store_rows"),
    *("copy_units", "rounding"),
)
"""What the engine takes of `mtpkit.kernels`: constants and the machine, drafts and their
acceptance, rows of a step, and copies to the prefix cache. `mtpkit.model.state` and the layers know
the kernels of states."""


def state_imports(source: str) -> list[str]:
    """Imports of kernels that the engine does not need and of layers, as `line: name`."""
    needed = tuple(f"mtpkit.kernels.{kernel}." for kernel in ENGINE_KERNELS)
    never = ("mtpkit.kernels.", "mtpkit.model.layers.")
    names = [(line, f"{name}.") for line, name in imported_modules(source)]
    return [
        f"{line}: {name[:-1]}"
        for line, name in names
        if name.startswith(never) and not name.startswith(needed)
    ]


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from mtpkit.kernels.ring import ring_base", True),
        ("from mtpkit.kernels import kv_store", True),
        ("from mtpkit.kernels.ssd import ssd_varlen", True),
        ("from mtpkit.kernels import ring_fold, sampling", True),
        ("import mtpkit.kernels.latent_attention", True),
        ("from mtpkit.kernels.place_qkv import place_qkv", True),
        ("from mtpkit.kernels.move_entries import move_entries", True),
        ("from mtpkit.kernels.step_rows import kv_slots, ring_lens_after", True),
        ("from mtpkit.kernels import step_rows", True),
        ("import mtpkit.kernels", True),
        ("from mtpkit import kernels", True),
        ("from mtpkit.kernels import *", True),
        ("def late():\n    import mtpkit.kernels.attention.decode", True),
        ("from mtpkit.model.layers.mamba import MambaMixer", True),
        ("from mtpkit.model import layers", True),
        (
            "from mtpkit.kernels.sampling import uniform\nfrom mtpkit.model.state import States",
            False,
        ),
        (
            (
                "from mtpkit.kernels import NO_TOKEN, acceptance\nfrom mtpkit.kernels.step_rows"
                " import kv_slots"
            ),
            False,
        ),
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


def in_package(path: Path) -> str:
    """A module's path from the package."""
    return str(path.relative_to(ROOT / "mtpkit"))


LETTERS = frozenset(KINDS)
GENERAL_LAYERS = {"backend.py", "base.py", "embedding.py", "linear.py", "norm.py", "te.py"}
"""Files of `model/layers` whose classes are of no kind: parts of layers, and what backends build
them from."""


def classes_of(paths: Iterable[Path]) -> set[str]:
    """Names of the public classes that files define, but named tuples."""
    nodes = [
        node
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    tuples = [node for node in nodes if "NamedTuple" in map(ast.unparse, node.bases)]
    return {node.name for node in nodes if node not in tuples and not node.name.startswith("_")}


KIND_ROOMS = ("config/", "model/kinds/", "model/layers/")
"""Where letters of patterns, classes of mixers and sections of kinds may be named."""
LAYER_FILES = sorted((ROOT / "mtpkit" / "model" / "layers").glob("*.py"))
MIXERS = classes_of(path for path in LAYER_FILES if path.name not in GENERAL_LAYERS)
MIXERS -= classes_of(path for path in LAYER_FILES if path.name in GENERAL_LAYERS)
MIXERS -= classes_of(
    path for path in package_modules() if not in_package(path).startswith(KIND_ROOMS)
)
"""Classes of layers of one kind whose names nothing outside has."""
SECTION_CLASSES = {section.__name__ for section in SECTIONS.values()}
SECTION_NAMES = {
    name
    for name, value in vars(ModelConfig).items()
    if isinstance(value, property) and get_type_hints(value.fget).get("return") in SECTIONS.values()
}
"""Properties of `ModelConfig` that are sections."""
SECTION_READERS = {
    "checkpoint/families/": (
        "a family says which layers its models have, and what its files call their sizes"
    ),
    "checkpoint/lint_quantized.py": "vLLM shares the groups of attention among ranks",
    "model/hybrid.py": (
        "megatron-core's config has sizes of attention and feed-forward layers in every model"
    ),
    "bench/plain.py": "a plain decoder, which has layers of its own",
}
"""Files and folders outside that may name sections, but no letters and no classes of mixers, and
why."""
LETTER_READERS = {
    "checkpoint/families/blocks.py": (
        "the number of layers before the first mixture of experts is a key"
    ),
    "bench/drawn.py": "a published format of several goes by the kind of a layer",
}
"""Files outside that may name letters, and why."""

ABOUT_KINDS = ("pattern", "letter", "layer", "KINDS", "SECTIONS")
"""Words of which a source has one where it means a letter of a pattern, not any text."""


def _are_letters(node: ast.AST) -> bool:
    """Whether a node is a text of letters of kinds, or several of them."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return bool(node.elts) and all(map(_are_letters, node.elts))
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and set() < {*node.value} <= LETTERS
    )


def _named(node: ast.AST) -> list[str]:
    """Names that a node reads or imports."""
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    return (
        [node.id]
        if isinstance(node, ast.Name)
        else [node.attr]
        if isinstance(node, ast.Attribute)
        else []
    )


def kinds_named(source: str) -> Iterator[str]:
    """Yield `line: what` where a source tests, counts or looks up letters of a pattern, or names a
    mixer's class."""
    for node in ast.walk(ast.parse(source)):
        tested: list[ast.AST] = []
        alone = False
        match node:
            case ast.Compare():
                tested = [node.left, *node.comparators]
            case ast.Call(func=ast.Attribute(value=value)):
                tested = [value, *node.args]
            case ast.Subscript():
                tested = [node.slice]
            case ast.Match():
                patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
                tested = [part.value for part in patterns if isinstance(part, ast.MatchValue)]
            case ast.Dict(keys=[first, *rest]) if first is not None and all(
                map(_are_letters, filter(None, rest))
            ):
                tested = [first]
                alone = True
            case ast.Tuple() | ast.List() | ast.Set() if len(node.elts) > 1:
                tested = [node]
                alone = True
        named = any(map(_are_letters, tested)) and (
            alone or any(word in ast.unparse(node) for word in ABOUT_KINDS)
        )
        if named or MIXERS & {*_named(node)}:
            yield f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def sections_named(source: str) -> Iterator[str]:
    """Yield `line: what` where a source names the section of a kind, as a class or as a part of a
    model's config."""
    for node in ast.walk(ast.parse(source)):
        part = (
            isinstance(node, ast.Attribute)
            and node.attr in SECTION_NAMES
            and ast.unparse(node.value).endswith("config")
        )
        if part or SECTION_CLASSES & {*_named(node)}:
            yield f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "source",
    [
        "'M' in config.mtp.pattern",
        "letter == '*'",
        "letter == '+'",
        "n = pattern.count('E')",
        "letter in ('M', 'G')",
        "letter in 'MG'",
        "one in ['M', '+']",
        "pattern.replace('M', '')",
        "pattern.partition('*')",
        "place = pattern.index('-')",
        "match letter:\n    case 'M':\n        pass",
        "match letter:\n    case 'x' | 'G':\n        pass",
        "names = {'M': 'mamba', '*': 'attention'}",
        "KINDS['M']",
        "RECURRENT = ('M', 'G')",
        "isinstance(layer, MambaMixer)",
        "isinstance(layer, LatentAttention)",
        "from mtpkit.model.layers.experts import Experts as Routed",
        "mamba.MLP",
    ],
)
def test_a_kind_that_is_named_is_seen(source: str) -> None:
    assert list(kinds_named(source))


@pytest.mark.parametrize(
    "source",
    [
        "text == '*'",
        "units = {'K': 3, 'M': 6}",
        "name.split('-')",
        "letter in pattern",
        "match text:\n    case 'M':\n        pass",
        "CoreAttention",
        "config.heads.attention",
        "kinds_in(config.letters)",
    ],
)
def test_other_texts_are_no_kinds(source: str) -> None:
    assert not list(kinds_named(source)) and not list(sections_named(source))


@pytest.mark.parametrize(
    "source",
    [
        "Mamba2Config.letter in pattern",
        "config.has(MoeConfig)",
        "from mtpkit.config.sections import MlaConfig as Latent",
        "sections.GatedDeltaNetConfig",
        "config.mamba2.inner",
        "model.mtpkit_config.moe.routing",
    ],
)
def test_a_section_that_is_named_is_seen(source: str) -> None:
    assert list(sections_named(source))


def test_layer_kinds_are_named_in_their_rooms_alone() -> None:
    found = dict[str, list[str]]()
    read = set[str]()
    for path in package_modules():
        name = in_package(path)
        source = path.read_text()
        if name.startswith(KIND_ROOMS):
            continue
        places = list(kinds_named(source))
        sections = list(sections_named(source))
        for readers, named in ((SECTION_READERS, sections), (LETTER_READERS, places)):
            allowed = [place for place in readers if name.startswith(place)]
            if named and allowed:
                read.update(allowed)
            elif named:
                found.setdefault(name, []).extend(named)
    assert not found
    assert read == SECTION_READERS.keys() | LETTER_READERS.keys(), (
        "take out those that read nothing"
    )


def test_errors_list_things_by_listed() -> None:
    """Which cuts what would not fit a line."""
    assert joined_in_errors("raise UserError(f\"{', '.join(names)} are missing\")") == [1]
    assert not joined_in_errors("raise UserError(f\"{listed(names)}: {' '.join(text.split())}\")")
    found = {
        path: lines for path in package_modules() if (lines := joined_in_errors(path.read_text()))
    }
    assert not found, "list them by mtpkit.errors.listed"


def test_scripts_are_thin() -> None:
    for path in scripts():
        tree = ast.parse(path.read_text())
        assert len(path.read_text().splitlines()) <= SCRIPT_LINES, (
            f"{path} does more than parse and call"
        )
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], path


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert len(links) > 20
    broken = [(page.name, link) for page, link in links if not (page.parent / link).exists()]
    assert broken == []
