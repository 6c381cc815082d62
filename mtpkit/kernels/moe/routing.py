# mypy: disable-error-code="no-untyped-def"
"""Routing of tokens to experts in Triton: one program per token, which searches for the best expert k times."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.moe import reference


@triton.jit
def _best(values, taken, index):
    """The index of the largest value that is not taken, the first among equals; NaN counts as the smallest."""
    values = tl.where(values == values, values, -1e30)
    values = tl.where(taken, float("-inf"), values)
    return tl.min(tl.where((values == tl.max(values)) & ~taken, index, 2147483647))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    scale,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Route one token per program; its scores are [ROWS, COLUMNS], one row per group of GROUP experts."""
    token = tl.program_id(0).to(tl.int64)
    row, column, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    index = row[:, None] * GROUP + column[None, :]
    real = (row < NUM_GROUPS)[:, None] & (column < GROUP)[None, :]
    logits = tl.load(logits_ptr + token * stride + index, mask=real, other=0.0)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    ranked = scores + tl.load(bias_ptr + index, mask=real, other=0.0)
    taken = ~real
    if NUM_GROUPS > 1:
        # The score of a group is the sum of its best TOP_K // TOP_GROUPS experts.
        left = tl.where(taken | (ranked != ranked), float("-inf"), ranked)
        value = tl.zeros([ROWS], tl.float32)
        for _ in tl.static_range(TOP_K // TOP_GROUPS):
            best = tl.max(left, 1)
            value += best
            first = tl.min(tl.where(left == best[:, None], column[None, :], COLUMNS), 1)
            left = tl.where(column[None, :] == first[:, None], float("-inf"), left)
        out = row >= NUM_GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            out = out | (row == _best(value, out, row))
        taken = taken | ~out[:, None] | (row >= NUM_GROUPS)[:, None]
    chosen, total = tl.zeros([PLACES], tl.float32), 0.0
    for k in tl.static_range(TOP_K):
        best = _best(ranked, taken, index)
        score = tl.sum(tl.where(index == best, scores, 0.0))
        taken = taken | (index == best)
        chosen = tl.where(place == k, score, chosen)
        total += score
        tl.store(ids_ptr + token * TOP_K + k, best.to(tl.int64))
    if TOP_K > 1:
        chosen = chosen / (total + 1e-20)
    tl.store(weights_ptr + token * TOP_K + place, chosen * scale, mask=place < TOP_K)


def route(
    logits: Tensor, bias: Tensor, top_k: int, scale: float = 1.0, num_groups: int = 1, top_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """See the reference. Padding tokens may be NaN and go to some experts too.

    Group sizes that are no power of two run the reference, which does not wait for the device either.
    """
    tokens, experts = logits.shape
    assert logits.dtype == bias.dtype == torch.float32 and logits.stride(1) == 1
    group = experts // num_groups
    if num_groups > 1 and group != triton.next_power_of_2(group):
        return reference.route(logits, bias, top_k, scale, num_groups, top_groups)
    expert_ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits,
            bias,
            expert_ids,
            weights,
            logits.stride(0),
            scale,
            TOP_K=top_k,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            GROUP=group,
            ROWS=triton.next_power_of_2(num_groups),
            COLUMNS=triton.next_power_of_2(group),
            PLACES=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    return expert_ids, weights
