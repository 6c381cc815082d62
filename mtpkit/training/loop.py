"""The loop of a training run."""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mtpkit.data.dataset import PackedBatch, PackedDataset
from mtpkit.data.loader import PackedLoader
from mtpkit.errors import MtpkitError, UserError, listed
from mtpkit.model.flops import step_flops
from mtpkit.platform import default_device, ensure_distributed, matmul_precision
from mtpkit.training.batches import ReadAhead, open_dataset, shared_data
from mtpkit.training.cache_write import attach_cache
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.evaluation import evaluate_sources, summary
from mtpkit.training.fit import fit_input_projection
from mtpkit.training.heads import build_with_heads, check_unchanged, drop_base_layers, fingerprint, freeze_base, resolve
from mtpkit.training.metrics import METRICS, MetricsLog, Throughput, check_wandb, find_peak, read_metrics, utilization
from mtpkit.training.optimizer import HeadOptimizer, learning_rate
from mtpkit.training.parallel import check_layout, has_results
from mtpkit.training.report import REPORT, write_report
from mtpkit.training.run import RunDirectory
from mtpkit.training.signals import StopSignal
from mtpkit.training.step import train_step

_logger = logging.getLogger(__name__)


def train(config: TrainConfig) -> Path:
    """Train until the last step, SIGTERM or SIGINT, and return the run's directory. Collective over all ranks.

    Raises:
        KeyboardInterrupt: SIGINT ended the run, and a checkpoint is saved.
        UserError: the model, the data or an earlier run in `output` does not fit the settings.
        MtpkitError: a loss, the gradient or a held-out figure is not finite, and the last checkpoint is the result; or
            a frozen tensor changed.
    """
    ensure_distributed(config.parallel.tensor, config.parallel.pipeline, config.parallel.expert)
    with matmul_precision(config.matmul_precision):
        trainer = Trainer(config)
        with StopSignal() as stop, trainer.directory.started(), trainer.logging():
            output = trainer.run(stop)
    if stop.interrupted and trainer.step < config.steps:
        raise KeyboardInterrupt
    return output


class Trainer:
    """The parts of a run, resumed if there is a checkpoint. `step` counts the finished optimizer steps.

    Nothing is written to the run's directory before `directory.started`.
    """

    def __init__(self, config: TrainConfig):
        torch.manual_seed(config.seed)
        self.device = default_device()
        check_wandb(config.log.wandb)
        self.config, model_config = resolve(config)
        check_layout(config.parallel, model_config)
        self.directory = RunDirectory(self.config)
        train_data = open_dataset(config, config.data.train)
        self.loader: PackedLoader | ReadAhead = self._loader(train_data)  # refuses bad sizes before a cache is written
        self.eval_data = open_dataset(config, config.data.eval) if config.data.eval else None
        if has_results() and (shared := shared_data(config.data)):
            _logger.warning("data.eval is not held out: %s is in data.train too", listed(shared))
        resuming = self.directory.iteration is not None
        from_base = self.config.heads.init == "base" and not resuming
        if config.cache:
            cached = attach_cache(self.config, model_config, train_data, self.eval_data)
            self.loader, self.eval_data = ReadAhead(self._loader(cached[0])), cached[1]
        self.model = build_with_heads(
            self.config, model_config, self.device, not resuming, base_layers=from_base or not config.cache
        )
        self.explained: float | None = None
        """Result of `fit_input_projection`; None: the inputs of the heads were not fitted."""
        if from_base and config.heads.fit_tokens:
            self.explained = fit_input_projection(self.model, self._fit_batches())
        if config.cache:
            drop_base_layers(self.model)
        self.optimizer = HeadOptimizer(freeze_base(self.model).values(), config.optimizer)
        self.step = self.directory.restore(self.model, self.optimizer, self.loader)
        self.flops = step_flops(self.model.mtpkit_config, config.heads.num_depths, base_layers=not config.cache)
        self.peak, self.no_peak = find_peak(self.device)
        self.base = fingerprint(self.model)

    def logging(self) -> AbstractContextManager[MetricsLog]:
        """Open the logs of the run; the context closes them."""
        config = self.config
        self.log = MetricsLog(
            self.directory.path,
            self.step,
            config.steps,
            enabled=has_results(),
            wandb=config.log.wandb,
            settings=dataclasses.asdict(config),
        )
        return closing(self.log)

    def run(self, stop: StopSignal) -> Path:
        """Step, log, evaluate and save until the end or a signal."""
        config, throughput = self.config, Throughput()
        if self.explained is not None:
            self.log.message(
                f"the fitted input projection explains {self.explained:.0%} of the inputs of the copied layers"
            )
        if self.no_peak:
            self.log.message(self.no_peak)
        if 0 < self.step < config.steps:
            self.log.message(f"going on after step {self.step} of {config.steps}, saved in {self.directory.newest}")
        if self.directory.changed:
            self.log.message(f"settings changed since the last part of the run: {'; '.join(self.directory.changed)}")
        if self.step == 0:
            self._evaluate()
        elif self.step >= config.steps:
            self.log.message(f"all {self.step} steps are done already; set steps higher to go on")
        while self.step < config.steps and not stop.on_any_rank(self.device):
            lr = learning_rate(config.optimizer, self.step, config.steps)
            with throughput.step(config.data.global_batch_size * config.data.sequence_length):
                batches = [batch.to(self.device) for batch in next(self.loader)]
                sums, norm = train_step(self.model, batches, self.optimizer, config, lr, self.step)
                sums = sums.on_host()  # waits for the losses, not for a deferred update
                sums.check_finite(f"step {self.step + 1}")
                values = summary(sums, config.loss.weights(config.heads.num_depths))
            self.step += 1
            self.directory.keep()
            self._log_step({**values, "lr": lr, "grad_norm": norm}, throughput)
            length = self._evaluate() if self._due(config.eval_interval) else None
            if self._due(config.save_interval) or self.directory.improves(length):
                self._save(length)
            if length is not None:
                self._report()
        if self.directory.iteration != self.step:
            self._save()
        if self.step < config.steps:
            self.log.message(f"stopped at step {self.step} of {config.steps}; run the same command again to go on")
        check_unchanged(self.model, self.base)
        if self.step < config.steps or self.eval_data is None:
            self._report()
        return self.directory.path

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step == self.config.steps

    def _log_step(self, values: dict[str, object], throughput: Throughput) -> None:
        rate = values["tokens_per_s"] = throughput.rate()
        used = utilization(rate, self.flops, dist.get_world_size(), self.peak)
        shown = f"loss {values['loss']:.4f}, AL {values['acceptance_length']:.2f}, {rate:,.0f} tokens/s"
        if used is not None:
            values["mfu"] = used
            shown += f", MFU {used:.1%}"
        due = self._due(self.config.log_interval)
        self.log.progress(self.step, shown, due)
        if due:
            self.log.write("train", self.step, values)
            throughput.reset()

    def _evaluate(self) -> float | None:
        """Log losses and acceptance on the held-out data; returns the acceptance length, None without such data."""
        if self.eval_data is None:
            return None
        self.optimizer.finish()
        heads, data = self.config.heads, self.config.data
        settings = heads.num_depths, heads.attention, self.config.loss, data.micro_batch_size, data.eval_sequences
        try:
            evaluation = evaluate_sources(self.model, self.eval_data, *settings)
        except MtpkitError as error:
            raise MtpkitError(f"step {self.step}: {error}") from error
        self.log.write("eval", self.step, evaluation.to_dict())
        self.log.message(f"step {self.step}: {evaluation}")
        return evaluation.overall.acceptance_length()

    def _report(self) -> None:
        """Write the report; metrics that cannot be drawn give a message and do not end the run."""
        if not self.log.enabled:
            return
        try:
            if read_metrics(self.directory.path / METRICS):  # none before the first log_interval
                write_report(self.directory.path)
        except UserError as error:
            self.log.message(f"there is no {REPORT}: {error}")

    def _save(self, acceptance_length: float | None = None) -> None:
        self.log.sync()
        self.directory.save(self.step, self.model, self.optimizer, self.loader, acceptance_length)

    def _fit_batches(self) -> Iterator[PackedBatch]:
        """Yield the first training batches for `fit_input_projection`, the same on all ranks, at most one epoch."""
        data = self.config.data
        loader = PackedLoader(self.loader.dataset, data.micro_batch_size, data.micro_batch_size, seed=self.config.seed)
        tokens = min(self.config.heads.fit_tokens, len(loader.dataset) * data.sequence_length)
        for _ in range(-(-tokens // (data.micro_batch_size * data.sequence_length))):
            yield next(loader)[0].to(self.device)

    def _loader(self, dataset: PackedDataset) -> PackedLoader:
        data = self.config.data
        return PackedLoader(
            dataset,
            data.global_batch_size,
            data.micro_batch_size,
            seed=self.config.seed,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
        )
