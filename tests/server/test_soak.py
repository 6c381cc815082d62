"""A minute of the soak, whose 20 minutes are run by hand, and what it would notice."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mtpkit
from benchmarks.soak import Case, Part, Report, compare, joined
from mtpkit.errors import MtpkitError
from tests.checkpoint.builders import add_heads

ROOT = Path(mtpkit.__file__).parent.parent


def test_a_minute_leaves_nothing(tmp_path):
    """With heads at random, whose drafts are verified and hardly ever right."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/tiny_base/model", model)
    add_heads(model, "*-")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--seconds", "60", "--model", model],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Each request once; a slow machine has no time for more.
    assert found["answer equal"] >= 20 and found["draft verified"] > 100


def test_another_answer_is_noticed():
    want = Part("a", "stop", (-0.5, -1.0))
    case = Case("/v1/completions", {}, [want])
    compare(case, [Part("a", "stop", (-0.5, -1.0001))])
    for other in (
        Part("b", "stop", want.log_probs),
        Part("a", "length", want.log_probs),
        Part("a", "stop", (-0.5, -1.1)),
        Part("a", "stop", (-0.5,)),
    ):
        with pytest.raises(MtpkitError, match="is not what LLM says"):
            compare(case, [other])


def test_streams_are_joined():
    chunks = [
        {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {"content": "c"}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"choices": []},
    ]
    assert joined(chunks, 2) == [Part("a", "length"), Part("bc", "stop")]
    text = {"index": 0, "text": "a", "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "x"}
    assert joined([{"choices": [text]}], 1) == [Part("a", "x", (-1.0,))]


def test_memory_that_grows_is_noticed():
    memory = {
        "flat": [9.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0],
        "grown": [1.0 * n for n in range(1, 9)],
    }
    growth = Report(memory=memory).growth
    assert growth["flat"] == 0 and growth["grown"] == 1
