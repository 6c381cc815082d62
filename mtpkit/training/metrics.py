"""Where the numbers of a run go: a JSON line a step, TensorBoard, Weights & Biases, and a progress bar."""

import contextlib
import importlib.util
import json
import os
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mtpkit.errors import UserError
from mtpkit.files import is_there, parse_json, read_text, write_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
"""File of a run with a line for each training step that is logged, and for each evaluation."""


def check_wandb(project: str) -> None:
    """Refuse a W&B project without the package that reports to it.

    Raises:
        UserError: the package is missing.
    """
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError(f"log.wandb={project} needs the package wandb: pip install wandb, or leave log.wandb empty")


class MetricsLog:
    """Writes to `output/metrics.jsonl`, `output/tensorboard` and W&B; on any rank but the first it does nothing."""

    def __init__(
        self,
        output: Path,
        first_step: int,
        steps: int,
        enabled: bool,
        wandb: str = "",
        settings: Mapping[str, object] | None = None,
    ):
        """Open the logs of a run that goes on after `first_step`; lines of later steps are forgotten.

        Args:
            wandb: project; empty: none.
            settings: shown by W&B beside the curves.

        Raises:
            UserError: W&B does not take the run, or the metrics so far cannot be read.
        """
        self.enabled = enabled
        self._file = None
        self._board = None
        self._wandb = None
        # disable=None: silent where stderr is not a terminal.
        disable = None if enabled else True
        if enabled:
            self._wandb = _start_wandb(wandb, output, settings) if wandb else None  # first: it may refuse
            path = output / METRICS
            _drop_lines_after(path, first_step)
            self._file = path.open("a", encoding="utf-8")
            self._board = _tensorboard(output / "tensorboard", first_step)
        self._steps = steps
        self._bar = tqdm(total=steps, initial=first_step, desc="training", unit=" steps", disable=disable)

    def progress(self, step: int, shown: str, due: bool) -> None:
        """Advance the bar by one step and show this beside it; without a bar, print it where a line is due."""
        if self._bar.disable:
            if due:
                self.message(f"step {step} of {self._steps}: {shown}")
            return
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def write(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        """Append one line `{"kind": .., "step": .., **values}`.

        Boards get a scalar an entry: `train/depth_losses_2`, `eval/sources/code/acceptance_length`.
        """
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        scalars = dict(_scalars(kind, values))
        if self._board is not None:
            for tag, scalar in scalars.items():
                self._board.add_scalar(tag, scalar, step)
        if self._wandb is not None:
            self._wandb.log({**scalars, "step": step})

    def sync(self) -> None:
        """Bring the lines so far to the disk: a checkpoint is not to be ahead of them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        if self.enabled:
            tqdm.write(text)

    def close(self) -> None:
        """Flush and close everything."""
        self._bar.close()
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()


class Throughput:
    """Tokens a second of the training steps alone, since the last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._tokens = 0
        self._seconds = 0.0

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Time the block, which trains on so many tokens."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
        self._tokens += tokens

    def rate(self) -> float:
        """Tokens a second in this window."""
        return self._tokens / self._seconds


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics file but a last one that was cut off; none if there is no file.

    Raises:
        UserError: it is no text, or a line is none of a run's; the line is named.
    """
    whole, _, last = read_text(path).rpartition("\n") if is_there(path) else ("", "", "")
    lines = [_parse(line, f"{path}, line {number}") for number, line in enumerate(whole.splitlines(), start=1)]
    with contextlib.suppress(UserError):  # cut off in the middle of a write
        lines += [_parse(last, str(path))] if last else []
    return lines


def _parse(line: str, where: str) -> dict[str, Any]:
    values = parse_json(line, where)
    known = isinstance(values, dict) and values.get("kind") in ("train", "eval") and type(values.get("step")) is int
    if not known:
        raise UserError(f"{where} is no line of a run's metrics; remove the line, or the file")
    return values


def _drop_lines_after(path: Path, step: int) -> None:
    """Forget what a run that was cut off wrote after the checkpoint that it goes on from.

    A run that starts anew evaluates its untrained heads again, so of step 0 nothing is kept either.
    """
    if not is_there(path):
        return
    kept = [line for line in read_metrics(path) if step and line["step"] <= step]
    write_file(path, "".join(json.dumps(line) + "\n" for line in kept))


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """(tag, number) of everything in a value that may be nested; entries of lists are numbered from 1."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _scalars(f"{name}/{key}", entry)
    elif isinstance(value, list):
        for number, entry in enumerate(value, start=1):
            yield from _scalars(f"{name}_{number}", entry)
    else:
        yield name, value


def _tensorboard(directory: Path, first_step: int) -> "SummaryWriter | None":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        warnings.warn(f"no TensorBoard curves: {error}", stacklevel=2)
        return None
    return SummaryWriter(str(directory), purge_step=first_step + 1 if first_step else 0)


def _start_wandb(project: str, output: Path, settings: Mapping[str, object] | None) -> Any:
    """A W&B run that goes on where `output` goes on: its id is kept there."""
    import wandb

    identity = output / "wandb_id.txt"
    if not identity.exists():
        write_file(identity, secrets.token_hex(8))
    try:
        run = wandb.init(
            project=project,
            id=identity.read_text().strip(),
            name=output.resolve().name,
            dir=str(output),
            config=dict(settings or {}),
            resume="allow",
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"log.wandb={project}: {error}; run `wandb login`, set WANDB_MODE=offline, or leave log.wandb empty"
        ) from error
    # Steps that are done again after a kill are logged again, which W&B's own counter would refuse.
    run.define_metric("*", step_metric="step")
    return run
