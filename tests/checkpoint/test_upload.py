"""Copies to a GPU, which here is one that fetches a buffer as late as it may."""

from functools import partial

import pytest
import torch

from mtpkit.checkpoint import load_config, load_model, open_directory
from mtpkit.checkpoint.load import fill_model
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.checkpoint.upload import BUFFERS, Uploader
from mtpkit.errors import UserError
from mtpkit.model import build_model
from tests.checkpoint.builders import edit
from tests.checkpoint.test_values import HF_NAMES, NOT_FINITE, put
from tests.shared import each


class LazyEvent:
    """An event of a GPU that works only when it is waited for."""

    def __init__(self) -> None:
        self.work: list = []

    def synchronize(self) -> None:
        while self.work:
            self.work.pop()()


class LazyUploader(Uploader):
    """Uploads to the CPU through buffers of 64 bytes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        target = super().__call__(tensor)
        for _, sent in self._ring:  # what a GPU does before it uses the tensor
            sent.synchronize()
        return target

    def _new_buffer(self):
        return torch.empty(64, dtype=torch.uint8), LazyEvent()

    def _send(self, buffer, destination, sent) -> None:
        assert not sent.work
        sent.work.append(partial(destination.copy_, buffer))


@pytest.fixture(autouse=True)
def lazy_gpu(monkeypatch):
    monkeypatch.setattr("mtpkit.checkpoint.upload.BUFFER_BYTES", 64)
    monkeypatch.setattr("mtpkit.checkpoint.tensors.Uploader", LazyUploader)


@each("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_bit_arrives(dtype):
    upload = LazyUploader(torch.device("cuda"))
    for count in (0, 1, 7, 8, 9, 31, 32, 33, 64 * BUFFERS, 64 * BUFFERS + 1, 500):
        tensor = torch.randint(-(2**15), 2**15, (count * 4,), dtype=torch.int16).view(torch.uint8)[
            : count * dtype.itemsize
        ]
        tensor = tensor.view(dtype)
        assert bits_equal(upload(tensor), tensor)
    wide = torch.randn(20, 12).to(dtype)
    for tensor in (wide.t(), wide[:, 3:5], wide[0, 0], wide[:0]):
        assert bits_equal(upload(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_the_same(hf_dir, dtype):
    model = build_model(load_config(hf_dir), dtype=dtype, init="none")
    fill_model(model, open_directory(hf_dir).weights(device="cuda"), hf_dir)
    want = load_model(hf_dir, dtype=dtype).state_dict()
    assert all(
        bits_equal(value, want[name])
        for name, value in model.state_dict().items()
        if value is not None
    )


@pytest.mark.parametrize("value", NOT_FINITE)
def test_all_numbers_are_checked_there(hf_dir, value):
    edit(hf_dir, put(value, *HF_NAMES))
    messages = []
    for device in ("cpu", "cuda"):
        with pytest.raises(UserError) as caught:
            model = build_model(load_config(hf_dir))
            fill_model(model, open_directory(hf_dir).weights(device=device), hf_dir)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and all(name in messages[0] for name in HF_NAMES)
