"""Each op that writes recurrent states, with states in float16: what it stores is what it stores in
fp32, rounded with the noise of layer, request, position and element."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtpkit.kernels.ring import ring_length
from mtpkit.kernels.rounding.reference import Noise, narrowed
from tests.kernels.conftest import Twin

HEADS = 4
GROUPS = 2
WIDTH = 18
STATE = 21
LENGTH = ring_length(4)
SLOTS = torch.tensor([3, -1, 0, 4])
CONTEXTS = torch.tensor([19, 7, 33, 14])
LENS = torch.tensor([16, 2, 13, 3])
"""The last row's ring has room for four tokens more, the others' do not."""
REQUESTS = torch.tensor([2**61 + 5, 1, 77, 2**40])
SPAN = 7
"""Tokens of a row of a scan."""


def same(twin: Twin, have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether all bits are equal in the interpreter. Elsewhere one number in a thousand may be its
    neighbour: a compiled kernel may fuse a product with a sum for one dtype and not for the other,
    and PyTorch's exponentials depend in the last bit on where a number lies in its tensor."""
    if twin.name == "interpreter":
        return torch.equal(have, want)
    near = torch.allclose(have.float(), want.float(), rtol=2**-10, atol=2**-24)
    return near and float((have != want).float().mean()) < 1e-3


class Draw:
    """Random tensors on one device."""

    def __init__(self, twin: Twin) -> None:
        self.device = twin.device
        self.generator = torch.Generator().manual_seed(11)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)


def states(draw: Draw, *entries: int) -> torch.Tensor:
    return draw(6, *entries, HEADS, WIDTH, STATE).half()


def rings(draw: Draw, values: int, keys: int) -> list[torch.Tensor]:
    return [
        draw(6, LENGTH, HEADS, values),
        draw(6, LENGTH, GROUPS, keys),
        -draw(6, LENGTH, HEADS).abs() / 5,
    ]


def ssm(draw: Draw, *lead: int) -> dict[str, Any]:
    return dict(
        x=draw(*lead, HEADS, WIDTH),
        dt=draw(*lead, HEADS) - 1,
        A_log=draw(HEADS) / 4,
        B=draw(*lead, GROUPS, STATE),
        C=draw(*lead, GROUPS, STATE),
        D=draw(HEADS),
        dt_bias=draw(HEADS),
        dt_limit=(0.0, float("inf")),
    )


def delta(draw: Draw, *lead: int) -> dict[str, Any]:
    return dict(
        q=draw(*lead, GROUPS, STATE),
        k=draw(*lead, GROUPS, STATE),
        v=draw(*lead, HEADS, WIDTH),
        a=draw(*lead, HEADS),
        b=draw(*lead, HEADS),
        A_log=draw(HEADS) / 4,
        dt_bias=draw(HEADS) - 2,
    )


def folding(twin: Twin, draw: Draw) -> Callable:
    values, keys, rates = rings(draw, WIDTH, STATE)
    return lambda state, rows, **more: twin("ring_fold").fold_ring(
        state, values, keys, rates, *rows, **more
    )


def ssm_replay(twin: Twin, draw: Draw) -> Callable:
    ring_x, ring_B, ring_dt = rings(draw, WIDTH, STATE)
    kept = ring_x, ring_B, ring_dt.abs()
    inputs = ssm(draw, len(SLOTS), 4)
    return lambda state, rows, **more: twin("ssm_update").ssm_replay_update(
        state, *(ring.clone() for ring in kept), *rows, **inputs, **more
    )


def delta_replay(twin: Twin, draw: Draw) -> Callable:
    ring_u, ring_k, ring_g = rings(draw, WIDTH, STATE)
    kept = torch.nn.functional.normalize(ring_k, dim=-1), ring_u, ring_g
    inputs = delta(draw, len(SLOTS), 4)
    return lambda state, rows, **more: twin("gated_delta_rule").delta_replay_update(
        state, *(ring.clone() for ring in kept), *rows, **inputs, **more
    )


FOLDS = {"fold": (folding, 4), "ssm": (ssm_replay, 3), "delta": (delta_replay, 3)}
"""Ops that fold rings, and how many of the rows' rings they do fold."""


@pytest.mark.parametrize("op", FOLDS)
def test_folds(twin: Twin, op: str):
    """Of the rows whose rings are folded; rows that keep theirs, null rows and other slots are left
    as they are."""
    draw = Draw(twin)
    make, folded = FOLDS[op]
    run = make(twin, draw)
    before = states(draw)
    rows = [one.to(twin.device) for one in (SLOTS, CONTEXTS, LENS)]
    noise = Noise(REQUESTS.to(twin.device), 3, 8)
    wide, have = before.float(), before.clone()
    run(wide, rows)
    run(have, rows, noise=noise)
    changed = [row for row in range(folded) if SLOTS[row] >= 0]
    slots = SLOTS[changed].to(twin.device)
    ends = (CONTEXTS[changed] - 1).to(twin.device)
    want = before.clone()
    want[slots] = narrowed(wide[slots], torch.float16, noise.at(torch.tensor(changed)), ends)
    assert same(twin, have, want) and not torch.equal(have, wide.half())
    assert not torch.equal(have[slots], before[slots])


def scans(twin: Twin, draw: Draw, kind: str) -> Callable:
    tokens = SPAN * len(SLOTS)
    starts = torch.arange(0, tokens + 1, SPAN, device=twin.device)
    if kind == "ssm":
        inputs = ssm(draw, tokens)
        return lambda state, **more: twin("ssd").ssd_varlen(
            **inputs, starts=starts, chunk_size=4, states=state, **more
        )
    kept = delta(draw, tokens)
    normalised = [torch.nn.functional.normalize(kept[name], dim=-1) for name in "qk"]
    rates = -kept["a"].abs() / 5, torch.sigmoid(kept["b"])
    return lambda state, **more: twin("gated_delta_rule").delta_varlen(
        *normalised, kept["v"], *rates, starts, states=state, **more
    )


@pytest.mark.parametrize("kind", ["ssm", "delta"])
def test_ends_of_chunks(twin: Twin, kind: str):
    """Of rows that continue and of one that begins; the states are views with gaps."""
    draw = Draw(twin)
    run = scans(twin, draw, kind)
    before = states(draw, 2)
    contexts = torch.tensor([19, 7, 0, 14], device=twin.device)
    noise = Noise(REQUESTS.to(twin.device), 3, 8)
    where = dict(slots=SLOTS.to(twin.device), context_lens=contexts)
    wide, have = before.float(), before.clone()
    run(wide[:, 1], **where)
    run(have[:, 1], **where, noise=noise)
    live = torch.tensor([0, 2, 3])
    slots = SLOTS[live].to(twin.device)
    want = before.clone()
    ends = contexts[live] + SPAN - 1
    want[slots, 1] = narrowed(wide[slots, 1], torch.float16, noise.at(live), ends)
    assert same(twin, have, want) and not torch.equal(have, wide.half())


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", ["ssm", "delta"])
def test_snapshots_do_not_depend_on_the_tokens_of_a_step(twin: Twin, kind: str, tree: bool):
    """Each entry is the state after one token, rounded, and the next token continues that: a step
    of three tokens is three steps of one. In a tree, the last two tokens follow token 0."""
    draw = Draw(twin)
    inputs = (ssm if kind == "ssm" else delta)(draw, len(SLOTS), 3)
    name = "ssm" if kind == "ssm" else "gated_delta_rule"
    op = getattr(twin("ssm_update" if kind == "ssm" else name), f"{kind}_snapshot_update")
    before = states(draw, 3)
    slots = SLOTS.to(twin.device)
    newest = torch.tensor([1, 0, 2, 0], device=twin.device)
    parents = torch.tensor([-1, 0, 0 if tree else 1], device=twin.device).repeat(len(SLOTS), 1)
    depths = torch.tensor([0, 1, 1 if tree else 2], device=twin.device)
    positions = CONTEXTS.to(twin.device)[:, None] + depths
    noise = Noise(REQUESTS.to(twin.device), 3, 8, positions)

    have = before.clone()
    out = op(have, slots, newest, **inputs, parents=parents if tree else None, noise=noise)
    after = [before[slots, newest]]
    for t in range(3):
        one = {
            key: value[:, t : t + 1]
            if isinstance(value, torch.Tensor) and value.dim() > 1
            else value
            for key, value in inputs.items()
        }
        source = after[int(parents[0, t]) + 1]
        wide = torch.zeros(6, 3, HEADS, WIDTH, STATE, device=twin.device)
        wide[slots, 0] = source.float()
        got = op(wide, slots, torch.zeros_like(newest), **one)
        want = narrowed(wide[slots, 0], torch.float16, noise, positions[:, t])
        after.append(want)
        live = SLOTS >= 0
        assert same(twin, have[slots, t][live], want[live])
        assert torch.allclose(out[:, t][live], got[:, 0][live], atol=1e-4)
    others = [slot for slot in range(6) if slot not in SLOTS]
    assert torch.equal(have[others], before[others])


def test_bf16_products_keep_all_bits_of_a_state_in_float16(twin: Twin):
    """A state in float16 has three bits more than bf16."""
    draw = Draw(twin)
    inputs = {
        key: value.bfloat16() if isinstance(value, torch.Tensor) else value
        for key, value in ssm(draw, len(SLOTS), 4).items()
    }
    kept = [ring.bfloat16() for ring in rings(draw, WIDTH, STATE)[:2]]
    steps = torch.rand(6, LENGTH, HEADS, generator=draw.generator).to(twin.device)
    state = states(draw)
    rows = [one.to(twin.device) for one in (SLOTS, CONTEXTS, LENS)]
    found = [
        twin("ssm_update").ssm_replay_update(
            one.clone(), *(ring.clone() for ring in (*kept, steps)), *rows, **inputs
        )
        for one in (state, state.float())
    ]
    assert torch.allclose(*found, rtol=0, atol=1e-6 if twin.name != "cuda" else 2**-6)
