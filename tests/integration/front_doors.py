"""Paths and calls of commands that the integration tests share."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from mtpkit.engine import SamplingParams

ROOT = Path(__file__).parents[2]
TINY_BASE = ROOT / "examples" / "tiny_base" / "model"
TOKENS, PROMPTS = 80, 16
"""Prompts that the heads are trained for, and the tokens that follow them."""
AHEAD = 2
"""Tokens beyond these, so that the K = 3 drafts of the last step lie in the text too."""


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def call(*command: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository, or a module, from its root."""
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, input=stdin)


def call_here(script: str, *arguments: object) -> object:
    """Run a script of the repository in this process, since starting one takes seconds; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as stop:
            return stop.code
    return 0
