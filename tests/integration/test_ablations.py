"""The ablations of training: a row of given text and one of the base's own, at two steps each."""

import json

import pytest

from mtpkit.training.config.reading import load_config
from tests.integration.front_doors import call_here, call_in_fork

TEXT = (
    "def add(left, right):\n    return left + right\n\n\nclass Sum:\n    def __init__(self):\n     "
    "   self.value = 0\n"
)


@pytest.fixture
def corpus(tmp_path):
    lines = {
        "train": [{"text": f"# part {number}\n{TEXT * 3}"} for number in range(40)],
        "heldout": [{"text": TEXT * 4}],
        "prompts": [{"prompt": TEXT}, {"prompt": "import os\nimport sys\n"}],
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_rows_of_text_and_of_the_bases_own_answers(corpus, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.run", call_in_fork)
    options = [
        "--corpus",
        corpus,
        "--output",
        corpus / "out",
        "--steps",
        2,
        "--prompts",
        2,
        "--rows",
        1,
        16,
    ]
    assert not call_here("examples/ablations.py", *options)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["steps"], result["prompts"]) == (2, 2)
    per_depth, own = result["rows"]
    assert [(row["loss"], row["attention"], row["data"], row["k"]) for row in (per_depth, own)] == [
        ("kl", "per_depth", "text", 3),
        ("kl", "serving", "greedy", 3),
    ]
    assert own["trained"] == pytest.approx(own["in_serving"]) and own["trained"] > 1
    settings = load_config(corpus / "out" / "kl-per_depth-text-k3-2" / "config.yaml")
    assert (settings.heads.attention, settings.steps) == ("per_depth", 2)
    for row in (per_depth, own):
        assert row["engine"] == pytest.approx(row["served"], rel=1e-12)
        assert len(row["engine_conditional_acceptance"]) == 3
    answers = [
        json.loads(line) for line in (corpus / "out" / "greedy-2.jsonl").read_text().splitlines()
    ]
    assert len(answers) == 11 and all(
        len(answer["completion_token_ids"]) == 96 for answer in answers
    )


def test_mistakes_end_in_one_line(corpus, capsys):
    (corpus / "file").touch()
    ablations = ["examples/ablations.py", "--corpus", corpus, "--output"]
    for command, says in (
        ([*ablations, corpus / "file" / "x"], f"mtpkit: error: {corpus}/file/x: Not a directory"),
        ([*ablations, corpus, "--rows", 99], "argument --rows: invalid choice: 99"),
        ([*ablations, corpus, "--rows", "kl"], "argument --rows: invalid int value: 'kl'"),
        (
            ["examples/tiny_base/corpus.py", corpus / "file"],
            f"mtpkit: error: {corpus}/file: File exists",
        ),
    ):
        code = call_here(*command)
        error = capsys.readouterr().err
        assert code and "Traceback" not in error
        assert says in error.splitlines()[-1]
