#!/usr/bin/env python
"""Fill the tables of docs/performance.md from the dated files in this directory.

A page says where a table belongs by two comments, and everything between them is replaced:

    <!-- results: h100 prefill/8b -->
    <!-- end of results -->

The table is the result `prefill/8b` of the newest file `DATE_h100.json` that has it.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
PAGE = RESULTS.parents[1] / "docs" / "performance.md"

WIDTH = 120
"""Columns of the page's lines, except rows of tables and quoted words of commands."""

PLACE = re.compile(r"<!-- results: (\S+) (\S+) -->\n.*?<!-- end of results -->", re.DOTALL)


def newest(machine: str, name: str, directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest file `DATE_MACHINE.json` with a result `name`, and the file's content with
    this result alone.

    Raises:
        LookupError: no file of this machine has such a result.
    """
    # Names begin with the date, so that the newest one is the last.
    for path in sorted(directory.glob(f"*_{machine}.json"), reverse=True):
        content = json.loads(path.read_text())
        for result in content["results"]:
            if result["name"] == name:
                return path, {**content, "results": [result]}

    raise LookupError(f"{directory} has no result {name} of {machine}")


def cell(value: int | float | str | None) -> str:
    """Return the text of a table's cell: thousands have commas, a missing value is empty."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,}"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def command_lines(command: str) -> str:
    """Return a command as a block of code, with long lines continued as a shell reads them."""
    # What stands in quotes is one word, in which a line cannot be continued.
    words = re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", command)
    lines = [f"    {words[0]}"]
    for word in words[1:]:
        if len(f"{lines[-1]} {word} \\") <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"        {word}")
    return " \\\n".join(lines)


def table(path: Path, content: dict[str, Any]) -> str:
    """Return what a page shows of a result: title, machine, date, commit, command and rows."""
    (result,) = content["results"]
    machine = content["machine"]
    measured = [machine[0].upper() + machine[1:], content["date"]]
    if result["commit"]:
        measured.append(f"commit {result['commit']}")
    source = f"([remarks](../benchmarks/results/{path.name}))"
    caption = f"{result['title']}. {', '.join(measured)} {source}:"

    lines = [
        textwrap.fill(caption, WIDTH, break_long_words=False, break_on_hyphens=False),
        "",
        command_lines(result["command"]),
        "",
        row(result["columns"]),
        row(["---"] * len(result["columns"])),
        *(row([cell(value) for value in values]) for values in result["rows"]),
    ]
    return "\n".join(lines)


def filled(page: str, directory: Path = RESULTS) -> str:
    """Return a page's text with the tables of today in their places."""

    def replacement(place: re.Match[str]) -> str:
        machine, name = place.groups()
        text = table(*newest(machine, name, directory))
        return f"<!-- results: {machine} {name} -->\n{text}\n<!-- end of results -->"

    return PLACE.sub(replacement, page)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
