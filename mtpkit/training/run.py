"""The directory of a run: its settings, its checkpoints, and how it goes on after it was stopped.

    OUTPUT/config.yaml                       the resolved settings
    OUTPUT/metrics.jsonl  tensorboard/       see `metrics`
    OUTPUT/iter_0000200/  ...                base, heads and optimizer; see `mtpkit.checkpoint.run`

OUTPUT itself is a model directory: its newest checkpoint can be exported, decoded or trained further.
"""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from mtpkit.data import PackedLoader
from mtpkit.errors import UserError
from mtpkit.training.config import TrainConfig, load_config, save_config
from mtpkit.training.optimizer import HeadOptimizer

MAY_CHANGE = {
    "model",
    "output",
    "steps",
    "log_interval",
    "eval_interval",
    "save_interval",
    "keep_checkpoints",
    "resume",
}
"""Settings that a resumed run may have otherwise than before."""


class RunDirectory:
    """Where a run saves and resumes. All ranks use it together.

    Raises:
        UserError: `output` holds something else, a run of other settings, or one that was not to be resumed.
    """

    def __init__(self, config: TrainConfig):
        self.path = Path(config.output)
        self._config = config
        if self.path.resolve() == Path(config.model).resolve():
            raise UserError(f"output {self.path} is the model's own directory; set output to another one")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output {self.path} is a file; set output to a directory")
        self.iteration = latest_iteration(self.path)
        """The newest checkpoint; None before there is one."""
        if self.iteration is not None:
            self._check_resumable()

    def start(self) -> None:
        """Write the settings, replacing those of an earlier part of the run."""
        if dist.get_rank() == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            save_config(self._config, self._settings)
        dist.barrier()

    def save(self, step: int, model: HybridModel, optimizer: HeadOptimizer, loader: PackedLoader) -> Path:
        """Write a checkpoint, whole or not at all, and remove the oldest beyond `keep_checkpoints`.

        Raises:
            StorageError: writing failed; the previous checkpoint still stands.
        """
        common = {"iteration": step, "loader": loader.state_dict(), "rng": _rng_state()}
        tensors = _sharded_state(model, optimizer)
        path = save_checkpoint(self.path, step, tensors, common, model.mtpkit_config, self._config.model)
        self.iteration = step
        if dist.get_rank() == 0:
            self._remove_old()
        return path

    def restore(self, model: HybridModel, optimizer: HeadOptimizer, loader: PackedLoader) -> int:
        """Load the newest checkpoint into its parts; returns its step, 0 when there is none.

        Raises:
            UserError: it is damaged, or does not fit the model or the data.
        """
        if self.iteration is None:
            return 0
        state = load_checkpoint(self.path, _sharded_state(model, optimizer))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"], state["iteration"])
        loader.load_state_dict(state["loader"])
        _set_rng_state(state["rng"])
        return state["iteration"]

    @property
    def _settings(self) -> Path:
        return self.path / "config.yaml"

    def _check_resumable(self) -> None:
        if not self._config.resume:
            raise UserError(f"output {self.path} holds a run already; set resume=true to go on, or another output")
        if not self._settings.exists():
            raise UserError(f"output {self.path} holds checkpoints but no config.yaml; set another output")
        before, now = _flat(load_config(self._settings)), _flat(self._config)
        changed = [f"{key} was {before[key]}, is {now[key]}" for key in now if before.get(key) != now[key]]
        changed = [text for text in changed if text.split(" ", 1)[0] not in MAY_CHANGE]
        if changed:
            raise UserError(
                f"output {self.path} holds a run of other settings: {'; '.join(changed)}; set another output"
            )
        if self.iteration > self._config.steps:  # type: ignore[operator]
            raise UserError(
                f"output {self.path} is at step {self.iteration} already, beyond steps={self._config.steps}"
            )

    def _remove_old(self) -> None:
        finished = sorted(path for path in self.path.iterdir() if re.fullmatch(r"iter_\d{7}", path.name))
        for path in finished[: -self._config.keep_checkpoints]:
            shutil.rmtree(path, ignore_errors=True)


def _sharded_state(model: HybridModel, optimizer: HeadOptimizer) -> dict[str, Any]:
    state = model.sharded_state_dict()
    return {"model": state, "optimizer": optimizer.sharded_state_dict(state)}


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _flat(config: TrainConfig) -> dict[str, Any]:
    """`section.key` -> value."""
    flat = {}
    for key, value in dataclasses.asdict(config).items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    return flat
