"""The dated results in benchmarks/results have the form that their README describes."""

import json
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = sorted(DIRECTORY.glob("*.json"))


def test_there_are_results():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
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
