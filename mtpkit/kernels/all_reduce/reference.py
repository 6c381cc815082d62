"""Sums over ranks through windows of memory that all of them read: the plain-PyTorch twin."""

import time

import torch
from torch import Tensor

from mtpkit.kernels.all_reduce.window import BUFFERS_AT, CHANNELS, MOST_RANKS, Windows, summed_in


def sum_over_ranks(values: Tensor, windows: Windows) -> Tensor:
    """Sum a tensor over the ranks, in place. All ranks call it with tensors of one shape and dtype, in one order.

    Ranks are added up in their order, so that all have the same bits: float32 and bfloat16 in float32, float64 and
    int64 as they are.

    Args:
        values: contiguous, one that the windows `fit`.

    Returns:
        `values`.
    """
    assert values.is_contiguous() and windows.fit(values)
    flat, (_, channels, share) = values.view(-1), windows.shares(values)
    for channel in range(channels):
        part = flat[channel * share : (channel + 1) * share]
        epoch = windows.epochs[channel] + 1
        buffers = [_buffers(window, int(epoch % 2), channel, values.dtype)[: len(part)] for window in windows.windows]
        buffers[windows.rank].copy_(part)
        for window in windows.windows:
            _flags(window)[channel, windows.rank] = epoch
        while bool((_flags(windows.windows[windows.rank])[channel, : len(buffers)] < epoch).any()):
            time.sleep(0)  # on the host: other processes may need the core
        total = torch.zeros(len(part), dtype=summed_in(values.dtype), device=values.device)
        for buffer in buffers:
            total += buffer
        part.copy_(total)
        windows.epochs[channel] = epoch
    return values


def _flags(window: Tensor) -> Tensor:
    """[CHANNELS, MOST_RANKS] int64, the flags of a window."""
    return window[:BUFFERS_AT].view(torch.int64).view(CHANNELS, MOST_RANKS)


def _buffers(window: Tensor, parity: int, channel: int, dtype: torch.dtype) -> Tensor:
    """One of the two buffers of a channel."""
    return window[BUFFERS_AT:].view(2, CHANNELS, -1)[parity, channel].view(dtype)
