"""How fast heads are trained: the trainer's own step on random tokens, its parts, and its share of the matrix rate."""

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn
from tqdm import tqdm

from mtpkit.bench.machine import Machine, measure_machine
from mtpkit.bench.report import Result
from mtpkit.bench.stopwatch import Stopwatch
from mtpkit.config import ModelConfig
from mtpkit.data import PackedBatch
from mtpkit.errors import MtpkitError, raise_problems
from mtpkit.kernels.head_loss import LossKind
from mtpkit.model import build_model
from mtpkit.model.flops import step_flops
from mtpkit.model.fp8 import use_fp8_base
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import default_device, ensure_distributed
from mtpkit.training.cache import HiddenStates
from mtpkit.training.config import (
    DataConfig,
    HeadsConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mtpkit.training.freeze import freeze_base
from mtpkit.training.mfu import find_peak, utilization
from mtpkit.training.optimizer import HeadOptimizer
from mtpkit.training.parallel import check_layout, has_results
from mtpkit.training.step import train_step

_logger = logging.getLogger(__name__)
_LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class TrainBenchConfig:
    """What is measured: one row for each sequence length and loss.

    Raises:
        UserError: values that cannot be measured, all of them named.
    """

    sequence_lengths: tuple[int, ...] = (4096,)
    losses: tuple[LossKind, ...] = ("kl",)
    k: int = 3
    """Depths."""
    pattern: str = "*-"
    """Layers of one depth."""
    repeated: bool = True
    """One block for all depths, rather than one each."""
    attention: Literal["serving", "per_depth"] = "serving"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    micro_batch_size: int = 1
    """Sequences of one forward and backward."""
    micro_batches: int = 1
    """Of one optimizer step on each data-parallel rank."""
    document_len: int | None = None
    """Tokens of the documents that a sequence is packed from; None: each sequence is one."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    offload: bool = False
    """AdamW's fp32 weights and moments are in the host's memory. A step's update then goes on beside the next step's
    base, and what is left of it there is in the next step's time."""
    recompute: bool = False
    """Run each depth again in the backward."""
    cached: bool = False
    """Take the base's hidden states from memory on the host, as a cache that is read ahead leaves them there; there is
    no base then."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    backend: str = "local"
    base_fp8: bool = False
    """The base multiplies in fp8, see `use_fp8_base`."""
    steps: int = 5
    """The median counts."""
    warm_up: int = 3
    """Steps before, which compile kernels."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"micro_batches": 1, "steps": 1, "warm_up": 0, "document_len": 1}
        values = {name: getattr(self, name) for name in least if getattr(self, name) is not None}
        wrong = [
            f"{name} is {value}, must be at least {least[name]}"
            for name, value in values.items()
            if value < least[name]
        ]
        if not (self.sequence_lengths and self.losses):
            wrong.append("a sequence length and a loss are needed")
        if self.attention == "serving" and not self.repeated:
            wrong.append("serving attention is for one repeated head; take per_depth for distinct ones")
        if self.offload and not self.warm_up:
            wrong.append("offload moves a step's update into the next step: take warm_up of 1 or more")
        if self.cached and self.base_fp8:
            wrong.append("cached hidden states leave no base for base_fp8; take one of them")
        raise_problems("training benchmark", wrong)

    def settings(self, sequence_length: int, loss: LossKind, ranks: int) -> TrainConfig:
        """The trainer's, given how many data-parallel ranks there are.

        Raises:
            UserError: it would not run these.
        """
        return TrainConfig(
            model="random weights",
            output="none",
            data=DataConfig(
                train=("random tokens",),
                sequence_length=sequence_length,
                micro_batch_size=self.micro_batch_size,
                global_batch_size=self.micro_batch_size * self.micro_batches * ranks,
            ),
            heads=HeadsConfig(
                num_depths=self.k,
                pattern=self.pattern,
                repeated=self.repeated,
                attention=self.attention,
                recompute=self.recompute,
            ),
            loss=LossConfig(kind=loss),
            optimizer=OptimizerConfig(kind=self.optimizer, warmup_steps=0, offload=self.offload),
            parallel=self.parallel,
            seed=self.seed,
            dtype=self.dtype,
            base_fp8=self.base_fp8,
            cache="memory" if self.cached else "",
        )


@dataclass(frozen=True)
class TrainRow:
    """Optimizer steps of one sequence length and loss."""

    sequence_length: int
    loss: LossKind
    tokens: int
    """Of a step, over all ranks."""
    seconds: float
    """Median of a step; the parts below are those of the rank that reports, and add up to it."""
    base_seconds: float
    """The frozen base's layers, forward; 0 with cached hidden states."""
    heads_seconds: float
    """All the rest: heads and losses, forward and backward, and waiting for others and for an offloaded update."""
    optimizer_seconds: float
    tokens_per_s: float
    """Over all ranks."""
    peak_memory: int | None
    """Bytes that torch held at most on any rank, from the first step on; None on a CPU."""
    flops_per_token: float
    """What `step_flops` counts."""
    flops_per_s: float
    """Of a device."""
    matrix_share: float
    """Of the matrix rate measured in the same run."""
    mfu: float | None
    """Share of the GPU's stated bf16 peak, see `mtpkit.training.mfu`; None where that is not known."""
    mean_loss: float
    """After the last step, of all depths as they are weighted: of no meaning with random weights, but finite."""


COLUMNS: dict[str, Callable[[TrainRow], str]] = {
    "sequence": lambda row: str(row.sequence_length),
    "loss": lambda row: row.loss,
    "tokens a step": lambda row: str(row.tokens),
    "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
    "ms": lambda row: f"{row.seconds * 1e3:.1f}",
    "base": lambda row: f"{row.base_seconds * 1e3:.1f}",
    "heads": lambda row: f"{row.heads_seconds * 1e3:.1f}",
    "optimizer": lambda row: f"{row.optimizer_seconds * 1e3:.1f}",
    "peak GB": lambda row: "-" if row.peak_memory is None else f"{row.peak_memory / 1e9:.1f}",
    "GFLOP a token": lambda row: f"{row.flops_per_token / 1e9:.3g}",
    "TFLOP/s": lambda row: f"{row.flops_per_s / 1e12:.3g}",
    "of the matrix rate": lambda row: f"{row.matrix_share:.1%}",
    "MFU": lambda row: "-" if row.mfu is None else f"{row.mfu:.1%}",
}


def measure_training(
    model_config: ModelConfig,
    config: TrainBenchConfig,
    name: str = "model",
    keep: Callable[[Result[TrainRow]], None] | None = None,
) -> Result[TrainRow]:
    """Train heads of a shape, its weights drawn on the device, on random tokens. Collective over all ranks.

    Args:
        name: of the shape, for the report.
        keep: is given the result after each row, on the rank that reports.

    Raises:
        UserError: settings that the trainer refuses, or that do not fit the shape or the number of processes.
        MtpkitError: a loss is not finite.
    """
    shape = model_config.replace(
        mtp_pattern=config.pattern, mtp_num_depths=config.k, mtp_use_repeated_layer=config.repeated
    )
    cases = [(length, loss) for length in config.sequence_lengths for loss in config.losses]
    check_layout(config.parallel, shape)
    for case in cases:
        config.settings(*case, ranks=1)
    bench = _Bench(shape, config)
    title = f"training heads {config.pattern} x {config.k}: {name}, {config.dtype}, {bench.machine.device}"
    settings = {"model": name, "world_size": dist.get_world_size(), **asdict(config)}
    rows: list[TrainRow] = []
    result = Result("train", title, COLUMNS, rows, bench.machine, settings)
    for case in cases:
        rows.append(bench.measure(*case))
        if keep is not None and has_results():
            keep(result)
    return result


class _TimedOptimizer(HeadOptimizer):
    """Times its own steps."""

    def __init__(self, watch: Stopwatch, parameters: Iterable[nn.Parameter], config: OptimizerConfig):
        super().__init__(parameters, config)
        self._watch = watch

    def step(self, lr: float) -> float:
        """As `HeadOptimizer.step`."""
        with self._watch.span("optimizer"):
            return super().step(lr)


class _Bench:
    """A model with its optimizer and stopwatch."""

    def __init__(self, shape: ModelConfig, config: TrainBenchConfig):
        self.config, parallel = config, config.parallel
        ensure_distributed(parallel.tensor, parallel.pipeline, parallel.expert)
        self.device = default_device()
        self.group = parallel_state.get_data_parallel_group()
        self.machine: Machine = measure_machine(self.device)
        self.model: HybridModel = build_model(
            shape,
            getattr(torch, config.dtype),
            self.device,
            config.backend,
            config.seed,
            parallel.tensor,
            parallel.pipeline,
            parallel.expert,
            init="device",
            sequence_parallel=parallel.tensor > 1,
            base_layers=not config.cached,
            balance=parallel.balance,
        )
        if config.base_fp8:
            use_fp8_base(self.model)
        settings = config.settings(config.sequence_lengths[0], config.losses[0], self.group.size())
        self.watch = Stopwatch(self.device)
        self.optimizer = _TimedOptimizer(self.watch, freeze_base(self.model).values(), settings.optimizer)
        self.flops = step_flops(shape, config.k, base_layers=not config.cached)
        self.peak, no_peak = find_peak(self.device)
        if no_peak and has_results():
            _logger.warning(no_peak)
        self.model.decoder.register_forward_pre_hook(lambda *_: self.watch.start("base"))
        self.model.decoder.register_forward_hook(lambda *_: self.watch.stop("base"))

    def measure(self, sequence_length: int, loss: LossKind) -> TrainRow:
        """One row."""
        config = self.config
        settings = config.settings(sequence_length, loss, self.group.size())
        batches = [self._batch(sequence_length, number) for number in range(config.micro_batches)]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        steps: list[dict[str, float]] = []
        progress = range(config.warm_up + config.steps)
        for number in tqdm(progress, desc=f"{loss} {sequence_length}", disable=None if has_results() else True):
            dist.barrier()
            self.watch.take()
            with self.watch.span("step"):
                sums, _ = train_step(self.model, batches, self.optimizer, settings, _LEARNING_RATE, self.group, number)
            steps.append(self.watch.take())
        weights = settings.depth_weights()
        mean_loss = sum(weight * value for weight, value in zip(weights, sums.losses(), strict=True))
        if not sums.values.isfinite().all():
            raise MtpkitError(f"the loss {loss} is not finite: the times are of no worth until that is mended")
        return self._row(sequence_length, loss, steps[config.warm_up :], mean_loss)

    def _row(
        self, sequence_length: int, loss: LossKind, steps: Sequence[dict[str, float]], mean_loss: float
    ) -> TrainRow:
        seconds, base, optimizer = (
            statistics.median(step.get(name, 0.0) for step in steps) for name in ("step", "base", "optimizer")
        )
        sequences = self.config.micro_batch_size * self.config.micro_batches * self.group.size()
        tokens = sequences * sequence_length
        rate = tokens * self.flops / seconds / dist.get_world_size()
        return TrainRow(
            sequence_length=sequence_length,
            loss=loss,
            tokens=tokens,
            seconds=seconds,
            base_seconds=base,
            heads_seconds=seconds - base - optimizer,
            optimizer_seconds=optimizer,
            tokens_per_s=tokens / seconds,
            peak_memory=self._peak_memory(),
            flops_per_token=self.flops,
            flops_per_s=rate,
            matrix_share=rate / self.machine.matrix_rate,
            mfu=utilization(tokens / seconds, self.flops, dist.get_world_size(), self.peak),
            mean_loss=mean_loss,
        )

    def _peak_memory(self) -> int | None:
        if self.device.type != "cuda":
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated(self.device), device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak)

    def _batch(self, length: int, number: int) -> PackedBatch:
        """Random tokens of documents of one length, other ones on each rank, and of everything something to learn."""
        config, shape = self.config, (self.config.micro_batch_size, length)
        generator = torch.Generator().manual_seed(config.seed + number * self.group.size() + self.group.rank())
        place = torch.arange(length).expand(shape)
        document_len = min(config.document_len or length, length)
        rest = length % document_len
        document_lens = (document_len,) * (length // document_len) + ((rest,) if rest else ())
        vocab_size, width = self.model.mtpkit_config.vocab_size, self.model.mtpkit_config.hidden_size
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
        return dataclasses.replace(batch, hidden=lambda: states)
