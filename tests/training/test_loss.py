"""The chunked losses against dense autograd, alone and with the vocabulary split over two ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mtpkit.kernels.head_loss import HeadLoss, reference
from mtpkit.model.formats.weight import QuantizedWeight, product
from mtpkit.model.quantized import online
from mtpkit.training import loss
from mtpkit.training.config.settings import LossConfig
from mtpkit.training.loss import head_losses
from tests.ranks import run_ranks

KINDS = ["kl", "tv", "ce"]
TEMPERATURES = {"kl": 2.0, "tv": 1.0, "ce": 1.0}


def make_inputs(num_tokens, vocab, hidden=6, num_depths=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    students = [normal(num_tokens, hidden).requires_grad_() for _ in range(num_depths)]
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    mask = torch.rand(num_depths, num_tokens, generator=generator) < 0.7
    return students, normal(num_tokens, hidden), normal(vocab, hidden), targets, mask


def dense_losses(students, teacher, weight, targets, mask, options):
    """The definition, with every logit held."""
    temperature = options.temperature
    base = product(teacher, weight)
    if options.top_k:
        base = base.where(
            base >= base.topk(options.top_k).values[:, -1:], torch.finfo(base.dtype).min
        )
    base = (base / temperature).log_softmax(-1)
    losses = []
    for student in students:
        log_probs = (product(student, weight) / temperature).log_softmax(-1)
        if options.kind == "kl":
            loss = (base.exp() * (base - log_probs)).sum(-1) * temperature**2
        elif options.kind == "tv":
            loss = (base.exp() - log_probs.exp()).abs().sum(-1) / 2
        else:
            loss = torch.nn.functional.nll_loss(log_probs, targets, reduction="none")
        losses.append(loss)
    return (torch.stack(losses) * mask).sum(-1)


def weighted_grads(losses, students):
    scale = torch.arange(1, len(students) + 1, dtype=losses.dtype) / 7
    return torch.autograd.grad((losses * scale).sum(), students)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "vocab", "chunk_size"), [(63, 500, 16), (500, 63, 499), (1, 7, 1024)]
)
def test_equals_dense_autograd(kind, num_tokens, vocab, chunk_size):
    students, teacher, weight, targets, mask = make_inputs(num_tokens, vocab)
    options = LossConfig(kind, temperature=TEMPERATURES[kind], chunk_size=chunk_size)
    losses, matches, follows = head_losses(students, teacher, weight, targets, mask, options)
    expected = dense_losses(students, teacher, weight, targets, mask, options)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        weighted_grads(losses, students), weighted_grads(expected, students), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    choice = (teacher @ weight.t()).argmax(-1)
    same = torch.stack([(student @ weight.t()).argmax(-1) == choice for student in students])
    assert torch.equal(matches, same & mask)
    assert torch.equal(follows, (targets == choice) & mask)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_output_layer_rounds_its_inputs(kind):
    """As in decoding; the gradient is that of the widened matrix."""
    students, teacher, plain, targets, mask = make_inputs(63, 500, 32, dtype=torch.float32)
    weight = QuantizedWeight([online(plain)], torch.float32)
    options = LossConfig(kind, temperature=TEMPERATURES[kind], chunk_size=16)
    losses = head_losses(students, teacher, weight, targets, mask, options)[0]
    expected = dense_losses(students, teacher, weight, targets, mask, options)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(
        weighted_grads(losses, students), weighted_grads(expected, students), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    widened = head_losses(students, teacher, weight.widened(), targets, mask, options)[0]
    assert not torch.allclose(losses, widened, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("top_k", [1, 5, 500])
def test_top_k_equals_dense_autograd(top_k):
    inputs = make_inputs(63, 500)
    options = LossConfig("kl", temperature=2.0, chunk_size=16, top_k=top_k)
    losses = head_losses(*inputs, options)[0]
    expected = dense_losses(*inputs, options)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        weighted_grads(losses, inputs[0]), weighted_grads(expected, inputs[0]), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_top_k_beyond_the_vocabulary_is_all_of_it():
    inputs = make_inputs(9, 13)
    whole, cut = (head_losses(*inputs, LossConfig(top_k=top_k))[0] for top_k in (0, 99))
    assert torch.equal(whole, cut)


def test_logits_are_those_of_selected_rows(monkeypatch):
    """No row of a depth that its mask leaves out, no chunk without any."""
    students, *rest, mask = make_inputs(63, 500)
    mask[:, 16:40] = False
    calls = []

    def noted(base, drafts, *args):
        calls.append((len(base), len(drafts)))
        return HeadLoss(base, drafts, *args)

    monkeypatch.setattr(loss, "HeadLoss", noted)
    head_losses(students, *rest, mask, LossConfig(chunk_size=16))
    assert calls == [(16, mask[:, :16].sum()), (16, mask[:, 32:48].sum()), (15, mask[:, 48:].sum())]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_masked_out_are_not_read(kind):
    """Neither their hidden states, nor the base's where no depth is selected; and their gradient is
    0."""
    students, teacher, weight, targets, mask = make_inputs(63, 500)
    mask[:, 16:40] = False  # a chunk of nothing, and one with some
    options = LossConfig(kind, chunk_size=16)
    losses, *rows = head_losses(students, teacher, weight, targets, mask, options)
    grads = weighted_grads(losses, students)
    spoilt = [student.detach().clone() for student in students]
    for student, row in zip(spoilt, mask, strict=True):
        student[~row] = torch.nan
        student.requires_grad_()
    teacher[16:32] = torch.nan
    again, *same = head_losses(spoilt, teacher, weight, targets, mask, options)
    assert torch.equal(again, losses) and all(map(torch.equal, same, rows))
    for got, want, row in zip(weighted_grads(again, spoilt), grads, mask, strict=True):
        assert torch.equal(got, want) and not got[~row].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    students, teacher, weight, targets, mask = make_inputs(5, 11, num_depths=2)
    options = LossConfig(kind, temperature=TEMPERATURES[kind], chunk_size=2)
    assert torch.autograd.gradcheck(
        lambda *students: head_losses(students, teacher, weight, targets, mask, options)[0],
        students,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_without_selected_tokens_loss_and_gradient_are_zero(kind):
    students, teacher, weight, targets, mask = make_inputs(9, 13)
    losses, *_ = head_losses(
        students, teacher, weight, targets, torch.zeros_like(mask), LossConfig(kind)
    )
    assert not losses.any()
    assert not any(grad.any() for grad in weighted_grads(losses, students))
    empty = [student[:0] for student in students]
    losses, matches, follows = head_losses(
        empty, teacher[:0], weight, targets[:0], mask[:, :0], LossConfig(kind)
    )
    assert not losses.any() and matches.shape == follows.shape == (3, 0)


def test_kl_and_tv_of_the_teacher_itself_are_zero():
    _, teacher, weight, targets, _ = make_inputs(63, 500, dtype=torch.float32)
    mask = torch.ones(1, 63, dtype=torch.bool)
    for kind in ("kl", "tv"):
        student = teacher.clone().requires_grad_()
        losses, matches, _ = head_losses(
            [student], teacher, weight, targets, mask, LossConfig(kind)
        )
        assert losses.abs().item() < 63 * 1e-6
        assert matches.all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_error_is_near_that_of_dense_bfloat16(kind):
    students, teacher, weight, targets, mask = make_inputs(63, 500, hidden=32)
    options = LossConfig(kind, chunk_size=16)
    exact = weighted_grads(
        dense_losses(students, teacher, weight, targets, mask, options), students
    )
    low = [tensor.detach().bfloat16() for tensor in (*students, teacher, weight)]
    low_students = [tensor.requires_grad_() for tensor in low[:3]]
    dense = weighted_grads(
        dense_losses(low_students, low[3], low[4], targets, mask, options), low_students
    )
    ours = weighted_grads(
        head_losses(low_students, low[3], low[4], targets, mask, options)[0], low_students
    )
    for want, plain, got in zip(exact, dense, ours, strict=True):
        assert (got - want).norm() <= 2 * (plain - want).norm()


@pytest.mark.parametrize(
    "options",
    [
        LossConfig(),
        LossConfig(temperature=2.0, chunk_size=32, top_k=9),
        LossConfig("tv"),
        LossConfig("ce"),
    ],
)
def test_in_fp32_on_each_device(options, device):
    """With rows that are not in whole blocks, nor whole vectors."""
    inputs = make_inputs(63, 5003, hidden=32)
    want_losses = dense_losses(*inputs, options)
    want = weighted_grads(want_losses, inputs[0])
    students = [student.detach().float().to(device).requires_grad_() for student in inputs[0]]
    teacher, weight = (tensor.float().to(device) for tensor in inputs[1:3])
    losses, *_ = head_losses(
        students, teacher, weight, *(tensor.to(device) for tensor in inputs[3:]), options
    )
    scale = torch.arange(1, 4, device=device) / 7
    grads = torch.autograd.grad((losses * scale).sum(), students)
    torch.testing.assert_close(losses.cpu().double(), want_losses, rtol=1e-5, atol=1e-5)
    for got, exact in zip(grads, want, strict=True):
        assert (got.cpu() - exact).norm() < 1e-4 * exact.norm()


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def largest_tensor(kind, num_tokens, vocab, chunk_size=0):
    inputs = make_inputs(num_tokens, vocab, hidden=4)
    with LargestTensor() as largest:
        losses, *_ = head_losses(*inputs, LossConfig(kind, chunk_size=chunk_size))
        losses.sum().backward()
    return largest.numel


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_all_tokens_are_never_held(kind):
    assert largest_tensor(kind, 256, 512, chunk_size=8) == 8 * 512 * 4


def test_chunks_are_chosen_by_their_bytes(monkeypatch):
    """However many tokens or words there are, as long as 64 tokens fit."""
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 1 << 20)
    sizes = [
        largest_tensor("kl", tokens, vocab) * 8
        for tokens, vocab in ((1500, 64), (300, 256), (600, 256))
    ]
    assert sizes == [512 * 64 * 4 * 8, 128 * 256 * 4 * 8, 128 * 256 * 4 * 8]
    assert largest_tensor("kl", 200, 1000) == 64 * 1024 * 4


def test_without_a_gradient_none_is_made(monkeypatch):
    students, *rest = make_inputs(63, 500)
    want = head_losses(students, *rest, LossConfig())
    monkeypatch.setattr(reference.HeadLoss, "gradient_", None)
    with torch.no_grad():
        have = head_losses(students, *rest, LossConfig())
    assert (
        all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
        and not have[0].requires_grad
    )


CASES = [
    *(LossConfig(kind, temperature=TEMPERATURES[kind], chunk_size=16) for kind in KINDS),
    LossConfig(temperature=2.0, chunk_size=16, top_k=7),
]


def split_losses(options, rank=None):
    """Losses, matches, followed tokens and gradients; with this rank's half of the vocabulary, or
    with all of it."""
    students, teacher, weight, targets, mask = make_inputs(63, 500)
    group = None
    if rank is not None:
        weight = weight.chunk(2)[rank]
        group = dist.group.WORLD
    losses, matches, follows = head_losses(students, teacher, weight, targets, mask, options, group)
    return [losses.detach(), matches, follows, *weighted_grads(losses, students)]


def split_rank(rank, folder):
    dist.init_process_group("gloo")
    torch.save([split_losses(options, rank) for options in CASES], folder / f"{rank}.pt")


def test_vocabulary_split_over_two_ranks(tmp_path):
    run_ranks(split_rank, tmp_path)
    for rank in (0, 1):
        results = torch.load(tmp_path / f"{rank}.pt")
        for options, result in zip(CASES, results, strict=True):
            for got, want in zip(result, split_losses(options), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
