"""Rings folded into states, against the recurrence one entry after another in fp64."""

import pytest
import torch

from mtpkit.kernels.ring import ring_capacity, ring_length
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative

TOLERANCE = 1e-5
HEADS = 4
WIDTH = 21
GROUPS = 2
STATE = 7
SLOTS = 5
LENGTH = ring_length(4)


@pytest.mark.parametrize("steps", [False, True])
def test_states_after_all_entries(twin: Twin, steps: bool):
    """Of log decays and of step sizes; empty and full rings, and one that wraps; padding; what is
    not read is NaN."""
    generator = torch.Generator().manual_seed(3)
    slots = torch.tensor([3, -1, 0, 4])
    contexts = torch.tensor([19, 7, 33, 3])
    lens = torch.tensor([ring_capacity(LENGTH), 2, 5, 0])
    state = torch.randn(SLOTS, HEADS, WIDTH, STATE, generator=generator)
    values = torch.full((SLOTS, LENGTH, HEADS, WIDTH), torch.nan)
    keys = torch.full((SLOTS, LENGTH, GROUPS, STATE), torch.nan)
    rates = torch.full((SLOTS, LENGTH, HEADS), torch.nan)
    A_log = torch.rand(HEADS, generator=generator) if steps else None
    want = state.double()
    for slot, context, count in zip(slots.tolist(), contexts.tolist(), lens.tolist(), strict=True):
        for position in range(context - count, context) if slot >= 0 else ():
            place = (slot, position % LENGTH)
            for ring in (values, keys):
                ring[place] = torch.randn(ring[place].shape, generator=generator)
            rates[place] = torch.rand(HEADS, generator=generator) * (1 if steps else -1)
            rate = rates[place].double()
            value = values[place].double()
            if A_log is not None:
                value = value * rate[:, None]
                rate = -torch.exp(A_log.double()) * rate
            key = keys[place].double().repeat_interleave(HEADS // GROUPS, 0)
            want[slot] = (
                torch.exp(rate)[:, None, None] * want[slot] + value[..., None] * key[:, None]
            )
    moved = [t.to(twin.device) for t in (state, values, keys, rates, slots, contexts, lens)]
    twin("ring_fold").fold_ring(*moved, None if A_log is None else A_log.to(twin.device))
    have = moved[0].cpu()
    assert relative(have, want) < TOLERANCE
    untouched = torch.tensor([1, 2, 4])  # no row's, and that of the empty ring
    assert torch.equal(have[untouched], state[untouched])


@pytest.mark.gpu
def test_in_bf16_and_of_whole_blocks():
    """The shapes of an 8B model's layer."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    state = draw(4, 128, 64, 128, dtype=torch.float32)
    values = draw(4, 20, 128, 64)
    keys = draw(4, 20, 8, 128)
    rates = torch.rand(4, 20, 128, generator=generator, device="cuda")
    where = torch.tensor([[2, 0], [1000, 37], [16, 3]], device="cuda")
    A_log = torch.rand(128, generator=generator, device="cuda")
    results = []
    for name in ("reference", "cuda"):
        results.append(state.clone())
        Twin(name, "cuda")("ring_fold").fold_ring(results[-1], values, keys, rates, *where, A_log)
    assert relative(results[1], results[0].double()) < TOLERANCE
