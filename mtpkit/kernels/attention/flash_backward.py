# mypy: disable-error-code="attr-defined"
"""Backward of flash attention over the sequence of depth 1 and, at each position, the later depths'
own entries.

Three kernels compute the gradients of the queries, of depth 1's keys and values, and of the later
depths' keys and values. Values may be narrower than keys: their tiles have E channels, those of
keys have D. No two programs add to the same element, so the result is deterministic. Softmax
weights are recomputed from q, k and the forward's log-sum-exp. delta is the dot product of a
query's output with the gradient of that output (FlashAttention-2, section 3.1.2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.attention.reference import AttentionWindow
from mtpkit.kernels.attention.tile import (
    Bounds,
    Inputs,
    Tiles,
    gap_of,
    load_numbers,
    load_rows,
    row_dot,
    rows_of,
    score_scale,
    sees,
    store_rows,
)
from mtpkit.kernels.device import padded

_LN_2 = tl.constexpr(0.6931471805599453)


def query_tiles(width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for M queries of one head against N keys at a time."""
    if dtype.itemsize > 2:
        return Tiles(32, 16, num_warps=8, num_stages=1)
    if width > 128:
        return Tiles(64, 32, num_warps=8, num_stages=1)
    return Tiles(128, 64, num_warps=8, num_stages=2)


def key_tiles(width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for N keys of one group against M queries at a time."""
    if dtype.itemsize > 2:
        return Tiles(16, 32, num_warps=8, num_stages=1)
    if width > 128:
        return Tiles(32, 64, num_warps=8, num_stages=1)
    return Tiles(64, 128, num_warps=8, num_stages=2)


def diagonal_rows(width: int) -> int:
    """Positions per program of `_diagonal_kernel`; four tiles of that many rows fit into the
    program's registers."""
    return max(16, 4096 // padded(width))


@triton.jit(do_not_specialize=["length"])
def _query_kernel(
    inputs,
    start_ptr,
    out,
    grad_out,
    lse_ptr,
    delta_ptr,
    grad_q,
    scale,
    window,
    length,
    REP: tl.constexpr,
    WIDTHS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Store the gradient and delta of M queries of one head per program; queries with the most keys
    run first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    group = head // REP
    line = batch * tl.num_programs(1) + head
    token = first + tl.arange(0, M)
    queries = load_rows(inputs.q, batch, head, first, length, WIDTHS[0], M, D)
    pull = load_rows(grad_out, batch, head, first, length, WIDTHS[1], M, E)
    lse = load_numbers(lse_ptr, line, token, length)
    delta = row_dot(load_rows(out, batch, head, first, length, WIDTHS[1], M, E), pull)
    # Stored for the two other kernels, which are launched after this one.
    tl.store(delta_ptr + line.to(tl.int64) * length + token, delta, mask=token < length)
    acc = tl.zeros([M, D], tl.float32)
    for depth in tl.static_range(len(inputs.later_k)):
        own_k = load_rows(inputs.later_k[depth], batch, group, first, length, WIDTHS[0], M, D)
        own_v = load_rows(inputs.later_v[depth], batch, group, first, length, WIDTHS[1], M, E)
        weight = tl.exp2(row_dot(queries, own_k) * scale - lse)
        acc += (weight * (row_dot(pull, own_v) - delta))[:, None] * own_k.to(tl.float32)
    oldest = 0
    begin = tl.zeros([M], tl.int32)
    if start_ptr is not None:
        begin = load_numbers(start_ptr, batch, token, length)
        oldest = tl.load(start_ptr + batch.to(tl.int64) * length + first)
    sunk = 0
    gap = 0
    if window is not None:
        sunk, gap = gap_of(first, oldest, window, N)
    for place in range(oldest // N * N, tl.minimum(first + M, length) - gap, N):
        start = place + tl.where(place >= sunk, gap, 0)
        keys = load_rows(inputs.k, batch, group, start, length, WIDTHS[0], N, D)
        values = load_rows(inputs.v, batch, group, start, length, WIDTHS[1], N, E)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        seen = sees(start + tl.arange(0, N), token, begin, window)
        # Chosen by `where`, not multiplied by the mask: the exponential of a score that is not part
        # of lse may be infinite, and infinity times 0 is NaN.
        weights = tl.where(seen, tl.exp2(scores * scale - lse[:, None]), 0.0)
        errors = weights * (tl.dot(pull, tl.trans(values), input_precision="ieee") - delta[:, None])
        acc = tl.dot(errors.to(keys.dtype), keys, acc, input_precision="ieee")
    # `scale` holds a factor log2(e), for exp2, that the scores themselves do not have.
    store_rows(grad_q, acc * (scale * _LN_2), batch, head, first, length, WIDTHS[0], M, D)


@triton.jit(do_not_specialize=["length"])
def _key_kernel(
    inputs,
    bounds,
    grad_out,
    lse_ptr,
    delta_ptr,
    grad_k,
    grad_v,
    scale,
    window,
    length,
    REP: tl.constexpr,
    WIDTHS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Store the gradients of N keys and values of one group per program, summed over the group's
    heads; keys with the most queries run first."""
    first = tl.program_id(0) * N
    group = tl.program_id(1)
    batch = tl.program_id(2)
    place = first + tl.arange(0, N)
    keys = load_rows(inputs.k, batch, group, first, length, WIDTHS[0], N, D)
    values = load_rows(inputs.v, batch, group, first, length, WIDTHS[1], N, E)
    last = length
    begin = tl.zeros([N], tl.int32)
    until = tl.where(place < length, length, 0)
    if bounds is not None:
        begin = load_numbers(bounds[0], batch, place, length)
        until = load_numbers(bounds[1], batch, place, length)
        last = tl.load(bounds[1] + batch.to(tl.int64) * length + tl.minimum(first + N, length) - 1)
    if window is not None:
        # Sinks are seen by the whole document, other keys by the next queries.
        until = tl.where(place < begin + window[1], until, tl.minimum(until, place + window[0]))
        last = tl.max(until, 0)
    acc_k = tl.zeros([N, D], tl.float32)
    acc_v = tl.zeros([N, E], tl.float32)
    # Heads are summed in a loop: atomic additions of several programs would come in any order, and
    # round differently from run to run.
    for member in range(REP):
        head = group * REP + member
        line = batch * (tl.num_programs(1) * REP) + head
        for start in range(first, last, M):
            token = start + tl.arange(0, M)
            queries = load_rows(inputs.q, batch, head, start, length, WIDTHS[0], M, D)
            pull = load_rows(grad_out, batch, head, start, length, WIDTHS[1], M, E)
            lse = load_numbers(lse_ptr, line, token, length)
            delta = load_numbers(delta_ptr, line, token, length)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")  # [N, M]
            seen = (token[None, :] >= place[:, None]) & (token[None, :] < until[:, None])
            weights = tl.where(seen, tl.exp2(scores * scale - lse[None, :]), 0.0)
            acc_v = tl.dot(weights.to(pull.dtype), pull, acc_v, input_precision="ieee")
            errors = weights * (
                tl.dot(values, tl.trans(pull), input_precision="ieee") - delta[None, :]
            )
            acc_k = tl.dot(errors.to(queries.dtype), queries, acc_k, input_precision="ieee")
    store_rows(grad_k, acc_k * (scale * _LN_2), batch, group, first, length, WIDTHS[0], N, D)
    store_rows(grad_v, acc_v, batch, group, first, length, WIDTHS[1], N, E)


@triton.jit(do_not_specialize=["length"])
def _diagonal_kernel(
    inputs,
    grad_out,
    lse_ptr,
    delta_ptr,
    grad_later_k,
    grad_later_v,
    scale,
    length,
    REP: tl.constexpr,
    WIDTHS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Store the gradients of the later depths' keys and values at M positions of one group per
    program, summed over the group's heads."""
    first = tl.program_id(0) * M
    group = tl.program_id(1)
    batch = tl.program_id(2)
    token = first + tl.arange(0, M)
    for depth in tl.static_range(len(inputs.later_k)):
        keys = load_rows(inputs.later_k[depth], batch, group, first, length, WIDTHS[0], M, D)
        values = load_rows(inputs.later_v[depth], batch, group, first, length, WIDTHS[1], M, E)
        acc_k = tl.zeros([M, D], tl.float32)
        acc_v = tl.zeros([M, E], tl.float32)
        for member in range(REP):
            head = group * REP + member
            line = batch * (tl.num_programs(1) * REP) + head
            queries = load_rows(inputs.q, batch, head, first, length, WIDTHS[0], M, D)
            pull = load_rows(grad_out, batch, head, first, length, WIDTHS[1], M, E)
            lse = load_numbers(lse_ptr, line, token, length)
            delta = load_numbers(delta_ptr, line, token, length)
            weights = tl.exp2(row_dot(queries, keys) * scale - lse)
            errors = weights * (row_dot(pull, values) - delta)
            acc_k += errors[:, None] * queries.to(tl.float32)
            acc_v += weights[:, None] * pull.to(tl.float32)
        store_rows(
            grad_later_k[depth],
            acc_k * (scale * _LN_2),
            batch,
            group,
            first,
            length,
            WIDTHS[0],
            M,
            D,
        )
        store_rows(grad_later_v[depth], acc_v, batch, group, first, length, WIDTHS[1], M, E)


def attend_backward(
    grad_out: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    bounds: Bounds | None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> list[Tensor]:
    """Gradients of q, k, v, the later depths' keys and the later depths' values, each in the dtype
    of its tensor.

    out, lse, bounds, scale and window are those of the forward pass; grad_out [b, s, heads, e] has
    contiguous channels.
    """
    q, k, values = (rows.data for rows in inputs[:3])
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    pull = rows_of(grad_out)
    delta = torch.empty_like(lse)
    grads = [
        torch.empty_like(rows.data) for rows in (*inputs[:3], *inputs.later_k, *inputs.later_v)
    ]
    to = Inputs.of(grads)
    widths = width, values.shape[-1]
    common = dict(REP=heads // groups, WIDTHS=widths, D=padded(width), E=padded(widths[1]))
    factor = score_scale(width, scale)
    numbers = (factor, window, length)
    tiles = query_tiles(width, q.dtype)
    _query_kernel[(triton.cdiv(length, tiles.m), heads, batch)](
        inputs,
        None if bounds is None else bounds.start,
        rows_of(out),
        pull,
        lse,
        delta,
        to.q,
        *numbers,
        **tiles.launch(),
        **common,
    )
    tiles = key_tiles(width, q.dtype)
    _key_kernel[(triton.cdiv(length, tiles.n), groups, batch)](
        inputs, bounds, pull, lse, delta, to.k, to.v, *numbers, **tiles.launch(), **common
    )
    if inputs.later_k:
        rows = diagonal_rows(width)
        _diagonal_kernel[(triton.cdiv(length, rows), groups, batch)](
            inputs,
            pull,
            lse,
            delta,
            to.later_k,
            to.later_v,
            factor,
            length,
            M=rows,
            num_warps=4,
            **common,
        )
    return grads
