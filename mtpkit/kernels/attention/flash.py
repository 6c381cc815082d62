# mypy: disable-error-code="attr-defined"
"""Training attention in Triton: flash attention (Dao 2023, FlashAttention-2, arXiv:2307.08691) with
a backward.

One set of kernels serves `sequence_attention` and `depth_attention`: a plain sequence is depth 1
with no later depth. The running softmax of a query starts with the entries of depths 2..k at its
own position, so no merge is needed. Memory is linear in s. Key blocks outside the documents of a
query block are skipped. torch's own flash kernels support only one document per row, and their
backward is not deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mtpkit.kernels.attention.flash_backward import attend_backward
from mtpkit.kernels.attention.reference import AttentionWindow, window_before
from mtpkit.kernels.attention.tile import (
    Bounds,
    Inputs,
    Tiles,
    document_bounds,
    empty_state,
    fold,
    gap_of,
    load_numbers,
    load_rows,
    row_dot,
    rows_of,
    score_scale,
    sees,
    store_rows,
)
from mtpkit.kernels.device import padded, with_rows


def forward_tiles(width: int, dtype: torch.dtype) -> Tiles:
    """Tiles for M queries of one head against N keys at a time."""
    if dtype.itemsize > 2:
        return Tiles(32, 16, num_warps=8, num_stages=2)
    if width > 128:
        return Tiles(64, 32, num_warps=8, num_stages=2)
    return Tiles(128, 64, num_warps=8 if width > 64 else 4, num_stages=3)


@triton.jit
def _attend(
    queries,
    token,
    begin,
    state,
    inputs,
    batch,
    group,
    first,
    last,
    length,
    scale,
    WIDTHS,
    N,
    MASKED,
    window=None,
):
    """Fold the keys first .. last - 1 into a running softmax; first is a multiple of N.

    If MASKED, `sees` says which keys a query sees. If not, it sees all keys, and last is a multiple
    of N. WIDTHS: the channels of a key and of a value.
    """
    D: tl.constexpr = queries.shape[1]
    E: tl.constexpr = state[0].shape[1]
    for start in range(first, last, N):
        keys = load_rows(inputs.k, batch, group, start, length, WIDTHS[0], N, D)
        values = load_rows(inputs.v, batch, group, start, length, WIDTHS[1], N, E)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if MASKED:
            place = start + tl.arange(0, N)
            scores = tl.where(sees(place, token, begin, window), scores, float("-inf"))
        state = fold(state, scores, values, scale, MASKED)
    return state


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    inputs,
    start_ptr,
    out,
    lse_ptr,
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
    """Compute M queries of one head per program; queries with the most keys run first. Keys have
    WIDTHS[0] channels, padded to D in a tile; values have WIDTHS[1], padded to E. `window`: see
    `sees`."""
    # A long program that starts last would run alone at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    group = head // REP
    token = first + tl.arange(0, M)
    end = tl.minimum(first + M, length)
    queries = load_rows(inputs.q, batch, head, first, length, WIDTHS[0], M, D)
    acc, best, total = empty_state(M, E)
    # A query sees one entry of each later depth, that of its own position: one dot product per row,
    # where a product of tiles would compute M times as many scores.
    for depth in tl.static_range(len(inputs.later_k)):
        keys = load_rows(inputs.later_k[depth], batch, group, first, length, WIDTHS[0], M, D)
        scores = row_dot(queries, keys) * scale
        values = load_rows(inputs.later_v[depth], batch, group, first, length, WIDTHS[1], M, E).to(
            tl.float32
        )
        higher = tl.maximum(best, scores)
        weights = tl.exp2(scores - higher)
        fade = tl.exp2(best - higher)
        total = total * fade + weights
        acc = acc * fade[:, None] + values * weights[:, None]
        best = higher
    # Each of the keys low .. end - 1 may be seen by some query; the keys full_low .. full_end - 1
    # are seen by all queries.
    full_end = (first + 1) // N * N
    if start_ptr is None:
        begin = tl.zeros([M], tl.int32)
        oldest = 0
        full_low = 0
    else:
        # Documents do not decrease along a row: of M queries, the first one's document starts
        # first, the last one's starts last.
        begin = load_numbers(start_ptr, batch, token, length)
        oldest = tl.load(start_ptr + batch.to(tl.int64) * length + first)
        full_low = tl.load(start_ptr + batch.to(tl.int64) * length + end - 1)
    state = acc, best, total
    low = oldest // N * N
    if window is not None:
        full_low = tl.maximum(full_low, end - window[0])
        sunk, gap = gap_of(first, oldest, window, N)
        if gap > 0:
            state = _attend(
                queries,
                token,
                begin,
                state,
                inputs,
                batch,
                group,
                low,
                sunk,
                length,
                scale,
                WIDTHS,
                N,
                True,
                window,
            )
            low = sunk + gap
    full_low = tl.maximum(tl.minimum(tl.cdiv(full_low, N) * N, full_end), low)
    state = _attend(
        queries,
        token,
        begin,
        state,
        inputs,
        batch,
        group,
        low,
        full_low,
        length,
        scale,
        WIDTHS,
        N,
        True,
        window,
    )
    state = _attend(
        queries,
        token,
        begin,
        state,
        inputs,
        batch,
        group,
        full_low,
        full_end,
        length,
        scale,
        WIDTHS,
        N,
        False,
    )
    acc, best, total = _attend(
        queries,
        token,
        begin,
        state,
        inputs,
        batch,
        group,
        full_end,
        end,
        length,
        scale,
        WIDTHS,
        N,
        True,
        window,
    )
    # Each query sees at least itself, so no real query has a total of 0.
    store_rows(out, acc / total[:, None], batch, head, first, length, WIDTHS[1], M, E)
    line = (batch * tl.num_programs(1) + head).to(tl.int64)
    tl.store(lse_ptr + line * length + token, best + tl.log2(total), mask=token < length)


def _attend_forward(
    inputs: Inputs, bounds: Bounds | None, scale: float | None, window: AttentionWindow | None
) -> tuple[Tensor, Tensor]:
    """The output in the dtype of q, with the strides of q if values are as wide as keys; and log2
    of each query's sum of exponentials, [b, heads, s] fp32."""
    q = inputs.q.data
    v = inputs.v.data
    batch, length, heads, width = q.shape
    tiles = forward_tiles(width, q.dtype)
    out = (
        torch.empty_like(q)
        if v.shape[-1] == width
        else q.new_empty(batch, length, heads, v.shape[-1])
    )
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    _forward_kernel[(triton.cdiv(length, tiles.m), heads, batch)](
        inputs,
        None if bounds is None else bounds.start,
        rows_of(out),
        lse,
        score_scale(width, scale),
        window,
        length,
        REP=heads // inputs.k.data.shape[2],
        WIDTHS=(width, v.shape[-1]),
        D=padded(width),
        E=padded(v.shape[-1]),
        **tiles.launch(),
    )
    return out, lse


class _DepthAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        bounds: Bounds | None,
        scale: float | None,
        window: AttentionWindow | None,
        *tensors: Tensor,
    ) -> Tensor:
        tensors = tuple(with_rows(tensor) for tensor in tensors)
        out, lse = _attend_forward(Inputs.of(tensors), bounds, scale, window)
        ctx.save_for_backward(out, lse, *(bounds or ()), *tensors)
        ctx.packed = bounds is not None
        ctx.scale = scale
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *rest = ctx.saved_tensors
        bounds, tensors = (Bounds(*rest[:2]), rest[2:]) if ctx.packed else (None, rest)
        grads = attend_backward(
            with_rows(grad_out), Inputs.of(tensors), out, lse, bounds, ctx.scale, ctx.window
        )
        return None, None, None, *grads


def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    """See the reference. Documents must not decrease along a row."""
    bounds = None if documents is None else document_bounds(documents)
    return _DepthAttention.apply(bounds, scale, window, q, k, v)


def depth_attention(
    q: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    later_k: list[Tensor],
    later_v: list[Tensor],
    documents: Tensor | None = None,
    scale: float | None = None,
    window: AttentionWindow | None = None,
) -> Tensor:
    """See the reference. Documents must not decrease along a row."""
    bounds = None if documents is None else document_bounds(documents)
    window = window_before(window, len(later_k))
    return _DepthAttention.apply(bounds, scale, window, q, first_k, first_v, *later_k, *later_v)
