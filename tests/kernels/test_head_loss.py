"""The passes over a chunk of logits against autograd of the definitions in fp64."""

import itertools

import pytest
import torch

from mtpkit.kernels.head_loss.slices import (
    BASE_TOTAL,
    NUM_STATISTICS,
    TOTAL,
    draft_tokens,
    fold,
    log_probs,
    matches,
    number_tokens,
    row_losses,
)
from tests.shared import each

pytestmark = [  # the interpreter's loops, and lanes that are behind the row
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]

KINDS = ["kl", "tv", "ce"]
SHAPES = [(1, 1, 1), (1, 4, 63), (3, 5, 130), (2, 7, 500)]
"""Depths, positions, vocabulary; the blocks below hold 256 logits."""
PADDING = 3
"""Elements between rows."""
TOLERANCE = 2e-6
"""Error in fp32 relative to the largest number."""


@pytest.fixture(autouse=True)
def small_blocks(twin, monkeypatch):
    """Make rows take several blocks though the shapes are small."""
    if twin.name == "interpreter":
        monkeypatch.setattr(twin("head_loss"), "BLOCK", 256)


def make_logits(depths, positions, vocab, dtype=torch.float32, spread=2.0):
    """Teacher, students, mask and targets; every depth leaves out some positions, and one position
    has no depth."""
    mask = torch.rand(depths, positions) < 0.7
    mask[:, positions // 2] = positions == 1
    teacher = torch.randn(positions, vocab)
    students = torch.randn(int(mask.sum()), vocab)
    return (
        (teacher * spread).to(dtype),
        (students * spread).to(dtype),
        mask,
        torch.randint(vocab, (positions,)),
    )


def definition(teacher, students, mask, targets, kind, temperature=1.0, top_k=0):
    """Losses [S] and gradient [S, V] in fp64."""
    rows = mask.nonzero()[:, 1]
    teacher = teacher.double()[rows]
    students = students.double().requires_grad_()
    if top_k:
        floor = teacher.topk(top_k).values[:, -1:]
        teacher = teacher.where(teacher >= floor, -torch.inf)
    base = (teacher / temperature).log_softmax(-1)
    log_probs = (students / temperature).log_softmax(-1)
    if kind == "kl":
        losses = (base.exp() * (base.where(base.isfinite(), 0) - log_probs)).sum(
            -1
        ) * temperature**2
    elif kind == "tv":
        losses = (base.exp() - log_probs.exp()).abs().sum(-1) / 2
    else:
        losses = torch.nn.functional.nll_loss(log_probs, targets[rows], reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), students)[0]


def in_buffer(logits, device):
    """Copy the numbers into rows with NaN behind each."""
    spread = torch.full(
        (len(logits), logits.shape[1] + PADDING), torch.nan, dtype=logits.dtype, device=device
    )
    spread[:, : logits.shape[1]] = logits.to(device)
    return spread[:, : logits.shape[1]]


def compute(twin, teacher, students, mask, targets, kind, temperature=1.0, top_k=0, cuts=()):
    """Losses, gradient and matches, with the vocabulary cut into slices as ranks hold it."""
    floor = teacher.topk(top_k).values[:, -1].to(twin.device) if top_k else None
    edges = [0, *cuts, teacher.shape[1]]
    losses = []
    buffers = []
    own = []
    for first, last in itertools.pairwise(edges):
        base, buffer = (in_buffer(part[:, first:last], twin.device) for part in (teacher, students))
        place = mask.to(twin.device), (targets - first).to(twin.device)
        losses.append(twin("head_loss").HeadLoss(base, buffer, *place, kind, temperature, floor))
        buffers.append(buffer)
        own.append(number_tokens(fold(losses[-1].statistics(), kind, temperature), first))
    whole = fold(torch.stack(own), kind, temperature)
    pull = None
    if kind == "tv":
        values, pull = torch.stack([loss.overlap(whole).sum(0) for loss in losses]).sum(0)
    else:
        values = row_losses(whole, kind, temperature)
    for loss, buffer in zip(losses, buffers, strict=True):
        loss.gradient_(whole, pull)
        behind = buffer.as_strided((len(buffer), PADDING), buffer.stride(), buffer.shape[1])
        assert behind.isnan().all(), "written past the row"
    return values.cpu(), torch.cat(buffers, 1).cpu(), matches(whole).cpu()


def error(have, want):
    return (
        ((have.double() - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()
        if want.numel()
        else 0.0
    )


def assert_right(twin, inputs, kind, **settings):
    want, want_gradient = definition(*inputs, kind, **settings)
    have, gradient, _ = compute(twin, *inputs, kind, **settings)
    assert error(have, want) < TOLERANCE and error(gradient, want_gradient) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradient(twin, shape, kind):
    assert_right(twin, make_logits(*shape), kind)


@pytest.mark.parametrize("cut", [None, 250])
def test_overlap_and_probabilities_from_the_statistics_of_kl(twin, cut):
    teacher, students, mask, targets = make_logits(2, 5, 500)
    losses = []
    own = []
    for first, last in itertools.pairwise([0, *([cut] if cut else []), 500]):
        parts = (in_buffer(part[:, first:last], twin.device) for part in (teacher, students))
        losses.append(
            twin("head_loss").HeadLoss(*parts, mask.to(twin.device), targets.to(twin.device), "kl")
        )
        own.append(number_tokens(fold(losses[-1].statistics(), "kl"), first))
    whole = fold(torch.stack(own), "kl")
    distances = torch.stack([loss.overlap(whole).sum(0) for loss in losses]).sum(0)[0].cpu()
    assert error(distances, definition(teacher, students, mask, targets, "tv")[0]) < TOLERANCE
    rows = mask.nonzero()[:, 1]
    each = torch.arange(len(students))
    drafts = draft_tokens(whole).cpu()
    assert torch.equal(drafts, students.argmax(-1))
    have = log_probs(whole.cpu(), students[each, drafts], teacher[rows, drafts])
    want = (
        students.double().log_softmax(-1)[each, drafts],
        teacher.double().log_softmax(-1)[rows, drafts],
    )
    assert all(error(*pair) < TOLERANCE for pair in zip(have, want, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 17])
def test_temperature_and_top_k(twin, temperature, top_k):
    inputs = make_logits(2, 4, 300)
    assert_right(twin, inputs, "kl", temperature=temperature, top_k=top_k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(250,), (64, 65, 400)])
def test_slices_fold_into_the_whole(twin, kind, cuts):
    inputs = make_logits(2, 4, 500)
    temperature, top_k = (2.0, 9) if kind == "kl" else (1.0, 0)
    whole = compute(twin, *inputs, kind, temperature, top_k)
    folded = compute(twin, *inputs, kind, temperature, top_k, cuts)
    want = definition(*inputs, kind, temperature, top_k)
    for have, same, right in zip(folded[:2], whole[:2], want, strict=True):
        assert error(have, right) < TOLERANCE and error(same, right) < TOLERANCE
    assert torch.equal(folded[2], whole[2])


@pytest.mark.parametrize("cuts", [(), (200,)])
def test_matches_take_the_first_of_equals(twin, cuts):
    """The best token of each teacher row is 130 and 260, of the students' rows the first of the
    places named."""
    places = [(130,), (130, 260), (260,), (5, 130), (129, 130), (131,), (130, 131, 299)]
    teacher = torch.randn(1, 300).clamp(max=2).repeat(7, 1)
    students = torch.randn(7, 300).clamp(max=2)
    teacher[:, [130, 260]] = 4.0
    for student, equals in zip(students, places, strict=True):
        student[list(equals)] = 3.0
    mask = torch.ones(1, 7, dtype=torch.bool)
    targets = torch.zeros(7, dtype=torch.int64)
    *_, same = compute(twin, teacher, students, mask, targets, "kl", cuts=cuts)
    assert same.tolist() == [True, True, False, False, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits(twin, kind):
    """Some distributions have all mass on one token, so that the other probabilities are 0 in
    fp32."""
    teacher, students, mask, targets = make_logits(2, 6, 300, spread=100.0)
    inputs = (teacher + 1000, students - 1000, mask, targets)
    want, want_gradient = definition(*inputs, kind)
    have, gradient, _ = compute(twin, *inputs, kind)
    assert error(have, want) < 1e-4 and error(gradient, want_gradient) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_is_that_of_the_gradient_alone(twin, kind):
    """From logits in bf16 everything is exact but for one rounding of the gradient."""
    inputs = make_logits(2, 6, 300, torch.bfloat16)
    want, want_gradient = definition(*inputs, kind)
    have, gradient, _ = compute(twin, *inputs, kind)
    assert gradient.dtype == torch.bfloat16 and error(have, want) < TOLERANCE
    rounding = 2**-7 if twin.name == "interpreter" else 2**-8  # it cuts where others round
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=rounding, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@each("cut", [None, 250])
@each("bad", ["nan", "inf"])
@each("whose", [0, 1])
def test_logits_that_are_not_finite_are_no_match_and_their_loss_is_not_finite(
    twin, kind, whose, bad, cut
):
    """One logit of a row or all of them are invalid, at one position; the results of other
    positions do not change."""
    teacher, _, _, targets = make_logits(1, 6, 500)
    # all of them match
    students = teacher.clone()
    mask = torch.ones(1, 6, dtype=torch.bool)
    want, _, _ = compute(twin, teacher, students, mask, targets, kind, cuts=[cut] if cut else ())
    for row, places in ((1, [0]), (2, [300]), (4, slice(None))):
        (teacher, students)[whose][row, places] = float(bad)
    have, _, same = compute(twin, teacher, students, mask, targets, kind, cuts=[cut] if cut else ())
    good = torch.tensor([True, False, False, True, False, True])
    assert torch.equal(have.isfinite(), good) and torch.equal(same, good)
    assert torch.equal(have[good], want[good])


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_statistics_of_a_teacher_that_is_not_finite_have_no_loss(kind):
    whole = torch.zeros(NUM_STATISTICS, 2)
    whole[TOTAL] = 1
    whole[BASE_TOTAL] = torch.tensor([0.0 if kind == "ce" else 1.0, torch.nan])
    assert row_losses(whole, kind).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_selected(twin, kind):
    teacher, students, mask, targets = make_logits(2, 3, 40)
    values, gradient, _ = compute(
        twin, teacher, students[:0], torch.zeros_like(mask), targets, kind
    )
    assert values.shape == (0,) and gradient.shape == (0, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [131_072, 50_257])
def test_full_vocabulary(twin, kind, vocab):
    if twin.name != "cuda":
        pytest.skip("for the GPU")
    inputs = make_logits(3, 33, vocab, torch.bfloat16)
    want, want_gradient = definition(*inputs, kind)
    have, gradient, _ = compute(twin, *inputs, kind)
    assert error(have, want) < 1e-5
    assert error(gradient, want_gradient) < 2**-8
