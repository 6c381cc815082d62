"""The choice of experts in Triton, one program per token, which searches for the best expert k times.

For a single token the router's product is part of the same kernel: programs multiply parts of the router's rows, and
the one that comes last adds the parts up and chooses. For several it would choose for one after the other, which takes
longer than a second kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.config.sections import ScoreFunction
from mtpkit.config.sections.moe import Routing
from mtpkit.kernels.device import MULTIPROCESSORS, counters_of, with_rows
from mtpkit.kernels.moe import reference
from mtpkit.kernels.moe.reference import Shared

_BLOCK_N, _BLOCK_K = 16, 128
"""Rows of the router and input channels that a program multiplies at a time."""

LAST = tl.constexpr(2**31 - 1)
LEAST = tl.constexpr(-(2**63))
"""Largest int32 and smallest int64."""


@triton.jit
def _best(values, taken, index):
    """The index of the largest value that is not taken, the first among equals; NaN counts as the smallest."""
    values = tl.where(values == values, values, -1e30)
    values = tl.where(taken, float("-inf"), values)
    return tl.min(tl.where((values == tl.max(values)) & ~taken, index, 2147483647))


@triton.jit
def _order(values, taken, index):
    """int64 keys whose largest belongs to what `_best` finds: the value in the upper half, of which the sign makes
    larger bits smaller where it is set, and in the lower half LAST - index. No value is -0."""
    bits = tl.where(values == values, values, -1e30).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ LAST, bits)
    return tl.where(taken, LEAST, (bits.to(tl.int64) << 32) | (index ^ LAST).to(tl.int64))


@triton.jit
def _choose(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scale,
    TOP_K,
    NUM_GROUPS,
    TOP_GROUPS,
    GROUP_BEST,
    SOFTMAX,
    NORMALIZE,
    SHARED,
    GROUP,
    ROWS,
    COLUMNS,
    PLACES,
):
    """Choose the experts of one token; its scores are [ROWS, COLUMNS], one row per group of GROUP experts."""
    row, column, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, PLACES)
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
        # The score of a group is the sum of its best GROUP_BEST experts.
        left = tl.where(taken | (ranked != ranked), float("-inf"), ranked)
        value = tl.zeros([ROWS], tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(left, 1)
            value += best
            first = tl.min(tl.where(left == best[:, None], column[None, :], COLUMNS), 1)
            left = tl.where(column[None, :] == first[:, None], float("-inf"), left)
        out = row >= NUM_GROUPS
        for _ in tl.static_range(TOP_GROUPS):
            out = out | (row == _best(value, out, row))
        taken = taken | ~out[:, None] | (row >= NUM_GROUPS)[:, None]
    left = _order(ranked, taken, index)
    ids = tl.zeros([PLACES], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(left, 1), 0)
        left = tl.where(left == best, LEAST, left)
        ids = tl.where(place == k, (best & LAST).to(tl.int32) ^ LAST, ids)
    used = place < TOP_K
    tl.store(ids_ptr + place, ids.to(tl.int64), mask=used)
    chosen = tl.load(logits_ptr + ids, mask=used, other=0.0)
    chosen = tl.exp(chosen - highest) / sum_of_powers if SOFTMAX else 1.0 / (1.0 + tl.exp(-chosen))
    if NORMALIZE:
        chosen = chosen / (tl.sum(tl.where(used, chosen, 0.0), 0) + 1e-20)
    tl.store(weights_ptr + place, chosen * scale, mask=used)
    if SHARED != "apart":
        tl.store(ids_ptr + TOP_K, tl.full([], NUM_GROUPS * GROUP, tl.int64))
        weight = 1.0
        if SHARED == "gated":
            weight = 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + NUM_GROUPS * GROUP)))
        tl.store(weights_ptr + TOP_K, weight)


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
    GROUP_BEST: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Route one token per program."""
    token = tl.program_id(0).to(tl.int64)
    first = token * (TOP_K + (SHARED != "apart"))
    _choose(
        logits_ptr + token * stride,
        bias_ptr,
        ids_ptr + first,
        weights_ptr + first,
        scale,
        TOP_K,
        NUM_GROUPS,
        TOP_GROUPS,
        GROUP_BEST,
        SOFTMAX,
        NORMALIZE,
        SHARED,
        GROUP,
        ROWS,
        COLUMNS,
        PLACES,
    )


@triton.jit
def _choose_kernel(
    x_ptr,
    router_ptr,
    parts_ptr,
    logits_ptr,
    counter_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    outputs,
    scale,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    LOGITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
):
    """Multiply BLOCK_N rows of the router by the token, per program over SPAN of its WIDTH channels; the last program
    chooses."""
    SPLITS: tl.constexpr = WIDTH // SPAN
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * SPAN + tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last one, so that loads need no mask.
    router_ptrs = router_ptr + tl.minimum(n, outputs - 1)[:, None] * WIDTH + k[None, :]
    x_ptrs = x_ptr + k
    product = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, SPAN, BLOCK_K):
        w = tl.load(router_ptrs + start).to(tl.float32)
        product += tl.sum(w * tl.load(x_ptrs + start).to(tl.float32)[None, :], 1)
    tl.store(parts_ptr + tl.program_id(1) * LOGITS + n, product, mask=n < outputs)
    tl.debug_barrier()  # all threads must have stored their part before one thread increments the counter
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") != tl.num_programs(0) * SPLITS - 1:
        return
    tl.store(counter_ptr, 0)
    logit = tl.arange(0, LOGITS)
    total = tl.zeros([LOGITS], tl.float32)
    for split in tl.static_range(SPLITS):
        # .cg reads the L2 cache, where the other multiprocessors' stores are.
        total += tl.load(parts_ptr + split * LOGITS + logit, mask=logit < outputs, other=0.0, cache_modifier=".cg")
    tl.store(logits_ptr + logit, total)
    tl.debug_barrier()  # other threads read them
    _choose(
        logits_ptr,
        bias_ptr,
        ids_ptr,
        weights_ptr,
        scale,
        TOP_K,
        NUM_GROUPS,
        TOP_GROUPS,
        GROUP_BEST,
        SOFTMAX,
        NORMALIZE,
        SHARED,
        GROUP,
        ROWS,
        COLUMNS,
        PLACES,
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
) -> tuple[Tensor, Tensor]:
    """See the reference. Padding tokens may be NaN and go to some experts too.

    Group sizes that are no power of two run the reference, which does not wait for the device either.
    """
    how = Routing(top_k, scale, num_groups, top_groups, group_best, score, normalize)
    tokens, experts = len(logits), logits.shape[1] - (shared == "gated")
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert bias is None or bias.dtype == torch.float32
    if not _takes(experts, num_groups):
        return reference.route(logits, bias, *how, shared)
    chosen = _chosen(tokens, top_k, shared, logits.device)
    if tokens:
        constants = _constants(experts, how, shared)
        _route_kernel[(tokens,)](logits, bias, *chosen, logits.stride(0), scale, **constants, num_warps=1)
    return chosen


def choose_experts(
    x: Tensor, router: Tensor, experts: int, bias: Tensor | None, how: Routing, shared: Shared = "apart"
) -> tuple[Tensor, Tensor]:
    """See the reference. In bf16 a single token takes one kernel, several a product and `route`."""
    (tokens, width), outputs = x.shape, experts + (shared == "gated")
    tiles = triton.cdiv(outputs, _BLOCK_N)
    splits = max(1, MULTIPROCESSORS // tiles)
    while width % (splits * _BLOCK_K) and splits > 1:
        splits -= 1
    narrow = x.dtype == router.dtype == torch.bfloat16
    fits = width % (splits * _BLOCK_K) == 0 and _takes(experts, how.num_groups) and router.is_contiguous()
    if not narrow or tokens != 1 or not fits:
        if narrow and x.is_cuda:
            logits = torch.mm(x, router.t(), out_dtype=torch.float32)
        else:
            logits = x.float() @ router.float().t()
        return route(logits[:, :outputs], bias, *how, shared)
    assert bias is None or bias.dtype == torch.float32
    chosen = _chosen(tokens, how.top_k, shared, x.device)
    padded = triton.next_power_of_2(outputs)
    _choose_kernel[(tiles, splits)](
        with_rows(x),
        router,
        torch.empty(splits, padded, dtype=torch.float32, device=x.device),
        torch.empty(padded, dtype=torch.float32, device=x.device),
        counters_of(x.device, 1),
        bias,
        *chosen,
        outputs,
        how.scale,
        WIDTH=width,
        SPAN=width // splits,
        LOGITS=padded,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        **_constants(experts, how, shared),
        num_warps=4,
    )
    return chosen


def _takes(experts: int, num_groups: int) -> bool:
    """Whether the kernels know groups of this size."""
    group = experts // num_groups
    return num_groups == 1 or group == triton.next_power_of_2(group)


def _chosen(tokens: int, top_k: int, shared: Shared, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for what is chosen, see `reference.route`."""
    of_each = top_k + (shared != "apart")
    ids = torch.empty(tokens, of_each, dtype=torch.int64, device=device)
    return ids, torch.empty(tokens, of_each, dtype=torch.float32, device=device)


def _constants(experts: int, how: Routing, shared: Shared) -> dict[str, Any]:
    """Keyword arguments that both kernels have."""
    group = experts // how.num_groups
    return dict(
        TOP_K=how.top_k,
        NUM_GROUPS=how.num_groups,
        TOP_GROUPS=how.top_groups,
        GROUP_BEST=how.group_best,
        SOFTMAX=how.score == "softmax",
        NORMALIZE=how.normalize,
        SHARED=shared,
        GROUP=group,
        ROWS=triton.next_power_of_2(how.num_groups),
        COLUMNS=triton.next_power_of_2(group),
        PLACES=triton.next_power_of_2(how.top_k),
    )
