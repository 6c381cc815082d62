"""The first lines of a run: what it trains, on what, and what that will take.

Sizes are counted from the model's config alone, so that `--dry-run` prints the lines that the run
will print.
"""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import bisect
import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from mtpkit.checkpoint.layouts.megatron import OUTPUT, is_stacked
from mtpkit.config import ModelConfig
from mtpkit.data.dataset import PackedDataset
from mtpkit.errors import counted
from mtpkit.model.flops import head_parameters, step_flops
from mtpkit.model.kinds import KINDS
from mtpkit.model.stages import stage_patterns
from mtpkit.platform import device_name
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.metrics import find_peak
from mtpkit.training.plan import Plan
from mtpkit.training.stored import StoredFormats

USUAL_MFU = 0.5
"""Share of a GPU's stated peak that steps of a model of billions of weights reach, see
docs/performance.md."""

FORECAST_STEPS = 5
"""Steps after which the expected time is told."""

_GRADIENT = 4
"""Bytes of a gradient, which is fp32."""

_BASE_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

_BEGINNINGS = {
    "checkpoint": "the model's own heads",
    "base": "copies of the base's last layers",
    "fresh": "random weights",
}


def header(plan: Plan) -> list[str]:
    """Describe a run in lines of a name and its value, of 80 columns where possible."""
    config = plan.config
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[config.optimizer.kind]
    values = {
        "model": _model(plan),
        "heads": _heads(plan),
        "trained": f"{counted(head_parameters(plan.model), 'parameter')}; the base is frozen",
        "data": _data(plan.train_data),
        "steps": _steps(config, len(plan.train_data)),
        "held out": _data(plan.eval_data) if plan.eval_data is not None else "nothing",
        "ranks": _ranks(config),
        "numbers": (
            f"{config.dtype} on {device_name(plan.device)}, backend {config.backend}, {optimizer}"
        ),
        "memory": _memory(plan),
        "time": _time(plan),
        "output": config.output,
    }
    return [line for name, value in values.items() for line in _wrapped(f"{name:<9}", value)]


def _wrapped(name: str, value: str) -> list[str]:
    """Lines of 80 columns; patterns and paths stay whole."""
    return textwrap.wrap(
        value,
        width=80,
        initial_indent=name,
        subsequent_indent=" " * len(name),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _model(plan: Plan) -> str:
    text = f"{plan.config.model}: {len(plan.model.pattern)} layers, {plan.model.pattern}"
    stored = plan.stored
    if not stored.base:
        return text
    return f"{text}; stored in {stored.of_base}, {_kept(plan.config)}"


def _kept(config: TrainConfig) -> str:
    return "which it keeps" if config.backend == "local" else "widened"


def _widened(plan: Plan) -> str:
    """What becomes of quantised matrices that the heads start from, as the end of a sentence."""
    init = plan.config.heads.init
    stored = plan.stored
    formats = {"checkpoint": stored.of_heads, "base": stored.of_base, "fresh": ""}[init]
    return f", widened from {formats}" if formats else ""


def _heads(plan: Plan) -> str:
    heads = plan.config.heads
    mtp = plan.model.mtp
    shared = "one block for all" if mtp.repeated else "a block for each"
    auto = " (auto)" if plan.asked.heads.init == "auto" else ""
    return (
        f"pattern {mtp.pattern}, {counted(heads.num_depths, 'depth')}, {shared}, attention"
        f" {heads.attention}; init {heads.init}{auto}: {_BEGINNINGS[heads.init]}"
        f"{_widened(plan)}"
    )


def _data(data: PackedDataset) -> str:
    documents = sum(counts.num_documents - counts.num_left_out for counts in data.counts)
    return (
        f"{counted(documents, 'document')}, {counted(data.num_tokens, 'token')} in "
        f"{counted(len(data), 'sequence')} of {data.sequence_length:,}"
    )


def _steps(config: TrainConfig, num_sequences: int) -> str:
    size = config.data.global_batch_size
    tokens = config.steps * size * config.data.sequence_length
    epochs = config.steps * size / num_sequences
    return (
        f"{config.steps:,}, each of {counted(size, 'sequence')}: {counted(tokens, 'token')} in all,"
        f" {epochs:.3g} epochs"
    )


def _ranks(config: TrainConfig) -> str:
    parallel = config.parallel
    ranks = dist.get_world_size()
    data = ranks // (parallel.tensor * parallel.pipeline)
    return (
        f"{ranks}: data {data} x tensor {parallel.tensor} x pipeline {parallel.pipeline}"
        f"{f', experts split over {parallel.expert}' if parallel.expert > 1 else ''}"
    )


def _memory(plan: Plan) -> str:
    most = max(held_bytes(plan.config, plan.model, dist.get_world_size(), plan.stored)) / 2**30
    text = f"at least {most:.2f} GiB on a rank for weights, gradients and optimizer; "
    text += "activations come on top (an estimate)"
    if plan.device.type == "cuda":
        text += (
            "; the GPU has"
            f" {torch.cuda.get_device_properties(plan.device).total_memory / 2**30:.1f} GiB"
        )
    return text


def _time(plan: Plan) -> str:
    config = plan.config
    peak, _ = find_peak(plan.device)
    left = config.steps - (plan.directory.iteration or 0)
    if peak is None:
        return f"not known for this device before its first steps; {counted(left, 'step')} to go"
    tokens = left * config.data.global_batch_size * config.data.sequence_length
    flops = tokens * step_flops(plan.model, config.heads.num_depths, base_layers=not config.cache)
    seconds = flops / (peak * USUAL_MFU * dist.get_world_size())
    return (
        f"about {duration(seconds)} for {counted(left, 'step')} if they reach {USUAL_MFU:.0%} of"
        " the GPU's peak rate (an estimate; small models are slower), evaluations not counted"
    )


def duration(seconds: float) -> str:
    """A time span in its two largest units.

    >>> duration(7260)
    '2 h 1 min'
    """
    whole = max(1, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days} d {hours_left} h"
    if hours:
        return f"{hours} h {minutes_left} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Forecast:
    """Tells once, after a few steps, how long the steps that are left will take."""

    def __init__(self, steps: int):
        self._left = steps
        self._seconds: list[float] = []

    def add(self, seconds: float) -> str | None:
        """Count a step that took `seconds`; returns the message after the step that makes it known.

        The first step is not counted, since it compiles kernels and fills caches.
        """
        self._left -= 1
        self._seconds.append(seconds)
        if len(self._seconds) != FORECAST_STEPS or not self._left:
            return None
        mean = statistics.mean(self._seconds[1:])
        return (
            f"expected time: {duration(mean * self._left)} for the {counted(self._left, 'step')}"
            f" that are left, at {mean:.3g} s per step (measured on {FORECAST_STEPS - 1}), without"
            " evaluations and checkpoints"
        )


def held_bytes(
    config: TrainConfig, model: ModelConfig, ranks: int, stored: StoredFormats | None = None
) -> list[int]:
    """Bytes of weights, gradients and optimizer on a rank of each pipeline stage, without padding.

    Counts what stays on the device between steps: the weights of the base's layers, the embedding
    and the lm_head; and for the heads their weights and fp32 gradients, masters and moments. Memory
    with `cache` has no layers of the base.

    Args:
        config: settings from `resolve`.
        ranks: number of processes.
        stored: formats of the base in its files; None: its matrices are not quantised.
    """
    parallel = config.parallel
    stored = stored or StoredFormats()
    weight = {"float32": 4, "bfloat16": 2}[config.dtype]
    patterns = stage_patterns(model, parallel.pipeline, parallel.balance)
    vocabulary = weight * model.vocab_size * model.hidden_size / parallel.tensor
    fp8 = config.base_fp8 and not stored.base
    stages = [
        0.0 if config.cache else _base_bytes(config, model, pattern, weight, fp8)
        for pattern in patterns
    ]
    stages[0] += vocabulary
    if len(stages) > 1:
        stages[-1] += vocabulary  # the heads read the embedding too
    if not model.tie_word_embeddings:
        stages[-1] += vocabulary
    if config.backend == "local":
        for stage, saved in _saved_bytes(config, stored, patterns, weight):
            stages[stage] -= saved
    shared, experts = _head_elements(config, model)
    stages[-1] += (weight + _GRADIENT) * (shared + experts)
    stages[-1] += _state_bytes(config, shared, experts, ranks)
    return [math.ceil(stage) for stage in stages]


def _saved_bytes(
    config: TrainConfig, stored: StoredFormats, patterns: Sequence[str], weight: int
) -> Iterator[tuple[int, float]]:
    """Yield, for each matrix that stays quantised, its stage and the bytes on a rank by which it is
    smaller than in the dtype of the run."""
    parallel = config.parallel
    ends = [*itertools.accumulate(map(len, patterns))]
    for name, (elements, held) in stored.sizes.items():
        layer = _BASE_LAYER.match(name)
        ranks = parallel.tensor * (parallel.expert if is_stacked(name) else 1)
        if layer is not None and not config.cache:
            yield bisect.bisect_right(ends, int(layer[1])), (weight * elements - held) / ranks
        elif name == OUTPUT:
            yield -1, (weight * elements - held) / ranks


def _base_bytes(
    config: TrainConfig, model: ModelConfig, pattern: str, weight: int, fp8: bool
) -> float:
    """Bytes of the base's layers of a stage on one rank; `fp8`: `base_fp8` quantises them."""
    matrix = weight
    if fp8:  # `te` keeps the matrices in bf16 too
        matrix = 1 if config.backend == "local" else weight + 1
    total = 0.0
    for letter in pattern:
        counts = KINDS[letter].matrices(model)
        total += matrix * counts.always / config.parallel.tensor
        total += (
            matrix
            * counts.expert
            * counts.experts.count
            / (config.parallel.tensor * config.parallel.expert)
        )
        total += weight * KINDS[letter].vectors(model)
    return total


def _head_elements(config: TrainConfig, model: ModelConfig) -> tuple[float, float]:
    """Elements of the heads on one rank: those outside of routed experts, and those of routed
    experts."""
    parallel = config.parallel
    mtp = model.mtp
    layers = [KINDS[letter].matrices(model) for letter in mtp.pattern]
    experts = mtp.num_layers * sum(layer.expert * layer.experts.count for layer in layers)
    shared = head_parameters(model) - experts
    return shared / parallel.tensor, experts / (parallel.tensor * parallel.expert)


def _state_bytes(config: TrainConfig, shared: float, experts: float, ranks: int) -> float:
    """Bytes of the fp32 masters and moments on one rank, which data-parallel ranks may share."""
    each = 12 if config.optimizer.kind == "adamw" else 8
    parallel = config.parallel
    data = ranks // (parallel.tensor * parallel.pipeline)
    if not config.optimizer.distributed:
        return each * (shared + experts)
    return each * (shared / data + experts * parallel.expert / data)
