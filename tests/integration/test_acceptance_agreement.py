"""`mtpkit acceptance`, the engine's own count and the report are one number on the same prompts."""

import json
from pathlib import Path

import pytest

from mtpkit.checkpoint import open_directory
from mtpkit.cli import run
from mtpkit.cli.acceptance import app
from mtpkit.data.tokenizer import fingerprint, load_tokenizer
from mtpkit.engine import LLM
from mtpkit.engine.drafting import repeated
from tests.integration.front_doors import PROMPTS, TOKENS, call_here, greedy

K = 3

Counts = tuple[int, list[int], list[int]]
"""Steps, and the drafts of each depth that they reach and accept."""


def rates(counts: Counts) -> list[float]:
    """Acceptance length, then the conditional acceptance of each depth."""
    steps, reached, accepted = counts
    return [
        1 + sum(accepted) / steps,
        *(part / whole for part, whole in zip(accepted, reached, strict=True)),
    ]


def predicted(
    directory: Path, prompts: list[list[int]], answers: list[list[int]], attention: str = "auto"
) -> Counts:
    """What the command says of the base's own answers, which the end of a request cuts short as in
    the engine."""
    data, found = (directory.parent / f"greedy.{kind}" for kind in ("jsonl", "json"))
    own = fingerprint(load_tokenizer(open_directory(directory).companions))
    rows = [
        dict(
            prompt="prompt",
            response="answer",
            prompt_token_ids=prompt,
            completion_token_ids=tokens[len(prompt) :],
            tokenizer=own,
        )
        for prompt, tokens in zip(prompts, answers, strict=True)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        f"--sequence-length 512 --batch-size 4 --num-depths {K} --attention {attention} --dtype"
        " float32"
    )
    with pytest.raises(SystemExit) as stop:
        run(
            app,
            [
                "--model",
                str(directory),
                "--data",
                str(data),
                *options.split(),
                "--output",
                str(found),
            ],
        )
    assert not stop.value.code
    values = json.loads(found.read_text())
    assert (values["departures"], values["steps"]) == (0, values["reached_per_depth"][0])
    counts = values["steps"], values["reached_per_depth"], values["accepted_per_depth"]
    assert [values["acceptance_length"], *values["conditional_acceptance"]] == pytest.approx(
        rates(counts), rel=1e-12
    )
    low, high = values["acceptance_length_interval"]
    assert low < values["acceptance_length"] < high
    return counts


@pytest.fixture(scope="module")
def teacher_forced(trained, prompts, answers) -> Counts:
    return predicted(trained.megatron, prompts, answers)


def engine_count(model: Path, prompts: list[list[int]], **settings: str) -> Counts:
    llm = LLM(model, K, max_num_seqs=PROMPTS, max_model_len=512, **settings)
    llm.generate(prompts, greedy(TOKENS))
    found = llm.stats().acceptance
    return found.steps, found.reached_per_depth, found.accepted_per_depth


@pytest.mark.parametrize("layout", ["megatron", "hf"])
def test_the_engine_counts_what_teacher_forcing_predicts(layout, trained, prompts, teacher_forced):
    assert rates(teacher_forced)[0] > 1.8, "heads that accept little would agree with much"
    assert engine_count(getattr(trained, layout), prompts) == teacher_forced


def test_they_agree_however_heads_were_trained(train_on_answers, prompts, answers):
    """With another loss and another attention than by default: both change weights alone, not what
    is computed here."""
    other = train_on_answers("ce", "per_depth", 12)
    expected = predicted(other.hf, prompts, answers, "serving")
    assert rates(expected)[0] > 1.4, "heads that accept little would agree with much"
    assert engine_count(other.hf, prompts) == expected


@pytest.mark.parametrize(("pattern", "rollback"), [("M", "replay"), ("M*-", "snapshot")])
def test_they_agree_for_distinct_heads_with_mamba_layers(
    pattern, rollback, train_on_answers, prompts, answers
):
    """Each with a rollback; `engine/test_drafts.py` compares all drafts of such heads under
    both."""
    heads = f"heads.pattern={pattern}", "heads.repeated=false"
    other = train_on_answers("kl", "per_depth", 12, *heads)
    expected = predicted(other.megatron, prompts, answers, "per_depth")
    assert rates(expected)[0] > 1.4, "heads that accept little would agree with much"
    assert engine_count(other.hf, prompts, state_rollback=rollback) == expected


def test_the_report_says_the_same(trained, prompts, teacher_forced, tmp_path, capsys):
    """Through the front door, in smaller batches; files and the last line are as documented."""
    file = tmp_path / "prompts.jsonl"
    out = tmp_path / "out"
    file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    paths = "--model", trained.hf, "--prompts", file, "--out", out
    options = f"--k {K} --batch-size 8 --max-tokens {TOKENS} --ignore-eos --repeats 1"
    assert not call_here("infer/eval_speedup.py", *paths, *options.split())
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report) == ["rows", "model", "device", "dtype", "commit"]
    assert (report["model"], report["dtype"]) == (str(trained.hf), "float32")
    plain, drafted = report["rows"]
    fields = "batch_size k tokens_per_s speedup acceptance_length conditional_acceptance identical"
    assert list(plain) == fields.split()
    assert list(drafted) == [*fields.split(), "speedup_interval", "acceptance_length_interval"]
    for name in ("speedup", "acceptance_length"):
        low, high = drafted[f"{name}_interval"]
        assert low < drafted[name] < high
    assert (plain["batch_size"], plain["k"], plain["speedup"], plain["acceptance_length"]) == (
        8,
        0,
        1,
        1,
    )
    assert (drafted["batch_size"], drafted["k"], drafted["identical"]) == (8, K, 1)
    assert drafted["speedup"] == pytest.approx(drafted["tokens_per_s"] / plain["tokens_per_s"])
    assert [drafted["acceptance_length"], *drafted["conditional_acceptance"]] == pytest.approx(
        rates(teacher_forced), rel=1e-12
    )

    assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.md", "report.png"]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "report.json").read_text())["rows"] == report["rows"]


def shift_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth 1 reads the token of its own position instead of the next one."""
    monkeypatch.setattr(repeated, "shifted_token_ids", lambda batch, verdict: batch.token_ids)


def shift_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth 1 reads the hidden state of the position before its own."""
    mtp_forward = repeated.mtp_forward

    def shifted(model, depth, hidden, *args, **kwargs):
        return mtp_forward(
            model, depth, hidden.roll(1, 0) if depth == 1 else hidden, *args, **kwargs
        )

    monkeypatch.setattr(repeated, "mtp_forward", shifted)


@pytest.mark.parametrize("sabotage", [shift_tokens, shift_hidden])
def test_a_shift_by_one_shows(sabotage, monkeypatch, trained, prompts, teacher_forced):
    sabotage(monkeypatch)
    assert engine_count(trained.hf, prompts) != teacher_forced
