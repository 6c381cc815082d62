"""How many elements the weights of a layer have, from a `ModelConfig` alone."""

from mtpkit.config import ModelConfig


def layer_matrices(config: ModelConfig, letter: str) -> int:
    """Elements of the matrices of one layer that is no mixture of experts."""
    hidden = config.hidden_size
    if letter == "M":
        return hidden * (config.mamba2.projected + config.mamba2.inner)
    if letter == "*":
        sizes = config.attention
        return 2 * hidden * sizes.kv_channels * (sizes.num_attention_heads + sizes.num_query_groups)
    assert letter == "-", letter
    return _mlp(config, hidden, config.mlp.ffn_hidden_size)


def moe_matrices(config: ModelConfig) -> tuple[int, int]:
    """Elements that every token uses (router, shared expert, latent projections), and those of one routed expert."""
    hidden, latent = config.hidden_size, config.moe.latent_size
    always = hidden * config.moe.num_experts + _mlp(config, hidden, config.moe.shared_expert_intermediate_size)
    return always + 2 * hidden * latent, _mlp(config, latent or hidden, config.moe.ffn_hidden_size)


def used_matrices(config: ModelConfig, letter: str, experts: int | None = None) -> int:
    """Elements of one layer that a token uses, or that `experts` routed experts have with the rest of their layer."""
    if letter != "E":
        return layer_matrices(config, letter)
    always, expert = moe_matrices(config)
    return always + expert * (config.moe.router_topk if experts is None else experts)


def layer_vectors(config: ModelConfig, letter: str) -> int:
    """Elements of one layer's other parameters: norms, biases, the convolution, rates per head or expert."""
    hidden = config.hidden_size
    if letter != "M":
        return hidden + (config.moe.num_experts if letter == "E" else 0)
    sizes = config.mamba2
    channels = sizes.inner + 2 * sizes.bc_width
    return hidden + sizes.inner + channels * (sizes.conv_kernel + 1) + 3 * sizes.num_heads


def eh_proj_matrix(config: ModelConfig) -> int:
    """Elements of the projection with which a depth begins."""
    return 2 * config.hidden_size**2


def head_matrices(config: ModelConfig, experts: int | None = None) -> int:
    """Elements of one depth of the heads without the lm_head: eh_proj, and its layers as `used_matrices` has them."""
    return eh_proj_matrix(config) + sum(used_matrices(config, letter, experts) for letter in config.mtp.pattern)


def _mlp(config: ModelConfig, width: int, inner: int) -> int:
    return width * inner * (3 if config.mlp.activation == "swiglu" else 2)
