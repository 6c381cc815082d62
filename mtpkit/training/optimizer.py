"""AdamW or Muon on fp32 master weights of the heads, whose gradients live in one flat fp32 buffer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from torch import Tensor, nn

from mtpkit.errors import MtpkitError
from mtpkit.training.config import OptimizerConfig
from mtpkit.training.muon import Muon


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
        matrices = [master for master in self.masters if config.kind == "muon" and master.ndim == 2]
        others = [master for master in self.masters if config.kind != "muon" or master.ndim != 2]
        self._flat_grad = _flatten_grads(matrices + others)
        self._muon = Muon(
            matrices, self._flat_grad[: sum(m.numel() for m in matrices)], config.momentum, config.weight_decay
        )
        groups = [
            {"params": [m for m in others if m.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [m for m in others if m.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        for master in others:  # AdamW would make these at its first step; a checkpoint is loaded before
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self._adamw.state[master] = {"step": torch.tensor(0.0), **moments}

    def accumulate(self) -> None:
        """Move the gradients of one backward into the fp32 buffer."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None and master.grad is not None:
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
        if self._muon.matrices:
            self._muon.step(lr, group)
        self._flat_grad.zero_()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
        return norm

    def sharded_state_dict(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Masters and moments for `mtpkit.checkpoint`, cut over ranks as `model_state` cuts the parameters.

        `model_state` is the model's own `sharded_state_dict()`, of whatever nesting.
        """
        sharded = get_param_id_to_sharded_param_map(dict(model_state), self.parameters)
        return {
            str(index): {
                name: make_sharded_optimizer_tensor(sharded[index], tensor, prefix=f"optimizer.state.{name}")
                for name, tensor in self._tensors(index).items()
            }
            for index in range(len(self.parameters))
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take the tensors that `sharded_state_dict` asked for, after `step` updates; sets the parameters too."""
        for index, parameter in enumerate(self.parameters):
            for name, tensor in self._tensors(index).items():
                tensor.copy_(state[str(index)][name])
            if (moments := self._adamw.state.get(self.masters[index])) is not None:
                moments["step"].fill_(step)
            parameter.copy_(self.masters[index])

    def _tensors(self, index: int) -> dict[str, Tensor]:
        master = self.masters[index]
        if master in self._adamw.state:
            moments = {name: self._adamw.state[master][name] for name in ("exp_avg", "exp_avg_sq")}
        else:
            place = next(i for i, matrix in enumerate(self._muon.matrices) if matrix is master)
            moments = {"momentum_buffer": self._muon.buffers[place]}
        return {"fp32_param": master.detach(), **moments}


def _flatten_grads(tensors: Sequence[Tensor]) -> Tensor:
    """One fp32 buffer of zeros; the `grad` of each tensor becomes its part of it, in order."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    for tensor, grad in zip(tensors, flat.split(sizes), strict=True):
        tensor.grad = grad.view_as(tensor)
    return flat
