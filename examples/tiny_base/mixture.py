"""The tiny base with experts: its sizes, and its first weights, which are the dense tiny base's.

Training 9M weights from nothing takes 100M tokens. Weights of the dense base that are put into a
larger hidden size compute what they did, and its held-out loss rises by less than 0.1 without any
one of most layers. So a mixture of its more important layers begins with a loss of 2.10 where the
dense base has 1.47, in four held-out windows. After 87 steps of two windows (--steps 87 --batch 2
--lr 8e-4 --warmup 10) it had 2.41 where the dense base had 2.02, in 24 others.
"""

import torch
from torch import Tensor, nn

from mtpkit.config import ModelConfig

LAYERS = {0: 0, 1: 2, 2: 4, 3: 6, 4: 7, 5: 9, 6: 13, 7: 15, 8: 16, 10: 24, 11: 25, 13: 29}
"""The mixture's Mamba and attention layers, and the dense base's layers that they come from."""

NETWORKS = {9: (17, 12, 14, 19, 21), 12: (26, 21, 23, 28, 8), 14: (33, 1, 8, 30, 28)}
"""The mixture's expert layers, and the dense base's feed-forward layers that they come from: one
for the shared expert, then four that are cut into four experts each."""

BALANCE_RATE = 0.002
"""Change of an expert's bias in a step, as for DeepSeek-V3 (arXiv:2412.19437)."""


def mixture_of(dense: ModelConfig) -> ModelConfig:
    """The mixture's config. Both dimensions of its matrices are multiples of 128, except the rows
    of Mamba's input projection, which end with one row per head as they do in Nemotron 3."""
    return dense.replace(
        hidden_size=256,
        pattern="MMMM*MMM*EM*EME",
        ffn_hidden_size=0,
        num_moe_experts=16,
        moe_router_topk=4,
        moe_ffn_hidden_size=128,
        moe_shared_expert_intermediate_size=256,
        moe_router_topk_scaling_factor=2.5,
    )


@torch.no_grad()
def start_from(dense: nn.Module, mixture: nn.Module) -> None:
    """Give the mixture the dense base's weights.

    The first channels of the hidden states are the dense base's. The others begin with zero, so
    that the random weights that read them have no effect at first.
    """
    narrow = dense.mtpkit_config.hidden_size
    # The zeros lower the mean square in RMS norms.
    shrink = (narrow / mixture.mtpkit_config.hidden_size) ** 0.5
    theirs = dict(dense.named_parameters())
    for name, weight in mixture.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            if int(parts[2]) not in LAYERS:
                continue
            parts[2] = str(LAYERS[int(parts[2])])
        given = theirs[".".join(parts)]
        if name.endswith(("layer_norm_weight", "final_norm.weight")):
            given = given * shrink
        writes = len(given) < len(weight) or "embedding" in name
        _put(weight, given, zero=writes and weight.dim() > 1)

    for number, (shared, *routed) in NETWORKS.items():
        layer = mixture.decoder.layers[number]
        layer.pre_mlp_layernorm.weight.fill_(shrink)
        _put_network(layer.mlp.shared_experts, *_network(dense, shared))
        experts = iter(layer.mlp.experts.local_experts)
        width = mixture.mtpkit_config.moe.ffn_hidden_size
        for source in routed:
            first, second = _network(dense, source)
            for rows, columns in zip(first.split(width), second.split(width, 1), strict=True):
                _put_network(next(experts), rows, columns)


def _network(dense: nn.Module, number: int) -> tuple[Tensor, Tensor]:
    """Matrices of a feed-forward layer, its norm's weight in the first one, with the units that
    contribute most in front."""
    network = dense.decoder.layers[number].mlp
    first = network.linear_fc1.weight * network.linear_fc1.layer_norm_weight
    second = network.linear_fc2.weight
    # The activation is the square.
    order = (first.norm(dim=1) ** 2 * second.norm(dim=0)).argsort(descending=True)
    return first[order], second[:, order]


def _put_network(network: nn.Module, first: Tensor, second: Tensor) -> None:
    """Put in as many units as the network has."""
    width = network.linear_fc2.weight.shape[1]
    _put(network.linear_fc1.weight, first[:width], zero=False)
    _put(network.linear_fc2.weight, second[:, :width], zero=True)


def _put(weight: Tensor, given: Tensor, zero: bool) -> None:
    """Put a tensor into the first places of a larger one; `zero` the others."""
    if zero:
        weight.zero_()
    weight[tuple(map(slice, given.shape))] = given


def balance_experts(model: nn.Module) -> None:
    """From now on, after each pass with gradients, make experts that had fewer tokens than the mean
    likelier to be chosen, and the others less likely."""
    for number in NETWORKS:
        model.decoder.layers[number].mlp.router.register_forward_hook(_balance)


def _balance(router: nn.Module, _: object, output: tuple[Tensor, Tensor]) -> None:
    if torch.is_grad_enabled():
        counts = output[1].sum(0).float()
        router.expert_bias += BALANCE_RATE * (counts.mean() - counts).sign()
