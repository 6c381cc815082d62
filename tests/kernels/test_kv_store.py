"""Keys and values land where they are told, and nowhere else."""

import pytest
import torch

from mtpkit.kernels.kv_store import store_kv


@pytest.mark.parametrize("slots", [[7, 0, 11], [-1, 3, -1, 4], [-1, -1], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store(slots, dtype):
    caches = torch.full((2, 3, 4, 2, 5), torch.nan, dtype=dtype)
    new = torch.randn(2, len(slots), 2, 5)
    store_kv(*new, *caches, torch.tensor(slots, dtype=torch.int64))
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(caches[:, slot // 4, slot % 4], new[:, token].to(dtype))
    untouched = [slot for slot in range(12) if slot not in slots]
    assert caches.flatten(1, 2)[:, untouched].isnan().all()


def test_a_stored_entry_is_what_attention_reads():
    """Writing one entry elsewhere changes what a query sees."""
    from mtpkit.kernels.attention import paged_attention

    outputs = []
    for slots in ([4, 5, 6], [4, 6, 5]):
        torch.manual_seed(0)
        caches = torch.zeros(2, 2, 4, 2, 5)
        store_kv(*torch.randn(2, 3, 2, 5), *caches, torch.tensor(slots))
        q = torch.randn(1, 1, 2, 5)
        outputs.append(paged_attention(q, *caches, torch.tensor([[1]]), torch.tensor([1])))
    assert not torch.allclose(*outputs)
