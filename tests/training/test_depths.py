"""Which tokens count, where documents end, and how accepted drafts are counted."""

import importlib
from dataclasses import replace

import pytest
import torch

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.model.layers import delta, mamba
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.depths import DepthSums, Selection, measure_depths, run_depths, walk_steps
from mtpkit.training.heads import freeze_base
from tests.model.toy import MLA
from tests.toy_config import DELTA
from tests.training.toy import cut, toy_batch, toy_model

ATTENTION = ["serving", "per_depth"]
BATCH = [[7, 1, 2, 10, 3], [4, 4, 13, 1, 1]]


def answers_of(batch):
    """(row, first, last) of each answer of two tokens or more; the first token of a document
    belongs to the prompt."""
    rows, length = batch.token_ids.shape
    for row in range(rows):
        documents = batch.documents[row].tolist()
        first = None
        for place in range(length + 1):
            starts = 0 < place < length and documents[place] != documents[place - 1]
            ends = place == length or starts or not batch.loss_mask[row, place]
            if first is not None and ends:
                if place - first > 1:
                    yield row, first, place - 1
                first = None
            if (
                first is None
                and place < length
                and place
                and not starts
                and batch.loss_mask[row, place]
            ):
                first = place


def slow_selection(batch, num_depths):
    """{(depth, i, row)}: depth k at i drafts t_{i+k+1}, where a server that has just chosen t_{i+1}
    drafts it."""
    return {
        (depth, i, row)
        for row, first, last in answers_of(batch)
        for i in range(first - 1, last)
        for depth in range(1, num_depths + 1)
        if i + depth + 1 <= last
    }


def slow_walk(batch, go_on, rates):
    """[2, K], the expected numbers of drafts that decoding along the text reaches and accepts; [K,
    s, b] by target."""
    depths = len(go_on)
    counts = torch.zeros(2, depths, dtype=torch.float64)
    for row, first, last in answers_of(batch):
        starts = dict.fromkeys(range(last + depths + 1), 0.0)
        starts[first - 1] = 1.0
        for i in range(first - 1, last - 1):
            alive = starts[i]
            for depth in range(1, min(depths, last - i - 1) + 1):
                place = depth - 1, i + depth, row
                counts[0, depth - 1] += alive
                counts[1, depth - 1] += alive * float(rates[place])
                starts[i + depth] += alive * (1 - float(go_on[place]))
                alive *= float(go_on[place])
            starts[i + min(depths, last - i - 1) + 1] += alive
    return counts


def test_selection_equals_a_plain_loop():
    batch = toy_batch(BATCH)
    selected = Selection.of(batch, 4).selected
    got = {
        (depth + 1, target - depth - 1, row) for depth, target, row in selected.nonzero().tolist()
    }
    assert got == slow_selection(batch, 4)


def test_sequences_shorter_than_the_depths_select_nothing():
    batch = toy_batch([[3]], wanted=1.0)
    assert Selection.of(batch, 4).selected.sum(dim=(1, 2)).tolist() == [1, 0, 0, 0]


def test_what_would_be_drafted_inside_the_prompt_is_not_selected():
    """A prompt of 6 tokens and an answer of 3: a server drafts two tokens, then one, and never
    three."""
    ids = torch.arange(9)[None]
    batch = PackedBatch(ids, ids >= 6, torch.zeros_like(ids), ids)
    selected = Selection.of(batch, 3).selected[..., 0]
    assert [(row.nonzero()[:, 0] + 1).tolist() for row in selected] == [[7, 8], [8], []]


def test_a_second_answer_is_drafted_like_the_first():
    """Two turns, and a document behind them whose text is all answer."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]])
    batch = PackedBatch(torch.zeros_like(documents), mask, documents, documents)
    selected = Selection.of(batch, 2).selected[..., 0]
    assert [(row.nonzero()[:, 0] + 1).tolist() for row in selected] == [[3, 4, 9], [4]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "lengths", [[[7, 1, 2, 10, 3], [4, 4, 13, 1, 1]], [[30]], [[2], [2]], [[1]]]
)
def test_steps_along_a_text_equal_a_plain_loop(lengths, seed):
    """Steps that are sure and steps that are probable, in answers of all lengths."""
    batch = toy_batch(lengths, wanted=0.85, seed=seed)
    depths = 1 + seed % 4
    selected = Selection.of(batch, depths).selected
    generator = torch.Generator().manual_seed(seed)
    rates = torch.rand(selected.shape, generator=generator, dtype=torch.float64)
    go_on = rates * torch.rand(selected.shape, generator=generator, dtype=torch.float64)
    for passes, chances in ((go_on, rates), (go_on > 0.3, rates > 0.3)):
        found = walk_steps(passes, chances, selected).sum(dim=(2, 3))
        torch.testing.assert_close(found, slow_walk(batch, passes, chances), rtol=1e-12, atol=1e-12)


def test_a_departure_ends_the_step():
    """K = 2, an answer t_1 .. t_6 of which t_3 is not the base's choice, and drafts that the base
    always accepts."""
    ids = torch.arange(7)[None]
    selected = Selection.of(PackedBatch(ids, ids >= 1, torch.zeros_like(ids), ids), 2).selected
    follows = torch.ones_like(selected)
    follows[:, 2] = False
    reached, accepted = walk_steps(follows, torch.ones_like(selected), selected)[..., 0]
    # The first step drafts t_2 and t_3, the one after the departure begins at t_3 and drafts t_4
    # and t_5.
    assert reached.tolist() == accepted.tolist() == [[1, 0, 1, 0, 0, 0, 0]] * 2


def test_acceptance_length_is_one_plus_the_mean_accepted_drafts():
    # 8 steps: 4 accept nothing, 1 accepts one draft, 1 two, 2 all three; one that accepts a draft
    # ends with it.
    sums = DepthSums(
        torch.tensor([[0.0] * 3, [10.0] * 3, [4.0] * 3, [8.0, 3.0, 3.0], [4.0, 3.0, 2.0]]).double()
    )
    assert sums.conditional_acceptance() == pytest.approx([4 / 8, 1, 2 / 3])
    assert sums.acceptance_length() == pytest.approx(1 + (4 + 3 + 2) / 8)
    assert (sums.steps(), sums.departures()) == (8, 0.4)


@pytest.mark.parametrize("attention", ATTENTION)
def test_losses_and_matches_equal_whole_logits(attention):
    model = toy_model()
    batch = toy_batch(BATCH)
    freeze_base(model)
    losses, sums = run_depths(model, batch, 3, attention, LossConfig(chunk_size=5))
    hidden = base_forward(model, batch.token_ids, SequenceInput(batch.documents, batch.positions))
    base = compute_logits(model, hidden).log_softmax(-1)
    states = list(
        unroll_depths(
            model, hidden, batch.token_ids, 3, attention, batch.documents, batch.positions
        )
    )
    heads = [compute_logits(model, state).log_softmax(-1) for state in states]
    chosen = slow_selection(batch, 3)
    expected = torch.zeros(3)
    departed = [0, 0, 0]
    right = torch.zeros(3, *batch.token_ids.t().shape, dtype=torch.bool)
    goes_on = right.clone()
    for depth, i, row in chosen:
        teacher = base[i + depth, row]
        student = heads[depth - 1][i, row]
        expected[depth - 1] += (teacher.exp() * (teacher - student)).sum().detach()
        follows = bool(teacher.argmax() == batch.token_ids[row, i + depth + 1])
        departed[depth - 1] += not follows
        right[depth - 1, i + depth, row] = teacher.argmax() == student.argmax()
        goes_on[depth - 1, i + depth, row] = right[depth - 1, i + depth, row] & follows
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert sums.values[1].tolist() == [sum(d == depth for d, _, _ in chosen) for depth in (1, 2, 3)]
    assert sums.values[2].tolist() == departed
    assert torch.equal(sums.counts(), slow_walk(batch, goes_on, right))
    assert right.any() and departed[0]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    "options",
    [
        LossConfig(chunk_size=5),
        LossConfig("tv"),
        LossConfig("ce"),
        LossConfig(temperature=2.0, top_k=3),
    ],
    ids=["kl", "tv", "ce", "kl of 3 at 2"],
)
@torch.no_grad()
def test_measured_acceptance_equals_whole_distributions(attention, options):
    model = toy_model()
    batch = toy_batch(BATCH)
    losses, _ = run_depths(model, batch, 3, attention, options)
    measured, by_document = measure_depths(model, batch, 3, attention, options)
    torch.testing.assert_close(measured.values[0], losses.double(), rtol=1e-5, atol=1e-5)

    hidden = base_forward(model, batch.token_ids, SequenceInput(batch.documents, batch.positions))
    p = compute_logits(model, hidden).double().softmax(-1)
    states = unroll_depths(
        model, hidden, batch.token_ids, 3, attention, batch.documents, batch.positions
    )
    qs = [compute_logits(model, state).double().softmax(-1) for state in states]
    places = torch.zeros(6, 3, *batch.token_ids.t().shape, dtype=torch.float64)
    for depth, i, row in slow_selection(batch, 3):
        base = p[i + depth, row]
        head = qs[depth - 1][i, row]
        token = batch.token_ids[row, i + depth + 1]
        draft = head.argmax()
        accept = [draft == base.argmax(), base[draft], torch.minimum(base, head).sum()]
        go_on = [
            draft == base.argmax() == token,
            draft == token,
            (head[token] / base[token]).clamp(max=1),
        ]
        places[:, depth - 1, i + depth, row] = torch.tensor([*accept, *go_on], dtype=torch.float64)
    expected = torch.cat([slow_walk(batch, places[3 + place], places[place]) for place in range(3)])
    torch.testing.assert_close(measured.values[3:], expected, rtol=1e-5, atol=1e-6)
    totals = torch.stack(
        [part for reached, accepted in expected.split(2) for part in (reached[0], accepted.sum())]
    )
    torch.testing.assert_close(by_document.sum(dim=0), totals, rtol=1e-5, atol=1e-6)
    assert len(by_document) == len(
        {(row, int(batch.documents[row, first])) for row, first, _ in answers_of(batch)}
    )


@torch.no_grad()
def test_expected_steps_are_those_of_all_that_the_base_may_say():
    """All answers of three tokens, each weighed by its probability, against what decoding expects
    before it draws."""
    vocab = 6
    prompt = torch.tensor([3, 1, 4, 1])
    model = toy_model(vocab_size=vocab, mtp_num_depths=2)
    ends = torch.cartesian_prod(*[torch.arange(vocab)] * 3)
    texts = torch.cat([prompt.expand(len(ends), -1), ends], 1)
    hidden = base_forward(model, texts, SequenceInput())
    p = compute_logits(model, hidden[3:6]).double().softmax(-1).view(3, *[vocab] * 3, vocab)
    states = unroll_depths(model, hidden, texts, 2)
    q1, q2 = (
        compute_logits(model, one[3:5]).double().softmax(-1).view(2, *[vocab] * 3, vocab)
        for one in states
    )
    # of t_4; t_5 after t_4; t_6 after t_4 and t_5
    first = p[0, 0, 0, 0]
    second = p[1, :, 0, 0]
    third = p[2, :, :, 0]
    chances = first[:, None, None] * second[:, :, None] * third
    batch = PackedBatch(
        texts, torch.arange(7).expand_as(texts) >= 4, torch.zeros_like(texts), texts
    )
    found = torch.zeros(4, 2, dtype=torch.float64)
    for row, chance in zip(range(len(texts)), chances.flatten(), strict=True):
        found += (
            chance
            * measure_depths(model, cut(batch, row, 0, 7), 2, "serving", LossConfig())[0].values[5:]
        )

    # After t_4 a step drafts t_5 and t_6. If t_5 is not the draft, another step drafts t_6.
    steps = torch.zeros(2, 2, 2, dtype=torch.float64)
    for token in range(vocab):
        head = q1[0, token, 0, 0]
        base = second[token]
        draft = int(head.argmax())
        later_base = third[token]
        later_head = q1[1, token, :, 0]
        second_head = q2[0, token, :, 0]
        for place, (go_on, miss) in enumerate(
            (
                (base * (torch.arange(vocab) == draft), base * (torch.arange(vocab) != draft)),
                (torch.minimum(base, head), (base - head).clamp(min=0)),
            )
        ):
            if place == 0:
                rate = later_base.gather(1, later_head.argmax(-1, keepdim=True))[:, 0]
                second_rate = later_base.gather(1, second_head.argmax(-1, keepdim=True))[:, 0]
            else:
                rate = torch.minimum(later_base, later_head).sum(-1)
                second_rate = torch.minimum(later_base, second_head).sum(-1)
            reached = torch.stack([1 + miss.sum(), go_on.sum()])
            accepted = torch.stack([go_on.sum() + (miss * rate).sum(), (go_on * second_rate).sum()])
            steps[place] += first[token] * torch.stack([reached, accepted])
    torch.testing.assert_close(found, steps.flatten(0, 1), rtol=1e-5, atol=1e-6)


def losses_and_grads(model, batch, attention, recompute=False):
    heads = freeze_base(model)
    losses, _ = run_depths(model, batch, 3, attention, LossConfig(), recompute=recompute)
    model.zero_grad()
    (losses * torch.tensor([1.0, 0.6, 0.36])).sum().backward()
    return losses.detach(), {name: parameter.grad.clone() for name, parameter in heads.items()}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("mtp_pattern", ["*-", "M*", "G*", "+-"])
def test_a_packed_document_is_trained_as_if_alone(attention, mtp_pattern):
    sizes = {"G*": DELTA, "+-": MLA | dict(pattern="M+-")}.get(mtp_pattern, {})
    model = toy_model(mtp_pattern=mtp_pattern, **sizes)
    batch = toy_batch([[7, 10, 3]])
    packed = losses_and_grads(model, batch, attention)
    parts = [
        losses_and_grads(model, cut(batch, 0, *ends), attention)
        for ends in ((0, 7), (7, 17), (17, 20))
    ]
    torch.testing.assert_close(packed[0], sum(losses for losses, _ in parts), rtol=1e-5, atol=1e-6)
    for name, grad in packed[1].items():
        torch.testing.assert_close(
            grad, sum(grads[name] for _, grads in parts), rtol=1e-4, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    ("letter", "layer", "kernels", "op"),
    [("M", mamba, "ssd", "ssd_scan"), ("G", delta, "gated_delta_rule", "delta_rule")],
)
def test_recurrent_heads_train_through_the_kernels_as_through_plain_pytorch(
    letter, layer, kernels, op, attention, monkeypatch
):
    """Packed documents, depths that continue depth 1's state, and what runs again in the
    backward."""
    model = toy_model(pattern=f"{letter}*-", mtp_pattern=f"{letter}*", **DELTA)
    batch = toy_batch([[5, 4]])
    plain = losses_and_grads(model, batch, attention)
    kernel = getattr(importlib.import_module(f"mtpkit.kernels.{kernels}.triton"), op)
    calls = []
    monkeypatch.setattr(layer, op, lambda *args, **named: calls.append(1) or kernel(*args, **named))
    found = losses_and_grads(model, batch, attention, recompute=True)
    assert len(calls) == 1 + 2 * 3  # of the base, and of three depths twice
    torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-6)
    for name, grad in plain[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_known_lengths_of_documents_are_not_read_from_the_device(monkeypatch):
    batch = replace(toy_batch([[5, 4]]), document_lens=(5, 4))
    monkeypatch.setattr(
        SequenceInput, "_lens", property(lambda self: pytest.fail("waits for the device"))
    )
    for attention in ATTENTION:
        losses_and_grads(toy_model(mtp_pattern="M*"), batch, attention)


def test_wrongly_shifted_masks_would_be_seen():
    model = toy_model()
    batch = toy_batch([[7, 10, 3]])
    right, _ = losses_and_grads(model, batch, "serving")
    shifted = batch.__class__(
        batch.token_ids, batch.loss_mask.roll(1, 1), batch.documents, batch.positions
    )
    wrong, _ = losses_and_grads(model, shifted, "serving")
    assert not torch.allclose(right, wrong, rtol=1e-2)


def test_nothing_of_nothing_is_zero_and_what_is_no_number_stays():
    nan = torch.nan
    inf = torch.inf
    rows = [[0.0, nan, 3.0, inf], [0, 2, 0, 1], [0, 0, 0, 0], [0, 4, 4, nan], [0, 4, nan, 0]]
    sums = DepthSums(torch.tensor(rows).double())
    assert sums.losses() == [0.0, pytest.approx(nan, nan_ok=True), inf, inf]
    assert sums.conditional_acceptance() == pytest.approx([0.0, 1.0, nan, nan], nan_ok=True)
    assert sums.not_finite() == "the loss of depth 2, 4; the greedy acceptance of depth 3, 4"
    with pytest.raises(MtpkitError, match=r"^step 3: NaN or infinity in the loss of depth 2, 4; "):
        sums.check_finite("step 3")
    assert not DepthSums.zero(3, torch.device("cpu"), 3).not_finite()
