"""Logs of a run (JSON lines, TensorBoard, Weights & Biases, a progress bar), and its throughput and
MFU."""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from mtpkit.errors import UserError
from mtpkit.files import JsonObject, is_there, parse_json, read_text, write_file
from mtpkit.platform import device_name
from mtpkit.training.log import keep

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
"""File of a run with a line per logged training step and per evaluation."""

PEAK_RATES = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 150e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""bf16 FLOPs per second by a part of the device's name; the first match counts. All are Tensor Core
peaks for dense matrices from NVIDIA's data sheets; where a sheet gives only the rate with sparsity,
the entry is half of that rate. A large product reaches about 0.8 of the peak (790e12 on an
H200)."""


def check_wandb(project: str) -> None:
    """Raise UserError if a W&B project is set and the package is missing."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb={project} needs the package wandb: pip install wandb, or leave log.wandb"
            " empty"
        )


class MetricsLog:
    """Writes to `output/metrics.jsonl`, `output/tensorboard` and W&B if `enabled`, and shows
    progress."""

    def __init__(
        self,
        output: Path,
        first_step: int,
        steps: int,
        enabled: bool,
        wandb: str = "",
        settings: Mapping[str, object] | None = None,
    ):
        """Open the logs of a run that resumes after `first_step`; lines of later steps are removed.

        Args:
            wandb: W&B project; empty: no W&B.
            settings: shown by W&B next to the curves.

        Raises:
            UserError: W&B refuses the run, or existing metrics cannot be read.
        """
        self.enabled = enabled
        self._output = output
        self._file = None
        self._board = None
        self._wandb = None
        # disable=None: silent where stderr is not a terminal.
        disable = None if enabled else True
        if enabled:
            # first, since W&B may refuse
            self._wandb = _start_wandb(wandb, output, settings) if wandb else None
            path = output / METRICS
            _drop_lines_after(path, first_step)
            self._file = path.open("a", encoding="utf-8")
            self._board = _tensorboard(output / "tensorboard", first_step)
        self._steps = steps
        self._bar = tqdm(
            total=steps, initial=first_step, desc="training", unit=" steps", disable=disable
        )

    def progress(self, step: int, shown: str, due: bool) -> None:
        """Advance the bar by one step with a text beside it; without a bar, print the text if a
        line is due."""
        line = f"step {step} of {self._steps}: {shown}"
        if self._bar.disable:
            if due:
                self.message(line)
            return
        if due:
            keep(self._output, line)
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def write(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        """Append one line `{"kind": .., "step": .., **values}`.

        TensorBoard and W&B get one scalar per entry but `time`: `train/depth_losses_2`,
        `eval/sources/code/acceptance_length`.
        """
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        # A line is seen at once by those who follow the file.
        self._file.flush()
        scalars = dict(
            _scalars(kind, {key: value for key, value in values.items() if key != "time"})
        )
        if self._board is not None:
            for tag, scalar in scalars.items():
                self._board.add_scalar(tag, scalar, step)
        if self._wandb is not None:
            self._wandb.log({**scalars, "step": step})

    def sync(self) -> None:
        """Flush the lines to disk, so that no checkpoint is ahead of them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def message(self, text: str) -> None:
        """Print a line above the bar, and keep it in the run's log."""
        if self.enabled:
            tqdm.write(text)
            keep(self._output, text)

    def fail(self, error: BaseException) -> None:
        """Keep the error that ends the run in its log."""
        if not self.enabled:
            return
        with contextlib.suppress(OSError):  # the disk may be full, which may be the error
            keep(self._output, f"error: {str(error) or type(error).__name__}")

    def close(self) -> None:
        """Flush and close everything."""
        self._bar.close()
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()
        if self._wandb is not None:
            self._wandb.finish()


class Throughput:
    """Tokens per second of training steps, without evaluations and saves, since the last
    `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._tokens = 0
        self._seconds = 0.0
        self.last = 0.0
        """Seconds of the last step."""

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Time the block, which trains on `tokens` tokens."""
        start = time.perf_counter()
        yield
        self.last = time.perf_counter() - start
        self._seconds += self.last
        self._tokens += tokens

    def rate(self) -> float:
        """Tokens per second in this window."""
        return self._tokens / self._seconds


def find_peak(device: torch.device) -> tuple[float | None, str | None]:
    """Stated dense bf16 FLOPs per second of a device, and a message for the user if those of a GPU
    are not known.

    Example: `NVIDIA H100 80GB HBM3` and `NVIDIA GH200 480GB` have 989e12, `NVIDIA H100 PCIe` has
    756e12.
    """
    name = device_name(device)
    rate = next(
        (rate for part, rate in PEAK_RATES.items() if re.search(rf"\b{part}\b", name)), None
    )
    known = rate is not None or device.type != "cuda"
    return rate, None if known else f"no MFU is given: the stated peak rate of {name} is not known"


def utilization(
    tokens_per_s: float, flops: float, num_devices: int, peak: float | None
) -> float | None:
    """Model FLOPs utilization (Chowdhery et al. 2022, arXiv:2204.02311); None if the peak is
    unknown, as on a CPU.

    Args:
        tokens_per_s: tokens per second on all devices together.
        flops: FLOPs per token, see `mtpkit.model.flops.step_flops`.
        peak: FLOPs per second of one device, see `find_peak`.
    """
    return None if peak is None else tokens_per_s * flops / (num_devices * peak)


def read_metrics(path: Path) -> list[JsonObject]:
    """Read the lines of a run's metrics file, except an incomplete last line; an empty list if
    there is no file.

    Raises:
        UserError: the file is not text, or a line is not as a run writes it; names the line.
    """
    whole, _, last = read_text(path).rpartition("\n") if is_there(path) else ("", "", "")
    lines = [
        _parse(line, f"{path}, line {number}")
        for number, line in enumerate(whole.splitlines(), start=1)
    ]
    with contextlib.suppress(UserError):  # cut off in the middle of a write
        lines += [_parse(last, str(path))] if last else []
    return lines


def _parse(line: str, where: str) -> JsonObject:
    values = parse_json(line, where)
    known = (
        isinstance(values, dict)
        and values.get("kind") in ("train", "eval")
        and type(values.get("step")) is int
    )
    if not known:
        raise UserError(f"{where} is no line of a run's metrics; remove the line, or the file")
    return values


def _drop_lines_after(path: Path, step: int) -> None:
    """Remove the lines that a killed run wrote after the checkpoint from which it resumes.

    A run that starts again evaluates its untrained heads again, so step 0 keeps nothing.
    """
    if not is_there(path):
        return
    kept = [line for line in read_metrics(path) if step and line["step"] <= step]
    write_file(path, "".join(json.dumps(line) + "\n" for line in kept))


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for every number in a nested value; entries of lists are numbered from
    1."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _scalars(f"{name}/{key}", entry)
    elif isinstance(value, list):
        for number, entry in enumerate(value, start=1):
            yield from _scalars(f"{name}_{number}", entry)
    elif value is not None:
        yield name, value


def _tensorboard(directory: Path, first_step: int) -> "SummaryWriter | None":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        warnings.warn(f"no TensorBoard curves: {error}", stacklevel=2)
        return None
    # TensorBoard hides what a killed run wrote after its checkpoint.
    return SummaryWriter(str(directory), purge_step=first_step + 1 if first_step else 0)


def _start_wandb(project: str, output: Path, settings: Mapping[str, object] | None) -> Any:
    """Start or resume the W&B run whose id is kept in `output`."""
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
            f"log.wandb={project}: {error}; run `wandb login`, set WANDB_MODE=offline, or leave"
            " log.wandb empty"
        ) from error
    # Steps repeated after a kill are logged again, which W&B's own counter would refuse.
    run.define_metric("*", step_metric="step")
    return run
