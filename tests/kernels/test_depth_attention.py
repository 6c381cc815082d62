"""Training attention against a softmax over all entries with a dense mask, differentiated by
autograd in fp64."""

import importlib
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mtpkit.kernels.attention.reference import AttentionWindow
from mtpkit.model import SequenceInput, base_forward, build_model, unroll_depths
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative
from tests.model.toy import CONFIG, packed, toy_tokens

TOLERANCE = 1e-5
HEADS = [(8, 8), (4, 2), (8, 1)]


class Inputs(NamedTuple):
    """Arguments of depth_attention with depths 2..k in one list; an empty list stands for
    sequence_attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    later: list[Tensor]

    def leaves(self, device="cpu", dtype=torch.float32) -> "Inputs":
        q, k, v, *later = (t.detach().to(device, dtype).requires_grad_() for t in self.flat())
        return Inputs(q, k, v, later)

    def flat(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.later]

    def cut(self, start: int, end: int) -> "Inputs":
        q, k, v, *later = (t[:, start:end] for t in self.flat())
        return Inputs(q, k, v, later)


def make(
    length: int,
    depths: int = 1,
    heads: int = 4,
    groups: int = 2,
    width: int = 6,
    batch: int = 1,
    values: int = 0,
) -> Inputs:
    """`values`: width of values; 0: that of keys."""
    q, k, v = (
        torch.randn(batch, length, count, channels)
        for count, channels in ((heads, width), (groups, width), (groups, values or width))
    )
    later = [torch.randn_like(like) for like in [k] * (depths - 1) + [v] * (depths - 1)]
    return Inputs(q, k, v, later)


def documents(*rows: tuple[int, ...]) -> Tensor:
    """[b, s]: one row for each list of lengths."""
    return torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    )


def plain(
    inputs: Inputs,
    docs: Tensor | None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    """[b, s, heads, e], in the dtype of the inputs."""
    q, k, v, later = inputs
    length = q.shape[1]
    count = len(later) // 2
    rep = q.shape[2] // k.shape[2]
    keys, values = (
        torch.cat(part, 1).repeat_interleave(rep, 2)
        for part in ([k, *later[:count]], [v, *later[count:]])
    )
    first = (
        torch.ones(length, length, dtype=torch.bool, device=q.device).tril().expand(len(q), -1, -1)
    )
    if docs is not None:
        first = first & (docs[:, :, None] == docs[:, None, :])
    if window is not None:
        first = first & in_window(window, length, count, docs).to(q.device)
    own = torch.eye(length, dtype=torch.bool, device=q.device).expand(len(q), -1, -1)
    mask = torch.cat([first] + [own] * count, 2)[:, None]
    scores = torch.einsum("bshd,bthd->bhst", q, keys) * (scale or 1 / math.sqrt(q.shape[-1]))
    return torch.einsum("bhst,bthd->bshd", scores.masked_fill(~mask, -math.inf).softmax(-1), values)


def in_window(window: AttentionWindow, length: int, later: int, docs: Tensor | None) -> Tensor:
    """[b, s, s] bool, by a plain loop: the keys of depth 1 that queries see, whose positions are
    `later` ahead."""
    rows = [[0] * length] if docs is None else docs.tolist()
    seen = torch.zeros(len(rows), length, length, dtype=torch.bool)
    for own, row in zip(seen, rows, strict=True):
        for i in range(length):
            for j in range(i + 1):
                sunk = j - row.index(row[i]) < window.sinks
                own[i, j] = sunk or i + later - j < window.size
    return seen


def attend(
    twin: Twin,
    inputs: Inputs,
    docs: Tensor | None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    ops, (q, k, v, later) = twin("attention"), inputs
    docs = docs if docs is None else docs.to(q.device)
    count = len(later) // 2
    if not count:
        return ops.sequence_attention(q, k, v, docs, scale, window)
    return ops.depth_attention(q, k, v, later[:count], later[count:], docs, scale, window)


def with_gradients(out: Tensor, pull: Tensor, inputs: Inputs) -> list[Tensor]:
    """The output and every gradient, on the CPU."""
    grads = torch.autograd.grad(out, inputs.flat(), pull.to(out))
    return [t.detach().cpu() for t in (out, *grads)]


def errors(
    twin: Twin,
    inputs: Inputs,
    docs: Tensor | None,
    dtype=torch.float32,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> list[float]:
    """Errors of the output and of every gradient."""
    pull = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3])
    leaves = inputs.leaves(twin.device, dtype)
    exact = inputs.leaves(dtype=dtype).leaves(dtype=torch.float64)
    have = with_gradients(attend(twin, leaves, docs, scale, window), pull.to(dtype), leaves)
    want = with_gradients(plain(exact, docs, scale, window), pull.to(dtype), exact)
    assert all(h.dtype == dtype for h in have)
    return [distance(h, w) for h, w in zip(have, want, strict=True)]


def distance(have: Tensor, want: Tensor) -> float:
    """`relative`, or the absolute error of small values: a query that sees one entry has no
    gradient, nor its key."""
    return (
        relative(have, want)
        if want.abs().max() > 0.1
        else (have.double() - want).abs().max().item()
    )


SIZES = {  # in fp32 the kernels take 32 queries against 16 keys
    "one": (1,),
    "part of a block": (17,),
    "block": (32,),
    "block + 1": (33,),
    "documents of one": (1, 1, 14, 1, 16, 1, 3),
    "documents of blocks": (32, 16, 16),
    "long documents": (36, 35),
}


WINDOWS = [
    AttentionWindow(4),
    AttentionWindow(5, 2),
    AttentionWindow(16, 16),
    AttentionWindow(40, 1),
    AttentionWindow(20, 17),
    AttentionWindow(99, 9),
]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{window.size}+{window.sinks}")
@pytest.mark.parametrize("depths", [1, 4])
def test_windows(twin, depths, window):
    """Of the last keys of a document, and of its first ones."""
    for lengths in [(131,), (64, 2, 65), (36, 35, 1, 1, 58), (130, 1)]:
        docs = documents(lengths) if len(lengths) > 1 else None
        assert max(errors(twin, make(131, depths), docs, window=window)) < TOLERANCE


@pytest.mark.parametrize("depths", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", SIZES.values(), ids=SIZES)
def test_output_and_gradients(twin, lengths, depths):
    docs = documents(lengths) if len(lengths) > 1 else None
    assert max(errors(twin, make(sum(lengths), depths, 2, 1), docs)) < TOLERANCE


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("width", [5, 40])
def test_grouped_heads_and_widths(twin, heads, groups, width, depths):
    assert max(errors(twin, make(18, depths, heads, groups, width), documents((13, 5)))) < TOLERANCE


@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize(("width", "values"), [(24, 16), (5, 40)])
def test_values_of_another_width_and_a_scale(twin, width, values, depths):
    inputs = make(18, depths, 4, 2, width, values=values)
    assert max(errors(twin, inputs, documents((13, 5)), scale=0.7)) < TOLERANCE


def test_rows_have_their_own_documents(twin):
    docs = documents((7, 30, 1), (38,), (1, 1, 36)) + torch.tensor([[0], [5], [-3]])
    assert max(errors(twin, make(38, 2, 2, 1, batch=3), docs)) < TOLERANCE


@pytest.mark.parametrize("depths", [1, 3])
def test_a_packed_document_is_as_if_alone(twin, depths):
    lengths = (1, 5, 20, 1, 9)
    inputs = make(sum(lengths), depths, 2, 1)
    docs = documents(lengths)
    pull = torch.randn(inputs.q.shape)
    leaves = inputs.leaves(twin.device)
    together = with_gradients(attend(twin, leaves, docs), pull, leaves)
    start = 0
    for length in lengths:
        part = inputs.cut(start, start + length).leaves(twin.device)
        alone = with_gradients(attend(twin, part, None), pull[:, start : start + length], part)
        for have, want in zip(together, alone, strict=True):
            assert distance(have[:, start : start + length], want.double()) < TOLERANCE
        start += length


@pytest.mark.parametrize("depths", [1, 2])
def test_blocks_of_other_documents_are_not_read(twin, depths):
    """NaN in unused entries would show even through a weight of zero."""
    if twin.name == "reference":
        pytest.skip("reads all")
    docs = documents((64, 33, 31, 64))
    inputs = make(192, depths, 2, 1)
    for tensor in inputs.flat():
        tensor[:, :64] = torch.nan
        tensor[:, 128:] = torch.nan
    leaves = inputs.leaves(twin.device)
    out, *grads = with_gradients(attend(twin, leaves, docs), torch.ones(leaves.q.shape), leaves)
    part = inputs.cut(64, 97).leaves(twin.device)
    alone = with_gradients(attend(twin, part, None), torch.ones(part.q.shape), part)
    for have, want in zip((out, *grads), alone, strict=True):
        assert relative(have[:, 64:97], want.double()) < TOLERANCE


def test_views_of_a_fused_projection(twin):
    """Inputs are [s, b, ..] transposed to [b, s, ..], as in the layers; the output has the strides
    of the queries."""
    projected = torch.randn(21, 2, 2, 4, 6, device=twin.device, requires_grad=True)
    fused = projected.transpose(0, 1)
    inputs = Inputs(fused[..., :2, :].reshape(2, 21, 4, 6), fused[..., 2, :], fused[..., 3, :], [])
    pull = torch.randn(2, 21, 4, 6).transpose(2, 3).contiguous().transpose(2, 3)
    later = make(21, 2, batch=2).leaves(twin.device).later
    out = attend(twin, Inputs(*inputs[:3], later), documents((20, 1), (3, 18)))
    assert out.stride() == inputs.q.stride() or twin.name == "reference"
    grad = torch.autograd.grad(out, projected, pull.to(out))[0].cpu()
    exact = [t.detach().double().cpu().requires_grad_() for t in inputs[:3]]
    want = plain(
        Inputs(*exact, [t.detach().double().cpu() for t in later]), documents((20, 1), (3, 18))
    )
    grad_q, grad_k, grad_v = torch.autograd.grad(want, exact, pull.double())
    whole = torch.cat([grad_q.unflatten(2, (2, 2)), grad_k[..., None, :], grad_v[..., None, :]], 3)
    assert relative(grad.transpose(0, 1), whole) < TOLERANCE


@pytest.mark.parametrize("depths", [1, 3])
def test_low_precision(twin, depths):
    """At most twice the error of the plain softmax in bf16; the interpreter multiplies fp16
    instead."""
    dtype = torch.float16 if twin.name == "interpreter" else torch.bfloat16
    inputs = make(145, depths, 2, 1, 20)
    docs = documents((3, 141, 1))
    low = inputs.leaves(dtype=dtype)
    exact = low.leaves(dtype=torch.float64)
    pull = torch.randn(inputs.q.shape).to(dtype)
    want = with_gradients(plain(exact, docs), pull, exact)
    bounds = [
        2 * relative(h, w)
        for h, w in zip(with_gradients(plain(low, docs), pull, low), want, strict=True)
    ]
    leaves = low.leaves(twin.device, dtype)
    have = with_gradients(attend(twin, leaves, docs), pull, leaves)
    assert all(relative(h, w) <= b for h, w, b in zip(have, want, bounds, strict=True))


@pytest.mark.parametrize("depths", [1, 2])
def test_another_mask_would_be_seen(twin, depths):
    inputs = make(34, depths, 2, 1).leaves(twin.device)
    docs = documents((20, 14))
    out = attend(twin, inputs, docs)
    other = attend(twin, inputs, documents((19, 15)))
    assert relative(out.detach(), other.detach().double()) > 1e-2
    inputs.k.data = inputs.k.data.roll(1, 1)
    assert relative(attend(twin, inputs, docs).detach(), out.detach().double()) > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("depths", [1, 3])
def test_two_runs_agree_to_the_bit(depths):
    twin = Twin("cuda", "cuda")
    docs = documents((600, 400))
    inputs = make(1000, depths, 16, 4, 64).leaves("cuda", torch.bfloat16)
    runs = [
        with_gradients(attend(twin, inputs, docs), torch.ones(inputs.q.shape), inputs)
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("attention", ["serving", "per_depth"])
def test_rotary_families(twin, attention, monkeypatch):
    """Depths of heads whose layers rotate, normalise and group: states and gradients are those of
    the reference."""
    rotary = dict(
        position_embedding_type="rope", rotary_percent=0.5, qk_layernorm=True, mtp_pattern="*-"
    )
    model = build_model(CONFIG.replace(**rotary), device=twin.device, seed=3)
    docs, positions = (t.to(twin.device) for t in packed(12, 1, 8))
    tokens = toy_tokens(21).to(twin.device)
    layer = importlib.import_module("mtpkit.model.layers.attention")
    with torch.no_grad():
        hidden = base_forward(model, tokens, SequenceInput(docs, positions))
    parameters = list(model.mtp.parameters())
    found = []
    pull = torch.randn(3, *hidden.shape).to(hidden)
    for ops in (Twin("reference", "cpu")("attention"), twin("attention")):
        monkeypatch.setattr(layer, "sequence_attention", ops.sequence_attention)
        monkeypatch.setattr(layer, "depth_attention", ops.depth_attention)
        states = torch.stack(
            list(unroll_depths(model, hidden, tokens, 3, attention, docs, positions))
        )
        found.append([states.detach(), *torch.autograd.grad((states * pull).sum(), parameters)])
    want, have = found
    assert all(relative(h, w.double()) < 1e-4 for h, w in zip(have, want, strict=True))


REAL = {
    "8B": (4096, 32, 8, 128, (4096,)),
    "packed": (8192, 32, 8, 128, (1, 3000, 17, 130, 5044)),
    "narrow": (2048, 16, 16, 64, (100, 1948)),
    "odd": (777, 10, 5, 80, (700, 77)),
    "wide": (1000, 8, 2, 256, (1000,)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("depths", [1, 3])
@pytest.mark.parametrize(("length", "heads", "groups", "width", "lengths"), REAL.values(), ids=REAL)
def test_real_sizes(length, heads, groups, width, lengths, depths):
    """bf16 on the GPU errs at most twice as much as the plain softmax does; a group of heads at a
    time is held."""
    twin = Twin("cuda", "cuda")
    docs = documents(lengths).cuda()
    low = make(length, depths, heads, groups, width).leaves("cuda", torch.bfloat16)
    pull = torch.randn(low.q.shape).cuda().bfloat16()
    rep = heads // groups
    have = with_gradients(attend(twin, low, docs), pull, low)
    for group in (0, groups - 1):
        part = Inputs(
            low.q[:, :, group * rep :][:, :, :rep], *(t[:, :, [group]] for t in low.flat()[1:3]), []
        )
        part = part._replace(later=[t[:, :, [group]] for t in low.later])
        span = slice(group * rep, (group + 1) * rep)
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            leaves = part.leaves("cuda", dtype)
            results.append(with_gradients(plain(leaves, docs), pull[:, :, span], leaves))
        for name, (got, want, near) in enumerate(zip(have, *results, strict=True)):
            got = got[:, :, span] if got.shape[2] == heads and name < 2 else got[:, :, [group]]
            assert relative(got, want) <= 2 * relative(near, want), name


@pytest.mark.gpu
def test_memory_is_linear_in_the_length():
    """At 65,536 tokens the scores of one head alone would take 17 GB."""
    inputs = make(65536, 2, 8, 2, 128).leaves("cuda", torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(Twin("cuda", "cuda"), inputs, None).sum().backward()
    own = sum(t.numel() * t.element_size() for t in inputs.flat())
    assert torch.cuda.max_memory_allocated() - before < 4 * own
