"""Scales of keys and values in a cache in fp8, which quantisers store beside the weights.

A key is its number in the cache times the key scale of its layer, and a value likewise. For an
attention X, files hold `X.k_proj.k_scale` and `X.v_proj.v_scale` (ModelOpt), or `X.k_scale` and
`X.v_scale` (compressed-tensors), each with one element; Megatron's layout has
`...self_attention.k_scale` and `...self_attention.v_scale`. A scale that is missing is 1.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mtpkit.checkpoint.quantized import CONFIG
from mtpkit.checkpoint.tensors import TensorInfo, TensorSource
from mtpkit.errors import UserError, listed
from mtpkit.kernels.kv_store import UNSCALED, KVScales
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.stages import first_layer

_NAME = re.compile(r"(.+?)(?:\.([kv])_proj)?\.([kv])_scale")
_BASE_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHAPES = ((), (1,))
_LEAST = torch.finfo(torch.float32).tiny
"""Least scale of which 1 / scale is finite in fp32."""


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of either layout is a scale of keys or of values, by its name."""
    return name.endswith((".k_scale", ".v_scale"))


class _Reader(Protocol):
    """A reader of either layout, which keeps scales apart from its `tensors`."""

    kv_scales: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor: ...


class KVScaleTensors:
    """The scales of a checkpoint under Megatron's names, checked.

    Args:
        attentions: the checkpoint's name of an attention -> Megatron's; None: they are the same.
        where: the checkpoint, for messages.

    Raises:
        UserError: scales of another shape or dtype, or not finite and positive, or of no attention
            of the model; the message names them.
    """

    def __init__(
        self, reader: _Reader, attentions: Mapping[str, str] | None, where: Path | str
    ) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, Tensor] = {}
        problems = []
        for stored, info in sorted(reader.kv_scales.items()):
            name = _megatron_name(stored, attentions)
            if name is None:
                problems.append(f"{stored} belongs to no attention of the model")
            elif name in self.tensors:
                problems.append(f"{stored} is a second scale of the same keys or values")
            elif info.dtype not in _DTYPES or tuple(info.shape) not in _SHAPES:
                have = f"{list(info.shape)} {info.dtype}".replace("torch.", "")
                problems.append(f"{stored} is {have} instead of one number in fp32, bf16 or fp16")
            else:
                self.tensors[name] = info
                self._values[name] = reader.read(stored)
                if not _LEAST <= (value := self._values[name].item()) < torch.inf:
                    problems.append(f"{stored} is {value}, not a positive finite number")
        if problems:
            raise UserError(
                f"{where}: {listed(problems, width=300, separator='; ')}; quantise keys and values"
                " again, or take these tensors out"
            )

    def read(self, name: str) -> Tensor:
        return self._values[name]

    def require_finite(self) -> None:
        """Do nothing: the values were checked before."""

    @property
    def by_attention(self) -> dict[str, KVScales]:
        """The scales of each attention that has some, by Megatron's name of the attention."""

        def value(name: str) -> float:
            return float(self._values[name].item()) if name in self._values else 1.0

        names = {name.rpartition(".")[0] for name in self.tensors}
        return {
            name: KVScales(value(f"{name}.k_scale"), value(f"{name}.v_scale")) for name in names
        }


def _megatron_name(stored: str, attentions: Mapping[str, str] | None) -> str | None:
    """Megatron's name of a scale, None if the model has no such attention."""
    match = _NAME.fullmatch(stored)
    if match is None or match[2] not in (None, match[3]):
        return None
    if attentions is None:
        return stored if match[2] is None and match[1].endswith(".self_attention") else None
    own = attentions.get(match[1])
    return None if own is None else f"{own}.{match[3]}_scale"


class RenamedScales:
    """Scales under the names of a Hugging Face checkpoint, given under Megatron's.

    Args:
        attentions: as for `KVScaleTensors`.
        original: the `config.json` that the checkpoint came with, if any. Names are those of its
            quantiser, or ModelOpt's.
    """

    def __init__(
        self,
        source: TensorSource,
        attentions: Mapping[str, str],
        original: Mapping[str, object] | None,
    ) -> None:
        theirs = {own: name for name, own in attentions.items()}
        settings = (original or {}).get(CONFIG)
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        of_projections = method != "compressed-tensors"
        self._source = source
        self._names = {}
        for name in source.tensors:
            attention, _, leaf = name.rpartition(".")
            between = f"{leaf[0]}_proj." if of_projections else ""
            self._names[f"{theirs[attention]}.{between}{leaf}"] = name
        self.tensors = {name: source.tensors[own] for name, own in self._names.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])

    def require_finite(self) -> None:
        """Do nothing: the values were checked before."""


def scales_of_heads(names: Iterable[str], attentions: Mapping[str, str]) -> set[str]:
    """The scales among `names` that belong to heads.

    Args:
        attentions: as for `KVScaleTensors`.
    """
    own = ((name, _megatron_name(name, attentions)) for name in names)
    return {name for name, megatron in own if megatron and megatron.startswith("mtp.")}


def set_kv_scales(model: HybridModel, scales: Mapping[str, KVScales]) -> None:
    """Give the attentions of a model, or of a pipeline stage, their scales, and 1 where `scales`
    has none.

    Args:
        scales: `KVScaleTensors.by_attention`.
    """
    for name, module in model.named_modules():
        if hasattr(module, "kv_scales"):
            module.kv_scales = scales.get(_global_name(name, model), UNSCALED)


def _global_name(name: str, model: HybridModel) -> str:
    """The name of a module in the undivided model: base layers count over all stages."""
    return _BASE_LAYER.sub(lambda number: str(int(number[0]) + first_layer(model)), name)
