"""`mtpkit speedup`: the report, and the gate on correctness."""

import json

import pytest
import torch

from mtpkit.bench import speedup
from mtpkit.cli.speedup import app
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import LLM
from mtpkit.errors import UserError


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\non the mat\ndef add\n")
    return tmp_path / "prompts.txt"


def test_options_reach_the_measurement(model_dir, prompts, call, capsys, tmp_path, monkeypatch):
    options = (
        "--k 2 1 --batch-size 2 --max-tokens 6 --repeats 1 --num-prompts 2 --temperature 0.8 --seed"
        " 3 --block-size 4"
    )
    options += (
        " --state-rollback snapshot --ignore-eos --dtype float32 --gpu-memory-utilization 0.5"
    )
    options += (
        f" --state-dtype bfloat16 --draft-sampling --draft-vocab {tmp_path / 'vocab.json'}"
        " --enforce-eager"
    )
    (tmp_path / "vocab.json").write_text(json.dumps({"token_ids": [5, 6, 7, 9], "vocab_size": 300}))
    engines = []
    monkeypatch.setattr(
        speedup, "LLM", lambda *args, **named: engines.append(LLM(*args, **named)) or engines[-1]
    )
    out = tmp_path / "out"
    assert (
        call(app, "--model", model_dir, "--prompts", prompts, "--output", out, *options.split())
        == 0
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["batch_size"], row["k"]) for row in report["rows"]] == [(2, 0), (2, 1), (2, 2)]
    settings = json.loads((out / "report.json").read_text())["settings"]
    assert (settings["prompts"], settings["block_size"], settings["state_rollback"]) == (
        2,
        4,
        "snapshot",
    )
    assert (
        settings["state_dtype"],
        settings["enforce_eager"],
        settings["gpu_memory_utilization"],
    ) == (
        "bfloat16",
        True,
        0.5,
    )
    for llm in engines[2:]:  # those with drafts
        config = llm.engine.config
        assert config.draft_sampling and llm.engine.layout.sizes.state_dtype == torch.bfloat16
        assert llm.engine.executor.drafter.draft_token_ids.tolist() == [5, 6, 7, 9]
    assert (settings["temperature"], settings["seed"], settings["max_tokens"]) == (0.8, 3, 6)
    assert settings["ignore_eos"]


@pytest.mark.parametrize(
    ("dtype", "options", "code"),
    [("float32", [], 1), ("bfloat16", [], 0), ("float32", ["--temperature", 1], 0)],
    ids=["greedy fp32", "bf16", "sampling"],
)
def test_changed_tokens_fail_greedy_fp32_alone(
    dtype, options, code, prompts, call, capsys, tmp_path, monkeypatch, model_dir
):
    rows = [
        speedup.SpeedupRow(1, 0, 10, 1, 1, [], 1),
        speedup.SpeedupRow(1, 1, 20, 2, 1.5, [0.5], 2 / 3),
    ]
    report = speedup.SpeedupReport(rows, "dir", "cpu", dtype, None)
    monkeypatch.setattr(speedup, "measure_speedup", lambda *_: report)
    out = tmp_path / "out"
    assert call(app, "--model", model_dir, "--prompts", prompts, "--output", out, *options) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == report.to_dict()
    assert printed.err.splitlines()[0] == f"the report is in {out}"
    assert (out / "report.json").exists()
    assert ("33% at batch 1, K = 1" in printed.err) == bool(code)


@pytest.mark.parametrize(
    ("out", "code", "says"),
    [
        ("{}", 2, "{} is a file; name a directory"),
        ("{}/x", 1, "{}/x: cannot write: Not a directory"),
        ("/proc/x", 1, "/proc/x: cannot write: No such file or directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    out, code, says, prompts, tmp_path, call, capsys, monkeypatch
):
    monkeypatch.setattr(
        speedup, "measure_speedup", lambda *_: pytest.fail("it is found out too late")
    )
    assert (
        call(app, "--model", tmp_path, "--prompts", prompts, "--output", out.format(prompts))
        == code
    )
    assert says.format(prompts) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--top-k", "--top-k is -3, must be"),
        ("--min-p", "--min-p is -3.0, must be"),
        ("--presence-penalty", "--presence-penalty is -3.0, must be"),
        ("--frequency-penalty", "--frequency-penalty is -3.0, must be"),
        ("--repetition-penalty", "--repetition-penalty is -3.0, must be"),
    ],
)
def test_sampling_options_reach_the_requests(model_dir, prompts, call, capsys, option, says):
    assert call(app, "--model", model_dir, "--prompts", prompts, option, -3) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("heads", "ks", "says"),
    [
        (dict(mtp_num_depths=2, mtp_use_repeated_layer=False), [0, 1, 2], None),
        (dict(mtp_num_depths=2, mtp_use_repeated_layer=False, mtp_pattern="M-"), [0, 1, 2], None),
        (dict(mtp_num_depths=1), [0, 1], None),
        (dict(mtp_num_depths=5), [0, 1, 2, 3], None),
        (dict(mtp_num_depths=0, mtp_pattern=""), [0], "has no MTP heads: K = 0 was measured alone"),
    ],
    ids=["distinct", "distinct mamba", "one depth", "five depths", "no heads"],
)
def test_k_is_by_default_what_the_model_has(
    heads, ks, says, save_model, prompts, call, capsys, tmp_path
):
    model = save_model(**heads)
    brief = ["--batch-size", 1, "--max-tokens", 4, "--repeats", 1, "--num-prompts", 1]
    assert (
        call(app, "--model", model, "--prompts", prompts, "--output", tmp_path / "out", *brief) == 0
    )
    printed = capsys.readouterr()
    assert [row["k"] for row in json.loads(printed.out.splitlines()[-1])["rows"]] == ks
    assert (f"{model} {says}\n" if says else "") in printed.err and "not trained" not in printed.err
    assert ("no MTP heads" in printed.err) == bool(says)


@pytest.mark.parametrize(
    ("heads", "k", "says"),
    [
        (
            dict(mtp_num_depths=2, mtp_use_repeated_layer=False),
            3,
            "the model has 2 distinct MTP heads: set it to 2",
        ),
        (
            dict(mtp_num_depths=0, mtp_pattern=""),
            1,
            "the model has no MTP heads: train some, or set it to 0",
        ),
    ],
    ids=["distinct", "no heads"],
)
def test_a_k_that_heads_cannot_draft_is_refused_before_weights_are_read(
    heads, k, says, save_model, prompts, call, capsys, tmp_path, monkeypatch
):
    model = save_model(**heads)
    monkeypatch.setattr(
        "mtpkit.checkpoint.load_model", lambda *_, **__: pytest.fail("weights are read")
    )
    assert (
        call(app, "--model", model, "--prompts", prompts, "--output", tmp_path / "out", "--k", 0, k)
        == 2
    )
    printed = capsys.readouterr()
    assert (
        f"--k is {k}, but" in printed.err and says in printed.err and printed.err.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=f"num_speculative_tokens is {k}, but .*{says}"):
        LLM(model, k)


def test_conversations_are_measured_and_raw_text_is_warned_of(
    chat_dir, prompts, call, caplog, tmp_path, monkeypatch
):
    decoded = []
    generate = LLM.generate

    def spy(llm, prompts, *args, **named):
        decoded.extend(prompts)
        return generate(llm, prompts, *args, **named)

    monkeypatch.setattr(LLM, "generate", spy)
    settings = "--k 1 --batch-size 1 --max-tokens 3 --repeats 1 --num-prompts 1"
    options = [*settings.split(), "--output", tmp_path / "out", "--model", chat_dir]
    question = {"messages": [{"role": "user", "content": "the cat"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(question))
    asked = None
    for given in (["--prompts", tmp_path / "rows.jsonl"], ["--prompts", prompts, "--chat"]):
        decoded.clear()
        assert call(app, *options, *given) == 0
        assert "raw text" not in caplog.text
        found = {tuple(one["prompt_token_ids"]) for one in decoded if isinstance(one, dict)}
        assert len(found) == 1 and found == (asked or found)
        asked = found
    text = "user: the cat<eos>assistant: "
    assert asked == {tuple(load_tokenizer(chat_dir)(text)["input_ids"])}
    assert call(app, *options, "--prompts", prompts) == 0
    assert caplog.text.count("the prompt is raw text, but the tokenizer has a chat") == 1
