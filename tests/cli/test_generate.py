"""`mtpkit generate`: where prompts come from, and what goes to stdout and to stderr."""

import contextlib
import io
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mtpkit.cli.generate import _decoder, _summary, app
from mtpkit.engine import LLM, LLMOptions, SamplingParams
from mtpkit.engine.engine import Engine
from mtpkit.engine.requests.stats import AcceptanceStats, EngineStats
from mtpkit.errors import MtpkitError
from tests.ranks import preload

PROMPT = "the cat sat"


@pytest.fixture
def answer(model_dir):
    """The model's greedy output for a prompt, without drafts."""
    llm = LLM(model_dir)

    def answer(prompt):
        return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]

    return answer


@pytest.mark.parametrize("source", ["argument", "stdin", "file"])
def test_a_prompt_from_anywhere_is_continued(
    source, model_dir, answer, call, capsys, monkeypatch, tmp_path
):
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    where = {"argument": [PROMPT], "stdin": [], "file": ["--prompts", tmp_path / "prompt.txt"]}[
        source
    ]
    assert call(app, "--model", model_dir, "--max-tokens", 8, *where) == 0
    printed = capsys.readouterr()
    assert printed.out == answer(PROMPT).text + "\n"
    # K is what the heads were made for
    assert " tokens/s, K = 2, acceptance length 1." in printed.err


def test_the_first_open_prompt_streams_and_all_come_in_order(
    model_dir, answer, call, capsys, tmp_path
):
    """The second and third prompt wait for the first, though they are decoded beside it."""
    prompts = [PROMPT, "def add(left, right)", "on the"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    options = ["--k", 0, "--max-tokens", 8]
    assert call(app, "--model", model_dir, "--prompts", tmp_path / "prompts.txt", *options) == 0
    headings = [
        f"== {tmp_path / 'prompts.txt'}:{line}: {prompt}" for line, prompt in enumerate(prompts, 1)
    ]
    texts = [answer(prompt).text for prompt in prompts]
    expected = [f"{heading}\n{text}\n" for heading, text in zip(headings, texts, strict=True)]
    assert capsys.readouterr().out == "".join(expected)


def test_long_prompts_and_token_ids_have_short_headings(model_dir, call, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"prompt": "a\nb " * 60}) + '\n{"prompt_token_ids": [5, 6]}\n'
    )
    assert (
        call(app, "--model", model_dir, "--prompts", tmp_path / "p.jsonl", "--max-tokens", 1) == 0
    )
    first, second = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("== ")
    )
    assert first == f"== {tmp_path / 'p.jsonl'}:1: {('a b ' * 60)[:60]} ..."
    assert second == f"== {tmp_path / 'p.jsonl'}:2: 2 tokens"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_is_waited_for(terminal, model_dir, call, capsys, monkeypatch):
    stdin = io.StringIO(PROMPT)
    stdin.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdin", stdin)
    assert call(app, "--model", model_dir, "--max-tokens", 1) == 0
    assert (
        "type the prompt, and Ctrl-D at the start of a line to end it\n" in capsys.readouterr().err
    ) == terminal


def test_json_lines(model_dir, answer, call, capsys, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n{"prompt": "the"}\n')
    options = ["--prompts", tmp_path / "prompts.jsonl", "--max-tokens", 8, "--json", "--k", 1]
    assert call(app, "--model", model_dir, *options) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["index"], second["index"]) == (0, 1)
    assert first["prompt"] is None and second["prompt"] == "the"
    assert first["token_ids"] == answer([5, 6]).token_ids and second["text"] == answer("the").text
    assert (second["finish_reason"], len(second["conditional_acceptance"])) == ("length", 1)


@pytest.mark.parametrize("prompts", [["the"], ["the", "the cat"]])
def test_each_of_several_outputs_has_a_heading(prompts, model_dir, call, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    options = ["--prompts", tmp_path / "prompts.txt", "--max-tokens", 8]
    options += ["--temperature", 1.5, "--seed", 3, "--n", 3]
    whole = LLM(model_dir).generate(
        prompts, SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=8)
    )
    assert call(app, "--model", model_dir, *options) == 0
    printed = capsys.readouterr()
    assert printed.out == "".join(
        f"== {tmp_path / 'prompts.txt'}:{line}: {output.prompt} (output {place} of 3)\n{one.text}\n"
        for line, output in enumerate(whole, 1)
        for place, one in enumerate(output.outputs, 1)
    )
    assert len({one.text for one in whole[0].outputs}) > 1
    assert f"length {3 * len(prompts)}" in printed.err

    assert call(app, "--model", model_dir, *options, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[one["token_ids"] for one in record["outputs"]] for record in records] == [
        [one.token_ids for one in output.outputs] for output in whole
    ]
    assert call(app, "--model", model_dir, *options, "--max-num-seqs", 2) == 2
    assert "n is 3, but at most 2 requests run at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--speculative-token-tree", "[3, 2]"),
        (
            "--num-speculative-tokens",
            2,
            "--speculative-eagle-topk",
            3,
            "--speculative-num-draft-tokens",
            6,
        ),
    ],
)
def test_trees(options, model_dir, answer, call, capsys):
    """The text is the same, and what was counted of the candidates is printed."""
    assert call(app, "--model", model_dir, "--max-tokens", 8, *options, PROMPT) == 0
    printed = capsys.readouterr()
    assert printed.out == answer(PROMPT).text + "\n"
    assert (
        "K = 2, acceptance length" in printed.err
        and "; depth 1: the base chose candidate 1 in " in printed.err
    )


def test_ranks_are_shares_of_the_steps_that_reach_a_depth():
    stats = AcceptanceStats(10, 60, [5, 1], [10, 0], [[4, 1], [0, 0]])
    totals = EngineStats(stats, 15, 1.0, 0, 0, 0, 0)
    assert _summary(2, totals, Counter()).endswith(
        "50%, -; depth 1: the base chose candidate 1 in 40%, 2 in 10%"
    )


def test_sampling_follows_the_seed(model_dir, call, capsys):
    texts = []
    for seed in (1, 1, 2):
        options = ["--temperature", 1.5, "--seed", seed, "--max-tokens", 12]
        assert call(app, "--model", model_dir, *options, PROMPT) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_help_says_how_several_stop_strings_are_given(call, capsys):
    assert call(app, "--help") == 0
    assert "several as a list, or by repeating the option" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_stop_token_ends_the_text_and_finish_reasons_are_told(
    model_dir, answer, call, capsys, tmp_path
):
    tokens = answer(PROMPT).token_ids
    options = ["--model", model_dir, "--max-tokens", 8, "--stop-token-ids", tokens[4], "--json"]
    assert call(app, *options, PROMPT) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["token_ids"] == tokens[: tokens.index(tokens[4]) + 1]
    assert printed.err.splitlines()[-1].startswith("finish reason: stop; ")
    (tmp_path / "p.txt").write_text(f"{PROMPT}\n{PROMPT}\n")
    assert call(app, "--model", model_dir, "--max-tokens", 3, "--prompts", tmp_path / "p.txt") == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("finish reasons: length 2; ")


def test_a_stop_string_ends_the_text(model_dir, answer, call, capsys):
    text = answer(PROMPT).text
    stop = text[len(text) // 2 :][:2]
    assert call(app, "--model", model_dir, "--max-tokens", 8, "--stop", stop, PROMPT) == 0
    assert capsys.readouterr().out == text[: text.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["", "--k", 0], "the prompt is empty: give a text, --prompts, or text on stdin"),
        ([PROMPT, "--prompts", "x"], "a prompt and --prompts were both given: leave one out"),
        ([PROMPT, "--temperature", -1], "--temperature is -1.0, must be at least 0"),
        ([PROMPT, "--top-p", 0], "--top-p is 0.0, must be above 0 and at most 1"),
        (
            [PROMPT, "--top-k", -3],
            "--top-k is -3, must be from 1 to 2147483647, or 0 or -1 to turn it off",
        ),
        ([PROMPT, "--min-p", 2], "--min-p is 2.0, must be from 0 to 1"),
        ([PROMPT, "--dtype", "int8"], "Invalid value for '--dtype'"),
        (
            [PROMPT, "--top-p", 0, "--top-k", -3],
            "--top-k is -3, must be from 1 to 2147483647, or 0 or -1 to turn it off; --top-p",
        ),
        (
            [PROMPT, "--top-p", 0, "--max-num-seqs", 0],
            "at most 1; --max-num-seqs is 0",
        ),
        (
            [PROMPT, "--max-model-len", 3],
            "prompt tokens leave no room for output in --max-model-len 3: shorten",
        ),
    ],
)
def test_mistakes_are_one_line(options, message, model_dir, call, capsys):
    assert call(app, "--model", model_dir, *options) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and message in printed.err and not printed.out


@pytest.mark.parametrize("encoding", ["strict", "surrogateescape"])
def test_a_prompt_that_is_not_utf_8_is_one_line(encoding, model_dir, call, capsys, monkeypatch):
    """On stdin, and as an argument, where Python keeps other bytes as surrogates."""
    stdin = io.TextIOWrapper(
        io.BytesIO("caf\xe9".encode("latin-1")), encoding="utf-8", errors=encoding
    )
    monkeypatch.setattr("sys.stdin", stdin)
    for where, name in (([], "the prompt on stdin"), (["caf\udce9"], "the prompt")):
        assert call(app, "--model", model_dir, *where) == 2
        printed = capsys.readouterr()
        assert (
            printed.err.count("\n") == 1
            and f"{name} is not UTF-8 text" in printed.err
            and not printed.out
        )


def test_auto_chooses_k(model_dir, answer, call, capsys):
    assert call(app, "--model", model_dir, "--max-tokens", 8, "--k", "auto", PROMPT) == 0
    printed = capsys.readouterr()
    assert printed.out == answer(PROMPT).text + "\n" and "K = auto" in printed.err
    assert call(app, "--model", model_dir, "--k", "many", PROMPT) == 2
    assert "--k is 'many', must be a whole number or 'auto'\n" in capsys.readouterr().err


def test_engine_settings_reach_the_engine(model_dir, call, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(
        "mtpkit.engine.LLM", lambda *args, **named: made.append(LLM(*args, **named)) or made[-1]
    )
    options = [
        "--max-num-seqs",
        3,
        "--max-num-batched-tokens",
        40,
        "--draft-sampling",
        "--state-dtype",
        "bfloat16",
    ]
    options += ["--block-size", 4, "--max-tokens", 2]
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n" * 4)
    assert call(app, "--model", model_dir, *options, "--prompts", tmp_path / "prompts.txt") == 0
    config = made[0].engine.config
    layout = made[0].engine.layout
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (3, 40, 4)
    assert config.draft_sampling and layout.sizes.state_dtype == torch.bfloat16
    assert call(app, "--model", model_dir, *options, PROMPT) == 0
    assert made[-1].engine.config.max_num_seqs == 1, "there are no more prompts"
    assert call(app, "--model", model_dir, *options, "--prefix-cache-bytes", 2**24, PROMPT) == 0
    assert 2**24 - made[-1].memory_plan.prefix_bytes < made[-1].memory_plan.checkpoint_bytes
    share = ["--gpu-memory-utilization", 2]
    assert call(app, "--model", model_dir, *share, PROMPT) == 2


def test_depths_that_were_never_reached_have_no_rate():
    """Those that were, and always wrong, have one of 0%."""
    acceptance = AcceptanceStats(
        steps=2, drafted=6, accepted_per_depth=[1, 0, 0], reached_per_depth=[2, 1, 0]
    )
    line = _summary(3, EngineStats(acceptance, 3, 1.0, 0, 0, 0, 0), Counter())
    assert line.endswith("acceptance length 1.50, conditional acceptance 50%, 0%, -")


@pytest.fixture
def several(tmp_path):
    """A file of prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{PROMPT[:length]}\n" for length in (3, 11, 7, 5, 9)))
    return path


@pytest.mark.parametrize("options", [("--json",), ("--temperature", 1.5, "--seed", 3)])
def test_replicas_write_what_one_process_prints(
    options, model_dir, several, call, capsys, tmp_path
):
    preload(__name__)
    # What a prompt finds in a cache depends on the replica.
    options = [
        "--model",
        model_dir,
        "--prompts",
        several,
        "--max-tokens",
        8,
        "--no-enable-prefix-caching",
        *options,
    ]
    assert call(app, *options) == 0
    one = capsys.readouterr()
    assert call(app, *options, "--data-parallel-size", 2, "--output", tmp_path / "out") == 0
    two = capsys.readouterr()
    assert not two.out and (tmp_path / "out").read_text() == one.out
    assert f"2 replicas load {model_dir}\nfinish reasons: length 5; 40 tokens in " in two.err
    counts = [printed.err[printed.err.index(", K = ") :] for printed in (one, two)]
    assert counts[0] == counts[1]


def test_several_replicas_share_the_prompts(monkeypatch):
    started = []

    @contextlib.contextmanager
    def replicas(options, count):
        started.append((count, options.max_num_seqs))
        yield "replicas"

    monkeypatch.setattr("mtpkit.engine.Replicas", replicas)
    with _decoder(LLMOptions("model", max_num_seqs=8), 2, 10) as found:
        assert found == "replicas"
    assert started == [(2, 5)]


def test_no_more_replicas_are_started_than_there_are_prompts(model_dir, answer, call, capsys):
    assert (
        call(app, "--model", model_dir, "--max-tokens", 8, "--data-parallel-size", 3, PROMPT) == 0
    )
    printed = capsys.readouterr()
    assert (
        printed.out == answer(PROMPT).text + "\n"
        and "1 prompt: no more of 3 replicas are started\n" in printed.err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--data-parallel-size", 2, "--tensor-parallel-size", 2),
            "--tensor-parallel-size 2 splits it: leave one of the two",
        ),
        (("--data-parallel-size", 0), "'--data-parallel-size': must be at least 1, not 0"),
        (("--output", "."), "is a directory; name a file"),
    ],
)
def test_refusals_leave_the_output_as_it_was(
    options, message, model_dir, several, call, capsys, tmp_path
):
    preload(__name__)
    (tmp_path / "out").write_text("before")
    options = [
        "--model",
        model_dir,
        "--prompts",
        several,
        "--max-tokens",
        1,
        "--output",
        tmp_path / "out",
        *options,
    ]
    assert call(app, *options) == 2
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith("mtpkit: error: ") and message in printed
    assert (tmp_path / "out").read_text() == "before" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("options", [(), ("--data-parallel-size", 2)])
def test_a_bad_prompt_of_a_file_does_not_stop_the_others(
    options, model_dir, answer, call, capsys, tmp_path
):
    preload(__name__)
    lines = [{"prompt": PROMPT}, {"prompt_token_ids": [1] * 40, "name": "long"}, {"prompt": PROMPT}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--max-tokens",
        8,
        "--max-model-len",
        40,
        "--json",
        *options,
    ]
    assert call(app, "--model", model_dir, *options) == 1
    printed = capsys.readouterr()
    first, bad, last = map(json.loads, printed.out.splitlines())
    assert (
        first["text"] == last["text"] == answer(PROMPT).text and first["finish_reason"] == "length"
    )
    assert (bad["index"], bad["text"], bad["finish_reason"]) == (1, "", "error")
    assert "40 prompt tokens leave no room for output in max_model_len 40" in bad["error"]
    assert (
        bad["error"] + "\n" in printed.err
        and "1 of 3 prompts ended with an error, named above" in printed.err
    )


def test_hits_of_the_prefix_cache_are_told(model_dir, answer, call, capsys, tmp_path):
    """The second prompt waits for the first, and begins like it."""
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n{PROMPT}\n")
    options = [
        "--prompts",
        tmp_path / "prompts.txt",
        "--max-tokens",
        8,
        "--max-num-seqs",
        1,
        "--json",
    ]
    assert call(app, "--model", model_dir, *options, "--enable-prefix-caching", "--k", 2) == 0
    printed = capsys.readouterr()
    first, second = map(json.loads, printed.out.splitlines())
    assert first["text"] == second["text"] == answer(PROMPT).text
    count = second["num_cached_tokens"]
    assert first["num_cached_tokens"] == 0 < count
    assert f"{count} of {2 * count} prompt tokens from the prefix cache" in printed.err


def test_without_a_tokenizer_there_is_no_text(model_dir, call, capsys, tmp_path):
    for file in model_dir.iterdir():
        if not file.name.startswith(("tokenizer", "special_tokens")):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "ids.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
    options = ["--model", tmp_path, "--prompts", tmp_path / "ids.jsonl", "--max-tokens", 4]
    assert call(app, *options) == 0
    assert (
        "has no tokenizer, so there is no text: --json prints token ids" in capsys.readouterr().err
    )
    assert call(app, *options, "--json") == 0
    printed = capsys.readouterr()
    assert "tokenizer" not in printed.err and len(json.loads(printed.out)["token_ids"]) == 4


def test_the_memory_plan_is_printed_on_a_gpu_or_when_asked_for(
    model_dir, call, capsys, monkeypatch
):
    for options, total, printed in (
        ([], 0, False),
        (["--memory-plan"], 0, True),
        ([], 1 << 30, True),
    ):
        make = LLM.__init__

        def plan(llm, *args, total=total, make=make, **named):
            make(llm, *args, **named)
            llm.memory_plan = replace(llm.memory_plan, total=total)

        with monkeypatch.context() as patch:
            patch.setattr(LLM, "__init__", plan)
            assert call(app, "--model", model_dir, "--max-tokens", 1, *options, PROMPT) == 0
        assert ("memory plan: " in capsys.readouterr().err) == printed


def test_an_error_has_a_line_of_its_own(model_dir, call, capsys, monkeypatch):
    """Though the text before it had none of its own yet."""
    step = Engine.step
    steps = []

    def failing(engine, *args):
        steps.append(engine)
        if len(steps) > 6:
            raise MtpkitError("rank 1 has died")
        return step(engine, *args)

    monkeypatch.setattr(Engine, "step", failing)
    assert call(app, "--model", model_dir, PROMPT, "--max-tokens", 40) != 0
    said = capsys.readouterr()
    assert (
        said.out.strip()
        and said.out.endswith("\n")
        and said.err.splitlines()[-1].endswith("rank 1 has died")
    )


RAW = "raw text, but the tokenizer has a chat template"


@pytest.mark.parametrize("source", ["argument", "stdin", "file"])
def test_a_question_goes_through_the_template(
    source, chat_dir, call, capsys, caplog, monkeypatch, tmp_path
):
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    where = {"argument": [PROMPT], "stdin": [], "file": ["--prompts", tmp_path / "prompt.txt"]}
    options = ["--model", chat_dir, "--max-tokens", 8, *where[source]]
    assert call(app, *options, "--chat", "--chat-template-kwargs", '{"robot": "mat"}') == 0
    printed = capsys.readouterr()
    llm = LLM(chat_dir)
    question = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(temperature=0, max_tokens=8)
    (want,) = llm.chat(question, params, chat_template_kwargs={"robot": "mat"})
    assert want.prompt == f"[mat]user: {PROMPT}<eos>assistant: "
    assert printed.out == want.outputs[0].text + "\n" and RAW not in caplog.text
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert call(app, *options) == 0
    assert caplog.text.count(f"the prompt is {RAW}") == 1


def test_rows_with_messages(chat_dir, call, capsys, caplog, tmp_path):
    """One that the template refuses ends with an error, and the others are answered."""
    turns = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "on the mat"}]
    rows = [
        {"messages": turns},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [turns[0], {"role": "user", "content": [{"type": "image_url"}]}]},
        {"prompt": "def add"},
        {"messages": turns, "add_generation_prompt": False, "continue_final_message": True},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--model", chat_dir, "--prompts", tmp_path / "rows.jsonl", "--max-tokens", 8]
    assert call(app, *options, "--json") == 1
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    assert [record["prompt"] for record in records] == [
        f"user: {PROMPT}<eos>assistant: ",
        None,
        None,
        "def add",
        f"user: {PROMPT}<eos>assistant: on the mat",
    ]
    assert records[1]["error"].endswith("rows.jsonl:2: the chat template refuses it: no robot")
    assert records[2]["error"].endswith(
        "has a part of the type 'image_url'; models read and write text only"
    )
    assert f"1 of 5 prompts are {RAW}" in caplog.text
    assert "2 of 5 prompts ended with an error, named above" in printed.err
    assert call(app, *options) == 1
    headings = [
        line.partition(".jsonl:")[2]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("== ")
    ]
    assert headings[:2] == [f"1: {PROMPT}", "2: x"]
    assert headings[3:] == ["4: def add", "5: on the mat"]


def test_base_models_read_raw_text_without_a_warning(model_dir, call, capsys, caplog):
    assert call(app, "--model", model_dir, "--max-tokens", 2, PROMPT) == 0
    assert RAW not in caplog.text
    assert call(app, "--model", model_dir, "--max-tokens", 2, "--chat", PROMPT) == 2
    assert "has no chat template: add chat_template.jinja to it" in capsys.readouterr().err
