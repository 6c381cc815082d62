"""Real text that is on every machine: the sources of the running Python's standard library.

    python examples/tiny_base/corpus.py OUT_DIR [--packages]

writes OUT_DIR/train.jsonl and OUT_DIR/heldout.jsonl, one module a line: {"path": ..., "text": ...}, and prompts cut
from held-out modules, OUT_DIR/prompts.jsonl: {"prompt": ...}. With --packages the training part also holds the sources
of packages from the development set-up, as the tiny base's own training did.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELD_OUT = [
    "argparse",
    "bisect",
    "calendar",
    "configparser",
    "csv",
    "difflib",
    "fractions",
    "graphlib",
    "heapq",
    "json",
    "optparse",
    "sched",
    "shelve",
    "shlex",
    "statistics",
    "textwrap",
    "tomllib",
    "zipapp",
]
"""Modules (and their tests) that no training sees: prompts and held-out loss come from them."""

PACKAGES = [
    "datasets",
    "megatron",
    "mypy",
    "networkx",
    "numpy",
    "pandas",
    "pip",
    "scipy",
    "setuptools",
    "sympy",
    "torch",
]
"""Permissively licensed packages that the base's training adds."""


def is_held_out(path: Path) -> bool:
    """Whether a path relative to the library belongs to a held-out module."""
    names = {part.removesuffix(".py").removeprefix("test_") for part in path.parts}
    return bool(names & set(HELD_OUT))


def modules(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path relative to root, text) of every readable source file, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "lib2to3", "__pycache__"} & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # files that test other encodings
            continue
        if 200 <= len(text) <= 400_000:  # skips stubs and generated tables
            yield relative, text


def write(out: Path, packages: bool = False) -> dict[str, int]:
    """Write both files; returns the number of modules in each."""
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"])] + [Path(paths["purelib"]) / name for name in PACKAGES if packages]
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "heldout": 0}
    with (out / "train.jsonl").open("w") as train, (out / "heldout.jsonl").open("w") as heldout:
        for root in roots:
            for path, text in modules(root):
                held = is_held_out(path)
                if held and root != roots[0]:
                    continue  # vendored copies of held-out modules
                counts["heldout" if held else "train"] += 1
                (heldout if held else train).write(json.dumps({"path": str(path), "text": text}) + "\n")
    with (out / "prompts.jsonl").open("w") as lines:
        lines.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(roots[0]))
    return counts


def prompts(root: Path, count: int = 32, characters: int = 400) -> list[str]:
    """`count` pieces of held-out modules, each starting and ending with a line."""
    texts = [text for path, text in modules(root) if is_held_out(path) and len(text) > 4 * characters]
    cut = []
    for index in range(count):
        text = texts[index * len(texts) // count]
        start = text.index("\n", len(text) // 3) + 1
        cut.append(text[start : text.index("\n", start + characters) + 1])
    return cut


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", action="store_true", help="add the sources of installed packages")
    arguments = parser.parse_args()
    print(write(arguments.out, arguments.packages))
