"""What ranks exchange through windows of memory that all of them read: the plain-PyTorch twin.

All ranks call each function with tensors of one shape and dtype, in one order.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from mtpkit.kernels.exchange.window import BEST_ROWS, BUFFERS_AT, CHANNELS, MOST_RANKS, Windows, summed_in


def sum_over_ranks(values: Tensor, windows: Windows) -> Tensor:
    """Sum a tensor over the ranks, in place.

    Ranks are added up in their order, so that all have the same bits: float32 and bfloat16 in float32, float64 and
    int64 as they are.

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
    """[ranks, ...], the `values` [...] of each rank.

    Args:
        values: contiguous, one that the windows `fit`.
    """
    gathered = values.new_empty(len(windows.windows), values.numel())
    first = 0
    for part, buffers in _parts(values, windows):
        gathered[:, first : first + len(part)] = torch.stack(buffers)
        first += len(part)
    return gathered.view(-1, *values.shape)


def best_of_ranks(values: Tensor, tokens: Tensor, first: int, windows: Windows) -> tuple[Tensor, Tensor]:
    """The largest value of all ranks and its token, of each row; among equals the smallest token.

    Args:
        values: [M] float32, no NaN; M is at most `windows.most_rows`.
        tokens: [M] int64, of those values.
        first: added to the tokens that are not negative.

    Returns:
        [M] float32 and [M] int64.
    """
    assert len(values) <= windows.most_rows
    best, token = torch.empty_like(values), torch.empty_like(tokens)
    for channel, start in enumerate(range(0, len(values), BEST_ROWS)):
        rows = slice(start, start + BEST_ROWS)
        mine = tokens[rows]
        own = values[rows], torch.where(mine < 0, mine, mine + first)
        ends = BEST_ROWS * 4, BEST_ROWS * 12
        buffers = [(raw[: ends[0]], raw[ends[0] : ends[1]]) for raw in _buffers(windows, channel)]
        theirs = [
            (part.view(torch.float32)[: len(mine)], number.view(torch.int64)[: len(mine)]) for part, number in buffers
        ]
        for place, value in zip(theirs[windows.rank], own, strict=True):
            place.copy_(value)
        _meet(windows, channel)
        every = torch.stack([part for part, _ in theirs]), torch.stack([number for _, number in theirs])
        best[rows] = every[0].amax(0)
        none = torch.iinfo(torch.int64).max
        token[rows] = torch.where(every[0] == best[rows], every[1], none).amin(0)
    return best, token


def _parts(values: Tensor, windows: Windows) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each channel's part of this rank's values, and that of each rank, once all have written theirs."""
    assert values.is_contiguous() and windows.fit(values)
    flat, (_, channels, share) = values.view(-1), windows.shares(values)
    for channel in range(channels):
        part = flat[channel * share : (channel + 1) * share]
        buffers = [raw.view(values.dtype)[: len(part)] for raw in _buffers(windows, channel)]
        buffers[windows.rank].copy_(part)
        _meet(windows, channel)
        yield part, buffers


def _meet(windows: Windows, channel: int) -> None:
    """Say that this rank has written its buffer of a channel, and wait until all ranks have."""
    epoch = windows.epochs[channel] + 1
    for window in windows.windows:
        _flags(window)[channel, windows.rank] = epoch
    while bool((_flags(windows.windows[windows.rank])[channel, : len(windows.windows)] < epoch).any()):
        time.sleep(0)  # on the host: other processes may need the core
    windows.epochs[channel] = epoch


def _flags(window: Tensor) -> Tensor:
    """[CHANNELS, MOST_RANKS] int64, the flags of a window."""
    return window[:BUFFERS_AT].view(torch.int64).view(CHANNELS, MOST_RANKS)


def _buffers(windows: Windows, channel: int) -> list[Tensor]:
    """[capacity] uint8, each rank's buffer of a channel in the epoch that comes next."""
    parity = int(windows.epochs[channel] + 1) % 2
    return [window[BUFFERS_AT:].view(2, CHANNELS, -1)[parity, channel] for window in windows.windows]
