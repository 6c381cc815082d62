"""Paths and calls of commands that the integration tests share."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mtpkit.engine import SamplingParams
from tests.ranks import fork

ROOT = Path(__file__).parents[2]
TINY_BASE = ROOT / "examples" / "tiny_base" / "model"
TOKENS = 80
PROMPTS = 16
"""Prompts that the heads are trained for, and the tokens that follow them."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def call(*command: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository, or a module, from its root."""
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, check=False, input=stdin
    )


def call_in_fork(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of Python with a script of the repository, or a module, without the seconds
    of imports."""
    with tempfile.NamedTemporaryFile("r+") as printed:
        process = fork(_run, command[1:], printed.name)
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, printed.read(), "")


def _run(arguments: list[str], printed: str) -> None:
    for stream in (1, 2):
        os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(ROOT)
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    (runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name="__main__")


def call_here(script: str, *arguments: object) -> object:
    """Run a script of the repository in this process, since starting one takes seconds; returns its
    exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as stop:
            return stop.code
    return 0
