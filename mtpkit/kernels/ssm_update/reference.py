"""Mamba2's recurrence over the few tokens of a decode step, with two ways to take rejected tokens back.

Shape legend: R rows, T tokens a row, h heads, p head width, g groups of h / g heads, n state width, L ring length.
"""

import torch
from torch import Tensor


def ssm_snapshot_update(
    state: Tensor, slots: Tensor, committed: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """Step token by token from the committed snapshot and keep the state after every token.

    Args:
        state: [slots, at least T, h, p, n]; row r starts from state[slots[r], committed[r]], and entry t becomes the
            state after its token t. Updated in place.
        slots, committed: [R] int64.
        x: [R, T, h, p]; dt: [R, T, h], positive; A: [h], negative; B, C: [R, T, g, n]; D: [h].

    Returns:
        y [R, T, h, p] in the dtype of x.
    """
    heads = x.shape[2]
    rep = heads // B.shape[2]
    current = state[slots, committed].float()
    outputs = []
    for t in range(x.shape[1]):
        step, x_t = dt[:, t].float(), x[:, t].float()
        B_t, C_t = (m[:, t].float().repeat_interleave(rep, 1) for m in (B, C))
        added = torch.einsum("rh,rhp,rhn->rhpn", step, x_t, B_t)
        current = current * torch.exp(step * A.float())[..., None, None] + added
        state[slots, t] = current.to(state.dtype)
        outputs.append(torch.einsum("rhpn,rhn->rhp", current, C_t) + D.float()[:, None] * x_t)
    return torch.stack(outputs, 1).to(x.dtype)


def ssm_replay_update(
    state: Tensor,
    ring_x: Tensor,
    ring_B: Tensor,
    ring_dt: Tensor,
    slots: Tensor,
    ring_lens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
) -> Tensor:
    """Compute the step's outputs from one stored state and the inputs that came after it, in chunked form.

    The committed state of row r is state[slots[r]] advanced by the first ring_lens[r] entries of its ring. The new
    inputs are appended to the ring; where they no longer fit, the committed entries are first folded into the state,
    which is the only time it is written. Rejecting tokens is forgetting their ring entries.

    Args:
        state: [slots, h, p, n]; ring_x: [slots, L, h, p]; ring_B: [slots, L, g, n]; ring_dt: [slots, L, h], with
            L >= T. Updated in place.
        slots, ring_lens: [R] int64.
        x: [R, T, h, p]; dt: [R, T, h], positive; A: [h], negative; B, C: [R, T, g, n]; D: [h].

    Returns:
        y [R, T, h, p] in the dtype of x. The entries were written from `ring_base(ring_lens, T, L)` on.
    """
    rows, tokens, heads, width = x.shape
    groups, state_dim = B.shape[2:]
    rep, capacity = heads // groups, ring_x.shape[1]
    stored = torch.arange(capacity, device=x.device) < ring_lens[:, None]  # [R, L]

    def joined(ring: Tensor, new: Tensor, *tail: int) -> Tensor:
        """Committed ring entries, zeros for the rest, then the new tokens: [R, L + T, *tail] fp32."""
        old = ring[slots].float()
        old = torch.where(stored.view(rows, capacity, *[1] * (old.dim() - 2)), old, 0.0)
        return torch.cat([old, new.float()], 1).view(rows, capacity + tokens, *tail)

    all_dt = joined(ring_dt, dt, groups, rep)
    all_B = joined(ring_B, B, groups, state_dim)
    scaled_x = joined(ring_x, x, groups, rep, width) * all_dt[..., None]
    # Log decay since the stored state, [R, L + T, g, r]; in fp64 because differences of large sums are taken.
    decay = torch.cumsum((all_dt * A.float().view(groups, rep)).double(), 1)
    current = state[slots].float().view(rows, groups, rep, width, state_dim)

    queries = C.float()
    causal = torch.ones(tokens, capacity + tokens, dtype=torch.bool, device=x.device).tril(capacity)
    log_pair = (decay[:, capacity:, None] - decay[:, None]).float()  # [R, T, L + T, g, r]
    weights = torch.exp(log_pair.masked_fill(~causal[None, :, :, None, None], float("-inf")))
    scores = torch.einsum("rtgn,rjgn->rtjg", queries, all_B)
    y = torch.einsum("rtjgq,rjgqp->rtgqp", scores[..., None] * weights, scaled_x)
    y = y + torch.einsum("rtgn,rgqpn->rtgqp", queries, current) * torch.exp(decay[:, capacity:].float())[..., None]
    y = y.reshape(rows, tokens, heads, width) + x.float() * D.float()[:, None]

    full = ring_lens + tokens > capacity
    if bool(full.any()):
        at_end = decay[:, capacity - 1]
        to_end = torch.exp((at_end[:, None] - decay[:, :capacity]).float())
        folded = current * torch.exp(at_end.float())[..., None, None]
        decayed_x = scaled_x[:, :capacity] * to_end[..., None]
        folded = folded + torch.einsum("rjgn,rjgqp->rgqpn", all_B[:, :capacity], decayed_x)
        state[slots[full]] = folded.view(rows, heads, width, state_dim)[full].to(state.dtype)
    base = torch.where(full, torch.zeros_like(ring_lens), ring_lens)
    places = base[:, None] + torch.arange(tokens, device=x.device)
    for ring, new in ((ring_x, x), (ring_B, B), (ring_dt, dt)):
        ring[slots[:, None], places] = new.to(ring.dtype)
    return y.to(x.dtype)
