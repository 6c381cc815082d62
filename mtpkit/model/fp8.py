"""Run the frozen base in fp8."""

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.errors import UserError
from mtpkit.model.kinds import kinds_in
from mtpkit.model.quantized import quantize_base

_FIRST_GPU = (8, 9)
"""Lowest compute capability with fp8 products."""


@torch.no_grad()
def use_fp8_base(model: HybridModel) -> None:
    """Make the base's linears multiply in fp8, for forward passes without gradients; call it after
    loading the weights.

    With backend `te`, Transformer Engine makes fp8 copies of the weights, which stay as they are.
    With `local`, the weights themselves become e4m3, see `quantize_base`; checkpoints leave them
    out. Weights that are read from files are quantised while they are loaded instead, which never
    needs memory for all of them in bf16.

    Raises:
        UserError: the GPU or the model's sizes do not allow fp8.
    """
    if model.backend == "te":
        from mtpkit.model.layers.te import check_fp8, fp8_forward

        # Before the sizes of matrices: with experts no sizes would do.
        if not all(kind.fp8_products for kind in kinds_in(model.mtpkit_config.pattern)):
            raise UserError(
                "fp8 needs a multiple of 8 tokens per product, which experts may not get; set"
                " base_fp8=false"
            )
        check_fp8(model)
        model.base_context = fp8_forward
        return
    require_fp8(next(model.parameters()).device)
    quantize_base(model)


def require_fp8(
    device: torch.device, setting: str = "base_fp8", remedy: str = "set base_fp8=false"
) -> None:
    """Check that a device has fp8 products, if it is a GPU.

    Args:
        setting, remedy: what needs them, and what to do without them, for the message.

    Raises:
        UserError: it has none.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_GPU:
        raise UserError(
            f"{setting}: {torch.cuda.get_device_name(device)} has no fp8 products; {remedy}"
        )
