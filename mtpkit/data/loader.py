"""An endless, resumable stream of global batches, of which each rank gets its share."""

from collections.abc import Iterator
from typing import TypedDict

import numpy as np

from mtpkit.data.dataset import PackedBatch, PackedDataset
from mtpkit.errors import UserError


class LoaderState(TypedDict):
    """The position in a stream of batches, and everything that the order of the stream depends
    on."""

    consumed: int
    """Sequences that all ranks together have consumed."""
    order: dict[str, object]


class PackedLoader:
    """Iterate over global batches of sequences without end; an item is this rank's list of
    micro-batches.

    Sequences come in an order drawn from `seed` and the epoch, and a batch may span two epochs. A
    global batch holds the same sequences whatever `dp_size` is; rank r takes the r-th contiguous
    share. The state is one number, the sequences consumed so far, so that a run resumes exactly,
    even on another number of ranks.

    Example, 10 sequences unshuffled, global batch 4, 2 ranks, micro-batch 1:
        rank 0: [0], [1] | [4], [5] | [8], [9] | ...
        rank 1: [2], [3] | [6], [7] | [0], [1] | ...
    """

    def __init__(
        self,
        dataset: PackedDataset,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """Sizes count sequences.

        Raises:
            UserError: the global batch size is not a multiple of micro-batch size times ranks.
        """
        if min(global_batch_size, micro_batch_size) < 1 or global_batch_size % (
            micro_batch_size * dp_size
        ):
            raise UserError(
                f"global_batch_size {global_batch_size} must be a positive multiple of"
                f" micro_batch_size {micro_batch_size} times {dp_size} data-parallel ranks"
            )
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.consumed = 0
        """Sequences that all ranks together have consumed."""
        self._share = global_batch_size // dp_size
        self._offset = dp_rank * self._share
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        return self

    def __next__(self) -> list[PackedBatch]:
        first = self.consumed + self._offset
        rows = [self._sequence(number) for number in range(first, first + self._share)]
        # All ranks' sequences, not this rank's: the state holds for any number of ranks.
        self.consumed += self.global_batch_size
        step = self.micro_batch_size
        return [self.dataset.batch(rows[i : i + step]) for i in range(0, self._share, step)]

    def state_dict(self) -> LoaderState:
        """The position in the stream."""
        return {"consumed": self.consumed, "order": self._identity()}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at the position of a `state_dict`.

        Raises:
            UserError: the data, seed or shuffling has changed, so that the order would differ.
        """
        changed = {key: (state["order"].get(key), now) for key, now in self._identity().items()}
        changed = {key: pair for key, pair in changed.items() if pair[0] != pair[1]}
        if changed:
            text = ", ".join(f"{key} was {was}, is {now}" for key, (was, now) in changed.items())
            raise UserError(
                f"data: cannot resume in a different order: {text}; use the run's own data and seed"
            )
        self.consumed = state["consumed"]

    def _identity(self) -> dict[str, object]:
        return {
            "num_sequences": len(self.dataset),
            "num_tokens": self.dataset.num_tokens,
            "content": self.dataset.fingerprint,
            "sequence_length": self.dataset.sequence_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _sequence(self, number: int) -> int:
        """Index of the `number`-th sequence of the stream."""
        epoch, place = divmod(number, len(self.dataset))
        if not self.shuffle:
            return place
        # Drawn from seed and epoch alone, so that a resumed run needs no state of a generator.
        if self._order[0] != epoch:
            self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset)),
            )
        return int(self._order[1][place])
