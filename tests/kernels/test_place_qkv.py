"""Norms, rotation and caches in one kernel against the same in fp64."""

import math

import pytest
import torch

from tests.kernels.conftest import Twin
from tests.kernels.inputs import projected_qkv, random_slots
from tests.kernels.recurrence import relative

EPS = 0.1
BLOCK = 4


def draw(
    twin: Twin, tokens, groups, heads, width, half, norm, dtype, kept=None, factor=1.0
) -> dict:
    """Queries, keys and values are slices of one projection, as attention has them."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(twin.device, dtype)

    split = projected_qkv(normal, tokens, groups, heads, width)
    blocks = tokens // BLOCK + 2
    caches = [
        torch.full((blocks, BLOCK, groups, width), 7.0).to(twin.device, dtype) for _ in range(2)
    ]
    slots = random_slots(torch.randperm, caches[0], tokens)
    slots[tokens // 2] = -1
    norms = (
        [(1 + 0.5 * torch.randn(width)).to(twin.device, dtype) for _ in range(2)]
        if norm
        else [None, None]
    )
    turns = torch.rand(half).to(twin.device) if half else None
    names = (
        "q",
        "k",
        "v",
        "key_cache",
        "value_cache",
        "slots",
        "positions",
        "frequencies",
        "q_norm",
        "k_norm",
    )
    places = slots.to(twin.device), torch.randint(0, 50, (tokens,)).to(twin.device)
    keep = None if kept is None else torch.randperm(tokens)[:kept].to(twin.device)
    rest = dict(eps=EPS, zero_centered=norm == "around zero", keep=keep, factor=factor)
    return dict(zip(names, (*split, *caches, *places, turns, *norms), strict=True), **rest)


def turned(x, norm, zero_centered, positions, turns, factor=1.0):
    """One token's heads [n, d] in fp64."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (norm.double() + zero_centered)
    if turns is not None:
        half = len(turns)
        angle = positions.double() * turns.double()
        first = x[:, :half]
        second = x[:, half : 2 * half]
        rest = x[:, 2 * half :]
        cos = factor * angle.cos()
        sin = factor * angle.sin()
        x = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    return x


def test_programs_have_as_many_warps_as_a_gpu_takes():
    module = Twin("interpreter", "cpu")("place_qkv")
    found = {
        module.warps(heads * width) for heads in range(1, 33) for width in (64, 80, 128, 192, 256)
    }
    assert found <= {1, 2, 4, 8} and len(found) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "half", "norm", "kept", "factor"),
    [
        ((5, 2, 3, 16), 4, "plain", None, 1.0),
        ((1, 2, 8, 32), 16, "around zero", None, 1.3),
        ((6, 1, 1, 12), 3, None, 2, 0.8),
        ((3, 3, 2, 24), 0, "plain", 3, 1.3),
        ((4, 2, 2, 8), 0, None, 1, 1.0),
        ((4, 2, 2, 8), 4, "plain", 0, 1.3),
        ((2, 1, 6, 256), 32, "around zero", None, 1.0),
    ],
    ids=str,
)
def test_place_qkv(twin: Twin, sizes, half, norm, kept, factor, dtype):
    """The factor is that of the rotated channels alone."""
    arguments = draw(twin, *sizes, half, norm, dtype, kept, factor)
    before = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    q = twin("place_qkv").place_qkv(**arguments)
    zero_centered = arguments["zero_centered"]
    turns = arguments["frequencies"]
    positions = arguments["positions"]
    slots = arguments["slots"]
    keep = arguments["keep"]
    # Rounded after the norm and after the rotation; Triton's interpreter cuts bf16 off instead.
    limit = 1e-5 if dtype == torch.float32 else 2**-6
    tokens = range(len(slots)) if keep is None else keep.tolist()
    assert q.shape == (len(tokens), *arguments["q"].shape[1:]) and q.dtype == dtype
    for have, token in zip(q, tokens, strict=True):
        heads = arguments["q"][token].flatten(0, 1)
        want = turned(heads, arguments["q_norm"], zero_centered, positions[token], turns, factor)
        assert relative(have.flatten(0, 1), want) <= limit
    want_keys, want_values = (cache.flatten(0, 1) for cache in before)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key = turned(
                arguments["k"][token],
                arguments["k_norm"],
                zero_centered,
                positions[token],
                turns,
                factor,
            )
            want_keys[slot], want_values[slot] = key.to(dtype), arguments["v"][token]
    assert relative(arguments["key_cache"].flatten(0, 1), want_keys.double()) <= limit
    assert torch.equal(arguments["value_cache"].flatten(0, 1), want_values)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("half", "norm"), [(4, "plain"), (8, None), (0, "plain")], ids=str)
def test_a_value_that_is_not_finite_is_written_as_zeros_under_a_key_of_nan(
    twin: Twin, half, norm, value
):
    arguments = draw(twin, 5, 2, 3, 16, half, norm, torch.float32)
    arguments["slots"] = torch.tensor([4, 9, 2, -1, 7]).to(twin.device)
    caches = [arguments[name] for name in ("key_cache", "value_cache")]
    clean = arguments | {
        name: caches[i].clone() for i, name in enumerate(("key_cache", "value_cache"))
    }
    twin("place_qkv").place_qkv(**clean)
    arguments["v"][1, 1, 3] = value
    twin("place_qkv").place_qkv(**arguments)
    for cache, want, mark in zip(
        caches, (clean["key_cache"], clean["value_cache"]), (torch.nan, 0.0), strict=True
    ):
        want = want.flatten(0, 1).clone()
        have = cache.flatten(0, 1)
        row, want[9, 1] = have[9, 1].clone(), 0.0
        have[9, 1] = 0.0
        assert have.equal(want)
        assert row.isnan().any() if math.isnan(mark) else row.eq(0.0).all()
