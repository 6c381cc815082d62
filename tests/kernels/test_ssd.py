"""The chunked scan against the recurrence in fp64, with documents, states and gradients."""

import pytest
import torch
import torch.nn.functional as F

from mtpkit.kernels.device import chunks
from mtpkit.kernels.ssd import ssd_chunk_scan
from tests.kernels.conftest import Twin
from tests.kernels.recurrence import relative, scan, step

HEADS, WIDTH, STATE = 4, 3, 5
TOLERANCE = 1e-5


def make(length: int, batch: int = 1, groups: int = 2, seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
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
    check(make(20, batch=2, groups=groups) | {"D": None}, initial_state=make_state(2), chunk_size=16)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 64])
@pytest.mark.parametrize("lengths", [(16, 16, 16), (15, 17, 16), (1, 2, 3, 4, 5, 1, 1, 31), (40, 8), (33, 1)], ids=str)
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


def make_rows(lens: tuple[int, ...], device: str, dtype=torch.float32, sizes=(HEADS, WIDTH, 2, STATE)) -> dict:
    """Concatenated rows of tokens, as slices of wider tensors."""
    heads, width, groups, state = sizes
    generator = torch.Generator().manual_seed(len(lens))

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    xbc, dt = normal(sum(lens), heads * width + 2 * groups * state), normal(sum(lens), heads + 3) - 1
    x, B, C = xbc.split([heads * width, groups * state, groups * state], -1)
    return dict(
        x=x.unflatten(-1, (heads, width)),
        dt=dt[:, 3:],
        A_log=torch.rand(heads, generator=generator).to(device),
        B=B.unflatten(-1, (groups, state)),
        C=C.unflatten(-1, (groups, state)),
        D=normal(heads, dtype=torch.float32),
        dt_bias=normal(heads),
        dt_limit=(0.01, float("inf")),
        initial_states=normal(len(lens), heads, width, state, dtype=torch.float32),
        lens=lens,
    )


def scan_rows(inputs: dict, dtype=torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """y and final state of each row, one token after another in `dtype`."""
    steps = F.softplus(inputs["dt"].to(dtype) + inputs["dt_bias"].to(dtype)).clamp(*inputs["dt_limit"])
    A, D = -torch.exp(inputs["A_log"].to(dtype)), inputs["D"].to(dtype)
    x, B, C = (inputs[name].to(dtype) for name in "xBC")
    results = []
    for row, tokens in enumerate(torch.arange(len(x)).split(inputs["lens"])):
        state, outputs = inputs["initial_states"][row].to(dtype), []
        for t in tokens:
            y, state = step(state, x[t], steps[t], A, B[t], C[t], D)
            outputs.append(y)
        results.append((torch.stack(outputs), state))
    return results


@pytest.mark.parametrize("lens", [(1,), (5, 1, 17), (64, 63, 3)], ids=str)
def test_rows_of_different_lengths(twin, lens):
    inputs = make_rows(lens, twin.device)
    y, states = twin("ssd").ssd_varlen(**inputs, chunk_size=16)
    for part, state, (want_y, want_state) in zip(y.split(lens), states, scan_rows(inputs), strict=True):
        assert relative(part, want_y) < TOLERANCE and relative(state, want_state) < TOLERANCE


@pytest.mark.parametrize("name", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_rows_in_bf16(name, state_dtype):
    """At most twice the error of the recurrence in bf16, with states that were kept in either dtype."""
    twin = Twin(name, "cuda" if name == "cuda" else "cpu")
    inputs = make_rows((1, 70, 300, 5), twin.device, torch.bfloat16, (4, 64, 2, 128))
    inputs["initial_states"] = inputs["initial_states"].to(state_dtype)
    y, states = twin("ssd").ssd_varlen(**inputs, chunk_size=64)
    assert (y.dtype, states.dtype) == (torch.bfloat16, torch.float32)
    rows = zip(y.split(inputs["lens"]), states, scan_rows(inputs), scan_rows(inputs, torch.bfloat16), strict=True)
    for part, state, (want_y, want_state), (low_y, low_state) in rows:
        assert relative(part, want_y) <= 2 * relative(low_y, want_y)
        assert relative(state, want_state) <= 2 * relative(low_state, want_state)


@pytest.mark.parametrize("name", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_initial_states_are_zeros(name):
    twin = Twin(name, "cuda" if name == "cuda" else "cpu")
    inputs = make_rows((1, 70, 300, 5), twin.device, torch.bfloat16, (4, 64, 2, 128))
    found = []
    for initial in (torch.zeros_like(inputs["initial_states"]), None):
        found.append(twin("ssd").ssd_varlen(**{**inputs, "initial_states": initial}, chunk_size=64))
    for have, want in zip(*found, strict=True):
        assert relative(have, want.double()) < 1e-3


def test_chunks_stay_inside_their_rows():
    parts = chunks((5, 2), 4, torch.device("cpu"))
    assert [part.tolist() for part in vars(parts).values()] == [[0, 4, 5, 7], [0, 0, 1], [1, 2], [0, 5, 7]]
    parts = chunks((4, 1, 9), 4, torch.device("cpu"))
    assert parts.start.tolist() == [0, 4, 5, 9, 13, 14] and parts.row.tolist() == [0, 1, 2, 2, 2]
