"""Muon (Jordan et al., 2024): momentum for matrices, with all of its singular values made one before each step.

Every direction of a weight then moves alike, also those whose gradients are small beside a few large ones: heads learn
in fewer steps than with AdamW. Steps are scaled to the size of AdamW's (Liu et al. 2025,
arXiv:2502.16982), so that one learning rate serves both.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz step, from the method's authors: steep at zero, and not exact at one."""
ITERATIONS = 5
RMS_OF_ADAMW = 0.2
"""Root mean square of an entry of AdamW's usual step at a learning rate of 1."""


def orthogonalize(matrix: Tensor) -> Tensor:
    """About U V^T of a matrix U S V^T: singular values of 0.7 to 1.2, but for those below a hundredth of the largest.

    Args:
        matrix: [m, n] fp32.

    Returns:
        [m, n] fp32. Computed in bf16 on a GPU; a CPU without bf16 units would take twenty times as long in it.
    """
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=1e-7)
    x = x.bfloat16() if x.is_cuda else x
    x = x.t() if x.shape[0] > x.shape[1] else x
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if matrix.shape[0] > matrix.shape[1] else x).float()


class Muon:
    """Nesterov momentum, orthogonalised, on matrices whose gradients are neighbours in one flat buffer.

    Under tensor parallelism a rank's part of a matrix is a matrix of its own.

    Args:
        matrices: fp32, [m, n] each, with their gradients in `grad`.
        flat_grad: the buffer that these gradients are views of, in order and nothing else.
        momentum: decay of the running sum of gradients.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(self, matrices: Sequence[Tensor], flat_grad: Tensor, momentum: float, weight_decay: float):
        self.matrices, self.flat_grad = list(matrices), flat_grad
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers = [torch.zeros_like(matrix) for matrix in self.matrices]

    @torch.no_grad()
    def step(self, lr: float, group: dist.ProcessGroup | None = None) -> None:
        """Update the matrices by gradients that are the same on all ranks of `group`, which share the work.

        Collective. Each rank orthogonalises some of the matrices; the gradients become what was made of them.
        """
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        for index, (matrix, buffer) in enumerate(zip(self.matrices, self.buffers, strict=True)):
            grad = matrix.grad
            assert grad is not None
            buffer.mul_(self.momentum).add_(grad)
            if index % ranks == rank:
                grad.copy_(orthogonalize(grad.add_(buffer, alpha=self.momentum)))
            else:
                grad.zero_()
        dist.all_reduce(self.flat_grad, group=group)
        for matrix in self.matrices:
            assert matrix.grad is not None
            matrix.mul_(1 - lr * self.weight_decay)
            matrix.add_(matrix.grad, alpha=-lr * RMS_OF_ADAMW * max(matrix.shape) ** 0.5)
