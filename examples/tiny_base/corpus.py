"""Make a corpus from text that every machine has: the sources of the running Python's standard
library.

    python examples/tiny_base/corpus.py OUT_DIR [--packages] [--limit N]

writes OUT_DIR/train.jsonl and OUT_DIR/heldout.jsonl, one module per line: {"path": ..., "text":
...}, and prompts cut from held-out modules, OUT_DIR/prompts.jsonl: {"prompt": ...}. With --packages
the training part also holds sources of installed packages; the tiny base was trained with them.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mtpkit.cli import run

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
"""Modules that are kept out of training, with their tests; prompts and held-out loss come from
them."""

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
"""Permissively licensed packages that --packages adds."""


def is_held_out(path: Path) -> bool:
    """Whether a path, relative to the library, belongs to a held-out module."""
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
        except UnicodeDecodeError:  # tests of other encodings
            continue
        if 200 <= len(text) <= 400_000:  # skips stubs and generated tables
            yield relative, text


def write(out: Path, packages: bool = False, limit: int | None = None) -> dict[str, int]:
    """Write the files; return the number of samples in each.

    `limit` is the number of training modules to keep, spread evenly over the library.
    """
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    site = Path(paths["purelib"])
    train = []
    held_out = []
    for root in [stdlib, *(site / name for name in PACKAGES if packages)]:
        for path, text in modules(root):
            if not is_held_out(path):
                train.append({"path": str(path), "text": text})
            elif root == stdlib:  # packages may hold copies of held-out modules
                held_out.append({"path": str(path), "text": text})
    if limit is not None and limit < len(train):
        train = [train[index * len(train) // limit] for index in range(limit)]
    files = {
        "train": train,
        "heldout": held_out,
        "prompts": [{"prompt": prompt} for prompt in prompts(held_out)],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, samples in files.items():
        with (out / f"{name}.jsonl").open("w") as lines:
            lines.writelines(json.dumps(sample) + "\n" for sample in samples)
    return {name: len(samples) for name, samples in files.items()}


def prompts(held_out: list[dict[str, str]], count: int = 32, characters: int = 400) -> list[str]:
    """Cut `count` pieces out of held-out modules, each of whole lines."""
    texts = [sample["text"] for sample in held_out if len(sample["text"]) > 4 * characters]
    cut = []
    for index in range(count):
        text = texts[index * len(texts) // count]
        start = text.index("\n", len(text) // 3) + 1
        cut.append(text[start : text.index("\n", start + characters) + 1])
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--packages", action="store_true", help="add the sources of installed packages"
    )
    parser.add_argument("--limit", type=int, help="keep this many training modules")
    arguments = parser.parse_args()
    print(write(arguments.out, arguments.packages, arguments.limit))


if __name__ == "__main__":
    run(main)
