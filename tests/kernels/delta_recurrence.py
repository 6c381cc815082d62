"""The gated delta rule, one token after another in fp64, written from its definition."""

import torch
import torch.nn.functional as F
from torch import Tensor


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of one head: state [v, k], q, k [k], v [v], g and beta []; returns o [v] and the
    new state."""
    state = torch.exp(g) * state
    state = state + beta * torch.outer(v - state @ k, k)
    return state @ q, state


def inputs(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, ...]:
    """What `delta_inputs` computes, in fp64."""
    q, k, a, b, A_log, dt_bias = (t.double() for t in (q, k, a, b, A_log, dt_bias))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    return q / q.shape[-1] ** 0.5, k, -A_log.exp() * F.softplus(a + dt_bias), torch.sigmoid(b)


def rule(q, k, v, g, beta, state=None) -> tuple[Tensor, Tensor]:
    """One row: q, k [t, j, k], v [t, h, v], g, beta [t, h], state [h, v, k] or None; returns o [t,
    h, v], the state."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    heads = v.shape[1]
    rep = v.shape[1] // k.shape[1]
    states = list(
        torch.zeros(heads, v.shape[2], k.shape[2]).double() if state is None else state.double()
    )
    rows = []
    for t in range(len(v)):
        outputs = []
        for h in range(heads):
            o, states[h] = step(
                states[h], q[t, h // rep], k[t, h // rep], v[t, h], g[t, h], beta[t, h]
            )
            outputs.append(o)
        rows.append(torch.stack(outputs))
    return torch.stack(rows) if rows else v.new_zeros(v.shape), torch.stack(states)
