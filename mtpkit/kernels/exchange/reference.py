"""Exchanges between ranks through windows of memory that all ranks read, in plain PyTorch.

All ranks must call these functions in the same order, with tensors of the same shape and dtype.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from mtpkit.kernels.exchange.window import (
    BEST_ROWS,
    BUFFERS_AT,
    CHANNELS,
    MOST_RANKS,
    Windows,
    summed_in,
)


def sum_over_ranks(values: Tensor, windows: Windows) -> Tensor:
    """Sum a tensor over the ranks, in place.

    Every rank adds up the ranks' values in rank order, so all ranks get the same bits. float32 and
    bfloat16 are summed in float32, float64 and int64 in their own dtype.

    Args:
        values: contiguous, one that the windows `fit`.

    Returns:
        `values`.
    """
    for part, buffers in _parts(values, windows):
        total = torch.zeros(len(part), dtype=summed_in(values.dtype), device=values.device)
        for buffer in buffers:
            total += buffer
        part.copy_(total)
    return values


def gather_ranks(values: Tensor, windows: Windows) -> Tensor:
    """Gather the `values` [...] of each rank: [ranks, ...].

    Args:
        values: contiguous, one that the windows `fit`.
    """
    gathered = values.new_empty(len(windows.windows), values.numel())
    first = 0
    for part, buffers in _parts(values, windows):
        gathered[:, first : first + len(part)] = torch.stack(buffers)
        first += len(part)
    return gathered.view(-1, *values.shape)


def best_of_ranks(
    values: Tensor, tokens: Tensor, first: int, windows: Windows
) -> tuple[Tensor, Tensor]:
    """The largest value of all ranks and its token, for each row; among equals, the smallest token.

    Args:
        values: [M] float32, without NaN; M is at most `windows.most_rows`.
        tokens: [M] int64, the tokens of those values.
        first: number added to this rank's tokens that are not negative.

    Returns:
        [M] float32 and [M] int64.
    """
    assert len(values) <= windows.most_rows
    best = torch.empty_like(values)
    token = torch.empty_like(tokens)
    for channel, start in enumerate(range(0, len(values), BEST_ROWS)):
        rows = slice(start, start + BEST_ROWS)
        mine = tokens[rows]
        own = values[rows], torch.where(mine < 0, mine, mine + first)
        ends = BEST_ROWS * 4, BEST_ROWS * 12
        buffers = [(raw[: ends[0]], raw[ends[0] : ends[1]]) for raw in _buffers(windows, channel)]
        theirs = [
            (part.view(torch.float32)[: len(mine)], number.view(torch.int64)[: len(mine)])
            for part, number in buffers
        ]
        for place, value in zip(theirs[windows.rank], own, strict=True):
            place.copy_(value)
        _meet(windows, channel)
        every = (
            torch.stack([part for part, _ in theirs]),
            torch.stack([number for _, number in theirs]),
        )
        best[rows] = every[0].amax(0)
        none = torch.iinfo(torch.int64).max
        token[rows] = torch.where(every[0] == best[rows], every[1], none).amin(0)
    return best, token


def _parts(values: Tensor, windows: Windows) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield, for each channel, this rank's part of the values, and the list of all ranks' parts
    once all ranks have written them."""
    assert values.is_contiguous() and windows.fit(values)
    flat, (_, channels, share) = values.view(-1), windows.shares(values)
    for channel in range(channels):
        part = flat[channel * share : (channel + 1) * share]
        buffers = [raw.view(values.dtype)[: len(part)] for raw in _buffers(windows, channel)]
        buffers[windows.rank].copy_(part)
        _meet(windows, channel)
        yield part, buffers


def _meet(windows: Windows, channel: int) -> None:
    """Signal that this rank has written its buffer of a channel, and wait until all ranks have
    written theirs."""
    epoch = windows.epochs[channel] + 1
    for window in windows.windows:
        _flags(window)[channel, windows.rank] = epoch
    while bool(
        (_flags(windows.windows[windows.rank])[channel, : len(windows.windows)] < epoch).any()
    ):
        time.sleep(0)  # on the host: other processes may need this core
    windows.epochs[channel] = epoch


def _flags(window: Tensor) -> Tensor:
    """[CHANNELS, MOST_RANKS] int64, the flags of a window."""
    return window[:BUFFERS_AT].view(torch.int64).view(CHANNELS, MOST_RANKS)


def _buffers(windows: Windows, channel: int) -> list[Tensor]:
    """Each rank's buffer of a channel in the coming epoch, [capacity] uint8."""
    parity = int(windows.epochs[channel] + 1) % 2
    return [
        window[BUFFERS_AT:].view(2, CHANNELS, -1)[parity, channel] for window in windows.windows
    ]
