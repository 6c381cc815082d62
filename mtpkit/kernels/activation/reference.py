"""Activations of feed-forward layers, and the gate of the attention output."""

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU of x [...]: max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """SwiGLU of x [..., 2f]: silu(first half) * second half, [..., f] (Shazeer 2020,
    arXiv:2002.05202)."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by sigmoid(gate), computed in fp32 (Qiu et al. 2025, arXiv:2505.06708).

    Args:
        x: [..., n].
        gate: [..., g, n / g] of any strides, for example a slice of each group of a fused
            projection.

    Returns:
        [..., n] in the dtype of x.
    """
    return (x * torch.sigmoid(gate.flatten(-2).float())).to(x.dtype)
