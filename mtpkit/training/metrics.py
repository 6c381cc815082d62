"""Where the numbers of a run go: a JSON line a step, TensorBoard when it is installed, and a progress bar."""

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm


class MetricsLog:
    """Writes to `output/metrics.jsonl` and `output/tensorboard`; on any rank but the first it does nothing."""

    def __init__(self, output: Path, first_step: int, steps: int, enabled: bool):
        self.enabled = enabled
        self._file = None
        self._board = None
        # disable=None: silent where stderr is not a terminal.
        disable = None if enabled else True
        self._bar = tqdm(total=steps, initial=first_step, desc="training", unit=" steps", disable=disable)
        if enabled:
            path = output / "metrics.jsonl"
            _drop_lines_after(path, first_step)
            self._file = path.open("a", encoding="utf-8")
            self._board = _tensorboard(output / "tensorboard", first_step)

    def progress(self, shown: str) -> None:
        """Advance the bar by one step and show this beside it."""
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one line `{"kind": .., "step": .., **values}`; lists become one TensorBoard scalar an entry."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                scalars = {name: value}
                if isinstance(value, list):
                    scalars = {f"{name}_{depth}": entry for depth, entry in enumerate(value, start=1)}
                for tag, scalar in scalars.items():
                    self._board.add_scalar(f"{kind}/{tag}", scalar, step)

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


def _drop_lines_after(path: Path, step: int) -> None:
    """Forget what a run that was cut off wrote after the checkpoint that it goes on from."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")  # cut off in the middle of a write


def _tensorboard(directory: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        warnings.warn(f"no TensorBoard curves: {error}", stacklevel=2)
        return None
    return SummaryWriter(str(directory), purge_step=first_step + 1)
