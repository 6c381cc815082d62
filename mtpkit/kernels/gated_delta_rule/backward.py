# mypy: disable-error-code="assignment"
"""Backward of the gated delta rule in Triton: everything but the inputs is recomputed, chunk by
chunk.

With S the state before a chunk, c the sums of log decays, U the corrections and P = tril(Q K^T
exp(c_i - c_j)), the forward is (I + A) U = beta (V - exp(c) K S), O = exp(c) Q S + P U. A first
kernel walks over each row's chunks from the last one to the first and carries the gradient of the
state along. It stores the gradient of the state at every chunk's end, and Y, the gradient of the
right-hand side of the system for U. A second kernel computes everything else, for all chunks at
once.

Sizes: L tokens of a chunk, P channels of a head at a time, N key width, M readouts per token.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import padded, row_of_tile, strided
from mtpkit.kernels.gated_delta_rule.scan import (
    dot_in,
    narrow,
    prepare,
    value_block,
    walk,
    walk_block,
)


@triton.jit(do_not_specialize=["tokens"])
def _back_kernel(
    q_in,
    k_in,
    beta_ptr,
    inverse_ptr,
    since_ptr,
    tokens,
    starts_ptr,
    dout_ptr,
    dstate_ptr,
    y_ptr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    READS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Walk back over the chunks of one row per program, for BLOCK_P channels of one value head."""
    q_ptr, q_token, q_read, q_head = q_in
    k_ptr, k_token, k_head = k_in
    PARTS: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    head = tl.program_id(0) // PARTS
    group = head // (HEADS // GROUPS)
    l = tl.arange(0, SIZE)  # noqa: E741
    n = tl.arange(0, BLOCK_N)
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    begin = tl.load(starts_ptr + row) - tl.load(starts_ptr)
    count = (tl.load(starts_ptr + row + 1) - tl.load(starts_ptr) - begin).to(tl.int32)
    in_n = (n < STATE)[None, :]
    in_p = (p < WIDTH)[None, :]
    since_ptr += head.to(tl.int64) * tokens
    later = l[:, None] >= l[None, :]
    dstate = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    chunks = (count + SIZE - 1) // SIZE
    for back in range(chunks):
        start = (chunks - 1 - back) * SIZE
        left = tl.minimum(count - start, SIZE)
        live = l < left
        token = begin + start + l
        k_ptrs = k_ptr + token[:, None] * k_token + group * k_head + n[None, :]
        k = tl.load(k_ptrs, mask=live[:, None] & in_n, other=0.0)
        beta = tl.load(beta_ptr + token * HEADS + head, mask=live, other=0.0)
        since = tl.load(since_ptr + token, mask=live, other=0.0)
        whole = tl.load(since_ptr + begin + start + left - 1)
        inverse_ptrs = inverse_ptr + (token[:, None] * HEADS + head) * SIZE + l[None, :]
        inverse = tl.load(inverse_ptrs, mask=live[:, None], other=0.0)
        from_start = tl.exp(since.to(tl.float32))[:, None]
        decay = tl.exp(tl.minimum((since[:, None] - since[None, :]).to(tl.float32), 0.0))
        # `_finish_kernel` finds chunks by the numbers that `row_of_tile` gives them with SPARE 2.
        tile = begin // SIZE + row * 2 + start // SIZE
        dstate_ptrs = (
            dstate_ptr + (tile * HEADS + head) * (WIDTH * STATE) + p[None, :] * STATE + n[:, None]
        )
        tl.store(
            dstate_ptrs, dstate.to(dstate_ptr.dtype.element_ty), mask=(n < STATE)[:, None] & in_p
        )
        du = dot_in(k, dstate, NARROW) * tl.exp((whole - since).to(tl.float32))[:, None]
        dstate *= tl.exp(whole.to(tl.float32))
        for read in tl.static_range(READS):
            q_ptrs = q_ptr + token[:, None] * q_token + read * q_read + group * q_head + n[None, :]
            q = tl.load(q_ptrs, mask=live[:, None] & in_n, other=0.0)
            dout_ptrs = (
                dout_ptr + ((token[:, None] * READS + read) * HEADS + head) * WIDTH + p[None, :]
            )
            dout = tl.load(dout_ptrs, mask=live[:, None] & in_p, other=0.0).to(tl.float32)
            scores = tl.where(later, dot_in(q, tl.trans(k), NARROW) * decay, 0.0)
            du += dot_in(tl.trans(scores), dout, NARROW)
            dstate += dot_in(tl.trans(q), dout * from_start, NARROW)
        y = dot_in(tl.trans(inverse), du, NARROW)
        y_ptrs = y_ptr + (token[:, None] * HEADS + head) * WIDTH + p[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & in_p)
        dstate -= dot_in(tl.trans(k), y * from_start * beta[:, None], NARROW)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _finish_kernel(
    q_in,
    k_in,
    v_in,
    beta_ptr,
    since_ptr,
    tokens,
    rows,
    starts_ptr,
    dout_ptr,
    made,
    grads,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    READS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Compute the gradients of one chunk of one value head per program. Longer than 70 lines
    because its parts share tiles."""
    q_ptr, q_token, q_read, q_head = q_in
    k_ptr, k_token, k_head = k_in
    v_ptr, v_token, v_head = v_in
    state_ptr, dstate_ptr, u_ptr, y_ptr = made
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr = grads
    head = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    _, begin, count, first = row_of_tile(starts_ptr, rows, tl.program_id(1), 1, SIZE, 2)
    if first >= count:
        return
    group = head // (HEADS // GROUPS)
    l = tl.arange(0, SIZE)  # noqa: E741
    n = tl.arange(0, BLOCK_N)
    live = first + l < count
    token = begin + first + l
    left = tl.minimum(count - first, SIZE)
    in_n = (n < STATE)[None, :]
    k_ptrs = k_ptr + token[:, None] * k_token + group * k_head + n[None, :]
    k = tl.load(k_ptrs, mask=live[:, None] & in_n, other=0.0)
    beta = tl.load(beta_ptr + token * HEADS + head, mask=live, other=0.0)
    since_ptr += head.to(tl.int64) * tokens
    since = tl.load(since_ptr + token, mask=live, other=0.0)
    whole = tl.load(since_ptr + begin + first + left - 1)
    from_start = tl.exp(since.to(tl.float32))[:, None]
    to_end = tl.exp((whole - since).to(tl.float32))[:, None]
    decay = tl.exp(tl.minimum((since[:, None] - since[None, :]).to(tl.float32), 0.0))

    # Contributions through states and values, BLOCK_P channels of values at a time.
    read_k = tl.zeros([SIZE, BLOCK_N], tl.float32)  # exp(c) Y S^T
    dk = tl.zeros([SIZE, BLOCK_N], tl.float32)
    dA = tl.zeros([SIZE, SIZE], tl.float32)
    dbeta = tl.zeros([SIZE], tl.float32)
    dwhole = 0.0
    dq = ()
    dP = ()
    for _ in tl.static_range(READS):
        dq = dq + (tl.zeros([SIZE, BLOCK_N], tl.float32),)  # noqa: RUF005
        dP = dP + (tl.zeros([SIZE, SIZE], tl.float32),)  # noqa: RUF005
    for part in range(0, WIDTH, BLOCK_P):
        p = part + tl.arange(0, BLOCK_P)
        mask = live[:, None] & (p < WIDTH)[None, :]
        inside = (n < STATE)[:, None] & (p < WIDTH)[None, :]
        place = (tile * HEADS + head) * (WIDTH * STATE) + p[None, :] * STATE + n[:, None]
        state = tl.load(state_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dstate = tl.load(dstate_ptr + place, mask=inside, other=0.0).to(tl.float32)
        value = (token[:, None] * HEADS + head) * WIDTH + p[None, :]
        u = tl.load(u_ptr + value, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + value, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(
            v_ptr + token[:, None] * v_token + head * v_head + p[None, :], mask=mask, other=0.0
        )
        tl.store(dv_ptr + value, (y * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=mask)
        dbeta += tl.sum(y * v.to(tl.float32), 1)
        read_k += dot_in(y * from_start, tl.trans(state), NARROW)
        dA -= dot_in(y, tl.trans(u), NARROW)
        dk += dot_in(u * to_end, tl.trans(dstate), NARROW)
        dwhole += tl.sum(tl.sum(state * dstate, 1), 0)
        after_q = ()
        after_P = ()
        for read in tl.static_range(READS):
            dout_ptrs = (
                dout_ptr + ((token[:, None] * READS + read) * HEADS + head) * WIDTH + p[None, :]
            )
            dout = tl.load(dout_ptrs, mask=mask, other=0.0).to(tl.float32)
            after_q = after_q + (dq[read] + dot_in(dout * from_start, tl.trans(state), NARROW),)  # noqa: RUF005
            after_P = after_P + (dP[read] + dot_in(dout, tl.trans(u), NARROW),)  # noqa: RUF005
        dq = after_q
        dP = after_P

    wide_k = k.to(tl.float32)
    written = tl.sum(wide_k * dk, 1)
    read = tl.sum(wide_k * read_k, 1)
    dsince = -written - beta * read
    dwhole = dwhole * tl.exp(whole.to(tl.float32)) + tl.sum(written, 0)
    dbeta -= read
    dk -= read_k * beta[:, None]

    # Contributions through pairs of tokens.
    products = dot_in(k, tl.trans(k), NARROW)
    dpairs = tl.where(l[:, None] > l[None, :], dA * decay, 0.0)
    dbeta += tl.sum(dpairs * products, 1)
    dpairs *= beta[:, None]
    dk += dot_in(dpairs + tl.trans(dpairs), k, NARROW)
    both = dpairs * products
    dsince += tl.sum(both, 1) - tl.sum(both, 0)
    for m in tl.static_range(READS):
        q_ptrs = q_ptr + token[:, None] * q_token + m * q_read + group * q_head + n[None, :]
        q = tl.load(q_ptrs, mask=live[:, None] & in_n, other=0.0)
        dsince += tl.sum(q.to(tl.float32) * dq[m], 1)
        dpairs = tl.where(l[:, None] >= l[None, :], dP[m] * decay, 0.0)
        both = dpairs * dot_in(q, tl.trans(k), NARROW)
        dsince += tl.sum(both, 1) - tl.sum(both, 0)
        dk += dot_in(tl.trans(dpairs), q, NARROW)
        one = dq[m] + dot_in(dpairs, k, NARROW)
        dq_ptrs = dq_ptr + ((token[:, None] * READS + m) * HEADS + head) * STATE + n[None, :]
        tl.store(dq_ptrs, one, mask=live[:, None] & in_n)
    tl.store(
        dk_ptr + (token[:, None] * HEADS + head) * STATE + n[None, :], dk, mask=live[:, None] & in_n
    )
    tl.store(dbeta_ptr + token * HEADS + head, dbeta, mask=live)
    # `whole` is `since` of the chunk's last token. `since` is a running sum of g, so the gradient
    # of g is a running sum from the chunk's end.
    dsince += tl.where(l == left - 1, dwhole, 0.0)
    dg = tl.cumsum(tl.where(live, dsince, 0.0), 0, reverse=True)
    tl.store(dg_ptr + token * HEADS + head, dg, mask=live)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `delta_rule` with respect to q, k, v, g and beta, given the gradient `dout` of
    its result."""
    (tokens, heads, width), (reads, groups, state_dim), rows = v.shape, q.shape[1:], len(starts) - 1
    chunks = prepare(k, g, beta, starts)
    dout = dout.contiguous()
    tiles = tokens // chunks.size + 2 * rows
    state, dstate = torch.empty(2, tiles, heads, width, state_dim, dtype=v.dtype, device=v.device)
    u, y, dv = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for _ in range(3))
    walk(q, k, v, beta, starts, chunks, kept=(state, u))
    low = narrow(q, k, v)
    block = walk_block(q, v, rows)
    sizes: dict[str, object] = dict(
        HEADS=heads, WIDTH=width, GROUPS=groups, STATE=state_dim, READS=reads
    )
    sizes |= dict(SIZE=chunks.size, BLOCK_N=padded(state_dim), NARROW=low)
    common = (strided(q), strided(k))
    tensors = (*common, beta, chunks.inverses, chunks.since, tokens, starts, dout, dstate, y)
    # With keys of more than 128 channels, a second stage of loads does not fit into shared memory.
    _back_kernel[(heads * triton.cdiv(width, block), rows)](
        *tensors, **sizes, BLOCK_P=block, num_warps=4, num_stages=2 if state_dim <= 128 else 1
    )
    # In fp32 until the value heads that share a key head are summed: programs that added to the
    # same element would need atomics, whose order is not fixed.
    dq = torch.empty(tokens, reads, heads, state_dim, device=v.device)
    dk = torch.empty(tokens, heads, state_dim, device=v.device)
    dg, dbeta = torch.empty(2, tokens, heads, device=v.device)
    _finish_kernel[(heads, tiles)](
        *common,
        strided(v),
        beta,
        chunks.since,
        tokens,
        rows,
        starts,
        dout,
        (state, dstate, u, y),
        (dq, dk, dv, dg, dbeta),
        **sizes,
        BLOCK_P=min(32, value_block(q, v)),
        num_warps=8,
        num_stages=1,
    )
    # of the value heads of a key head
    dq, dk = (t.unflatten(-2, (groups, -1)).sum(-2) for t in (dq, dk))
    return dq.to(q.dtype), dk.to(k.dtype), dv, dg.to(g.dtype), dbeta.to(beta.dtype)


class DeltaRule(torch.autograd.Function):
    """`delta_rule` with its gradients; only the inputs are kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        starts: Tensor,
        wide: bool,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta, starts)
        dtype = torch.float32 if wide else v.dtype
        out = torch.empty(*q.shape[:2], *v.shape[1:], dtype=dtype, device=v.device)
        walk(q, k, v, beta, starts, prepare(k, g, beta, starts), out=out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(*ctx.saved_tensors, *grads), None, None


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, wide: bool = False
) -> Tensor:
    """See the reference; precision as in `delta_varlen`, with states and corrections kept in the
    dtype of v."""
    q, k, v, g, beta = (t.contiguous() for t in (q, k, v, g, beta))
    return DeltaRule.apply(q, k, v, g, beta, starts, wide)
