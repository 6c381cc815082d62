"""How many elements the weights of an MTP depth have, from a `ModelConfig` alone; for layers see `LayerKind`."""

from mtpkit.config import ModelConfig
from mtpkit.model.kinds import KINDS


def eh_proj_matrix(config: ModelConfig) -> int:
    """Elements of the projection with which a depth begins."""
    return 2 * config.hidden_size**2


def head_matrices(config: ModelConfig, all_experts: bool = False) -> int:
    """Elements of the matrices of one depth without the lm_head: eh_proj, and what a token uses of its layers.

    Args:
        all_experts: count all routed experts, rather than those that a token is sent to.
    """
    layers = [KINDS[letter].matrices(config) for letter in config.mtp.pattern]
    return eh_proj_matrix(config) + sum(layer.held if all_experts else layer.used for layer in layers)
