"""Attention kernels against attention written out with a dense mask in fp64."""

import importlib
import math
from dataclasses import replace

import pytest
import torch

from mtpkit.kernels.ancestors import seen_tokens
from mtpkit.kernels.attention import depth_attention, sequence_attention
from mtpkit.kernels.attention.reference import AttentionWindow
from tests.kernels.conftest import Twin
from tests.kernels.inputs import block_tables, write_history
from tests.kernels.recurrence import relative

WIDTH = 6
HEADS = [(4, 4), (4, 2), (6, 1)]
TOLERANCE = 1e-5
ROUNDING = 1e-6
"""Relative error of fp32 sums over a few hundred positions in another order."""


def dense(q, k, v, mask):
    """q [t, heads, d], k and v [n, kv_heads, d], mask [t, n]: [t, heads, d] in fp64."""
    q = q.double()
    k = k.double()
    v = v.double()
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
    """Keys of depths 1 .. k one after another; depth 1 is seen causally, the later ones at the same
    position."""
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


def make_paged(
    contexts: list[int], new: list[int], block_size: int, kv_heads: int = 2, width: int = WIDTH
):
    """Histories scattered over random blocks of a cache that is NaN elsewhere."""
    generator = torch.Generator().manual_seed(block_size)
    lengths = [context + count for context, count in zip(contexts, new, strict=True)]
    used = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(used) + 5, generator=generator)
    tables = block_tables(order, used, spare=1)
    caches = torch.full((2, len(order), block_size, kv_heads, width), torch.nan)
    histories = []
    for table, length in zip(tables, lengths, strict=True):
        history = torch.randn(2, length, kv_heads, width, generator=generator)
        histories.append(history)
        for cache, entries in zip(caches, history, strict=True):
            write_history(cache, table, entries)
    return caches, tables, histories


def paged(twin, q, caches, tables, contexts, **options):
    """q [R, T, heads, d] through the op of a twin; the result on the CPU."""
    tensors = (t.to(twin.device) for t in (q, *caches, tables, torch.tensor(contexts)))
    return twin("attention").paged_attention(*tensors, **options).cpu()


def prefill(twin, q, caches, tables, contexts, lens, first=0, **options):
    """q [T, heads, d] through the op of a twin; the result on the CPU."""
    start = torch.tensor([0, *lens]).cumsum(0) + first
    tensors = (t.to(twin.device) for t in (q, *caches, tables, torch.tensor(contexts), start))
    return twin("attention").prefill_attention(*tensors, **options).cpu()


def error(out, q, histories, window: AttentionWindow | None = None) -> float:
    """The worst relative error over rows, given out and q [t, heads, d] of each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    errors = []
    for row in zip(out, q, histories, strict=True):
        have, queries, history = (t.to(device) for t in row)
        length = history.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        if window is not None:
            mask &= mask.triu(1 - window.size) | (
                torch.arange(length, device=device) < window.sinks
            )
        mask = mask[-len(queries) :]
        errors.append(relative(have, dense(queries, *history, mask)))
    return max(errors)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_pages(twin, tokens, block_size):
    edge = 2 * block_size - tokens  # ends exactly at a block's edge, and one to either side
    contexts = [0, 1, max(edge - 1, 0), max(edge, 0), max(edge + 1, 0), 17]
    caches, tables, histories = make_paged(contexts, [tokens] * 6, block_size)
    q = torch.randn(len(contexts), tokens, 4, WIDTH)
    assert error(paged(twin, q, caches, tables, contexts), q, histories) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [*HEADS, (36, 2), (9, 1)])
@pytest.mark.parametrize("width", [1, 17, 63])
def test_pages_with_grouped_heads(twin, heads, kv_heads, width):
    caches, tables, histories = make_paged([5, 9], [3, 3], 4, kv_heads, width)
    q = torch.randn(2, 3, heads, width)
    assert error(paged(twin, q, caches, tables, [5, 9]), q, histories) < TOLERANCE


CONTEXTS = [0, 59, 61, 127, 200]


@pytest.mark.parametrize("splits", [None, 1, 2, 7])
def test_long_contexts_are_split(twin, splits):
    """Rows have one split or several; some splits hold no position that a query sees, some hold
    none at all."""
    if twin.name == "reference":
        pytest.skip("does not split")
    caches, tables, histories = make_paged(CONTEXTS, [6] * 5, 5, 1)
    q = torch.randn(5, 6, 3, WIDTH)
    assert error(paged(twin, q, caches, tables, CONTEXTS, splits=splits), q, histories) < TOLERANCE


def test_one_long_row_is_split_in_a_full_batch(twin, monkeypatch):
    if twin.name == "reference":
        pytest.skip("does not split")
    decode = importlib.import_module("mtpkit.kernels.attention.triton")
    monkeypatch.setattr(decode, "busy_programs", lambda: 5)
    monkeypatch.setattr(decode, "_LONG", 64)
    assert decode.split_plan(5, 210, 64) == (4, 1, 64)  # of at most 64 positions each
    caches, tables, histories = make_paged(CONTEXTS, [6] * 5, 5, 1)
    q = torch.randn(5, 6, 3, WIDTH)
    assert error(paged(twin, q, caches, tables, CONTEXTS), q, histories) < TOLERANCE


@pytest.mark.parametrize(("few_lines", "splits"), [(2048, 20), (0, 5)])
def test_splits_are_joined_in_several_rounds(twin, monkeypatch, few_lines, splits):
    if twin.name == "reference":
        pytest.skip("does not split")
    monkeypatch.setattr(
        importlib.import_module("mtpkit.kernels.attention.triton"), "_FEW_LINES", few_lines
    )
    tiles = importlib.import_module("mtpkit.kernels.attention.tile").Tiles(16, 16, 4, 2)
    caches, tables, histories = make_paged([331], [2], 5, 1)
    q = torch.randn(1, 2, 3, WIDTH)
    out = paged(twin, q, caches, tables, [331], splits=splits, tiles=tiles)
    assert error(out, q, histories) < TOLERANCE


@pytest.mark.parametrize("programs", [1, 7, 128, 264, 512, 5000])
def test_splits_hold_every_row(programs):
    """The kernel's use of a plan: its splits cover the row, and there are enough of them."""
    split_plan = importlib.import_module("mtpkit.kernels.attention.triton").split_plan
    for span in (16, 64, 100, 1024, 8192, 8208, 131072):
        splits, fill, longest = split_plan(programs, span, 64)
        assert splits == 1 or programs * splits < 4096 + programs
        for end in {min(end, span) for end in (1, 63, 64, 65, span // 3, span - 1, span)}:
            length = max(min(math.ceil(end / fill), longest), math.ceil(end / splits))
            length = math.ceil(length / 64) * 64
            assert length <= max(1024, math.ceil(span / splits) + 63)
            assert math.ceil(end / length) <= splits


def test_queries_may_be_views_of_a_fused_projection(twin):
    caches, tables, histories = make_paged([5, 9], [3, 3], 4)
    # [R, T, kv_heads, heads / kv_heads, d] beside keys and values
    q = torch.randn(2, 3, 2, 4, WIDTH)[..., :2, :]
    assert not q.is_contiguous()
    out = paged(twin, q, caches, tables, [5, 9])
    assert error(out, q.flatten(2, 3), histories) < TOLERANCE
    # Not to the bit: tiles of both kernels differ, and with them the order in which a machine's
    # matrix products add.
    chunk = prefill(twin, q.flatten(0, 1), caches, tables, [5, 9], [3, 3])
    assert error(chunk.view(out.shape), q.flatten(2, 3), histories) < TOLERANCE
    q = torch.randn(2, 3, 4, 3 * WIDTH)[..., :WIDTH]
    assert error(paged(twin, q, caches, tables, [5, 9]), q, histories) < TOLERANCE


def test_null_rows_are_finite_and_change_nothing(twin):
    """Rows that only fill a batch own a block of their own, and have no context."""
    caches, tables, histories = make_paged([5], [3], 4)
    q = torch.randn(3, 3, 4, WIDTH)
    free = next(block for block in range(caches.shape[1]) if block not in tables)
    caches[:, free] = torch.randn(2, *caches.shape[2:])
    tables = torch.cat([tables, torch.full_like(tables, free).expand(2, -1)])
    out = paged(twin, q, caches, tables, [5, 0, 0])
    assert out.isfinite().all()
    assert error(out[:1], q[:1], histories) < TOLERANCE


WINDOWS = [
    AttentionWindow(1),
    AttentionWindow(3, 1),
    AttentionWindow(7, 4),
    AttentionWindow(40),
    AttentionWindow(64, 64),
    AttentionWindow(33, 70),
]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{window.size}+{window.sinks}")
def test_windows(twin, window, splits):
    """What no query of a row sees may be NaN: whole blocks of it are not read."""
    contexts = [0, 2, 31, 64, 65, 190, 250]
    for tokens in (1, 4):
        caches, tables, histories = make_paged(contexts, [tokens] * len(contexts), 8)
        for table, context in zip(tables, contexts, strict=True):
            unread = table[-(-window.sinks // 64) * 8 : max(0, context + 1 - window.size) // 64 * 8]
            caches[:, unread] = torch.nan
        q = torch.randn(len(contexts), tokens, 4, WIDTH)
        options = dict(splits=splits) if splits and twin.device != "cpu" else {}
        out = paged(twin, q, caches, tables, contexts, window=window, **options)
        assert error(out, q, histories, window) < TOLERANCE


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{window.size}+{window.sinks}")
def test_windows_of_a_prefill(twin, window):
    contexts, lens = [0, 3, 200, 130], [90, 1, 37, 5]
    caches, tables, histories = make_paged(contexts, lens, 8)
    q = torch.randn(sum(lens), 4, WIDTH)
    out = prefill(twin, q, caches, tables, contexts, lens, window=window)
    assert error(out.split(lens), q.split(lens), histories, window) < TOLERANCE
    # One row alone is computed like a decode row.
    out = prefill(twin, q[:90], caches, tables[:1], contexts[:1], lens[:1], window=window)
    assert error([out], [q[:90]], histories[:1], window) < TOLERANCE


@pytest.mark.parametrize("window", WINDOWS[1:], ids=lambda window: f"{window.size}+{window.sinks}")
def test_windows_of_trees(twin, window):
    """A token's position is that of its depth, whatever its place in the tree."""
    contexts = [0, 5, 40, 190]
    parents = [-1, 0, 0, 1, 2, 3]
    masks = torch.zeros(6, dtype=torch.int64)
    for token, parent in enumerate(parents):
        masks[token] = (1 << token) | (masks[parent] if parent >= 0 else 0)
    caches, tables, histories = make_paged(contexts, [6] * 4, 8)
    q = torch.randn(4, 6, 4, WIDTH)
    ancestors = masks.expand(4, -1).to(twin.device)
    out = paged(twin, q, caches, tables, contexts, ancestors=ancestors, window=window)
    own = seen_tokens(masks, 6)
    for row, (context, history) in enumerate(zip(contexts, histories, strict=True)):
        mask = torch.cat([torch.ones(6, context, dtype=torch.bool), own], 1)
        place = torch.arange(context + 6)
        near = context + own.sum(1)[:, None] - 1 - place < window.size
        mask &= near | (place < window.sinks)
        assert relative(out[row], dense(q[row], *history, mask)) < TOLERANCE


def split_of(rows: int, tables: torch.Tensor, block_size: int) -> tuple[int, int, int]:
    """The plan of the Triton twin for fp32 rows of two groups and few queries."""
    decode = importlib.import_module("mtpkit.kernels.attention.triton")
    tiles = decode.decode_tiles(6, WIDTH, torch.float32)
    return decode.split_plan(2 * rows, tables.shape[1] * block_size, tiles.n)


def test_a_row_has_the_same_bits_in_batches_that_are_split_alike(twin):
    """Contexts fill part of a tile, or many tiles."""
    contexts = [5, 300, 9, 170]
    caches, tables, _ = make_paged(contexts, [3] * 4, 4)
    q = torch.randn(4, 3, 4, WIDTH)
    contexts = torch.tensor(contexts)
    together = paged(twin, q, caches, tables, contexts.tolist())
    for row in ([0], [1], [2, 1], [3, 0, 1]):
        assert split_of(len(row), tables, 4) == split_of(4, tables, 4)
        alone = paged(twin, q[row], caches, tables[row], contexts[row].tolist())
        assert torch.equal(alone, together[row])


def test_a_row_is_the_same_but_for_rounding_in_batches_that_are_split_otherwise(twin):
    """A batch that fills the GPU splits its rows less."""
    contexts = [300, 170, *(row % 10 for row in range(38))]
    caches, tables, _ = make_paged(contexts, [3] * 40, 4)
    q = torch.randn(40, 3, 4, WIDTH)
    together = paged(twin, q, caches, tables, contexts)
    for row in (0, 1):
        assert split_of(1, tables, 4) != split_of(40, tables, 4)
        arguments = q[[row]], caches, tables[[row]], contexts[row : row + 1]
        alone = [paged(twin, *arguments)]
        if twin.name != "reference":
            alone += [paged(twin, *arguments, splits=splits) for splits in (1, 2, 7)]
        for out in alone:
            assert relative(out[0], together[row].double()) < ROUNDING


def test_a_wrong_length_or_block_would_be_seen(twin):
    caches, tables, histories = make_paged([6], [2], 4)
    q = torch.randn(1, 2, 4, WIDTH)
    assert error(paged(twin, q, caches, tables, [6]), q, histories) < TOLERANCE
    assert error(paged(twin, q, caches, tables, [5]), q, histories) > 1e-2
    assert error(paged(twin, q, caches, tables[:, [1, 0, 2]], [6]), q, histories) > 1e-2


CHUNKS = {
    "one token": ([7], [1]),
    "mixed": ([0, 5, 31, 16, 0], [17, 1, 63, 3, 2]),
    "equal": ([0, 20, 3], [9, 9, 9]),
    "empty": ([4, 4, 0], [5, 0, 6]),
}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize(("contexts", "lens"), CHUNKS.values(), ids=CHUNKS)
def test_prefill(twin, contexts, lens, heads, kv_heads):
    caches, tables, histories = make_paged(contexts, lens, 4, kv_heads)
    q = torch.randn(sum(lens), heads, WIDTH)
    out = prefill(twin, q, caches, tables, contexts, lens, first=11)
    held = [row for row, count in enumerate(lens) if count]
    chunks = [(out.split(lens)[row], q.split(lens)[row], histories[row]) for row in held]
    assert error(*zip(*chunks, strict=True)) < TOLERANCE


NULLS = {
    "at the end": ([3, 20, -1], [7, 1, 40]),
    "in the middle": ([3, -1, 5, -1], [7, 33, 18, 0]),
    "alone": ([-1], [20]),
    "alone and short": ([-1], [1]),
}


@pytest.mark.parametrize(("contexts", "lens"), NULLS.values(), ids=NULLS)
def test_null_rows_of_a_prefill_are_zero_and_read_nothing(twin, contexts, lens):
    live = [row for row, context in enumerate(contexts) if context >= 0]
    real = [(contexts[row], lens[row]) if row in live else (0, 0) for row in range(len(lens))]
    caches, tables, histories = make_paged(*map(list, zip(*real, strict=True)), 4)
    for row in set(range(len(lens))) - set(live):
        tables[row] = 1 << 40  # no block
    q = torch.randn(sum(lens), 4, WIDTH)
    out, q = (t.split(lens) for t in (prefill(twin, q, caches, tables, contexts, lens), q))
    for row in range(len(lens)):
        if row not in live:
            assert (out[row] == 0).all()
    if live:
        assert error(*([rows[row] for row in live] for rows in (out, q, histories))) < TOLERANCE


@pytest.mark.parametrize("m", [16, 32])
def test_prefill_in_many_tiles(twin, m):
    """Tiles begin and end in the middle of a token's heads, after positions that all queries of a
    tile see."""
    if twin.name == "reference":
        pytest.skip("has no tiles")
    tiles = importlib.import_module("mtpkit.kernels.attention.tile").Tiles(m, 16, 4, 2)
    contexts = [40, 0, 3]
    lens = [12, 30, 7]
    caches, tables, histories = make_paged(contexts, lens, 3, 1, 16)
    q = torch.randn(sum(lens), 3, 16)
    out = prefill(twin, q, caches, tables, contexts, lens, tiles=tiles)
    assert error(out.split(lens), q.split(lens), histories) < TOLERANCE


def test_prefill_of_many_rows(twin):
    lens = [1 + row % 2 for row in range(131)]
    contexts = [row % 5 for row in range(131)]
    caches, tables, histories = make_paged(contexts, lens, 4, 1)
    q = torch.randn(sum(lens), 1, WIDTH)
    out = prefill(twin, q, caches, tables, contexts, lens)
    assert error(out.split(lens), q.split(lens), histories) < TOLERANCE


def low_precision_error(
    twin, rows: int, contexts: list[int], lens: list[int], shape: tuple[int, int, int]
) -> None:
    """The op on bf16 errs at most twice as much as plain PyTorch does; the interpreter multiplies
    fp16 instead."""
    dtype = torch.float16 if twin.name == "interpreter" else torch.bfloat16
    heads, kv_heads, width = shape
    caches, tables, histories = make_paged(contexts, lens, 16, kv_heads, width)
    caches = caches.to(dtype)
    q = torch.randn(sum(lens), heads, width).to(dtype)
    histories = [history.to(dtype) for history in histories]
    plain = prefill(replace(twin, name="reference"), q, caches, tables, contexts, lens)
    bound = 2 * error(plain.split(lens), q.split(lens), histories)
    out = prefill(twin, q, caches, tables, contexts, lens)
    assert error(out.split(lens), q.split(lens), histories) <= bound
    if rows:
        out = paged(twin, q.unflatten(0, (rows, -1)), caches, tables, contexts)
        assert error(out, q.unflatten(0, (rows, -1)), histories) <= bound


def test_low_precision(twin):
    low_precision_error(twin, 2, [70, 20], [4, 4], (4, 2, 17))
    low_precision_error(twin, 0, [20, 3], [30, 1], (4, 1, 16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "contexts", "lens"),
    [
        (1, [3000], [4]),
        (5, [0, 17, 700, 5000, 64], [4] * 5),
        (64, [128 + 7 * row for row in range(64)], [2] * 64),
        (0, [0, 100, 1000], [2000, 513, 1]),
        (0, [0], [4096]),
    ],
    ids=str,
)
def test_low_precision_at_real_sizes(rows, contexts, lens):
    low_precision_error(Twin("cuda", "cuda"), rows, contexts, lens, (32, 8, 128))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(32, 8, 128), (16, 2, 256), (12, 12, 64), (5, 1, 80)]
)
def test_full_precision_at_real_sizes(heads, kv_heads, width):
    twin = Twin("cuda", "cuda")
    contexts = [3, 300, 1500]
    lens = [70, 5, 200]
    caches, tables, histories = make_paged(contexts, lens, 16, kv_heads, width)
    q = torch.randn(sum(lens), heads, width)
    out = prefill(twin, q, caches, tables, contexts, lens)
    assert error(out.split(lens), q.split(lens), histories) < TOLERANCE
    newest = torch.stack([chunk[-5:] for chunk in q.split(lens)])
    before = [context + count - 5 for context, count in zip(contexts, lens, strict=True)]
    assert error(paged(twin, newest, caches, tables, before), newest, histories) < TOLERANCE


@pytest.mark.gpu
def test_blocks_beyond_2_to_the_31_elements():
    """Offsets into large caches need 64 bits."""
    twin = Twin("cuda", "cuda")
    shape = (140_000, 16, 8, 128)
    small, tables, histories = make_paged([40], [4], 16, 8, 128)
    caches = torch.empty(2, *shape, dtype=torch.bfloat16, device="cuda")
    caches[:, -small.shape[1] :] = small.bfloat16()
    far = tables + shape[0] - small.shape[1]
    q = torch.randn(1, 4, 32, 128).bfloat16()
    histories = [history.bfloat16() for history in histories]
    near = paged(twin, q, small.bfloat16(), tables, [40])
    assert error(near, q, histories) < 1e-2
    assert torch.equal(paged(twin, q, caches, far, [40]), near)
    assert torch.equal(prefill(twin, q[0], caches, far, [40], [4]), near[0])
