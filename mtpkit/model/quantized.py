"""Linears of a model whose weights are quantised, and linears that wait for such weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mtpkit.errors import UserError
from mtpkit.model.formats import ONLINE, WEIGHTS_ALONE, Format, Nvfp4, Quantized
from mtpkit.model.formats.weight import QuantizedWeight

_MULTIPLE = 16
"""Matrices of the base are quantised only if both their sizes are multiples of this, as fp8
products need."""
_FOR_DRAFTS: Mapping[str, Format] = {"fp8_e4m3": WEIGHTS_ALONE, "nvfp4": Nvfp4()}
"""Formats of the lm_head's copy for drafts."""
_ROWS_AT_ONCE = 4096
"""Rows of an lm_head that are quantised at once, which bounds the memory that this takes."""


def linears(model: nn.Module) -> Iterator[Any]:
    """Yield the linears of a model whose `weight` may be a `QuantizedWeight`."""
    yield from (module for module in model.modules() if getattr(module, "quantizable", False))


def quantizable_base(model: HybridModel) -> Iterator[Any]:
    """Yield the linears of the base that `quantize_base` quantises."""
    return quantizable_in(model.decoder)


def quantizable_in(part: nn.Module) -> Iterator[Any]:
    """Yield the linears in a part of a model that have sizes for every format."""
    for module in linears(part):
        if not any(size % _MULTIPLE for size in module.weight.shape):
            yield module


@torch.no_grad()
def quantize_base(model: HybridModel) -> None:
    """Quantise the weights of the base's linears and experts to fp8, with a scale per row; see
    `mtpkit.model.formats.ONLINE`.

    Matrices with a size that is not a multiple of 16 stay as they are, as do lm_head, routers, and
    all that is no matrix of a linear.
    """
    for module in [*quantizable_base(model)]:
        weight = module.weight
        if isinstance(weight, nn.Parameter):
            quantize_linear(module, ONLINE)


def quantize_linear(module: Any, kind: Format, **others: Tensor) -> None:
    """Quantise the weight of a linear.

    Args:
        others: parts that do not follow from the weight, such as the scale of its inputs.
    """
    weight = module.weight
    matrix = Quantized(kind, tuple(weight.shape), kind.quantize(weight.detach()) | others)
    replace_weight(module, QuantizedWeight([matrix], weight.dtype))


def online(weight: Tensor) -> Quantized:
    """Quantise a matrix [N, K] as `quantize_base` does."""
    return Quantized(ONLINE, tuple(weight.shape), ONLINE.quantize(weight.detach()))


def for_drafts(rows: Tensor, dtype: str) -> QuantizedWeight:
    """Quantise rows [N, h] of the lm_head for drafts.

    Args:
        dtype: "fp8_e4m3" for a scale per row, or "nvfp4".

    Raises:
        UserError: NVFP4 has no groups for rows of this width.
    """
    kind = _FOR_DRAFTS[dtype]
    if dtype == "nvfp4" and rows.shape[1] % _MULTIPLE:
        raise UserError(
            f"draft_lm_head_dtype is nvfp4, but the lm_head's rows have {rows.shape[1]} numbers, no"
            f" multiple of {_MULTIPLE}: take fp8_e4m3"
        )
    pieces = [
        Quantized(kind, tuple(some.shape), kind.quantize(some))
        for some in rows.split(_ROWS_AT_ONCE)
    ]
    return QuantizedWeight(pieces, rows.dtype)


def replace_weight(module: nn.Module, weight: QuantizedWeight) -> None:
    """Put a quantised weight in place of the parameter of a linear."""
    del module.weight
    module.weight = weight


_NAMES = {"e4m3": "fp8", "int4": "int4", "e2m1": "nvfp4"}
"""Codes of matrices -> names of their formats."""


def quantized_as(model: nn.Module) -> set[str]:
    """Names of the formats that a model's matrices are in; empty if none is quantised."""
    weights = (module for module in model.modules() if isinstance(module, QuantizedWeight))
    return {_NAMES[code] for weight in weights for code in weight.codes}


def quantizes_inputs(model: nn.Module) -> bool:
    """Whether any product of a model quantises its inputs."""
    weights = (module for module in model.modules() if isinstance(module, QuantizedWeight))
    return any(weight.fp8_elements for weight in weights)


def widened_bytes(model: nn.Module) -> int:
    """Bytes that products of many rows take for a matrix in bf16, one at a time; those of a model
    in another dtype widen none."""
    weights = (module for module in model.modules() if isinstance(module, QuantizedWeight))
    narrow = (weight for weight in weights if weight.dtype == torch.bfloat16)
    return max((weight.widened_elements * 2 for weight in narrow), default=0)


@contextmanager
def waiting_linears() -> Iterator[None]:
    """Make linears built inside have their weights on device meta, without memory."""

    def without_memory(
        module: nn.Module, name: str, parameter: nn.Parameter
    ) -> nn.Parameter | None:
        if name != "weight" or parameter is None or not getattr(module, "quantizable", False):
            return None
        return nn.Parameter(parameter.to("meta"))

    # megatron-core allocates a linear's weight in the constructor; the hook frees it again before
    # the next linear is built.
    handle = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def wait(module: Any) -> None:
    """Take the memory from the weight of a linear, so that it waits for another one."""
    held = module.weight
    module.weight = nn.Parameter(held.to("meta"), requires_grad=held.requires_grad)
    module.weight.__dict__.update(held.__dict__)


def waiting_in(model: nn.Module) -> Iterator[Any]:
    """Yield the linears of a model that wait for their weights."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        # Where a whole model is on device meta, embedding and norms are no linears.
        if weight is not None and weight.is_meta and hasattr(module, "quantizable"):
            yield module


def allocate(module: Any, device: torch.device) -> None:
    """Give memory to the weight of a linear that waits for it."""
    waiting = module.weight
    weight = nn.Parameter(
        torch.empty_like(waiting, device=device), requires_grad=waiting.requires_grad
    )
    # Among them, how tensor-parallel ranks split the weight.
    weight.__dict__.update(waiting.__dict__)
    module.weight = weight
