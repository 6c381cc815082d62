"""`mtpkit chat`: turns from a pipe and from a terminal, and how answers end."""

import io
import json
import signal
import subprocess
import sys

import pytest

from mtpkit.cli import chat
from mtpkit.engine import LLM, SamplingParams

app = chat.app
TURNS = ["the cat", "def add(left", "on the mat"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def terminal(monkeypatch):
    """Lines that are typed, or what is raised in their place."""

    def terminal(*typed):
        stdin = io.StringIO()
        stdin.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", stdin)
        rest = iter([*typed, EOFError])

        def read(prompt):
            assert prompt == "> "
            one = next(rest)
            if isinstance(one, str):
                return one
            raise one

        monkeypatch.setattr("builtins.input", read)

    return terminal


def conversation(llm, turns, before=(), **kwargs):
    """The answers to questions that are asked one after the other."""
    messages = list(before)
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(llm.chat(messages, GREEDY, **kwargs)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_pipe_has_a_message_in_each_line(chat_dir):
    """In a process of its own, as a script would use it."""
    run = subprocess.run(
        [sys.executable, "-m", "mtpkit.cli.main", "chat", "--model", chat_dir, "--max-tokens", "8"],
        input="\n".join([TURNS[0], "", *TURNS[1:]]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    answers = conversation(LLM(chat_dir), TURNS)
    assert len({*answers}) > 1
    assert run.stdout == "".join(answer + "\n" for answer in answers)


def test_a_system_message_and_variables_of_the_template(chat_dir, call, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(TURNS)))
    variables = {"robot": "mat"}
    options = ["--system", "return left", "--chat-template-kwargs", json.dumps(variables)]
    assert call(app, "--model", chat_dir, "--max-tokens", 8, "--k", 0, *options) == 0
    want = conversation(
        LLM(chat_dir),
        TURNS,
        [{"role": "system", "content": "return left"}],
        chat_template_kwargs=variables,
    )
    assert want != conversation(LLM(chat_dir), TURNS)
    assert capsys.readouterr().out == "".join(answer + "\n" for answer in want)


def test_the_cache_has_the_conversation_so_far(chat_dir, call, monkeypatch, capsys):
    cached = []
    answer = chat._answer

    def spy(llm, asked, sampling):
        before = llm.stats().cached_tokens
        text = answer(llm, asked, sampling)
        cached.append(llm.stats().cached_tokens - before)
        return text

    monkeypatch.setattr(chat, "_answer", spy)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(TURNS)))
    assert call(app, "--model", chat_dir, "--max-tokens", 8) == 0
    assert cached[0] == 0 < cached[1] < cached[2]


def test_a_terminal_asks_and_control_c_drops_what_is_typed(chat_dir, call, capsys, terminal):
    terminal(TURNS[0], KeyboardInterrupt, TURNS[1])
    assert call(app, "--model", chat_dir, "--max-tokens", 8) == 0
    printed = capsys.readouterr()
    first, second = conversation(LLM(chat_dir), TURNS[:2])
    assert printed.out == f"{first}\n\n{second}\n"
    assert "Ctrl-C ends an answer, Ctrl-D the conversation" in printed.err


@pytest.mark.parametrize("steps", [1, 4])
def test_control_c_ends_an_answer_and_the_text_so_far_is_kept(
    chat_dir, call, capsys, terminal, monkeypatch, steps
):
    """The next question comes after what there was of the answer; the engine is idle then."""
    terminal(*TURNS[:2])
    # Python ignores the signal where a shell has started the tests in the background.
    before = signal.getsignal(signal.SIGINT)
    asked = []
    stream = LLM.stream

    def interrupted(llm, prompt, sampling):
        assert not llm.engine.has_unfinished
        asked.append(prompt["messages"])
        for number, output in enumerate(stream(llm, prompt, sampling), start=1):
            if len(asked) == 1 and number == steps:
                signal.raise_signal(signal.SIGINT)
            yield output

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert call(app, "--model", chat_dir, "--max-tokens", 8, "--k", 0) == 0
    first, second, _ = capsys.readouterr().out.split("\n")
    whole = conversation(LLM(chat_dir), TURNS[:1])[0]
    assert whole.startswith(first) and len(first) < len(whole) and second
    # One without text is forgotten with its question.
    known = [TURNS[0], first] if first else []
    assert [one["content"] for one in asked[1]] == [*known, TURNS[1]]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_control_c_stops_at_once():
    with pytest.raises(KeyboardInterrupt), chat._interrupts() as ended:
        signal.raise_signal(signal.SIGINT)
        assert ended.is_set()
        signal.raise_signal(signal.SIGINT)


def test_what_cannot_be_answered_is_forgotten(chat_dir, call, capsys, monkeypatch):
    long = "the cat sat on the mat " * 300
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TURNS[0]}\n{long}\n{TURNS[1]}\n"))
    assert call(app, "--model", chat_dir, "--max-tokens", 8, "--max-model-len", 200) == 1
    printed = capsys.readouterr()
    answers = conversation(LLM(chat_dir), TURNS[:2])
    assert printed.out == "".join(answer + "\n" for answer in answers)
    assert "leave no room for output in max_model_len" in printed.err
    assert printed.err.splitlines()[-1] == (
        "mtpkit: error: 1 message could not be answered, named above"
    )


def test_mistakes_are_one_line_before_weights_are_read(
    model_dir, call, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("mtpkit.engine.LLM", lambda **_: pytest.fail("too late"))
    for options, message in (
        (["--model", model_dir], "has no chat template: add chat_template.jinja to it, or"),
        (["--model", tmp_path / "no"], "no: no such model directory"),
        (["--model", model_dir, "--chat-template-kwargs", '{"messages": 1}'], "has 'messages', no"),
    ):
        assert call(app, *options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
