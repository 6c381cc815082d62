"""Measure what quantising a base costs: how far its own outputs move, and how often it accepts the
drafts of heads that were trained on the bf16 base, and of heads trained on the quantised one.

    python -m benchmarks.quantized OUTPUT                                    # the tiny base
    python -m benchmarks.quantized OUTPUT --base MIXTURE     # made by train_base.py --mixture

Copies of the base are quantised as published checkpoints are: linears and experts, not embedding,
lm_head, routers and convolutions. Where files give scales of inputs, they are the largest inputs in
some training texts, divided by 448. Heads stay in bf16. KL divergence from the bf16 base and the
share of tokens with the same most probable token are means over held-out text; acceptance lengths
are those of `mtpkit acceptance`, greedy, with its intervals. Training and acceptance run on a GPU
where there is one; the divergence is computed on the CPU.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quantized.write import copies, group_of, write_copy
from mtpkit.bench.machine import commit, describe_device
from mtpkit.checkpoint.directory import HFDirectory, load_config
from mtpkit.checkpoint.load import load_model
from mtpkit.checkpoint.stitch import stitch
from mtpkit.cli.errors import run
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError, listed
from mtpkit.files import write_file
from mtpkit.model import SequenceInput, base_forward, compute_logits, normed_states
from mtpkit.platform import default_device

_TEXTS = 12
"""Held-out texts for the KL divergence, and training texts for scales of inputs."""
_LENGTH = 512
"""Tokens of each."""


def main() -> None:
    """Write the copies, train heads on each, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path, help="a new directory for corpus, copies and runs")
    parser.add_argument("--base", type=Path, default=Path("examples/tiny_base/model"))
    parser.add_argument("--steps", type=int, help="training steps; by default the example's")
    parser.add_argument("--only", nargs="+", help="names of copies; by default all")
    options = parser.parse_args()
    source = HFDirectory(options.base)
    group = group_of(source)
    chosen = copies(group)
    if options.only is not None:
        if unknown := {*options.only} - chosen.keys():
            raise UserError(f"no copy is called {listed(sorted(unknown))}: name {listed(chosen)}")
        chosen = {name: chosen[name] for name in options.only}
    if options.output.exists():
        raise UserError(f"{options.output} exists: name a new directory")
    options.output.mkdir(parents=True)
    corpus = options.output / "corpus"
    _python(options.output, "examples/tiny_base/corpus.py", corpus, "--limit", 200)
    bases = {"bf16": options.base}
    for name, copy in chosen.items():
        bases[name] = options.output / "bases" / name.replace(" ", "_")
        write_copy(source, copy, bases[name], read_texts(corpus / "train.jsonl", options.base))

    texts = read_texts(corpus / "heldout.jsonl", options.base)
    logits = log_probs(options.base, texts)
    rows = {}
    for name, base in bases.items():
        moved = compare(logits, log_probs(base, texts))
        trained = _train(options.output, name, base, options.steps)
        own = _acceptance(options.output, trained)
        given = own
        if name != "bf16":
            joined = options.output / "stitched" / name.replace(" ", "_")
            stitch(base, options.output / "runs" / "bf16", joined)
            given = _acceptance(options.output, joined)
        rows[name] = {**moved, "bf16 heads": given, "own heads": own}
        print(name, json.dumps(rows[name]), flush=True)
    result = {
        "base": str(options.base),
        "steps": options.steps,
        "columns of a group of int4": group,
        "device": describe_device(default_device()),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "rows": rows,
    }
    write_file(options.output / "quantized.json", json.dumps(result, indent=2) + "\n")


def _python(output: Path, *words: object) -> str:
    """Run a script with this Python, and return what it printed.

    Raises:
        UserError: it failed.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"{' '.join(map(str, words))} failed, see above; {output} is incomplete")
    return done.stdout


def read_texts(path: Path, base: Path) -> Tensor:
    """Tokens [texts, length] of the first texts that are long enough.

    Raises:
        UserError: too few are.
    """
    tokenizer = load_tokenizer(base)
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[list[int]] = []
    for line in lines:
        ids = tokenizer.encode(json.loads(line)["text"])
        if len(ids) >= _LENGTH and len(found) < _TEXTS:
            found.append(ids[:_LENGTH])
    if len(found) < _TEXTS:
        raise UserError(f"{path}: {len(found)} texts of {_LENGTH} tokens instead of {_TEXTS}")
    return torch.tensor(found)


@torch.inference_mode()
def log_probs(base: Path, texts: Tensor) -> Tensor:
    """Log probabilities [texts, length, vocabulary] in fp32."""
    model = load_model(base)
    found = []
    for text in texts:
        hidden = base_forward(model, text[None], SequenceInput())
        found.append(compute_logits(model, normed_states(model, hidden))[:, 0].log_softmax(-1))
    return torch.stack(found)


def compare(first: Tensor, second: Tensor) -> dict[str, float]:
    """How far the second log probabilities are from the first."""
    divergence = (first.exp() * (first - second)).sum(-1).mean()
    same = (first.argmax(-1) == second.argmax(-1)).float().mean()
    return {"KL": float(divergence), "same token": float(same)}


def _train(output: Path, name: str, base: Path, steps: int | None) -> Path:
    """Train heads on a base with the example's settings, and return the run."""
    trained = output / "runs" / name.replace(" ", "_")
    corpus = output / "corpus"
    settings = [
        f"model={base}",
        f"output={trained}",
        f"data.train=[{corpus / 'train.jsonl'}]",
        f"data.eval=[{corpus / 'heldout.jsonl'}]",
    ]
    if "-" not in load_config(base).pattern:
        # The example's heads have an MLP as its base does.
        settings.append("heads.pattern=auto")
    if steps is not None:
        settings += [f"steps={steps}", f"eval_interval={steps}", f"save_interval={steps}"]
    _python(output, "train/train_mtp.py", "--config", "examples/train_tiny.yaml", *settings)
    return trained


def _acceptance(output: Path, model: Path) -> list[float]:
    """The greedy acceptance length on held-out text, and its interval."""
    heldout = output / "corpus" / "heldout.jsonl"
    words = ("--model", model, "--data", heldout, "--sequence-length", 512, "--dtype", "float32")
    printed = _python(output, "-m", "mtpkit.cli.main", "acceptance", *words, "--num-sequences", 64)
    found = json.loads(printed.splitlines()[-1])
    return [found["acceptance_length"], *found["acceptance_length_interval"]]


if __name__ == "__main__":
    run(main)
