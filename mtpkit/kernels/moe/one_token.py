"""Experts of a single token in Triton, without tensor cores, since one token would leave them idle.

Each program multiplies one row of a weight at a time, so that thousands of small programs share the
bandwidth evenly. A program of the second product adds up one output channel over all experts.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, load, only_if, wait_for_previous
from mtpkit.kernels.moe.reference import Activation

_BLOCK = 512
"""Input channels at a time."""


@partial(Early, most=None)
@triton.jit
def _inner_kernel(
    x_ptr,
    weight_ptr,
    ids_ptr,
    out_ptr,
    inner,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one inner channel of one of the token's experts per program."""
    WHOLE: tl.constexpr = WIDTH % BLOCK == 0
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    wait_for_previous(EARLY)

    channel = tl.program_id(0)
    place = tl.program_id(1)
    expert = tl.load(ids_ptr + place).to(tl.int64)
    # The expert's hidden channels stay unwritten; `_outer_kernel` does not load them.
    if expert >= EXPERTS:
        return

    # With a gate, the rows of the gate come first, and `inner` rows later those of the value.
    row = weight_ptr + (expert * inner * (2 if GATED else 1) + channel) * WIDTH
    k = tl.arange(0, BLOCK)
    product = tl.zeros([BLOCK], tl.float32)
    value = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + k < WIDTH
        x = load(x_ptr + start + k, inside, WHOLE).to(tl.float32)
        product += load(row + start + k, inside, WHOLE).to(tl.float32) * x
        if GATED:
            value += load(row + inner * WIDTH + start + k, inside, WHOLE).to(tl.float32) * x

    result = tl.sum(product, 0)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * tl.sum(value, 0)
    else:
        result = tl.where(result < 0, 0.0, result * result)  # tl.maximum would turn a NaN into 0
    tl.store(out_ptr + place * inner + channel, result.to(out_ptr.dtype.element_ty))


@partial(Early, most=None)
@triton.jit
def _outer_kernel(
    hidden_ptr,
    weight_ptr,
    ids_ptr,
    mixing_ptr,
    residual_ptr,
    out_ptr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one output channel per program: the sum over the token's experts, plus the
    residual."""
    WHOLE: tl.constexpr = WIDTH % BLOCK == 0
    wait_for_previous(EARLY)

    channel = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    every = tl.full([BLOCK], True, tl.int1)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.range(0, TOP_K, loop_unroll_factor=2):
        expert = tl.load(ids_ptr + place).to(tl.int64)
        here = expert < EXPERTS
        row = weight_ptr + (tl.minimum(expert, EXPERTS - 1) * tl.num_programs(0) + channel) * WIDTH
        mixing = tl.load(mixing_ptr + place, mask=here, other=0.0)
        for start in tl.static_range(0, WIDTH, BLOCK):
            inside = only_if(every if WHOLE else start + k < WIDTH, here)
            hidden = tl.load(hidden_ptr + place * WIDTH + start + k, mask=inside, other=0.0).to(
                tl.float32
            )
            total += (
                tl.load(row + start + k, mask=inside, other=0.0).to(tl.float32) * hidden * mixing
            )

    result = tl.sum(total, 0)
    if residual_ptr is not None:
        result += tl.load(residual_ptr + channel).to(tl.float32)
    tl.store(out_ptr + channel, result.to(out_ptr.dtype.element_ty))


def one_token_mlp(
    x: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
    residual: Tensor | None,
) -> Tensor:
    """Compute `expert_mlp` of one token; all rows must be contiguous, and ids past the last expert
    add nothing."""
    top_k = expert_ids.shape[1]
    experts, width, inner = fc2.shape
    hidden = torch.empty(top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(1, width, dtype=x.dtype, device=x.device)

    # One warp per program: sums over several warps would pass through shared memory.
    rest = dict(EXPERTS=experts, num_warps=1)
    _inner_kernel[(inner, top_k)](
        x,
        fc1,
        expert_ids,
        hidden,
        inner,
        WIDTH=width,
        ACTIVATION=activation,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        **rest,
    )
    _outer_kernel[(width,)](
        hidden,
        fc2,
        expert_ids,
        weights,
        residual,
        out,
        TOP_K=top_k,
        WIDTH=inner,
        BLOCK=min(_BLOCK, triton.next_power_of_2(inner)),
        **rest,
    )
    return out
