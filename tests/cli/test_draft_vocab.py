"""`mtpkit data draft-vocab`: a file the engine takes, or one line that says why not."""

import pytest

from mtpkit.cli.data import app
from mtpkit.data.draft_vocab import load_draft_vocab


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat\n" * 20)
    return path


def test_a_file_is_written_and_replaced(model_dir, text, call, capsys, tmp_path):
    output = tmp_path / "vocab.json"
    for size in (40, 12):
        arguments = (
            "--model",
            model_dir,
            "--data",
            text,
            tmp_path / "*.txt",
            "--size",
            size,
            "--output",
            output,
        )
        assert call(app, "draft-vocab", *arguments) == 0
        ids = load_draft_vocab(output, 300)
        assert len(ids) == size and 0 in ids
    assert "12 of 300 tokens, which cover 100.00% of the data" in " ".join(
        capsys.readouterr().out.split()
    )
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "vocab.json"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--size": 301}, "size is 301, must be 1 to 300"),
        ({"--data": "nowhere"}, "nowhere does not exist"),
        ({"--model": "nowhere"}, "nowhere: no such model directory"),
        ({"--output": "missing/vocab.json"}, "must be a file in a directory that exists"),
    ],
)
def test_errors_are_one_line(model_dir, text, call, capsys, tmp_path, change, message):
    options = {
        "--model": model_dir,
        "--data": text,
        "--size": 20,
        "--output": tmp_path / "vocab.json",
    } | change
    assert call(app, "draft-vocab", *(part for option in options.items() for part in option)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mtpkit: error: ") and message in line
    assert not (tmp_path / "vocab.json").exists()


def test_the_help_says_what_it_is_for(call, capsys):
    assert call(app, "draft-vocab", "--help") == 0
    assert "coverage" in capsys.readouterr().out
