"""The frozen base's recurrent layers through prefill's kernels, document after document."""

import pytest
import torch

from mtpkit.kernels.dispatch import CHOICE
from mtpkit.model import SequenceInput, base_forward, build_model
from mtpkit.model.layers.recurrent import RecurrentMixer
from tests.kernels.recurrence import relative
from tests.model.toy import CONFIG, VOCAB, packed, toy_model, toy_tokens

LENGTHS = {
    "several": ((5, 1, 2, 6), (1, 13)),
    "of the kernel's width": ((3, 4, 4, 3), (14,)),
    "one": ((14,), (14,)),
}


def batch(rows):
    """Documents and positions [b, s]."""
    return tuple(torch.cat(parts) for parts in zip(*(packed(*row) for row in rows), strict=True))


@pytest.fixture
def as_prefill(monkeypatch):
    """Take the path of a GPU, with the ops' reference twins; counts how often."""
    calls = []
    monkeypatch.setattr(
        RecurrentMixer, "_as_prefill", lambda self, conv_in: calls.append(1) or True
    )
    return calls


@torch.no_grad()
@pytest.mark.parametrize("rows", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("pattern", ["M*M-", "G*G-"])
def test_hidden_states_are_those_of_the_scan(pattern, rows, as_prefill, monkeypatch):
    model, (documents, positions) = toy_model(pattern=pattern), batch(rows)
    tokens = toy_tokens(14, batch=2)
    have = base_forward(model, tokens, SequenceInput(documents, positions))
    assert len(as_prefill) == 2
    monkeypatch.setattr(RecurrentMixer, "_as_prefill", lambda self, conv_in: False)
    assert (
        relative(have, base_forward(model, tokens, SequenceInput(documents, positions)).double())
        < 1e-5
    )


@torch.no_grad()
def test_a_document_in_a_pack_is_as_if_alone(as_prefill):
    model = toy_model(pattern="MM")
    tokens = toy_tokens(14)
    together = base_forward(model, tokens, SequenceInput(*packed(5, 9)))
    alone = base_forward(model, tokens[:, 5:], SequenceInput())
    assert relative(together[5:], alone.double()) < 1e-5
    assert relative(base_forward(model, tokens, SequenceInput())[5:], alone.double()) > 1e-2


def test_starts_of_documents():
    cpu = torch.device("cpu")
    assert SequenceInput().starts(2, 5, cpu).tolist() == [0, 5, 10]
    documents = torch.tensor([[4, 4, 5, 7, 7], [7, 7, 7, 7, 7], [0, 1, 2, 3, 4]])
    assert SequenceInput(documents).starts(3, 5, cpu).tolist() == [
        0,
        2,
        3,
        5,
        10,
        11,
        12,
        13,
        14,
        15,
    ]
    assert SequenceInput(documents, document_lens=(7, 8)).starts(3, 5, cpu).tolist() == [0, 7, 15]


def test_who_takes_it(monkeypatch):
    """Low precision on a GPU where nothing is differentiated, unless the user says otherwise."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.delenv(CHOICE, raising=False)
    layer = build_model(CONFIG.replace(pattern="M"), device="cpu").decoder.layers[0].mixer
    there = torch.zeros(2, dtype=torch.bfloat16).as_subclass(OnGpu)
    assert not layer._as_prefill(there)
    with torch.no_grad():
        assert layer._as_prefill(there)
        assert not layer._as_prefill(there.float())
        assert not layer._as_prefill(torch.zeros(2, dtype=torch.bfloat16))
        monkeypatch.setenv(CHOICE, "reference")
        assert not layer._as_prefill(there)
    monkeypatch.delenv(CHOICE)
    layer.requires_grad_(False)
    assert layer._as_prefill(there)


@pytest.mark.gpu
@torch.no_grad()
def test_on_the_gpu_it_is_as_near_to_fp32_as_the_references_are(monkeypatch):
    sizes = dict(
        hidden_size=128, mamba_head_dim=32, mamba_state_dim=64, mamba_chunk_size=64, kv_channels=32
    )
    config = CONFIG.replace(pattern="M*M-M", **sizes)
    documents, positions = (t.cuda() for t in batch([(300, 1, 2, 130, 79), (512,)]))
    tokens = torch.randint(VOCAB, (2, 512), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for dtype, choice in (
        (torch.float32, "reference"),
        (torch.bfloat16, "reference"),
        (torch.bfloat16, "triton"),
    ):
        monkeypatch.setenv(CHOICE, choice)
        model = build_model(config, dtype=dtype, device="cuda", seed=3)
        found.append(base_forward(model, tokens, SequenceInput(documents, positions)).double())
    exact, plain, kernels = found
    assert (kernels - exact).norm() <= 1.5 * (plain - exact).norm()
