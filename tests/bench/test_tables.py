"""Tables as commands print them: in 80 columns, nothing cut off, each row with its case."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Column

from benchmarks.kernels.measure import KernelRow
from mtpkit.bench.decode import DecodeRow, KernelShare
from mtpkit.bench.load.mixed import LoadRow
from mtpkit.bench.load.prefill import PrefillRow
from mtpkit.bench.load.stall import StallRow
from mtpkit.bench.load.turns import TurnsRow
from mtpkit.bench.report import tabulate
from mtpkit.bench.speedup import SpeedupRow
from mtpkit.bench.tables import EMPTY, WideTable, print_tables
from mtpkit.bench.train import TrainRow
from tests.shared import each

KINDS = [
    DecodeRow,
    KernelShare,
    KernelRow,
    LoadRow,
    PrefillRow,
    SpeedupRow,
    StallRow,
    TrainRow,
    TurnsRow,
]


def table_of(keys: int, headings: list[str], rows: list[list[str]]) -> WideTable:
    table = WideTable(*(Column(heading, justify="right") for heading in headings), keys=keys)
    for row in rows:
        table.add_row(*row)
    return table


def printed(table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=500, color_system=None, markup=False)
    for part in table.parts(width):
        console.print(part)
    return console.file.getvalue().splitlines()


@each("kind", KINDS)
def test_tables_of_benchmarks_name_the_case_in_each_part(kind):
    table = tabulate("", kind, [])
    assert 1 <= table.keys < len(table.columns)


@given(
    keys=st.integers(1, 3),
    columns=st.lists(
        st.tuples(st.text("abc ", min_size=1, max_size=30), st.integers(1, 12)),
        min_size=1,
        max_size=20,
    ),
    count=st.integers(1, 3),
    width=st.integers(60, 120),
)
def test_parts_fit_and_show_every_cell_beside_its_key(keys, columns, count, width):
    headings = [f"key{index}" for index in range(keys)] + [heading for heading, _ in columns]
    rows = [
        [f"r{row}k{key}" for key in range(keys)]
        + [f"{row}.{index}".ljust(size, "x") for index, (_, size) in enumerate(columns)]
        for row in range(count)
    ]
    lines = printed(table_of(keys, headings, rows), width)

    assert max(map(len, lines)) <= width
    for row in rows:
        own = [line.split() for line in lines if line.split()[:keys] == row[:keys]]
        assert [cell for cells in own for cell in cells[keys:]] == row[keys:]


def test_columns_without_a_value_are_left_out():
    lines = printed(
        table_of(1, ["K", "speed", "idle"], [["0", "1.5", EMPTY], ["3", EMPTY, EMPTY]]), 80
    )
    cells = [line.split() for line in lines]
    assert ["K", "speed"] in cells and ["3", EMPTY] in cells


def test_a_long_text_is_folded_and_not_cut():
    name = "void_kernel_" * 12
    lines = printed(table_of(2, ["K", "kernel", "ms"], [["3", name, "1.25"]]), 80)
    assert max(map(len, lines)) <= 80
    cells = [word for line in lines for word in line.split()]
    assert "".join(cell for cell in cells if "void" in cell or "kernel_" in cell) == name


def test_the_terminal_decides_the_width_and_files_get_80_columns(capsys, monkeypatch):
    table = table_of(
        1, ["K", *(f"column{index}" for index in range(20))], [["3", *("1.25" for _ in range(20))]]
    )
    monkeypatch.setenv("COLUMNS", "200")
    print_tables([table])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
