"""Answers in the order of their prompts, whatever order they finish in and however often the work
is stopped."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtpkit.data.options import DataOptions
from mtpkit.data.prompts import Prompt, read_prompts, spread
from mtpkit.data.regenerate import Answer, Journal, digest
from mtpkit.data.samples import read_samples
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.engine import EngineOptions, SamplingParams
from mtpkit.engine.regenerate import journal_settings, regenerate
from mtpkit.errors import UserError

SETTINGS = {"model": "m", "stop": ("a",)}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt"
    " %}bot:{% endif %}"
)


@dataclass(frozen=True)
class Params:
    seed: int | None = None


class FakeEngine:
    """Finishes the newest of its requests in each step; refuses prompts of token 99; dies after
    `steps`."""

    def __init__(self, steps=10**9):
        self.requests = []
        self.steps = steps
        self.seen = {}
        self.most = 0

    def add_request(self, prompt_token_ids, params, request_id):
        if 99 in prompt_token_ids:
            raise UserError(f"request {request_id}: token 99")
        assert request_id not in self.seen
        self.seen[request_id] = params.seed
        self.requests.append((request_id, prompt_token_ids, params.seed))
        self.most = max(self.most, len(self.requests))
        return request_id

    def stats(self):
        return SimpleNamespace(generated_tokens=5 * len(self.seen))

    def step(self, finished_only):
        if not self.steps:
            raise KeyboardInterrupt
        self.steps -= 1
        request_id, token_ids, seed = self.requests.pop()
        completion = SimpleNamespace(
            text=f"{token_ids} {seed}", token_ids=[*token_ids, 0], finish_reason="stop"
        )
        running = [
            SimpleNamespace(request_id=r[0], finished=False)
            for r in self.requests
            if not finished_only
        ]
        return [
            *running,
            SimpleNamespace(request_id=request_id, finished=True, outputs=[completion]),
        ]


PROMPTS = [
    Prompt(f"p.jsonl:{number + 1}", f"text {number}", [number, number]) for number in range(20)
]


def run(output, steps=10**9, prompts=PROMPTS, in_flight=6, settings=SETTINGS, **more):
    engine = FakeEngine(steps)
    with Journal(output, settings) as journal:
        regenerate(engine, prompts, Params(), journal, "mark", seed=7, in_flight=in_flight, **more)
    return engine


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_prompts_in_order(tmp_path) -> None:
    prompts = [
        PROMPTS[0],
        Prompt("q", "t", [1], [{"role": "user", "content": "é"}], [{"name": "f"}]),
    ]
    assert run(tmp_path / "a.jsonl", prompts=[*prompts, *PROMPTS], in_flight=6).most == 6
    answers = lines(tmp_path / "a.jsonl")
    assert [answer["index"] for answer in answers] == list(range(22))
    first, chat = answers[:2]
    assert list(first) == [
        *("index", "name", "prompt", "completion", "finish_reason", "tokenizer"),
        *("prompt_token_ids", "completion_token_ids"),
    ]
    assert (first["prompt"], first["prompt_token_ids"], first["completion_token_ids"]) == (
        "text 0",
        [0, 0],
        [0, 0, 0],
    )
    assert chat["messages"] == [
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": chat["completion"]},
    ]
    assert chat["tools"] == [{"name": "f"}]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("torn", ["", '{"index": 3, "na', '{"index": 3, "name": "x"}'])
def test_stopping_anywhere_changes_nothing(tmp_path, torn) -> None:
    run(tmp_path / "whole.jsonl", in_flight=3)
    output = tmp_path / "a.jsonl"
    journal = tmp_path / "a.jsonl.partial"
    done = 0
    for steps in (4, 1, 9):
        with pytest.raises(KeyboardInterrupt):
            run(output, steps)
        done += steps
        assert not output.exists() and len(lines(journal)) == 1 + done
        with journal.open("a") as file:
            file.write(torn)
    assert len(run(output).seen) == 20 - done, "what was finished is not done again"
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and not journal.exists()


def test_an_answer_is_on_the_disk_at_once(tmp_path) -> None:
    answer = Answer(3, "p", "a", "b", "stop", "mark", [1], [2])
    with Journal(tmp_path / "a.jsonl", SETTINGS) as journal:
        journal.add(answer)
        assert lines(journal.path)[1:] == [json.loads(answer.to_json())] and journal.done == {3}


def test_seeds_are_each_prompts_own(tmp_path) -> None:
    seeds = run(tmp_path / "a.jsonl").seen
    assert len(set(seeds.values())) == 20 and all(0 <= seed < 2**63 for seed in seeds.values())
    assert run(tmp_path / "b.jsonl", in_flight=1).seen == seeds


def test_prompts_that_cannot_be_served_are_left_out(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        prompts = [
            replace(one, token_ids=[99]) if index == 13 else one
            for index, one in enumerate(PROMPTS)
        ]
        run(tmp_path / "a.jsonl", prompts=prompts, refused=["p.jsonl:0 (no messages)"])
    assert [answer["index"] for answer in lines(tmp_path / "a.jsonl")] == [
        n for n in range(20) if n != 13
    ]
    assert (
        "2 of 21 prompts are left out: p.jsonl:0 (no messages), p.jsonl:14 (request 13: token 99)"
        in caplog.text
    )
    with pytest.raises(
        UserError, match=r"no prompt can be served; the first: p\.jsonl:14 \(request 0: token 99\)"
    ):
        run(tmp_path / "b.jsonl", prompts=prompts[13:14])
    assert not (tmp_path / "b.jsonl").exists()


def test_a_journal_of_other_settings_is_refused(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a.jsonl", 3)
    with pytest.raises(
        UserError, match=r"with other settings: model was m, is n; use the same settings, or remove"
    ):
        run(tmp_path / "a.jsonl", settings={**SETTINGS, "model": "n"})
    assert len(run(tmp_path / "a.jsonl").seen) == 17
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b.jsonl", 0)
    assert not (tmp_path / "b.jsonl.partial").exists(), "nothing was answered"


def test_every_sampling_parameter_is_a_setting_of_the_journal() -> None:
    """But journals of earlier versions, which lack the later parameters, stay valid."""

    def settings(params, **engine):
        chosen = EngineOptions(dtype="float32", **engine)
        return journal_settings(Path("m"), PROMPTS, params, 0, chosen)

    usual = settings(SamplingParams())
    first = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop"]
    assert list(usual) == ["model", "prompts", *first, "seed", "dtype"]
    for name in vars(SamplingParams()).keys() - {"n", "seed"}:
        params = SamplingParams()
        object.__setattr__(params, name, ("another value",))  # of any type: no check runs
        assert settings(params) == usual | {name: ("another value",)}
    for held in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}):
        assert settings(SamplingParams(), **held) == usual | held
    assert settings(SamplingParams(), draft_lm_head_dtype="nvfp4") == usual


def test_a_journal_that_is_damaged_or_in_use_is_refused(tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a.jsonl", 3)
    journal = tmp_path / "a.jsonl.partial"
    with (
        Journal(tmp_path / "a.jsonl", SETTINGS),
        pytest.raises(UserError, match="is being written by another process"),
    ):
        run(tmp_path / "a.jsonl")
    content = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*content[:2], content[2][:9] + "\n", content[3]]))
    with pytest.raises(
        UserError, match=r"a\.jsonl\.partial:3 cannot be read as JSON: .*; remove the line"
    ):
        run(tmp_path / "a.jsonl")


def test_prompts_of_every_kind(tmp_path, tokenizer_dir, caplog) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = TEMPLATE
    turns = [
        {"role": role, "content": text}
        for role, text in zip(("user", "bot", "user"), "abc", strict=True)
    ]
    turns[1]["role"] = "assistant"
    rows = [{"messages": turns[:2]}, {"messages": turns}, {"messages": []}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "p.jsonl").write_text('{"prompt": "the cat", "text": "t"}\n{"prompt": ""}\n')
    (tmp_path / "t.txt").write_text("the cat sat on the mat")
    (tmp_path / "s.txt").write_text("the")
    files = [tmp_path / name for name in ("chat.jsonl", "p.jsonl", "t.txt", "s.txt")]
    prompts, refused = read_prompts(files, tokenizer, prompt_length=4)
    ids = tokenizer("the cat sat on the mat")["input_ids"]
    pieces = [ids[i : i + 4] for i in range(0, len(ids) - len(ids) % 4, 4)]
    assert len(ids) % 4, "a piece is left over"
    assert [prompt.text for prompt in prompts[:3]] == [
        "user:a;bot:",
        "user:a;assistant:b;user:c;bot:",
        "the cat",
    ]
    assert [prompt.messages for prompt in prompts[:3]] == [turns[:1], turns, None]
    assert [prompt.token_ids for prompt in prompts[3:-1]] == pieces and prompts[-1].text == "the"
    assert all(prompt.token_ids == tokenizer(prompt.text)["input_ids"] for prompt in prompts[:3])
    assert refused == [f"{files[0]}:3 (no messages)", f"{files[1]}:2 (empty text)"]
    assert not caplog.text
    every, _ = read_prompts(files[:1], tokenizer, prompt_length=4, turns="all")
    assert "the prompt length has no effect" in caplog.text
    assert [prompt.text for prompt in every] == [
        "user:a;bot:",
        "user:a;bot:",
        "user:a;assistant:b;user:c;bot:",
    ]
    assert digest(prompts) != digest(prompts[::-1]) and digest(prompts) == digest(list(prompts))
    assert (
        spread(PROMPTS, 4) == PROMPTS[::5]
        and spread(PROMPTS, None) == spread(PROMPTS, 99) == PROMPTS
    )


def test_only_the_pieces_that_are_asked_for_are_made(tmp_path, tokenizer_dir, monkeypatch) -> None:
    """A long line is tokenised once, and of its many pieces no others are turned into text."""
    (tmp_path / "t.txt").write_text("the cat sat on the mat " * 200)
    tokenizer = load_tokenizer(tokenizer_dir)
    made = []
    every, _ = read_prompts([tmp_path / "t.txt"], tokenizer, prompt_length=4)
    decode = type(tokenizer).decode
    called = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "decode", lambda self, ids, **more: made.append("d") or decode(self, ids)
    )
    monkeypatch.setattr(
        type(tokenizer),
        "__call__",
        lambda self, *a, **more: made.append("e") or called(self, *a, **more),
    )
    prompts, _ = read_prompts([tmp_path / "t.txt"], tokenizer, prompt_length=4, limit=3)
    assert prompts == spread(every, 3) and len(every) > 100
    assert made.count("d") == 3 and made.count("e") == 2
    with pytest.raises(UserError, match="limit is 0"):
        read_prompts([tmp_path / "t.txt"], tokenizer, prompt_length=4, limit=0)


def test_a_prompt_length_that_cuts_some_text_has_an_effect(tmp_path, tokenizer_dir, caplog) -> None:
    rows = [{"prompt": None, "text": "the cat sat on the mat"}, {"prompt": "the", "text": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, _ = read_prompts(
        [tmp_path / "a.jsonl"], load_tokenizer(tokenizer_dir), prompt_length=2
    )
    assert len(prompts) > 2 and prompts[-1].text == "the" and not caplog.text
    (tmp_path / "a.jsonl").write_text('{"prompt": "the", "text": "cat"}\n')
    read_prompts([tmp_path / "a.jsonl"], load_tokenizer(tokenizer_dir), prompt_length=2)
    assert "the prompt length has no effect" in caplog.text


def test_rows_without_the_column_say_what_they_have(tmp_path, tokenizer_dir) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "the cat"}\n{"foo": "x"}\n{"prompt": "the"}\n')
    tokenizer = load_tokenizer(tokenizer_dir)
    with pytest.raises(
        UserError, match=r"a.jsonl:2: no column 'prompt'; it has: foo; --on-bad-row skip"
    ):
        read_prompts([tmp_path / "a.jsonl"], tokenizer)
    options = DataOptions(on_bad_row="skip")
    says = r"1 of 3 rows cannot be used \(1 no column 'prompt'\), the first is .*a.jsonl:2"
    with pytest.raises(UserError, match=says):
        read_prompts([tmp_path / "a.jsonl"], tokenizer, options=options)
    options = DataOptions(on_bad_row="skip", bad_rows_allowed=0.4)
    prompts, refused = read_prompts([tmp_path / "a.jsonl"], tokenizer, options=options)
    assert [prompt.text for prompt in prompts] == ["the cat", "the"]
    assert refused == [f"{tmp_path / 'a.jsonl'}:2 (no column 'prompt'; it has: foo)"]


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ('{"text": "the cat"}\n', {}, "a.jsonl:1 is a text; .* with --prompt-length"),
        ('{"text": "the cat"}\n', {"prompt_length": 0}, "prompt length is 0"),
        (
            '{"body": "the cat"}\n',
            {},
            "a.jsonl:1 has the columns body, but none of 'messages', 'prompt' and 'text'",
        ),
        (
            '{"body": "the cat"}\n',
            {},
            r"name the ones to use \(--text-column and the like; data\.text_column=\.\. in",
        ),
        ('{"prompt": 3}\n', {}, "column 'prompt' holds int, not text"),
        (
            '{"prompt": ""}\n',
            {},
            r"no prompts: every text, .*, the first is .*a.jsonl:1 \(empty text\); check",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', {}, "no chat template"),
    ],
)
def test_what_gives_no_prompts(tmp_path, tokenizer_dir, content, settings, message) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read_prompts([tmp_path / "a.jsonl"], load_tokenizer(tokenizer_dir), **settings)


def test_the_output_is_data(tmp_path) -> None:
    run(tmp_path / "a.jsonl")
    sample = next(read_samples([tmp_path / "a.jsonl"]))
    assert (sample.prompt, sample.prompt_token_ids, sample.tokenizer) == ("text 0", [0, 0], "mark")
    assert sample.completion_token_ids == [0, 0, 0] and sample.complete


def test_tokens_are_counted_while_answers_run(tmp_path, monkeypatch) -> None:
    """Not only once an answer is finished, and not those of earlier work of the engine."""

    class Slow(FakeEngine):
        """Finishes an answer in every tenth step, and makes 2 tokens in each."""

        taken = 0

        def stats(self):
            return SimpleNamespace(generated_tokens=1000 + 2 * self.taken)

        def step(self, finished_only):
            self.taken += 1
            return super().step(finished_only) if self.taken % 10 == 0 else []

    shown = []
    refreshed = []
    monkeypatch.setattr("mtpkit.engine.regenerate._REFRESH", -1)
    monkeypatch.setattr("tqdm.tqdm.set_postfix_str", lambda bar, text, refresh: shown.append(text))
    monkeypatch.setattr("tqdm.tqdm.refresh", lambda bar: refreshed.append(bar.n))
    with Journal(tmp_path / "a.jsonl", SETTINGS) as journal:
        regenerate(Slow(), PROMPTS[:2], Params(), journal, "mark", seed=7, in_flight=2)
    assert [text.split()[0] for text in shown] == [str(2 * step) for step in range(1, 21)]
    assert len(refreshed) >= 20
