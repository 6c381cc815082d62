"""Mixture of experts: routing of tokens to experts, and the experts' feed-forward networks.

Shape legend: T tokens, E experts, k experts per token, h width of a token, f inner width of an
expert.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.config.sections import ScoreFunction
from mtpkit.kernels.activation.reference import relu2, swiglu
from mtpkit.kernels.norm.reference import rms_norm

Activation = Literal["relu2", "swiglu"]
Shared = Literal["apart", "whole", "gated"]
"""Treatment of the shared expert by `route`: left out (`apart`), or chosen by every token, with
weight 1 (`whole`) or with the weight of its gate (`gated`)."""

STEPS = (0x9E3779B1, 0x85EBCA77)
"""Odd numbers below 2^32 that multiply a token's and an expert's number, see `drawn_keys`."""
FACTORS = (0x85EBCA6B, 0xC2B2AE35)
"""Factors of MurmurHash3's last mixing."""
_WORD = 0xFFFFFFFF


def router_logits(
    x: Tensor, norm_weight: Tensor | None, eps: float, zero_centered: bool, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalise tokens and compute their router logits.

    Args:
        x: [T, h].
        norm_weight: [h], weight of the RMS norm; None: no norm.
        eps, zero_centered: as for `mtpkit.kernels.norm.rms_norm`.
        weight: [E, h], weight of the router.

    Returns:
        The normalised x, [T, h] in the dtype of x, and logits [T, E] float32.
    """
    normed = x if norm_weight is None else rms_norm(x, norm_weight, eps, zero_centered)
    return normed, logits_of(normed, weight)


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [T, h] by the transpose of weight [E, h], with sums and result in float32."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    score: ScoreFunction = "sigmoid",
    normalize: bool = True,
    shared: Shared = "apart",
    draw: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token (DeepSeek-V3, arXiv:2412.19437).

    Args:
        logits: [T, E] float32; [T, E + 1] with a `gated` shared expert, whose weight is the sigmoid
            of the last logit.
        bias: [E] float32, added to the scores for the choice of experts, not for their weights.
        scale: factor of the weights.
        num_groups, top_groups: choose experts only from the best `top_groups` of `num_groups`
            groups of neighbours.
        group_best: number of best experts of a group whose scores add up to the score of the group.
        score: `sigmoid` of each logit, or `softmax` over all experts.
        normalize: divide the scores of the chosen experts by their sum.
        shared: if not `apart`, every token also chooses expert E, as the last of its k + 1 experts.
        draw: [1] int32; unless it is 0, experts are those of the largest `drawn_keys` instead, so
            that all are equally likely, whatever the logits, the bias and the groups prefer. The
            weights remain those of the chosen experts' scores. None: as 0.

    Returns:
        Distinct experts [T, k] int64, in any order, and their weights [T, k] float32; k + 1 of each
        unless `shared` is `apart`.
    """
    gate = None
    if shared == "gated":
        gate = logits[:, -1:]
        logits = logits[:, :-1]

    scores = logits.float().sigmoid() if score == "sigmoid" else logits.float().softmax(-1)
    ranked = scores if bias is None else scores + bias
    if num_groups > 1:
        groups = ranked.unflatten(1, (num_groups, -1))
        group_scores = groups.topk(group_best, -1).values.sum(-1)
        best = group_scores.topk(top_groups, -1).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        ranked = groups.masked_fill(left_out[..., None], -torch.inf).flatten(1)

    expert_ids = ranked.topk(top_k, -1).indices
    if draw is not None:
        expert_ids = torch.where(draw != 0, drawn_keys(logits).topk(top_k, -1).indices, expert_ids)
    # Without the bias, which affects only the choice.
    weights = scores.gather(1, expert_ids)
    if normalize:
        # Sigmoids of very negative logits are 0, and 0 / 0 would be NaN.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * scale
    if shared == "apart":
        return expert_ids, weights

    shared_id = torch.full_like(expert_ids[:, :1], logits.shape[1])
    shared_weight = torch.ones_like(weights[:, :1])
    if gate is not None:
        shared_weight = gate.float().sigmoid()
    return torch.cat([expert_ids, shared_id], 1), torch.cat([weights, shared_weight], 1)


def drawn_keys(logits: Tensor) -> Tensor:
    """Hash each logit's bits with the numbers of its token and its expert.

    The low bits of logits differ from token to token, from layer to layer and from step to step, so
    that the keys do, without a generator whose state would have to be kept. Where they do not, as
    for two requests with the same prompt, the token's number still tells its keys from others'.

    Args:
        logits: [T, E] float32.

    Returns:
        [T, E] int64, uniform in [0, 2^31).
    """
    bits = logits.contiguous().view(torch.int32).long()
    token = torch.arange(len(logits), device=logits.device)[:, None]
    expert = torch.arange(logits.shape[1], device=logits.device)
    words = (bits + (1 + token) * STEPS[0] + (1 + expert) * STEPS[1]) & _WORD
    for factor, shift in zip(FACTORS, (16, 13), strict=True):
        words = ((words ^ (words >> shift)) * factor) & _WORD
    return (words ^ (words >> 16)) >> 1


def expert_mlp(
    x: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
    residual: Tensor | None = None,
    some_elsewhere: bool = False,
) -> Tensor:
    """Compute for each token residual + the sum over its k experts e of weight * fc2[e] @
    activation(fc1[e] @ x).

    Args:
        x: [T, h].
        fc1: [E, f, h]; with swiglu [E, 2f, h], the gate's rows first.
        fc2: [E, h, f].
        expert_ids: [T, k] int64.
        weights: [T, k] float32.
        residual: [T, h].
        some_elsewhere: `expert_ids` may hold E, which stands for experts of other ranks and adds
            nothing here.

    Returns:
        [T, h] in the dtype of x, summed in float32 and rounded once. The reference needs a
        host-device sync.
    """
    outputs = x.new_zeros(*expert_ids.shape, fc2.shape[1])
    act = relu2 if activation == "relu2" else swiglu
    for expert in expert_ids.unique().tolist():
        # Where all experts are here, an id past the last one is an error, as an index.
        if some_elsewhere and expert >= len(fc1):
            continue
        tokens, places = torch.where(expert_ids == expert)
        inner = act(F.linear(x[tokens], fc1[expert]))
        outputs[tokens, places] = F.linear(inner, fc2[expert])

    total = (outputs.float() * weights[..., None]).sum(1)
    return (total if residual is None else residual + total).to(x.dtype)
