"""The speed of decoding once all prompts are computed, and how close it is to the machine's own
rates."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from mtpkit.bench.decode_run import Contender, Window
from mtpkit.bench.experts import check_has_experts
from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.report import Column, Result, significant
from mtpkit.bench.roofline import Part, check_draft_vocab_size
from mtpkit.bench.settings import USUAL_DRAFTS, DecodeConfig, asked_drafts, too_many_tokens
from mtpkit.bench.shapes import choose_drafts
from mtpkit.bench.timing import can_trace, release_memory
from mtpkit.bench.weights import ModelWeights
from mtpkit.config.parts import options_of
from mtpkit.engine.scheduling.adaptive import Speculation
from mtpkit.errors import counted, raise_problems
from mtpkit.model.hybrid import HybridModel

_logger = logging.getLogger(__name__)

_NAME_WIDTH = 80


@dataclass(frozen=True)
class DecodeRow:
    """One batch size and K."""

    batch_size: Annotated[int, Column("batch", key=True)]
    k: Annotated[int | Literal["auto"], Column("K", key=True)]
    tokens_per_s: Annotated[float, Column("tokens/s", ".1f")]
    """Generated tokens over wall time, from when all requests decode to when the first one ends."""
    step_ms: Annotated[float, Column("ms per step", ".3f")]
    """Wall time per step in that window."""
    acceptance_length: Annotated[
        float,
        Column("acceptance length", lambda row: f"{row.acceptance_length:.2f}" if row.k else "-"),
    ]
    """1 + mean accepted drafts per step and request."""
    conditional_acceptance: list[float]
    same_tokens: Annotated[float | None, Column("same tokens", ".0%")]
    """Share of outputs that equal those of K = 0, token for token: 1 in fp32; near ties lower it in
    bf16. None for K = 0, if K = 0 is not measured, and with synthetic acceptance, whose tokens mean
    nothing."""
    limit_tokens_per_s: Annotated[float, Column("at copy bandwidth", ".0f")]
    """From `Roofline`, with the measured acceptance, the matrices as memory holds them, and the
    copy bandwidth and matrix rates of the same run. For "auto": the largest of any K, at the
    requested acceptance, if there is one."""
    limit_share: Annotated[float, Column("share of it", ".0%")]
    host_gap_share: Annotated[float | None, Column("host gaps", ".1%")] = None
    """See `Trace.host_gap_share`; None if nothing was traced."""
    kernel_ms: Annotated[float | None, Column("kernels' ms", ".3f")] = None
    """Time per step in which a kernel ran, traced."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Traced milliseconds per step by kernel, the longest first."""
    draft_byte_share: Annotated[float | None, Column("drafts / verification", ".0%")] = None
    """Bytes of a step's drafts over those of everything else, from `Roofline`; None without drafts,
    and for "auto" and trees."""
    draft_time_share: Annotated[float | None, Column("the same in time", ".0%")] = None
    """Measured time of a step's drafts over that of a step that makes none; None unless
    `draft_cost` is asked for."""
    verify_bytes: dict[Part, float] = field(default_factory=dict)
    """Bytes of a step without its drafts, by what they belong to, see `Roofline`."""
    draft_bytes: dict[Part, float] = field(default_factory=dict)
    """Bytes of its drafts."""


def measure_decode(
    model: HybridModel,
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]] | None = None,
    name: str = "model",
    keep: Callable[[Result[DecodeRow]], object] | None = None,
) -> Result[DecodeRow]:
    """Decode at every batch size and K, with one engine after another around the same weights.

    Each engine decodes once before it is timed, which compiles kernels and captures graphs. Every
    output must have the requested length, and tokens that the base chose must be those of a plain
    forward pass, except near ties (one request of each batch is compared). Synthetic acceptance
    must match the requested rates. With real acceptance, outputs in fp32 must equal those of K = 0,
    if that is measured. Experts are drawn at random, if at all, after these checks. Kernels are
    traced after all timing, see `trace_kernels`.

    Args:
        model: from `mtpkit.bench.shapes.open_model`.
        prompts: token ids of prompts, used in turn; None: random prompts.
        name: the model's name in the report.
        keep: see `Result.measure`.

    Raises:
        UserError: the model lacks the heads, or experts to draw, the requests do not fit, or random
            prompts would be too many tokens.
        MtpkitError: one of these checks fails.
    """
    model_config = model.mtpkit_config
    weight = next(model.parameters())
    # What cannot be measured is refused before anything is timed.
    check_has_experts(config.random_experts, model_config)
    drafts = choose_drafts(
        model_config, asked_drafts(config.num_speculative_tokens, config.engine), USUAL_DRAFTS
    )
    config = replace(config, num_speculative_tokens=drafts)
    check_draft_vocab_size(config.draft_vocab_size, model_config)
    if prompts is None:
        raise_problems(
            "decode benchmark",
            too_many_tokens(config.prompt_length, max(config.batch_size), config.repeats),
        )
    machine = measure_machine(weight.device)
    weights = ModelWeights.of(model)
    synthetic = config.acceptance is not None
    repeated = model_config.mtp.repeated
    pattern = model_config.mtp.pattern
    how = (
        f"synthetic acceptance {' '.join(map(str, config.acceptance or ()))}"
        if synthetic
        else "real acceptance"
    )
    head = (
        f", {'' if repeated else 'distinct '}head{'' if repeated else 's'} {pattern}"
        if pattern
        else ""
    )
    sizes = (
        ("tensor-parallel rank", config.engine.tensor_parallel_size),
        ("pipeline stage", config.engine.pipeline_parallel_size),
    )
    drawn = ", experts drawn at random" if config.random_experts else ""
    split = "".join(f", {counted(size, noun)}" for noun, size in sizes if size > 1)
    title = (
        f"decoding: {name}{head}, {how}{drawn}, {weights.said(weight.dtype)},"
        f" {machine.device}{split}"
    )
    about = {
        "model": name,
        "mtp_pattern": pattern,
        "mtp_use_repeated_layer": repeated,
        "synthetic": synthetic,
        "weight_formats": [*weights.formats],
    }
    result = Result(
        "decode",
        title,
        DecodeRow,
        [],
        machine,
        options_of(config) | about,
        details=("kernels", "verify_bytes", "draft_bytes"),
    )
    ks = sorted(drafts, key=lambda k: k != 0)  # 0 first
    pairs = [(size, k) for size in config.batch_size for k in ks]
    plain: dict[int, list[list[int]]] = {}
    # Tracing slows all later launches, so that every case is timed first; a second engine of each
    # case is then traced.
    choices: list[Speculation] = []

    def prepare(index: int) -> Contender:
        release_memory(weight.device)  # of the engine before
        return Contender(model, config, *pairs[index], prompts)

    def time_one(index: int) -> DecodeRow:
        contender = prepare(index)
        row = _measure(contender, machine, plain)
        choices.append(contender.llm.engine.speculation)
        return row

    def trace_one(index: int) -> DecodeRow:
        contender = prepare(index)
        contender.llm.engine.speculation = choices[index]  # "auto" goes on as it was timed
        return _trace(contender, result.rows[index])

    labels = ["batch {}, K = {}".format(*pair) for pair in pairs]
    result = result.measure(range(len(pairs)), time_one, labels.__getitem__, keep)
    if config.trace and can_trace(weight.device):
        result = result.measure(range(len(pairs)), trace_one, labels.__getitem__, keep)
    release_memory(weight.device)
    return result


def _measure(
    contender: Contender, machine: Machine, plain: dict[int, list[list[int]]]
) -> DecodeRow:
    """Check, then time. `plain` holds, or receives, the outputs of K = 0 by batch size."""
    contender.warm_up()
    if contender.k == 0:
        plain[contender.batch_size] = list(contender.outputs.values())
    same_tokens = contender.same_tokens(plain.get(contender.batch_size))
    window = Window.join([contender.run() for _ in range(contender.config.repeats)])
    contender.check(window)
    acceptance = window.acceptance
    # The measured rates, which the time results from; but "auto" may hardly have tried the deeper
    # depths.
    asked = contender.config.rates(contender.depths) if contender.chooses else None
    limit = contender.limit(machine, asked or acceptance.conditional_acceptance)
    row = DecodeRow(
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
    if contender.drafts_a_chain:
        return _with_draft_cost(row, contender)
    if contender.config.draft_cost and contender.k != 0:
        _logger.warning(
            "draft_cost has no effect for batch %d, K = %s: it is for chains of a fixed number of"
            " drafts on one pipeline stage",
            contender.batch_size,
            contender.k,
        )
    return row


def _with_draft_cost(row: DecodeRow, contender: Contender) -> DecodeRow:
    """The row with the bytes of its drafts, and with their time if `draft_cost` asks for it."""
    cost = contender.cost(row.conditional_acceptance)
    verify = dict(cost.parts(drafts=False))
    drafts = dict(cost.parts(drafts=True))
    time_share = None
    if contender.config.draft_cost:
        alone = contender.without_drafting()
        time_share = row.step_ms / (alone.seconds / alone.steps * 1e3) - 1
    return replace(
        row,
        draft_byte_share=sum(drafts.values()) / sum(verify.values()),
        draft_time_share=time_share,
        verify_bytes=verify,
        draft_bytes=drafts,
    )


def _trace(contender: Contender, row: DecodeRow) -> DecodeRow:
    """The row with the kernels of its steps."""
    trace, steps = contender.trace()
    # Short outputs may leave no step after the settling ones.
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

    batch_size: Annotated[int, Column("batch", key=True)]
    k: Annotated[int | Literal["auto"], Column("K", key=True)]
    kernel: Annotated[str, Column("kernel", f".{_NAME_WIDTH}", key=True)]
    ms: Annotated[float, Column("ms per step", ".3f")]
    """Time of all its calls in a step."""
    share: Annotated[float, Column("share", ".1%")]
    """Share of the kernels' time."""


def kernel_shares(result: Result[DecodeRow], most: int = 15) -> Result[KernelShare]:
    """The `most` longest kernels of the traced steps of each batch size and K."""
    rows = [
        KernelShare(row.batch_size, row.k, name, ms, ms / sum(row.kernels.values()))
        for row in result.rows
        for name, ms in list(row.kernels.items())[:most]
    ]
    title = result.title.replace("decoding", "kernels of a decode step", 1)
    return Result("decode_kernels", title, KernelShare, rows, result.machine, result.settings)


@dataclass(frozen=True)
class DraftPart:
    """What drafts and their verification read of one part of a model."""

    batch_size: Annotated[int, Column("batch", key=True)]
    k: Annotated[int | Literal["auto"], Column("K", key=True)]
    part: Annotated[str, Column("part", key=True)]
    verify_bytes: Annotated[
        float, Column("MB to verify", lambda row: significant(row.verify_bytes / 1e6))
    ]
    draft_bytes: Annotated[
        float, Column("MB of all drafts", lambda row: significant(row.draft_bytes / 1e6))
    ]
    share: Annotated[float, Column("of all of verification", ".1%")]
    """The drafts' bytes over all bytes of verification."""


def draft_parts(result: Result[DecodeRow]) -> Result[DraftPart]:
    """The bytes of drafts and of verification by what they belong to."""
    rows = [
        DraftPart(
            row.batch_size,
            row.k,
            part,
            row.verify_bytes.get(part, 0.0),
            row.draft_bytes.get(part, 0.0),
            row.draft_bytes.get(part, 0.0) / sum(row.verify_bytes.values()),
        )
        for row in result.rows
        for part in sorted({*row.verify_bytes, *row.draft_bytes})
    ]
    title = result.title.replace("decoding", "what drafts read", 1)
    return Result("decode_drafts", title, DraftPart, rows, result.machine, result.settings)
