"""Muon (Jordan et al., 2024): momentum for matrices, with all of its singular values made one before each step.

Every direction of a weight then moves alike, also those whose gradients are small beside a few large ones: heads learn
in fewer steps than with AdamW. Steps are scaled to the size of AdamW's (Liu et al. 2025,
arXiv:2502.16982), so that one learning rate serves both.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtpkit.training.flat import FlatBuffer, Region, is_matrix

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
    """Nesterov momentum, orthogonalised, on the matrices of flat buffers.

    A matrix that tensor-parallel ranks split is put together first: its directions are those of the whole.

    Args:
        momentum: decay of the running sum of gradients.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(self, momentum: float, weight_decay: float):
        self.momentum, self.weight_decay = momentum, weight_decay
        self._parts: list[tuple[FlatBuffer, Region]] = []

    def add(self, buffer: FlatBuffer, region: Region) -> None:
        """Update this region, which is what a rank owns of all matrices of the buffer."""
        region.keep("momentum_buffer")
        self._parts.append((buffer, region))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the regions by the summed gradients in their buffers, which are overwritten, all of them.

        Collective. Each data-parallel rank orthogonalises some of the matrices.
        """
        for buffer, region in self._parts:
            momentum = region.tensors["momentum_buffer"]
            momentum.mul_(self.momentum).add_(region.grad)
            region.grad.add_(momentum, alpha=self.momentum)
            buffer.gather()
            matrices = [pair for pair in zip(buffer.parameters, buffer.grads, strict=True) if is_matrix(pair[0])]
            for index, (parameter, grad) in enumerate(matrices):
                if index % buffer.group.size() == buffer.group.rank():
                    grad.copy_(_orthogonal_step(parameter, grad, buffer.tensor_group))
                else:
                    grad.zero_()
            buffer.reduce()
            region.master.mul_(1 - lr * self.weight_decay).add_(region.grad, alpha=-lr)


def _orthogonal_step(parameter: nn.Parameter, grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the step at a learning rate of 1, from its part of the gradient."""
    ranks = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
    if ranks == 1:
        return _scaled(grad)
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    parts = [torch.empty_like(grad) for _ in range(ranks)]
    dist.all_gather(parts, grad.contiguous(), group=group)
    return _scaled(torch.cat(parts, dim)).chunk(ranks, dim)[group.rank()]


def _scaled(matrix: Tensor) -> Tensor:
    return orthogonalize(matrix) * (RMS_OF_ADAMW * max(matrix.shape) ** 0.5)
