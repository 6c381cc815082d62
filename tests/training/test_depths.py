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
from mtpkit.training.depths import DECODINGS, DepthSums, Selection, count_accepted, measure_depths, run_depths
from mtpkit.training.heads import freeze_base
from tests.model.toy import MLA
from tests.toy_config import DELTA
from tests.training.toy import cut, toy_batch, toy_model

ATTENTION = ["serving", "per_depth"]
BATCH = [[7, 1, 2, 10, 3], [4, 4, 13, 1, 1]]


def slow_selection(batch, num_depths):
    """{(depth, i, row)}: depth k at i reads t_i .. t_{i+k} and predicts t_{i+k+1}, all of one document."""
    found = set()
    rows, length = batch.token_ids.shape
    for row in range(rows):
        documents = batch.documents[row].tolist()
        for depth in range(1, num_depths + 1):
            for i in range(length - depth - 1):
                one_document = len(set(documents[i : i + depth + 2])) == 1
                if one_document and batch.loss_mask[row, i + depth + 1]:
                    found.add((depth, i, row))
    return found


def test_selection_equals_a_plain_loop():
    batch = toy_batch(BATCH)
    selected = Selection.of(batch, 4).selected
    got = {(depth + 1, target - depth - 1, row) for depth, target, row in selected.nonzero().tolist()}
    assert got == slow_selection(batch, 4)


def test_sequences_shorter_than_the_depths_select_nothing():
    batch = toy_batch([[3]], wanted=1.0)
    assert Selection.of(batch, 4).selected.sum(dim=(1, 2)).tolist() == [1, 0, 0, 0]


def test_accepted_drafts_equal_a_plain_loop():
    batch = toy_batch(BATCH)
    selected = Selection.of(batch, 3).selected
    matches = torch.rand(selected.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    chosen = slow_selection(batch, 3)
    offered, accepted = [0, 0, 0], [0, 0, 0]
    for row in range(2):
        for i in range(batch.token_ids.shape[1]):
            for depth in (1, 2, 3):
                if (depth, i, row) not in chosen:
                    break
                offered[depth - 1] += 1
                if not matches[depth - 1, i + depth, row]:
                    break
                accepted[depth - 1] += 1
    assert count_accepted(matches, selected).tolist() == [offered, accepted]


def test_acceptance_length_is_one_plus_the_mean_accepted_prefix():
    # 8 positions: 4 accept nothing, 1 accepts one draft, 1 two, 2 all three.
    sums = DepthSums(torch.tensor([[0.0] * 3, [8.0] * 3, [8.0, 4.0, 3.0], [4.0, 3.0, 2.0]]))
    assert sums.conditional_acceptance() == pytest.approx([4 / 8, 3 / 4, 2 / 3])
    assert sums.acceptance_length() == pytest.approx(1 + (1 + 2 + 2 * 3) / 8)


@pytest.mark.parametrize("attention", ATTENTION)
def test_losses_and_matches_equal_whole_logits(attention):
    model, batch = toy_model(), toy_batch(BATCH)
    freeze_base(model)
    losses, sums = run_depths(model, batch, 3, attention, LossConfig(chunk_size=5))
    hidden = base_forward(model, batch.token_ids, SequenceInput(batch.documents, batch.positions))
    base = compute_logits(model, hidden).log_softmax(-1)
    states = list(unroll_depths(model, hidden, batch.token_ids, 3, attention, batch.documents, batch.positions))
    heads = [compute_logits(model, state).log_softmax(-1) for state in states]
    chosen, expected, agreed = slow_selection(batch, 3), torch.zeros(3), 0
    for depth, i, row in chosen:
        teacher, student = base[i + depth, row], heads[depth - 1][i, row]
        expected[depth - 1] += (teacher.exp() * (teacher - student)).sum().detach()
        agreed += depth == 1 and bool(teacher.argmax() == student.argmax())
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert sums.values[1].tolist() == [sum(d == depth for d, _, _ in chosen) for depth in (1, 2, 3)]
    assert sums.values[3, 0].item() == agreed


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    "options",
    [LossConfig(chunk_size=5), LossConfig("tv"), LossConfig("ce"), LossConfig(temperature=2.0, top_k=3)],
    ids=["kl", "tv", "ce", "kl of 3 at 2"],
)
@torch.no_grad()
def test_measured_acceptance_equals_whole_distributions(attention, options):
    model, batch = toy_model(), toy_batch(BATCH)
    losses, _ = run_depths(model, batch, 3, attention, options)
    measured = measure_depths(model, batch, 3, attention, options)
    torch.testing.assert_close(measured.values[0], losses.double(), rtol=1e-5, atol=1e-5)

    hidden = base_forward(model, batch.token_ids, SequenceInput(batch.documents, batch.positions))
    p = compute_logits(model, hidden).double().softmax(-1)
    states = unroll_depths(model, hidden, batch.token_ids, 3, attention, batch.documents, batch.positions)
    qs = [compute_logits(model, state).double().softmax(-1) for state in states]
    chosen, expected = slow_selection(batch, 3), torch.zeros(6, 3, dtype=torch.float64)
    for row, i in ((row, i) for row in range(2) for i in range(batch.token_ids.shape[1])):
        reached = [1.0, 1.0, 1.0]
        for depth in (1, 2, 3):
            if (depth, i, row) not in chosen:
                break
            base, head, token = p[i + depth, row], qs[depth - 1][i, row], batch.token_ids[row, i + depth + 1]
            draft = head.argmax()
            accept = [draft == base.argmax(), base[draft], torch.minimum(base, head).sum()]
            go_on = [draft == base.argmax(), draft == token, (head[token] / base[token]).clamp(max=1)]
            for place in range(3):
                expected[2 * place, depth - 1] += reached[place]
                expected[2 * place + 1, depth - 1] += reached[place] * float(accept[place])
                reached[place] *= float(go_on[place])
    torch.testing.assert_close(measured.values[2:], expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_expected_acceptance_is_that_of_all_that_the_base_may_say():
    """All texts of two more tokens, each weighed by its probability, against what a step expects before it draws."""
    vocab, prompt = 6, torch.tensor([3, 1, 4, 1])
    model = toy_model(vocab_size=vocab, mtp_num_depths=2)
    ends = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    texts = torch.cat([prompt.expand(len(ends), -1), ends], 1)
    hidden = base_forward(model, texts, SequenceInput())
    p1, p2 = (compute_logits(model, hidden[j]).double().softmax(-1) for j in (3, 4))  # [texts, v]
    heads = [compute_logits(model, states).double().softmax(-1) for states in unroll_depths(model, hidden, texts, 2)]
    chances = p1.gather(1, ends[:, :1]) * p2.gather(1, ends[:, 1:])
    wanted = (torch.arange(6) >= 4)[None]  # a step at i = 2 drafts the ends, one at i = 3 the second of them
    found = torch.zeros(6, 2, dtype=torch.float64)
    for text, chance in zip(texts, chances, strict=True):
        batch = PackedBatch(text[None], wanted, torch.zeros(1, 6, dtype=torch.int32), torch.arange(6)[None])
        found += chance * measure_depths(model, batch, 2, "serving", LossConfig()).values[2:]

    each = torch.arange(vocab) * vocab  # a text for every first end: what depends on that alone
    p, p_next = p1[0], p2[each]
    q, q_next, q_later = heads[0][2, 0], heads[1][2, each], heads[0][3, each]
    draft = q.argmax()
    sampling = p[draft], p[draft] * p_next[draft, q_next[draft].argmax()]
    later = (p * p_next.gather(1, q_later.argmax(-1, keepdim=True))[:, 0]).sum()
    assert_counts(found, "sampling", sampling, later)
    overlap = torch.minimum(p, q)
    drawn = overlap.sum(), (overlap * torch.minimum(p_next, q_next).sum(-1)).sum()
    assert_counts(found, "draft_sampling", drawn, (p * torch.minimum(p_next, q_later).sum(-1)).sum())


def assert_counts(found, decoding, accepted, later):
    """Drafts that steps at i = 2 accept at each depth, and those that steps at i = 3 do at the first."""
    row = 2 * DECODINGS.index(decoding)
    assert found[row].tolist() == pytest.approx([2, accepted[0].item()], rel=1e-5)
    assert found[row + 1].tolist() == pytest.approx([(accepted[0] + later).item(), accepted[1].item()], rel=1e-5)


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
    model, batch = toy_model(mtp_pattern=mtp_pattern, **sizes), toy_batch([[7, 10, 3]])
    packed = losses_and_grads(model, batch, attention)
    parts = [losses_and_grads(model, cut(batch, 0, *ends), attention) for ends in ((0, 7), (7, 17), (17, 20))]
    torch.testing.assert_close(packed[0], sum(losses for losses, _ in parts), rtol=1e-5, atol=1e-6)
    for name, grad in packed[1].items():
        torch.testing.assert_close(grad, sum(grads[name] for _, grads in parts), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    ("letter", "layer", "kernels", "op"),
    [("M", mamba, "ssd", "ssd_scan"), ("G", delta, "gated_delta_rule", "delta_rule")],
)
def test_recurrent_heads_train_through_the_kernels_as_through_plain_pytorch(
    letter, layer, kernels, op, attention, monkeypatch
):
    """Packed documents, depths that continue depth 1's state, and what runs again in the backward."""
    model = toy_model(pattern=f"{letter}*-", mtp_pattern=f"{letter}*", **DELTA)
    batch = toy_batch([[5, 4]])
    plain = losses_and_grads(model, batch, attention)
    kernel, calls = getattr(importlib.import_module(f"mtpkit.kernels.{kernels}.triton"), op), []
    monkeypatch.setattr(layer, op, lambda *args, **named: calls.append(1) or kernel(*args, **named))
    found = losses_and_grads(model, batch, attention, recompute=True)
    assert len(calls) == 1 + 2 * 3  # of the base, and of three depths twice
    torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-6)
    for name, grad in plain[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_known_lengths_of_documents_are_not_read_from_the_device(monkeypatch):
    batch = replace(toy_batch([[5, 4]]), document_lens=(5, 4))
    monkeypatch.setattr(SequenceInput, "_lens", property(lambda self: pytest.fail("waits for the device")))
    for attention in ATTENTION:
        losses_and_grads(toy_model(mtp_pattern="M*"), batch, attention)


def test_wrongly_shifted_masks_would_be_seen():
    model, batch = toy_model(), toy_batch([[7, 10, 3]])
    right, _ = losses_and_grads(model, batch, "serving")
    shifted = batch.__class__(batch.token_ids, batch.loss_mask.roll(1, 1), batch.documents, batch.positions)
    wrong, _ = losses_and_grads(model, shifted, "serving")
    assert not torch.allclose(right, wrong, rtol=1e-2)


def test_nothing_of_nothing_is_zero_and_what_is_no_number_stays():
    nan, inf = torch.nan, torch.inf
    sums = DepthSums(torch.tensor([[0.0, nan, 3.0, inf], [0, 2, 0, 1], [0, 4, 4, nan], [0, 4, nan, 0]]).double())
    assert sums.losses() == [0.0, pytest.approx(nan, nan_ok=True), inf, inf]
    assert sums.conditional_acceptance() == pytest.approx([0.0, 1.0, nan, nan], nan_ok=True)
    assert sums.not_finite() == "the loss of depth 2, 4; the greedy acceptance of depth 3, 4"
    with pytest.raises(MtpkitError, match=r"^step 3: NaN or infinity in the loss of depth 2, 4; "):
        sums.check_finite("step 3")
    assert not DepthSums.zero(3, torch.device("cpu"), 3).not_finite()
