"""Finds the scales that files give for inputs of linears, as quantisers do: by running texts."""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from mtpkit.checkpoint import save_hf_model
from mtpkit.checkpoint.directory import HFDirectory
from mtpkit.checkpoint.load import load_model
from mtpkit.errors import UserError, listed
from mtpkit.kernels.activation import swiglu
from mtpkit.kernels.linear import FP8_MAX
from mtpkit.model import SequenceInput, base_forward
from mtpkit.model.formats.weight import Around, QuantizedWeight, normed
from mtpkit.model.quantized import linears, replace_weight


class _Watched(QuantizedWeight):
    """A plain weight that notes the largest magnitude of its inputs."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__([weight.detach()], weight.dtype)
        self.largest = 0.0

    def multiply(self, x: Tensor, **around: Unpack[Around]) -> Tensor:
        inputs = swiglu(x) if around.get("swiglu") else normed(x, around)
        self.largest = max(self.largest, inputs.abs().amax().item()) if len(x) else self.largest
        return super().multiply(x, **around)


@torch.inference_mode()
def input_scales(source: HFDirectory, names: Collection[str], texts: Tensor) -> dict[str, Tensor]:
    """Scales [] fp32 of the inputs of a base's linears, with which the largest input becomes 448.

    Args:
        names: weights of the linears, as files name them.
        texts: tokens [texts, length].

    Raises:
        UserError: some linears had no inputs other than 0.
    """
    model = load_model(source)
    watched = {module: _Watched(module.weight) for module in linears(model.decoder)}
    for module, weight in watched.items():
        replace_weight(module, weight)
    for text in texts:
        base_forward(model, text[None], SequenceInput())

    # Written as weights, the numbers get the names of files.
    for module in linears(model):
        weight = watched.get(module)
        like = module.weight
        value = 0.0 if weight is None else weight.largest
        del module.weight
        module.weight = nn.Parameter(torch.full(like.shape, value), requires_grad=False)
    with tempfile.TemporaryDirectory() as place:
        save_hf_model(model, Path(place) / "hf")
        reader = HFDirectory(Path(place) / "hf").reader
        found = {name: reader.read(name).float().amax() / FP8_MAX for name in names}
    silent = [name for name, scale in found.items() if not scale]
    if silent:
        raise UserError(f"{source.path}: no inputs of {listed(silent)}: give more texts")
    return found
