"""The scan of Mamba2 in Triton: the forward is in `scan.py`, the gradients are in `backward.py`."""

from typing import Any

import torch
from torch import Tensor

from mtpkit.kernels.device import with_rows
from mtpkit.kernels.ssd.backward import gradients
from mtpkit.kernels.ssd.scan import ScanTiles, alike, scan_tiles, ssd_varlen

__all__ = ["ScanTiles", "scan_tiles", "ssd_scan", "ssd_varlen"]

_CHUNK = 64
"""Tokens per chunk; kernels may divide it into equal parts. Rows with states are given it as their
context length too, so that their first chunk starts with their first token."""


class Scan(torch.autograd.Function):
    """`ssd_scan` with its gradients; keeps only the inputs for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A_log: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        starts: Tensor,
        states: Tensor | None,
        dt_limit: tuple[float, float],
        wide: bool,
    ) -> Tensor:
        ctx.dt_limit = dt_limit
        ctx.save_for_backward(x, dt, A_log, B, C, D, dt_bias, starts, states)
        slots = None
        context_lens = None
        if states is not None:
            slots = torch.arange(len(states), device=states.device)
            context_lens = torch.full_like(slots, _CHUNK)
            states = states.clone()  # `ssd_varlen` overwrites it with the states after the rows
        return ssd_varlen(
            x,
            dt,
            A_log,
            B,
            C,
            D,
            dt_bias,
            dt_limit=dt_limit,
            starts=starts,
            chunk_size=_CHUNK,
            states=states,
            slots=slots,
            context_lens=context_lens,
            wide=wide,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A_log, B, C, D, dt_bias, starts, states = ctx.saved_tensors
        *of_tokens, of_states = gradients(
            x,
            dt,
            A_log,
            B,
            C,
            D,
            dt_bias,
            starts=starts,
            states=states,
            dt_limit=ctx.dt_limit,
            dy=grads[0],
        )
        return *of_tokens, None, of_states, None, None


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    starts: Tensor,
    chunk_size: int,
    states: Tensor | None = None,
    wide: bool = False,
) -> Tensor:
    """See the reference; precision as in `ssd_varlen`. Chunks have the size that suits the kernels,
    whatever `chunk_size` is. While the backward runs, it holds two states [h, p, n] per chunk in
    the dtype of x."""
    B, C = alike(B, C)
    D = A_log.new_zeros(A_log.shape) if D is None else D
    states = None if states is None else states.float().contiguous()
    return Scan.apply(
        with_rows(x), with_rows(dt), A_log, B, C, D, dt_bias, starts, states, dt_limit, wide
    )
