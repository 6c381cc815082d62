"""The data sets of a run, and micro-batches whose cached hidden states are read ahead."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from mtpkit.checkpoint import load_config
from mtpkit.data.build import build_dataset
from mtpkit.data.dataset import PackedBatch, PackedDataset, StoredStates
from mtpkit.data.loader import LoaderState, PackedLoader
from mtpkit.data.samples import Columns
from mtpkit.data.sources import find_sources
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.training.config import DataConfig, TrainConfig

AHEAD = 3
"""Micro-batches whose hidden states are being read or ready ahead of use."""


def open_dataset(config: TrainConfig, paths: tuple[str, ...]) -> PackedDataset:
    """The packed sequences of files, folders and globs, by the settings; raises the errors of `build_dataset`."""
    data = config.data
    columns = Columns(data.text_column, data.prompt_column, data.response_column, data.messages_column)
    vocab_size = load_config(config.model).vocab_size
    return build_dataset(paths, load_tokenizer(config.model), data.sequence_length, columns, vocab_size)


def shared_data(data: DataConfig) -> list[str]:
    """Files and prepared directories that belong to both the training and the held-out data."""
    if not data.eval:
        return []
    train, heldout = (
        {os.path.realpath(path) for source in sources for path in source.files or [str(source.prepared)]}
        for sources in (find_sources(paths, warn=False) for paths in (data.train, data.eval))
    )
    return sorted(train & heldout)


class ReadAhead:
    """A `PackedLoader` with a thread that reads the hidden states of the next micro-batches during a step.

    It draws one global batch ahead, which `state_dict` does not count.
    """

    def __init__(self, loader: PackedLoader):
        self.dataset = loader.dataset
        self._loader = loader
        self._drawn: deque[list[PackedBatch]] = deque()
        self._states = deque([loader.state_dict()])  # the loader's state before each of `_drawn`, and after the last
        self._waiting: deque[_Reading] = deque()
        self._num_read = 0  # micro-batches read ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hidden-states")

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        return self

    def __next__(self) -> list[PackedBatch]:
        while len(self._drawn) < 2:
            self._draw()
        self._states.popleft()
        return self._drawn.popleft()

    def state_dict(self) -> LoaderState:
        """The loader's state after the last batch that was returned."""
        return self._states[0]

    def load_state_dict(self, state: LoaderState) -> None:
        """Set the state before the first batch; raises the errors of `PackedLoader.load_state_dict`."""
        assert not self._drawn, "batches were drawn already"
        self._loader.load_state_dict(state)
        self._states = deque([self._loader.state_dict()])

    def start(self) -> None:
        """Start to read until AHEAD micro-batches are read ahead."""
        while self._waiting and self._num_read < AHEAD:
            reading = self._waiting.popleft()
            reading.future = self._thread.submit(reading.read)
            self._num_read += 1

    def taken(self) -> None:
        """Note that a micro-batch is in use, and start to read another."""
        self._num_read -= 1
        self.start()

    def _draw(self) -> None:
        readings = []
        for batch in next(self._loader):
            reading = _Reading(self, batch)
            self._waiting.append(reading)
            readings.append(replace(batch, hidden=reading))
        self._drawn.append(readings)
        self._states.append(self._loader.state_dict())
        self.start()


class _Reading:
    """Reads the hidden states of one micro-batch, once and in order."""

    def __init__(self, owner: ReadAhead, batch: PackedBatch):
        assert batch.hidden is not None, "nothing to read"
        self.read = batch.hidden
        self.future: Future[StoredStates] | None = None
        self._owner = owner

    def __call__(self) -> StoredStates:
        assert self.future is not None, "micro-batches are taken in their order"
        states = self.future.result()
        self.future = None
        self._owner.taken()
        return states
