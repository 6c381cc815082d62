"""How fast the engine decodes once all prompts are computed, and how close that is to the machine's own rates."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from mtpkit.bench.decode_config import NAME, DecodeConfig
from mtpkit.bench.decode_run import Contender, Window
from mtpkit.bench.machine import Machine, measure_machine, release_memory
from mtpkit.bench.prompts import too_many_tokens
from mtpkit.bench.report import Result
from mtpkit.bench.roofline import check_draft_vocab_size
from mtpkit.bench.trace import can_trace
from mtpkit.errors import raise_problems
from mtpkit.model.hybrid import HybridModel

_NAME_WIDTH = 80


@dataclass(frozen=True)
class DecodeRow:
    """One batch size and K."""

    batch_size: int
    k: int | Literal["auto"]
    tokens_per_s: float
    """Generated tokens over wall time, from when all requests decode to when the first one ends."""
    step_ms: float
    """Wall time of one of the steps in it."""
    acceptance_length: float
    """1 + mean accepted drafts a step and request."""
    conditional_acceptance: list[float]
    same_tokens: float | None
    """Share of outputs that are those of K = 0, token for token: 1 in fp32, in bf16 less by near ties. None for K = 0,
    where that is not measured, and with synthetic acceptance, whose tokens mean nothing."""
    limit_tokens_per_s: float
    """From `Roofline`, the acceptance that was drawn and the copy bandwidth and matrix rate measured in the same run.
    Of "auto": the largest of any K, at the acceptance that was asked for, if any was."""
    limit_share: float
    host_gap_share: float | None = None
    """See `Trace.host_gap_share`; None where nothing was traced."""
    kernel_ms: float | None = None
    """Time of a step in which a kernel ran, traced."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Traced milliseconds a step by kernel, the longest first."""


COLUMNS: dict[str, Callable[[DecodeRow], str]] = {
    "batch": lambda row: str(row.batch_size),
    "K": lambda row: str(row.k),
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "ms a step": lambda row: f"{row.step_ms:.3f}",
    "acceptance length": lambda row: f"{row.acceptance_length:.2f}" if row.k else "-",
    "same tokens": lambda row: "-" if row.same_tokens is None else f"{row.same_tokens:.0%}",
    "at copy bandwidth": lambda row: f"{row.limit_tokens_per_s:.0f}",
    "share of it": lambda row: f"{row.limit_share:.0%}",
    "kernels' ms": lambda row: "-" if row.kernel_ms is None else f"{row.kernel_ms:.3f}",
    "host gaps": lambda row: "-" if row.host_gap_share is None else f"{row.host_gap_share:.1%}",
}


def measure_decode(
    model: HybridModel,
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]] | None = None,
    name: str = "model",
    keep: Callable[[Result[DecodeRow]], object] | None = None,
) -> Result[DecodeRow]:
    """Decode at every batch size and K, with one engine after another around the same weights.

    Before an engine is timed it decodes once: kernels are compiled and graphs captured, every output must have its
    length, and tokens that the base chose must be those of a plain forward pass, but for near ties (one request of each
    batch is compared). Synthetic acceptance must come out as it was asked for, and with real acceptance the outputs in
    fp32 must be those of K = 0, if that is among `ks`. Kernels are traced when all is timed: see `trace_kernels`.

    Args:
        model: from `mtpkit.bench.shapes.open_model`.
        prompts: token ids, taken in turn; None: random ones.
        name: of the model, for the report.
        keep: is given what there is after each row, so that a long run that is stopped has not been in vain.

    Raises:
        UserError: the model lacks the heads, the requests do not fit, or random prompts would be too many tokens.
        MtpkitError: the engine did not do what was asked for.
    """
    if isinstance(config.draft_vocab, int):
        check_draft_vocab_size(config.draft_vocab, model.mtpkit_config)
    if prompts is None:
        raise_problems(NAME, too_many_tokens(config.prompt_len, max(config.batch_sizes), config.repeats))
    weight = next(model.parameters())
    machine = measure_machine(weight.device)
    synthetic = config.acceptance is not None
    how = f"synthetic acceptance {' '.join(map(str, config.acceptance or ()))}" if synthetic else "real acceptance"
    pattern, repeated = model.mtpkit_config.mtp.pattern, model.mtpkit_config.mtp.repeated
    head = f", {'' if repeated else 'distinct '}head{'' if repeated else 's'} {pattern}" if pattern else ""
    title = f"decoding: {name}{head}, {how}, {str(weight.dtype).removeprefix('torch.')}, {machine.device}"
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()}
    settings |= {"model": name, "mtp_pattern": pattern, "mtp_use_repeated_layer": repeated, "synthetic": synthetic}
    result: Result[DecodeRow] = Result("decode", title, COLUMNS, [], machine, settings, details=("kernels",))
    pairs = [(size, k) for size in config.batch_sizes for k in sorted(config.ks, key=lambda k: k != 0)]  # 0 first
    plain: dict[int, list[list[int]]] = {}
    rows: list[DecodeRow] = []
    choices = []
    traced = pairs if config.trace and can_trace(weight.device) else []
    with tqdm(total=len(pairs) + len(traced), desc="decoding", unit=" runs", disable=None) as progress:

        def finish_run() -> None:
            release_memory(weight.device)
            progress.update()
            if keep:
                keep(replace(result, rows=[*rows]))

        for size, k in pairs:
            progress.set_postfix_str(f"batch {size}, K = {k}")
            contender = Contender(model, config, size, k, prompts)
            rows.append(_measure(contender, machine, plain))
            choices.append(contender.llm.engine.speculation)
            del contender
            finish_run()
        for index, (size, k) in enumerate(traced):
            progress.set_postfix_str(f"tracing batch {size}, K = {k}")
            contender = Contender(model, config, size, k, prompts)
            contender.llm.engine.speculation = choices[index]  # "auto" goes on as it was timed
            rows[index] = _trace(contender, rows[index])
            del contender
            finish_run()
    return replace(result, rows=rows)


def _measure(contender: Contender, machine: Machine, plain: dict[int, list[list[int]]]) -> DecodeRow:
    """Check, then time. `plain` has, or gets, the outputs of K = 0 by batch size."""
    contender.warm_up()
    if contender.k == 0:
        plain[contender.batch_size] = list(contender.outputs.values())
    same_tokens = contender.same_tokens(plain.get(contender.batch_size))
    window = Window.join([contender.run() for _ in range(contender.config.repeats)])
    contender.check(window)
    acceptance = window.acceptance
    # Those that were drawn, as the time is of them too; but "auto" may hardly have tried the deeper ones.
    asked = contender.config.rates(contender.depths) if contender.k == "auto" else None
    limit = contender.limit(machine, asked or acceptance.conditional_acceptance)
    return DecodeRow(
        batch_size=contender.batch_size,
        k=contender.k,
        tokens_per_s=window.tokens_per_s,
        step_ms=window.seconds / window.steps * 1e3,
        acceptance_length=acceptance.acceptance_length,
        same_tokens=same_tokens,
        conditional_acceptance=acceptance.conditional_acceptance,
        limit_tokens_per_s=limit,
        limit_share=window.tokens_per_s / limit,
    )


def _trace(contender: Contender, row: DecodeRow) -> DecodeRow:
    """The row with what its steps consist of."""
    trace, steps = contender.trace()
    if not steps:
        return row
    return replace(
        row,
        host_gap_share=trace.host_gap_share,
        kernel_ms=trace.busy_seconds / steps * 1e3,
        kernels={name: seconds / steps * 1e3 for name, seconds in trace.seconds_by_name().items()},
    )


@dataclass(frozen=True)
class KernelShare:
    """One kernel of a decode step."""

    batch_size: int
    k: int | Literal["auto"]
    kernel: str
    ms: float
    """Of a step, all its calls."""
    share: float
    """Of the kernels' time."""


KERNEL_COLUMNS: dict[str, Callable[[KernelShare], str]] = {
    "batch": lambda row: str(row.batch_size),
    "K": lambda row: str(row.k),
    "kernel": lambda row: row.kernel[:_NAME_WIDTH],
    "ms a step": lambda row: f"{row.ms:.3f}",
    "share": lambda row: f"{row.share:.1%}",
}


def kernel_shares(result: Result[DecodeRow], most: int = 15) -> Result[KernelShare]:
    """What the traced steps consist of, the `most` longest kernels of each batch size and K."""
    rows = [
        KernelShare(row.batch_size, row.k, name, ms, ms / sum(row.kernels.values()))
        for row in result.rows
        for name, ms in list(row.kernels.items())[:most]
    ]
    title = result.title.replace("decoding", "kernels of a decode step", 1)
    return Result("decode_kernels", title, KERNEL_COLUMNS, rows, result.machine, result.settings)
