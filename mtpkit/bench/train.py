"""The speed of training: the trainer's own step on random tokens, its parts, and its share of the
matrix rate."""

import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from tqdm import tqdm

from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.report import Column, Result
from mtpkit.bench.settings import TrainBenchConfig
from mtpkit.bench.shapes import with_pattern
from mtpkit.bench.timing import Stopwatch
from mtpkit.config import ModelConfig
from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError
from mtpkit.kernels.head_loss import LossKind
from mtpkit.model import build_model
from mtpkit.model.backends import resolve_backend
from mtpkit.model.flops import step_flops
from mtpkit.model.fp8 import use_fp8_base
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import default_device, ensure_distributed, resolve_dtype
from mtpkit.training.cache import HiddenStates
from mtpkit.training.config.settings import (
    DataConfig,
    HeadsConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mtpkit.training.heads import default_pattern, freeze_base, resolve_attention
from mtpkit.training.metrics import find_peak, utilization
from mtpkit.training.optimizer import HeadOptimizer
from mtpkit.training.parallel import check_layout, has_results
from mtpkit.training.step import train_step

_logger = logging.getLogger(__name__)
_LEARNING_RATE = 1e-5


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
    """All other time: heads and losses, forward and backward, and waits for other
    ranks."""
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
    model_config: ModelConfig,
    config: TrainBenchConfig,
    name: str = "model",
    keep: Callable[[Result[TrainRow]], object] | None = None,
) -> Result[TrainRow]:
    """Train heads of a shape on random tokens, with weights drawn on the device. Collective over
    all ranks.

    Args:
        name: the shape's name in the report.
        keep: is given the result after each row, on the rank that reports.

    Raises:
        UserError: the trainer refuses the settings, or they do not fit the shape or the number of
            processes.
        MtpkitError: a loss is not finite.
    """
    pattern = config.pattern
    if pattern is None:
        pattern = default_pattern(model_config)
    shape = with_pattern(
        model_config, pattern, mtp_num_depths=config.k, mtp_use_repeated_layer=not config.distinct
    )
    # Values that "auto" stands for are resolved first, so that the report says what ran.
    config = replace(
        config,
        dtype=resolve_dtype(config.dtype, default_device()),
        pattern=pattern,
        attention=resolve_attention(config.attention, shape),
        backend=resolve_backend(config.backend),
    )
    cases = [(length, loss) for length in config.sequence_lengths for loss in config.losses]
    check_layout(_parallel(config), shape)
    for case in cases:  # refuses settings that the trainer would refuse
        train_settings(config, *case, ranks=1)
    bench = _Bench(shape, config)
    title = f"training heads {pattern} x {config.k}: {name}, {config.dtype}, {bench.machine.device}"
    about = {
        "model": name,
        "world_size": dist.get_world_size(),
        "repeated": not config.distinct,
        **asdict(config),
    }
    result = Result("train", title, TrainRow, [], bench.machine, about)
    # Steps are collective, so that all ranks run all cases; one of them shows and keeps the rows.
    reports = has_results()
    return result.measure(
        cases, lambda case: bench.measure(*case), str, keep if reports else None, quiet=not reports
    )


def train_settings(
    config: TrainBenchConfig, sequence_length: int, loss: LossKind, ranks: int
) -> TrainConfig:
    """The trainer's settings for `ranks` data-parallel ranks.

    Raises:
        UserError: the trainer refuses them.
    """
    assert config.dtype != "auto" and config.pattern is not None
    return TrainConfig(
        model="random weights",
        output="none",
        data=DataConfig(
            train=("random tokens",),
            sequence_length=sequence_length,
            micro_batch_size=config.micro_batch_size,
            global_batch_size=config.micro_batch_size * config.micro_batches * ranks,
        ),
        heads=HeadsConfig(
            num_depths=config.k,
            pattern=config.pattern,
            repeated=not config.distinct,
            attention=config.attention,
            recompute=config.recompute,
        ),
        loss=LossConfig(kind=loss),
        optimizer=OptimizerConfig(kind=config.optimizer, warmup_steps=0),
        parallel=_parallel(config),
        seed=config.seed,
        dtype=config.dtype,
        base_fp8=config.base_fp8,
        cache="memory" if config.cached else "",
    )


def _parallel(config: TrainBenchConfig) -> ParallelConfig:
    return ParallelConfig(*_sizes(config), config.balance)


def _sizes(config: TrainBenchConfig) -> tuple[int, int, int]:
    """Numbers of ranks that split matrices, layers and experts."""
    return config.tensor_parallel_size, config.pipeline_parallel_size, config.expert_parallel_size


class _TimedOptimizer(HeadOptimizer):
    """A `HeadOptimizer` that times its own steps."""

    def __init__(
        self, watch: Stopwatch, parameters: Iterable[nn.Parameter], config: OptimizerConfig
    ):
        super().__init__(parameters, config)
        self._watch = watch

    def step(self, lr: float) -> float:
        """See `HeadOptimizer.step`."""
        with self._watch.span("optimizer"):
            return super().step(lr)


class _Bench:
    """A model with its optimizer and stopwatch."""

    def __init__(self, shape: ModelConfig, config: TrainBenchConfig):
        ranks = _sizes(config)
        self.config = config
        ensure_distributed(*ranks)
        self.device = default_device()
        self.group = parallel_state.get_data_parallel_group()
        self.machine: Machine = measure_machine(self.device)
        self.model: HybridModel = build_model(
            shape,
            getattr(torch, config.dtype),
            self.device,
            config.backend,
            config.seed,
            *ranks,
            init="device",
            sequence_parallel=config.tensor_parallel_size > 1,
            base_layers=not config.cached,
            balance=config.balance,
        )
        if config.base_fp8:
            use_fp8_base(self.model)
        settings = train_settings(
            config, config.sequence_lengths[0], config.losses[0], self.group.size()
        )
        self.watch = Stopwatch(self.device)
        self.optimizer = _TimedOptimizer(
            self.watch, freeze_base(self.model).values(), settings.optimizer
        )
        self.flops = step_flops(shape, config.k, base_layers=not config.cached)
        self.peak, no_peak = find_peak(self.device)
        if no_peak and dist.get_rank() == 0:  # the rank that shows warnings
            _logger.warning(no_peak)
        # Hooks leave the trainer's step as it is.
        self.model.decoder.register_forward_pre_hook(lambda *_: self.watch.start("base"))
        self.model.decoder.register_forward_hook(lambda *_: self.watch.stop("base"))

    def measure(self, sequence_length: int, loss: LossKind) -> TrainRow:
        """Measure one row."""
        config = self.config
        settings = train_settings(config, sequence_length, loss, self.group.size())
        batches = [self._batch(sequence_length, number) for number in range(config.micro_batches)]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        steps: list[dict[str, float]] = []
        progress = range(config.warm_up_steps + config.steps)
        for number in tqdm(
            progress, desc=f"{loss} {sequence_length}", disable=None if has_results() else True
        ):
            # All ranks begin together: a wait for a late one would count as time of the step.
            dist.barrier()
            self.watch.take()
            with self.watch.span("step"):
                sums, _ = train_step(
                    self.model, batches, self.optimizer, settings, _LEARNING_RATE, number
                )
            steps.append(self.watch.take())
        weights = settings.loss.weights(settings.heads.num_depths)
        mean_loss = sum(
            weight * value for weight, value in zip(weights, sums.losses(), strict=True)
        )
        if not sums.values.isfinite().all():
            raise MtpkitError(
                f"the loss {loss} is not finite: the times mean nothing until this is fixed"
            )
        return self._row(sequence_length, loss, steps[config.warm_up_steps :], mean_loss)

    def _row(
        self,
        sequence_length: int,
        loss: LossKind,
        steps: Sequence[dict[str, float]],
        mean_loss: float,
    ) -> TrainRow:
        seconds, base, optimizer = (
            statistics.median(step.get(name, 0.0) for step in steps)
            for name in ("step", "base", "optimizer")
        )
        sequences = self.config.micro_batch_size * self.config.micro_batches * self.group.size()
        tokens = sequences * sequence_length
        rate = tokens * self.flops / seconds / dist.get_world_size()
        peak = None
        if self.device.type == "cuda":
            most = torch.tensor(torch.cuda.max_memory_allocated(self.device), device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            peak = int(most)
        return TrainRow(
            sequence_length=sequence_length,
            loss=loss,
            tokens=tokens,
            seconds=seconds,
            base_seconds=base,
            heads_seconds=seconds - base - optimizer,
            optimizer_seconds=optimizer,
            tokens_per_s=tokens / seconds,
            peak_memory=peak,
            flops_per_token=self.flops,
            flops_per_s=rate,
            matrix_share=rate / self.machine.matrix_rate,
            mfu=utilization(tokens / seconds, self.flops, dist.get_world_size(), self.peak),
            mean_loss=mean_loss,
        )

    def _batch(self, length: int, number: int) -> PackedBatch:
        """Random tokens in documents of one length, different tokens on each rank; every token is
        learnt."""
        config = self.config
        shape = (self.config.micro_batch_size, length)
        generator = torch.Generator().manual_seed(
            config.seed + number * self.group.size() + self.group.rank()
        )
        place = torch.arange(length).expand(shape)
        document_len = min(config.document_len or length, length)
        rest = length % document_len
        document_lens = (document_len,) * (length // document_len) + ((rest,) if rest else ())
        vocab_size = self.model.mtpkit_config.vocab_size
        width = self.model.mtpkit_config.hidden_size
        batch = PackedBatch(
            token_ids=torch.randint(vocab_size, shape, generator=generator),
            loss_mask=torch.ones(shape, dtype=torch.bool),
            documents=(place // document_len).int(),
            positions=place % document_len,
            document_lens=document_lens * shape[0],
        ).to(self.device)
        if not config.cached:
            return batch
        values = torch.randn(*shape, width, generator=generator).to(getattr(torch, config.dtype))
        states = HiddenStates(values.pin_memory() if self.device.type == "cuda" else values)
        return replace(batch, hidden=lambda: states)
