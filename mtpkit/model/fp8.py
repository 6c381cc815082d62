"""Run the frozen base in fp8."""

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.errors import UserError
from mtpkit.kernels.linear import FP8, quantize_rows
from mtpkit.model.kinds import kinds_in
from mtpkit.model.layers.linear import ColumnParallelLinear, RowParallelLinear

_MULTIPLE = 16
"""fp8 products take matrices whose sizes are multiples of this."""
_FIRST_GPU = (8, 9)
"""Lowest compute capability with fp8 products."""


@torch.no_grad()
def use_fp8_base(model: HybridModel) -> None:
    """Make the base's linears multiply in fp8, for forward passes without gradients; call it after
    loading the weights.

    With backend `te`, Transformer Engine makes fp8 copies of the weights, which stay as they are.
    With `local`, the weights themselves become e4m3 with one scale per row, which takes half of
    bf16's memory; experts, and matrices with a size that is not a multiple of 16, stay. Checkpoints
    must leave out rounded weights, see `is_fp8`.

    Raises:
        UserError: the GPU, the model's sizes or its parallelism do not allow fp8.
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
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FIRST_GPU:
        raise UserError(
            f"base_fp8: {torch.cuda.get_device_name(device)} has no fp8 products; set"
            " base_fp8=false"
        )
    if model.config.tensor_model_parallel_size > 1:
        raise UserError(
            "base_fp8 with backend=local has no tensor parallelism: set parallel.tensor=1, or"
            " backend=te"
        )
    linears = [
        module
        for module in model.decoder.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    for module in linears:
        if not any(size % _MULTIPLE for size in module.weight.shape):
            module.weight.requires_grad_(False)
            module.weight.data, module.weight_scale = quantize_rows(module.weight)


def is_fp8(tensor: object) -> bool:
    """Return whether `use_fp8_base` has rounded a tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype == FP8
