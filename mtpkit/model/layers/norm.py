"""RMS norms, and the activations by name."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mtpkit.kernels.activation import relu2, swiglu
from mtpkit.kernels.norm import gated_rms_norm, rms_norm
from mtpkit.model.layers.base import NoExtraState, SplitOverRanks, split_parameter
from mtpkit.model.transformer_config import TransformerConfig

ACTIVATIONS = {"relu2": relu2, "swiglu": swiglu}


def norm_weight(
    size: int, config: TransformerConfig, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Make the weight of a norm of whole hidden states, on megatron-core's device. The norm
    multiplies by 1 at first.

    Args:
        dtype: None: the model's.
    """
    value = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    dtype = dtype or config.params_dtype
    weight = nn.Parameter(
        torch.full((size,), value, dtype=dtype, device=torch.cuda.current_device())
    )
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class RMSNorm(NoExtraState, nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension,
    times its weight or, with `layernorm_zero_centered_gamma`, 1 + its weight."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = norm_weight(hidden_size, config)

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [..., hidden_size], same dtype."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class GatedRMSNorm(SplitOverRanks):
    """RMS norm of x * silu(z) in groups, as Mamba2 applies it before its output projection."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, group_size: int, tp_group: ProcessGroup
    ) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.group_size = group_size
        self.tp_group = tp_group
        ones = torch.ones(
            hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight = split_parameter(ones)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Norm x * silu(z), both [..., hidden_size], in fp32; returns the dtype of x."""
        return gated_rms_norm(x, z, self.weight, self.group_size, self.eps)
