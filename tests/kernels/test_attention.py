"""Attention kernels against attention written out with a dense mask in fp64."""

import math

import pytest
import torch

from mtpkit.kernels.attention import depth_attention, paged_attention, sequence_attention
from tests.kernels.recurrence import relative

WIDTH = 6
HEADS = [(4, 4), (4, 2), (6, 1)]
TOLERANCE = 1e-5


def dense(q, k, v, mask):
    """q [t, heads, d], k and v [n, kv_heads, d], mask [t, n]: [t, heads, d] in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    rep = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // rep].t() / math.sqrt(q.shape[-1])
        out.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, head // rep])
    return torch.stack(out, 1)


def causal(length: int, documents: torch.Tensor | None = None) -> torch.Tensor:
    """[s, s], by a plain loop."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            mask[i, j] = documents is None or bool(documents[i] == documents[j])
    return mask


DOCUMENTS = {
    "one": None,
    "several": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 6]]),
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_sequences(heads, kv_heads, documents):
    q = torch.randn(2, 9, heads, WIDTH)
    k, v = torch.randn(2, 2, 9, kv_heads, WIDTH)
    out = sequence_attention(q, k, v, documents)
    for b in range(2):
        mask = causal(9, None if documents is None else documents[b])
        assert relative(out[b], dense(q[b], k[b], v[b], mask)) < TOLERANCE


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_depths_equal_a_mask_over_all_of_them(heads, kv_heads, depth, documents):
    """Keys of depths 1 .. k one after another; depth 1 is seen causally, the later ones at the same position."""
    q = torch.randn(2, 9, heads, WIDTH, requires_grad=True)
    k, v = torch.randn(2, depth, 2, 9, kv_heads, WIDTH)
    out = depth_attention(q, k[0], v[0], list(k[1:]), list(v[1:]), documents)
    want = []
    for b in range(2):
        first = causal(9, None if documents is None else documents[b])
        mask = torch.cat([first, *[torch.eye(9, dtype=torch.bool)] * (depth - 1)], 1)
        want.append(dense(q[b], k[:, b].flatten(0, 1), v[:, b].flatten(0, 1), mask))
    want = torch.stack(want)
    assert relative(out.detach(), want.detach()) < TOLERANCE
    weights = torch.randn(want.shape)
    have_grad, want_grad = (torch.autograd.grad((y * weights).sum(), q)[0] for y in (out, want))
    assert relative(have_grad, want_grad.double()) < TOLERANCE


def make_paged(context_lens: list[int], tokens: int, block_size: int, kv_heads: int = 2):
    """Histories scattered over random blocks of a cache that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(block_size)
    used = [-(-(length + tokens) // block_size) for length in context_lens]
    order = torch.randperm(sum(used) + 5, generator=generator)
    tables = torch.zeros(len(used), max(used) + 1, dtype=torch.int64)
    caches = torch.full((2, len(order), block_size, kv_heads, WIDTH), torch.nan)
    histories = []
    for row, (length, count) in enumerate(zip(context_lens, used, strict=True)):
        tables[row, :count], order = order[:count], order[count:]
        history = torch.randn(2, length + tokens, kv_heads, WIDTH, generator=generator)
        histories.append(history)
        for position in range(length + tokens):
            caches[:, tables[row, position // block_size], position % block_size] = history[:, position]
    return caches, tables, histories


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_pages(tokens, block_size):
    edge = 2 * block_size - tokens  # ends exactly at a block's edge, and one to either side
    context_lens = [0, 1, max(edge - 1, 0), max(edge, 0), max(edge + 1, 0), 17]
    caches, tables, histories = make_paged(context_lens, tokens, block_size)
    q = torch.randn(len(context_lens), tokens, 4, WIDTH)
    out = paged_attention(q, *caches, tables, torch.tensor(context_lens))
    for row, (length, history) in enumerate(zip(context_lens, histories, strict=True)):
        mask = causal(length + tokens)[length:]
        assert relative(out[row], dense(q[row], *history, mask)) < TOLERANCE, row


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_pages_with_grouped_heads(heads, kv_heads):
    caches, tables, histories = make_paged([5, 9], 3, 4, kv_heads)
    q = torch.randn(2, 3, heads, WIDTH)
    out = paged_attention(q, *caches, tables, torch.tensor([5, 9]))
    for row, history in enumerate(histories):
        assert relative(out[row], dense(q[row], *history, causal(history.shape[1])[-3:])) < TOLERANCE


def test_a_row_depends_on_nothing_else_in_the_batch():
    caches, tables, _ = make_paged([5, 9, 2], 3, 4)
    q, lengths = torch.randn(3, 3, 4, WIDTH), torch.tensor([5, 9, 2])
    together = paged_attention(q, *caches, tables, lengths)
    for row in ([0], [2, 1]):
        assert torch.equal(paged_attention(q[row], *caches, tables[row], lengths[row]), together[row])


def test_a_wrong_length_or_block_would_be_seen():
    caches, tables, histories = make_paged([6], 2, 4)
    q = torch.randn(1, 2, 4, WIDTH)
    want = dense(q[0], *histories[0], causal(8)[6:])
    assert relative(paged_attention(q, *caches, tables, torch.tensor([6]))[0], want) < TOLERANCE
    assert relative(paged_attention(q, *caches, tables, torch.tensor([5]))[0], want) > 1e-2
    assert relative(paged_attention(q, *caches, tables[:, [1, 0, 2]], torch.tensor([6]))[0], want) > 1e-2
