"""Correctness and time of each op on its own, and its shares of the machine's rates.

An op is timed over several inputs in turn, which together exceed the GPU's cache. If an op touches
so little that too many inputs would be needed, its note says "in cache": its time is then for data
that were in the cache already.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from benchmarks.kernels.cases import decode_cases, prefill_cases, training_cases
from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.report import Column, Result
from mtpkit.bench.roofline import check_draft_vocab_size
from mtpkit.bench.timing import mean_seconds, release_memory
from mtpkit.config import ModelConfig
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.platform import resolve_dtype

_TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 5e-3}
"""Largest relative errors that pass; the kernels' own tests are stricter."""
CACHE_BYTES = 240 << 20
"""Bytes that an op should touch over all its inputs and results: four times the L2 cache of an
H200, since tensors that are changed in place count twice."""
MOST_SETS = 8192
"""Most sets of inputs for one op; each set adds some launches to a graph."""
MOST_BYTES = 16 << 30
"""Most bytes of all sets of inputs together, including bytes that the op does not touch."""
_PART = 1 << 26
"""Elements that are compared at once."""


@dataclass(frozen=True)
class KernelConfig:
    """What is measured. The defaults are those of a GPU."""

    rows: tuple[int, ...] = (1, 4, 16, 64, 128)
    """Numbers of requests in a step."""
    k: int = 3
    """Drafts per step: each request brings 1 + K tokens."""
    context_len: int = 512
    """Tokens of context of each request, and tokens of each prompt. Training sequences are 8 times
    as long."""
    ops: tuple[str, ...] = ()
    """Ops to measure; none: all."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the recurrent state."""
    draft_vocab_size: int | None = None
    """Draft only among this many first tokens of the vocabulary; None: among all."""
    repeats: int = 20
    """Number of timings; their median is reported."""


ON_CPU = KernelConfig(rows=(1, 4), context_len=64, repeats=3)
"""What is measured on a CPU, which would need hours for the defaults."""


@dataclass(frozen=True)
class KernelRow:
    """One op at one shape."""

    op: Annotated[str, Column("op", key=True)]
    shape: Annotated[str, Column("shape", key=True)]
    microseconds: Annotated[float, Column("µs", ".1f")]
    bytes: Annotated[float, Column("MB", lambda row: f"{row.bytes / 1e6:.2f}")]
    """Bytes that the op must move at least."""
    flops: float
    floor_microseconds: Annotated[float, Column("floor µs", ".1f")]
    """The longer of bytes over the copy bandwidth and FLOPs over the matrix rate; `note` says
    which. It is no strict bound: an op that only reads may be faster than a copy."""
    bandwidth_share: Annotated[float, Column("of the copy bandwidth", ".0%")]
    """Share of the copy bandwidth measured in the same run."""
    matrix_share: Annotated[
        float,
        Column("of the matrix rate", lambda row: f"{row.matrix_share:.0%}" if row.flops else "-"),
    ]
    """Share of the matrix rate measured in the same run."""
    error: Annotated[float, Column("error", ".1e")]
    """Largest relative difference to the reference twin, over outputs and tensors that are changed
    in place."""
    note: Annotated[str, Column("note")]


def measure_kernels(
    model: ModelConfig,
    config: KernelConfig,
    device: Literal["cuda", "cpu"] = "cuda",
    name: str = "model",
    keep: Callable[[Result[KernelRow]], object] | None = None,
) -> Result[KernelRow]:
    """Compare each op of `benchmarks.kernels.cases` with its reference twin, then time it.

    Args:
        device: on "cpu" the reference twins themselves are timed.
        name: the model's name in the report.
        keep: see `Result.measure`.

    Raises:
        UserError: no GPU, an op that is not known, or a draft vocabulary larger than the model's.
        MtpkitError: an op differs too much from its reference twin.
    """
    place = torch.device(device)
    cases = list(_cases(model, config, place))
    machine = measure_machine(place)
    title = f"{'kernels' if device == 'cuda' else 'reference twins'}: {name}, {machine.device}"
    result = Result("kernels", title, KernelRow, [], machine, {"model": name, **asdict(config)})
    measure = partial(_measure, machine=machine, device=place, repeats=config.repeats)
    with torch.inference_mode():
        return result.measure(cases, measure, lambda case: f"{case.op} {case.shape}", keep)


def check_kernels(
    model: ModelConfig, config: KernelConfig, device: Literal["cuda", "cpu"]
) -> Iterator[str]:
    """Compare every op with its reference twin without timing, and yield a line per op; for a
    memory checker.

    On a CPU a twin is compared with itself, and the first line says so.

    Raises:
        UserError: no GPU, an op that is not known, or a draft vocabulary larger than the model's.
        MtpkitError: an op differs too much from its reference twin.
    """
    cases = list(_cases(model, config, torch.device(device)))
    if device == "cpu":
        yield "a CPU has only the reference twins: nothing is checked but that they run"
    with torch.inference_mode():
        for case in cases:
            release_memory(torch.device(device))  # of the case before
            yield f"{case.op} {case.shape}: relative difference {check(case, case.make()):.1e}"


def _cases(model: ModelConfig, config: KernelConfig, device: torch.device) -> Iterator[Case]:
    """Yield the cases of the chosen ops, grouped by op."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("kernels need a GPU; --device cpu tries the command without one")
    check_draft_vocab_size(config.draft_vocab_size, model)
    dtype = getattr(torch, resolve_dtype("auto", device))
    state_dtype = getattr(torch, config.state_dtype)
    sizes = [
        Shapes(
            model,
            rows,
            config.k,
            config.context_len,
            device,
            dtype,
            state_dtype,
            config.draft_vocab_size,
        )
        for rows in config.rows
    ]
    found = [case for shapes in sizes for case in decode_cases(shapes)]
    found += [
        replace(case, capture=False)
        for case in (*prefill_cases(sizes[0]), *training_cases(sizes[0]))
    ]
    names = list(dict.fromkeys(case.op for case in found))
    unknown = sorted(set(config.ops) - set(names))
    if unknown:
        raise UserError(
            f"ops {listed(unknown)} are unknown, or not of this model with K = {config.k}; there"
            f" are {listed(names, most=len(names))}"
        )
    for name in names:
        if not config.ops or name in config.ops:
            yield from (case for case in found if case.op == name)


def _measure(case: Case, machine: Machine, device: torch.device, repeats: int) -> KernelRow:
    release_memory(device)  # of the case before
    args = case.make()
    error = check(case, args)
    sets = input_sets(case, args) if device.type == "cuda" else [args, case.beside(args)]
    seconds = mean_seconds(
        [partial(case.call, *one) for one in sets], device, case.capture, repeats
    )
    touched = sum(case.bytes(one) for one in sets)
    moved = touched / len(sets)
    floors = {"bytes": moved / machine.copy_bandwidth, "FLOPs": case.flops / machine.matrix_rate}
    floor = max(floors, key=floors.__getitem__)
    cached = "in cache" if touched < CACHE_BYTES else ""
    notes = [case.note(moved) if case.note else "", f"floor of {floor}", cached]
    return KernelRow(
        op=case.op,
        shape=case.shape,
        microseconds=seconds * 1e6,
        bytes=moved,
        flops=case.flops,
        floor_microseconds=floors[floor] * 1e6,
        bandwidth_share=moved / seconds / machine.copy_bandwidth,
        matrix_share=case.flops / seconds / machine.matrix_rate,
        error=error,
        note="; ".join(filter(None, notes)),
    )


def input_sets(case: Case, args: Args) -> list[Args]:
    """Sets of inputs to use in turn, `args` first: two, or enough to touch CACHE_BYTES in all,
    within the limits."""
    second = case.beside(args)
    shared = {id(tensor) for tensor in _tensors(args)}
    held = size(*(tensor for tensor in _tensors(second) if id(tensor) not in shared))
    count = min(math.ceil(CACHE_BYTES / case.bytes(args)), MOST_SETS, MOST_BYTES // held)
    return [args, second, *(case.beside(args) for _ in range(count - 2))]


def check(case: Case, args: Args) -> float:
    """Largest relative difference between an op and its reference twin; `args` are changed as the
    op changes them.

    Raises:
        MtpkitError: the difference is larger than the op's tolerance.
    """
    copies = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
    found = case.call(*args)
    expected = case.twin(*copies)
    if case.judge:
        found = case.judge(args, found)
        expected = case.judge(copies, expected)
    kept = [place for place in range(len(args)) if place not in case.scratch]
    pairs = [
        *zip(_tensors(found), _tensors(expected), strict=True),
        *((args[place], copies[place]) for place in kept if isinstance(args[place], Tensor)),
    ]
    largest = 0.0
    for mine, theirs in pairs:
        error = _relative(mine, theirs)
        allowed = case.tolerance if case.tolerance is not None else _TOLERANCES.get(mine.dtype, 0.0)
        if not error <= allowed:
            raise MtpkitError(
                f"{case.op}, {case.shape}: a {mine.dtype} tensor of shape {list(mine.shape)}"
                f" differs from the reference's by {error:.2e}, more than {allowed:.0e}: its time"
                " means nothing until this is fixed"
            )
        largest = max(largest, error)
    return largest


def _relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected`; for integers, the share that differs; inf if
    shapes differ."""
    if found.shape != expected.shape:
        return math.inf
    if not found.is_floating_point():
        return float((found != expected).sum() / max(1, found.numel()))
    squares = [(0.0, 0.0)]
    # In parts: with the weights of 256 experts, there would be no room for their copies in fp64.
    for mine, theirs in zip(
        found.reshape(-1).split(_PART), expected.reshape(-1).split(_PART), strict=True
    ):
        want = theirs.double()
        squares.append((float((mine.double() - want).square().sum()), float(want.square().sum())))
    difference, norm = (math.sqrt(sum(parts)) for parts in zip(*squares, strict=True))
    return difference / max(norm, 1e-30)


def _tensors(value: object) -> list[Tensor]:
    """The tensors of a tensor, None, or a tuple of anything."""
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, tuple) else []
