"""Count the elements of the heads' matrices and the FLOPs per token of training them, from a
`ModelConfig` alone.

FLOPs count the weights that a token uses; in a mixture of experts, only those of the experts that
it is routed to. Embeddings, attention scores and recurrent states are left out.
"""

import math

from mtpkit.config import ModelConfig
from mtpkit.model.kinds import KINDS

FORWARD = 2
"""FLOPs per weight and token of a forward pass: a multiplication and an addition."""
TRAINED = 6
"""FLOPs per weight and token of a forward pass and the gradients of inputs and weights."""
FROZEN = 4
"""FLOPs per weight and token of a forward pass and the gradient of the inputs: for the untrained
lm_head."""


def eh_proj_matrix(config: ModelConfig) -> int:
    """Count the elements of `eh_proj`, the projection with which a depth begins."""
    return 2 * config.hidden_size**2


def head_matrices(config: ModelConfig, all_experts: bool = False) -> int:
    """Count the elements of one depth's matrices without the lm_head: `eh_proj`, and the elements
    of its layers that a token uses.

    Args:
        all_experts: count all routed experts, rather than those that a token is routed to.
    """
    layers = [KINDS[letter].matrices(config) for letter in config.mtp.pattern]
    return eh_proj_matrix(config) + sum(
        layer.held if all_experts else layer.used for layer in layers
    )


def head_parameters(config: ModelConfig) -> int:
    """Count the parameters of all heads, which training changes; the experts' biases are no
    parameters."""
    layers = [KINDS[letter].tensors(config) for letter in config.mtp.pattern]
    shapes = [
        shape
        for layer in layers
        for name, shape in layer.items()
        if not name.endswith("expert_bias")
    ]
    # enorm, hnorm and the final norm.
    norms = 3 * config.hidden_size
    return config.mtp.num_layers * (eh_proj_matrix(config) + norms + sum(map(math.prod, shapes)))


def step_flops(config: ModelConfig, num_depths: int, base_layers: bool = True) -> float:
    """Count the FLOPs per token of a training step with K depths: base forward, heads and lm_head
    forward and backward.

    The base's own logits, which only some losses need, are left out.

    Args:
        base_layers: False: the base's hidden states are cached, and it does not run.
    """
    hidden = config.hidden_size
    kinds = [KINDS[letter] for letter in config.pattern]
    layers = sum(kind.matrices(config).used + kind.vectors(config) for kind in kinds)
    norms = 3 * hidden + sum(KINDS[letter].vectors(config) for letter in config.mtp.pattern)
    head = head_matrices(config) + norms if config.mtp.num_depths else 0
    applied = num_depths if config.mtp.repeated else config.mtp.num_depths
    # `hidden` stands for the weights of the final norm.
    base = layers + hidden if base_layers else 0
    return float(
        FORWARD * base + TRAINED * head * applied + FROZEN * config.vocab_size * hidden * num_depths
    )
