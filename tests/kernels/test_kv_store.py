"""Keys and values are written to their slots, and nowhere else."""

import pytest
import torch

from tests.kernels.conftest import Twin


def store(twin, new, caches, slots):
    """new [2, T, kv_heads, d] through the op of a twin; the caches [2, blocks, block_size,
    kv_heads, d] after it."""
    caches = caches.to(twin.device)
    twin("kv_store").store_kv(
        *new.to(twin.device), *caches, torch.tensor(slots, dtype=torch.int64).to(twin.device)
    )
    return caches.cpu()


@pytest.mark.parametrize("slots", [[7, 0, 11], [-1, 3, -1, 4], [-1, -1], []])
@pytest.mark.parametrize(("kv_heads", "width"), [(1, 1), (2, 5), (3, 17), (4, 63)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store(twin, slots, kv_heads, width, dtype):
    caches = torch.full((2, 3, 4, kv_heads, width), torch.nan, dtype=dtype)
    new = torch.randn(2, len(slots), kv_heads, width).to(dtype)
    caches = store(twin, new, caches, slots)
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(caches[:, slot // 4, slot % 4], new[:, token])
    untouched = [slot for slot in range(12) if slot not in slots]
    assert caches.flatten(1, 2)[:, untouched].isnan().all()


def test_views_of_a_fused_projection_and_another_dtype(twin):
    """Keys and values beside each other and beside queries, in numbers that both types hold."""
    fused = torch.randn(3, 2, 4, 8).bfloat16().float()
    new = fused[:, :, 2:].permute(2, 0, 1, 3)
    caches = store(
        twin, new, torch.full((2, 3, 4, 2, 8), torch.nan, dtype=torch.bfloat16), [5, -1, 2]
    )
    for token, slot in ((0, 5), (2, 2)):
        assert torch.equal(caches.flatten(1, 2)[:, slot], new[:, token].bfloat16())
    assert caches.isnan().sum() == 2 * 10 * 2 * 8


@pytest.mark.parametrize(("key_width", "value_width"), [(5, 3), (4, 24)])
def test_entries_of_two_widths_side_by_side_in_one_row(twin, key_width, value_width):
    """A row of a cache is [key, value], in which slots are further apart than either is wide."""
    rows = torch.full((3, 4, 1, key_width + value_width), torch.nan, device=twin.device)
    new = torch.randn(3, 1, key_width + value_width, device=twin.device)
    parts = key_width, value_width
    twin("kv_store").store_kv(
        *new.split(parts, -1), *rows.split(parts, -1), torch.tensor([7, -1, 9]).to(twin.device)
    )
    assert torch.equal(rows.flatten(0, 1)[[7, 9]], new[[0, 2]])
    assert rows.isnan().sum() == 10 * (key_width + value_width)


def test_heads_are_spread_over_programs(twin):
    if twin.name == "reference":
        pytest.skip("has no programs")
    caches = torch.full((2, 3, 4, 5, 6), torch.nan, device=twin.device)
    new = torch.randn(2, 3, 5, 6, device=twin.device)
    slots = torch.tensor([7, 0, -1], device=twin.device)
    twin("kv_store").store_kv(*new, *caches, slots, program_elements=16)
    assert torch.equal(caches.flatten(1, 2)[:, [7, 0]], new[:, :2])
    assert caches.isnan().sum() == 2 * 10 * 5 * 6


def test_a_stored_entry_is_what_attention_reads(twin):
    """Writing one entry elsewhere changes what a query sees."""
    outputs = []
    for slots in ([4, 5, 6], [4, 6, 5]):
        torch.manual_seed(0)
        caches = store(twin, torch.randn(2, 3, 2, 5), torch.zeros(2, 2, 4, 2, 5), slots)
        arguments = torch.randn(1, 1, 2, 5), *caches, torch.tensor([[1]]), torch.tensor([1])
        outputs.append(twin("attention").paged_attention(*(t.to(twin.device) for t in arguments)))
    assert not torch.allclose(*outputs)


@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements():
    """Offsets into large caches need 64 bits."""
    caches = torch.empty(2, 140_000, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    new = torch.randn(2, 2, 8, 128).bfloat16()
    stored = store(Twin("cuda", "cuda"), new, caches, [140_000 * 16 - 1, 3])
    assert torch.equal(stored[:, -1, -1], new[:, 0]) and torch.equal(stored[:, 0, 3], new[:, 1])
