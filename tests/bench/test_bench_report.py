"""Results: the table, the object, the files; and the machine that they were measured on."""

import json
import weakref
from dataclasses import dataclass, make_dataclass, replace
from typing import Annotated

import pytest
import torch

from mtpkit.bench import machine
from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.report import Column, Result, significant
from mtpkit.bench.timing import mean_seconds, median_seconds
from tests.shared import each


@dataclass(frozen=True)
class Row:
    size: Annotated[int, Column("size")]
    speed: Annotated[float, Column("tokens/s", ".1f")]


MACHINE = Machine("fake", "abc", "2026-01-02 03:04 UTC", 4e12, 4.5e12, 8e14)


def result(*rows: Row) -> Result[Row]:
    return Result("speed", "how fast", Row, list(rows), MACHINE, {"k": 3})


def test_the_object_is_the_last_line(capsys):
    result(Row(1, 2.5), Row(4, 8)).show()
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {
        "benchmark": "speed",
        "rows": [{"size": 1, "speed": 2.5}, {"size": 4, "speed": 8}],
        "device": "fake",
        "commit": "abc",
        "date": "2026-01-02 03:04 UTC",
        "copy_bandwidth": 4e12,
        "read_bandwidth": 4.5e12,
        "matrix_rate": 8e14,
        "sustained_rate": None,
        "fp8_rate": None,
        "settings": {"k": 3},
    }
    assert ["4", "8.0"] in [line.split() for line in lines]
    assert (
        lines[-2]
        == "fake, commit abc, 2026-01-02 03:04 UTC: copy 4 TB/s, reads alone 4.5 TB/s, matrix"
        " product 800 TFLOP/s"
    )


def test_nothing_is_said_of_a_machine_where_nothing_was_timed(capsys, tmp_path):
    untimed = replace(result(Row(1, 2.5)), machine=None)
    untimed.show()
    untimed.save(tmp_path)
    printed = capsys.readouterr().out.rpartition("{")[0] + (tmp_path / "speed.md").read_text()
    assert "how fast" in printed and "commit" not in printed and "None" not in printed


def test_files_are_replaced_whole(tmp_path):
    for rows in ([Row(1, 2.5)], [Row(1, 2.5), Row(4, 8)]):
        result(*rows).save(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["speed.json", "speed.md"]
    assert len(json.loads((tmp_path / "out" / "speed.json").read_text())["rows"]) == 2
    text = (tmp_path / "out" / "speed.md").read_text()
    assert "| 4 | 8.0 |" in " ".join(text.split())
    assert text.endswith(f"|\n\n{MACHINE}\n")  # a line right behind the table would be a row of it


def test_a_title_is_one_line_over_the_table(tmp_path):
    """However narrow that is."""
    replace(result(Row(1, 2.5)), title="a title that is far longer than its table is wide").save(
        tmp_path
    )
    lines = (tmp_path / "speed.md").read_text().splitlines()
    assert lines[:2] == ["a title that is far longer than its table is wide", ""] and lines[
        2
    ].startswith("|")


@each(
    ("value", "shown"),
    [(15124.7, "15125"), (1.5124, "1.512"), (-0.00151249, "-0.001512"), (0, "0"), (1e6, "1000000")],
)
def test_numbers_have_four_digits_and_no_exponent(value, shown):
    assert significant(value) == shown and significant(2250.4, 3) == "2250"


@pytest.fixture
def rates_once():
    """Here they are measured each time, instead of by the fixture of this name."""


def test_a_machine_has_rates(device):
    machine = measure_machine(torch.device(device))
    assert machine.device and machine.date.endswith("UTC")
    assert (
        machine.copy_bandwidth > 1e8 and machine.read_bandwidth > 1e8 and machine.matrix_rate > 1e8
    )


def test_a_copy_counts_twice_and_a_sum_once(monkeypatch):
    monkeypatch.setattr("mtpkit.bench.machine.median_seconds", lambda function, device: 1.0)
    machine = measure_machine(torch.device("cpu"))
    assert (machine.copy_bandwidth, machine.read_bandwidth) == (2 << 24, 1 << 24)


def test_a_sustained_rate_is_that_of_a_second_half(monkeypatch):
    """A GPU's clock falls while it multiplies: the first half is not counted."""
    counts = []

    def timed(function, device, repeats, warm_up):
        assert (repeats, warm_up) == (1, 1)
        function()
        return 1.25

    monkeypatch.setattr(machine, "median_seconds", timed)
    device = torch.device("cpu")
    assert (
        machine._sustained_seconds(lambda: counts.append(1), device, 0.04) == 1.25 / 25
        and len(counts) == 25
    )
    monkeypatch.undo()
    assert measure_machine(device, sustained=True).sustained_rate is None
    assert str(replace(MACHINE, sustained_rate=6.8e14)).endswith(
        "matrix product 800 TFLOP/s, 680 for seconds"
    )


def test_a_product_in_fp8_is_that_of_the_rounded_matrices():
    left, right = torch.randn(48, 64), torch.randn(32, 64)
    product = machine.fp8_product(left, right)()
    rounded = [one.to(torch.float8_e4m3fn).float() for one in (left, right)]
    want = rounded[0] @ rounded[1].t()
    assert product.dtype == torch.bfloat16 and torch.allclose(product.float(), want, rtol=1e-2)
    assert not torch.allclose(product.float(), left @ right.t(), rtol=1e-2)


def test_only_a_gpu_with_fp8_has_its_rate(monkeypatch):
    """The product on a CPU, which takes seconds there, would say nothing about a format's limit."""
    monkeypatch.setattr(machine, "fp8_product", lambda left, right: lambda: 0)
    monkeypatch.setattr(machine, "median_seconds", lambda function, _: function() is None or 2.0)
    assert measure_machine(torch.device("cpu")).fp8_rate is None
    assert str(replace(MACHINE, fp8_rate=1.5e15)).endswith(
        "matrix product 800 TFLOP/s, in fp8 1500 TFLOP/s"
    )
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, got=capability: got)
        assert machine._has_fp8(torch.device("cuda")) is has
    monkeypatch.setattr(machine, "_has_fp8", lambda _: True)
    assert measure_machine(torch.device("cpu")).fp8_rate == 2 * 512**3 / 2.0


def test_each_of_several_calls_counts_alike(device):
    x = torch.ones(1 << 16, device=device)
    counts = [0, 0, 0]

    def call(index: int) -> None:
        counts[index] += 1
        x.mul_(1.0)

    calls = [lambda index=index: call(index) for index in range(3)]
    place = torch.device(device)
    assert mean_seconds(calls, place, capture=True, repeats=4) > 0
    assert counts[0] == counts[1] == counts[2] > 0
    assert median_seconds(lambda: x.add_(1), place) < 1


def test_outputs_are_kept_until_the_last_call():
    made = []
    alive = []

    def call() -> torch.Tensor:
        alive.append(sum(output() is not None for output in made))
        output = torch.empty(1)
        made.append(weakref.ref(output))
        return output

    mean_seconds([call] * 3, torch.device("cpu"), capture=True, repeats=2)
    assert alive == [0, 1, 2] * (len(alive) // 3)


@pytest.mark.gpu
def test_a_copy_a_sum_and_a_product_reach_what_a_gpu_can():
    machine = measure_machine(torch.device("cuda"))
    assert min(machine.copy_bandwidth, machine.read_bandwidth) > 1e11 and machine.matrix_rate > 1e13
    assert not machine.fp8_rate or machine.fp8_rate > machine.matrix_rate
    sustained = measure_machine(torch.device("cuda"), sustained=True).sustained_rate
    assert sustained is not None and sustained > 1e13


def test_a_file_has_the_whole_table(tmp_path):
    """One line a row, however many columns there are."""
    names = [f"a column of many words {number}" for number in range(20)]
    fields = [
        (f"value{number}", Annotated[float, Column(name, ".1f")])
        for number, name in enumerate(names)
    ]
    wide = make_dataclass("Wide", fields, frozen=True)
    Result("wide", "many columns", wide, [wide(*range(20))], MACHINE).save(tmp_path)
    text = (tmp_path / "wide.md").read_text()
    assert "…" not in text and [
        line for line in text.splitlines() if all(name in line for name in names)
    ]
    assert [
        line
        for line in text.splitlines()
        if line.replace("|", " ").split() == [f"{n}.0" for n in range(20)]
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_object_is_printed_for_programs_or_when_asked_for(terminal, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    for asked in (False, True):
        result(Row(1, 2.5)).show(asked)
        assert ('"benchmark": "speed"' in capsys.readouterr().out) == (asked or not terminal)
