"""Activations of feed-forward layers."""

import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv:2109.08668) of x [...]."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half (Shazeer 2020, arXiv:2002.05202): x [..., 2f] to [..., f]."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value
