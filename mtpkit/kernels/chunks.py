"""Cut concatenated sequences into chunks, for kernels with one program per chunk."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.platform import to_device


@dataclass(frozen=True)
class Chunks:
    """C chunks of R sequences; each chunk lies within one sequence. All tensors are int64 on the device."""

    start: Tensor
    """[C + 1], first token of each chunk, then the total number of tokens."""
    row: Tensor
    """[C], sequence of each chunk."""
    last: Tensor
    """[R], last chunk of each sequence."""
    row_start: Tensor
    """[R + 1], first token of each sequence, then the total number of tokens."""


@functools.lru_cache(maxsize=8)
def chunks(lens: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    """Cut sequences of `lens` tokens into chunks of up to `size`. The cache lets all layers of a step share the result.

    Example: lens (5, 2), size 4: start [0, 4, 5, 7], row [0, 0, 1], last [1, 2], row_start [0, 5, 7].
    """
    start, row_start = [0], [0]
    row: list[int] = []
    last: list[int] = []
    for index, length in enumerate(lens):
        row_start.append(row_start[-1] + length)
        start += [*range(start[-1] + size, row_start[-1], size), row_start[-1]]
        row += [index] * (len(start) - 1 - len(row))
        last.append(len(row) - 1)
    parts = (start, row, last, row_start)
    numbers = to_device([number for part in parts for number in part], torch.int64, device)
    return Chunks(*numbers.split([len(part) for part in parts]))
