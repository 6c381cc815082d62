"""Mixture of experts in Triton without host-device syncs: every grid has the size of the worst
case.

A pair is a token and one of its k experts, numbered token * k + place. Pairs are sorted by expert
into blocks of a fixed size, and the last block of an expert is padded. A program multiplies one
block by one tile of its expert's weight. With few tokens there are many small blocks, each of which
streams an expert's weights once; with many tokens, blocks fill the tensor cores. A single token has
kernels of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import (
    NARROW,
    WIDE_TILE,
    Early,
    Tile,
    load,
    only_if,
    padded,
    wait_for_previous,
    with_rows,
)
from mtpkit.kernels.moe.logits import router_logits
from mtpkit.kernels.moe.one_token import one_token_mlp
from mtpkit.kernels.moe.reference import Activation
from mtpkit.kernels.moe.routing import route

__all__ = ["expert_mlp", "route", "router_logits"]

_SORT_CHUNK = 2048
"""Pairs that a sort program reads at a time."""
_FEW_PAIRS = 128
"""Most pairs that a single program sorts, by comparing every pair with every other."""
_COMBINE_BLOCK = 1024
"""Channels of a token per program of the final sum."""

TILES = {
    16: Tile(64, 128, 4, 4),
    32: Tile(64, 128, 4, 4),
    64: Tile(128, 64, 4, 4),
    128: Tile(256, 64, 4, 8),
}
"""Tiles by pairs per block."""


@triton.jit
def _sort_kernel(
    ids_ptr,
    blocks,
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the pairs of one expert per program in order, and the expert of each block that they
    fill; `blocks`: see `Blocks`. Pairs of expert EXPERTS are left out."""
    expert = tl.program_id(0)
    bin = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)

    # Programs of a launch cannot wait for each other, so each one counts the pairs of all experts.
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(ids, BINS)

    # Whole blocks per expert, and where this expert's blocks begin
    sizes = tl.where(bin < EXPERTS, (counts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(bin < expert, sizes, 0))
    own = tl.sum(tl.where(bin == expert, sizes, 0))
    if expert == 0:
        tl.store(blocks.used, tl.sum(sizes))

    place = first * BLOCK
    if own > 0:
        for start in range(0, pairs, CHUNK):
            pair = start + lane
            mine = tl.load(ids_ptr + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32) == expert
            tl.store(blocks.order + place + tl.cumsum(mine.to(tl.int32), 0) - 1, pair, mask=mine)
            place += tl.sum(mine.to(tl.int32))

        padding = place + tl.arange(0, BLOCK)
        tl.store(blocks.order + padding, pairs, mask=padding < (first + own) * BLOCK)

        for block in range(first, first + own):
            tl.store(blocks.experts + block, expert)


@Early
@triton.jit(do_not_specialize=["pairs"])
def _sort_few_kernel(
    ids_ptr,
    blocks,
    pairs,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Do the work of `_sort_kernel` for at most PAIRS pairs in one program."""
    wait_for_previous(EARLY)

    pair = tl.arange(0, PAIRS)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
    live = ids < EXPERTS
    same = (ids[:, None] == ids[None, :]) & live[:, None] & live[None, :]

    # The place of each pair among the pairs of its expert: the same numbers along one dimension
    # (`rank`) and along the other (`earlier`).
    rank = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
    earlier = tl.sum((same & (pair[:, None] < pair[None, :])).to(tl.int32), 0)

    # The first pair of each block opens it. Blocks are ordered by expert.
    opens = live & (earlier % BLOCK == 0)
    before = tl.sum((opens[None, :] & (ids[None, :] < ids[:, None])).to(tl.int32), 1)
    used = tl.sum(opens.to(tl.int32))
    tl.store(blocks.used, used)

    for start in range(0, used * BLOCK, PAIRS):
        tl.store(blocks.order + start + pair, pairs, mask=start + pair < used * BLOCK)
    tl.debug_barrier()  # padding is stored before any pair

    block = before + rank // BLOCK
    tl.store(blocks.order + block * BLOCK + rank % BLOCK, pair, mask=live)
    tl.store(blocks.experts + block, ids, mask=live & (rank % BLOCK == 0))


@triton.jit
def _dot(a, b, acc, NARROW):
    if NARROW is None:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW), acc)


@Early
@triton.jit(do_not_specialize=["pairs"])
def _expert_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    blocks,
    pairs,
    outputs,
    x_stride,
    WIDTH: tl.constexpr,
    SHARED_BY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_N outputs of one block of pairs per program; SHARED_BY neighbouring pairs read
    the same row of x. The weight is the left operand of the product; the right operand may have as
    few as 16 columns, the pairs."""
    wait_for_previous(EARLY)

    # The grid has the blocks of the worst case.
    block = tl.program_id(1)
    if block >= tl.load(blocks.used):
        return
    expert = tl.load(blocks.experts + block).to(tl.int64)
    pair = tl.load(blocks.order + block * BLOCK_M + tl.arange(0, BLOCK_M))

    WHOLE: tl.constexpr = WIDTH % BLOCK_K == 0
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    ROWS: tl.constexpr = 2 if GATED else 1

    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = (pair < pairs)[None, :]
    live = (n < outputs)[:, None]
    x_ptrs = x_ptr + (pair // SHARED_BY).to(tl.int64)[None, :] * x_stride + k[:, None]
    # Outputs past the end repeat the last one.
    rows = expert * outputs * ROWS + tl.minimum(n, outputs - 1)
    weight_ptrs = weight_ptr + rows[:, None] * WIDTH + k[None, :]

    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    value = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        inside = start + k < WIDTH
        w = load(weight_ptrs + start, inside[None, :], WHOLE)
        x = tl.load(x_ptrs + start, mask=real & inside[:, None], other=0.0)
        product = _dot(w, x, product, NARROW)
        if GATED:
            w = load(weight_ptrs + outputs * WIDTH + start, inside[None, :], WHOLE)
            value = _dot(w, x, value, NARROW)

    if ACTIVATION == "relu2":
        # tl.maximum would turn a NaN into 0
        product = tl.where(product < 0, 0.0, product * product)
    if GATED:
        product = product / (1.0 + tl.exp(-product)) * value
    if scale_ptr is not None:
        product *= tl.load(scale_ptr + pair, mask=pair < pairs, other=0.0)[None, :]

    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=real & live)


@Early
@triton.jit
def _combine_kernel(
    parts_ptr,
    ids_ptr,
    residual_ptr,
    out_ptr,
    width,
    residual_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add up the outputs of a token's pairs. With `ids_ptr`, skip pairs of experts that are not
    here, whose outputs were never written."""
    wait_for_previous(EARLY)

    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        here = mask
        if ids_ptr is not None:
            here = only_if(mask, tl.load(ids_ptr + token * TOP_K + k) < EXPERTS)
        total += tl.load(parts_ptr + (token * TOP_K + k) * width + column, mask=here, other=0.0).to(
            tl.float32
        )

    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=mask)


class Blocks(NamedTuple):
    """Pairs sorted by expert."""

    order: Tensor
    """[blocks, size] int32 pairs; padding holds the number of pairs."""
    experts: Tensor
    """[blocks] int32, the expert of each block."""
    used: Tensor
    """[1] int32, the number of blocks in use; later entries of `order` and `experts` are
    undefined."""


def sort_pairs(expert_ids: Tensor, experts: int, size: int) -> Blocks:
    """Sort the pairs of expert_ids [T, k] into blocks of `size`."""
    pairs = expert_ids.numel()
    # Largest number of experts with pairs; the last block of each may be padded.
    most = min(experts, pairs)
    blocks = most + (pairs - most) // size

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=expert_ids.device)

    sorted_ = Blocks(ints(blocks, size), ints(blocks), ints(1))

    if pairs <= _FEW_PAIRS:
        few = padded(pairs)
        sizes = dict(EXPERTS=experts, PAIRS=few, BLOCK=size, num_warps=min(8, few // 16))
        _sort_few_kernel[(1,)](expert_ids, sorted_, pairs, **sizes)
        return sorted_

    # One bin more than experts, for pairs of experts elsewhere.
    _sort_kernel[(experts,)](
        expert_ids,
        sorted_,
        pairs,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        CHUNK=min(_SORT_CHUNK, max(32, triton.next_power_of_2(pairs))),
        BLOCK=size,
        num_warps=4,
    )
    return sorted_


def combine(
    parts: Tensor, expert_ids: Tensor | None, residual: Tensor | None, out: Tensor, experts: int
) -> None:
    """Add up the outputs of each token's pairs, parts [T * k, h], into out [T, h].

    Args:
        expert_ids: [T, k]; pairs of experts from `experts` on, whose parts were never written, are
            left out. None: there are none.
    """
    tokens, width = out.shape
    _combine_kernel[(tokens, triton.cdiv(width, _COMBINE_BLOCK))](
        parts,
        expert_ids,
        residual,
        out,
        width,
        0 if residual is None else residual.stride(0),
        EXPERTS=experts,
        TOP_K=len(parts) // tokens,
        BLOCK=min(_COMBINE_BLOCK, triton.next_power_of_2(width)),
    )


def block_size(pairs: int, experts: int) -> int:
    """Pairs per block: about the mean number of pairs per expert."""
    return min(max(TILES), padded(triton.cdiv(pairs, experts)))


def _tile(size: int, dtype: torch.dtype, width: int, activation: str) -> Tile:
    """The tile for blocks of `size` pairs with `width` input channels."""
    tile = TILES[size] if dtype == torch.bfloat16 else WIDE_TILE
    if activation == "swiglu" and tile.block_n > 64:
        # there are two accumulators, for the gate and for the value
        tile = tile._replace(block_n=tile.block_n // 2)
    if width <= 4 * tile.block_k:
        # there is little to overlap, and more programs fit a multiprocessor
        tile = tile._replace(num_stages=2)
    return tile


def expert_mlp(
    x: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
    residual: Tensor | None = None,
    some_elsewhere: bool = False,
    size: int | None = None,
) -> Tensor:
    """See the reference. With several tokens, each expert's output is rounded before the sum.
    `size` overrides `block_size` and rules out the kernels for one token."""
    assert activation in ("relu2", "swiglu") and fc1.is_contiguous() and fc2.is_contiguous()
    tokens, top_k = expert_ids.shape
    experts, width, inner = fc2.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if not tokens:
        return out

    x = with_rows(x)
    residual = None if residual is None else with_rows(residual)
    expert_ids = expert_ids.contiguous()
    weights = weights.contiguous()
    if tokens == 1 and size is None:
        return one_token_mlp(x, fc1, fc2, expert_ids, weights, activation, residual)

    pairs = tokens * top_k
    size = size or block_size(pairs, experts)
    blocks = sort_pairs(expert_ids, experts, size)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, width, dtype=x.dtype, device=x.device)

    def multiply(
        source: Tensor, weight: Tensor, scale: Tensor | None, into: Tensor, shared_by: int, act: str
    ) -> None:
        tile = _tile(size, x.dtype, source.shape[1], act)
        _expert_kernel[(triton.cdiv(into.shape[1], tile.block_n), len(blocks.experts))](
            source,
            weight,
            scale,
            into,
            blocks,
            pairs,
            into.shape[1],
            source.stride(0),
            WIDTH=source.shape[1],
            SHARED_BY=shared_by,
            ACTIVATION=act,
            BLOCK_M=size,
            NARROW=NARROW if x.dtype == torch.bfloat16 else None,
            **tile.launch(),
        )

    # The pairs of a token read the same row of x, and each its own row of `hidden`.
    multiply(x, fc1, None, hidden, top_k, activation)
    multiply(hidden, fc2, weights, parts, 1, "none")
    combine(parts, expert_ids if some_elsewhere else None, residual, out, experts)
    return out
