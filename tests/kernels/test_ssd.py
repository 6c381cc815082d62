"""The chunked scan against the recurrence in fp64, with documents, states and gradients."""

import pytest
import torch

from mtpkit.kernels.ssd.reference import ssd_chunk_scan
from tests.kernels.recurrence import relative, scan

HEADS = 4
WIDTH = 3
STATE = 5
TOLERANCE = 1e-5


def make(
    length: int, batch: int = 1, groups: int = 2, seed: int = 0, dtype=torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return dict(
        x=normal(batch, length, HEADS, WIDTH),
        dt=torch.rand(batch, length, HEADS, generator=generator) * 0.5 + 1e-3,
        A=-torch.rand(HEADS, generator=generator) * 4 - 0.05,
        B=normal(batch, length, groups, STATE),
        C=normal(batch, length, groups, STATE),
        D=torch.randn(HEADS, generator=generator),
    )


def make_state(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, HEADS, WIDTH, STATE, generator=torch.Generator().manual_seed(9))


def documents(*lengths: int) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def check(inputs, **kwargs) -> None:
    chunk_size = kwargs.pop("chunk_size")
    y, state = ssd_chunk_scan(**inputs, **kwargs, chunk_size=chunk_size)
    want_y, want_state = scan(**inputs, **kwargs)
    assert relative(y, want_y) < TOLERANCE
    assert relative(state, want_state) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_lengths_and_chunks(length, chunk_size):
    check(make(length), chunk_size=chunk_size)
    check(make(length), initial_state=make_state(), chunk_size=chunk_size)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_and_no_skip(groups):
    check(
        make(20, batch=2, groups=groups) | {"D": None}, initial_state=make_state(2), chunk_size=16
    )


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
@pytest.mark.parametrize(
    "lengths", [(16, 16, 16), (15, 17, 16), (1, 2, 3, 4, 5, 1, 1, 31), (40, 8), (33, 1)], ids=str
)
def test_documents(lengths, chunk_size, with_state):
    docs = documents(*lengths)
    initial = make_state() if with_state else None
    check(make(docs.shape[1]), documents=docs, initial_state=initial, chunk_size=chunk_size)


def test_rows_have_their_own_documents():
    docs = torch.cat([documents(7, 13), documents(16, 4), documents(20)])
    check(make(20, batch=3), documents=docs, initial_state=make_state(3), chunk_size=8)


@pytest.mark.parametrize("cut", [1, 15, 16, 37])
def test_two_passes_with_the_state_carried_equal_one(cut):
    inputs = make(38)

    def part(span: slice) -> dict[str, torch.Tensor]:
        return {name: value if name in "AD" else value[:, span] for name, value in inputs.items()}

    whole, final = ssd_chunk_scan(**inputs, chunk_size=16)
    first, state = ssd_chunk_scan(**part(slice(cut)), chunk_size=16)
    second, state = ssd_chunk_scan(**part(slice(cut, None)), initial_state=state, chunk_size=16)
    assert relative(torch.cat([first, second], 1), whole.double()) < TOLERANCE
    assert relative(state, final.double()) < TOLERANCE


def gradients(function, inputs, weights, **kwargs):
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    y, state = function(**leaves, **kwargs)
    ((y * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(packed):
    inputs = make(21) | {"initial_state": make_state()}
    weights = torch.randn(1, 21, HEADS, WIDTH), torch.randn(1, HEADS, WIDTH, STATE)
    docs = documents(3, 5, 8, 5) if packed else None
    have = gradients(ssd_chunk_scan, inputs, weights, documents=docs, chunk_size=8)
    want = gradients(scan, inputs, [w.double() for w in weights], documents=docs)
    for name, grad in want.items():
        assert relative(have[name], grad.double()) < TOLERANCE, name


def test_rare_large_steps_among_small_ones():
    """A token that forgets everything does not blur the tokens after it."""
    inputs = make(64)
    inputs["dt"] = torch.full_like(inputs["dt"], 1e-3)
    inputs["dt"][:, ::7] = 20.0
    check(inputs | {"A": torch.full((HEADS,), -16.0)}, chunk_size=64)


def test_low_precision_is_rounded_at_the_ends_only():
    inputs = make(33, dtype=torch.bfloat16)
    y, state = ssd_chunk_scan(**inputs, chunk_size=16)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    want_y, want_state = scan(**inputs)
    assert relative(y, want_y) < 2**-8 and relative(state, want_state) < TOLERANCE


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D"])
def test_a_wrong_argument_would_be_seen(name):
    inputs = make(20)
    wrong = inputs | {name: inputs[name].roll(1, 0 if name in "AD" else 1)}
    assert relative(ssd_chunk_scan(**wrong, chunk_size=16)[0], scan(**inputs)[0]) > 1e-2
