"""What a backend is: the module classes that layers are built from."""

from dataclasses import dataclass

from megatron.core.models.backends import BackendSpecProvider


@dataclass(frozen=True)
class Backend:
    """Modules with megatron-core's constructor signatures and Megatron's parameter names."""

    norm: type
    column_linear: type
    norm_column_linear: type
    """Column-parallel linear that holds the norm of its input as `layer_norm_weight`."""
    copied_linear: type
    """Linear without bias that every tensor-parallel rank holds whole. Its constructor takes (input
    size, output size, config); it maps [..., in] to [..., out]."""
    row_linear: type
    """Row-parallel linear that can add its output to a residual stream, see
    `layers.linear.RowParallelLinear`."""
    core_attention: type
    """Causal attention over sequences, called like `kernels.attention.sequence_attention`."""
    moe_provider: BackendSpecProvider
    """megatron-core's spec provider for the experts."""
