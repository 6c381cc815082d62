"""Teacher-forced acceptance, the engine's own count and the report are one number on the same prompts."""

import json
from pathlib import Path

import pytest
import torch

from mtpkit.checkpoint import load_model
from mtpkit.engine import LLM
from mtpkit.engine.drafting import repeated
from mtpkit.model.mtp import DepthAttention
from mtpkit.training.evaluation import served_acceptance
from tests.integration.front_doors import AHEAD, PROMPTS, TOKENS, call_here, greedy

K = 1 + AHEAD
TOLERANCE = 0.02
"""Relative. The engine cuts the last step of a request at max_tokens, of which teacher forcing knows nothing."""

Acceptance = tuple[float, list[float]]
"""Acceptance length, and conditional acceptance of each depth."""


def agree(a: Acceptance, b: Acceptance) -> bool:
    pairs = [(a[0], b[0]), *zip(a[1], b[1], strict=True)]
    return all(abs(x - y) <= TOLERANCE * max(x, y) for x, y in pairs)


def predicted(
    directory: Path, prompts: list[list[int]], answers: list[list[int]], attention: DepthAttention = "serving"
) -> Acceptance:
    """Teacher-forced, on what the base says, which goes on until the drafts of every step of the engine lie in it."""
    model = load_model(directory)
    pairs = zip(prompts, answers, strict=True)
    sums = [served_acceptance(model, torch.tensor(tokens), len(prompt), K, attention) for prompt, tokens in pairs]
    total = sum(sums[1:], start=sums[0])
    return total.acceptance_length(), total.conditional_acceptance()


@pytest.fixture(scope="module")
def teacher_forced(trained, prompts, answers) -> Acceptance:
    return predicted(trained.megatron, prompts, answers)


def engine_count(model: Path, prompts: list[list[int]], **settings: str) -> Acceptance:
    llm = LLM(model, K, max_num_seqs=PROMPTS, max_model_len=512, **settings)
    llm.generate(prompts, greedy(TOKENS))
    return llm.stats().acceptance_length, llm.stats().conditional_acceptance


@pytest.mark.parametrize("layout", ["megatron", "hf"])
def test_the_engine_counts_what_teacher_forcing_predicts(layout, trained, prompts, teacher_forced):
    assert teacher_forced[0] > 1.8, "heads that accept little would agree with much"
    assert agree(engine_count(getattr(trained, layout), prompts), teacher_forced)


def test_they_agree_however_heads_were_trained(train_on_answers, prompts, answers):
    """With another loss and another attention than by default: both change weights alone, not what is computed here."""
    other = train_on_answers("ce", "per_depth", 12)
    expected = predicted(other.megatron, prompts, answers)
    assert expected[0] > 1.4, "heads that accept little would agree with much"
    assert agree(engine_count(other.hf, prompts), expected)


@pytest.mark.parametrize(("pattern", "rollback"), [("M", "replay"), ("M*-", "snapshot")])
def test_they_agree_for_distinct_heads_with_mamba_layers(pattern, rollback, train_on_answers, prompts, answers):
    """Each with a rollback; `engine/test_drafts.py` compares all drafts of such heads under both."""
    heads = f"heads.pattern={pattern}", "heads.repeated=false"
    other = train_on_answers("kl", "per_depth", 12, *heads)
    expected = predicted(other.megatron, prompts, answers, "per_depth")
    assert expected[0] > 1.4, "heads that accept little would agree with much"
    assert agree(engine_count(other.hf, prompts, state_rollback=rollback), expected)


def test_the_report_says_the_same(trained, prompts, teacher_forced, tmp_path, capsys):
    """Through the front door, in smaller batches; files and the last line are as documented."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    paths = "--model", trained.hf, "--prompts", file, "--out", out
    options = f"--k {K} --batch-size 8 --max-tokens {TOKENS} --ignore-eos --repeats 1"
    assert not call_here("infer/eval_speedup.py", *paths, *options.split())
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report) == ["rows", "model", "device", "dtype", "commit"]
    assert (report["model"], report["dtype"]) == (str(trained.hf), "float32")
    plain, drafted = report["rows"]
    fields = "batch_size k tokens_per_s speedup acceptance_length conditional_acceptance identical"
    assert list(plain) == list(drafted) == fields.split()
    assert (plain["batch_size"], plain["k"], plain["speedup"], plain["acceptance_length"]) == (8, 0, 1, 1)
    assert (drafted["batch_size"], drafted["k"], drafted["identical"]) == (8, K, 1)
    assert drafted["speedup"] == pytest.approx(drafted["tokens_per_s"] / plain["tokens_per_s"])
    assert agree((drafted["acceptance_length"], drafted["conditional_acceptance"]), teacher_forced)

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
        return mtp_forward(model, depth, hidden.roll(1, 0) if depth == 1 else hidden, *args, **kwargs)

    monkeypatch.setattr(repeated, "mtp_forward", shifted)


@pytest.mark.parametrize("sabotage", [shift_tokens, shift_hidden])
def test_a_shift_by_one_shows(sabotage, monkeypatch, trained, prompts, teacher_forced):
    sabotage(monkeypatch)
    assert not agree(engine_count(trained.hf, prompts), teacher_forced)
