"""Measure how training settings change acceptance: losses, attention and data at equal steps, one
row each.

    python examples/tiny_base/corpus.py outputs/corpus
    python examples/ablations.py --corpus outputs/corpus --output outputs/ablations --jobs 8

All heads of the tiny base start alike. train/train_mtp.py trains each with examples/train_tiny.yaml
and the row's settings. The data is the corpus itself (`text`), or the same number of tokens that
the base wrote after prompts from the corpus, at temperature 1 (`own`) or 0 (`greedy`). The columns
are acceptance lengths of greedy drafts:

- trained: predicted from held-out text, with the attention used in training;
- in serving: the same, with the attention of serving;
- served: predicted from the base's own answers to held-out prompts, with the attention of serving;
- engine: counted by the engine on the same prompts, which is the same number.

The last line printed is one JSON object. Rows that were trained by an earlier call are not trained
again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mtpkit import LLM, SamplingParams
from mtpkit.bench.shapes import read_prompts
from mtpkit.cli import run as run_command
from mtpkit.data.samples import Columns
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.engine import require_whole
from mtpkit.engine.requests.prompts import encode
from mtpkit.training.evaluation import evaluate_directory

ROOT = Path(__file__).parents[1]
BASE = ROOT / "examples" / "tiny_base" / "model"
SETTINGS = [
    (loss, attention, data, k)
    for k in (3, 5)
    for data in ("text", "own")
    for loss in ("kl", "tv", "ce")
    for attention in ("serving", "per_depth")
    if k == 3 or (loss != "tv" and data == "text")
] + [("kl", attention, "greedy", 3) for attention in ("serving", "per_depth")]
"""Loss, attention, data and K of each row."""
TEMPERATURE = {"own": 1.0, "greedy": 0.0}
"""Sampling temperature of the data that the base writes."""
TOKENS_A_STEP = 512
SEQUENCE = 128
HELD_OUT_SEQUENCES = 256
ANSWER = 96
"""Tokens that the base writes after a prompt."""
PROMPT = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="directory that corpus.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="directory for runs and results")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each row")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts that are decoded")
    parser.add_argument("--jobs", type=int, default=1, help="rows trained at once")
    numbers = range(len(SETTINGS))
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        choices=numbers,
        metavar="ROW",
        help=f"0 to {numbers[-1]}; all by default",
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    chosen = [SETTINGS[number] for number in options.rows] if options.rows else SETTINGS
    for data in {setting[2] for setting in chosen} & TEMPERATURE.keys():
        write_data(options.corpus, written_data(options, data), data, options.steps)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda setting: train(options, *setting), chosen)
        runs = list(tqdm(runs, total=len(chosen), desc="training", disable=None))
    prompts = list(held_out_prompts(options.corpus, options.prompts))
    held_out = options.corpus / "heldout.jsonl"
    rows = [row(setting, run, prompts, held_out) for setting, run in zip(chosen, runs, strict=True)]
    show(rows)
    print(json.dumps({"steps": options.steps, "prompts": len(prompts), "rows": rows}))


def written_data(options: argparse.Namespace, data: str) -> Path:
    """Path of the base's own answers for this number of steps."""
    return options.output / f"{data}-{options.steps}.jsonl"


def write_data(corpus: Path, output: Path, data: str, steps: int) -> None:
    """Let the base write as many tokens as all steps read, but at most one answer per prompt."""
    if not output.exists():
        limit = -(-steps * TOKENS_A_STEP // ANSWER)
        call(
            *(
                "-m",
                "mtpkit.cli.main",
                "data",
                "regenerate",
                "--model",
                BASE,
                "--data",
                corpus / "train.jsonl",
            ),
            *("--output", output, "--prompt-length", PROMPT, "--limit", limit),
            *("--max-tokens", ANSWER, "--temperature", TEMPERATURE[data], "--ignore-eos"),
        )


def train(options: argparse.Namespace, loss: str, attention: str, data: str, k: int) -> Path:
    """Train the heads of a row; return the directory of the run."""
    run = options.output / f"{loss}-{attention}-{data}-k{k}-{options.steps}"
    source = written_data(options, data) if data in TEMPERATURE else options.corpus / "train.jsonl"
    call(
        *(
            "train/train_mtp.py",
            "--config",
            "examples/train_tiny.yaml",
            f"model={BASE}",
            f"output={run.resolve()}",
        ),
        *(
            f"data.train=[{source.resolve()}]",
            f"data.eval=[{(options.corpus / 'heldout.jsonl').resolve()}]",
        ),
        *(f"data.sequence_length={SEQUENCE}", f"data.eval_sequences={HELD_OUT_SEQUENCES}"),
        *(f"eval_interval={options.steps}", f"save_interval={options.steps}"),
        *(
            f"loss.kind={loss}",
            f"heads.attention={attention}",
            f"heads.num_depths={k}",
            f"steps={options.steps}",
        ),
        *(
            "matmul_precision=high",
            f"optimizer.warmup_steps={min(10, options.steps)}",
            "data.prompt_column=prompt",
        ),
    )
    return run


def call(*arguments: object) -> None:
    """Run Python with these arguments in the repository; exit with the end of its output if it
    fails."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def held_out_prompts(corpus: Path, count: int) -> Iterator[list[int]]:
    """Yield the first tokens of each held-out prompt of the corpus."""
    tokenizer = load_tokenizer(BASE)
    for prompt in read_prompts(corpus / "prompts.jsonl", count):
        yield list(encode(prompt, tokenizer, prompt["name"])[1][:PROMPT])


def row(
    setting: tuple[str, str, str, int], run: Path, prompts: list[list[int]], held_out: Path
) -> dict[str, object]:
    """Measure the acceptance lengths of a trained run."""
    loss, attention, data, k = setting
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [values for values in metrics if values["kind"] == "eval"][-1]
    llm = LLM(
        run, k, dtype="float32", max_num_seqs=len(prompts), max_model_len=PROMPT + ANSWER + 2 * k
    )
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    )
    require_whole(outputs)
    own = run / "answers.jsonl"
    write_answers(own, prompts, [output.outputs[0].token_ids for output in outputs])
    engine = llm.stats()
    return dict(
        loss=loss,
        attention=attention,
        data=data,
        k=k,
        trained=trained["acceptance_length"],
        in_serving=teacher_forced(run, held_out, k),
        served=teacher_forced(run, own, k),
        engine=engine.acceptance_length,
        engine_conditional_acceptance=engine.conditional_acceptance,
    )


def write_answers(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Write prompts and answers as `mtpkit data regenerate` does."""
    own = fingerprint(load_tokenizer(BASE))
    rows = [
        dict(
            prompt="",
            response="",
            prompt_token_ids=prompt,
            completion_token_ids=answer,
            tokenizer=own,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def teacher_forced(run: Path, data: Path, k: int) -> float:
    """The acceptance length of greedy decoding along given text, with the attention of serving."""
    found = evaluate_directory(
        run, [str(data)], Columns(), SEQUENCE, k, "serving", 16, HELD_OUT_SEQUENCES, dtype="float32"
    )
    assert found is not None  # None on other ranks
    length = found["acceptance_length"]
    assert isinstance(length, float)
    return length


def show(rows: list[dict]) -> None:
    """Print the rows as a table."""
    table = Table()
    for name in (
        "loss",
        "attention",
        "data",
        "K",
        "trained",
        "in serving",
        "served",
        "engine",
        "engine, each depth",
    ):
        table.add_column(name)
    for values in rows:
        lengths = [f"{values[name]:.3f}" for name in ("trained", "in_serving", "served", "engine")]
        rates = " ".join(f"{rate:.0%}" for rate in values["engine_conditional_acceptance"])
        table.add_row(
            values["loss"], values["attention"], values["data"], str(values["k"]), *lengths, rates
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    run_command(main)
