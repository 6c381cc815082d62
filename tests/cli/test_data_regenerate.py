"""`mtpkit data regenerate`: killed and begun again, its output is what it would have been; it is
data to prepare."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mtpkit.cli.data import app
from mtpkit.data.build import build_dataset
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import LLM, SamplingParams
from mtpkit.engine.engine import Engine

PROMPTS = 32
WORDS = ["the", "cat", "sat", "on", "the", "mat", "def", "add", "left", "right", "return"]


@pytest.fixture
def prompts(tmp_path):
    texts = [" ".join(WORDS[: 1 + number % 11]) for number in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    )
    return tmp_path / "prompts.jsonl"


@pytest.fixture
def arguments(model_dir, prompts):
    """A command line up to the name of its output."""
    sampling = ["--max-tokens", 16, "--temperature", 0.8, "--seed", 5, "--max-num-seqs", 3]
    return ["regenerate", "--model", model_dir, "--data", prompts, *sampling, "--output"]


def test_penalties_count_and_are_settings_of_the_journal(
    tmp_path, arguments, call, capsys, monkeypatch
) -> None:
    plain = tmp_path / "plain.jsonl"
    penalised = tmp_path / "penalised.jsonl"
    assert call(app, *arguments, plain) == 0
    assert call(app, *arguments, penalised, "--repetition-penalty", 1e6) == 0
    assert answers(plain) != answers(penalised)
    monkeypatch.setattr("mtpkit.data.regenerate.Journal.publish", lambda journal: None)
    again = tmp_path / "again.jsonl"
    assert call(app, *arguments, again) == 0
    capsys.readouterr()
    assert call(app, *arguments, again, "--repetition-penalty", 2) == 2
    assert "again.jsonl.partial:1 must hold the settings" in capsys.readouterr().err


def test_how_numbers_are_held_counts(tmp_path, arguments, call, monkeypatch) -> None:
    made = []
    real = LLM.__init__

    def spy(self, *args, **settings):
        made.append(settings)
        real(self, *args, **settings)

    monkeypatch.setattr(LLM, "__init__", spy)
    held = {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "state_dtype": "bfloat16",
        "prefix_cache_dtype": "bfloat16",
        "draft_lm_head_dtype": "fp8_e4m3",
    }
    flags = [text for key, value in held.items() for text in (f"--{key.replace('_', '-')}", value)]
    assert call(app, *arguments, tmp_path / "plain.jsonl") == 0
    assert call(app, *arguments, tmp_path / "narrow.jsonl", *flags) == 0
    assert {key: made[-1][key] for key in held} == held
    assert answers(tmp_path / "plain.jsonl") != answers(tmp_path / "narrow.jsonl")


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_killed_and_begun_again(tmp_path, arguments, call, capsys) -> None:
    whole, output, journal = (
        tmp_path / name for name in ("whole.jsonl", "out.jsonl", "out.jsonl.partial")
    )
    command = [sys.executable, "-m", "mtpkit.cli.main", "data", *map(str, arguments), str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert call(app, *arguments, whole) == 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and (
            not journal.exists() or journal.read_bytes().count(b"\n") < 5
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not output.exists()
    finished = journal.read_bytes().count(b"\n") - 1
    assert 3 < finished < PROMPTS
    with journal.open("a") as file:
        file.write('{"index": 2, "prom')
    capsys.readouterr()
    assert call(app, *arguments, output) == 0
    assert f"{finished} of {PROMPTS} prompts are answered already" in capsys.readouterr().out
    assert output.read_bytes() == whole.read_bytes() and not journal.exists()
    assert [answer["index"] for answer in answers(output)] == list(range(PROMPTS))
    assert len({answer["completion"] for answer in answers(output)}) > 11, (
        "each prompt draws for itself"
    )


def test_greedy_answers_are_the_models_and_are_learnt_as_they_are(
    tmp_path, model_dir, arguments, call
) -> None:
    assert (
        call(app, *arguments, tmp_path / "out.jsonl", "--temperature", 0, "--limit", 4, "--k", 1)
        == 0
    )
    found = answers(tmp_path / "out.jsonl")
    texts = [answer["prompt"] for answer in found]
    want = LLM(model_dir).generate(texts, SamplingParams(temperature=0, max_tokens=16))
    assert [answer["completion_token_ids"] for answer in found] == [
        one.outputs[0].token_ids for one in want
    ]
    assert [answer["completion"] for answer in found] == [one.outputs[0].text for one in want]
    tokenizer = load_tokenizer(model_dir)
    dataset = build_dataset([tmp_path / "out.jsonl"], tokenizer, 64, vocab_size=300)
    batch = dataset.batch(range(len(dataset)))
    assert int(batch.loss_mask.sum()) == sum(
        len(answer["completion_token_ids"]) for answer in found
    )
    for answer in found:
        tokens = answer["prompt_token_ids"] + answer["completion_token_ids"]
        rows = [
            row[index == number].tolist()
            for row, index in zip(batch.token_ids, batch.documents, strict=True)
            for number in index.unique()
        ]
        assert tokens in rows


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["nowhere/out.jsonl"], "must be a file in a directory that exists"),
        (["out.jsonl", "--temperature", -1], "temperature is -1.0"),
        (["out.jsonl", "--data", "nowhere"], "nowhere does not exist"),
        (
            ["out.jsonl", "--max-model-len", 1, "--dtype", "float32"],
            "no prompt can be served; the first: ",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, call, capsys, more, message) -> None:
    more[0] = tmp_path / more[0]
    assert call(app, *arguments, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mtpkit: error: ") and message in line
    assert not more[0].exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    arguments, call, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(
        "mtpkit.data.prompts.read_prompts", lambda *_: pytest.fail("it is found out too late")
    )
    assert call(app, *arguments, "/proc/x.jsonl") == 1
    assert "/proc/x.jsonl: cannot write: No such file or directory" in capsys.readouterr().err


def test_an_output_is_replaced_only_by_force(tmp_path, arguments, call, capsys) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    assert call(app, *arguments, tmp_path / "out.jsonl", "--limit", 2) == 2
    assert "is there already; name another file, or add --force" in capsys.readouterr().err
    assert call(app, *arguments, tmp_path / "out.jsonl", "--limit", 2, "--force") == 0
    assert len(answers(tmp_path / "out.jsonl")) == 2


def test_an_interruption_says_what_is_kept(tmp_path, arguments, call, capsys, monkeypatch) -> None:
    output = tmp_path / "out.jsonl"
    step = Engine.step

    def interrupted(engine, finished_only):
        if (tmp_path / "out.jsonl.partial").read_bytes().count(b"\n") > least:
            raise KeyboardInterrupt
        return step(engine, finished_only)

    monkeypatch.setattr(Engine, "step", interrupted)
    least = 0
    assert call(app, *arguments, output) == 130
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "no answer is finished yet: nothing is kept",
        "mtpkit: interrupted",
    ]
    least = 3
    assert call(app, *arguments, output) == 130
    kept = (tmp_path / "out.jsonl.partial").read_bytes().count(b"\n") - 1
    said = (
        f"{kept} of {PROMPTS} answers are kept in {output}.partial: the same command continues from"
        " there"
    )
    assert capsys.readouterr().err.splitlines()[-2:] == [said, "mtpkit: interrupted"]


def test_stop_tokens_end_answers_and_are_settings_of_the_journal(tmp_path, arguments, call) -> None:
    plain = tmp_path / "plain.jsonl"
    stopped = tmp_path / "stopped.jsonl"
    assert call(app, *arguments, plain, "--limit", 4) == 0
    wanted = [answer["completion_token_ids"] for answer in answers(plain)]
    stops = [wanted[0][2], wanted[1][1]]
    assert call(app, *arguments, stopped, "--limit", 4, "--stop-token-ids", *stops) == 0
    for before, after in zip(wanted, answers(stopped), strict=True):
        end = next((place + 1 for place, token in enumerate(before) if token in stops), len(before))
        assert after["completion_token_ids"] == before[:end]
    assert {answer["finish_reason"] for answer in answers(stopped)[:2]} == {"stop"}
