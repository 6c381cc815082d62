"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) in plain PyTorch: whole sequences and
decode steps.

A head has a state S [v, k]. A token decays the state, corrects the value stored under its key, and
reads the state:

    S_t = exp(g_t) S_{t-1} + u_t k_t^T,   u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t),   o_t = S_t q_t

Queries and keys have unit length, and queries are then scaled by 1 / sqrt(k); g = -exp(A_log)
softplus(a + dt_bias) and beta = sigmoid(b), see `delta_inputs`. Given the corrections u, which
never change once their tokens are committed, the state is a decayed sum of outer products u k^T. A
ring therefore keeps u instead of v and beta.

Shape legend: R rows, T tokens (in decode steps: per row), h value heads, j key heads, each shared
by h / j value heads, v and k the widths of values and keys, m readouts per token, L ring length.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.ancestors import parents_of
from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.rounding.reference import Noise, narrowed, narrowed_row

EPSILON = 1e-6
"""Number added to the squared length of queries and keys."""
CHUNK = 64
"""Number of tokens that are computed at once; it affects only rounding."""


def delta_inputs(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the inputs of the recurrence from the projections of a layer.

    Args:
        q, k: [..., j, k], after the convolution; a, b: [..., h]; all four may be views. A_log,
            dt_bias: [h].

    Returns:
        Queries and keys of unit length, with the queries scaled by 1 / sqrt(k), in their own
        dtypes; log decays g [..., h], negative, and beta [..., h], both fp32.
    """
    g = -torch.exp(A_log.float()) * F.softplus(a.float() + dt_bias.float())
    return unit(q, q.shape[-1] ** -0.5), unit(k), g, torch.sigmoid(b.float())


def unit(x: Tensor, scale: float = 1.0) -> Tensor:
    """Vectors x [..., k] scaled to length `scale`, in the dtype of x."""
    wide = x.float()
    return (wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON) * scale)).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, wide: bool = False
) -> Tensor:
    """Compute the recurrence over R concatenated rows, each from a zero state. Differentiable in
    all but `starts`.

    Args:
        q: [T, m, j, k], queries of m readouts of the state after each token; k: [T, j, k]; v: [T,
            h, v]; g, beta: [T, h]. See `delta_inputs`.
        starts: [R + 1] int64, first token of each row and the end of the last row.
        wide: whether o is fp32 whatever the dtype of v.

    Returns:
        o [T, m, h, v] in the dtype of v, or fp32 with `wide`; computed in fp32.
    """
    outputs = []
    v = v.float() if wide else v
    for begin, end in pairwise(starts.tolist()):
        state = _zeros(v, k)
        for first in range(begin, end, CHUNK):
            span = slice(first, min(end, first + CHUNK))
            o, state = _chunk(q[span], k[span], v[span], g[span], beta[span], state)
            outputs.append(o)
    return torch.cat(outputs)


def delta_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    states: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Compute the recurrence over R concatenated rows, each from the state before the row, which
    the state after the row replaces. Not differentiable.

    Row r continues states[slots[r]] if context_lens[r] > 0. Otherwise it starts from zeros, and the
    old contents of its slot are ignored. Chunks end at positions (context_lens[r] plus the index in
    the row) that are multiples of `CHUNK`: with fp32 states, a prompt that is split at such
    positions gives the same bits in fp32 wherever it is split. No size depends on the contents of
    `starts`, so a CUDA graph can be captured.

    Args:
        q, k: [T, j, k]; v: [T, h, v]; g, beta: [T, h]; see `delta_inputs`.
        starts: [R + 1] int64, first token of each row and the end of the last row; the tensors
            begin at token starts[0]. Rows may be empty: an empty row leaves its state unchanged, or
            sets it to zero if the row has no context.
        states: [slots, h, v, k] of any float dtype, updated in place at `slots`; may be a view.
            None: every row starts from zeros, and no state is kept.
        slots, context_lens: [R] int64, needed with `states`. A row at slot -1 is padding: it
            touches no state, and its outputs are zero.
        noise: makes the rounding of a float16 state stochastic, see `rounding.reference`; None: to
            nearest.

    Returns:
        o [T, h, v] in the dtype of v, computed in fp32.
    """
    bounds = (starts - starts[0]).tolist()
    assert bounds[-1] == len(v), f"rows end at token {bounds[-1]} of {len(v)}"
    out = torch.zeros_like(v)
    for row, (begin, end) in enumerate(pairwise(bounds)):
        context = 0
        state = _zeros(v, k)
        if states is not None:
            assert slots is not None and context_lens is not None
            slot = int(slots[row])
            context = int(context_lens[row])
            if slot < 0 or (context > 0 and begin == end):
                continue
            if context > 0:
                state = states[slot].float()
        while begin < end:
            stop = min(end, begin + CHUNK - context % CHUNK)
            span = slice(begin, stop)
            o, state = _chunk(q[span, None], k[span], v[span], g[span], beta[span], state)
            out[span] = o[:, 0]
            context = context + stop - begin
            begin = stop
        if states is not None:
            states[slot] = narrowed_row(state, states.dtype, noise, row, context - 1)
    return out


def _zeros(v: Tensor, k: Tensor) -> Tensor:
    return v.new_zeros(*v.shape[1:], k.shape[-1], dtype=torch.float32)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """o [L, m, h, v] of a chunk of L tokens that follows `state` [h, v, k], and the state after the
    chunk.

    The corrections u of a chunk solve a unit triangular system, see section 3.3 of the paper: with
    c the sums of log decays, u_i = beta_i (v_i - exp(c_i) S k_i - sum_{j < i} exp(c_i - c_j) (k_i .
    k_j) u_j).
    """
    rep = v.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(rep, 1).transpose(0, 1)  # [h, L, k]
    queries = q.float().repeat_interleave(rep, 2).permute(1, 2, 0, 3)  # [m, h, L, k]
    # In fp64, since after a token that forgets nearly everything, the small log decays of later
    # tokens are differences of two large sums.
    since = torch.cumsum(g.double(), 0).t()  # [h, L]
    after = torch.ones(len(v), len(v), dtype=torch.bool, device=v.device).tril()
    log_pair = (since[:, :, None] - since[:, None]).float()
    decays = torch.exp(log_pair.masked_fill(~after, float("-inf")))
    from_start = torch.exp(since.float())[..., None]
    rate = beta.float().t()[..., None]
    held = from_start * (keys @ state.transpose(1, 2))
    system = (rate * decays * (keys @ keys.transpose(1, 2))).tril(-1)
    wanted = rate * (v.float().transpose(0, 1) - held)
    u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)  # [h, L, v]
    o = (
        from_start * (queries @ state.transpose(1, 2))
        + (decays * (queries @ keys.transpose(1, 2))) @ u
    )
    to_end = torch.exp((since[:, -1:] - since).float())[..., None]
    state = from_start[:, -1:] * state + (u * to_end).transpose(1, 2) @ keys
    return o.permute(2, 0, 1, 3).to(v.dtype), state


def _steps(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    parents: Tensor | None = None,
    noise: Noise | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (o [R, h, v], u [R, h, v], state [R, h, v, k]) after each of T tokens of R rows, all
    fp32.

    Args:
        noise: with `positions` [R, T]; the state after each token is rounded to float16.
    """
    rep = v.shape[2] // k.shape[2]
    after = [state]
    for t in range(v.shape[1]):
        key, query = (x[:, t].float().repeat_interleave(rep, 1) for x in (k, q))
        if parents is not None:
            state = torch.stack(after, 1)[torch.arange(len(v), device=v.device), parents[:, t] + 1]
        state = state * torch.exp(g[:, t])[..., None, None]
        u = beta[:, t, :, None] * (v[:, t].float() - torch.einsum("rhvk,rhk->rhv", state, key))
        state = state + u[..., None] * key[:, :, None]
        o = torch.einsum("rhvk,rhk->rhv", state, query)
        if noise is not None:
            assert noise.positions is not None
            state = narrowed(state, torch.float16, noise, noise.positions[:, t]).float()
        if parents is not None:
            after.append(state)
        yield o, u, state


def delta_snapshot_update(
    state: Tensor,
    slots: Tensor,
    committed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    parents: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Step token by token from the committed snapshot of the state, and keep the state after every
    token.

    Args:
        state: [slots, at least T, h, v, k]; row r starts from state[slots[r], committed[r]], and
            entry t becomes the state after its token t. Updated in place.
        slots, committed: [R] int64. A row at slot -1 is padding: it touches no state, and its
            outputs are zero.
        q, k: [R, T, j, k]; v: [R, T, h, v]; a, b: [R, T, h]; as for `delta_inputs`, all may be
            views of larger tensors. A_log, dt_bias: [h].
        parents: [R, T] int64, the token that each new token follows, see `kernels.ancestors`; only
            token 0 has the parent -1. None: a chain.
        noise: with `positions` [R, T]; makes the rounding of float16 states stochastic, see
            `rounding.reference`. Each token then continues the rounded state of the one before it,
            so that states do not depend on how many tokens a step has. None: states are rounded to
            nearest, and tokens continue what was not rounded.

    Returns:
        o [R, T, h, v] in the dtype of v.
    """
    if bool((slots < 0).any()):
        live = slots >= 0
        out = v.new_zeros(v.shape)
        slots, committed, q, k, v, a, b = (t[live] for t in (slots, committed, q, k, v, a, b))
        parents = None if parents is None else parents[live]
        noise = None if noise is None else noise.at(live)
        out[live] = delta_snapshot_update(
            state, slots, committed, q, k, v, a, b, A_log, dt_bias, parents, noise
        )
        return out
    q, k, g, beta = delta_inputs(q, k, a, b, A_log, dt_bias)
    outputs = []
    for t, (o, _, after) in enumerate(
        _steps(state[slots, committed].float(), q, k, v, g, beta, parents, noise)
    ):
        state[slots, t] = after.to(state.dtype)
        outputs.append(o)
    return torch.stack(outputs, 1).to(v.dtype)


def delta_replay_update(
    state: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    ring_lens: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    ancestors: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Compute the outputs of a step from a stored state and a ring of the updates that came after
    that state.

    The committed state of row r is state[slots[r]] advanced by the ring's entries (key, correction
    and log decay) at the last ring_lens[r] positions before context_lens[r]. The entries of the new
    tokens have the positions from context_lens[r] on; the entry of position i lies at place i % L
    of the ring. If the new entries no longer fit, the committed entries are folded into the state,
    which is written at no other time. Rejected tokens are rolled back by dropping their ring
    entries.

    If the new tokens are a tree, token t follows the committed entries and the tokens in its mask,
    with the decays of its own path. The entry of token t goes to the same place as in a chain;
    before the next step, the entries of the accepted path must be moved to adjacent places.

    Args:
        state: [slots, h, v, k]; ring_k: [slots, L, j, k], of unit length; ring_u: [slots, L, h, v];
            ring_g: [slots, L, h], log decays. L - `ring_capacity(L)` is at least T. Updated in
            place.
        slots, context_lens, ring_lens: [R] int64. A row at slot -1 is padding: no state changes,
            outputs are zero.
        q, k: [R, T, j, k]; v: [R, T, h, v]; a, b: [R, T, h]; as for `delta_inputs`, all may be
            views of larger tensors. A_log, dt_bias: [h].
        ancestors: [R, T] int64 masks of the new tokens, see `kernels.ancestors`; None: a chain.
        noise: makes the rounding of a float16 state stochastic, see `rounding.reference`; None: to
            nearest.

    Returns:
        o [R, T, h, v] in the dtype of v. `ring_base(ring_lens, T, L)` old entries of each row are
        still needed.
    """
    if bool((slots < 0).any()):
        live = slots >= 0
        out = v.new_zeros(v.shape)
        where = (slots[live], context_lens[live], ring_lens[live])
        q, k, v, a, b = (t[live] for t in (q, k, v, a, b))
        ancestors = None if ancestors is None else ancestors[live]
        noise = None if noise is None else noise.at(live)
        kept = state, ring_k, ring_u, ring_g
        out[live] = delta_replay_update(
            *kept, *where, q, k, v, a, b, A_log, dt_bias, ancestors, noise
        )
        return out
    tokens = v.shape[1]
    length = ring_k.shape[1]
    rep = v.shape[2] // k.shape[2]
    capacity = ring_capacity(length)
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    entries = torch.arange(capacity, device=v.device)
    stored = (entries < ring_lens[:, None])[..., None]  # [R, E, 1]
    old = (slots[:, None], (context_lens[:, None] - ring_lens[:, None] + entries) % length)
    old_g = torch.where(stored, ring_g[old], 0.0).double()
    old_k, old_u = (
        torch.where(stored[..., None], ring[old].float(), 0.0) for ring in (ring_k, ring_u)
    )
    whole = old_g.sum(1)  # [R, h]
    to_end = torch.exp((whole[:, None] - torch.cumsum(old_g, 1)).float())
    added = torch.einsum(
        "rehv,rehk->rhvk", old_u * to_end[..., None], old_k.repeat_interleave(rep, 2)
    )
    folded = state[slots].float() * torch.exp(whole.float())[..., None, None] + added
    q, k, g, beta = delta_inputs(q, k, a, b, A_log, dt_bias)
    parents = None if ancestors is None else parents_of(ancestors)
    outputs, corrections, _ = zip(*_steps(folded, q, k, v, g, beta, parents), strict=True)

    full = ring_lens + tokens > capacity
    if bool(full.any()):
        # Other rings keep their entries, which would then count twice.
        state[slots[full]] = narrowed(
            folded[full],
            state.dtype,
            None if noise is None else noise.at(full),
            context_lens[full] - 1,
        )
    places = (
        slots[:, None],
        (context_lens[:, None] + torch.arange(tokens, device=v.device)) % length,
    )
    for ring, new in ((ring_k, k), (ring_u, torch.stack(corrections, 1)), (ring_g, g)):
        ring[places] = new.to(ring.dtype)
    return torch.stack(outputs, 1).to(v.dtype)
