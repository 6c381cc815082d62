"""Write docs/tree.md: every module with the first sentence of its docstring."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("mtpkit", "train", "convert", "infer", "examples", "benchmarks", "tools")
PAGE = ROOT / "docs" / "tree.md"


def tree() -> str:
    """Text of docs/tree.md."""
    lines = ["# Every module", "", "Written by `python tools/tree.py` from the modules' own docstrings."]
    folder = None
    files = (path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
    for path in sorted(files, key=lambda path: (path.parent, path.name)):
        summary = first_sentence(path)
        if summary:
            if path.parent != folder:
                folder = path.parent
                lines += ["", f"## {folder.relative_to(ROOT)}", ""]
            lines.append(f"- `{path.name}`: {summary}")
    return "\n".join(lines) + "\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring in one line; "" if there is none."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text, maxsplit=1)[0]


if __name__ == "__main__":
    PAGE.write_text(tree(), encoding="utf-8")
