"""The speed of training: the trainer's own steps on random weights and tokens, their parts, and
their share of the matrix rate."""

import logging
import operator
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from tqdm import tqdm

from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.report import Column, Result
from mtpkit.bench.settings import TrainBenchConfig
from mtpkit.bench.timing import Stopwatch, release_memory
from mtpkit.bench.train_cases import OWN, SEVERAL
from mtpkit.config import LossKind, ModelConfig
from mtpkit.data.build import pack_documents
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.documents import Document
from mtpkit.platform import default_device, ensure_distributed, matmul_precision
from mtpkit.training.cache import HiddenStates
from mtpkit.training.config.describe import setting_names
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.loop import Trainer
from mtpkit.training.metrics import find_peak, utilization
from mtpkit.training.parallel import has_results
from mtpkit.training.plan import Plan
from mtpkit.training.stored import StoredFormats

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainRow:
    """Optimizer steps of one sequence length and loss."""

    sequence_length: Annotated[int, Column("sequence", key=True)]
    loss: Annotated[LossKind, Column("loss", key=True)]
    tokens: Annotated[int, Column("tokens per step")]
    """Tokens per step, over all ranks."""
    seconds: Annotated[float, Column("ms", lambda row: f"{row.seconds * 1e3:.1f}")]
    """Median time of a step; the parts below are those of the rank that reports, and add up to
    it."""
    base_seconds: Annotated[float, Column("base", lambda row: f"{row.base_seconds * 1e3:.1f}")]
    """The frozen base's layers, forward; 0 with cached hidden states."""
    heads_seconds: Annotated[float, Column("heads", lambda row: f"{row.heads_seconds * 1e3:.1f}")]
    """All other time: heads and losses, forward and backward, the copy of the tokens to the device,
    and waits for other ranks."""
    optimizer_seconds: Annotated[
        float, Column("optimizer", lambda row: f"{row.optimizer_seconds * 1e3:.1f}")
    ]
    tokens_per_s: Annotated[float, Column("tokens/s", ".0f")]
    """Tokens per second over all ranks."""
    peak_memory: Annotated[
        int | None, Column("peak GB", lambda row: f"{row.peak_memory / 1e9:.1f}")
    ]
    """Peak bytes that torch allocated on any rank, from the first step on; None on a CPU."""
    flops_per_token: Annotated[
        float, Column("GFLOP per token", lambda row: f"{row.flops_per_token / 1e9:.3g}")
    ]
    """FLOPs that `step_flops` counts."""
    flops_per_s: Annotated[float, Column("TFLOP/s", lambda row: f"{row.flops_per_s / 1e12:.3g}")]
    """FLOPs per second and device."""
    matrix_share: Annotated[float, Column("of the matrix rate", ".1%")]
    """Share of the matrix rate measured in the same run."""
    mfu: Annotated[float | None, Column("MFU", ".1%")]
    """Share of the GPU's stated bf16 peak, see `mtpkit.training.metrics`; None if the peak is not
    known."""
    mean_loss: float
    """Weighted mean over all depths in the last step: without meaning for random weights, but
    finite."""


def measure_training(
    base: ModelConfig,
    cases: Sequence[TrainConfig],
    config: TrainBenchConfig,
    name: str = "model",
    keep: Callable[[Result[TrainRow]], object] | None = None,
) -> Result[TrainRow]:
    """Take the first steps of each run of `cases`, with weights drawn on the device and random
    tokens. Collective over all ranks.

    Args:
        base: config of the base.
        cases: settings of the runs, see `training_cases`; what they say of files is not used.
        name: the base's name in the report and in errors.
        keep: is given the result after each row, on the rank that reports.

    Raises:
        UserError: the settings do not fit the base or the number of processes.
        MtpkitError: a loss or a gradient is not finite.
    """
    parallel = cases[0].parallel
    ensure_distributed(parallel.tensor, parallel.pipeline, parallel.expert)
    # The trainer wants a directory for its run, and writes nothing there before `Trainer.run`.
    with (
        tempfile.TemporaryDirectory() as output,
        matmul_precision(cases[0].matmul_precision),
    ):
        # All plans are made first, since they refuse settings that do not fit.
        plans = [
            RandomPlan(replace(case, model=name, output=output), base, config.document_length)
            for case in cases
        ]
        return _measure(plans, config, name, keep)


def _measure(
    plans: Sequence["RandomPlan"],
    config: TrainBenchConfig,
    name: str,
    keep: Callable[[Result[TrainRow]], object] | None,
) -> Result[TrainRow]:
    device = default_device()
    machine = measure_machine(device)
    _, no_peak = find_peak(device)
    if no_peak and dist.get_rank() == 0:  # the rank that shows warnings
        _logger.warning(no_peak)
    first = plans[0].config
    heads = first.heads
    title = (
        f"training heads {heads.pattern} x {heads.num_depths}: {name}, {first.dtype},"
        f" {machine.device}"
    )
    about = {
        "model": name,
        "world_size": dist.get_world_size(),
        **asdict(config),
        **_settings(plans),
    }
    result = Result("train", title, TrainRow, [], machine, about)
    # Steps are collective, so that all ranks run all cases; one of them shows and keeps the rows.
    reports = has_results()
    return result.measure(
        plans,
        lambda plan: _measure_steps(plan, config, machine),
        str,
        keep if reports else None,
        quiet=not reports,
    )


def _settings(plans: Sequence["RandomPlan"]) -> dict[str, object]:
    """The trainer's settings by key, but those that the benchmark sets itself; for keys that may
    have several values, the values of all plans."""
    keys = [key for key in setting_names(TrainConfig) if key not in OWN]
    values = {key: operator.attrgetter(key)(plans[0].config) for key in keys}
    several = {key: [operator.attrgetter(key)(plan.config) for plan in plans] for key in SEVERAL}
    return values | several


class RandomPlan(Plan):
    """The plan of a run on random weights and tokens in place of files."""

    drawn = True

    def __init__(self, asked: TrainConfig, base: ModelConfig, document_length: int | None = None):
        self._base = base
        self._document_length = document_length
        super().__init__(asked)

    def __str__(self) -> str:
        return f"{self.config.loss.kind} {self.config.data.sequence_length}"

    def read_base(self) -> ModelConfig:
        """The config that was given."""
        return self._base

    def read_formats(self) -> StoredFormats:
        """None: weights are drawn."""
        return StoredFormats()

    def open_data(self, paths: tuple[str, ...]) -> PackedDataset:
        """Random tokens for one step over all ranks, in documents of one length; every token is
        learnt. Later steps read them again."""
        data = self.config.data
        size = self._document_length or data.sequence_length
        sequences = [self._draw(number)[0] for number in range(data.global_batch_size)]
        parts = [
            tokens[start : start + size]
            for tokens in sequences
            for start in range(0, data.sequence_length, size)
        ]
        documents = [Document(part, np.ones(len(part), dtype=bool)) for part in parts]
        source = pack_documents("random tokens", documents, data.sequence_length)
        return PackedDataset([source], data.sequence_length, 0, self.model.vocab_size)

    def cached_data(self) -> tuple[PackedDataset, PackedDataset | None]:
        """The data with random hidden states, as many as this rank reads in a step.

        They are in the host's memory: the speed of a disk is not measured.
        """
        config = self.config
        cache_dtype = config.dtype if config.cache_dtype == "auto" else config.cache_dtype
        shape = (config.data.sequence_length, self.model.hidden_size)
        share = config.data.global_batch_size // parallel_state.get_data_parallel_world_size()
        drawn = [torch.randn(shape, generator=self._draw(number)[1]) for number in range(share)]
        stored = HiddenStates.encode(torch.stack(drawn), getattr(torch, cache_dtype))

        def read(rows: np.ndarray) -> HiddenStates:
            chosen = stored.map(lambda part: part[rows % share])
            # As `HiddenReader` does, so that copies to the GPU run beside its work.
            return chosen.map(Tensor.pin_memory) if self.device.type == "cuda" else chosen

        return self.train_data.with_hidden(read), None

    def _draw(self, number: int) -> tuple[np.ndarray, torch.Generator]:
        """The tokens of a sequence, [s] int32, and the generator that draws what else belongs to
        it."""
        generator = torch.Generator().manual_seed(self.config.seed + number)
        length = self.config.data.sequence_length
        tokens = torch.randint(self.model.vocab_size, (length,), generator=generator)
        return tokens.numpy().astype(np.int32), generator


def _measure_steps(plan: RandomPlan, config: TrainBenchConfig, machine: Machine) -> TrainRow:
    # The trainer of the case before is unreachable, but a GPU has its memory until it is collected.
    release_memory(plan.device)
    trainer = Trainer(plan)
    watch = Stopwatch(plan.device)
    watch.attach(trainer.model.decoder, "forward", "base")
    watch.attach(trainer.optimizer, "step", "optimizer")
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)
    steps: list[dict[str, float]] = []
    shown = None if has_results() else True
    for _ in tqdm(range(config.warm_up_steps + config.steps), desc=str(plan), disable=shown):
        # All ranks begin together: a wait for a late one would count as time of the step.
        dist.barrier()
        watch.take()
        with watch.span("step"):
            values = trainer.advance()
        steps.append(watch.take())
    mean_loss = values["loss"]
    assert isinstance(mean_loss, float)
    return _row(trainer, steps[config.warm_up_steps :], machine, mean_loss)


def _row(
    trainer: Trainer, steps: Sequence[dict[str, float]], machine: Machine, mean_loss: float
) -> TrainRow:
    seconds, base, optimizer = (
        statistics.median(step.get(name, 0.0) for step in steps)
        for name in ("step", "base", "optimizer")
    )
    data = trainer.config.data
    tokens = data.global_batch_size * data.sequence_length
    rate = tokens * trainer.flops / seconds / dist.get_world_size()
    peak = None
    if trainer.device.type == "cuda":
        most = torch.tensor(torch.cuda.max_memory_allocated(trainer.device), device=trainer.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        peak = int(most)
    return TrainRow(
        sequence_length=data.sequence_length,
        loss=trainer.config.loss.kind,
        tokens=tokens,
        seconds=seconds,
        base_seconds=base,
        heads_seconds=seconds - base - optimizer,
        optimizer_seconds=optimizer,
        tokens_per_s=tokens / seconds,
        peak_memory=peak,
        flops_per_token=trainer.flops,
        flops_per_s=rate,
        matrix_share=rate / machine.matrix_rate,
        mfu=utilization(tokens / seconds, trainer.flops, dist.get_world_size(), trainer.peak),
        mean_loss=mean_loss,
    )
