"""`top_tokens` in Triton.

Each program finds the best tokens of one part of the vocabulary, and a second kernel finds the best
of all parts. NaN is treated as +inf, as in `argmax`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import NO_TOKEN, with_rows

_BLOCK = 4096
"""Most logits per part."""
_LAST = tl.constexpr(2147483647)


@triton.jit
def _best(values, tokens):
    """The largest of values [N] and its token; among equals, the smallest token."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, tokens, _LAST), 0)


@triton.jit
def _part_kernel(
    logits, values, tokens, sums, width, stride, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the COUNT best of BLOCK logits of a row, and the sum of exp(logit - largest logit) over
    the block."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(
        tl.float32
    )
    x = tl.where(x == x, x, float("inf"))
    place = row * tl.num_programs(1) + part
    top = tl.max(x, 0)
    # In a part with nothing but -inf, x - top would be NaN.
    shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    tl.store(sums + place, tl.sum(tl.exp(x - shift), 0))
    left = column
    for rank in tl.static_range(COUNT):
        best, token = _best(x, left)
        tl.store(values + place * COUNT + rank, best)
        tl.store(tokens + place * COUNT + rank, token)
        taken = column == token
        x = tl.where(taken, float("-inf"), x)
        # Once only -inf is left, a taken token would win again, so its number goes, too.
        left = tl.where(taken, _LAST, left)


@triton.jit
def _merge_kernel(
    values, tokens, sums, out, log_probs, parts, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < parts * COUNT
    x = tl.load(values + row * parts * COUNT + lane, mask=inside, other=float("-inf"))
    left = tl.load(tokens + row * parts * COUNT + lane, mask=inside, other=_LAST)
    top = tl.max(x, 0)
    valid = tl.abs(top) < float("inf")
    # The first value of a part is its largest logit, to which the part's sum is relative.
    share = tl.load(
        sums + row * parts + lane // COUNT, mask=inside & (lane % COUNT == 0), other=0.0
    )
    total = (
        tl.log(tl.sum(tl.where(share > 0, share * tl.exp(tl.where(valid, x - top, 0.0)), 0.0), 0))
        + top
    )
    for rank in tl.static_range(COUNT):
        best, token = _best(x, left)
        kept = valid & (best > float("-inf"))
        tl.store(out + row * COUNT + rank, tl.where(kept, token.to(tl.int64), NO_TOKEN))
        tl.store(log_probs + row * COUNT + rank, tl.where(kept, best - total, float("nan")))
        taken = left == token
        x = tl.where(taken, float("-inf"), x)
        left = tl.where(taken, _LAST, left)


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See the reference."""
    logits = with_rows(logits)
    rows, width = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    parts = triton.cdiv(width, block)
    values, log_probs = (
        logits.new_empty(rows, size, dtype=torch.float32) for size in (parts * count, count)
    )
    tokens = logits.new_empty(rows, parts * count, dtype=torch.int32)
    sums = values.new_empty(rows, parts)
    out = tokens.new_empty(rows, count, dtype=torch.int64)
    if rows:
        sizes = dict(COUNT=count, num_warps=8)
        _part_kernel[(rows, parts)](
            logits, values, tokens, sums, width, logits.stride(0), BLOCK=block, **sizes
        )
        merged = triton.next_power_of_2(parts * count)
        _merge_kernel[(rows,)](
            values, tokens, sums, out, log_probs, parts, BLOCK=merged, **sizes | dict(num_warps=4)
        )
    return out, log_probs
