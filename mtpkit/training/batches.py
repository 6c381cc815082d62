"""The data sets of a run, and micro-batches whose cached hidden states are read ahead."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from mtpkit.checkpoint import load_config
from mtpkit.data.build import build_dataset
from mtpkit.data.dataset import PackedBatch, PackedDataset, StoredStates
from mtpkit.data.loader import LoaderState, PackedLoader
from mtpkit.data.samples import Columns
from mtpkit.data.sources import find_sources
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError, listed
from mtpkit.training.config.settings import DataConfig, TrainConfig
from mtpkit.training.depths import Selection

AHEAD = 3
"""Number of micro-batches whose hidden states are being read, or are ready before they are used."""


def open_dataset(config: TrainConfig, paths: tuple[str, ...]) -> PackedDataset:
    """Build the data set of files, folders and globs as the settings say; raises the errors of
    `build_dataset`."""
    data = config.data
    columns = Columns(
        data.text_column, data.prompt_column, data.response_column, data.messages_column
    )
    vocab_size = load_config(config.model).vocab_size
    return build_dataset(
        paths, load_tokenizer(config.model), data.sequence_length, columns, vocab_size, data.options
    )


def require_drafts(dataset: PackedDataset) -> None:
    """Refuse data in which a server would draft no token: heads learn nothing from it.

    Reads sequences up to the first one with a draft.

    Raises:
        UserError: there is no such token.
    """
    sequences = (dataset.batch([row]) for row in range(len(dataset)))
    if not any(Selection.of(sequence, num_depths=1).selected.any() for sequence in sequences):
        raise nothing_drafted(dataset)


def nothing_drafted(dataset: PackedDataset) -> UserError:
    """The error of data in which a server would draft no token."""
    return UserError(
        f"data: {listed(dataset.sources)}: nothing is drafted, since no answer has more than one"
        " token; a server drafts from the second token of an answer on"
    )


def shared_data(data: DataConfig) -> list[str]:
    """Files and prepared directories that belong to both the training and the held-out data."""
    if not data.eval:
        return []
    train, heldout = (
        {
            os.path.realpath(path)
            for source in sources
            for path in source.files or [str(source.prepared)]
        }
        for sources in (find_sources(paths, warn=False) for paths in (data.train, data.eval))
    )
    return sorted(train & heldout)


class ReadAhead:
    """A `PackedLoader` with a thread that reads the hidden states of the next micro-batches during
    a step.

    It draws one global batch ahead, which `state_dict` does not count.
    """

    def __init__(self, loader: PackedLoader):
        self.dataset = loader.dataset
        self._loader = loader
        self._drawn: deque[list[PackedBatch]] = deque()
        # the loader's state before each of `_drawn`, and after the last
        self._states = deque([loader.state_dict()])
        self._waiting: deque[Callable[[], StoredStates]] = deque()  # reads that have not begun
        self._begun: deque[tuple[Callable[[], StoredStates], Future[StoredStates]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hidden-states")

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        return self

    def __next__(self) -> list[PackedBatch]:
        # The next batch's reads begin before this one is returned.
        while len(self._drawn) < 2:
            self._draw()
        self._states.popleft()
        return self._drawn.popleft()

    def state_dict(self) -> LoaderState:
        """The loader's state after the last batch that was returned."""
        return self._states[0]

    def load_state_dict(self, state: LoaderState) -> None:
        """Set the state before the first batch; raises the errors of
        `PackedLoader.load_state_dict`."""
        assert not self._drawn, "batches were drawn already"
        self._loader.load_state_dict(state)
        self._states = deque([self._loader.state_dict()])

    def _draw(self) -> None:
        batches = []
        for batch in next(self._loader):
            assert batch.hidden is not None, "nothing to read"
            self._waiting.append(batch.hidden)
            batches.append(replace(batch, hidden=partial(self._take, batch.hidden)))
        self._drawn.append(batches)
        self._states.append(self._loader.state_dict())
        self._begin()

    def _begin(self) -> None:
        """Begin reads until AHEAD micro-batches are being read or ready."""
        while self._waiting and len(self._begun) < AHEAD:
            read = self._waiting.popleft()
            self._begun.append((read, self._thread.submit(read)))

    def _take(self, read: Callable[[], StoredStates]) -> StoredStates:
        """Return the result of a read, and begin the next one."""
        begun, future = self._begun.popleft()
        assert begun is read, "micro-batches are taken once and in their order"
        states = future.result()
        self._begin()
        return states
