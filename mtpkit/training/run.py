"""The directory of a run: its settings, its checkpoints, and how a stopped run is resumed.

    OUTPUT/config.yaml                       the resolved settings
    OUTPUT/metrics.jsonl  tensorboard/       the curves, see `metrics`
    OUTPUT/train.log                         everything that the run says, see `log`
    OUTPUT/iter_0000200/  ...                base, heads and optimizer; see `mtpkit.checkpoint.run`
    OUTPUT/best -> iter_0000100              the checkpoint with the best held-out acceptance length
    OUTPUT/best.json                         {"iteration": 100, "acceptance_length": 2.31}

OUTPUT itself is a model directory, as are OUTPUT/best and the directory of each iteration: each can
be exported, decoded or trained further. OUTPUT stands for its newest checkpoint.
"""

import contextlib
import dataclasses
import json
import operator
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import yaml
from pydantic import TypeAdapter

from mtpkit.checkpoint import (
    latest_iteration,
    load_checkpoint,
    open_directory,
    save_checkpoint,
)
from mtpkit.checkpoint.directory import OWN_CONFIG, TRACKER, iteration_name
from mtpkit.config.checked import checked, from_file, from_json
from mtpkit.data.loader import PackedLoader
from mtpkit.data.tokenizer import TOKENIZER_FILES
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import (
    JsonObject,
    check_writable,
    is_there,
    refuse_broken_links,
    storage_errors,
    write_file,
)
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import on_first_rank
from mtpkit.training.batches import ReadAhead
from mtpkit.training.config.describe import setting_names
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import TrainConfig
from mtpkit.training.heads import HEAD_PREFIX, base_from_files
from mtpkit.training.log import LOG
from mtpkit.training.metrics import METRICS, read_metrics
from mtpkit.training.optimizer import HeadOptimizer

MAY_CHANGE = {
    "model",
    "output",
    "backend",
    "cache",
    "heads.recompute",
    "steps",
    "log_interval",
    "eval_interval",
    "save_interval",
    "keep_checkpoints",
    "keep_best",
    "log.wandb",
    "resume",
    "optimizer.distributed",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.balance",
    "parallel.expert",
}
"""Settings that may change when a run is resumed."""

BEST = "best"
BEST_FILE = f"{BEST}.json"
LEFT_OVER = re.compile(r"\..+\.(writing|replaced|removing)(-\d+)?")
"""Names of files that a killed run was writing or removing."""

MODEL_FILES = ("config.json", OWN_CONFIG, *TOKENIZER_FILES, "*.safetensors", "*.bin")
"""Files of a model directory, some of which a run would replace."""


@checked("best checkpoint")
class Best:
    """The checkpoint with the best held-out acceptance length so far."""

    iteration: int
    acceptance_length: float


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved config as YAML, atomically."""
    values = TypeAdapter(TrainConfig).dump_python(config, mode="json")  # lists in place of tuples
    write_file(path, yaml.safe_dump(values, sort_keys=False))


def read_best(directory: Path) -> Best | None:
    """The best checkpoint of the run in a directory; None if the directory has no `BEST_FILE`.

    Raises:
        UserError: the file is not as a run writes it.
    """
    path = directory / BEST_FILE
    return from_json(Best, path, "remove the file") if is_there(path) else None


@checked("position in the data")
class _Place:
    """The position in the training data, see `PackedLoader.state_dict`."""

    consumed: int
    order: JsonObject


@checked("progress of a run")
class _Progress:
    """The contents of a checkpoint besides tensors."""

    iteration: int
    loader: _Place
    best: Best | None = None


class RunDirectory:
    """The directory in which a run saves and from which it resumes. Collective over all ranks.

    Raises:
        UserError: `output` holds something other than a run, a run with other settings, any run
            while `resume` is false, or metrics that cannot be read.
        StorageError: the directory cannot be written.
    """

    def __init__(self, config: TrainConfig):
        self.path = Path(config.output)
        self._config = config
        self._settings = self.path / "config.yaml"
        refuse_broken_links(self.path)
        if self.path.resolve() == Path(config.model).resolve():
            raise UserError(
                f"output {self.path} is the model's own directory; set output to another one"
            )
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output {self.path} is a file; set output to a directory")
        self.iteration = latest_iteration(self.path)
        """Step of the newest checkpoint; None before the first."""
        self._kept = False
        self._before: dict[str, bytes | None] | None = None
        """Contents of the directory before `started`; None: it did not exist."""
        self._parents: list[Path] = []
        """Parent directories that did not exist either."""
        self.best: Best | None = None
        """The best of the checkpoints that still exist."""
        self.changed: list[str] = []
        """A clause with old and new value for each setting that changed since the last part of a
        resumed run."""
        if self.iteration is not None:
            self._check_resumable()
        elif not self._settings.exists():
            models = sorted(
                file.name for pattern in MODEL_FILES for file in self.path.glob(pattern)
            )
            if models:
                raise UserError(
                    f"output {self.path} holds a model ({models[0]}) and no run; set output to"
                    " another one"
                )
        on_first_rank(self._check_writable)

    @property
    def newest(self) -> Path:
        """The directory of the newest checkpoint."""
        return self.path / iteration_name(self.iteration or 0)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Write the settings over those of an earlier part of the run, and remove unfinished files.

        A run that fails before `keep`, or `save` after a step, leaves the directory as it found it.

        Raises:
            StorageError: the directory cannot be written.
        """
        on_first_rank(self._take_note)  # before `_take_back` may be needed
        try:
            on_first_rank(self._begin)
            yield
        except BaseException:
            if not self._kept and dist.get_rank() == 0:
                self._take_back()
            raise

    def keep(self) -> None:
        """Keep the files of the run from here on, however it ends."""
        self._kept = True

    def improves(self, acceptance_length: float | None) -> bool:
        """Whether a checkpoint with this held-out acceptance length (None: unknown) would be the
        best so far."""
        if acceptance_length is None or not self._config.keep_best:
            return False
        return self.best is None or acceptance_length > self.best.acceptance_length

    def save(
        self,
        step: int,
        model: HybridModel,
        optimizer: HeadOptimizer,
        loader: PackedLoader | ReadAhead,
        acceptance_length: float | None = None,
    ) -> Path:
        """Write a checkpoint atomically, and remove the oldest ones beyond `keep_checkpoints`
        except for the best.

        The first checkpoint may be that of step 0, before anything is learnt, if it has a held-out
        acceptance length.

        Checkpoints share the base's files, see `mtpkit.checkpoint.run`. Each checkpoint names the
        best one so far, so that a killed run resumes with the best one known to its newest
        checkpoint.

        Raises:
            StorageError: writing failed; the previous checkpoint is intact.
        """
        best = self.best
        if acceptance_length is not None and self.improves(acceptance_length):
            best = Best(step, acceptance_length)
        common = {
            "iteration": step,
            "loader": loader.state_dict(),
            "best": best and dataclasses.asdict(best),
        }
        tensors = _sharded_state(model, optimizer, heads_alone=True)
        source = self._config.model
        path = save_checkpoint(
            self.path, step, tensors, common, model.mtpkit_config, source, base=source
        )
        self.iteration = step
        self.best = best
        if step:  # a run that ends in its first step leaves nothing, not even its start
            self.keep()
        if dist.get_rank() == 0:
            self._mark_best()
            self._remove_old()
        return path

    def restore(
        self, model: HybridModel, optimizer: HeadOptimizer, loader: PackedLoader | ReadAhead
    ) -> int:
        """Load the newest checkpoint into model, optimizer and loader, and return its step; 0 if
        there is none.

        Raises:
            UserError: the checkpoint is damaged, or does not fit the model or the data.
        """
        if self.iteration is None:
            return 0
        config = self._config
        loaded = base_from_files(config, open_directory(self.path))
        partial = loaded or bool(config.cache)
        asked = _sharded_state(model, optimizer, heads_alone=loaded)
        state = load_checkpoint(self.path, asked, partial=partial)
        progress = self._progress(state)
        model.load_state_dict(state.get("model", {}), strict=not partial)
        optimizer.load_state_dict(state.get("optimizer", {}), progress.iteration)
        loader.load_state_dict(state["loader"])
        if progress.best is not None and config.keep_best:
            self.best = (
                progress.best
                if (self.path / iteration_name(progress.best.iteration)).is_dir()
                else None
            )
        return progress.iteration

    def _progress(self, state: Mapping[str, object]) -> "_Progress":
        """The progress of the run from the state of the newest checkpoint; refuse a state that
        contradicts itself."""
        where = f"{self.path / iteration_name(self.iteration)}, the state of the run"
        names = [field.name for field in dataclasses.fields(_Progress)]
        progress = from_file(
            _Progress, {name: state[name] for name in names if name in state}, where
        )
        consumed = self._config.data.global_batch_size * progress.iteration
        if (progress.iteration, progress.loader.consumed) != (self.iteration, consumed):
            raise UserError(
                f"{where} is damaged: step {shown(progress.iteration)} after"
                f" {shown(progress.loader.consumed)} sequences; write the number of an earlier"
                f" checkpoint into {TRACKER}, or set another output"
            )
        return progress

    def _check_writable(self) -> None:
        check_writable(self.path)
        read_metrics(self.path / METRICS)  # a resumed run continues this file

    def _check_resumable(self) -> None:
        if not self._config.resume:
            raise UserError(
                f"output {self.path} holds a run already; set resume=true to go on, or another"
                " output"
            )
        if not self._settings.exists():
            raise UserError(
                f"output {self.path} holds checkpoints but no config.yaml; set another output"
            )
        parts = load_config(self._settings), self._config
        values = {
            key: tuple(map(operator.attrgetter(key), parts)) for key in setting_names(TrainConfig)
        }
        changed = {
            key: f"{key} was {was}, is {now}" for key, (was, now) in values.items() if was != now
        }
        if refused := [text for key, text in changed.items() if key not in MAY_CHANGE]:
            raise UserError(
                f"output {self.path} holds a run of other settings:"
                f" {listed(refused, separator='; ')}; set another output"
            )
        self.changed = list(changed.values())
        if self.iteration > self._config.steps:  # type: ignore[operator]
            raise UserError(
                f"output {self.path} is at step {self.iteration} already, beyond"
                f" steps={self._config.steps}"
            )

    def _take_note(self) -> None:
        """Remember the names in the directory, and the contents of the files that a run replaces at
        its start."""
        replaced = (self._settings.name, METRICS, LOG)
        with storage_errors(self.path):
            self._parents = [parent for parent in self.path.parents if not parent.exists()]
            if self.path.exists():
                self._before = {
                    path.name: path.read_bytes() if path.name in replaced else None
                    for path in self.path.iterdir()
                }

    def _take_back(self) -> None:
        """Restore the directory as `_take_note` found it, as far as possible."""
        before = self._before
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                if before is None or path.name not in before:
                    (
                        shutil.rmtree(path)
                        if path.is_dir() and not path.is_symlink()
                        else path.unlink()
                    )
                elif (content := before[path.name]) is not None:
                    path.write_bytes(content)
            if before is None:
                self.path.rmdir()
                for parent in self._parents:
                    parent.rmdir()

    def _begin(self) -> None:
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for path in self.path.iterdir():
                if LEFT_OVER.fullmatch(path.name):
                    (
                        shutil.rmtree(path)
                        if path.is_dir() and not path.is_symlink()
                        else path.unlink()
                    )
            save_config(self._config, self._settings)
            self._mark_best()

    def _mark_best(self) -> None:
        link = self.path / BEST
        description = self.path / BEST_FILE
        if self.best is None:
            link.unlink(missing_ok=True)
            description.unlink(missing_ok=True)
            return
        staging = self.path / f".{BEST}.writing"
        with storage_errors(link):
            # A link cannot be overwritten: a new one takes the old one's name at once.
            staging.unlink(missing_ok=True)
            staging.symlink_to(iteration_name(self.best.iteration), target_is_directory=True)
            staging.replace(link)
        write_file(description, json.dumps(dataclasses.asdict(self.best)) + "\n")

    def _remove_old(self) -> None:
        """Remove old checkpoints, each renamed first, so that a directory named after an iteration
        is always complete.

        A checkpoint of a later step than the newest was left by a run that was killed before it
        updated the tracker. It does not count: the run writes it again.
        """
        finished = sorted(
            path for path in self.path.iterdir() if re.fullmatch(r"iter_\d{7,}", path.name)
        )
        finished = [path for path in finished if int(path.name[5:]) <= (self.iteration or 0)]
        for path in finished[: -self._config.keep_checkpoints]:
            if self.best is None or path.name != iteration_name(self.best.iteration):
                shutil.rmtree(
                    path.rename(path.with_name(f".{path.name}.removing")), ignore_errors=True
                )


def _sharded_state(
    model: HybridModel, optimizer: HeadOptimizer, heads_alone: bool = False
) -> dict[str, object]:
    state = model.sharded_state_dict()
    if heads_alone:
        state = {name: part for name, part in state.items() if name.startswith(HEAD_PREFIX)}
    return {"model": state, "optimizer": optimizer.sharded_state_dict(state)}
