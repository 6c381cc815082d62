"""Agreement of heads with their base, in chunks and over two ranks, compared with whole
distributions."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from mtpkit.training.config.settings import LossConfig
from mtpkit.training.loss import head_agreement, head_losses
from tests.ranks import run_ranks
from tests.training.test_loss import make_inputs

OPTIONS = [
    LossConfig(chunk_size=16),
    LossConfig("tv"),
    LossConfig("ce"),
    LossConfig(temperature=2.0, top_k=5),
]


def dense(students, teacher, weight, targets, mask):
    """`Agreement` by its definition, in fp64."""
    p = (teacher.double() @ weight.double().t()).softmax(-1)
    rows = torch.arange(len(targets), device=targets.device)
    values = []
    for student in students:
        q = (student.double() @ weight.double().t()).softmax(-1)
        draft = q.argmax(-1)
        accept = (q[rows, targets] / p[rows, targets]).clamp(max=1)
        best = p.argmax(-1)
        equal = draft == best, draft == targets, best == targets
        values.append([equal[0], p[rows, draft], *equal[1:], torch.minimum(p, q).sum(-1), accept])
    return [
        torch.stack([each.double() for each in parts]) * mask for parts in zip(*values, strict=True)
    ]


def agreement(inputs, options, group=None):
    losses, found = head_agreement(*inputs, options, group)
    return losses, [getattr(found, field.name) for field in dataclasses.fields(found)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.kind)
@pytest.mark.parametrize(("num_tokens", "vocab"), [(63, 500), (500, 63), (1, 7)])
def test_equals_whole_distributions(options, num_tokens, vocab):
    inputs = make_inputs(num_tokens, vocab)
    losses, found = agreement(inputs, options)
    torch.testing.assert_close(losses, head_losses(*inputs, options)[0], rtol=1e-12, atol=1e-12)
    for got, want in zip(found, dense(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.kind)
def test_on_each_device(options, device):
    students, *rest = make_inputs(63, 5000, dtype=torch.float32)
    inputs = (
        [student.detach().to(device) for student in students],
        *(part.to(device) for part in rest),
    )
    losses, found = agreement(inputs, options)
    torch.testing.assert_close(losses, head_losses(*inputs, options)[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(found, dense(*inputs), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_nothing_selected_is_nothing():
    students, teacher, weight, targets, mask = make_inputs(9, 13)
    losses, found = agreement((students, teacher, weight, targets, mask & False), LossConfig())
    assert not losses.any() and not any(values.any() for values in found)


def split_rank(rank, folder):
    dist.init_process_group("gloo")
    students, teacher, weight, targets, mask = make_inputs(63, 500)
    halves = weight.chunk(2)
    found = [
        agreement((students, teacher, halves[rank], targets, mask), o, dist.group.WORLD)
        for o in OPTIONS
    ]
    torch.save(found, folder / f"{rank}.pt")


def test_vocabulary_split_over_two_ranks(tmp_path):
    run_ranks(split_rank, tmp_path)
    whole = [agreement(make_inputs(63, 500), options) for options in OPTIONS]
    for rank in range(2):
        torch.testing.assert_close(
            torch.load(tmp_path / f"{rank}.pt"), whole, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.kind)
@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_what_is_not_finite_agrees_with_nothing(options, whose):
    students, teacher, weight, targets, mask = make_inputs(9, 13)
    (students[1].detach() if whose == "student" else teacher)[4] = torch.nan
    mask, targets[4] = mask | True, 0  # the index that a search for the largest of NaN gives
    losses, found = head_agreement(students, teacher, weight, targets, mask, options)
    hit = torch.tensor([whose == "teacher", True, whose == "teacher"])
    assert torch.equal(losses.isnan(), hit)
    assert torch.equal(
        head_losses(students, teacher, weight, targets, mask, options)[0].isnan(), hit
    )
    assert not found.match[hit, 4].any() and not found.draft_is_token[hit, 4].any()
    assert not found.base_is_token[hit, 4].any()
    assert found.draft_prob[hit, 4].isnan().all() and found.overlap[hit, 4].isnan().all()
