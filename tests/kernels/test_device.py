from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from mtpkit.kernels import device, moe
from mtpkit.kernels.activation import swiglu
from mtpkit.kernels.device import Early, as_rows, only_if, quotient, row_of_tile, with_rows
from mtpkit.kernels.linear import linear
from mtpkit.kernels.norm import rms_norm
from tests.shared import covering


def test_only_what_has_no_rows_is_copied():
    wide = torch.randn(4, 3, 10)
    for rows, view in (
        (with_rows, wide[:, 1, 2:7]),
        (with_rows, wide[..., :5]),
        (as_rows, wide[:, :, 2:7]),
    ):
        have = rows(view)
        assert have.data_ptr() == view.data_ptr() and torch.equal(have.view_as(view), view)
    for rows, view in (
        (with_rows, wide.mT),
        (as_rows, wide[..., ::2]),
        (as_rows, wide.transpose(0, 1)),
    ):
        have = rows(view)
        assert have.stride(-1) == 1 and torch.equal(have.view_as(view), view)
    assert as_rows(wide).shape == (12, 10)


@triton.jit
def _quotient_kernel(values_ptr, divisors_ptr, out_ptr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    place = row * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out_ptr + place, quotient(tl.load(values_ptr + place), tl.load(divisors_ptr + row)))


def test_quotients_round_as_those_of_pytorch(device):
    """Also of numbers at both ends of fp32, as far as they count once they are fp8."""
    rows = 2048 if device == "cuda" else 24
    infinity = float("inf")
    ends = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 2.0**-64, 1.0, 3e19, 1e30, 3.4e38, infinity]
    ends = torch.tensor(ends, device=device)
    values = torch.randn(rows, 1024, device=device)
    divisors = torch.rand(rows, device=device) * 3 + 1e-3
    values[:11, :11] = ends
    values[:11, 11:22] = -ends
    values[:11, 22] = float("nan")
    divisors[:10] = ends[1:]
    # The one significand with which the correction may be off by a unit.
    divisors[10] = torch.tensor(2.0).nextafter(torch.tensor(0.0))
    have = torch.full_like(values, float("nan"))
    _quotient_kernel[(rows,)](values, divisors, have, COLUMNS=1024)
    want = values / divisors[:, None]
    assert torch.equal(have[11:], want[11:])
    have = have[:11].clamp(-448, 448)
    want = want[:11].clamp(-448, 448)
    # Half of the least number of fp8 that is not 0.
    tiny = have.abs().maximum(want.abs()) < 2.0**-10
    assert ((have == want) | (have.isnan() & want.isnan()) | tiny).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_that_start_early_change_no_bit(tokens, monkeypatch):
    """Each kernel reads what the one before it writes, and overwrites what the one before that
    reads."""
    hidden = 512
    experts = 32
    inner = 256

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    norm = weights(hidden)
    mix = weights(hidden, hidden)
    gate = weights(experts, hidden)
    fc1 = weights(experts, 2 * inner, hidden)
    fc2 = weights(experts, hidden, inner)
    start = weights(tokens, hidden)

    def layers() -> torch.Tensor:
        x = start
        for _ in range(20):
            x = linear(x, mix, norm_weight=norm, residual=x.clone())
            normed, logits = moe.router_logits(x, norm, 1e-5, True, gate)
            x = moe.expert_mlp(normed, fc1, fc2, *moe.route(logits, None, 4), "swiglu", x)
            x = rms_norm(swiglu(torch.cat([x, x], 1)), norm, 1e-5)
        return x

    graph = torch.cuda.CUDAGraph()
    want = None
    for _ in range(2):  # the first time kernels are compiled, which takes longer than they do
        found = layers()
    with torch.cuda.graph(graph):
        replayed = layers()
    launch = Early.__getitem__
    monkeypatch.setattr(Early, "__getitem__", lambda self, grid: synchronised(launch(self, grid)))
    want = layers()
    assert torch.equal(found, want) and want.isfinite().all() and want.norm() > 0
    for _ in range(20):
        graph.replay()
        assert torch.equal(replayed, want)


def synchronised(launch):
    """Launch when all before is done, and wait for it."""

    def run(*args, **constants):
        torch.cuda.synchronize()
        launch(*args, **constants)
        torch.cuda.synchronize()

    return run


def test_programs_are_even_if_all_start_at_once_or_none(monkeypatch):
    monkeypatch.setattr(device, "multiprocessors", lambda: 10)
    shares = {12: 0.6, 20: 1, 21: 0.2625, 30: 0.375, 36: 0.9, 40: 1, 44: 0.5 * 40 / 44}
    for programs, share in shares.items():
        assert device.evenness(programs, 4) == pytest.approx(share)


def test_launches_of_few_programs_may_start_early(monkeypatch):
    """And only on GPUs that can; arguments are looked through for the device."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(constants)

    monkeypatch.setattr(device, "overlaps", lambda found: found.type == "meta")
    monkeypatch.setattr(device, "multiprocessors", lambda: 2)
    on_gpu = torch.empty(2, device="meta")
    on_cpu = torch.empty(2)
    for most, grid, args in (
        (2, (2, 2), (3, None, (1, on_gpu))),
        (2, (5, 1), (on_gpu,)),
        (None, (5, 1), (on_gpu,)),
    ):
        Early(Kernel(), most)[grid](*args, SIZE=1)
    Early(Kernel())[(1,)](on_cpu)
    early = dict(SIZE=1, EARLY=True, launch_pdl=True)
    late = dict(SIZE=1, EARLY=False)
    assert launched == [early, late, early, dict(EARLY=False)]


@triton.jit
def number_tiles(
    starts_ptr, found_ptr, rows, ITEMS: tl.constexpr, SIZE: tl.constexpr, SPARE: tl.constexpr
):
    tile = tl.program_id(0)
    row, begin, tokens, first = row_of_tile(starts_ptr, rows, tile, ITEMS, SIZE, SPARE)
    tl.store(found_ptr + 4 * tile, row)
    tl.store(found_ptr + 4 * tile + 1, begin)
    tl.store(found_ptr + 4 * tile + 2, tokens)
    tl.store(found_ptr + 4 * tile + 3, first)


def tiles_of(lens: list[int], items: int, size: int, spare: int, zero: int) -> list[list[int]]:
    """Row, first token, number of tokens and first item of each number."""
    starts = torch.tensor([0, *lens]).cumsum(0) + zero
    found = torch.full((sum(lens) * items // size + len(lens) * spare, 4), -1)
    number_tiles[(len(found),)](starts, found, len(lens), ITEMS=items, SIZE=size, SPARE=spare)
    return found.tolist()


LENS = {
    "one without tokens": [0],
    "one": [1],
    "some without tokens": [0, 7, 0, 0, 8, 9, 0],
    "longer than tiles": [16, 33, 1],
    "many": [5, 9, 0, *[1] * 127],
}


# The first start is taken off each, whatever the number of items: the two need not meet in every
# case.
@pytest.mark.parametrize(("rows", "items", "zero"), covering(LENS, (1, 3), (0, 11)))
def test_every_tile_of_every_row_has_one_number(rows, items, zero):
    lens = LENS[rows]
    size = 8
    begins = torch.tensor([0, *lens]).cumsum(0)
    for spare in (1, 2):
        found = tiles_of(lens, items, size, spare, zero)
        assert all([begin, tokens] == [begins[row], lens[row]] for row, begin, tokens, _ in found)
        for row, length in enumerate(lens):
            firsts = [first for found_row, _, _, first in found if found_row == row]
            assert firsts == list(range(0, size * len(firsts), size))
            # An empty row has a number too; a spare number is for a tile that begins before the
            # row.
            whole = -(-length * items // size)
            assert len(firsts) >= (max(1, whole) if spare == 1 else 1 + whole)
            # Tiles that begin up to size - 1 items before the row.
            assert spare == 1 or size * len(firsts) >= length * items + size - 1


@triton.jit
def _store_all_or_none(out, count, limit, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    tl.store(out + place, 1.0, mask=only_if(place < count, count < limit))


@pytest.mark.parametrize("limit", [5, 6])
def test_one_flag_joins_a_mask(limit, device):
    """Triton 3.9's interpreter takes `mask & flag` for integers, see `only_if`."""
    out = torch.zeros(8, device=device)
    _store_all_or_none[(1,)](out, 5, limit, WIDTH=8)
    assert out.tolist() == [float(limit > 5)] * 5 + [0.0] * 3


def test_multiprocessors_are_those_of_the_gpu(monkeypatch):
    """An H100 PCIe has 114; in the interpreter the number is that of an H200 on every host."""
    if triton.knobs.runtime.interpret:
        assert device.multiprocessors() == 132
    properties = SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    device.multiprocessors.cache_clear()
    try:
        assert (device.multiprocessors(), device.busy_programs()) == (114, 228)
    finally:
        device.multiprocessors.cache_clear()
