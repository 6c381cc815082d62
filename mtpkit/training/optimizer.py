"""AdamW or Muon on fp32 master weights of the heads, sharded over data-parallel ranks by `flat`."""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor, nn

from mtpkit.errors import MtpkitError
from mtpkit.kernels.adamw import adamw_
from mtpkit.training.config.settings import OptimizerConfig
from mtpkit.training.flat import (
    DECAYED,
    MATRIX,
    PARTIAL_MATRIX,
    PARTIAL_VECTOR,
    VECTOR,
    FlatBuffer,
    Region,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic Newton-Schulz step, from its authors: steep at zero, and not exact
at one."""
ITERATIONS = 5
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state, by its names in checkpoints."""
RMS_OF_ADAMW = 0.2
"""Usual root mean square of the entries of AdamW's step at a learning rate of 1."""


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step 0 .. steps - 1: linear warm-up to `lr`, then cosine decay to `min_lr`
    at the last.

    The warm-up takes at most all steps.
    """
    warmup = min(config.warmup_steps, steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return (
        config.min_lr
        + (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    )


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate U V^T [m, n] of a matrix U S V^T [m, n]; both are fp32, and the products run in
    `dtype`.

    The singular values of the result are 0.7 to 1.2, except where those of the matrix are below a
    hundredth of its largest.
    """
    a, b, c = COEFFICIENTS
    x = (matrix / matrix.norm().clamp(min=1e-7)).to(dtype)
    x = x.t() if x.shape[0] > x.shape[1] else x
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if matrix.shape[0] > matrix.shape[1] else x).float()


def _muon_step(buffer: FlatBuffer, region: Region, momentum: float, lr: float) -> None:
    """Update this rank's part of the matrices of a buffer from their summed gradients. Collective.

    Muon (Jordan et al. 2024): Nesterov momentum, orthogonalised. All directions of a weight move by
    about the same amount, even those with small gradients beside a few large ones, so that heads
    learn in fewer steps than with AdamW. Steps are scaled to the size of AdamW's (Liu et al. 2025,
    arXiv:2502.16982), so that one learning rate serves both. Each data-parallel rank orthogonalises
    some of the matrices; a matrix that is split over tensor-parallel ranks is gathered first.
    """
    running = region.tensors["momentum_buffer"]
    running.mul_(momentum).add_(region.grad)
    region.grad.add_(running, alpha=momentum)
    # Newton-Schulz needs whole matrices, and a rank's part of the buffer ends anywhere in one.
    buffer.gather()
    matrices = [
        pair for pair in zip(buffer.parameters, buffer.grads, strict=True) if pair[0].ndim == 2
    ]
    for index, (parameter, grad) in enumerate(matrices):
        if index % buffer.group.size() == buffer.group.rank():
            grad.copy_(_orthogonal_step(parameter, grad, buffer.tensor_group))
        else:
            # The sum over ranks below then hands out each step once.
            grad.zero_()
    buffer.reduce()
    region.master.mul_(1 - lr * region.weight_decay).add_(region.grad, alpha=-lr)


def _orthogonal_step(parameter: nn.Parameter, grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the step at a learning rate of 1, given its part of the gradient.

    Computed in the weight's dtype, but in fp32 on a CPU, where bf16 may take twenty times as long.
    """
    split = getattr(parameter, "tensor_model_parallel", False) and group.size() > 1
    whole = grad
    if split:
        parts = [torch.empty_like(grad) for _ in range(group.size())]
        dist.all_gather(parts, grad.contiguous(), group=group)
        whole = torch.cat(parts, parameter.partition_dim)  # type: ignore[attr-defined]
    dtype = parameter.dtype if whole.is_cuda else torch.float32
    step = orthogonalize(whole, dtype) * (RMS_OF_ADAMW * max(whole.shape) ** 0.5)
    return step.chunk(group.size(), parameter.partition_dim)[group.rank()] if split else step  # type: ignore[attr-defined]


class HeadOptimizer:
    """The optimizer of the heads: keeps fp32 gradients, sums them over ranks, clips and steps.

    It gives each parameter a `main_grad`, to which the backward passes of `run_depths` add; see the
    module `main_grad`. Parameters are rounded from their fp32 masters at each step. Gradients of
    experts are summed over the ranks that hold the same experts, all other gradients over all
    data-parallel ranks. On pipeline stages without heads the optimizer does nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig):
        self._config = config
        self.parameters = list(parameters)
        tensor = parallel_state.get_tensor_model_parallel_group()
        expert_tensor = parallel_state.get_expert_tensor_parallel_group()
        experts = [
            parameter for parameter in self.parameters if not getattr(parameter, "allreduce", True)
        ]
        others = [
            parameter for parameter in self.parameters if getattr(parameter, "allreduce", True)
        ]
        self.buffers = [
            FlatBuffer(some, group, tensor_group, config.distributed)
            for some, group, tensor_group in (
                (others, parallel_state.get_data_parallel_group(), tensor),
                (experts, parallel_state.get_expert_data_parallel_group(), expert_tensor),
            )
            if some
        ]
        matrices = (MATRIX, PARTIAL_MATRIX)
        vectors = (PARTIAL_VECTOR, VECTOR)
        decay = config.weight_decay
        for buffer in self.buffers:
            if config.kind == "muon":
                buffer.add_region(matrices, ("momentum_buffer",), decay)
                buffer.add_region((DECAYED,), MOMENTS, decay)
            else:
                buffer.add_region((DECAYED, *matrices), MOMENTS, decay)
            buffer.add_region(vectors, MOMENTS, 0.0)
        self._updates = 0

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Sum the gradients over ranks, clip, update the parameters, and clear the gradients.

        Collective over the ranks that have heads.

        Returns:
            The global norm of the gradient before clipping, every parameter counted once; 0 without
            parameters.

        Raises:
            MtpkitError: the gradient is not finite; nothing is updated.
        """
        if not self.buffers:
            return 0.0
        norm = self.reduce()
        if not math.isfinite(norm):
            raise MtpkitError(
                f"the gradient's norm is {norm}; lower optimizer.lr or set dtype=float32"
            )
        if self._config.clip_grad and norm > self._config.clip_grad:
            for buffer in self.buffers:
                buffer.own.mul_(self._config.clip_grad / norm)
        self._update(lr)
        return norm

    def _update(self, lr: float) -> None:
        """Update the parameters from the summed gradients, and clear these."""
        config = self._config
        self._updates += 1
        for buffer in self.buffers:
            for region in buffer.regions:
                if not len(region.grad) or not region.tensors.keys() >= set(MOMENTS):
                    continue
                # It overwrites the gradient with the new weights, which `publish` gathers.
                adamw_(
                    region.grad,
                    region.master,
                    region.tensors["exp_avg"],
                    region.tensors["exp_avg_sq"],
                    step=self._updates,
                    lr=lr,
                    betas=config.betas,
                    eps=config.eps,
                    weight_decay=region.weight_decay,
                )
        if config.kind == "muon":
            for buffer in self.buffers:
                # the region of matrices
                _muon_step(buffer, buffer.regions[0], config.momentum, lr)
                buffer.take_masters()
        for buffer in self.buffers:
            buffer.publish()

    def reduce(self) -> float:
        """Sum every gradient over the ranks that have a part of it, and return the global norm."""
        assert all(p.grad is None for p in self.parameters), (
            "a backward outside of `gradients_into_main`"
        )
        # fp64, so that the order of buffers and ranks hardly shows in the norm.
        square = torch.zeros((), dtype=torch.float64, device=self.buffers[0].flat.device)
        for buffer in self.buffers:
            # Partial gradients first: after `reduce` a rank has the sum of its own part only.
            buffer.sum_partial()
            buffer.reduce()
            square += buffer.square_norm()
        # Every rank has to clip by the same factor, so the norm is that of all ranks.
        dist.all_reduce(square, group=parallel_state.get_tensor_and_data_parallel_group())
        return float(square.sqrt())

    def sharded_state_dict(self, model_state: Mapping[str, object]) -> dict[str, object]:
        """Masters and moments for `mtpkit.checkpoint`; they can be loaded at any parallel layout.

        They are sharded like the parameters in `model_state`, the model's own
        `sharded_state_dict()`.
        """
        if not self.buffers:
            return {}
        found = get_param_id_to_sharded_param_map(dict(model_state), self.parameters)
        parts = {id(parameter): found[index] for index, parameter in enumerate(self.parameters)}
        return {
            str(index): buffer.sharded_state(parts) for index, buffer in enumerate(self.buffers)
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Mapping[str, Tensor]]], step: int
    ) -> None:
        """Load tensors of `sharded_state_dict` saved after `step` updates, and set the
        parameters."""
        for index, buffer in enumerate(self.buffers):
            buffer.load(state.get(str(index), {}))
            buffer.take_masters()
            buffer.publish()
        # AdamW's bias correction depends on the number of updates.
        self._updates = step
