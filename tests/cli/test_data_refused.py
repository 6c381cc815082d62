"""Data that commands refuse: one short line, exit code 2, nothing left behind; and commands that
messages suggest."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import typer

from mtpkit.cli.data import app
from mtpkit.cli.main import app as main_app
from mtpkit.data.prepared import read_manifest
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.training.config.reading import load_config
from tests.shared import told_length

ROWS = '{"text": "the cat sat on the mat, the cat sat on the mat"}\n' * 40


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def refuse(call, capsys):
    """The line on stderr of a command that is refused and leaves what was there."""

    def refuse(*args: object) -> str:
        before = sorted(str(path) for path in Path().rglob("*"))
        assert call(app, *args) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert line.startswith("mtpkit: error: ") and told_length(line) < 400 and not printed.out
        assert sorted(str(path) for path in Path().rglob("*")) == before
        return line

    return refuse


@pytest.fixture(scope="module")
def generated(tokenizer_dir) -> dict:
    row = {
        "prompt": "the cat",
        "completion": " sat",
        "prompt_token_ids": [5, 6],
        "completion_token_ids": [7, 8],
    }
    return {**row, "tokenizer": fingerprint(load_tokenizer(tokenizer_dir))}


def contents(generated: dict) -> dict[str, tuple[bytes, str]]:
    """Content and expected error of each file, by its name."""
    good = json.dumps(generated).encode() + b"\n"

    def tokens(value: object) -> bytes:
        return (
            good * 300 + json.dumps({**generated, "completion_token_ids": value}).encode() + b"\n"
        )

    table = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"text": ["a"] * 9}), table)
    whole = table.getvalue().to_pybytes()
    return {
        "fraction.jsonl": (tokens([5.5]), "fraction.jsonl:301: 'completion_token_ids' holds 5.5"),
        "large.jsonl": (tokens([99_999]), "large.jsonl:301: 'completion_token_ids' holds 99999"),
        "negative.jsonl": (tokens([-1]), "negative.jsonl:301: 'completion_token_ids' holds -1"),
        "huge.jsonl": (
            tokens([10**14]),
            "huge.jsonl:301: 'completion_token_ids' holds 100000000000000",
        ),
        "nested.jsonl": (tokens([[5]]), "nested.jsonl:301: 'completion_token_ids' holds [5]"),
        "blank.jsonl": (b"\n\n \n", "blank.jsonl has no rows"),
        "deep.jsonl": (
            b'{"text": ' + b"[" * 100_000,
            "deep.jsonl:1 cannot be read as JSON: it is nested too deeply",
        ),
        "cut.jsonl": (good + good[:40], "cut.jsonl:2 cannot be read as JSON"),
        "utf16.jsonl": (ROWS.encode("utf-16"), "utf16.jsonl:1 is not UTF-8 text"),
        "half.jsonl": (b'{"text": "\\ud800"}', "half.jsonl:1: column 'text' has"),
        "list.jsonl": (b"[1]\n", "list.jsonl:1 is not an object"),
        "cut.parquet": (whole[:-9], "cut.parquet cannot be read as parquet"),
        "no.parquet": (b"text", "no.parquet cannot be read as parquet"),
        "ragged.csv": (b"text,n\na\n", "ragged.csv:2 has 1 cell,"),
        "data.bin": (b"text", "data.bin is of an unknown kind"),
        "data.csv.gz": (b"text", "data.csv.gz is of an unknown kind"),
        "empty.jsonl": (b"", "empty.jsonl is empty"),
    }


def test_files_that_cannot_be_used(place, refuse, model_dir, generated) -> None:
    for name, (content, says) in contents(generated).items():
        Path(name).write_bytes(content)
        assert says in refuse(
            "prepare", "--model", model_dir, "--data", name, "--output", "new/out"
        )
        if "holds" not in says or "5" in says:
            assert says in refuse("inspect", "--model", model_dir, "--data", name)
            assert says in refuse(
                "draft-vocab",
                "--model",
                model_dir,
                "--data",
                name,
                "--output",
                "v.json",
                "--size",
                9,
            )
        Path(name).unlink()


def test_prompts_that_cannot_be_used(place, refuse, model_dir, generated) -> None:
    for name in (
        "blank.jsonl",
        "deep.jsonl",
        "cut.jsonl",
        "half.jsonl",
        "list.jsonl",
        "ragged.csv",
        "data.bin",
    ):
        content, says = contents(generated)[name]
        Path(name).write_bytes(content)
        options = ["--max-tokens", 1, "--prompt-length", 3]
        assert says in refuse(
            "regenerate", "--model", model_dir, "--data", name, "--output", "o.jsonl", *options
        )
        Path(name).unlink()


def test_a_process_of_its_own_ends_with_one_line_too(place, model_dir) -> None:
    """A reader in C may take the process with it."""
    Path("deep.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    command = [
        sys.executable,
        "-m",
        "mtpkit.cli.main",
        "data",
        "prepare",
        "--model",
        str(model_dir),
    ]
    done = subprocess.run(
        [*command, "--data", "deep.jsonl", "--output", "out"], capture_output=True, text=True
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (
        2,
        1,
    ) and "nested too deeply" in done.stderr
    assert [path.name for path in place.iterdir()] == ["deep.jsonl"]


@pytest.mark.parametrize(
    "output", ["loop", "loop/out", "gone", "file.txt", "file.txt/out", "", ".", "mine", ".."]
)
def test_outputs_that_cannot_be_written(place, refuse, model_dir, output) -> None:
    Path("a.jsonl").write_text(ROWS)
    Path("file.txt").write_text("a")
    os.symlink("loop", "loop")
    os.symlink("nowhere", "gone")
    Path("mine/deep").mkdir(parents=True)
    for force in ([], ["--force"]):
        assert "output" in refuse(
            "prepare", "--model", model_dir, "--data", "a.jsonl", "--output", output, *force
        )
    if output not in ("file.txt", ".."):
        data = ["--model", model_dir, "--data", "a.jsonl", "--output", output]
        assert "output" in refuse("draft-vocab", *data, "--size", 9)
        assert "output" in refuse("regenerate", *data, "--prompt-length", 3)


def test_refused_late_nothing_is_left(place, refuse, model_dir) -> None:
    Path("a.jsonl").write_text(ROWS)
    Path("b.jsonl").write_text(ROWS + "5\n")
    data = ["a.jsonl", "b.jsonl"]
    refuse(
        "prepare",
        "--model",
        model_dir,
        "--data",
        *data,
        "--output",
        "x/y/out",
        "--sequence-length",
        32,
    )
    Path("x").mkdir()
    refuse("prepare", "--model", model_dir, "--data", "b.jsonl", "--output", "x/y/out")
    assert Path("x").is_dir()


def test_an_output_that_is_a_link_to_prepared_data(place, call, model_dir) -> None:
    Path("a.jsonl").write_text(ROWS)
    options = ["--model", model_dir, "--data", "a.jsonl", "--sequence-length", 32]
    assert call(app, "prepare", *options, "--output", "real") == 0
    os.symlink("real", "out")
    assert call(app, "prepare", *options, "--output", "out", "--force") == 0
    assert sorted(path.name for path in place.iterdir()) == ["a.jsonl", "out", "real"]
    assert Path("out").is_symlink() and read_manifest(Path("out")) == read_manifest(Path("real"))


def sources(printed: str) -> list[str]:
    return [line.split()[0] for line in printed.splitlines() if re.search(r"\d%\s+\d", line)]


def test_names_of_sources_are_printed_whole(place, call, model_dir, capsys, monkeypatch) -> None:
    """In 80 columns, and as they are, not as markup."""
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"part-0000{number}-of-00010/train[data]-of-the-second-half" for number in (1, 2)]
    for name in names:
        Path(name).parent.mkdir()
        Path(f"{name}.jsonl").write_text(ROWS)
    data = [f"{name}.jsonl" for name in names]
    assert call(app, "inspect", "--model", model_dir, "--data", *data, "--sequence-length", 32) == 0
    printed = capsys.readouterr().out.splitlines()
    first = "".join(line[2:].split(" ")[0] for line in printed)
    assert all(one.removesuffix(".jsonl") in first for one in data), printed


def test_sources_of_one_name_are_kept_apart(place, call, model_dir, capsys) -> None:
    for name in ("a/x", "b/x", "c/a/x"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{name}.jsonl").write_text(ROWS)
    Path("a/x.txt").write_text("the cat sat on the mat " * 20)
    data = ["a/x.jsonl", "b/x.jsonl", "c/a/x.jsonl", "a/x.txt", "y=a/*.md"]
    Path("a/y.md").write_text("the cat sat on the mat " * 20)
    assert call(app, "inspect", "--model", model_dir, "--data", *data, "--sequence-length", 32) == 0
    found = sources(capsys.readouterr().out)
    assert found == [f"{place.name}/a/x.jsonl", "b/x.jsonl", "c/a/x.jsonl", "x.txt", "y"]
    for name in ("one", "two"):
        options = ["--data", "a/x.txt", "a/y.md", "--output", name, "--sequence-length", 32]
        assert call(app, "prepare", "--model", model_dir, *options) == 0
    capsys.readouterr()
    assert (
        call(
            app, "inspect", "--model", model_dir, "--data", "one", "two", "b/x.jsonl", "y=a/x.jsonl"
        )
        == 0
    )
    assert sources(capsys.readouterr().out) == ["one/x", "one/y", "two/x", "two/y", "x", "y"]
    # One name that was given is one source.
    assert (
        call(app, "inspect", "--model", model_dir, "--data", "one", "z=b/x.jsonl", "z=a/x.jsonl")
        == 0
    )
    assert sources(capsys.readouterr().out) == ["x", "y", "z"]


def test_what_is_named_twice_is_said(place, call, model_dir, capsys, caplog) -> None:
    Path("d").mkdir()
    Path("d/a.jsonl").write_text(ROWS)
    os.symlink("a.jsonl", "d/b.jsonl")
    options = ["--model", model_dir, "--sequence-length", 32]
    assert call(app, "prepare", *options, "--data", "d/a.jsonl", "--output", "out") == 0
    for data in (
        ["d/a.jsonl"] * 2,
        ["d/a.jsonl", place / "d" / "a.jsonl"],
        ["d/a.jsonl", "d"],
        ["d/*.jsonl"],
        ["out"] * 2,
    ):
        caplog.clear()
        capsys.readouterr()
        assert call(app, "inspect", *options, "--data", *data) == 0
        assert "documents          │    40" in capsys.readouterr().out
        assert (
            "named more than once, and read once" in caplog.text
            and str(data[-1])[-3:] in caplog.text + "*.jsonl"
        )
    caplog.clear()
    assert (
        call(app, "inspect", *options, "--data", "d/a.jsonl") == 0
        and "more than once" not in caplog.text
    )


def test_prepared_data_knows_its_sequence_length(place, call, refuse, model_dir, capsys) -> None:
    Path("a.jsonl").write_text(ROWS)
    Path("b.jsonl").write_text(ROWS * 3)
    for length in (32, 48):
        options = ["--output", f"out{length}", "--sequence-length", length]
        assert call(app, "prepare", "--model", model_dir, "--data", "a.jsonl", *options) == 0
    capsys.readouterr()
    for data, length in ((["out32"], 32), (["out48", "a.jsonl"], 48), (["b.jsonl"], 1024)):
        code = call(app, "inspect", "--model", model_dir, "--data", *data)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        assert f"packed to {length} tokens" in printed.out
    assert "different lengths" in refuse(
        "inspect", "--model", model_dir, "--data", "out32", "out48"
    )


def test_csv_is_trained_on_by_columns(place, call, model_dir, capsys) -> None:
    Path("a.csv").write_text("id,prompt,response\n" + '7,"the cat, ","sat on\nthe mat"\n' * 40)
    assert (
        call(
            app,
            "prepare",
            "--model",
            model_dir,
            "--data",
            "a.csv",
            "--output",
            "out",
            "--sequence-length",
            32,
        )
        == 0
    )
    assert "documents          │    40" in capsys.readouterr().out


def parse(command: str) -> None:
    """Let the command line's own parser read a command that a message suggests."""
    name, *words = shlex.split(command)
    assert name == "mtpkit"
    group: typer.core.TyperGroup = typer.main.get_command(main_app)  # type: ignore[assignment]
    context = group.make_context("mtpkit", list(words), resilient_parsing=False)
    while isinstance(context.command, typer.core.TyperGroup):
        name, found, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("folder", ["plain", "with space, [x] and 'quote'"])
def test_the_commands_that_are_suggested_work(place, call, model_dir, capsys, folder) -> None:
    Path(folder).mkdir()
    Path("prompts.jsonl").write_text('{"prompt": "the cat"}\n' * 40)
    Path("t.jinja").write_text("{{ messages }}")
    options = [
        "--data",
        "prompts.jsonl",
        "--max-tokens",
        12,
        "--ignore-eos",
        "--chat-template",
        "t.jinja",
    ]
    assert (
        call(
            app, "regenerate", "--model", model_dir, *options, "--output", f"{folder}/answers.jsonl"
        )
        == 0
    )
    command = capsys.readouterr().out.splitlines()[-1].split("prepare them with ", 1)[1]
    parse(command)
    assert call(app, *shlex.split(command)[2:], "--sequence-length", 16) == 0
    settings = shlex.split(capsys.readouterr().out.splitlines()[-1].split("train with ", 1)[1])
    config = load_config(None, [f"model={model_dir}", "output=run", *settings])
    assert (
        config.data.train == (f"{folder}/answers-prepared",) and config.data.sequence_length == 16
    )


def test_a_command_that_lacks_an_option_does_not_parse() -> None:
    with pytest.raises(typer.TyperException):
        parse("mtpkit data prepare --data answers.jsonl")


@pytest.mark.parametrize(
    ("command", "option", "value", "says"),
    [
        ("regenerate", "--turns", "first", "'first' is not one of 'last', 'all'."),
        ("regenerate", "--dtype", "int8", "'int8' is not one of 'auto', 'float32', 'bfloat16'."),
    ],
)
def test_values_that_options_do_not_take(
    place, refuse, model_dir, command, option, value, says
) -> None:
    output = [] if command == "inspect" else ["--output", "out"]
    line = refuse(command, "--model", model_dir, "--data", "a.jsonl", *output, option, value)
    assert line == f"mtpkit: error: Invalid value for '{option}': {says} (see --help)"
