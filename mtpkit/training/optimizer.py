"""AdamW or Muon on fp32 master weights of the heads, spread over data-parallel ranks as `flat` has it."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor, nn

from mtpkit.errors import MtpkitError
from mtpkit.kernels.adamw import adamw_
from mtpkit.training.config import OptimizerConfig
from mtpkit.training.flat import DECAYED, MATRIX, PARTIAL_MATRIX, PARTIAL_VECTOR, VECTOR, FlatBuffer, Region
from mtpkit.training.muon import Muon
from mtpkit.training.offload import HostState, Part


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of step 0 .. steps - 1: linear up to `lr`, then half a cosine down to `min_lr` at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


class AdamW:
    """AdamW on regions of flat buffers, each with a weight decay of its own; `host` updates those that are there."""

    def __init__(self, config: OptimizerConfig, host: HostState | None = None):
        self.steps = 0
        self._host = host
        self._betas, self._eps = config.betas, config.eps
        self._parts: list[tuple[Region, float]] = []

    def add(self, region: Region, weight_decay: float) -> None:
        """Update this region. Its moments are made here, not at the first step, for a checkpoint to fill."""
        for name in ("exp_avg", "exp_avg_sq"):
            region.keep(name)
        self._parts.append((region, weight_decay))

    def step(self, lr: float) -> None:
        """Update the regions by the gradients in their buffers, which become the new weights."""
        self.steps += 1
        update = partial(adamw_, step=self.steps, lr=lr, betas=self._betas, eps=self._eps)
        parts = [
            Part(
                partial(update, weight_decay=weight_decay),
                region.grad,
                [region.tensors[name] for name in ("fp32_param", "exp_avg", "exp_avg_sq")],
            )
            for region, weight_decay in self._parts
            if len(region.grad)
        ]
        if self._host is not None:
            self._host.start(parts)
            return
        for part in parts:
            part.update(part.grad, *part.state)


class HeadOptimizer:
    """Keeps the fp32 gradients, sums them over ranks, clips and steps.

    From here on the parameters are this optimizer's: backwards of `run_depths` add to its `main_grad` of each, see the
    module of that name.

    Parameters are rounded from their fp32 masters at each step. Experts that ranks have split among themselves are
    summed over the ranks that hold the same ones, all other parameters over all data-parallel ranks. On pipeline stages
    without heads there are no parameters and nothing happens. megatron-core's groups exist.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig):
        self.clip_grad = config.clip_grad
        self.parameters = list(parameters)
        tensor, expert_tensor = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        experts = [parameter for parameter in self.parameters if not getattr(parameter, "allreduce", True)]
        others = [parameter for parameter in self.parameters if getattr(parameter, "allreduce", True)]
        assert not (config.offload and config.kind == "muon"), "settings refuse it"
        offload = config.offload and bool(self.parameters) and self.parameters[0].is_cuda
        self.buffers = [
            FlatBuffer(some, group, tensor_group, config.distributed, offload)
            for some, group, tensor_group in (
                (others, parallel_state.get_data_parallel_group(), tensor),
                (experts, parallel_state.get_expert_data_parallel_group(), expert_tensor),
            )
            if some
        ]
        self._host = HostState() if offload else None
        self._adamw, self._muon = AdamW(config, self._host), Muon(config.momentum, config.weight_decay)
        matrices, vectors = (MATRIX, PARTIAL_MATRIX), (PARTIAL_VECTOR, VECTOR)
        for buffer in self.buffers:
            if config.kind == "muon":
                self._muon.add(buffer, buffer.region(matrices))
                self._adamw.add(buffer.region((DECAYED,)), config.weight_decay)
            else:
                self._adamw.add(buffer.region((DECAYED, *matrices)), config.weight_decay)
            self._adamw.add(buffer.region(vectors), 0.0)
        self._uses_muon = config.kind == "muon"
        self._defers = config.offload
        self._asked: float | None = None
        """Learning rate of an update that was put off."""
        self._begun = False

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Sum the gradients over ranks, clip, update the parameters, and clear the gradients.

        Collective over the ranks that have heads. With `config.offload` the update is put off until `begin`: call
        `finish` before parameters or gradients are used.

        Returns:
            The global norm of the gradient before clipping, every parameter counted once; 0 without parameters.

        Raises:
            MtpkitError: the gradient is not finite; nothing is updated.
        """
        if not self.buffers:
            return 0.0
        assert self._asked is None and not self._begun, "gradients of heads that did not wait for the last update"
        norm = self.reduce()
        if not math.isfinite(norm):
            raise MtpkitError(f"the gradient's norm is {norm}; lower optimizer.lr or set dtype=float32")
        if self.clip_grad and norm > self.clip_grad:
            for buffer in self.buffers:
                buffer.own.mul_(self.clip_grad / norm)
        self._asked = lr
        if not self._defers:
            self.finish()
        return norm

    @torch.no_grad()
    def begin(self) -> None:
        """Begin the update that `step` put off, if there is one.

        With state on the host it goes on beside what the caller does next. It fills the bus: small copies between host
        and device may have to wait for it, and are best made before.
        """
        if self._asked is None:
            return
        lr, self._asked, self._begun = self._asked, None, True
        self._adamw.step(lr)
        if self._uses_muon:
            self._muon.step(lr)
            for buffer in self.buffers:
                buffer.take_masters()

    def finish(self) -> None:
        """Have what follows see the last update. Collective, as `step` is; does nothing a second time."""
        self.begin()
        if not self._begun:
            return
        if self._host is not None:
            self._host.finish()
        for buffer in self.buffers:
            buffer.publish()
        self._begun = False

    def reduce(self) -> float:
        """Sum every gradient over the ranks that have a part of it; the global norm."""
        assert all(p.grad is None for p in self.parameters), "a backward outside of `gradients_into_main`"
        square = torch.zeros((), dtype=torch.float64, device=self.buffers[0].flat.device)
        for buffer in self.buffers:
            buffer.sum_partial()
            buffer.reduce()
            square += buffer.square_norm()
        dist.all_reduce(square, group=parallel_state.get_tensor_and_data_parallel_group())
        return float(square.sqrt())

    def sharded_state_dict(self, model_state: Mapping[str, Any]) -> dict[str, Any]:
        """Masters and moments for `mtpkit.checkpoint`, in pieces of the parameters as `model_state` has them.

        `model_state` is the model's own `sharded_state_dict()`, of whatever nesting. The pieces load at any layout.
        """
        if not self.buffers:
            return {}
        self.finish()
        if self._host is not None:
            self._host.synchronize()
        found = get_param_id_to_sharded_param_map(dict(model_state), self.parameters)
        parts = {id(parameter): found[index] for index, parameter in enumerate(self.parameters)}
        return {str(index): buffer.sharded_state(parts) for index, buffer in enumerate(self.buffers)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Mapping[str, Tensor]]], step: int) -> None:
        """Take the tensors that `sharded_state_dict` asked for, after `step` updates; sets the parameters too."""
        for index, buffer in enumerate(self.buffers):
            buffer.load(state.get(str(index), {}))
            buffer.take_masters()
            buffer.publish()
        self._adamw.steps = step
