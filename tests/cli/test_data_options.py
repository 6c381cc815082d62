"""`mtpkit data` takes the options of chat data, and reports what was left out."""

import json

from mtpkit.cli.data import app
from mtpkit.data.options import DataOptions
from mtpkit.data.prepared import read_manifest

STRICT = (
    "{% if strict and messages | length % 2 %}{{ raise_exception('alternate') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]


def test_the_command_takes_the_options_and_reports(tmp_path, tokenizer_dir, call, capsys) -> None:
    (tmp_path / "template.jinja").write_text(STRICT)
    odd = {"messages": [TALK[0], *TALK]}
    long = {"messages": [TALK[0], {"role": "assistant", "content": "sat on the mat " * 20}]}
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in [*[{"messages": TALK}] * 10, odd, long])
    )
    arguments = ["prepare", "--model", tokenizer_dir, "--data", file, "--sequence-length", 32]
    arguments += [
        "--chat-template-kwargs",
        '{"strict": true}',
        "--num-proc",
        1,
        "--chat-template",
        tmp_path / "template.jinja",
    ]
    assert call(app, *arguments, "--output", tmp_path / "out") == 2
    assert (
        f"{file}:11: the chat template refuses it: alternate; --on-bad-row skip"
        in capsys.readouterr().err
    )
    more = [
        "--on-bad-row",
        "skip",
        "--long-conversations",
        "drop",
        "--loss",
        "last_turn",
        "--sample-per-turn",
    ]
    assert call(app, *arguments, *more, "--output", tmp_path / "out") == 0
    rows = [
        line.strip("│ ").split("│")
        for line in capsys.readouterr().out.splitlines()
        if line.count("│") == 3
    ]
    found = {name.strip(): number.strip() for name, number in rows}
    assert (
        found["left out: the chat template refuses it"]
        == found["left out: longer than a sequence"]
        == "1"
    )
    assert found["longer than 32 tokens"] == "1" and found["documents"] == "12"
    options = read_manifest(tmp_path / "out").options
    assert options == DataOptions("last_turn", True, "drop", "skip", 0.1, {"strict": True})
    for wrong in ("5", "{", "[]"):
        assert (
            call(app, *arguments, "--chat-template-kwargs", wrong, "--output", tmp_path / "other")
            == 2
        )
        assert "error: --chat-template-kwargs is " in (error := capsys.readouterr().err)
        assert "must be an object" in error
