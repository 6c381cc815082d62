"""What a run will do: its resolved settings, its directory and its data, before a model is
built."""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import logging

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mtpkit.checkpoint import load_config, open_directory
from mtpkit.config import ModelConfig
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.loader import PackedLoader
from mtpkit.errors import UserError, listed
from mtpkit.platform import default_device
from mtpkit.training.batches import open_dataset, require_drafts, shared_data
from mtpkit.training.cache_write import attach_cache
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.heads import resolve
from mtpkit.training.metrics import check_wandb
from mtpkit.training.parallel import check_layout
from mtpkit.training.run import RunDirectory
from mtpkit.training.stored import StoredFormats, stored_formats

_logger = logging.getLogger(__name__)


class Plan:
    """The parts of a run that need no model. Collective over all ranks; writes nothing.

    The base and the data are read as the settings say. A subclass may take them from elsewhere, as
    `mtpkit.bench.train` does.

    Raises:
        UserError: the model, the data or an earlier run in `output` does not fit the settings.
    """

    drawn = False
    """Whether the weights are drawn instead of read, see `build_with_heads`."""

    def __init__(self, asked: TrainConfig):
        self.asked = asked
        """The settings before `auto` was replaced."""
        self.device: torch.device = default_device()
        check_wandb(asked.log.wandb)
        self.config, self.model = resolve(asked, self.read_base(), self.drawn)
        """Settings without `auto`, and the config of the model with its heads."""
        check_layout(asked.parallel, self.model)
        self.directory = RunDirectory(self.config)
        self.stored = self.read_formats()
        """The formats of the base's and its heads' matrices in the files that the run reads."""
        self._check_base_fp8()
        self.train_data = self.open_data(asked.data.train)
        self.loader = self.loader_of(self.train_data)  # refuses bad sizes before a cache is written
        self.eval_data = self.open_data(asked.data.eval) if asked.data.eval else None
        for data in (self.train_data, self.eval_data):
            if data is not None:
                require_drafts(data)
        if dist.get_rank() == 0:
            self._warn()

    def read_base(self) -> ModelConfig:
        """The config of the base."""
        return load_config(self.asked.model)

    def read_formats(self) -> StoredFormats:
        """The formats in which the base, or that of a run that goes on, is stored."""
        resuming = self.directory.iteration is not None
        return stored_formats(open_directory(self.directory.path if resuming else self.asked.model))

    def _check_base_fp8(self) -> None:
        others = [name for name in self.stored.base if name != "fp8"]
        if self.config.base_fp8 and others:
            raise UserError(
                f"base_fp8=true, but {self.config.model} is stored in {listed(others)} and stays"
                " so: set base_fp8=false"
            )

    def open_data(self, paths: tuple[str, ...]) -> PackedDataset:
        """The sequences of `paths`."""
        return open_dataset(self.asked, paths)

    def cached_data(self) -> tuple[PackedDataset, PackedDataset | None]:
        """Training and held-out data with the base's hidden states, see `attach_cache`."""
        return attach_cache(self.config, self.model, self.train_data, self.eval_data)

    def loader_of(self, dataset: PackedDataset) -> PackedLoader:
        """This rank's loader of training batches."""
        data = self.config.data
        return PackedLoader(
            dataset,
            data.global_batch_size,
            data.micro_batch_size,
            seed=self.config.seed,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
        )

    def _warn(self) -> None:
        config = self.config
        if shared := shared_data(config.data):
            _logger.warning("data.eval is not held out: %s is in data.train too", listed(shared))
        if config.optimizer.warmup_steps > config.steps:
            _logger.warning(
                "optimizer.warmup_steps %d exceeds steps %d: the warm-up takes %d steps",
                config.optimizer.warmup_steps,
                config.steps,
                config.steps,
            )
