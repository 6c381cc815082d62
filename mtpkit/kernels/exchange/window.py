"""Memory through which ranks exchange tensors: every rank reads, and sets flags in, the window of
each rank.

A window consists of channels, each with one flag per rank and two buffers. Program p of a kernel
uses only channel p, so it waits only for the programs with number p on other ranks. The uses of a
channel are numbered from 1 on; the number of a use is called its epoch. In an epoch each rank

1. writes its values to its own buffer `epoch % 2`,
2. sets its flag in the windows of all ranks to the epoch,
3. waits until all flags in its own window have reached the epoch,
4. reads the buffers of all ranks.

No second barrier is needed before a buffer is written again, in epoch e + 2. By then this rank has
seen all flags of epoch e + 1, and each rank sets its flag of e + 1 only after it has read all
buffers of epoch e, since a rank runs its kernels one after the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHANNELS = 128
"""Most programs of a kernel: enough to hide the latency of loads, and few enough to run at once on
large GPUs. On smaller GPUs some programs start late; only the programs with the same number on
other ranks wait for them."""
MOST_RANKS = 8
"""Most ranks that can share windows; each channel has this many flags."""
BUFFERS_AT = CHANNELS * MOST_RANKS * 8
"""Byte offset of the buffers in a window; the flags lie before them."""
_BLOCK_BYTES = 8192
"""Bytes that a program reads from each rank at a time: 16 per thread."""
BEST_ROWS = 256
"""Rows per program of `best_of_ranks`."""
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
        windows: one window per rank, each [`Windows.nbytes(limit)`] uint8, zero before the first
            use. All ranks map the same memory, each into its own address space.
        epochs: [CHANNELS] int64, the last epoch of each channel on this rank, initially zero. It
            lies on the device, so that a kernel in a CUDA graph can advance it.
        limit: largest size of a tensor in bytes.
    """

    rank: int
    windows: tuple[Tensor, ...]
    epochs: Tensor
    limit: int

    @staticmethod
    def nbytes(limit: int) -> int:
        """Size in bytes of a window for tensors of up to `limit` bytes."""
        return BUFFERS_AT + 2 * CHANNELS * _capacity(limit)

    @property
    def capacity(self) -> int:
        """Size in bytes of each of a channel's two buffers."""
        return _capacity(self.limit)

    def fit(self, values: Tensor) -> bool:
        """Whether a tensor can be exchanged through these windows."""
        return values.dtype in _SUMMED_IN and 0 < values.nbytes <= self.limit

    @property
    def most_rows(self) -> int:
        """Most rows that one call of `best_of_ranks` takes."""
        return CHANNELS * BEST_ROWS

    def shares(self, values: Tensor) -> tuple[int, int, int]:
        """Values per block, number of channels that a tensor uses, and values per channel, a
        multiple of the block."""
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
