"""`mtpkit demo`: the whole workflow on the tiny base, from real text to a speedup report."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mtpkit
from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.errors import MtpkitError, UserError
from mtpkit.files import check_destination

if TYPE_CHECKING:
    from mtpkit.bench.settings import SpeedupConfig
    from mtpkit.bench.speedup import SpeedupRow
    from mtpkit.training.config.settings import TrainConfig

app = new_app()

ROOT = Path(mtpkit.__file__).parent.parent
CONFIG = Path("examples/train_tiny.yaml")
OUTPUT = Path("outputs/demo")
TRAINING_MODULES = 200
"""Number of modules taken from the standard library's 1,400: more text than the demo's training
reads."""
LEAST_LENGTH = 1.8
"""Acceptance length that the heads must reach at the settings' own K = 3; the machine that was
tried reached 2.06."""
MARK = ".mtpkit-demo"
"""File that marks a directory as a demo's own, which the next demo may remove."""


@app.command(cls=Command)
def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help=f"Training settings that replace those of {CONFIG}."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help=(
                f"Directory for everything; an earlier demo in it is removed. By default {OUTPUT}"
                " in the checkout."
            )
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts that are decoded.")
    ] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")] = 32,
    as_json: options.PrintJson = False,
) -> None:
    """Train MTP heads on the tiny base, export and import them, and measure the speedup on held-out
    prompts."""
    out = (ROOT / OUTPUT if output is None else output).absolute()
    out = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    os.chdir(ROOT)  # the examples use paths relative to the checkout
    _check_place(out)
    import torch

    from mtpkit.bench.settings import SpeedupConfig
    from mtpkit.bench.shapes import read_prompts
    from mtpkit.bench.speedup import measure_speedup
    from mtpkit.engine import SamplingParams
    from mtpkit.training.config.reading import load_config

    # The matrices of the tiny base gain little from more threads, and threads that wait for one
    # another make timings depend on whatever else runs.
    torch.set_num_threads(1)
    corpus = out / "corpus"
    run = out / "run"
    hf = out / "hf"
    config = SpeedupConfig(repeats=1, sampling=SamplingParams(temperature=0, max_tokens=max_tokens))
    exact = replace(config, engine=replace(config.engine, dtype="float32"))
    paths = [
        f"output={run}",
        f"data.train=[{corpus / 'train.jsonl'}]",
        f"data.eval=[{corpus / 'heldout.jsonl'}]",
    ]
    settings = [*paths, *(overrides or ())]
    training = load_config(CONFIG, settings)
    # Wrong settings were refused above, while an earlier demo was still there.
    _start_over(out)
    with _stage("1/5 a corpus of the Python standard library's sources"):
        _call(
            [
                sys.executable,
                "examples/tiny_base/corpus.py",
                str(corpus),
                "--limit",
                str(TRAINING_MODULES),
            ]
        )
        prompts = read_prompts(corpus / "prompts.jsonl", num_prompts)
    with _stage("2/5 decoding with untrained heads"):
        before = _measure_untrained(training, prompts[:2], config)
    with _stage(f"3/5 training the heads, {training.steps} steps"):
        _train(training, settings)
    with _stage("4/5 conversion to the Hugging Face layout and back"):
        _convert(run, hf, out / "back")
    with _stage("5/5 decoding with the trained heads"):
        report = replace(measure_speedup(hf, prompts, exact), before=before)
    report.save(out)
    print(f"the report is in {out}: report.json, report.md, report.png")
    report.show(as_json)
    report.require_identical()
    # The least length is known for the settings of the file alone.
    if not overrides:
        _require_learnt(report.rows)


def _require_learnt(rows: "list[SpeedupRow]") -> None:
    """Refuse heads that learnt less than the same settings achieve on other machines.

    Raises:
        MtpkitError: the acceptance length is below `LEAST_LENGTH`.
    """
    reached = max(row.acceptance_length for row in rows)
    if reached < LEAST_LENGTH:
        raise MtpkitError(
            f"the heads reach an acceptance length of {reached:.2f}, where {LEAST_LENGTH} is the"
            " least: training or decoding goes wrong on this machine; run make test"
        )


def _check_place(out: Path) -> None:
    """Refuse to remove a directory that no demo made.

    Raises:
        UserError: the code is not in a checkout, or `out` cannot be a demo's directory.
    """
    if not CONFIG.exists():
        raise UserError(
            f"the demo needs a checkout of mtpkit, {ROOT} is none: clone the repository and run"
            " make demo"
        )
    check_destination(out, True, "a demo", [MARK])


def _start_over(out: Path) -> None:
    """Create `out` anew, removing its former contents, and mark it as a demo's."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()


@contextmanager
def _stage(title: str) -> Iterator[None]:
    """Announce a part of the work and say how long it took."""
    began = time.perf_counter()
    print(f"== {title}", flush=True)
    yield
    print(f"   {time.perf_counter() - began:.0f} s", flush=True)


def _call(command: list[str], **environment: str) -> None:
    """Run a command that shows its own progress and errors.

    Raises:
        MtpkitError: the command failed.
    """
    code = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    if code:
        raise MtpkitError(
            f"{shlex.join(command)} failed with exit code {code}; see its output above"
        )


def _measure_untrained(
    training: "TrainConfig", prompts: list, config: "SpeedupConfig"
) -> "list[SpeedupRow]":
    """Measure random heads: none of their drafts is right, and they change no output token."""
    from mtpkit.bench.speedup import measure_speedup
    from mtpkit.data.tokenizer import load_tokenizer
    from mtpkit.platform import default_device
    from mtpkit.training.heads import build_with_heads, resolve

    fresh = replace(training, heads=replace(training.heads, init="fresh"))
    model = build_with_heads(*resolve(fresh), default_device())
    only = replace(config, num_speculative_tokens=(training.heads.num_depths,), batch_size=(1,))
    report = measure_speedup(model, prompts, only, tokenizer=load_tokenizer(training.model))
    report.require_identical()
    return report.rows


def _train(training: "TrainConfig", settings: list[str]) -> None:
    """Train with one process per GPU or, without GPUs, per core: processes wait for one another
    less than threads."""
    import torch

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    data = training.data
    # A divisor, so that the batch keeps the size that the settings give it.
    ranks = max(
        n
        for n in range(1, (torch.cuda.device_count() or cores) + 1)
        if data.global_batch_size % n == 0
    )
    micro_batch = min(data.micro_batch_size, data.global_batch_size // ranks)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    command = [*launcher, "train/train_mtp.py", "--config", str(CONFIG), *settings]
    _call(
        [*command, f"data.micro_batch_size={micro_batch}"],
        OMP_NUM_THREADS=str(max(1, cores // ranks)),
    )


def _convert(run: Path, hf: Path, back: Path) -> None:
    """Export the run, import the result, and compare the tensors.

    Raises:
        MtpkitError: a tensor has changed.
    """
    from mtpkit.checkpoint.convert import import_checkpoint
    from mtpkit.checkpoint.verify import compare_weights
    from mtpkit.cli import convert

    convert.export(run, hf)
    import_checkpoint(hf, back)
    print(f"wrote {back}")
    result = compare_weights(run, back)
    if not result.identical:
        raise MtpkitError(f"converting {run} to {hf} and back to {back} changed tensors: {result}")
    print(f"{len(result.equal)} tensors are equal bit for bit after export and import")
