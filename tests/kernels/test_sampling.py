"""Sampling: known answers of the generator, filters against definitions, draws against
distributions."""

import pytest
import torch
from scipy import stats

from mtpkit.kernels import NO_TOKEN, sampling
from mtpkit.kernels.sampling import cut

# NumPy's, under the interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


def run(twin, name, *args):
    """Run an op of a twin with tensors on the twin's device; returns the result on the CPU."""
    on_device = (arg.to(twin.device) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return getattr(twin("sampling"), name)(*on_device).cpu()


def logits(rows=7, vocab_size=50, scale=3.0, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def numbers(count, seed=0):
    return sampling.uniform(torch.arange(count) + seed, torch.arange(count) % 7, 0)


def distribution(row, temperature, top_k=None, top_p=None, min_p=None):
    """The definition in float64, by sorting one row [V]: probabilities, and how far each token is
    from top-p's edge."""
    margin = torch.ones(len(row), dtype=torch.float64)
    if temperature == 0:
        return torch.zeros(len(row), dtype=torch.float64).scatter(
            0, row.argmax(-1, keepdim=True), 1
        ), margin
    row = row.double() / temperature
    if min_p is not None:
        mass = row.softmax(-1)
        row = row.masked_fill(mass < min_p * mass.max(), -torch.inf)
    if top_k is not None:
        row = row.masked_fill(row < row.sort(descending=True).values[top_k - 1], -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = row.sort(descending=True, stable=True)
        mass = ordered.softmax(-1)
        before = mass.cumsum(-1) - mass
        margin[order] = (before - top_p).abs()
        row = torch.empty_like(row).scatter(
            0, order, ordered.masked_fill(before >= top_p, -torch.inf)
        )
    return row.softmax(-1), margin


def check(twin, rows, temperature, top_k=None, top_p=None, min_p=None):
    """Probabilities follow the definition, and `sample_logits` draws the token that their
    cumulative sum gives."""
    count = len(rows)
    temperatures = (
        torch.tensor(temperature)
        if isinstance(temperature, list)
        else torch.full((count,), temperature)
    )
    filters = [
        None if f is None else torch.as_tensor(f).expand(count) for f in (top_k, top_p, min_p)
    ]
    got = run(twin, "probabilities", rows, temperatures, *filters).double()
    for i in range(0, count, max(1, count // 8)):
        row = rows[i].float()
        want, margin = distribution(
            row, temperatures[i].item(), *(None if f is None else f[i].item() for f in filters)
        )
        moved = (got[i] > 0) != (want.float() > 0)
        assert not moved[margin > 2e-6].any()
        if not moved.any():
            torch.testing.assert_close(got[i], want, rtol=1e-5, atol=1e-30)
    uniforms = numbers(count)
    tokens = run(twin, "sample_logits", rows, temperatures, *filters, uniforms)[:, None]
    after = got.cumsum(-1).gather(1, tokens)[:, 0]
    drawn = got.gather(1, tokens)[:, 0]
    assert (drawn > 0).all()
    assert (after - drawn - 1e-6 < uniforms).all() and (uniforms < after + 1e-6).all()
    assert ((got.sum(-1) - 1).abs() < 1e-6).all()
    return got


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # Random123's known answers for philox4x32-10
        (0, [0] * 4, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, [0xFFFFFFFF] * 4, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            0x299F31D0_A4093822,
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(key, counter, words):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert [
        int(word) for word in sampling.reference.philox(torch.tensor([key]), (c0, c1, c2, c3))
    ] == words


def test_uniforms_depend_on_their_own_row_alone_and_are_uniform():
    seeds = torch.arange(100).repeat_interleave(200)
    positions = torch.arange(200).repeat(100)
    together = sampling.uniform(seeds, positions, 0)
    assert torch.equal(
        together[4321:4322], sampling.uniform(seeds[4321:4322], positions[4321:4322], 0)
    )
    assert stats.kstest(together.numpy(), "uniform").pvalue > 1e-3
    other = sampling.uniform(seeds, positions, 1)
    for shifted in (other, together.roll(1), together.roll(200)):
        assert abs(stats.pearsonr(together.numpy(), shifted.numpy()).statistic) < 0.03


@pytest.mark.parametrize("count", [0, 1, 3, 2500])
@pytest.mark.parametrize("stream", [0, 1, 2, 2**31 - 1])
def test_uniforms_are_the_same_bits_everywhere(twin, count, stream):
    seeds = torch.randint(-(2**63), 2**63 - 1, (count, 2))[:, 0]
    positions = torch.randint(0, 2**40, (count, 3))[:, 1]
    assert torch.equal(
        run(twin, "uniform", seeds, positions, stream), sampling.uniform(seeds, positions, stream)
    )


def test_branches_of_a_position_have_numbers_of_their_own(twin):
    """No branches means branch 0; a branch is the last word of philox's counter."""
    seeds = torch.tensor([5, 5, 5, 9])
    positions = torch.tensor([7, 7, 7, 7])
    branches = torch.tensor([0, 1, 2**32 - 1, 1])
    got = run(twin, "uniform", seeds, positions, 2, branches)
    assert got[0] == sampling.uniform(seeds, positions, 2)[0] and len(got.unique()) == 4
    zeros = torch.zeros_like(positions)
    high, low, _, _ = sampling.reference.philox(seeds, (positions, zeros, zeros + 2, branches))
    assert torch.equal(got, ((high << 16) + (low >> 16)).double() / 2.0**48)
    assert torch.equal(got, sampling.uniform(seeds, positions, 2, branches))


@pytest.mark.parametrize("vocab_size", [1, 3, 17, 63, 500, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_probabilities_are_a_softmax(twin, vocab_size, dtype):
    check(twin, logits(3, vocab_size).to(dtype), [0.7, 1.0, 2.5])


def test_zero_temperature_is_certain_in_a_mixed_batch(twin):
    rows = logits().round()  # the first of equal ones is the best
    temperature = [0.0, 1.0, 0.0, 0.5, 1.0, 2.0, 0.0]
    probs = check(twin, rows, temperature, top_k=4)
    assert torch.equal(probs.max(-1).values == 1, torch.tensor(temperature) == 0)
    assert torch.equal(check(twin, rows, [0.0] * 7).argmax(-1), rows.argmax(-1))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, None, None),
        (None, 0.6, None),
        (None, None, 0.2),
        (8, 0.7, 0.05),
        (40, 0.999, None),
        (None, 1e-3, 1e-3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_keep_what_their_definitions_keep(twin, top_k, top_p, min_p, dtype):
    check(twin, logits(4).to(dtype), [1.0, 0.7, 0.0, 1.5], top_k, top_p, min_p)


@pytest.mark.parametrize(("vocab_size", "top_k"), [(1, 1), (3, 2), (17, 17), (63, 1), (5000, 40)])
def test_filters_at_awkward_sizes(twin, vocab_size, top_k):
    check(twin, logits(2, vocab_size), 1.0, top_k, 0.9, 0.01)


def test_filters_of_one_row_do_not_touch_another(twin):
    plain = run(twin, "probabilities", logits(), torch.ones(7))
    top_k = torch.full((7,), 50)
    top_p = torch.ones(7)
    top_k[2], top_p[4] = 3, 0.5
    mixed = check(twin, logits(), 1.0, top_k, top_p, torch.zeros(7))
    untouched = [0, 1, 3, 5, 6]
    torch.testing.assert_close(mixed[untouched].float(), plain[untouched])
    assert int((mixed[2] > 0).sum()) == 3 and int((mixed[4] > 0).sum()) < 50


def test_equal_logits(twin):
    """Top-k keeps all tokens that equal the k-th; top-p takes equal ones in the order of their
    indices."""
    row = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -0.0, 2.0, 0.0]])
    kept = check(twin, row, 1.0, top_k=3)[0] > 0
    assert kept.nonzero()[:, 0].tolist() == [1, 2, 3, 4, 5, 7]
    mass = row[0].softmax(-1)
    for count in range(1, 5):
        top_p = float(2 * mass[1] + (count - 0.5) * mass[2])
        kept = check(twin, row, 1.0, top_p=top_p)[0] > 0
        assert kept.nonzero()[:, 0].tolist() == sorted([1, 3, *[2, 4, 5, 7][:count]])
    check(twin, row, 1.0, top_k=8)  # 0 and -0 are equal


def test_tokens_that_are_ruled_out(twin):
    rows = logits(3, 200)
    rows[:, torch.arange(200) % 3 > 0] = -torch.inf
    for filters in (
        {},
        {"top_k": 100},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.01, "top_p": 0.9},
    ):
        probs = check(twin, rows, [1.0, 0.0, 2.0], **filters)
        assert not probs[:, torch.arange(200) % 3 > 0].any()


@pytest.mark.parametrize(
    ("kind", "filters"),
    [
        ("flat", {"top_p": 0.9}),
        ("flat", {"top_k": 300, "top_p": 0.8, "min_p": 0.02}),
        ("peaked", {"top_p": 0.9999}),
        ("offset", {"top_p": 0.7}),
        ("bf16", {"top_p": 0.9}),
        ("sixteenths", {"top_p": 0.6}),
        ("sorted", {"top_p": 0.9}),
        ("equal", {"top_p": 0.77}),
        ("constant", {"top_p": 0.77}),
        ("ruled out", {"top_k": 300, "top_p": 0.9}),
        ("huge", {"top_k": 400, "top_p": 0.99}),
        ("flat", {"min_p": 0.001}),
        ("clumped", {"top_k": 234}),
    ],
)
def test_rows_that_do_not_fit_the_buffer(twin, monkeypatch, kind, filters):
    """A cut that few groups do not bound is found by passes over the row, whatever the logits
    are."""
    monkeypatch.setattr(cut, "FEW", cut.Tuning(room=128, tile=128, pivot_tile=64, num_warps=4))
    rows = logits(1, 600, scale=1.0)
    if kind == "peaked":
        rows *= 4
    elif kind == "offset":
        rows += 100
    elif kind == "bf16":
        rows = rows.bfloat16()
    elif kind == "sixteenths":
        rows = (rows * 16).round() / 16
    elif kind == "clumped":  # more tokens around the cut than their column of the buffer holds
        rows[:, torch.arange(600) % 128 // 8 == 3] = 0.3 + 1e-3 * torch.randn(1, 40)
    elif kind == "sorted":
        rows = rows.sort().values
    elif kind == "equal":
        rows = rows.round()
    elif kind == "constant":
        rows[:] = 0.5
    elif kind == "ruled out":
        rows[:, 150:] = -torch.inf
    elif kind == "huge":
        rows[:, :200], rows[:, 5] = -1e30, -3e38
    check(twin, rows, 1.3, **filters)


def test_rows_apart_in_memory(twin):
    wide = logits(3, 128)
    temperature = torch.tensor([0.5, 1.0, 1.0]).to(twin.device)
    top_k = torch.full((3,), 9).to(twin.device)
    uniforms = numbers(6)[::2].to(twin.device)
    for view in (wide[:, 5:70], wide.T.contiguous().T[:, :60]):
        plain = view.contiguous().to(twin.device)
        view = view.to(twin.device)
        op = twin("sampling")
        assert torch.equal(
            op.probabilities(view, temperature, top_k), op.probabilities(plain, temperature, top_k)
        )
        tokens = op.sample_logits(view, temperature, top_k, None, None, uniforms)
        assert torch.equal(
            tokens, op.sample_logits(plain, temperature, top_k, None, None, uniforms.clone())
        )
        assert torch.equal(op.sample(view.exp(), uniforms), op.sample(plain.exp(), uniforms))


def test_rows_that_pad_a_batch_draw_a_token_of_the_vocabulary_or_none(twin, monkeypatch):
    """Padding rows may hold NaN logits and temperatures; other rows do not change."""
    if twin.name == "reference":
        pytest.skip("batches are padded for CUDA graphs")
    monkeypatch.setattr(cut, "FEW", cut.Tuning(room=128, tile=128, pivot_tile=64, num_warps=4))
    rows = logits(5, 200)
    uniforms = numbers(5)
    temperature = torch.tensor([1.0, 0.0, 1.0, torch.nan, 0.0])
    poisoned = rows.clone()
    poisoned[2, ::2], poisoned[4] = torch.nan, torch.nan
    top_k = torch.full((5,), 150)
    top_p = torch.full((5,), 0.9)
    for filters in ((None, None, None), (top_k, top_p, 0 * top_p)):
        clean = run(
            twin,
            "sample_logits",
            rows[:2],
            temperature[:2],
            *(f if f is None else f[:2] for f in filters),
            uniforms,
        )
        tokens = run(twin, "sample_logits", poisoned, temperature, *filters, uniforms)
        assert (
            torch.equal(tokens[:2], clean)
            and (tokens[[2, 4]] == NO_TOKEN).all()
            and -1 <= tokens[3] < 200
        )
    probs = run(twin, "probabilities", poisoned, temperature)
    assert torch.equal(probs[:2], run(twin, "probabilities", rows, temperature)[:2])


FILTERS = [(None, None, None), (20, 0.9, 0.05), (150, 0.99, 0.0)]
HEATS = [0.0, 1e-5, 1.0, 1e30]
PLACES = [(200, 0), (200, 199), (5000, 4500)]  # vocabulary, invalid token


# Each two of a filter, a temperature and a place meet once: no kernel takes all three together in a
# way of its own.
@pytest.mark.parametrize("heat", range(4))
@pytest.mark.parametrize("filters", range(3))
def test_no_token_is_taken_from_invalid_logits(twin, monkeypatch, filters, heat):
    """A row is invalid with one NaN or +inf anywhere, or -inf everywhere; no filter or temperature
    changes that."""
    vocab_size, place = PLACES[(filters + heat) % 3]
    tile = 128 if vocab_size == 200 else 1024  # two or five tiles a row, the last one not whole
    monkeypatch.setattr(cut, "FEW", cut.Tuning(room=tile, tile=tile, pivot_tile=tile, num_warps=4))
    x = logits(8, vocab_size)
    x[1, place], x[2, place], x[3], x[4, place] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x[5, place], x[6] = 3e38, -3e38
    x[7, :] = -torch.inf
    x[7, place] = 1.0
    wrong = [False, True, True, True, False, False, False, False]
    settings = (None if f is None else torch.full((8,), f) for f in FILTERS[filters])
    arguments = (x, torch.full((8,), HEATS[heat]), *settings)
    tokens = run(twin, "sample_logits", *arguments, numbers(8))
    assert (tokens == NO_TOKEN).tolist() == wrong and (
        (tokens >= NO_TOKEN) & (tokens < vocab_size)
    ).all()
    assert tokens[7] == place
    probs = run(twin, "probabilities", *arguments)
    assert probs.isnan().any(-1).tolist() == probs.isnan().all(-1).tolist() == wrong
    assert (run(twin, "sample", probs, numbers(8)) == NO_TOKEN).tolist() == wrong


NO_DRAFTS = torch.zeros(0, 0, dtype=torch.int64)


def test_penalties_neither_hide_nor_feign_invalid_logits(twin):
    x = torch.tensor(
        [[2.0, -2.0, 0.0, 3e38], [torch.nan, 1, 1, 1], [torch.inf, 1, 1, 1], [-torch.inf, 1, 1, 1]]
    )
    seen = torch.ones(4, 4, dtype=torch.bool)
    counts = torch.full((4, 4), 9)
    for repetition in (0.0, 1e-45, 1e-30, 1e30, torch.inf):
        penalties = (torch.full((4,), value) for value in (repetition, 2.0, -2.0))
        got = run(twin, "apply_penalties", x, seen, counts, *penalties, torch.arange(4), NO_DRAFTS)
        assert torch.equal(got.isfinite(), x.isfinite())
        assert got[1, 0].isnan() and got[2, 0] == torch.inf and got[3, 0] == -torch.inf


def test_penalties_follow_their_definitions(twin):
    rows = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    prompt = torch.tensor([[True, True, False, False]])
    counts = torch.tensor([[0, 3, 2, 0]])
    one = torch.ones(1)
    slots = torch.zeros(1, dtype=torch.int64)
    got = run(
        twin,
        "apply_penalties",
        rows,
        prompt,
        counts,
        2 * one,
        0.5 * one,
        0.25 * one,
        slots,
        NO_DRAFTS,
    )
    assert got.tolist() == [[1.0, -4.0 - 1.5 - 0.25, 0.5 - 1.0 - 0.25, 0.5]]
    same = run(
        twin, "apply_penalties", rows, prompt, counts, one, 0 * one, 0 * one, slots, NO_DRAFTS
    )
    assert torch.equal(same, rows)


@pytest.mark.parametrize("vocab_size", [1, 63, 1500])
@pytest.mark.parametrize("counts_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("rows", "depths"), [(0, 0), (0, 3), (5, 0), (3, 2), (2, 7)])
def test_penalties_of_a_mixed_batch(twin, vocab_size, counts_dtype, rows, depths):
    """Decode rows with drafts, then chunks; slots in any order, the last one for two null rows."""
    slots = torch.tensor([3, 0, 4, -1, -1])[:rows].repeat_interleave(1 + depths)
    slots = torch.cat([slots, torch.tensor([1, 2])])
    x = logits(len(slots), vocab_size).bfloat16()
    prompt = torch.rand(6, vocab_size) < 0.3
    counts = torch.randint(0, 3, (6, vocab_size)).to(counts_dtype)
    penalties = torch.tensor(
        [[1, 1.3, 1, 1, 0.8, 1], [0, 0, 0.5, 0, -0.2, 0], [0, 0, 0, 0.7, 0.1, 0]]
    )
    # Few tokens: a draft may come twice. -1: a token of another rank.
    drafts = torch.randint(-1, min(vocab_size, 3), (rows, 2 + depths))[:, 2:]
    got = run(twin, "apply_penalties", x, prompt, counts, *penalties, slots, drafts)
    for n, slot in enumerate(slots.tolist()):
        row, index = divmod(n, 1 + depths) if n < rows * (1 + depths) else (0, 0)
        before = drafts[row, :index] if index else NO_DRAFTS.flatten()
        seen = counts[slot] + torch.bincount(before[before >= 0], minlength=vocab_size)
        repetition, frequency, presence = penalties[:, slot].tolist()
        want = x[n].double()
        factor = torch.where(prompt[slot] | (seen > 0), repetition, 1.0)
        want = (
            torch.where(want > 0, want / factor, want * factor)
            - frequency * seen
            - presence * (seen > 0)
        )
        torch.testing.assert_close(got[n].double(), want, rtol=1e-6, atol=1e-6)
    plain = slots % 6 == 0
    assert got.dtype == torch.float32 and torch.equal(got[plain], x[plain].float())


def test_draws_follow_the_weights_and_never_take_a_zero(twin):
    draws = 80 if twin.name == "interpreter" else 20_000
    weights = torch.tensor([0.0, 0.3, 0.0, 1.0, 0.7, 0.0])
    uniforms = sampling.uniform(torch.arange(draws), torch.zeros(draws, dtype=torch.int64), 0)
    for name, arguments in (
        ("sample", (weights.expand(draws, -1),)),
        ("sample_logits", (weights.log().expand(draws, -1), torch.ones(draws), None, None, None)),
    ):
        counts = torch.bincount(run(twin, name, *arguments, uniforms), minlength=6)
        assert counts[weights == 0].sum() == 0
        drawn = weights > 0
        assert (
            stats.chisquare(counts[drawn].numpy(), (weights[drawn] / 2 * draws).numpy()).pvalue
            > 1e-3
        )


@pytest.mark.parametrize("vocab_size", [1, 17, 63, 5000, 9000])
def test_draws_invert_the_cumulative_distribution(twin, vocab_size):
    weights = torch.rand(6, vocab_size) ** 8 * (torch.rand(6, vocab_size) < 0.5)
    weights[:, -1] += 0.1
    uniforms = numbers(6)
    cumulative = weights.double().cumsum(-1)
    want = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(-1)
    assert torch.equal(run(twin, "sample", weights, uniforms), want)


def test_a_number_on_a_boundary_draws_the_token_after_it(twin):
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]).expand(4, -1)
    assert run(twin, "sample", weights, uniforms).tolist() == [0, 2, 4, 5]
    for top_k in (None, torch.full((4,), 4)):
        tokens = run(
            twin, "sample_logits", weights.log(), torch.ones(4), top_k, None, None, uniforms
        )
        assert tokens.tolist() == [0, 2, 4, 5]


def test_the_extreme_numbers_draw_the_first_and_the_last_token(twin):
    weights = torch.rand(1, 9000, generator=torch.Generator().manual_seed(0)) * (
        torch.arange(9000) % 3 == 1
    )
    first, last = weights[0].nonzero()[[0, -1], 0]
    for number, token in ((0.0, first), (1 - 2.0**-48, last)):
        uniform = torch.full((1,), number, dtype=torch.float64)
        assert run(twin, "sample", weights, uniform) == token
        for top_p in (None, torch.full((1,), 0.999999)):
            drawn = run(
                twin, "sample_logits", weights.log(), torch.ones(1), None, top_p, None, uniform
            )
            assert weights[0, drawn] > 0 and (top_p is not None or drawn == token)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("rows", [3, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary(twin, scale, rows, dtype):
    if twin.name != "cuda":
        pytest.skip("takes too long")
    x = (torch.randn(rows, 131072) * scale).to(dtype)
    for filters in (
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 20_000},
    ):
        check(twin, x, 0.8, **filters)


@pytest.mark.gpu
def test_draws_can_be_captured(device):
    if device == "cpu":
        pytest.skip("has no graphs")
    x = logits(5, 5000).to(device)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0, 2.0], device=device)
    top_k = torch.full((5,), 40, device=device)
    top_p = torch.full((5,), 0.9, device=device)
    uniforms = numbers(5).to(device)
    arguments = (x, temperature, top_k, top_p, None, uniforms)
    want = sampling.sample_logits(*arguments)
    _ = sampling.probabilities(*arguments[:5])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling.sample_logits(*arguments)
        probs = sampling.probabilities(*arguments[:5])
    tokens.zero_()
    graph.replay()
    assert torch.equal(tokens, want)
    torch.testing.assert_close(
        probs, sampling.reference.probabilities(*arguments[:5]), rtol=1e-5, atol=1e-6
    )
