"""What decoding takes at given rates as a table: each step, and each work in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtpkit.bench.report import Result, significant
from mtpkit.bench.roofline import Cost, Roofline


@dataclass(frozen=True)
class StepRow:
    """The decode step of one batch size and K."""

    batch_size: int
    k: int
    acceptance_length: float
    bytes: float
    flops: float
    seconds: float
    limit_tokens_per_s: float
    """At the bandwidth and the matrix rate that were given."""


STEP_COLUMNS: dict[str, Callable[[StepRow], str]] = {
    "batch": lambda row: str(row.batch_size),
    "K": lambda row: str(row.k),
    "acceptance length": lambda row: f"{row.acceptance_length:.2f}",
    "GB a step": lambda row: significant(row.bytes / 1e9),
    "GFLOP a step": lambda row: significant(row.flops / 1e9),
    "ms a step": lambda row: significant(row.seconds * 1e3),
    "tokens/s": lambda row: f"{row.limit_tokens_per_s:.0f}",
}


@dataclass(frozen=True)
class WorkRow:
    """One work of a decode step."""

    batch_size: int
    k: int
    phase: str
    work: str
    bytes: float
    flops: float
    seconds: float
    bound: str
    """What the time comes from."""


WORK_COLUMNS: dict[str, Callable[[WorkRow], str]] = {
    "batch": lambda row: str(row.batch_size),
    "K": lambda row: str(row.k),
    "phase": lambda row: row.phase,
    "work": lambda row: row.work,
    "MB": lambda row: significant(row.bytes / 1e6),
    "GFLOP": lambda row: significant(row.flops / 1e9),
    "ms": lambda row: significant(row.seconds * 1e3),
    "bound by": lambda row: row.bound,
}


def tabulate_limits(
    roofline: Roofline,
    batch_sizes: Sequence[int],
    acceptance: Sequence[Sequence[float]],
    context_len: float,
    bandwidth: float,
    matrix_rate: float,
    name: str = "model",
) -> tuple[Result[StepRow], Result[WorkRow]]:
    """The steps, and their works.

    Args:
        acceptance: conditional rates of each depth, one list for each K.
        bandwidth, matrix_rate: bytes and FLOPs a second.
    """
    rates = (bandwidth, matrix_rate)
    costs = [(size, len(one), roofline.decode(size, one, context_len)) for size in batch_sizes for one in acceptance]
    settings = {"model": name, "context_len": context_len, "bandwidth": bandwidth, "matrix_rate": matrix_rate}
    settings["acceptance"] = [list(one) for one in acceptance]
    settings["state_rollback"] = roofline.state_rollback
    settings["ring_entries"] = [roofline.entries(len(one)) for one in acceptance]
    settings["draft_vocab_size"] = roofline.draft_vocab_size
    steps = [
        StepRow(
            size, k, cost.tokens / size, cost.bytes, cost.flops, cost.seconds(*rates), cost.limit_tokens_per_s(*rates)
        )
        for size, k, cost in costs
    ]
    works = [row for size, k, cost in costs for row in _works(size, k, cost, rates)]
    title = (
        f"decoding at {significant(bandwidth / 1e12, 3)} TB/s and {significant(matrix_rate / 1e12, 3)} TFLOP/s: {name}"
    )
    return (
        Result("roofline", title, STEP_COLUMNS, steps, settings=settings),
        Result("works", f"works of each step: {name}", WORK_COLUMNS, works, settings=settings),
    )


def _works(batch_size: int, k: int, cost: Cost, rates: tuple[float, float]) -> list[WorkRow]:
    return [
        WorkRow(
            batch_size,
            k,
            phase.name,
            work.name,
            work.bytes,
            work.flops,
            work.seconds(*rates),
            "bandwidth" if work.bytes / rates[0] >= work.flops / rates[1] else "matrix rate",
        )
        for phase in cost.phases
        for work in phase.works
    ]
