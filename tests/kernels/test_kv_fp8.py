"""Keys and values in fp8: what is stored, and attention over it, in both twins."""

import math

import pytest
import torch

from mtpkit.kernels.kv_store import KVScales
from mtpkit.kernels.linear import FP8
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative
from tests.kernels.test_attention import dense, make_paged, paged, prefill
from tests.kernels.test_place_qkv import draw
from tests.shared import each

SCALES = [KVScales(), KVScales(0.37, 2.5), KVScales(2.0**-9, 2.0**7)]
TOLERANCE = 1e-5
CODES = torch.arange(256, dtype=torch.uint8).view(FP8).float()
"""All numbers of fp8, and NaN twice."""


def nearest(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The numbers of fp8 nearest to x / scale, searched among all of them; the one with an even
    code where two are as near."""
    numbers = CODES[:127].double()  # 0 .. 448
    quotient = (x.float() * torch.tensor(1 / scale, dtype=torch.float32)).double()
    size = quotient.abs().clamp(max=448)
    low = torch.searchsorted(numbers, size, right=True) - 1
    high = (low + 1).clamp(max=126)
    below = size - numbers[low]
    above = numbers[high] - size
    code = torch.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    found = torch.copysign(numbers[code], quotient)
    return torch.where(x.isfinite(), found, math.nan)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of fp8 hold the same numbers; NaN equals NaN."""
    return torch.equal(*(t.cpu().float().nan_to_num(nan=-1e9) for t in (a, b)))


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stored_numbers_are_the_nearest_ones_and_none_overflows(twin: Twin, scales, dtype):
    ties = (CODES[:126] + CODES[1:127]) / 2
    some = torch.cat(
        [CODES[:127], ties, -ties, torch.randn(400) * torch.logspace(-9, 5, 400), torch.zeros(1)]
    )
    some = torch.cat([some, -some, torch.tensor([464.0, 465, 1e30, -1e30, 3e38, 1e-40])])
    some = some[: len(some) // 12 * 12].view(-1, 3, 4)
    new = torch.stack([some * scales.key, some.flip(0) * scales.value]).to(twin.device, dtype)
    tokens = new.shape[1]
    caches = torch.full((2, tokens, 2, 3, 4), 5.0).to(FP8).to(twin.device)
    slots = torch.randperm(2 * tokens)[:tokens]
    slots[3] = -1
    twin("kv_store").store_kv(*new, *caches, slots.to(twin.device), scales)
    written = slots >= 0
    for cache, numbers, scale in zip(caches, new, scales, strict=True):
        have = cache.cpu().flatten(0, 1)
        want = nearest(numbers.cpu(), scale).float().to(FP8)
        assert same_numbers(have[slots[written]], want[written])
        assert have[slots[written]].float().abs().max() == 448
        rest = torch.ones(2 * tokens, dtype=torch.bool)
        rest[slots[written]] = False
        assert (have[rest].float() == 5).all()


@each("key", [math.nan, math.inf, -math.inf])
@each("value", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("scales", SCALES[:2], ids=str)
def test_what_is_not_finite_stays_a_key_of_nan(twin: Twin, key, value, scales):
    """Clamping must not make a number of infinity, of which the engine would learn nothing."""
    new = torch.randn(2, 2, 3, 4)
    new[0, 0, 1, 2] = key
    new[1, 1, 2, 3] = value
    caches = torch.zeros(2, 2, 2, 3, 4).to(FP8).to(twin.device)
    slots = torch.tensor([1, 2]).to(twin.device)
    twin("kv_store").store_kv(*new.to(twin.device), *caches, slots, scales)
    keys, values = caches.cpu().float().flatten(1, 2)
    assert keys[1, 1, 2].isnan() and keys[1].isnan().sum() == 1
    assert not values.isnan().any()
    if math.isfinite(value):
        assert not keys[2].isnan().any()
    else:
        assert keys[2, 2].isnan().all() and (values[2, 2] == 0).all()


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "half", "norm", "kept"),
    [
        ((5, 2, 3, 16), 4, "plain", None),
        ((1, 2, 8, 32), 16, "around zero", None),
        ((6, 1, 1, 12), 3, None, 2),
        ((4, 2, 2, 8), 0, None, 1),
    ],
    ids=str,
)
def test_place_qkv_stores_what_it_would_store_unrounded(
    twin: Twin, sizes, half, norm, kept, scales
):
    """The queries are the same as with another cache."""
    arguments = draw(twin, *sizes, half, norm, torch.float32, kept)
    exact = arguments | {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    q = twin("place_qkv").place_qkv(**exact)
    rounded = arguments | {name: arguments[name].to(FP8) for name in ("key_cache", "value_cache")}
    arguments["k"][0, 0, 0] = 1e9  # far beyond the range
    exact_after = arguments | {name: exact[name].clone() for name in ("key_cache", "value_cache")}
    q = twin("place_qkv").place_qkv(**exact_after)
    assert torch.equal(twin("place_qkv").place_qkv(**rounded, scales=scales), q)
    slots = arguments["slots"].cpu()
    for name, scale in zip(("key_cache", "value_cache"), scales, strict=True):
        want = exact_after[name].cpu().flatten(0, 1)
        have = rounded[name].cpu().flatten(0, 1)
        places = slots[slots >= 0]
        assert same_numbers(have[places], nearest(want[places], scale).float().to(FP8))
        rest = torch.ones(len(have), dtype=torch.bool)
        rest[places] = False
        assert (have[rest].float() == 7).all()


def rounded(caches: torch.Tensor, histories, scales: KVScales):
    """Caches [2, ...] in fp8, NaN where they were, and the histories that they stand for."""
    factors = torch.tensor(scales).view(2, *[1] * 4)
    codes = torch.where(caches.isnan(), math.nan, (caches / factors).clamp(-448, 448)).to(FP8)
    meant = [
        (one / factors[:, 0]).clamp(-448, 448).to(FP8).float() * factors[:, 0] for one in histories
    ]
    return codes, meant


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_pages(twin: Twin, tokens, block_size, scales):
    """Prompts of one token, of a block and of a block and one, and steps of more than a block."""
    contexts = [0, 1, max(block_size - tokens, 0), max(block_size + 1 - tokens, 0), 17]
    caches, tables, histories = make_paged(contexts, [tokens] * 5, block_size)
    codes, meant = rounded(caches, histories, scales)
    q = torch.randn(len(contexts), tokens, 4, caches.shape[-1]) / scales.key
    out = paged(twin, q, codes, tables, contexts, scales=scales)
    for row, history in enumerate(meant):
        mask = torch.ones(history.shape[1], history.shape[1], dtype=torch.bool).tril()[-tokens:]
        assert relative(out[row], dense(q[row], *history, mask)) < TOLERANCE
        assert relative(out[row], dense(q[row], *histories[row], mask)) > 1e-3


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_split_rows_and_trees(twin: Twin, splits, scales):
    """A tree of three tokens: the second and the third are children of the first."""
    caches, tables, histories = make_paged([37], [3], 4)
    codes, (history,) = rounded(caches, histories, scales)
    q = torch.randn(1, 3, 4, caches.shape[-1]) / scales.key
    masks = torch.tensor([[0b001, 0b011, 0b101]]).to(twin.device)
    options = {} if twin.name == "reference" else {"splits": splits}
    out = paged(twin, q, codes, tables, [37], ancestors=masks, scales=scales, **options)
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[:, 37:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    assert relative(out[0], dense(q[0], *history, mask)) < TOLERANCE


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("lens", [[1], [4, 0, 5], [1, 9, 33]], ids=str)
def test_chunks(twin: Twin, lens, scales):
    contexts = [7, 0, 3][: len(lens)]
    caches, tables, histories = make_paged(contexts, lens, 4)
    codes, meant = rounded(caches, histories, scales)
    q = torch.randn(sum(lens), 4, caches.shape[-1]) / scales.key
    out = prefill(twin, q, codes, tables, contexts, lens, scales=scales)
    for have, queries, history in zip(out.split(lens), q.split(lens), meant, strict=True):
        length = history.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[length - len(queries) :]
        if len(queries):
            assert relative(have, dense(queries, *history, mask)) < TOLERANCE


def test_a_key_of_nan_reaches_the_queries_that_see_it(twin: Twin):
    caches, tables, histories = make_paged([5], [3], 4)
    codes, _ = rounded(caches, histories, SCALES[1])
    # the key of the second of the three new tokens, at position 6, of the first of two groups
    codes[0, tables[0, 1], 2, 0] = math.nan
    out = paged(twin, torch.randn(1, 3, 4, caches.shape[-1]), codes, tables, [5], scales=SCALES[1])
    broken = out[0].isnan().any(-1)
    assert broken.tolist() == [[False] * 4, [True, True, False, False], [True, True, False, False]]
