"""The scripts as a user calls them: what they print, and one line and exit code 2 for what a user
gets wrong."""

import json

import pytest

from tests.integration.front_doors import TINY_BASE, call, call_here

PROMPT = "def add(left, right):\n"


def test_generate_continues_a_text_from_stdin():
    done = call("infer/generate.py", "--model", TINY_BASE, "--max-tokens", 8, stdin=PROMPT)
    assert done.returncode == 0 and done.stdout.strip()
    (summary,) = done.stderr.splitlines()
    assert summary.startswith("finish reason: length; 8 tokens in ") and summary.endswith(
        "tokens/s, K = 0"
    )


def test_generate_writes_a_json_line_a_prompt(trained, capsys):
    command = [
        "infer/generate.py",
        "--model",
        trained.megatron,
        "--k",
        2,
        "--max-tokens",
        8,
        "--json",
        PROMPT,
    ]
    assert not call_here(*command)
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["prompt"] == PROMPT and record["text"] and len(record["token_ids"]) == 8
    assert record["finish_reason"] == "length" and len(record["conditional_acceptance"]) == 2
    assert ", K = 2, acceptance length " in printed.err


@pytest.fixture
def files(tmp_path):
    (tmp_path / "one.txt").write_text("a = 1\n")
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt_token_ids": [1] * 5000}) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (
            "eval_speedup",
            "--prompts {tmp}/none.txt",
            "prompts file {tmp}/none.txt cannot be read: No such file or directory; name a",
        ),
        (
            "eval_speedup",
            "--prompts {tmp}/empty.txt",
            "prompts file {tmp}/empty.txt holds no prompts; write one",
        ),
        (
            "eval_speedup",
            "--prompts {tmp}/one.txt --k 0 -1",
            "--k is [0, -1], must be from 0 to 1000",
        ),
        (
            "eval_speedup",
            "--prompts {tmp}/one.txt --temperature -1",
            "--temperature is -1.0, must be at least 0",
        ),
        (
            "eval_speedup",
            "--prompts {tmp}/one.txt --model {tmp}/none",
            "{tmp}/none: no such model directory",
        ),
        (
            "eval_speedup",
            "--prompts {tmp}/one.txt --k 3",
            "--k is 3, but the model has no MTP heads: train some",
        ),
        (
            "eval_speedup",
            "--prompts {tmp}/long.jsonl --k 0",
            "5000 prompt tokens leave no room for output",
        ),
        (
            "generate",
            "--prompts {tmp}/long.jsonl",
            ":1: 5000 prompt tokens leave no room for output",
        ),
        (
            "generate",
            "--prompts {tmp}/empty.txt",
            "prompts file {tmp}/empty.txt holds no prompts; write one",
        ),
        ("generate", "--prompts {tmp}/one.txt --k -2", "--k is -2, must be from 0 to 1000"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(script, options, message, files, capsys):
    model = [] if "--model" in options else ["--model", TINY_BASE]
    out = ["--output", files / "out"] if script == "eval_speedup" else []
    code = call_here(f"infer/{script}.py", *model, *out, *options.format(tmp=files).split())
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.err.startswith("mtpkit: error: ") and printed.err.count("\n") == 1
    assert message.format(tmp=files) in printed.err
    assert not (files / "out").exists() and not printed.out


def test_an_error_of_a_process(files):
    done = call("infer/generate.py", "--model", TINY_BASE, "--prompts", files / "empty.txt")
    assert (
        done.returncode == 2
        and done.stderr.startswith("mtpkit: error: ")
        and done.stderr.count("\n") == 1
    )


def test_the_demo_in_small(tmp_path):
    """The stages, the files that they leave, and the last line."""
    out = tmp_path / "demo"
    training = (
        f"steps=2 optimizer.warmup_steps=1 data.eval=[] data.train=[{out}/corpus/heldout.jsonl]"
    )
    sizes = [
        "data.micro_batch_size=1",
        "data.global_batch_size=2",
        "data.sequence_length=128",
        "heads.fit_tokens=512",
    ]
    command = ["-m", "mtpkit.cli.main", "demo", "--out", out, "--num-prompts", 8, "--max-tokens", 6]
    done = call(*command, *training.split(), *sizes)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == ["rows", "model", "device", "dtype", "commit", "before"]
    assert [(row["batch_size"], row["k"]) for row in report["rows"]] == [
        (b, k) for b in (1, 8) for k in range(4)
    ]
    assert [(row["batch_size"], row["k"]) for row in report["before"]] == [(1, 0), (1, 3)]
    assert all(row["identical"] == 1 for row in report["rows"] + report["before"])
    assert report["before"][1]["acceptance_length"] < 1.2
    assert "tensors are equal bit for bit after export and import" in done.stdout
    assert {"corpus", "run", "hf", "back", "report.json", "report.md", "report.png"} <= {
        p.name for p in out.iterdir()
    }
