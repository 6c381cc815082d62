"""The causal convolution against a plain loop over taps, and its update over random accept histories."""

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.causal_conv1d import causal_conv1d
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


def strided(x: torch.Tensor, device: str) -> torch.Tensor:
    """x [..., c] on the device as a slice of a wider tensor."""
    whole = torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=device)
    whole[..., 2:-1] = x
    return whole[..., 2:-1]


def placed(twin, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The tensors on the twin's device; a bias may be None."""
    return [tensor if tensor is None else tensor.to(twin.device) for tensor in tensors]


def run_updates(twin, width: int, tokens: int, spare: int = 0, shift: int = 0, bias: bool = True) -> float:
    """Worst relative error over steps of rows in non-contiguous slots with random accepts, against the convolution of
    the accepted tokens; `shift` is added to the committed index where there is room."""
    generator = torch.Generator().manual_seed(tokens)
    weight, bias = parameters(width, bias)
    slots, slot_of = 6, torch.tensor([4, 1, 3])
    state = torch.full((slots, width - 2 + tokens + spare, CHANNELS), torch.nan, device=twin.device)
    accepted = [torch.randn(width - 1, CHANNELS, generator=generator) for _ in slot_of]
    for row, slot in enumerate(slot_of):
        state[slot, : width - 1] = accepted[row].to(state)
    committed, worst = torch.zeros(len(slot_of), dtype=torch.int64), 0.0
    update, device_parameters = twin("causal_conv1d").causal_conv1d_update, placed(twin, weight, bias)
    for _ in range(10):
        rows = torch.randperm(len(slot_of), generator=generator)[: int(torch.randint(1, 4, (), generator=generator))]
        x = torch.randn(len(rows), tokens, CHANNELS, generator=generator)
        places = (t[rows].to(twin.device) for t in (slot_of, committed))
        y = update(strided(x, twin.device), state, *device_parameters, *places).cpu()
        for i, row in enumerate(rows.tolist()):
            want = slow(torch.cat([accepted[row], x[i]])[None], weight, bias)[0, -tokens:]
            worst = max(worst, relative(y[i], want))
            count = int(torch.randint(1, tokens + 1, (), generator=generator))
            accepted[row] = torch.cat([accepted[row], x[i, :count]])
            committed[row] = min(max(count - 1 + shift, 0), tokens - 1)
            window = range(int(committed[row]), int(committed[row]) + width - 1)
            unused = [column for column in range(state.shape[1]) if column not in window]
            state[slot_of[row], unused] = torch.nan
    assert state[[0, 2, 5]].isnan().all()
    return worst


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_update(twin, width, tokens, bias):
    assert run_updates(twin, width, tokens, bias=bias) < TOLERANCE
    assert run_updates(twin, width, tokens, spare=2, bias=bias) < TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_window_that_is_not_taken_back_would_be_seen(twin, shift):
    assert run_updates(twin, 4, 3, shift=shift) > 1e-2


def test_worked_example(twin):
    """The example of the docstring: window a b c, new tokens x y z."""
    weight = parameters(4)[0].to(twin.device)
    state = torch.zeros(1, 5, CHANNELS, device=twin.device)
    state[0, :3] = torch.tensor([1.0, 2.0, 3.0], device=twin.device)[:, None]
    new = torch.tensor([10.0, 20.0, 30.0], device=twin.device)[None, :, None].repeat(1, 1, CHANNELS)
    zero = torch.tensor([0], device=twin.device)
    twin("causal_conv1d").causal_conv1d_update(new, state, weight, None, zero, zero)
    assert state[0, :, 0].tolist() == [2, 3, 10, 20, 30]


def test_padding_rows_touch_nothing(twin):
    weight, bias = (p.to(twin.device) for p in parameters(4))
    before = torch.randn(3, 5, CHANNELS, device=twin.device)
    state, slots = before.clone(), torch.tensor([-1, 1], device=twin.device)
    x = torch.randn(2, 3, CHANNELS, device=twin.device)
    y = twin("causal_conv1d").causal_conv1d_update(x, state, weight, bias, slots, torch.zeros_like(slots))
    assert (y[0] == 0).all() and torch.equal(state[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lens", [(1,), (2, 1, 3), (16, 17, 1, 40)], ids=str)
def test_rows_of_different_lengths(twin, lens, width, bias):
    """Windows of short rows reach back into the initial ones."""
    weight, bias = parameters(width, bias)
    x, initial = torch.randn(sum(lens), CHANNELS), torch.randn(len(lens), width - 1, CHANNELS)
    arguments = placed(twin, weight, bias, initial)
    y, windows = twin("causal_conv1d").causal_conv1d_varlen(strided(x, twin.device), *arguments, lens)
    for row, part in enumerate(x.split(lens)):
        want = slow(part[None], weight, bias, initial=initial[row : row + 1].transpose(1, 2))[0]
        assert relative(y.split(lens)[row].cpu(), want) < TOLERANCE
        assert torch.equal(windows[row].cpu(), torch.cat([initial[row], part])[1 - width :])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("channels", [5, 300])
def test_bf16(twin, channels, width, with_bias):
    """At most twice the error of torch's own convolution in bf16."""
    torch.manual_seed(1)
    weight, bias = torch.randn(channels, 1, width).bfloat16(), torch.randn(channels).bfloat16()
    bias = bias if with_bias else None
    lens, taps = (3, 2), width - 1
    x, initial = torch.randn(5, channels).bfloat16(), torch.randn(2, taps, channels).bfloat16()
    on_device = placed(twin, weight, bias)
    y, windows = twin("causal_conv1d").causal_conv1d_varlen(
        strided(x, twin.device), *on_device, initial.to(twin.device), lens
    )
    state = torch.full((3, taps + 2, channels), torch.nan, dtype=torch.bfloat16, device=twin.device)
    state[2, :taps] = initial[0].to(state)
    slots = torch.tensor([2, -1], device=twin.device)
    new = strided(x[:3].expand(2, 3, channels), twin.device)
    updated = twin("causal_conv1d").causal_conv1d_update(new, state, *on_device, slots, torch.zeros_like(slots))
    padded = torch.cat([initial[0], x[:3]]).t()[None]
    exact = (t if t is None else t.double() for t in (padded, weight, bias))
    want = F.silu(F.conv1d(*exact, groups=channels))[0].t()
    bound = 2 * relative(F.silu(F.conv1d(padded, weight, bias, groups=channels))[0].t(), want)
    assert y.dtype == updated.dtype == windows.dtype == torch.bfloat16
    assert relative(y[:3].cpu(), want) <= bound and relative(updated[0].cpu(), want) <= bound
    assert torch.equal(state[2, : taps + 2].cpu(), torch.cat([initial[0], x[:3]])[1:])
