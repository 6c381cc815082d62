"""Packing loses nothing, keeps the order inside documents, and marks their boundaries."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtpkit.data import Document, PackedDataset
from mtpkit.data.packing import first_fit, pack

PAD = -1


def numbered(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are 0, 1, 2, ... throughout; every third one is a prompt's."""
    ends = np.cumsum(lengths)
    tokens = [np.arange(end - length, end, dtype=np.int32) for length, end in zip(lengths, ends, strict=True)]
    return [Document(ids, ids % 3 != 0) for ids in tokens]


def naive_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for members in bins:
            if sum(lengths[i] for i in members) + length <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


@given(st.lists(st.integers(1, 12), max_size=60))
def test_first_fit_equals_its_naive_twin(lengths: list[int]) -> None:
    assert first_fit(lengths, 12) == naive_first_fit(lengths, 12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_every_token_once_in_order_with_its_boundaries(lengths: list[int]) -> None:
    documents = numbered(lengths)
    token_ids, loss_mask, index = pack(documents, 9, PAD)
    found = []
    for ids, mask, row in zip(token_ids, loss_mask, index, strict=True):
        assert (np.diff(row) >= 0).all() and row[0] == 0
        for number in np.unique(row):
            part = ids[row == number]
            if part[0] == PAD:
                assert (part == PAD).all() and not mask[row == number].any() and number == row.max()
            else:
                found.append((part[0], part, mask[row == number]))
    found.sort(key=lambda item: item[0])
    assert len(found) == len(documents)
    for (_, ids, mask), document in zip(found, documents, strict=True):
        np.testing.assert_array_equal(ids, document.token_ids)
        np.testing.assert_array_equal(mask, document.loss_mask)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=10), st.integers(2, 9))
def test_long_documents_are_split_and_only_targetless_parts_are_dropped(lengths: list[int], length: int) -> None:
    documents = numbered(lengths)
    parts = [part for document in documents for part in document.split(length)]
    np.testing.assert_array_equal(
        np.concatenate([part.token_ids for part in parts]), np.arange(sum(lengths), dtype=np.int32)
    )
    kept = sorted(token for part in parts if part.loss_mask[1:].any() for token in part.token_ids.tolist())
    if len(kept) < length:
        return
    dataset = PackedDataset(documents, length, pad_id=PAD)
    batch = next(dataset.batches(len(dataset)))
    assert sorted(batch.token_ids[batch.token_ids != PAD].tolist()) == kept
    assert dataset.num_tokens == len(kept)


def test_batch_layout() -> None:
    documents = [Document(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in ([1, 2, 3], [4, 5])]
    batch = PackedDataset(documents, 5, pad_id=9).batch([0])
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5]] and batch.documents.tolist() == [[0, 0, 0, 1, 1]]
    padded = PackedDataset([*documents, documents[0]], 7, pad_id=9).batch([0, 1])
    assert padded.token_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9], [1, 2, 3, 9, 9, 9, 9]]
    assert padded.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1]]
    assert padded.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 3]]
    assert padded.loss_mask.sum().item() == 8
    dtypes = (padded.token_ids.dtype, padded.loss_mask.dtype, padded.documents.dtype, padded.positions.dtype)
    assert dtypes == (torch.int64, torch.bool, torch.int32, torch.int64)
    assert padded.to("cpu").token_ids.equal(padded.token_ids)
