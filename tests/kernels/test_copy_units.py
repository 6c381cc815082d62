"""Copies of units against a loop."""

import pytest
import torch

from mtpkit.kernels.copy_units import triton

FORMS = [
    ((3,), torch.float32, torch.float32),
    ((2, 70), torch.float32, torch.bfloat16),
    ((2, 70), torch.bfloat16, torch.float32),
    ((1025,), torch.bfloat16, torch.bfloat16),
    ((), torch.int64, torch.int64),
]
SOURCES = [4, 0, -1, 4, 2, 5]
TARGETS = [0, 3, 1, 1, -1, 2]


def copied(pairs):
    """What is written by a loop."""
    want = [written.clone() for _, written in pairs]
    for (read, _), new in zip(pairs, want, strict=True):
        for source, target in zip(SOURCES, TARGETS, strict=True):
            if source >= 0 and target >= 0:
                new[target].copy_(read[source])
    return want


def check(twin, pairs) -> None:
    """Compare with the loop all that is written, and that nothing is left of what is read."""
    want = copied(pairs)
    kept = [read.clone() for read, _ in pairs]
    sources, targets = torch.tensor([SOURCES, TARGETS], device=twin.device)
    twin("copy_units").copy_units(sources, targets, *pairs)
    assert all(written.equal(new) for (_, written), new in zip(pairs, want, strict=True))
    assert all(read.equal(old) for (read, _), old in zip(pairs, kept, strict=True))


def made(twin, shape, kind, units: int) -> torch.Tensor:
    values = torch.randn(units, *shape, device=twin.device).mul(9)
    # Triton's interpreter cuts bf16 off instead of rounding.
    return (values.to(torch.bfloat16) if twin.name == "interpreter" else values).to(kind)


def test_units_of_many_shapes_and_types(twin):
    """Also more tensors than one launch takes, one source twice, and none of a negative source or
    target."""
    forms = FORMS + [FORMS[0]] * 20 + [FORMS[1]] * 17
    check(
        twin, [(made(twin, shape, old, 6), made(twin, shape, new, 4)) for shape, old, new in forms]
    )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_units_that_lie_apart(twin, kind):
    """Windows of wider columns and one entry of several, both ways; nothing beside them is
    touched."""
    columns = [made(twin, (7, 20), torch.float32, 6) for _ in range(3)] + [
        made(twin, (9, 20), torch.float32, 6)
    ]
    entries = made(twin, (4, 5, 6), torch.float32, 6)
    views = [*(one[:, 2:][:, :3] for one in columns), entries[:, 1]]
    check(twin, [(one, made(twin, one.shape[1:], kind, 4)) for one in views])
    before = [one.clone() for one in (*columns, entries)]
    check(twin, [(made(twin, one.shape[1:], kind, 6), one) for one in views])
    for one, old in zip(columns, before, strict=False):
        assert one[:, :2].equal(old[:, :2]) and one[:, 5:].equal(old[:, 5:])
    assert entries[:, 0].equal(before[-1][:, 0]) and entries[:, 2:].equal(before[-1][:, 2:])


def test_no_copies_no_tensors_and_no_units(twin):
    none = torch.zeros(0, dtype=torch.int64, device=twin.device)
    held = torch.zeros(2, 2, device=twin.device)
    twin("copy_units").copy_units(none, none, (held, held.clone()))
    twin("copy_units").copy_units(none.new_zeros(1), none.new_zeros(1))
    null = none.new_full((1,), -1)
    twin("copy_units").copy_units(null, null, (held, held[:0].clone()), (held[:0].clone(), held))
    assert not held.any()


def test_tensors_of_one_form_share_launches(monkeypatch):
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: grids.append(grid)

    monkeypatch.setattr(triton, "_copy_kernel", Kernel())
    pairs = [(torch.zeros(5, *shape), torch.zeros(3, *shape)) for shape in ((2, 3), (2048,)) * 24]
    triton.copy_units(torch.arange(3), torch.arange(3), *pairs)
    assert grids == [(1, 3, 16), (1, 3, 8), (2, 3, 16), (2, 3, 8)]


def test_units_that_are_not_dense_are_refused():
    held = torch.zeros(3, 4, 6)
    rows = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError):
        triton.copy_units(rows, rows, (held[:, :, ::2], torch.zeros(3, 4, 3)))
