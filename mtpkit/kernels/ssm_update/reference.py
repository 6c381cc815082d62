"""Mamba2's recurrence over the few tokens of a decode step, with two kinds of rollback: snapshots
and replay.

Shape legend: R rows, T tokens per row, h heads, p head width, g groups of h / g heads, n state
width, L ring length. Both ops take raw dt from the input projection. The step size is softplus(dt +
dt_bias), clamped to `dt_limit`; the decay of a step is exp(step size * A) with A = -exp(A_log).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.kernels.ancestors import seen_tokens
from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.rounding.reference import Noise, narrowed


def ssm_snapshot_update(
    state: Tensor,
    slots: Tensor,
    committed: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    parents: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Step token by token from the committed snapshot and keep the state after every token.

    Args:
        state: [slots, at least T, h, p, n]; row r starts from state[slots[r], committed[r]], and
            entry t becomes the state after its token t. Updated in place.
        slots, committed: [R] int64. A row at slot -1 is padding: it touches no state, and its y is
            zero.
        x: [R, T, h, p]; dt: [R, T, h]; B, C: [R, T, g, n]; all may be views of larger tensors.
            A_log, D, dt_bias: [h].
        parents: [R, T] int64, the parent of each token, see `kernels.ancestors`; only token 0 has
            the parent -1. None: a chain.
        noise: with `positions` [R, T]; makes the rounding of float16 states stochastic, see
            `rounding.reference`. Each token then continues the rounded state of the one before it,
            so that states do not depend on how many tokens a step has. None: states are rounded to
            nearest, and tokens continue what was not rounded.

    Returns:
        y [R, T, h, p] in the dtype of x.
    """
    if bool((slots < 0).any()):
        live = slots >= 0
        y = x.new_zeros(x.shape)
        rows = (t[live] for t in (slots, committed, x, dt, B, C))
        slots, committed, x, dt, B, C = rows
        own = None if parents is None else parents[live]
        chosen = None if noise is None else noise.at(live)
        y[live] = ssm_snapshot_update(
            state, slots, committed, x, dt, A_log, B, C, D, dt_bias, dt_limit, own, chosen
        )
        return y
    rep = x.shape[2] // B.shape[2]
    current = state[slots, committed].float()
    after = [current]
    steps = step_size(dt, dt_bias, dt_limit)
    A = -torch.exp(A_log.float())
    outputs = []
    for t in range(x.shape[1]):
        step = steps[:, t]
        x_t = x[:, t].float()
        B_t, C_t = (m[:, t].float().repeat_interleave(rep, 1) for m in (B, C))
        added = torch.einsum("rh,rhp,rhn->rhpn", step, x_t, B_t)
        if parents is not None:
            current = torch.stack(after, 1)[
                torch.arange(len(x), device=x.device), parents[:, t] + 1
            ]
        current = current * torch.exp(step * A)[..., None, None] + added
        outputs.append(torch.einsum("rhpn,rhn->rhp", current, C_t) + D.float()[:, None] * x_t)
        if noise is None:
            state[slots, t] = current.to(state.dtype)
        else:
            assert noise.positions is not None
            stored = narrowed(current, state.dtype, noise, noise.positions[:, t])
            state[slots, t] = stored
            current = stored.float()
        if parents is not None:
            after.append(current)
    return torch.stack(outputs, 1).to(x.dtype)


def ssm_replay_update(
    state: Tensor,
    ring_x: Tensor,
    ring_B: Tensor,
    ring_dt: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    ring_lens: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    ancestors: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Compute the step's outputs from a stored state and a ring of the inputs since that state, in
    chunked form.

    The committed state of row r is state[slots[r]] advanced by the inputs at the last ring_lens[r]
    positions before context_lens[r]. The new inputs have the positions from context_lens[r] on;
    position i is at ring place i % L. If they no longer fit, the committed entries are folded into
    the state; the state is written at no other time. A rollback only drops the ring entries of
    rejected tokens.

    If the new tokens are a tree, token t reads the committed entries and the tokens of its mask,
    with the decays along its own path: this is the matrix of STree (arXiv:2505.14969), with the
    ring in front. Token t's entry is stored where token t of a chain would be, so the entries of
    the accepted path must be moved together before the next step.

    Args:
        state: [slots, h, p, n]; ring_x: [slots, L, h, p]; ring_B: [slots, L, g, n]; ring_dt:
            [slots, L, h], final step sizes. L - `ring_capacity(L)` must be at least T. All four are
            updated in place.
        slots, context_lens, ring_lens: [R] int64. A row at slot -1 is padding: it touches no state,
            and its y is zero.
        x: [R, T, h, p]; dt: [R, T, h]; B, C: [R, T, g, n]; all may be views of larger tensors.
            A_log, D, dt_bias: [h].
        ancestors: [R, T] int64 masks of the new tokens, see `kernels.ancestors`; None: a chain.
        noise: makes the rounding of a float16 state stochastic, see `rounding.reference`; None: to
            nearest.

    Returns:
        y [R, T, h, p] in the dtype of x. Of the old entries, `ring_base(ring_lens, T, L)` are still
        needed afterwards.

    Example, L = 20 (16 entries and room for 4), T = 4, 30 positions computed, 13 of them in the
    ring: positions 17 .. 29 are read at places 17 .. 19, 0 .. 9; since 13 + 4 > 16, they are
    folded; new entries get places 10 .. 13.
    """
    if bool((slots < 0).any()):
        live = slots >= 0
        y = x.new_zeros(x.shape)
        own = (slots[live], context_lens[live], ring_lens[live], x[live], dt[live])
        rest = (state, ring_x, ring_B, ring_dt, *own, A_log, B[live], C[live], D, dt_bias, dt_limit)
        y[live] = ssm_replay_update(
            *rest,
            None if ancestors is None else ancestors[live],
            None if noise is None else noise.at(live),
        )
        return y
    tokens = x.shape[1]
    groups = B.shape[2]
    rep = x.shape[2] // groups
    length = ring_x.shape[1]
    capacity = ring_capacity(ring_x.shape[1])
    assert tokens <= length - capacity, f"{tokens} new tokens in a ring of {length}"
    entries = torch.arange(capacity, device=x.device)
    stored = entries < ring_lens[:, None]  # [R, E]
    old = (slots[:, None], (context_lens[:, None] - ring_lens[:, None] + entries) % length)
    steps = step_size(dt, dt_bias, dt_limit)
    all_dt = _joined(ring_dt[old], steps, stored).unflatten(2, (groups, rep))
    all_B = _joined(ring_B[old], B, stored)
    # Zero weights would not keep what is not finite from the tokens that do not see it. The token's
    # own y tells: of x through D, of dt through the decay.
    finite_x = x.where(x.isfinite(), 0.0)
    finite_dt = all_dt.nan_to_num(posinf=0.0)
    scaled_x = (
        _joined(ring_x[old], finite_x, stored).unflatten(2, (groups, rep)) * finite_dt[..., None]
    )
    # Log decay since the stored state, [R, E + T, g, r]; in fp64 since small decays are differences
    # of large sums.
    A = -torch.exp(A_log.float()).view(groups, rep)
    decay, seen = _paths((all_dt * A).double(), tokens, ancestors)
    current = state[slots].float().unflatten(1, (groups, rep))
    y = _replayed(current, scaled_x, all_B, C.float(), decay, seen)
    y = y.reshape(x.shape) + x.float() * D.float()[:, None]
    if bool((full := ring_lens + tokens > capacity).any()):
        folded = _folded(current, *(t[:, :capacity] for t in (scaled_x, all_B, decay)))
        # Other rings keep their entries, which would then count twice.
        state[slots[full]] = narrowed(
            folded.flatten(1, 2)[full],
            state.dtype,
            None if noise is None else noise.at(full),
            context_lens[full] - 1,
        )
    _write_inputs(slots, context_lens, (ring_x, x), (ring_B, B), (ring_dt, steps))
    return y.to(x.dtype)


def _write_inputs(slots: Tensor, context_lens: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """Write [R, T, ...] inputs at the places of their positions in [slots, L, ...] rings."""
    for ring, new in pairs:
        positions = context_lens[:, None] + torch.arange(new.shape[1], device=new.device)
        ring[slots[:, None], positions % ring.shape[1]] = new.to(ring.dtype)


def _joined(old: Tensor, new: Tensor, stored: Tensor) -> Tensor:
    """Join ring entries [R, E, ...], zeros where not `stored` [R, E], and new tokens to [R, E + T,
    ...] fp32."""
    kept = torch.where(stored.view(*stored.shape, *[1] * (old.dim() - 2)), old.float(), 0.0)
    return torch.cat([kept, new.float()], 1)


def _paths(logs: Tensor, tokens: int, ancestors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum the log decays of J inputs, of which the last T = `tokens` are new, along the path to
    each input. Return log decays since the stored state [R, J, g, r], and which inputs each new
    token sees [R or 1, T, J]."""
    earlier = logs.shape[1] - tokens
    decay = torch.cumsum(logs, 1)
    if ancestors is None:
        return decay, torch.ones(
            1, tokens, logs.shape[1], dtype=torch.bool, device=logs.device
        ).tril(earlier)
    own = seen_tokens(ancestors, tokens)
    seen = torch.cat([own.new_ones(len(logs), tokens, earlier), own], 2)
    # A running sum with zeros in it is bit-identical to the sum without them.
    along = torch.cumsum(torch.where(seen[..., None, None], logs[:, None], 0.0), 2)[:, :, -1]
    return torch.cat([decay[:, :earlier], along], 1), seen


def _replayed(
    current: Tensor, scaled_x: Tensor, B: Tensor, queries: Tensor, decay: Tensor, seen: Tensor
) -> Tensor:
    """Compute outputs [R, T, g, r, p] of the last T of J inputs that follow the state `current` [R,
    g, r, p, n].

    scaled_x [R, J, g, r, p], B [R, J, g, n], queries [R, T, g, n]; decay [R, J, g, r] and seen [R
    or 1, T, J] as from `_paths`.
    """
    earlier = B.shape[1] - queries.shape[1]
    log_pair = (decay[:, earlier:, None] - decay[:, None]).float()  # [R, T, J, g, r]
    scores = torch.einsum("rtgn,rjgn->rtjg", queries, B)
    weights = (scores[..., None] * torch.exp(log_pair)).masked_fill(~seen[..., None, None], 0.0)
    y = torch.einsum("rtjgq,rjgqp->rtgqp", weights, scaled_x)
    return (
        y
        + torch.einsum("rtgn,rgqpn->rtgqp", queries, current)
        * torch.exp(decay[:, earlier:].float())[..., None]
    )


def _folded(current: Tensor, scaled_x: Tensor, B: Tensor, decay: Tensor) -> Tensor:
    """The state after all J inputs, [R, g, r, p, n]; arguments as for `_replayed`."""
    at_end = decay[:, -1]
    to_end = torch.exp((at_end[:, None] - decay).float())
    added = torch.einsum("rjgn,rjgqp->rgqpn", B, scaled_x * to_end[..., None])
    return current * torch.exp(at_end.float())[..., None, None] + added


def step_size(dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]) -> Tensor:
    """Step size [..., h] in fp32 from raw dt [..., h]."""
    return F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
