"""Moves of entries against a loop that keeps what was there."""

import torch

from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.kernels.linear import FP8


def test_rows_read_all_before_they_write(twin):
    """Chains of moves in one row, moves to where they are, none, and tensors of several shapes and
    types."""
    sources = torch.tensor([[1, 4, 5], [12, -1, 10], [-3, 20, 21]])
    targets = torch.tensor([[1, 2, 4], [10, 11, 12], [22, 20, 23]])
    shapes = [(3,), (2, 70), (1025,), (3,), ()]
    types = [torch.float32, torch.bfloat16, torch.float32, FP8, torch.int64]
    tensors = [
        torch.randn(24, *shape).mul(9).to(of) for shape, of in zip(shapes, types, strict=True)
    ]
    tensors += [torch.randn(24, 3) for _ in range(40)]  # more than one launch takes
    want = [tensor.clone() for tensor in tensors]
    for old, new in zip(tensors, want, strict=True):
        for source, target in zip(
            sources.flatten().tolist(), targets.flatten().tolist(), strict=True
        ):
            if source >= 0:
                new[target] = old[source]
    moved = [tensor.to(twin.device) for tensor in tensors]
    twin("move_entries").move_entries(sources.to(twin.device), targets.to(twin.device), *moved)
    assert all(bits_equal(have.cpu(), new) for have, new in zip(moved, want, strict=True))


def test_no_rows_and_no_tensors(twin):
    none = torch.zeros(0, 3, dtype=torch.int64, device=twin.device)
    twin("move_entries").move_entries(none, none, torch.zeros(2, 2, device=twin.device))
    twin("move_entries").move_entries(none.new_zeros(1, 1), none.new_zeros(1, 1))
