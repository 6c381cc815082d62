"""A training run from a config to its last checkpoint."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from mtpkit.data import Columns, PackedBatch, PackedDataset, PackedLoader, build_dataset, load_tokenizer
from mtpkit.platform import default_device, ensure_distributed
from mtpkit.training.config import TrainConfig
from mtpkit.training.depths import DepthSums
from mtpkit.training.fit import fit_input_projection
from mtpkit.training.freeze import check_unchanged, fingerprint, freeze_base
from mtpkit.training.heads import build_with_heads, resolve
from mtpkit.training.metrics import MetricsLog, Throughput
from mtpkit.training.optimizer import HeadOptimizer, learning_rate
from mtpkit.training.run import RunDirectory
from mtpkit.training.signals import StopSignal
from mtpkit.training.step import evaluate, train_step


def train(config: TrainConfig) -> Path:
    """Train until the last step, or until SIGTERM, and return the run's directory. Collective over all ranks.

    Raises:
        UserError: the model, the data or an earlier run in `output` does not fit the settings.
        MtpkitError: the gradient is not finite, or a frozen tensor changed.
    """
    ensure_distributed()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(config.matmul_precision)
    trainer = Trainer(config)
    with StopSignal() as stop:
        try:
            return trainer.run(stop)
        finally:
            trainer.log.close()
            torch.set_float32_matmul_precision(precision)


class Trainer:
    """The parts of a run, put together and resumed. `step` counts the finished optimizer steps."""

    def __init__(self, config: TrainConfig):
        torch.manual_seed(config.seed)
        self.device = default_device()
        self.group = parallel_state.get_data_parallel_group()
        self.rank, self.num_ranks = self.group.rank(), self.group.size()
        self.config, model_config = resolve(config)
        self.directory = RunDirectory(self.config)
        self.loader = self._loader()
        self.eval_data = self._dataset(config.data.eval) if config.data.eval else None
        resuming = self.directory.iteration is not None
        self.model = build_with_heads(self.config, model_config, self.device, load_weights=not resuming)
        explained = None
        if self.config.heads.init == "base" and config.heads.fit_tokens and not resuming:
            explained = fit_input_projection(self.model, self._fit_batches())
        self.optimizer = HeadOptimizer(freeze_base(self.model).values(), config.optimizer)
        self.step = self.directory.restore(self.model, self.optimizer, self.loader)
        self.directory.start()
        self.log = MetricsLog(self.directory.path, self.step, config.steps, enabled=self.rank == 0)
        if explained is not None:
            self.log.message(f"the heads' fitted inputs explain {explained:.0%} of what their layers expect")
        self.base = fingerprint(self.model)

    def run(self, stop: StopSignal) -> Path:
        """Step, log, evaluate and save until the end or a signal."""
        config, throughput = self.config, Throughput()
        if self.step == 0:
            self._evaluate()
        while self.step < config.steps and not stop.on_any_rank(self.device):
            lr = learning_rate(config.optimizer, self.step, config.steps)
            with throughput.step(config.data.global_batch_size * config.data.sequence_length):
                batches = [batch.to(self.device) for batch in next(self.loader)]
                sums, norm = train_step(self.model, batches, self.optimizer, config, lr, self.group)
            self.step += 1
            self._log_step(sums, norm, lr, throughput)
            if self._due(config.eval_interval):
                self._evaluate()
            if self._due(config.save_interval):
                self._save()
        if self.directory.iteration != self.step:
            self._save()
        if self.step < config.steps:
            self.log.message(f"stopped at step {self.step} of {config.steps}; run the same command again to go on")
        check_unchanged(self.model, self.base)
        return self.directory.path

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step == self.config.steps

    def _log_step(self, sums: DepthSums, norm: float, lr: float, throughput: Throughput) -> None:
        values = {**self._summary(sums), "lr": lr, "grad_norm": norm, "tokens_per_s": throughput.rate()}
        loss, length, rate = (values[key] for key in ("loss", "acceptance_length", "tokens_per_s"))
        self.log.progress(f"loss {loss:.4f}, AL {length:.2f}, {rate:,.0f} tokens/s")
        if self._due(self.config.log_interval):
            self.log.write("train", self.step, values)
            throughput.reset()

    def _evaluate(self) -> None:
        """Write losses and acceptance on the held-out data, if there is any."""
        if self.eval_data is None:
            return
        size = self.config.data.micro_batch_size
        batches = self.eval_data.batches(size)
        share = itertools.islice(batches, self.rank, -(-self.config.data.eval_sequences // size), self.num_ranks)
        sums = evaluate(self.model, (batch.to(self.device) for batch in share), self.config, self.group)
        self.log.write("eval", self.step, self._summary(sums))
        rates = ", ".join(f"{rate:.1%}" for rate in sums.conditional_acceptance())
        self.log.message(
            f"step {self.step}: held-out AL {sums.acceptance_length():.3f}, conditional acceptance {rates}"
        )

    def _save(self) -> None:
        self.directory.save(self.step, self.model, self.optimizer, self.loader)

    def _summary(self, sums: DepthSums) -> dict[str, Any]:
        weights = self.config.depth_weights()
        return {
            "loss": sum(weight * loss for weight, loss in zip(weights, sums.losses(), strict=True)),
            "depth_losses": sums.losses(),
            "conditional_acceptance": sums.conditional_acceptance(),
            "acceptance_length": sums.acceptance_length(),
        }

    def _dataset(self, paths: tuple[str, ...]) -> PackedDataset:
        data = self.config.data
        columns = Columns(data.text_column, data.prompt_column, data.response_column, data.messages_column)
        return build_dataset(paths, load_tokenizer(self.config.model), data.sequence_length, columns)

    def _fit_batches(self) -> Iterator[PackedBatch]:
        """The first training batches, the same on all ranks, of at most one epoch."""
        data = self.config.data
        loader = PackedLoader(self.loader.dataset, data.micro_batch_size, data.micro_batch_size, seed=self.config.seed)
        tokens = min(self.config.heads.fit_tokens, len(loader.dataset) * data.sequence_length)
        for _ in range(-(-tokens // (data.micro_batch_size * data.sequence_length))):
            yield next(loader)[0].to(self.device)

    def _loader(self) -> PackedLoader:
        data = self.config.data
        return PackedLoader(
            self._dataset(data.train),
            data.global_batch_size,
            data.micro_batch_size,
            seed=self.config.seed,
            dp_rank=self.rank,
            dp_size=self.num_ranks,
        )
