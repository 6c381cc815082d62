"""RMS norms, and the activations by name."""

from typing import Any

import torch
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from mtpkit.kernels.activation import relu2, swiglu
from mtpkit.kernels.norm import gated_rms_norm, rms_norm

ACTIVATIONS = {"relu2": relu2, "swiglu": swiglu}


def norm_weight(size: int, config: Any) -> nn.Parameter:
    """A norm's weight, on the device and in the dtype that megatron-core builds with."""
    return nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(hidden_size, config)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [..., hidden_size], same dtype."""
        return rms_norm(x, self.weight, self.eps)

    def get_extra_state(self) -> None:
        """Nothing; present so that checkpoints have the keys that Transformer Engine's norms write."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored."""


class GatedRMSNorm(nn.Module):
    """RMS norm of x * silu(z) in groups, as Mamba2 applies it before its output projection."""

    def __init__(self, config: Any, hidden_size: int, group_size: int, tp_group: Any) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.group_size, self.tp_group = group_size, tp_group
        self.weight = norm_weight(hidden_size, config)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z: [..., hidden_size]; returns the dtype of x, computed in fp32."""
        return gated_rms_norm(x, z, self.weight, self.group_size, self.eps)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight, split over tensor-parallel ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
