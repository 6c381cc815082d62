# mypy: disable-error-code="no-untyped-def"
"""Mixture of experts in Triton without host-device syncs: every grid has the size of the worst case.

A pair is a token and one of its k experts, numbered token * k + place. Pairs are sorted by expert into blocks of a
fixed size, and the last block of an expert is padded. A program multiplies one block by one tile of its expert's
weight. With few tokens there are many small blocks, each of which streams an expert's weights once; with many tokens,
blocks fill the tensor cores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import NARROW, SMALLEST_DOT, with_rows
from mtpkit.kernels.moe.reference import Activation
from mtpkit.kernels.moe.routing import route

__all__ = ["expert_mlp", "route"]

_SORT_CHUNK = 2048
"""Pairs that a program of the sort reads at a time."""
_COMBINE_BLOCK = 1024
"""Channels of a token per program of the final sum."""


class Tile(NamedTuple):
    """Outputs and input channels that a program multiplies at a time; pipeline stages; warps."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


TILES = {16: Tile(64, 128, 4, 4), 32: Tile(64, 128, 4, 4), 64: Tile(128, 64, 4, 4), 128: Tile(256, 64, 4, 8)}
"""Tiles by pairs per block."""
_WIDE_TILE = Tile(64, 16, 2, 4)
"""Tile for fp32, which tensor cores do not multiply at full precision."""


@triton.jit
def _sort_kernel(
    ids_ptr,
    order_ptr,
    experts_ptr,
    used_ptr,
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the pairs of one expert in order, and the expert of each block that they fill."""
    expert = tl.program_id(0)
    bin, lane = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(ids, BINS)
    blocks = tl.where(bin < EXPERTS, (counts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(bin < expert, blocks, 0))
    own = tl.sum(tl.where(bin == expert, blocks, 0))
    if expert == 0:
        tl.store(used_ptr, tl.sum(blocks))
    place = first * BLOCK
    if own > 0:
        for start in range(0, pairs, CHUNK):
            pair = start + lane
            mine = tl.load(ids_ptr + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32) == expert
            tl.store(order_ptr + place + tl.cumsum(mine.to(tl.int32), 0) - 1, pair, mask=mine)
            place += tl.sum(mine.to(tl.int32))
        padding = place + tl.arange(0, BLOCK)
        tl.store(order_ptr + padding, pairs, mask=padding < (first + own) * BLOCK)
        for block in range(first, first + own):
            tl.store(experts_ptr + block, expert)


@triton.jit
def _dot(a, b, acc, NARROW: tl.constexpr):
    if NARROW is None:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a.to(NARROW), b.to(NARROW), acc)


@triton.jit
def _load_weight(ptrs, inside, WHOLE: tl.constexpr):
    """Load a weight, zero where a channel is not `inside`; WHOLE: all are inside."""
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["pairs"])
def _expert_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    order_ptr,
    experts_ptr,
    used_ptr,
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
):
    """Compute BLOCK_N outputs of one block of pairs per program; SHARED_BY neighbouring pairs read the same row of x.
    The weight is the left operand of the product, whose other side may be as narrow as 16."""
    block = tl.program_id(1)
    if block >= tl.load(used_ptr):
        return
    WHOLE: tl.constexpr = WIDTH % BLOCK_K == 0
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    ROWS: tl.constexpr = 2 if GATED else 1
    expert = tl.load(experts_ptr + block).to(tl.int64)
    pair = tl.load(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    real, live = (pair < pairs)[None, :], (n < outputs)[:, None]
    x_ptrs = x_ptr + (pair // SHARED_BY).to(tl.int64)[None, :] * x_stride + k[:, None]
    # Outputs past the end repeat the last one.
    rows = expert * outputs * ROWS + tl.minimum(n, outputs - 1)
    weight_ptrs = weight_ptr + rows[:, None] * WIDTH + k[None, :]
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    value = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        inside = start + k < WIDTH
        w = _load_weight(weight_ptrs + start, inside[None, :], WHOLE)
        x = tl.load(x_ptrs + start, mask=real & inside[:, None], other=0.0)
        product = _dot(w, x, product, NARROW)
        if GATED:
            w = _load_weight(weight_ptrs + outputs * WIDTH + start, inside[None, :], WHOLE)
            value = _dot(w, x, value, NARROW)
    if ACTIVATION == "relu2":
        product = tl.where(product < 0, 0.0, product * product)  # tl.maximum would turn a NaN into 0
    if GATED:
        product = product / (1.0 + tl.exp(-product)) * value
    if scale_ptr is not None:
        product *= tl.load(scale_ptr + pair, mask=pair < pairs, other=0.0)[None, :]
    out_ptrs = out_ptr + pair.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=real & live)


@triton.jit
def _combine_kernel(parts_ptr, residual_ptr, out_ptr, width, residual_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the pairs of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + k) * width + column, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=mask)


class _Blocks(NamedTuple):
    """Pairs sorted by expert."""

    order: Tensor
    """[blocks, size] int32 pairs; padding holds the number of pairs."""
    experts: Tensor
    """[blocks] int32, the expert of each block."""
    used: Tensor
    """[1] int32, the number of blocks in use; later entries of the other two are undefined."""


def _sort(expert_ids: Tensor, experts: int, size: int) -> _Blocks:
    """Sort the pairs of expert_ids [T, k] into blocks of `size`."""
    pairs = expert_ids.numel()
    most = min(experts, pairs)  # most experts with pairs; each has one block that may be padded
    blocks = most + (pairs - most) // size

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=expert_ids.device)

    sorted_ = _Blocks(ints(blocks, size), ints(blocks), ints(1))
    _sort_kernel[(experts,)](
        expert_ids,
        *sorted_,
        pairs,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        CHUNK=min(_SORT_CHUNK, max(32, triton.next_power_of_2(pairs))),
        BLOCK=size,
        num_warps=4,
    )
    return sorted_


def block_size(pairs: int, experts: int) -> int:
    """Pairs per block: about as many as an expert has."""
    return min(max(TILES), max(SMALLEST_DOT, triton.next_power_of_2(triton.cdiv(pairs, experts))))


def expert_mlp(
    x: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    activation: Activation,
    residual: Tensor | None = None,
    size: int | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """See the reference. Each expert's output is rounded before the sum. `size` and `tile` override `block_size` and
    `TILES`."""
    assert activation in ("relu2", "swiglu") and fc1.is_contiguous() and fc2.is_contiguous()
    (tokens, top_k), (experts, width, inner) = expert_ids.shape, fc2.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    x, pairs = with_rows(x), tokens * top_k
    residual = None if residual is None else with_rows(residual)
    size = size or block_size(pairs, experts)
    blocks = _sort(expert_ids.contiguous(), experts, size)
    tile = tile or (TILES[size] if x.dtype == torch.bfloat16 else _WIDE_TILE)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, width, dtype=x.dtype, device=x.device)

    def multiply(source: Tensor, weight: Tensor, scale: Tensor | None, out: Tensor, shared_by: int, act: str) -> None:
        # swiglu needs two accumulators, one for the gate and one for the value.
        block_n = tile.block_n // 2 if act == "swiglu" and tile.block_n > 64 else tile.block_n
        _expert_kernel[(triton.cdiv(out.shape[1], block_n), len(blocks.experts))](
            source,
            weight,
            scale,
            out,
            *blocks,
            pairs,
            out.shape[1],
            source.stride(0),
            WIDTH=source.shape[1],
            SHARED_BY=shared_by,
            ACTIVATION=act,
            BLOCK_M=size,
            BLOCK_N=block_n,
            BLOCK_K=tile.block_k,
            NARROW=NARROW if x.dtype == torch.bfloat16 else None,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )

    multiply(x, fc1, None, hidden, top_k, activation)
    multiply(hidden, fc2, weights.contiguous(), parts, 1, "none")
    _combine_kernel[(tokens, triton.cdiv(width, _COMBINE_BLOCK))](
        parts,
        residual,
        out,
        width,
        0 if residual is None else residual.stride(0),
        TOP_K=top_k,
        BLOCK=min(_COMBINE_BLOCK, triton.next_power_of_2(width)),
    )
    return out
