"""The dated results in benchmarks/results have the form that their README describes, and the tables
of docs/performance.md are those of the newest files."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.results.tables import PAGE, PLACE, WIDTH, command_lines, filled
from tests.shared import each

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = sorted(DIRECTORY.glob("*.json"))


def test_there_are_results():
    assert FILES


@each("path", FILES)
def test_a_file_has_the_form_of_the_readme(path):
    content = json.loads(path.read_text())
    assert [*content] == ["date", "machine", "results"]
    assert path.stem.startswith(f"{content['date']}_")
    names = [result["name"] for result in content["results"]]
    assert len(names) == len(set(names)) > 0
    for result in content["results"]:
        assert [*result] == ["name", "title", "command", "commit", "columns", "rows", "notes"]
        assert result["commit"] is None or isinstance(result["commit"], str)
        assert result["rows"], result["name"]
        for row in result["rows"]:
            assert len(row) == len(result["columns"]), (result["name"], row)
            assert all(cell is None or isinstance(cell, int | float | str) for cell in row)
        assert all(isinstance(note, str) for note in result["notes"])


def test_the_page_has_the_tables_of_today():
    page = PAGE.read_text()
    assert len(PLACE.findall(page)) == page.count("<!-- results:") > 10
    assert page == filled(page), "run python benchmarks/results/tables.py"


def test_the_page_has_no_other_tables():
    assert "| ---" not in PLACE.sub("", PAGE.read_text())


@pytest.mark.parametrize("option", ["--batch-size 1 16", "key=value", "--name 'two words'"])
def test_a_long_command_is_continued_as_a_shell_reads_it(option):
    command = " ".join(["mtpkit bench toy", *[option] * 20])
    text = command_lines(command)
    lines = text.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH
    assert shlex.split(text.replace("\\\n", "")) == shlex.split(command)


def test_a_short_command_stays_on_its_line():
    assert command_lines("mtpkit bench toy --k 3") == "    mtpkit bench toy --k 3"


RESULT = {
    "name": "speed",
    "title": "Tokens/s of a toy",
    "command": "mtpkit bench toy",
    "commit": "abc",
    "columns": ["batch", "tokens/s", "share"],
    "rows": [[1, 1234.5, "9%"], [1024, 7, None]],
    "notes": [],
}


def write_results(directory, date, machine, **changed):
    content = {"date": date, "machine": "one toy", "results": [RESULT | changed]}
    (directory / f"{date}_{machine}.json").write_text(json.dumps(content))


def test_a_place_gets_the_newest_result_of_its_machine(tmp_path):
    write_results(tmp_path, "2026-01-02", "toy")
    write_results(tmp_path, "2026-01-01", "toy", rows=[[1, 1, "1%"]])
    write_results(tmp_path, "2026-01-03", "toy-x2", rows=[[2, 2, "2%"]])
    write_results(tmp_path, "2026-01-04", "toy", name="others")

    page = "a\n<!-- results: toy speed -->\nold\n<!-- end of results -->\nb\n"
    new = filled(page, tmp_path)
    assert new.splitlines() == [
        "a",
        "<!-- results: toy speed -->",
        "Tokens/s of a toy. One toy, 2026-01-02, commit abc"
        " ([remarks](../benchmarks/results/2026-01-02_toy.json)):",
        "",
        "    mtpkit bench toy",
        "",
        "| batch | tokens/s | share |",
        "| --- | --- | --- |",
        "| 1 | 1,234.5 | 9% |",
        "| 1,024 | 7 |  |",
        "<!-- end of results -->",
        "b",
    ]
    assert filled(new, tmp_path) == new


def test_a_place_without_a_result_is_an_error(tmp_path):
    page = "<!-- results: toy speed -->\n<!-- end of results -->\n"
    with pytest.raises(LookupError, match="has no result speed of toy"):
        filled(page, tmp_path)
