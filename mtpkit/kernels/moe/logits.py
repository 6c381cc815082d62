"""Norm before a mixture of experts and logits of the router in Triton, in a single kernel for a few
tokens.

Router weights are small (2 MB for 512 experts of 2,048 channels), so that a launch takes longer
than reading them. Each program therefore normalises its token itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, multiprocessors, wait_for_previous, with_rows
from mtpkit.kernels.moe.reference import logits_of
from mtpkit.kernels.norm.triton import normalise, rms_norm

_MOST_READ = 9 * 2**20
"""Most numbers that the kernel reads, the whole weight once per token; beyond that, separate
launches cost less."""
_MOST_EXPERTS = 8
"""Most experts per program."""
_WARP_ITEMS = 512
"""Channels per warp of a program."""


@Early
@triton.jit
def _router_logits_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    normed_ptr,
    logits_ptr,
    experts,
    eps,
    x_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute EXPERTS logits of one token per program, and store a part of the normed token."""
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    expert = part * EXPERTS + tl.arange(0, EXPERTS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    real = expert < experts

    # No earlier kernel of a step writes weights, so they need no wait.
    weight = tl.load(weight_ptr + expert * weight_stride + column, mask=real & inside, other=0.0)
    wait_for_previous(EARLY)

    value = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the product, so that the logits are those of the token that is stored.
    normed = normalise(value, norm_ptr, column, WIDTH, eps, ZERO_CENTERED).to(
        normed_ptr.dtype.element_ty
    )

    # Every program has the whole token; each stores a share of it.
    share = tl.cdiv(WIDTH, tl.num_programs(0))
    own = (column >= part * share) & (column < (part + 1) * share)
    tl.store(normed_ptr + token * WIDTH + column, normed, mask=inside & own)

    logits = tl.sum(weight.to(tl.float32) * normed.to(tl.float32), 1, keep_dims=True)
    tl.store(logits_ptr + token * experts + expert, logits, mask=real)


def router_logits(
    x: Tensor, norm_weight: Tensor | None, eps: float, zero_centered: bool, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """See the reference. A few tokens in bf16 take one kernel, other inputs a norm kernel and a
    matrix product."""
    tokens, width = x.shape
    experts = len(weight)
    few = 0 < tokens * weight.numel() <= _MOST_READ
    in_bf16 = x.dtype == weight.dtype == torch.bfloat16
    if norm_weight is None or not (few and in_bf16):
        normed = x if norm_weight is None else rms_norm(x, norm_weight, eps, zero_centered)
        return normed, logits_of(normed, weight)

    x = with_rows(x)
    weight = with_rows(weight)
    block = triton.next_power_of_2(width)
    normed = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)

    # As few experts per program as let all programs of a token run at once, one on each
    # multiprocessor.
    share = triton.next_power_of_2(triton.cdiv(experts, multiprocessors()))
    each = min(_MOST_EXPERTS, share)
    _router_logits_kernel[(triton.cdiv(experts, each), tokens)](
        x,
        norm_weight,
        weight,
        normed,
        logits,
        experts,
        eps,
        x.stride(0),
        weight.stride(0),
        WIDTH=width,
        ZERO_CENTERED=zero_centered,
        EXPERTS=each,
        BLOCK=block,
        num_warps=min(16, max(1, block // _WARP_ITEMS)),
    )
    return normed, logits
