"""The causal convolution against a plain loop over taps, and its update over random accept
histories."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from mtpkit.kernels.causal_conv1d import causal_conv1d
from tests.kernels.conftest import Twin
from tests.kernels.inputs import conv_parameters
from tests.kernels.recurrence import relative
from tests.shared import covering

CHANNELS = 5
TOLERANCE = 1e-5


def parameters(width: int, bias: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(width))
    return conv_parameters(normal, CHANNELS, width, bias)


def slow(x, weight, bias, documents=None, initial=None):
    """One token and one tap after another, in fp64; x [b, s, c]."""
    x = x.double()
    weight = weight.double()
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
    assert (
        relative(
            causal_conv1d(x, weight, bias, initial=initial), slow(x, weight, bias, initial=initial)
        )
        < TOLERANCE
    )


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
    x = torch.randn(1, 9, CHANNELS)
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 3]])
    grads = []
    for function in (causal_conv1d, slow):
        weight, bias = (p.requires_grad_() for p in parameters(4))
        (
            function(x, weight, bias, documents) * torch.linspace(-1, 1, 9)[None, :, None]
        ).sum().backward()
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


def run_updates(
    twin, width: int, tokens: int, spare: int = 0, shift: int = 0, bias: bool = True
) -> float:
    """Worst relative error over steps of rows in non-contiguous slots with random accepts, against
    the convolution of the accepted tokens; `shift` is added to the committed index where there is
    room."""
    generator = torch.Generator().manual_seed(tokens)
    weight, bias = parameters(width, bias)
    slots = 6
    slot_of = torch.tensor([4, 1, 3])
    state = torch.full((slots, width - 2 + tokens + spare, CHANNELS), torch.nan, device=twin.device)
    accepted = [torch.randn(width - 1, CHANNELS, generator=generator) for _ in slot_of]
    for row, slot in enumerate(slot_of):
        state[slot, : width - 1] = accepted[row].to(state)
    committed = torch.zeros(len(slot_of), dtype=torch.int64)
    worst = 0.0
    update = twin("causal_conv1d").causal_conv1d_update
    device_parameters = placed(twin, weight, bias)
    for _ in range(10):
        rows = torch.randperm(len(slot_of), generator=generator)[
            : int(torch.randint(1, 4, (), generator=generator))
        ]
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
    state = before.clone()
    slots = torch.tensor([-1, 1], device=twin.device)
    x = torch.randn(2, 3, CHANNELS, device=twin.device)
    y = twin("causal_conv1d").causal_conv1d_update(
        x, state, weight, bias, slots, torch.zeros_like(slots)
    )
    assert (y[0] == 0).all() and torch.equal(state[[0, 2]], before[[0, 2]])


class Rows:
    """Rows of tokens, each after its window; null where `contexts` is None. Windows are a view of
    more columns, their slots are in any order, and those that no row may read are NaN."""

    def __init__(self, lens, contexts, width, device, bias=True):
        self.lens = lens
        self.contexts = contexts
        self.weight, self.bias = parameters(width, bias)
        self.x = torch.randn(sum(lens), CHANNELS)
        self.columns = torch.randn(len(lens) + 2, width + 2, CHANNELS)
        self.columns[:, 0], self.columns[:, width:] = torch.nan, torch.nan
        slots = torch.randperm(len(lens) + 2)[: len(lens)].tolist()
        self.slots = [
            -1 if context is None else slot for slot, context in zip(slots, contexts, strict=True)
        ]
        self.columns[
            [slot for slot, context in zip(slots, contexts, strict=True) if not context]
        ] = torch.nan
        self.before, self.columns = self.columns.clone(), self.columns.to(device)

    def run(self, twin, kernel_width: int, keep: bool = True) -> torch.Tensor:
        """The op of a twin on the rows; the result on the CPU."""
        starts = torch.tensor([0, *self.lens]).cumsum(0) + 9
        places = torch.tensor(self.slots), torch.tensor([context or 0 for context in self.contexts])
        windows = (self.columns[:, 1:kernel_width], *placed(twin, *places)) if keep else ()
        arguments = placed(twin, self.weight, self.bias, starts)
        return (
            twin("causal_conv1d")
            .causal_conv1d_varlen(strided(self.x, twin.device), *arguments, *windows)
            .cpu()
        )

    def check(self, y, kernel_width: int) -> None:
        """y and the windows are right, and nothing else has changed by a bit."""
        want = self.before.clone()
        for part, out, slot, context in zip(
            self.x.split(self.lens), y.split(self.lens), self.slots, self.contexts, strict=True
        ):
            if slot < 0:
                assert (out == 0).all()
                continue
            window = self.before[slot, 1:kernel_width]
            window = window if context else torch.zeros_like(window)
            if len(part):
                right = slow(part[None], self.weight, self.bias, initial=window.t()[None])[0]
                assert relative(out, right) < TOLERANCE
            want[slot, 1:kernel_width] = torch.cat([window, part])[len(part) :]
        assert torch.equal(self.columns.cpu().view(torch.uint8), want.view(torch.uint8))


VARLEN = {
    "one token": ([1], [0]),
    "short": ([1, 2, 3, 1, 2, 3], [0, 0, 0, 1, 4, 2]),
    "tiles": ([16, 15, 17, 33, 48], [0, 5, 9, 2, 0]),
    "empty": ([0, 4, 0, 0, 20, 0], [0, 3, 7, 0, 1, 2]),
    "null at the end": ([18, 2, 0, 37], [3, 0, 4, None]),
    "null in the middle": ([2, 19, 17, 0, 1], [0, None, 4, None, 7]),
    "only null": ([21, 0], [None, None]),
    "no tokens": ([0, 0, 0], [0, 3, None]),
    "many rows": (
        [row % 3 for row in range(140)],
        [(None, 0, 3)[row // 3 % 3] for row in range(140)],
    ),
}


# A bias is added after the sum, whose terms alone depend on rows and width: the three meet in
# pairs.
@pytest.mark.parametrize(("rows", "width", "bias"), covering(VARLEN, (2, 4), (False, True)))
def test_rows_of_different_lengths(twin, rows, width, bias):
    lens, contexts = VARLEN[rows]
    rows = Rows(lens, contexts, width, twin.device, bias)
    rows.check(rows.run(twin, width), width)


@pytest.mark.parametrize(("lens", "contexts"), [([40], [5]), ([17, 2, 50], [3, 1, 0])], ids=str)
def test_programs_run_in_any_order(lens, contexts, monkeypatch):
    """The interpreter runs the programs of a row from its first tile to its last; here, from the
    last to the first."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(
            *(size - 1 - place for size, place in zip(builder.grid_dim, (x, y, z), strict=True))
        )

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    rows = Rows(lens, contexts, 4, "cpu")
    rows.check(rows.run(Twin("interpreter", "cpu"), 4), 4)


def test_rows_without_windows_start_from_zeros(twin):
    rows = Rows([5, 0, 20, 1], [0, 0, 0, 0], 4, twin.device)
    y = rows.run(twin, 4, keep=False)
    assert torch.equal(rows.columns.cpu().view(torch.uint8), rows.before.view(torch.uint8))
    for part, out in zip(rows.x.split(rows.lens), y.split(rows.lens), strict=True):
        assert (
            len(part) == 0 or relative(out, slow(part[None], rows.weight, rows.bias)[0]) < TOLERANCE
        )


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2, 18), (16, 32)], ids=str)
def test_a_row_in_parts_is_the_row(twin, cuts):
    whole = Rows([40], [0], 4, twin.device)
    want = whole.run(twin, 4)
    parts = Rows([40], [0], 4, twin.device)
    parts.weight = whole.weight
    parts.bias = whole.bias
    outputs = []
    for begin, end in pairwise([0, *cuts, 40]):
        parts.x = whole.x[begin:end]
        parts.lens = [end - begin]
        parts.contexts = [begin]
        outputs.append(parts.run(twin, 4))
    assert relative(torch.cat(outputs), want.double()) < 1e-6
    assert torch.equal(parts.columns[parts.slots, 1:4], whole.columns[whole.slots, 1:4])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("channels", [5, 300])
def test_bf16(twin, channels, width, with_bias):
    """At most twice the error of torch's own convolution in bf16."""
    torch.manual_seed(1)
    weight = torch.randn(channels, 1, width).bfloat16()
    bias = torch.randn(channels).bfloat16()
    bias = bias if with_bias else None
    taps = width - 1
    x = torch.randn(5, channels).bfloat16()
    initial = torch.randn(2, taps, channels).bfloat16()
    on_device = placed(twin, weight, bias)
    windows = initial.clone().to(twin.device)
    rows = placed(
        twin, torch.tensor([0, 3, 5]), windows, torch.tensor([0, 1]), torch.tensor([9, 9])
    )
    y = twin("causal_conv1d").causal_conv1d_varlen(strided(x, twin.device), *on_device, *rows)
    state = torch.full((3, taps + 2, channels), torch.nan, dtype=torch.bfloat16, device=twin.device)
    state[2, :taps] = initial[0].to(state)
    slots = torch.tensor([2, -1], device=twin.device)
    new = strided(x[:3].expand(2, 3, channels), twin.device)
    updated = twin("causal_conv1d").causal_conv1d_update(
        new, state, *on_device, slots, torch.zeros_like(slots)
    )
    padded = torch.cat([initial[0], x[:3]]).t()[None]
    exact = (t if t is None else t.double() for t in (padded, weight, bias))
    want = F.silu(F.conv1d(*exact, groups=channels))[0].t()
    bound = 2 * relative(F.silu(F.conv1d(padded, weight, bias, groups=channels))[0].t(), want)
    assert y.dtype == updated.dtype == windows.dtype == torch.bfloat16
    assert relative(y[:3].cpu(), want) <= bound and relative(updated[0].cpu(), want) <= bound
    assert torch.equal(windows[0].cpu(), x[3 - taps : 3])
    assert torch.equal(state[2, : taps + 2].cpu(), torch.cat([initial[0], x[:3]])[1:])
