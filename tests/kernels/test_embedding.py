"""Rows of a part of an embedding: the parts of all ranks add up to the embeddings of all tokens."""

import pytest
import torch

VOCAB = 90
WIDTH = 70


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_parts_add_up(twin, count, dtype):
    table = torch.randn(VOCAB, 2 * WIDTH).to(dtype)[:, :WIDTH].to(twin.device)  # rows with a stride
    tokens = torch.randint(VOCAB, (2 * count,))[::2].to(twin.device)
    parts = [
        twin("embedding").embedding_part(tokens, table[first : first + 30], first)
        for first in (0, 30, 60)
    ]
    assert all(part.shape == (count, WIDTH) and part.dtype == dtype for part in parts)
    assert torch.equal(sum(parts), table[tokens])
    for first, part in zip((0, 30, 60), parts, strict=True):
        elsewhere = (tokens < first) | (tokens >= first + 30)
        assert not part[elsewhere].any() and (count < 30 or elsewhere.any())


def test_what_is_not_there_is_not_read(twin):
    table = torch.full((4, WIDTH), torch.nan, device=twin.device)
    tokens = torch.tensor([-1, 3, 8, 2**40], device=twin.device)
    assert not twin("embedding").embedding_part(tokens, table, 4).any()
