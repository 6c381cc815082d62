"""Mamba2's recurrence, one token after another in fp64, written from its definition."""

import torch
from torch import Tensor


def step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: state [h, p, n], x [h, p], dt [h], A [h], B, C [g, n], D [h]; returns y [h, p] and
    the new state."""
    rep = x.shape[0] // B.shape[0]
    outputs = []
    states = []
    for head in range(x.shape[0]):
        new = torch.exp(dt[head] * A[head]) * state[head] + dt[head] * torch.outer(
            x[head], B[head // rep]
        )
        y = new @ C[head // rep]
        outputs.append(y if D is None else y + D[head] * x[head])
        states.append(new)
    return torch.stack(outputs), torch.stack(states)


def scan(x, dt, A, B, C, D=None, documents=None, initial_state=None) -> tuple[Tensor, Tensor]:
    """Whole sequences: the arguments and results of `ssd_chunk_scan`, in fp64."""
    x, dt, A, B, C, D, initial_state = (
        None if t is None else t.double() for t in (x, dt, A, B, C, D, initial_state)
    )
    batch, length, heads, width = x.shape
    rows = []
    finals = []
    for b in range(batch):
        state = torch.zeros(heads, width, B.shape[-1], dtype=torch.float64)
        if initial_state is not None:
            state = initial_state[b]
        outputs = []
        for t in range(length):
            if t > 0 and documents is not None and documents[b, t] != documents[b, t - 1]:
                state = torch.zeros_like(state)
            y, state = step(state, x[b, t], dt[b, t], A, B[b, t], C[b, t], D)
            outputs.append(y)
        rows.append(torch.stack(outputs))
        finals.append(state)
    return torch.stack(rows), torch.stack(finals)


def relative(have: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value; infinite where a value is not finite."""
    assert have.shape == want.shape
    if not have.isfinite().all():
        return torch.inf
    return ((have.double() - want).abs().max() / want.abs().max()).item()
