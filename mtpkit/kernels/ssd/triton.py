"""Chunked scan over concatenated sequences by megatron-core's Triton kernels."""

import torch
import triton
from megatron.core.ssm.ops import mamba_chunk_scan_combined_varlen
from torch import Tensor

from mtpkit.kernels.device import chunks
from mtpkit.kernels.ssd import reference

_CHUNK_SIZES = (64, 256)
"""Smallest and largest chunk; the kernels need powers of two, and smaller chunks would leave tiles mostly empty."""


def ssd_varlen(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None,
    lens: tuple[int, ...],
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """See the reference, which runs for fp32 too: the kernels round the operands of tensor cores.

    The first call of a process autotunes the kernels, which takes seconds.
    """
    if x.dtype == torch.float32:
        return reference.ssd_varlen(x, dt, A_log, B, C, D, dt_bias, dt_limit, initial_states, lens, chunk_size)
    size = min(max(triton.next_power_of_2(chunk_size), _CHUNK_SIZES[0]), _CHUNK_SIZES[1])
    parts = chunks(lens, size, x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = mamba_chunk_scan_combined_varlen(
        x,
        dt,
        -torch.exp(A_log.float()),
        B,
        C,
        size,
        cu_chunk_seqlens=parts.start,
        last_chunk_indices=parts.last,
        seq_idx=parts.row.int(),
        out=y,
        D=D,
        dt_bias=dt_bias,
        # The kernels need all states in one dtype.
        initial_states=None if initial_states is None else initial_states.float(),
        dt_softplus=True,
        dt_limit=dt_limit,
        state_dtype=torch.float32,
    )
    return y, states
