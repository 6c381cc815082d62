"""What ranks exchange through windows that all of them read, to the bit: processes that share
memory of the host."""

import importlib
import json
import random
import time
from pathlib import Path

import pytest
import torch
from triton.runtime import interpreter

from mtpkit.kernels import NO_TOKEN
from mtpkit.kernels.exchange.window import BUFFERS_AT, CHANNELS, MOST_RANKS, Windows
from tests.ranks import run_ranks

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64)
LIMIT = 1_300_000
"""Bytes: not a multiple of blocks, and two blocks in some channels."""
RANKS = 3
"""With two, the order would not matter."""
SIZES = [1, 3, 500, 2049, 4096, 5000, 1, 4097, LIMIT // 2]
"""One value, odd numbers of them, several channels, and as many as there is room for."""
RACE = [5, 4097, 7, 2500] * 3
REFERENCE = ("reference",) * RANKS
TRITON = ("triton",) * RANKS
CASES = {
    "reference": (REFERENCE, SIZES, {}),
    "triton": (TRITON, SIZES, {}),
    "both": (("triton", "reference", "triton"), SIZES[:4], {}),
    "overtaking": (TRITON, RACE, {}),
    "broken: both buffers at one place": (TRITON, RACE, {"CHANNELS": 0}),
    "broken: no wait": (TRITON, RACE, {"_MOST_POLLS": 0}),
}
"""Twin of each rank, sizes of tensors, what is broken in the kernel."""


def window(path: Path) -> torch.Tensor:
    """A file that all processes map."""
    return torch.from_file(str(path), shared=True, size=Windows.nbytes(LIMIT), dtype=torch.uint8)


def draw(count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Values of all ranks. Their sum depends on the order, but for bf16, to which the interpreter
    does not round."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bfloat16:
        return list(torch.randint(-40, 40, (RANKS, count), generator=generator).to(dtype))
    scale = 1e3 ** torch.randint(-1, 3, (RANKS, count), generator=generator)
    return list((torch.randn(RANKS, count, generator=generator) * scale).to(dtype))


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    return sum(parts[1:], parts[0])


def draw_best(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and tokens of all ranks: most values tie, some are infinite and have no token."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(RANKS, count, generator=generator).round()
    values[:, ::5], values[1, ::7] = torch.inf, -torch.inf
    tokens = torch.randint(50, (RANKS, count), generator=generator)
    return values, torch.where(values.isinf(), NO_TOKEN, tokens)


def best_in_order(values: torch.Tensor, tokens: torch.Tensor) -> tuple[list[float], list[int]]:
    """Row by row: the largest value, and among equals the smallest token, those of a rank counted
    from 100 * rank."""
    tokens = [
        [token + 100 * rank * (token >= 0) for token in row]
        for rank, row in enumerate(tokens.tolist())
    ]
    rows = [
        sorted(zip((-values[:, i]).tolist(), [row[i] for row in tokens], strict=True))
        for i in range(len(tokens[0]))
    ]
    return [-row[0][0] for row in rows], [row[0][1] for row in rows]


def exchanged(module, mine: Windows, size: int, seed: int) -> list[bool]:
    """Whether a sum, a gather and the best of some rows, one after another, are right."""
    parts = draw(size, DTYPES[seed % len(DTYPES)], seed)
    values = parts[mine.rank].clone()
    assert module.sum_over_ranks(values, mine) is values
    found = [torch.equal(values, in_order(parts))]
    # others, which must not take the place of those that are still read
    parts = [1 - part for part in parts]
    found.append(torch.equal(module.gather_ranks(parts[mine.rank], mine), torch.stack(parts)))
    value, token = draw_best(min(size, 600), seed)
    best = module.best_of_ranks(value[mine.rank], token[mine.rank], 100 * mine.rank, mine)
    return [*found, tuple(part.tolist() for part in best) == best_in_order(value, token)]


class Barriers:
    """Barriers of this process's kernels, two per program, at which others overtake it. At the
    first one, before its flags are set, it sometimes sleeps. At the second, after it has seen all
    flags, one process in turn goes on to read only when another one has set a flag again, for which
    that one has written its next values."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.count = 0
        self.mine = torch.empty(0)

    def __call__(self) -> None:
        self.count += 1
        if self.count % 2:
            time.sleep(random.choice([0, 0, 0.01]))
        elif self.count // 2 % RANKS == self.rank:
            flags = self.mine[:BUFFERS_AT].view(torch.int64).view(CHANNELS, MOST_RANKS)
            late = time.monotonic() + 1  # nobody overtakes the last exchange
            while (done := flags.sum(0)).max() == done[self.rank] and time.monotonic() < late:
                time.sleep(0.0005)


def exchanges(rank: int, path: Path) -> None:
    """Exchange tensors of many sizes one after another, in each case; say what was right."""
    interpreter.interpreter_builder.create_barrier = barriers = Barriers(rank)
    found = {}
    for number, (name, (twins, sizes, broken)) in enumerate(CASES.items()):
        module = importlib.import_module(f"mtpkit.kernels.exchange.{twins[rank]}")
        windows = tuple(window(path / f"{number}.{other}") for other in range(RANKS))
        mine = Windows(rank, windows, torch.zeros(CHANNELS, dtype=torch.int64), LIMIT)
        barriers.mine = windows[rank]
        barriers.count = 0
        found[name] = []
        with pytest.MonkeyPatch.context() as patch:
            for attribute, value in broken.items():
                patch.setattr(module, attribute, value)
            for seed, size in enumerate(sizes):
                found[name].append(exchanged(module, mine, size, seed))
    (path / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Of each case, which sums, gathers and best rows of each rank were right."""
    path = tmp_path_factory.mktemp("windows")
    for number in range(len(CASES)):
        for rank in range(RANKS):
            poisoned = window(path / f"{number}.{rank}")
            poisoned[:BUFFERS_AT], poisoned[BUFFERS_AT:] = 0, 255  # NaN
    run_ranks(exchanges, path, ranks=RANKS)
    every = [json.loads((path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [one for found in every for one in found[name]] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_what_ranks_exchange_is_exact(right, name):
    assert len(right[name]) == RANKS * len(CASES[name][1])
    for one in zip(*right[name], strict=True):
        assert all(one) != name.startswith("broken")


def test_what_fits():
    windows = Windows(0, (), torch.zeros(CHANNELS, dtype=torch.int64), LIMIT)
    fits = {1: True, LIMIT // 4: True, LIMIT // 4 + 1: False, 0: False}
    assert {count: windows.fit(torch.empty(count)) for count in fits} == fits
    assert windows.fit(torch.empty(LIMIT // 2, dtype=torch.bfloat16))
    assert not windows.fit(torch.empty(4, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_hold_what_they_are_given(dtype):
    """Also at the edges of blocks, and of as many blocks as there are channels."""
    for limit in (1000, LIMIT, 8 << 20):
        windows = Windows(0, (), torch.zeros(CHANNELS, dtype=torch.int64), limit)
        assert Windows.nbytes(limit) == BUFFERS_AT + 2 * CHANNELS * windows.capacity
        most = limit // dtype.itemsize
        edges = (
            8192 // dtype.itemsize * blocks + more
            for blocks in (1, 2, CHANNELS - 1, CHANNELS, CHANNELS + 1)
            for more in (-1, 0, 1)
        )
        for count in {1, most, *(min(most, edge) for edge in edges)}:
            block, channels, share = windows.shares(torch.empty(count, dtype=dtype))
            assert share % block == 0 and share * dtype.itemsize <= windows.capacity
            assert channels <= CHANNELS and (channels - 1) * share < count <= channels * share
