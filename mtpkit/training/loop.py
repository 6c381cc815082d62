"""The loop of a training run."""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from mtpkit.data.dataset import PackedBatch
from mtpkit.data.loader import PackedLoader
from mtpkit.errors import MtpkitError
from mtpkit.model.flops import step_flops
from mtpkit.platform import ensure_distributed, matmul_precision
from mtpkit.training.batches import ReadAhead
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.evaluation import evaluate_sources, summary
from mtpkit.training.fit import fit_input_projection
from mtpkit.training.header import Forecast, header
from mtpkit.training.heads import (
    build_with_heads,
    check_unchanged,
    drop_base_layers,
    fingerprint,
    freeze_base,
)
from mtpkit.training.log import Warnings
from mtpkit.training.metrics import MetricsLog, Throughput, find_peak, utilization
from mtpkit.training.optimizer import HeadOptimizer, learning_rate
from mtpkit.training.parallel import has_results
from mtpkit.training.plan import Plan
from mtpkit.training.signals import StopSignal
from mtpkit.training.step import train_step


def train(config: TrainConfig) -> Path:
    """Train until the last step, SIGTERM or SIGINT, and return the run's directory. Collective over
    all ranks.

    Raises:
        KeyboardInterrupt: SIGINT ended the run, and a checkpoint is saved.
        UserError: the model, the data or an earlier run in `output` does not fit the settings.
        MtpkitError: a loss, the gradient or a held-out figure is not finite, and the last
            checkpoint is the result; or a frozen tensor changed.
    """
    ensure_distributed(config.parallel.tensor, config.parallel.pipeline, config.parallel.expert)
    with matmul_precision(config.matmul_precision), Warnings() as warnings:
        trainer = Trainer(Plan(config))
        with StopSignal() as stop, trainer.directory.started(), trainer.logging():
            if dist.get_rank() == 0:
                warnings.keep_in(trainer.directory.path)
            output = trainer.run(stop)
    if stop.interrupted and trainer.step < config.steps:
        raise KeyboardInterrupt
    return output


def describe_run(config: TrainConfig) -> list[str]:
    """The header of a run that is not begun. Collective over all ranks; the errors are those of
    `train`."""
    ensure_distributed(config.parallel.tensor, config.parallel.pipeline, config.parallel.expert)
    return header(Plan(config))


class Trainer:
    """The parts of a run, resumed if there is a checkpoint. `step` counts the finished optimizer
    steps.

    Nothing is written to the run's directory before `directory.started`.
    """

    def __init__(self, plan: Plan):
        config = plan.config
        torch.manual_seed(config.seed)
        self.config = config
        self.device = plan.device
        self.directory = plan.directory
        self.header = header(plan)
        self.loader: PackedLoader | ReadAhead = plan.loader
        self.eval_data = plan.eval_data
        self.num_sequences = len(plan.train_data)
        resuming = self.directory.iteration is not None
        from_base = config.heads.init == "base" and not resuming
        if config.cache:
            cached = plan.cached_data()
            self.loader = ReadAhead(plan.loader_of(cached[0]))
            self.eval_data = cached[1]
        self.model = build_with_heads(
            config,
            plan.model,
            self.device,
            self.directory.path if resuming else None,
            base_layers=from_base or not config.cache,
            drawn=plan.drawn,
        )
        self.explained: float | None = None
        """Result of `fit_input_projection`; None: the inputs of the heads were not fitted."""
        if from_base and config.heads.fit_tokens:
            self.explained = fit_input_projection(self.model, self._fit_batches())
        # Only after the heads have copied what they start from.
        if config.cache:
            drop_base_layers(self.model)
        self.optimizer = HeadOptimizer(freeze_base(self.model).values(), config.optimizer)
        self.step = self.directory.restore(self.model, self.optimizer, self.loader)
        self.flops = step_flops(
            self.model.mtpkit_config, config.heads.num_depths, base_layers=not config.cache
        )
        self.peak, self.no_peak = find_peak(self.device)
        # After `restore`, which loads the base too.
        self.base = fingerprint(self.model)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Open the logs of the run; the context keeps the error that ends it, and closes them."""
        config = self.config
        self.log = MetricsLog(
            self.directory.path,
            self.step,
            config.steps,
            enabled=has_results(),
            wandb=config.log.wandb,
            settings=dataclasses.asdict(config),
        )
        with closing(self.log):
            try:
                yield
            except BaseException as error:
                self.log.fail(error)
                raise

    def run(self, stop: StopSignal) -> Path:
        """Step, log, evaluate and save until the end or a signal."""
        config = self.config
        throughput = Throughput()
        forecast = Forecast(config.steps - self.step)
        for line in self.header:
            self.log.message(line)
        if self.explained is not None:
            self.log.message(
                "the fitted input projection gives the copied layers the inputs that they have in"
                f" the base, except for {1 - self.explained:.0%} of their squared norm"
            )
        if self.no_peak:
            self.log.message(self.no_peak)
        if 0 < self.step < config.steps:
            self.log.message(
                f"going on after step {self.step} of {config.steps}, saved in"
                f" {self.directory.newest}"
            )
        if self.directory.changed:
            self.log.message(
                "settings changed since the last part of the run:"
                f" {'; '.join(self.directory.changed)}"
            )
        if self.step == 0:
            length = self._evaluate()
            if self.directory.improves(length):
                self._save(length)
        elif self.step >= config.steps:
            self.log.message(f"all {self.step} steps are done already; set steps higher to go on")
        while self.step < config.steps and not stop.on_any_rank(self.device):
            with throughput.step(config.data.global_batch_size * config.data.sequence_length):
                values = self.advance()
            self.directory.keep()
            self._log_step(values, throughput)
            if (expected := forecast.add(throughput.last)) is not None:
                self.log.message(f"{expected}{self._peak_memory()}")
            length = self._evaluate() if self._due(config.eval_interval) else None
            if self._due(config.save_interval) or self.directory.improves(length):
                self._save(length)
        # Unless the last step was saved in the loop, as when it is due or the best.
        if self.directory.iteration != self.step:
            self._save()
        if self.step < config.steps:
            self.log.message(
                f"stopped at step {self.step} of {config.steps}; run the same command again to"
                " go on"
            )
        # After the last save: what was learnt is kept even if the check fails.
        check_unchanged(self.model, self.base)
        return self.directory.path

    def advance(self) -> dict[str, object]:
        """Take the next optimizer step; returns what is logged about it, see `summary`.

        Raises:
            MtpkitError: a loss or the gradient is not finite.
        """
        config = self.config
        lr = learning_rate(config.optimizer, self.step, config.steps)
        batches = [batch.to(self.device) for batch in next(self.loader)]
        sums, norm = train_step(self.model, batches, self.optimizer, config, lr, self.step)
        sums = sums.on_host()
        sums.check_finite(f"step {self.step + 1}")
        values = summary(sums, config.loss.weights(config.heads.num_depths))
        self.step += 1
        return {**values, "lr": lr, "grad_norm": norm}

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step == self.config.steps

    def _log_step(self, values: dict[str, object], throughput: Throughput) -> None:
        rate = values["tokens_per_s"] = throughput.rate()
        used = utilization(rate, self.flops, dist.get_world_size(), self.peak)
        shown = (
            f"loss {values['loss']:.4f}, AL {values['acceptance_length']:.2f}, {rate:,.0f} tokens/s"
        )
        if used is not None:
            values["mfu"] = used
            shown += f", MFU {used:.1%}"
        due = self._due(self.config.log_interval)
        self.log.progress(self.step, shown, due)
        if due:
            self.log.write("train", self.step, {**self._place(), **values})
            throughput.reset()

    def _evaluate(self) -> float | None:
        """Log losses and acceptance on the held-out data; returns the acceptance length, None
        without such data."""
        if self.eval_data is None:
            return None
        heads = self.config.heads
        data = self.config.data
        settings = (
            heads.num_depths,
            heads.attention,
            self.config.loss,
            data.micro_batch_size,
            data.eval_sequences,
        )
        try:
            evaluation = evaluate_sources(self.model, self.eval_data, *settings)
        except MtpkitError as error:
            raise MtpkitError(f"step {self.step}: {error}") from error
        self.log.write("eval", self.step, {**self._place(), **evaluation.to_dict()})
        self.log.message(f"step {self.step}: {evaluation}")
        return evaluation.overall.acceptance_length()

    def _place(self) -> dict[str, object]:
        """The time, and how much of the training data has been read."""
        sequences = self.step * self.config.data.global_batch_size
        tokens = sequences * self.config.data.sequence_length
        return {
            "time": round(time.time(), 3),
            "epoch": sequences / self.num_sequences,
            "tokens": tokens,
        }

    def _peak_memory(self) -> str:
        """Peak memory of this rank so far, as the end of a sentence; empty on a CPU."""
        if self.device.type != "cuda":
            return ""
        return f"; peak memory {torch.cuda.max_memory_allocated(self.device) / 2**30:.2f} GiB"

    def _save(self, acceptance_length: float | None = None) -> None:
        # First the lines, then the checkpoint: a resumed run drops lines beyond its checkpoint, but
        # could not make up for lines that are missing before it.
        self.log.sync()
        self.directory.save(self.step, self.model, self.optimizer, self.loader, acceptance_length)

    def _fit_batches(self) -> Iterator[PackedBatch]:
        """Yield the first training batches for `fit_input_projection`, the same on all ranks, at
        most one epoch."""
        data = self.config.data
        loader = PackedLoader(
            self.loader.dataset, data.micro_batch_size, data.micro_batch_size, seed=self.config.seed
        )
        tokens = min(self.config.heads.fit_tokens, len(loader.dataset) * data.sequence_length)
        for _ in range(-(-tokens // (data.micro_batch_size * data.sequence_length))):
            yield next(loader)[0].to(self.device)
