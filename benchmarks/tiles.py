"""Time the tiles that kernels of quantised matrices may take, to choose them by measurement.

    python -m benchmarks.tiles --model nemotron-h-8b --format int4 --rows 1 16 64     # on a GPU

Each linear of the model, and its experts, run with every tile of a grid: first in several processes
at once, which only compiles the kernels, then one after another in a CUDA graph, on weights that do
not fit into the GPU's cache. A line says what today's tile takes and which are the fastest. The
last line is JSON.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.case import Case, Shapes
from benchmarks.kernels.cases import linears, quantized
from benchmarks.kernels.measure import input_sets
from mtpkit.bench.shapes import get_config, require_gpu
from mtpkit.bench.sizes import SHAPES
from mtpkit.bench.timing import mean_seconds, release_memory
from mtpkit.cli.errors import run
from mtpkit.errors import UserError
from mtpkit.kernels.device import Tile
from mtpkit.kernels.quantized import experts, linear

DEVICE = torch.device("cuda")
BLOCKS_N = (64, 128)
BLOCKS_K = (64, 128, 256)
STAGES = (3, 4, 6)
WARPS = (4, 8)
RESIDENT = (1, 2, 3)
REPEATS = 5
SHOWN = 5


class Task(NamedTuple):
    """Where a case is found, in any process."""

    model: str
    format: str
    rows: int
    index: int


def cases(task: Task) -> list[Case]:
    """The cases of a model, a format and a number of rows."""
    shapes = Shapes(get_config(task.model), task.rows, 0, 512, DEVICE, torch.bfloat16)
    found = [*quantized.linears(shapes, linears.calls(shapes))]
    if shapes.config.moe.num_experts:
        found += quantized.experts(shapes)
    return [case for case in found if f"{task.format}, [" in case.shape]


def choices() -> Iterator[linear.Choice]:
    """The grid."""
    for *sizes, resident in itertools.product(BLOCKS_N, BLOCKS_K, STAGES, WARPS, RESIDENT):
        yield linear.Choice(Tile(*sizes), resident)


@contextmanager
def chosen(choice: linear.Choice) -> Iterator[None]:
    """Let all quantised matrices take a tile."""
    tables: list[dict[str, Any]] = [linear.TILES, experts.TILES, experts.FEW]
    before = [dict(table) for table in tables]
    resident = experts.RESIDENT
    experts.RESIDENT = choice.resident
    for table, value in (linear.TILES, (choice,)), (experts.TILES, choice.tile):
        table.update({kind: dict.fromkeys(sizes, value) for kind, sizes in table.items()})
    experts.FEW.update(dict.fromkeys(experts.FEW, (choice,)))
    try:
        yield
    finally:
        for table, old in zip(tables, before, strict=True):
            table.update(old)
        experts.RESIDENT = resident


def compile_some(task: Task, part: int, parts: int) -> None:
    """Launch every parts-th choice of a case once."""
    case = cases(task)[task.index]
    args = case.make()
    for choice in itertools.islice(choices(), part, None, parts):
        with chosen(choice):
            _runs(partial(case.call, *args))


def _runs(call: partial[Any]) -> bool:
    """Whether a call's tile fits the GPU."""
    try:
        call()
        torch.cuda.synchronize()
    except OutOfResources:
        return False
    return True


@torch.inference_mode()
def timed(task: Task) -> dict[str, Any]:
    """The times of a case in microseconds, and of its choices, the fastest first."""
    case = cases(task)[task.index]
    release_memory(DEVICE)
    sets = input_sets(case, case.make())
    calls = [partial(case.call, *args) for args in sets]

    def microseconds() -> float:
        return 1e6 * mean_seconds(calls, DEVICE, capture=True, repeats=REPEATS)

    today = microseconds()
    found = []
    for choice in choices():
        with chosen(choice):
            if _runs(calls[0]):
                found.append((microseconds(), choice))
    found.sort()
    return {
        "case": f"{case.op} {case.shape}",
        "MB": case.bytes(sets[0]) / 1e6,
        "today": today,
        "fastest": [[time, *choice.tile[:4], choice.resident] for time, choice in found],
    }


def main() -> None:
    """Time what the command line asks for, and print it."""
    options = _parser().parse_args()
    if not torch.cuda.is_available():
        raise UserError("tiles are timed on a GPU, and this machine has none")
    require_gpu(options.model, DEVICE)
    places = [Task(options.model, options.format, rows, 0) for rows in options.rows]
    tasks = [place._replace(index=index) for place in places for index in range(len(cases(place)))]
    parts = options.processes
    with multiprocessing.get_context("spawn").Pool(parts) as pool:
        jobs = [(task, part, parts) for task in tasks for part in range(parts)]
        pool.starmap(compile_some, jobs, chunksize=1)
    rows = []
    for task in tasks:
        row = timed(task)
        rows.append(row)
        fastest = ", ".join(
            f"{time:.1f} ({n} x {k}, {stages} stages, {warps} warps, {resident} resident)"
            for time, n, k, stages, warps, resident in row["fastest"][:SHOWN]
        )
        print(f"{row['case']}: {row['MB']:.1f} MB, {row['today']:.1f} us; {fastest}", flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="nemotron-h-8b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--format", choices=[*quantized.FORMATS], required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    return parser


if __name__ == "__main__":
    run(main)
