"""Choice of experts in Triton: one program per token, which searches k times for the best expert
that is left."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.config.sections import ScoreFunction
from mtpkit.kernels.device import Early, wait_for_previous
from mtpkit.kernels.moe import reference
from mtpkit.kernels.moe.reference import Shared

LAST = tl.constexpr(2**31 - 1)
LEAST = tl.constexpr(-(2**31))
"""Largest and smallest int32."""
STEPS_0, STEPS_1 = map(tl.constexpr, reference.STEPS)
FACTORS_0, FACTORS_1 = map(tl.constexpr, reference.FACTORS)


@triton.jit
def _best(values, taken, index):
    """The index of the largest value that is not taken, the first among equals; NaN counts as the
    smallest."""
    values = tl.where(values == values, values, -1e30)
    values = tl.where(taken, float("-inf"), values)
    return tl.min(tl.where((values == tl.max(values)) & ~taken, index, 2147483647))


@triton.jit
def _order(values, taken):
    """int32 keys that sort as the values do, with NaN as the smallest value that is not taken; a
    warp finds the largest integer in one instruction. No value may be -0."""
    bits = tl.where(values == values, values, -1e30).to(tl.int32, bitcast=True)
    return tl.where(taken, LEAST, tl.where(bits < 0, bits ^ LAST, bits))


@triton.jit
def _drawn_keys(logits, token, expert):
    """See the reference; int32 keys from 0 up."""
    words = logits.to(tl.uint32, bitcast=True)
    words += (1 + token).to(tl.uint32) * STEPS_0 + (1 + expert).to(tl.uint32) * STEPS_1
    words = (words ^ (words >> 16)) * FACTORS_0
    words = (words ^ (words >> 13)) * FACTORS_1
    return ((words ^ (words >> 16)) >> 1).to(tl.int32)


@Early
@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    draw_ptr,
    stride,
    scale,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Route one token per program; its scores are [ROWS, COLUMNS], one row per group of GROUP
    experts."""
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    first_place = token * (TOP_K + (SHARED != "apart"))
    logits_ptr = logits_ptr + token * stride
    ids_ptr = ids_ptr + first_place
    weights_ptr = weights_ptr + first_place

    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = tl.arange(0, PLACES)
    index = row[:, None] * GROUP + column[None, :]
    real = (row < NUM_GROUPS)[:, None] & (column < GROUP)[None, :]

    logits = tl.load(logits_ptr + index, mask=real, other=0.0)
    if SOFTMAX:
        highest = tl.max(tl.max(tl.where(real, logits, float("-inf")), 1), 0)
        powers = tl.where(real, tl.exp(logits - highest), 0.0)
        sum_of_powers = tl.sum(tl.sum(powers, 1), 0)
        scores = powers / sum_of_powers
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))

    ranked = scores
    if bias_ptr is not None:
        ranked += tl.load(bias_ptr + index, mask=real, other=0.0)

    taken = ~real
    if NUM_GROUPS > 1:
        # The score of a group is the sum of the scores of its best GROUP_BEST experts.
        left = tl.where(taken | (ranked != ranked), float("-inf"), ranked)
        value = tl.zeros([ROWS], tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(left, 1)
            value += best
            first = tl.min(tl.where(left == best[:, None], column[None, :], COLUMNS), 1)
            left = tl.where(column[None, :] == first[:, None], float("-inf"), left)

        # Rows past the last group pad to a power of two, and count as taken.
        out = row >= NUM_GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            out = out | (row == _best(value, out, row))
        taken = taken | ~out[:, None] | (row >= NUM_GROUPS)[:, None]

    left = _order(ranked, taken)
    if draw_ptr is not None:
        keys = tl.where(real, _drawn_keys(logits, token, index), LEAST)
        left = tl.where(tl.load(draw_ptr) != 0, keys, left)
    ids = tl.zeros([PLACES], tl.int32)
    for k in tl.static_range(TOP_K):
        first = tl.min(tl.where(left == tl.max(left), index, LAST))
        left = tl.where(index == first, LEAST, left)
        ids = tl.where(place == k, first, ids)

    used = place < TOP_K
    tl.store(ids_ptr + place, ids.to(tl.int64), mask=used)

    # From the logits again: the bias affects only the choice, not the weights.
    chosen = tl.load(logits_ptr + ids, mask=used, other=0.0)
    chosen = tl.exp(chosen - highest) / sum_of_powers if SOFTMAX else 1.0 / (1.0 + tl.exp(-chosen))
    if NORMALIZE:
        # Sigmoids of very negative logits are 0, and 0 / 0 would be NaN.
        chosen = chosen / (tl.sum(tl.where(used, chosen, 0.0), 0) + 1e-20)
    tl.store(weights_ptr + place, chosen * scale, mask=used)

    if SHARED != "apart":
        tl.store(ids_ptr + TOP_K, tl.full([], NUM_GROUPS * GROUP, tl.int64))
        # The gate's logit follows those of the experts.
        gate_ptr = logits_ptr + NUM_GROUPS * GROUP
        tl.store(
            weights_ptr + TOP_K,
            1.0 / (1.0 + tl.exp(-tl.load(gate_ptr))) if SHARED == "gated" else 1.0,
        )


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
    """See the reference. Padding tokens may hold NaN; they are routed to some experts too.

    If the group size is not a power of two, the reference runs, which needs no host-device sync
    either.
    """
    tokens = len(logits)
    experts = logits.shape[1] - (shared == "gated")
    group = experts // num_groups
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert bias is None or bias.dtype == torch.float32

    if num_groups > 1 and group != triton.next_power_of_2(group):
        settings = (scale, num_groups, top_groups, group_best, score, normalize, shared, draw)
        return reference.route(logits, bias, top_k, *settings)

    of_each = top_k + (shared != "apart")
    ids = torch.empty(tokens, of_each, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, of_each, dtype=torch.float32, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits,
            bias,
            ids,
            weights,
            draw,
            logits.stride(0),
            scale,
            TOP_K=top_k,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            GROUP_BEST=group_best,
            SOFTMAX=score == "softmax",
            NORMALIZE=normalize,
            SHARED=shared,
            GROUP=group,
            ROWS=triton.next_power_of_2(num_groups),
            COLUMNS=triton.next_power_of_2(group),
            PLACES=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    return ids, weights
