"""Memory through which ranks exchange tensors: each rank has a window, which all ranks read and in which all set flags.

A window consists of channels, each with a flag for every rank and two buffers. Program p of a kernel uses channel p and
no other, so that programs wait only for those of the same number on other ranks. The uses of a channel are numbered
from 1 on; such a number is an epoch. In an epoch each rank

1. writes its values to its own buffer `epoch % 2`,
2. sets its flag in the windows of all ranks to the epoch,
3. waits until all flags in its own window have reached the epoch,
4. reads the buffers of all ranks.

No second barrier has to keep a buffer from being written again, two epochs later: this rank has then seen the flags of
the epoch between, which every rank sets after it has read all buffers of the epoch before, since each runs its kernels
one after the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHANNELS = 128
"""Most programs of a kernel: enough to hide the latency of loads, and few enough to run at once on large GPUs. On
others some wait, for no longer than those of the same number on other ranks."""
MOST_RANKS = 8
"""Most ranks: flags of a channel."""
BUFFERS_AT = CHANNELS * MOST_RANKS * 8
"""Byte of a window at which the buffers begin, behind the flags."""
_BLOCK_BYTES = 8192
"""Bytes that a program reads at a time from each rank: 16 for each of its threads."""
BEST_ROWS = 256
"""Rows of a program of `best_of_ranks`."""
_SUMMED_IN = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int64: torch.int64,
}


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of all ranks, as one rank sees them.

    Args:
        rank: number of this rank.
        windows: a window of each rank, [`Windows.nbytes(limit)`] uint8, zero before the first use; all ranks have the
            same memory, each in its own address space.
        epochs: [CHANNELS] int64, the last epoch of each channel on this rank, zero at first. It lies on the device, so
            that a kernel in a CUDA graph advances it.
        limit: most bytes of a tensor.
    """

    rank: int
    windows: tuple[Tensor, ...]
    epochs: Tensor
    limit: int

    @staticmethod
    def nbytes(limit: int) -> int:
        """Bytes of a window for tensors of up to `limit` bytes."""
        return BUFFERS_AT + 2 * CHANNELS * _capacity(limit)

    @property
    def capacity(self) -> int:
        """Bytes of each of a channel's two buffers."""
        return _capacity(self.limit)

    def fit(self, values: Tensor) -> bool:
        """Whether a tensor can be exchanged through these windows."""
        return values.dtype in _SUMMED_IN and 0 < values.nbytes <= self.limit

    @property
    def most_rows(self) -> int:
        """Most rows of which the best of all ranks can be found at once."""
        return CHANNELS * BEST_ROWS

    def shares(self, values: Tensor) -> tuple[int, int, int]:
        """Values of a block, channels that a tensor takes, and values of each channel, whole blocks of them."""
        block = _BLOCK_BYTES // values.element_size()
        blocks = -(-values.numel() // block)
        channels = min(blocks, CHANNELS)
        share = block * -(-blocks // channels)
        return block, -(-values.numel() // share), share


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are added up."""
    return _SUMMED_IN[dtype]


def _capacity(limit: int) -> int:
    return _BLOCK_BYTES * -(-limit // (CHANNELS * _BLOCK_BYTES))
