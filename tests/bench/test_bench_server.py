"""`benchmarks.server`: what its client counts, with the engine that computes nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import mtpkit

ROOT = Path(mtpkit.__file__).parent.parent


def measured(completions: int, more: str) -> dict[str, float]:
    """The figures of a small server with a stub."""
    words = "stub --tokenizer examples/tiny_base/model --streams 4 --pace 0.01 --prompt-length 16"
    words += f" --max-tokens 8 --completions {completions} {more}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.server", *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["rows"]["server"]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_server_with_a_stub_is_measured(tokens):
    # So many that each process takes several of the 10 ms that processor time is counted in.
    row = measured(80, f"--tokens-per-step {tokens}")
    # A stream has one chunk per step, and the last one may have fewer tokens. Beside other work the
    # server may find the tokens of two steps and send them as one chunk.
    assert 1 <= row["tokens/s"] / row["chunks/s"] < 2 * tokens
    # No stream is faster than the stub.
    assert 0 < row["chunks/s"] <= 4 / 0.01
    assert row["between chunks, ms"] > 5
    assert all(row[f"{name}, us per chunk"] > 0 for name in ("server", "engine", "client"))


def test_completions_are_due_at_a_rate():
    """12 completions of 8 tokens in the mean at 10 per second: streams could give 400 tokens/s."""
    assert 40 < measured(12, "--request-rate 10")["tokens/s"] < 160


def test_a_stub_outlives_clients_that_leave():
    words = "examples/tiny_base/model --pace 0.01 --tokens-per-step 1 --max-num-seqs 4"
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.server.serve_stub", *words.split()],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        url = next(
            found[1] for line in server.stderr if (found := re.search(r"on (http\S+)", line))
        )
        body = {"prompt": "a", "max_tokens": 1000}
        with httpx.Client(base_url=url) as client:
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as dropped:
                next(dropped.iter_lines())
            answer = client.post("/v1/completions", json=body | {"max_tokens": 5})
            assert answer.json()["usage"]["completion_tokens"] == 5
    finally:
        server.terminate()
        server.communicate(timeout=60)
