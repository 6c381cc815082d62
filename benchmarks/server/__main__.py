"""Measure what a server costs beside its engine.

    python -m benchmarks.server nemotron-h-8b --tokenizer DIR     # on a GPU
    python -m benchmarks.server stub --tokenizer DIR              # an engine that computes nothing

The same completions, of random prompts, are decoded by `LLM.generate`, by `AsyncLLM` and by
`mtpkit serve`, one after the other, each in a process of its own. The client of the server has
another process. `AsyncLLM` and the server get the next completion whenever one has ended, so that
`--streams` of them are under way. Outputs have different lengths, so that prompts come all the
time. With `--request-rate` completions are due at random times, the same for both, which is what
times of first tokens are compared with: without it each waits for an output that has just ended,
and a moment decides whether its prompt joins the next step.

The stub tells each request some tokens every `--pace` seconds. With it, the processor time per
chunk is what counts: it does not depend on what else the machine does, as long as that leaves some.
"""

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.server.client import Completion, Job, Report
from mtpkit.bench.machine import commit
from mtpkit.cli.errors import run
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError

_STUB = "stub"
_BYTES = 256
"""First tokens of vocabularies, which prompts are not made of: bytes and markers."""


def main() -> None:
    """Measure, print a line for each, and JSON last."""
    options = _parser().parse_args()
    engine = {
        "num_speculative_tokens": options.num_speculative_tokens,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.streams,
        "enable_prefix_caching": False,
    }
    engine = {name: value for name, value in engine.items() if value is not None}
    completions = _completions(options)
    warm_up = [{**one, "max_tokens": 16, "due": 0.0} for one in completions[: options.streams]]
    rows = {}
    if options.model != _STUB:
        for kind in ("generate", "async"):
            job = {
                "kind": kind,
                "model": options.model,
                "tokenizer": str(options.tokenizer),
                "engine": engine,
                "streams": options.streams,
                "warm_up": warm_up,
                "completions": completions,
            }
            rows[kind] = _summary(_child("benchmarks.server.local", job))
            print(f"{kind:9}{_line(rows[kind])}", flush=True)
    rows["server"] = _serve(options, engine, warm_up, completions)
    print(f"{'server':9}{_line(rows['server'])}")
    result: dict[str, Any] = {
        "model": options.model,
        "streams": options.streams,
        "request_rate": options.request_rate,
        "engine": engine,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "rows": rows,
    }
    if options.model != _STUB:
        result["tokens/s of generate's"] = rows["server"]["tokens/s"] / rows["generate"]["tokens/s"]
        result["first token, ms over async"] = (
            rows["server"]["first token, ms"] - rows["async"]["first token, ms"]
        )
    print(json.dumps(result))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a shape, a model directory, or stub")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer's directory")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=256, help="mean tokens of an output")
    parser.add_argument("--request-rate", type=float, help="completions that are due per second")
    parser.add_argument("--num-speculative-tokens", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of a stub's step")
    parser.add_argument("--tokens-per-step", type=int, default=1, help="of a stub, per request")
    return parser


def _completions(options: argparse.Namespace) -> list[Completion]:
    rng = random.Random(0)
    last = len(load_tokenizer(options.tokenizer)) - 1
    mean = options.max_tokens
    completions = [
        Completion(
            prompt=[rng.randint(_BYTES, last) for _ in range(options.prompt_length)],
            max_tokens=rng.randint(max(1, mean // 2), mean + mean // 2),
            due=0.0,
        )
        for _ in range(options.completions)
    ]
    if options.request_rate is not None:
        due = 0.0
        for one in completions:
            due += rng.expovariate(options.request_rate)
            one["due"] = due
    return completions


def _child(module: str, job: object) -> Any:
    """What a module prints for a job, in a process of its own.

    Raises:
        UserError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"{module} failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def _serve(
    options: argparse.Namespace,
    engine: dict[str, Any],
    warm_up: Sequence[Completion],
    completions: list[Completion],
) -> dict[str, float]:
    """Measure a server."""
    if options.model == _STUB:
        words = ["-m", "benchmarks.server.serve_stub", str(options.tokenizer)]
        words += [f"--pace={options.pace}", f"--tokens-per-step={options.tokens_per_step}"]
        words += [f"--max-num-seqs={options.streams}"]
    else:
        words = ["-m", "mtpkit.cli.main", "serve", options.model, "--port=0"]
        words += [f"--tokenizer={options.tokenizer}"]
        words += [_flag(name, value) for name, value in engine.items()]
    server = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    try:
        url = _url(server)
        _child(
            "benchmarks.server.client",
            Job(url=url, streams=options.streams, completions=[*warm_up]),
        )
        process = psutil.Process(server.pid)
        engine_and_helpers = process.children(recursive=True)
        before = (_cpu([process]), _cpu(engine_and_helpers))
        report: Report = _child(
            "benchmarks.server.client",
            Job(url=url, streams=options.streams, completions=completions),
        )
        after = (_cpu([process]), _cpu(engine_and_helpers))
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    finally:
        server.kill()
        server.wait()
    per_chunk = 1e6 / report["chunks"]
    return {
        **_summary(report),
        "server, us per chunk": (after[0] - before[0]) * per_chunk,
        "engine, us per chunk": (after[1] - before[1]) * per_chunk,
        "client, us per chunk": report["cpu"] * per_chunk,
    }


def _flag(name: str, value: Any) -> str:
    """An option of a command."""
    option = name.replace("_", "-")
    return f"--no-{option}" if value is False else f"--{option}={value}"


def _url(server: subprocess.Popen[str]) -> str:
    """Wait until a server listens; where."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"serving .* on (http://\S+)", line):
            return found[1]
        print(line, end="", file=sys.stderr)
    raise UserError("the server did not start, see above")


def _cpu(processes: Sequence[psutil.Process]) -> float:
    """Seconds of processor time."""
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def _summary(report: Report) -> dict[str, float]:
    """The figures of a run. `LLM.generate` has no times of tokens."""
    found = {"tokens/s": report["tokens"] / report["seconds"]}
    if report["first"]:
        gaps = sorted(report["gaps"])
        found |= {
            "chunks/s": report["chunks"] / report["seconds"],
            "first token, ms": 1e3 * median(report["first"]),
            "between chunks, ms": 1e3 * median(gaps),
            "between chunks, p99, ms": 1e3 * gaps[len(gaps) * 99 // 100],
        }
    return found


def _line(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in row.items())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(main)
