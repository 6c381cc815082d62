"""The rows of a step against loops over Python lists."""

import pytest
import torch

from tests.kernels.conftest import Twin

SLOTS = 7
BLOCKS = 9


def ints(twin: Twin, values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=twin.device)


def draw(twin: Twin, rows: int, width: int) -> dict[str, torch.Tensor]:
    """Tables and tokens are slices of wider tensors, with what must not be read or written around
    them."""
    tables = torch.randint(1, 50, (rows, BLOCKS + 3))
    tables[:, BLOCKS:] = -(10**6)
    tokens = torch.randint(1, 100, (SLOTS, width + 2))
    return dict(
        num_computed=torch.randint(0, 12, (SLOTS,)).to(twin.device),
        tokens=tokens.to(twin.device)[:, 1:-1],
        counts=tuple(torch.randint(0, 9, (2, SLOTS)).to(twin.device)),
        block_tables=tables.to(twin.device)[:, :BLOCKS],
    )


@pytest.mark.parametrize("live", [None, [3, -1, 5, -1]])
@pytest.mark.parametrize(("width", "block_size"), [(1, 4), (3, 2), (4, 4), (6, 16), (5, 1)])
def test_decode_rows(twin: Twin, width, block_size, live):
    """Null rows, rows that have ended, and rows that begin at, before and after the end of a
    block."""
    slots = [3, -1, 5, 0]
    arguments = draw(twin, 4, width)
    arguments["num_computed"][[3, 5, 0]] = ints(twin, [0, block_size - 1, block_size])
    arguments["num_computed"].clamp_max_(BLOCKS * block_size - width)
    found = twin("step_rows").decode_rows(
        ints(twin, slots),
        None if live is None else ints(twin, live),
        **arguments,
        width=width,
        block_size=block_size,
    )
    *parts, counts = found
    have = [part.tolist() for part in parts]
    held = arguments.pop("counts")
    assert [count.tolist() for count in counts] == [count[slots].tolist() for count in held]
    given = {name: value.tolist() for name, value in arguments.items()}
    want: list[list[int]] = [[] for _ in have]
    for row, slot in enumerate(slots):
        context = given["num_computed"][slot]
        want[6].append(context)
        for t in range(width):
            position = context + t
            place = (
                given["block_tables"][row][position // block_size] * block_size
                + position % block_size
            )
            ended = live is not None and live[row] < 0
            values = (
                given["tokens"][slot][t],
                row,
                position,
                -1 if ended else place,
                row * width + t,
            )
            for column, value in zip(want, values, strict=False):
                column.append(value)
    want[5] = [row * width for row in range(len(slots) + 1)]
    assert have == want and all(part.dtype == torch.int64 for part in parts)
    arguments["counts"] = ()
    assert (
        twin("step_rows")
        .decode_rows(ints(twin, slots), None, **arguments, width=1, block_size=4)
        .counts
        == ()
    )


@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_slots_of_tokens(twin: Twin, tokens):
    tables = draw(twin, 4, 1)["block_tables"]
    rows = torch.randint(0, 4, (tokens,))
    positions = torch.randint(0, BLOCKS * 4, (tokens,))
    have = twin("step_rows").kv_slots(tables, rows.to(twin.device), positions.to(twin.device), 4)
    table = tables.tolist()
    places = zip(rows.tolist(), positions.tolist(), strict=True)
    assert have.tolist() == [
        table[row][position // 4] * 4 + position % 4 for row, position in places
    ]


@pytest.mark.parametrize("rows", [0, 1, 130])
def test_counts_of_rings(twin: Twin, rows):
    """A ring of 20 places has at most 16 committed entries."""
    lens = torch.randint(0, 17, (rows,))
    new = torch.randint(0, 5, (rows,))
    have = twin("step_rows").ring_lens_after(lens.to(twin.device), new.to(twin.device), 4, 20)
    pairs = zip(lens.tolist(), new.tolist(), strict=True)
    assert have.tolist() == [(count if count + 4 <= 16 else 0) + more for count, more in pairs]


@pytest.mark.parametrize(("depths", "sampling"), [(0, 4), (1, 4), (3, 4), (3, 2), (5, 0)])
def test_rows_are_stored(twin: Twin, depths, sampling):
    """Null rows, tokens that are none, rows that do not sample; other slots and columns stay as
    they are."""
    slots = [3, -1, 5, 0]
    arguments = draw(twin, 4, depths + 1)
    num_computed, tokens, counts = (
        arguments[name] for name in ("num_computed", "tokens", "counts")
    )
    want_counts = [count.tolist() for count in counts]
    new_counts = torch.randint(0, 9, (2, 4))
    whole = tokens._base if tokens._base is not None else tokens
    want_computed = num_computed.tolist()
    want = whole.tolist()
    contexts = [5, 0, 7, 9]
    accepted = [min(depths, row) for row in range(4)]
    last = [index - (row == 3) for row, index in enumerate(accepted)]  # -1 for a row without tokens
    chosen = torch.randint(-1, 100, (4, depths + 1))
    drafts = torch.randint(-1, 100, (sampling, depths))
    chosen[0, accepted[0]] = -1
    for row, slot in enumerate(slots):
        want_computed[slot] = contexts[row] + last[row] + 1
        for column, new in zip(want_counts, new_counts.tolist(), strict=True):
            column[slot] = new[row]
        if row < sampling:
            new = [chosen[row, accepted[row]].item(), *drafts[row].tolist()]
            want[slot][1 : 2 + depths] = [max(0, token) for token in new]
    rows = [ints(twin, values) for values in (contexts, last, accepted)]
    written = (
        chosen.to(twin.device),
        drafts.to(twin.device),
        counts,
        tuple(new_counts.to(twin.device)),
    )
    twin("step_rows").store_rows(ints(twin, slots), num_computed, tokens, *rows, *written)
    assert [count.tolist() for count in counts] == want_counts
    assert num_computed.tolist() == want_computed and whole.tolist() == want
