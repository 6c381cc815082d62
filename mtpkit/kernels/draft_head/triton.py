"""Best token in Triton: each program finds the best token of a part of the vocabulary, a second
kernel the best part.

NaN is treated as +inf, so the largest logit shows without another pass whether the row is valid.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels import NO_TOKEN as NONE
from mtpkit.kernels.device import (
    NO_TOKEN,
    WIDE_TILE,
    Early,
    Tile,
    multiprocessors,
    padded,
    wait_for_previous,
    with_rows,
)
from mtpkit.kernels.draft_head.reference import to_token_ids
from mtpkit.kernels.draft_head.top import top_tokens

__all__ = ["argmax", "linear_argmax", "stream", "top_tokens"]

BLOCK = 4096
"""Number of logits that a program of `argmax` reads at a time."""
PER_MULTIPROCESSOR = 8
"""Number of programs of `argmax` that fill a multiprocessor."""
STREAM_ROWS = 64
"""Up to this many rows of hidden states, the weight is streamed once, and no logits are written."""
CHUNK_ROWS = 1024
"""With more than STREAM_ROWS rows, logits are computed for chunks of this many rows."""
TILES = {16: Tile(64, 128, 5, 4), 32: Tile(64, 128, 4, 4), 64: Tile(128, 64, 4, 4)}
"""Tiles by padded number of rows of hidden states: two programs run on a multiprocessor, with three
tiles in flight each. The weight's tile grows with the number of rows, since every program reads all
hidden states from the cache."""


@Early
@triton.jit
def _part_kernel(
    logits, values, indices, width, stride, span, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * span
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = start + lane
    for offset in range(start, tl.minimum(start + span, width), BLOCK):
        column = offset + lane
        value = tl.load(
            logits + row * stride + column, mask=column < width, other=float("-inf")
        ).to(tl.float32)
        value = tl.where(value == value, value, float("inf"))
        # Not >=: among equals, the smaller column stays.
        better = value > best
        best = tl.where(better, value, best)
        index = tl.where(better, column, index)
    # Each lane has kept a best of its own, so that threads exchange data only once.
    top = tl.max(best, axis=0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + place, top)
    tl.store(indices + place, tl.min(tl.where(best == top, index, 2147483647), axis=0))


@Early
@triton.jit
def _linear_part_kernel(
    hidden,
    weight,
    values,
    indices,
    rows,
    vocabulary,
    width,
    hidden_stride,
    weight_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_K)
    # Loads need no mask for rows: indices past the end read the last row again, and their results
    # are discarded below.
    token_start = tl.minimum(token, vocabulary - 1).to(tl.int64) * weight_stride
    row_start = tl.minimum(row, rows - 1).to(tl.int64) * hidden_stride
    weights = weight + token_start[:, None] + column[None, :]
    states = hidden + row_start[None, :] + column[:, None]
    # The weight is the left operand: its many rows fill the tensor core, and the other operand may
    # be as narrow as 16.
    logits = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        if EVEN:
            w = tl.load(weights)
            x = tl.load(states)
        else:
            w = tl.load(weights, mask=(start + column)[None, :] < width, other=0.0)
            x = tl.load(states, mask=(start + column)[:, None] < width, other=0.0)
        logits = tl.dot(w, x, logits, input_precision=PRECISION)
        weights += BLOCK_K
        states += BLOCK_K
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where((token < vocabulary)[:, None], logits, float("-inf"))
    top = tl.max(logits, axis=0)
    index = tl.min(tl.where(logits == top[None, :], token[:, None], 2147483647), axis=0)
    place = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(values + place, top, mask=row < rows)
    tl.store(indices + place, index, mask=row < rows)


@Early
@triton.jit
def _best_part_kernel(
    values,
    indices,
    token_ids,
    out,
    tops,
    parts,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    index = tl.load(indices + row * parts + part, mask=part < parts, other=2147483647)
    top = tl.max(value, axis=0)
    best = tl.min(tl.where(value == top, index, 2147483647), axis=0).to(tl.int64)
    if MAPPED:
        best = tl.load(token_ids + best).to(tl.int64)
    tl.store(out + row, tl.where(tl.abs(top) < float("inf"), best, NO_TOKEN))
    if tops is not None:
        tl.store(tops + row, top)


def _part_buffers(rows: int, parts: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(rows, parts, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.int32)
    )


def _best_part(
    values: Tensor, indices: Tensor, token_ids: Tensor | None, tops: Tensor | None
) -> Tensor:
    """[M] int64, the token of the largest of values [M, parts], among equals that of the smallest
    index; `NO_TOKEN` if the largest value is not finite. The largest value is written to `tops` [M]
    float32, if given."""
    rows, parts = values.shape
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    block = triton.next_power_of_2(parts)
    _best_part_kernel[(rows,)](
        values,
        indices,
        out if token_ids is None else token_ids.contiguous(),
        out,
        tops,
        parts,
        MAPPED=token_ids is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """See the reference."""
    return _argmax(logits, None)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    tops = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    return tops, _argmax(logits, tops)


def _argmax(logits: Tensor, tops: Tensor | None) -> Tensor:
    logits = with_rows(logits)
    rows, width = logits.shape
    blocks = triton.cdiv(width, BLOCK)
    programs = PER_MULTIPROCESSOR * multiprocessors()
    span = triton.cdiv(blocks, min(blocks, triton.cdiv(programs, max(rows, 1))))
    parts = triton.cdiv(blocks, span)
    values, indices = _part_buffers(rows, parts, logits.device)
    _part_kernel[(rows, parts)](
        logits, values, indices, width, logits.stride(0), span * BLOCK, BLOCK=BLOCK, num_warps=8
    )
    return _best_part(values, indices, None, tops)


def linear_argmax(hidden: Tensor, weight: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """See the reference."""
    return _linear_argmax(hidden, weight, token_ids, None)


def linear_best(
    hidden: Tensor, weight: Tensor, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    tops = torch.full((len(hidden),), -torch.inf, dtype=torch.float32, device=hidden.device)
    if not len(weight):
        return tops, torch.full_like(tops, NONE, dtype=torch.int64)
    return tops, _linear_argmax(hidden, weight, token_ids, tops)


def _linear_argmax(
    hidden: Tensor, weight: Tensor, token_ids: Tensor | None, tops: Tensor | None
) -> Tensor:
    if len(hidden) <= STREAM_ROWS:
        return stream(hidden, weight, token_ids, tops)
    starts = range(0, len(hidden), CHUNK_ROWS)
    chunks = [
        (rows, None if tops is None else tops[start:])
        for start, rows in zip(starts, hidden.split(CHUNK_ROWS), strict=True)
    ]
    found = [_argmax(F.linear(rows, weight), part) for rows, part in chunks]
    return to_token_ids(torch.cat(found) if len(found) > 1 else found[0], token_ids)


def stream(
    hidden: Tensor, weight: Tensor, token_ids: Tensor | None = None, tops: Tensor | None = None
) -> Tensor:
    """Compute `linear_argmax` of up to STREAM_ROWS rows without writing logits; write the largest
    logits to `tops` [M], if given."""
    hidden = with_rows(hidden)
    rows, width = hidden.shape
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=hidden.device)
    block_m = padded(rows)
    wide = hidden.dtype == torch.float32
    tile = WIDE_TILE if wide else TILES[block_m]
    parts = triton.cdiv(len(weight), tile.block_n)
    values, indices = _part_buffers(rows, parts, hidden.device)
    _linear_part_kernel[(parts,)](
        hidden,
        weight,
        values,
        indices,
        rows,
        len(weight),
        width,
        hidden.stride(0),
        weight.stride(0),
        ROWS=block_m,
        EVEN=tile.fits(width),
        PRECISION="ieee" if wide else None,
        **tile.launch(),
    )
    return _best_part(values, indices, token_ids, tops)
