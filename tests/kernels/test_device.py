import ast
import textwrap
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from mtpkit.kernels import device
from mtpkit.kernels.device import as_rows, row_of_tile, with_rows
from tests.shared import covering


def test_only_what_has_no_rows_is_copied():
    wide = torch.randn(4, 3, 10)
    for rows, view in ((with_rows, wide[:, 1, 2:7]), (with_rows, wide[..., :5]), (as_rows, wide[:, :, 2:7])):
        have = rows(view)
        assert have.data_ptr() == view.data_ptr() and torch.equal(have.view_as(view), view)
    for rows, view in ((with_rows, wide.mT), (as_rows, wide[..., ::2]), (as_rows, wide.transpose(0, 1))):
        have = rows(view)
        assert have.stride(-1) == 1 and torch.equal(have.view_as(view), view)
    assert as_rows(wide).shape == (12, 10)


@triton.jit
def number_tiles(starts_ptr, found_ptr, rows, ITEMS: tl.constexpr, SIZE: tl.constexpr, SPARE: tl.constexpr):
    tile = tl.program_id(0)
    row, begin, tokens, first = row_of_tile(starts_ptr, rows, tile, ITEMS, SIZE, SPARE)
    tl.store(found_ptr + 4 * tile, row)
    tl.store(found_ptr + 4 * tile + 1, begin)
    tl.store(found_ptr + 4 * tile + 2, tokens)
    tl.store(found_ptr + 4 * tile + 3, first)


def tiles_of(lens: list[int], items: int, size: int, spare: int, zero: int) -> list[list[int]]:
    """Row, first token, number of tokens and first item of each number."""
    starts = torch.tensor([0, *lens]).cumsum(0) + zero
    found = torch.full((sum(lens) * items // size + len(lens) * spare, 4), -1)
    number_tiles[(len(found),)](starts, found, len(lens), ITEMS=items, SIZE=size, SPARE=spare)
    return found.tolist()


LENS = {
    "one without tokens": [0],
    "one": [1],
    "some without tokens": [0, 7, 0, 0, 8, 9, 0],
    "longer than tiles": [16, 33, 1],
    "many": [5, 9, 0, *[1] * 127],
}


# The first start is taken off each, whatever the number of items: the two need not meet in every case.
@pytest.mark.parametrize(("rows", "items", "zero"), covering(LENS, (1, 3), (0, 11)))
def test_every_tile_of_every_row_has_one_number(rows, items, zero):
    lens = LENS[rows]
    size, begins = 8, torch.tensor([0, *lens]).cumsum(0)
    for spare in (1, 2):
        found = tiles_of(lens, items, size, spare, zero)
        assert all([begin, tokens] == [begins[row], lens[row]] for row, begin, tokens, _ in found)
        for row, length in enumerate(lens):
            firsts = [first for found_row, _, _, first in found if found_row == row]
            assert firsts == list(range(0, size * len(firsts), size))
            # An empty row has a number too; a spare number is for a tile that begins before the row.
            whole = -(-length * items // size)
            assert len(firsts) >= (max(1, whole) if spare == 1 else 1 + whole)
            # Tiles that begin up to size - 1 items before the row.
            assert spare == 1 or size * len(firsts) >= length * items + size - 1


def early_kernels() -> list[tuple[str, ast.FunctionDef]]:
    """Kernels that may start before the one before them has ended, by file."""
    found = []
    for path in sorted(Path(device.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
            if "Early" in names:
                found.append((f"{path.parent.name}/{path.name}: {node.name}", node))
    return found


def touched_before_waiting(kernel: ast.FunctionDef) -> str:
    """The statement, if there is one, that reads or writes memory, or returns, before all programs of a kernel wait."""
    for statement in kernel.body:
        if ast.unparse(statement) == "await_inputs()":
            return ""
        names = {one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute)}
        calls = {ast.unparse(one.func) for one in ast.walk(statement) if isinstance(one, ast.Call)}
        harmless = all(name == "prefetch" or name.startswith("tl.") for name in calls)
        leaves = any(isinstance(one, ast.Return) for one in ast.walk(statement))
        if names & {"load", "store", "atomic_add", "atomic_xchg", "atomic_cas"} or leaves or not harmless:
            return ast.unparse(statement)
    return "await_inputs() is missing"


def test_early_kernels_wait_before_they_touch_memory():
    found = early_kernels()
    assert len(found) > 20
    assert not {name: place for name, kernel in found if (place := touched_before_waiting(kernel))}


@pytest.mark.parametrize(
    "body, place",
    [
        ("await_inputs()\nx = tl.load(p)", ""),
        ("n = tl.arange(0, 4)\nprefetch(w + n, 4)\nawait_inputs()", ""),
        ("x = tl.load(p)\nawait_inputs()", "x = tl.load(p)"),
        ("x = load(p, m, True)\nawait_inputs()", "x = load(p, m, True)"),
        ("if n > 3:\n    return\nawait_inputs()", "if n > 3:\n    return"),
        ("if n > 3:\n    await_inputs()", "if n > 3:\n    await_inputs()"),
        ("n = tl.arange(0, 4)", "await_inputs() is missing"),
    ],
)
def test_what_is_touched_too_early_is_seen(body, place):
    (kernel,) = ast.parse("def f():\n" + textwrap.indent(body, "    ")).body
    assert touched_before_waiting(kernel) == place
