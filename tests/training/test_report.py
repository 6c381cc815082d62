"""The report of a run: whole, self-contained, and of what the metrics say."""

import json
import math
import re

import pytest

from mtpkit.errors import UserError
from mtpkit.training import report
from mtpkit.training.report import MAX_POINTS, write_report


def train_line(step, **more):
    rates = {"conditional_acceptance": [0.5, 0.4], "acceptance_length": 1.7}
    return {
        "kind": "train",
        "step": step,
        "loss": 3 / step,
        "lr": 1e-3,
        "tokens_per_s": 1e4,
        **rates,
        **more,
    }


def eval_line(step, length=1.7, names=("code", "<chat>")):
    values = {
        "loss": 2.5,
        "steps": 1234,
        "departures": 0.125,
        "conditional_acceptance": [0.5, 0.4],
        "acceptance_length": length,
    }
    values |= {
        "sampling_acceptance_length": length - 0.25,
        "draft_sampling_acceptance_length": length - 0.125,
    }
    values |= {"acceptance_length_interval": [length - 0.5, length + 0.5]}
    values |= {
        f"{name}_acceptance_length_interval": None for name in ("sampling", "draft_sampling")
    }
    return {"kind": "eval", "step": step, **values, "sources": dict.fromkeys(names, values)}


def write(directory, lines, cut=""):
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + cut
    )
    return write_report(directory).read_text()


def titles(page):
    return re.findall(r">([a-zA-Z/, -]+)</text>", page)


def test_curves_and_the_last_evaluation(tmp_path):
    (tmp_path / "best.json").write_text('{"iteration": 2, "acceptance_length": 1.9}')
    (tmp_path / "config.yaml").write_text("model: <base>\n")
    lines = [
        eval_line(0, 1.0),
        train_line(1),
        train_line(2),
        eval_line(2, 1.9),
        train_line(3),
        train_line(4),
    ]
    page = write(tmp_path, [*lines, eval_line(4, 1.8)], cut='{"kind": "tr')
    assert page.count("<svg") == 6
    shown = titles(page)
    for title in (
        "loss",
        "conditional acceptance, held-out",
        "acceptance length, held-out",
        "learning rate",
        "tokens/s",
    ):
        assert title in shown
    assert {"depth 1", "code", "all", "drawn drafts"} <= set(re.findall(r">([^<>]+)</text>", page))
    assert "best held-out acceptance length 1.900 at step 2" in page and "at step 4</h2>" in page
    assert (
        "<td>12.5%</td>" in page and "<td>1.800\n1.30-2.30</td><td>1.550</td><td>1.675</td>" in page
    )
    assert "<td>&lt;chat&gt;</td>" in page and "model: &lt;base&gt;" in page
    assert not re.search(r"<(script|link|img)", page) and "http" not in re.sub(
        r'xmlns(:\w+)?="[^"]*"', "", page
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_without_held_out_data_and_with_utilization(tmp_path):
    page = write(tmp_path, [train_line(step, mfu=0.4) for step in (1, 2)])
    assert "conditional acceptance, training" in titles(
        page
    ) and "model FLOPs utilization" in titles(page)
    assert "<h2>" not in page


def test_long_runs_have_short_curves(tmp_path):
    page = write(
        tmp_path, [train_line(step, loss=math.sin(step)) for step in range(1, 20 * MAX_POINTS)]
    )
    assert len(page) < 200_000


def test_nothing_to_report(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"kind": "train", "step": 2}, "loss is missing"),
        ({"kind": "eval", "step": 2, "sources": 5}, "sources is 5, must be an object"),
        (
            {**eval_line(2), "conditional_acceptance": None},
            "conditional_acceptance is None, must be a list",
        ),
        (
            {**eval_line(2), "sources": {"code": []}},
            r"sources\['code'\] is \[\], must be a group of values",
        ),
        ({**train_line(2), "lr": "high"}, "lr is 'high', must be a number"),
        (
            {**train_line(2), "conditional_acceptance": [0.5, "x"]},
            r"conditional_acceptance\[1\] is 'x'",
        ),
    ],
)
def test_metrics_that_no_run_wrote_are_one_line(tmp_path, line, says):
    with pytest.raises(UserError, match=rf"metrics\.jsonl, line 2: .*{says}") as error:
        write(tmp_path, [train_line(1), line])
    assert "\n" not in str(error.value) and not (tmp_path / "report.html").exists()


def test_a_bug_of_its_own_is_not_laid_to_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_draw", lambda *panel: {}["a key of nothing"])
    with pytest.raises(KeyError):
        write(tmp_path, [train_line(1)])


@pytest.mark.parametrize(
    "best",
    [
        *("{", "5", "{}", '{"iteration": "x", "acceptance_length": "y"}', "\ud800"),
        *(
            '{"iteration": 2, "acceptance_length": NaN}',
            '{"iteration": true, "acceptance_length": 2.0}',
        ),
    ],
)
def test_a_best_that_no_run_wrote_is_one_line(tmp_path, best):
    (tmp_path / "best.json").write_text(best, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UserError, match=r"best\.json") as error:
        write(tmp_path, [train_line(1)])
    assert "\n" not in str(error.value)
