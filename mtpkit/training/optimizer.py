"""AdamW on fp32 master weights of the heads, whose gradients live in one flat fp32 buffer."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtpkit.errors import MtpkitError
from mtpkit.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of step 0 .. steps - 1: linear up to `lr`, then half a cosine down to `min_lr` at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


class HeadOptimizer:
    """Accumulates the heads' gradients over micro-batches, sums them over ranks, clips and steps.

    Masters of fp32 parameters are the parameters' own memory; bf16 parameters are rounded from theirs at each step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig):
        self.parameters = list(parameters)
        self.clip_grad = config.clip_grad
        self.masters = [parameter.detach().float().requires_grad_() for parameter in self.parameters]
        self._flat_grad = torch.zeros(
            sum(master.numel() for master in self.masters), dtype=torch.float32, device=self.masters[0].device
        )
        sizes = [master.numel() for master in self.masters]
        for master, grad in zip(self.masters, self._flat_grad.split(sizes), strict=True):
            master.grad = grad.view_as(master)
        groups = [
            {"params": [m for m in self.masters if m.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [m for m in self.masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def accumulate(self) -> None:
        """Move the gradients of one backward into the fp32 buffer."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                master.grad.add_(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, group: dist.ProcessGroup | None = None) -> float:
        """Sum the gradients over `group`, clip, update the parameters, and clear the gradients.

        Returns:
            The gradient's global norm before clipping.

        Raises:
            MtpkitError: the gradient is not finite; nothing is updated.
        """
        dist.all_reduce(self._flat_grad, group=group)
        norm = float(self._flat_grad.norm())
        if not math.isfinite(norm):
            raise MtpkitError(f"the gradient's norm is {norm}; lower optimizer.lr or set dtype=float32")
        if self.clip_grad and norm > self.clip_grad:
            self._flat_grad.mul_(self.clip_grad / norm)
        for param_group in self._adamw.param_groups:
            param_group["lr"] = lr
        self._adamw.step()
        self._flat_grad.zero_()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
        return norm

    def state_dict(self) -> dict[str, Tensor | float]:
        """Masters and AdamW's moments."""
        return {"masters": [master.detach() for master in self.masters], "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`'s values, the parameters included."""
        with torch.no_grad():
            for parameter, master, saved in zip(self.parameters, self.masters, state["masters"], strict=True):
                master.copy_(saved)
                parameter.copy_(master)
        self._adamw.load_state_dict(state["adamw"])
