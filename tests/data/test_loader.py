"""The stream of batches: the same for every number of ranks, resumable anywhere, shuffled by seed
and epoch."""

from collections.abc import Iterable
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtpkit.data.dataset import PackedDataset
from mtpkit.data.documents import Document
from mtpkit.data.loader import PackedLoader
from mtpkit.errors import UserError
from tests.data.packed import in_memory
from tests.shared import each

SEQUENCES = 10


def make_dataset(sequences: int = SEQUENCES) -> PackedDataset:
    """Sequence i holds the token i four times."""
    documents = [Document(np.full(4, i, np.int32), np.ones(4, bool)) for i in range(sequences)]
    return in_memory(documents, 4, pad_id=0)


def steps(loader: PackedLoader, count: int) -> list[list[int]]:
    """Which sequences each of the next steps holds."""
    return [
        torch.cat([batch.token_ids[:, 0] for batch in batches]).tolist()
        for batches in islice(loader, count)
    ]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 5))
def test_global_batches_do_not_depend_on_the_ranks(dp_size: int, micro: int, seed: int) -> None:
    alone = steps(PackedLoader(make_dataset(), 8, 8, seed=seed), 7)
    ranks = [
        steps(PackedLoader(make_dataset(), 8, micro, seed=seed, dp_rank=rank, dp_size=dp_size), 7)
        for rank in range(dp_size)
    ]
    assert [flat(shares) for shares in zip(*ranks, strict=True)] == alone


def test_docstring_example() -> None:
    loaders = [
        PackedLoader(make_dataset(), 4, 1, shuffle=False, dp_rank=rank, dp_size=2)
        for rank in range(2)
    ]
    assert [steps(loader, 3) for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    assert len(next(loaders[0])) == 2


def test_each_epoch_holds_every_sequence_once_in_a_new_order() -> None:
    loader = PackedLoader(make_dataset(), 5, 5, seed=1)
    first = flat(steps(loader, 2))
    second = flat(steps(loader, 2))
    assert loader.consumed == 2 * SEQUENCES
    assert sorted(first) == sorted(second) == list(range(SEQUENCES))
    assert first != second and first != sorted(first)
    assert flat(steps(PackedLoader(make_dataset(), 5, 5, seed=2), 2)) != first


@given(st.integers(0, 12), st.sampled_from([1, 2]))
def test_resume_in_the_middle(done: int, dp_size: int) -> None:
    whole = steps(PackedLoader(make_dataset(), 4, 1, seed=3), done + 5)
    before = PackedLoader(make_dataset(), 4, 1, seed=3)
    steps(before, done)
    shares = []
    for rank in range(dp_size):
        after = PackedLoader(make_dataset(), 4, 1, seed=3, dp_rank=rank, dp_size=dp_size)
        after.load_state_dict(before.state_dict())
        shares.append(steps(after, 5))
    assert [flat(parts) for parts in zip(*shares, strict=True)] == whole[done:]


def test_resume_with_other_data_is_refused() -> None:
    state = PackedLoader(make_dataset(), 4, 1, seed=3).state_dict()
    other = PackedLoader(make_dataset(SEQUENCES + 1), 4, 1, seed=4)
    with pytest.raises(UserError, match=r"num_sequences was 10, is 11.*seed was 3, is 4"):
        other.load_state_dict(state)


def test_other_data_of_the_same_size_is_refused() -> None:
    documents = [Document(np.full(4, i + 1, np.int32), np.ones(4, bool)) for i in range(SEQUENCES)]
    other = PackedLoader(in_memory(documents, 4, pad_id=0), 4, 1)
    with pytest.raises(UserError, match="different order: content was"):
        other.load_state_dict(PackedLoader(make_dataset(), 4, 1).state_dict())


@each(("batch", "micro", "dp_size"), [(0, 1, 1), (4, 0, 1), (6, 4, 1), (4, 2, 4)])
def test_batch_sizes_that_do_not_divide(batch: int, micro: int, dp_size: int) -> None:
    with pytest.raises(UserError, match="global_batch_size"):
        PackedLoader(make_dataset(), batch, micro, dp_size=dp_size)
