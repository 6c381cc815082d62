"""Reports: the object, the tables, the files, the gate."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from mtpkit.bench.speedup import SpeedupReport, SpeedupRow
from mtpkit.errors import MtpkitError, StorageError


def row(batch_size: int, k: int, identical: float = 1.0) -> SpeedupRow:
    return SpeedupRow(batch_size, k, 30.0 * (1 + k), 1.0 + k, 1 + 0.5 * k, [0.5] * k, identical)


def report(*rows: SpeedupRow, **changes) -> SpeedupReport:
    values = dict(model="dir", device="cpu", dtype="float32", commit="abc")
    return SpeedupReport(list(rows) or [row(1, 0), row(1, 2)], **{**values, **changes})


def test_the_object_has_the_documented_keys_in_order():
    values = report(settings={"prompts": 3}).to_dict()
    assert list(values) == ["rows", "model", "device", "dtype", "commit"]
    assert values["rows"][1] == {
        "batch_size": 1,
        "k": 2,
        "tokens_per_s": 90.0,
        "speedup": 3.0,
        "acceptance_length": 2.0,
        "conditional_acceptance": [0.5, 0.5],
        "identical": 1.0,
    }
    assert list(report(before=[row(1, 0)]).to_dict())[-1] == "before"


def test_intervals_stand_beside_their_values():
    found = report(
        row(1, 0),
        replace(row(1, 2), speedup_interval=(1.32, 4.1), acceptance_length_interval=(1.8, 2.25)),
    )
    assert "speedup_interval" not in found.to_dict()["rows"][0]
    values = json.loads(json.dumps(found.to_dict()))["rows"][1]
    assert (values["speedup_interval"], values["acceptance_length_interval"]) == (
        [1.32, 4.1],
        [1.8, 2.25],
    )
    console = Console(width=120, file=io.StringIO())
    for table in found.tables():
        console.print(table)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert [
        "1",
        "2",
        "90.0",
        "3.00x",
        "(1.32-4.10)",
        "2.00",
        "(1.80-2.25)",
        "50%",
        "50%",
        "100%",
    ] in lines


def test_trees_say_which_candidates_the_base_chose():
    found = report(row(1, 0), replace(row(1, 2), candidate_shares=[[0.625, 0.125], [0.5, 0.0]]))
    assert "candidate_shares" not in found.to_dict()["rows"][0]
    assert found.to_dict()["rows"][1]["candidate_shares"] == [[0.625, 0.125], [0.5, 0.0]]
    console = Console(width=120, file=io.StringIO())
    for table in found.tables():
        console.print(table)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["1", "2", "1", "62%", "12%", "25%"] in lines and [
        "1",
        "2",
        "2",
        "50%",
        "0%",
        "50%",
    ] in lines


def test_tables_show_every_row():
    console = Console(width=120, file=io.StringIO())
    for table in report(row(8, 0), row(8, 2, identical=0.75), before=[row(1, 3)]).tables():
        console.print(table)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["untrained", "heads"] in lines and ["trained", "heads"] in lines
    assert ["8", "0", "30.0", "1.00x", "-", "-", "100%"] in lines
    assert ["8", "2", "90.0", "3.00x", "2.00", "50%", "50%", "75%"] in lines
    assert ["1", "3", "120.0", "4.00x", "2.50", "50%", "50%", "50%", "100%"] in lines


@pytest.mark.parametrize(
    "rows",
    [[row(1, 0)], [row(b, k) for b in (1, 2, 4, 8, 16, 32, 64) for k in (0, 1)]],
    ids=["K = 0", "7 batches"],
)
def test_saving_replaces_all_files_and_leaves_no_others(tmp_path, rows):
    out = tmp_path / "new" / "out"
    report().save(out)
    report(*rows, before=[row(1, 0), row(1, 3)], settings={"prompts": 3}).save(out)
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.md", "report.png"]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((out / "report.json").read_text())
    assert len(saved["rows"]) == len(rows) and saved["settings"] == {"prompts": 3}
    text = (out / "report.md").read_text()
    assert (
        text.startswith("untrained heads\n\n| batch | K |")
        and text.count("\n|") == len(rows) + 2 + 4
    )


def test_a_failure_leaves_nothing_half_written(tmp_path):
    (tmp_path / "report.md").mkdir()
    with pytest.raises(StorageError, match="cannot write: Is a directory"):
        report().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_the_gate_names_the_rows_that_differ():
    report().require_identical()
    bad = report(row(1, 0), row(1, 2, identical=0.75), row(8, 0), row(8, 3, identical=0.5))
    with pytest.raises(MtpkitError, match="25% at batch 1, K = 2; 50% at batch 8, K = 3"):
        bad.require_identical()
