"""Exit codes and the one line on stderr, seen from outside the process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = """
import errno, os, signal, sys, typer
from mtpkit.cli import run
from mtpkit.errors import *
# A parent in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
ENTRIES = {
    "function": "def job():\n    {body}\nrun(job)\n",
    "typer": "app = typer.Typer()\n@app.command()\ndef job():\n    {body}\nrun(app)\n",
}


def python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("pass", 0, None),
        (
            "raise UserError('k is -1;\\n  give 0 or more')",
            2,
            "mtpkit: error: k is -1; give 0 or more",
        ),
        ("raise MtpkitError('lost')", 1, "mtpkit: error: lost"),
        (
            "raise StorageError('cannot write x: disk full')",
            1,
            "mtpkit: error: cannot write x: disk full",
        ),
        (
            "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'out.bin')",
            1,
            "mtpkit: error: out.bin: No space left on device; free some space and run again",
        ),
        ("open('/nowhere/x')", 1, "mtpkit: error: /nowhere/x: No such file or directory"),
        ("os.kill(os.getpid(), signal.SIGINT)", 128 + signal.SIGINT, "mtpkit: interrupted"),
    ],
)
def test_exit_code_and_line(entry: str, body: str, code: int, line: str | None) -> None:
    done = python("-c", PREAMBLE + ENTRIES[entry].format(body=body))
    assert done.returncode == code
    assert done.stderr.splitlines() == ([line] if line else [])


def test_traceback_on_request() -> None:
    code = PREAMBLE + ENTRIES["function"].format(body="raise UserError('wrong')")
    done = python("-c", code, MTPKIT_TRACEBACK="1")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("mtpkit: error: wrong\n")


def test_a_bug_keeps_its_traceback() -> None:
    done = python("-c", PREAMBLE + ENTRIES["typer"].format(body="raise KeyError('bug')"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "KeyError: 'bug'" in done.stderr


def test_a_group_without_a_command_prints_its_help() -> None:
    commands = "".join(f"@app.command()\ndef {name}(): ...\n" for name in "ab")
    done = python("-c", f"{PREAMBLE}app = typer.Typer(no_args_is_help=True)\n{commands}run(app)")
    assert done.returncode == 2 and "Usage:" in done.stdout and "error" not in done.stderr


def test_output_into_a_closed_pipe_is_quiet() -> None:
    body = "[print('x' * 1000) for _ in range(1000)]"
    command = [sys.executable, "-c", PREAMBLE + ENTRIES["function"].format(body=body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["dat"], "No such command 'dat'. Did you mean 'data'? (see --help)"),
        (["--wrong"], "No such option: --wrong"),
        (["data", "inspect"], "Missing option '--model'"),
        (
            ["data", "inspect", "--model", "m", "--data", "d", "--sequence-length", "x"],
            "'--sequence-length'",
        ),
        (
            ["data", "inspect", "--model", "nowhere", "--data", "d"],
            "model directory nowhere does not exist",
        ),
    ],
)
def test_wrong_command_lines(args: list[str], message: str) -> None:
    done = python("-m", "mtpkit.cli.main", *args)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("mtpkit: error: ") and message in line


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys; from mtpkit.cli.main import main\ntry: main()\nfinally: print('torch' in"
        " sys.modules)"
    )
    for args, text in (
        ([], "Commands"),
        (["--help"], "Commands"),
        (["--version"], "mtpkit 0.1.0"),
        (["data", "regenerate", "--help"], "--text-column"),
        (["acceptance", "--help"], "--text-column"),
    ):
        done = python("-c", code, *args)
        assert done.returncode == 0 and done.stderr == ""
        assert text in done.stdout and done.stdout.endswith("False\n")


def test_data_inspect(tmp_path: Path, tokenizer_dir: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("the cat sat on the mat\n" * 20)
    args = [
        "data",
        "inspect",
        "--model",
        str(tokenizer_dir),
        "--data",
        *map(str, files),
        "--sequence-length",
        "32",
    ]
    done = python("-m", "mtpkit.cli.main", *args)
    assert done.returncode == 0, done.stderr
    cells = [
        line.strip("│ ").split("│") for line in done.stdout.splitlines() if line.startswith("│")
    ]
    counts = {name.strip(): count.strip() for name, count in cells}
    assert counts["documents"] == "2" and counts["masked share"] == "0.0%"
    assert float(counts["fill ratio"].rstrip("%")) > 50


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_an_encoding_lacks_is_no_failure(encoding):
    code = PREAMBLE + ENTRIES["function"].format(body="print('a \\ufffd \\u20ac')")
    done = python("-c", code, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a \\ufffd \\u20ac\n", "")


def test_a_name_that_is_no_text_is_shown_with_its_bytes():
    """The text goes to stdout in a C locale, or is part of an error."""
    code = PREAMBLE + ENTRIES["function"].format(
        body="print('caf\\udce9'); raise UserError('caf\\udce9')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:surrogateescape"},
    )
    assert (done.returncode, done.stdout) == (2, b"caf\xe9\n")
