"""Packing loses nothing, keeps the order inside documents, and marks their boundaries."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtpkit.data import documents as documents_module
from mtpkit.data.build import pack_documents
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.documents import Document, first_fit, pack, table_fingerprint
from mtpkit.model import SequenceInput
from tests.data.packed import in_memory

PAD = -1


def numbered(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are 0, 1, 2, ... throughout; every third one is a prompt's."""
    ends = np.cumsum(lengths)
    tokens = [
        np.arange(end - length, end, dtype=np.int32)
        for length, end in zip(lengths, ends, strict=True)
    ]
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
    table = pack(documents, 9)
    found = []
    for row in table.to_pylist():
        ends = np.cumsum(row["document_lengths"])
        assert ends[-1] == len(row["input_ids"]) == len(row["loss_mask"]) <= 9
        parts = zip(
            np.split(row["input_ids"], ends)[:-1],
            np.split(row["loss_mask"], ends)[:-1],
            strict=True,
        )
        found += [(ids[0], ids, mask) for ids, mask in parts]
    found.sort(key=lambda item: item[0])
    assert len(found) == len(documents)
    for (_, ids, mask), document in zip(found, documents, strict=True):
        np.testing.assert_array_equal(ids, document.token_ids)
        np.testing.assert_array_equal(mask, document.loss_mask)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 5))
def test_the_fingerprint_sees_everything_but_how_batches_are_cut(
    lengths: list[int], rows: int
) -> None:
    documents = numbered(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "ROWS", rows)
        table = pack(documents, 9)
    mark = table_fingerprint(table)
    assert (
        mark == table_fingerprint(pack(documents, 9)) == table_fingerprint(table.combine_chunks())
    )
    first = documents[0]
    others = [
        Document(first.token_ids + 1, first.loss_mask),
        Document(first.token_ids, ~first.loss_mask),
        *([Document(first.token_ids[:-1], first.loss_mask[:-1])] if len(first) > 1 else []),
    ]
    assert mark not in [table_fingerprint(pack([other, *documents[1:]], 9)) for other in others]
    assert lengths[1:] == [] or mark != table_fingerprint(pack(documents[1:], 9))


@given(st.lists(st.integers(2, 50), min_size=1, max_size=10), st.integers(2, 9))
def test_long_documents_are_split_and_only_targetless_parts_are_dropped(
    lengths: list[int], length: int
) -> None:
    documents = numbered(lengths)
    kept = [
        token
        for document in documents
        for start in range(0, len(document), length)
        if document.loss_mask[start + 1 : start + length].any()
        for token in document.token_ids[start : start + length].tolist()
    ]
    if len(kept) < length:
        return
    dataset = in_memory(documents, length, pad_id=PAD)
    batch = dataset.batch(range(len(dataset)))
    assert sorted(batch.token_ids[batch.token_ids != PAD].tolist()) == kept
    assert dataset.num_tokens == len(kept)
    starts = SequenceInput(batch.documents).starts(*batch.documents.shape, batch.documents.device)
    assert starts.tolist() == [*accumulate(batch.document_lens, initial=0)]


def test_batch_layout() -> None:
    documents = [
        Document(np.array(ids, np.int32), np.ones(len(ids), bool)) for ids in ([1, 2, 3], [4, 5])
    ]
    batch = in_memory(documents, 5, pad_id=9).batch([0])
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5]] and batch.documents.tolist() == [
        [0, 0, 0, 1, 1]
    ]
    padded = in_memory([*documents, documents[0]], 7, pad_id=9).batch([0, 1])
    assert padded.token_ids.tolist() == [[1, 2, 3, 4, 5, 9, 9], [1, 2, 3, 9, 9, 9, 9]]
    assert padded.documents.tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1]]
    assert padded.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2, 3]]
    assert padded.loss_mask.sum().item() == 8
    dtypes = (
        padded.token_ids.dtype,
        padded.loss_mask.dtype,
        padded.documents.dtype,
        padded.positions.dtype,
    )
    assert dtypes == (torch.int64, torch.bool, torch.int32, torch.int64)
    assert padded.to("cpu").token_ids.equal(padded.token_ids)


def test_the_fingerprint_sees_where_sequences_end() -> None:
    documents = numbered([4, 4])
    assert table_fingerprint(pack(documents, 4)) != table_fingerprint(pack(documents, 8))


def test_sources_stay_apart() -> None:
    """Sequences of source 1 hold the token 1, six of them; there are three of source 2, of two
    parts."""
    parts = [(1, 6), (2, 2), (2, 1)]
    sources = [
        pack_documents(
            f"source {token}", [Document(np.full(4, token, np.int32), np.ones(4, bool))] * count, 4
        )
        for token, count in parts
    ]
    dataset = PackedDataset(sources, 4, pad_id=0)
    assert (len(dataset), dataset.num_tokens, dataset.sources) == (9, 36, ["source 1", "source 2"])
    for token in (1, 2):
        rows = dataset.source_rows(f"source {token}")
        assert (dataset.batch(rows).token_ids == token).all()
    assert (
        dataset.source_rows("source 2").tolist() == [6, 7, 8]
        and len(dataset.source_rows("none")) == 0
    )
