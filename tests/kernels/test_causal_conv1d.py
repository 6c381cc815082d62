"""The causal convolution against a plain loop over taps, and its update over random accept histories."""

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from tests.kernels.recurrence import relative

CHANNELS = 5
TOLERANCE = 1e-5


def parameters(width: int, bias: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(CHANNELS, 1, width, generator=generator)
    return weight, torch.randn(CHANNELS, generator=generator) if bias else None


def slow(x, weight, bias, documents=None, initial=None):
    """One token and one tap after another, in fp64; x [b, s, c]."""
    x, weight = x.double(), weight.double()
    batch, length, _ = x.shape
    width = weight.shape[-1]
    rows = []
    for b in range(batch):
        for t in range(length):
            total = torch.zeros(CHANNELS, dtype=torch.float64) if bias is None else bias.double()
            for lag in range(width):
                source = t - lag
                document = documents[b, max(source, 0)] if documents is not None else 0
                if documents is not None and document != documents[b, t]:
                    continue
                if source >= 0:
                    total = total + x[b, source] * weight[:, 0, width - 1 - lag]
                elif initial is not None:
                    total = total + initial[b, :, source].double() * weight[:, 0, width - 1 - lag]
            rows.append(F.silu(total))
    return torch.stack(rows).view(batch, length, CHANNELS)


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
def test_sequences(length, width, bias, with_initial):
    weight, bias = parameters(width, bias)
    x = torch.randn(2, length, CHANNELS)
    initial = torch.randn(2, CHANNELS, width - 1) if with_initial else None
    assert relative(causal_conv1d(x, weight, bias, initial=initial), slow(x, weight, bias, initial=initial)) < TOLERANCE


@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("lengths", [(11,), (4, 7), (1, 1, 1, 1, 7), (2, 3, 6), (10, 1)])
def test_documents(lengths, with_initial):
    weight, bias = parameters(4)
    x = torch.randn(2, 11, CHANNELS, requires_grad=True)
    first = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    documents = torch.stack([first, torch.zeros_like(first)])
    initial = torch.randn(2, CHANNELS, 3) if with_initial else None
    out = causal_conv1d(x, weight, bias, documents, initial)
    want = slow(x, weight, bias, documents, initial)
    assert relative(out.detach(), want.detach()) < TOLERANCE
    weights = torch.randn(out.shape)
    have_grad, want_grad = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, want))
    assert relative(have_grad, want_grad.double()) < TOLERANCE


def test_gradients_of_the_parameters_over_documents():
    x, documents = torch.randn(1, 9, CHANNELS), torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 3]])
    grads = []
    for function in (causal_conv1d, slow):
        weight, bias = (p.requires_grad_() for p in parameters(4))
        (function(x, weight, bias, documents) * torch.linspace(-1, 1, 9)[None, :, None]).sum().backward()
        grads.append((weight.grad, bias.grad))
    for have, want in zip(*grads, strict=True):
        assert relative(have, want.double()) < TOLERANCE


def run_updates(width: int, tokens: int, spare: int = 0, shift: int = 0) -> float:
    """Worst relative error over steps of rows in non-contiguous slots with random accepts, against the convolution of
    the accepted tokens; `shift` is added to the committed index where there is room."""
    generator = torch.Generator().manual_seed(tokens)
    weight, bias = parameters(width)
    slots, slot_of = 6, torch.tensor([4, 1, 3])
    state = torch.full((slots, CHANNELS, width - 2 + tokens + spare), torch.nan)
    accepted = [torch.randn(width - 1, CHANNELS, generator=generator) for _ in slot_of]
    for row, slot in enumerate(slot_of):
        state[slot, :, : width - 1] = accepted[row].t()
    committed, worst = torch.zeros(len(slot_of), dtype=torch.int64), 0.0
    for _ in range(10):
        rows = torch.randperm(len(slot_of), generator=generator)[: int(torch.randint(1, 4, (), generator=generator))]
        x = torch.randn(len(rows), tokens, CHANNELS, generator=generator)
        y = causal_conv1d_update(x, state, weight, bias, slot_of[rows], committed[rows])
        for i, row in enumerate(rows.tolist()):
            want = slow(torch.cat([accepted[row], x[i]])[None], weight, bias)[0, -tokens:]
            worst = max(worst, relative(y[i], want))
            count = int(torch.randint(1, tokens + 1, (), generator=generator))
            accepted[row] = torch.cat([accepted[row], x[i, :count]])
            committed[row] = min(max(count - 1 + shift, 0), tokens - 1)
            window = range(int(committed[row]), int(committed[row]) + width - 1)
            unused = [column for column in range(state.shape[-1]) if column not in window]
            state[slot_of[row], :, unused] = torch.nan
    assert state[[0, 2, 5]].isnan().all()
    return worst


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 6])
def test_update(width, tokens):
    assert run_updates(width, tokens) < TOLERANCE
    assert run_updates(width, tokens, spare=2) < TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_window_that_is_not_taken_back_would_be_seen(shift):
    assert run_updates(4, 3, shift=shift) > 1e-2


def test_worked_example():
    """The docstring's: window a b c, new tokens x y z."""
    weight, _ = parameters(4)
    state = torch.zeros(1, CHANNELS, 5)
    state[0, :, :3] = torch.tensor([1.0, 2.0, 3.0])
    new = torch.tensor([10.0, 20.0, 30.0])[None, :, None].expand(1, 3, CHANNELS)
    causal_conv1d_update(new, state, weight, None, torch.tensor([0]), torch.tensor([0]))
    assert state[0, 0].tolist() == [2, 3, 10, 20, 30]
