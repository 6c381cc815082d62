"""Helpers of layers: parameters that ranks split, and linears that recompute their input in the
backward.

The output of an activation or a norm is as large as its input, which its own backward keeps anyway,
and recomputing it costs little beside the matrix product that follows (selective activation
recomputation: Korthikanti et al. 2022, arXiv:2205.05198).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

_keeps = ContextVar("mtpkit_keeps_inputs", default=False)


class NoExtraState:
    """Mixin of modules whose checkpoints have the extra-state key of Transformer Engine's modules,
    without a value. The fp8 scales that Transformer Engine keeps there are recomputed from the
    tensors themselves."""

    def get_extra_state(self) -> None:
        """Return nothing."""

    def set_extra_state(self, state: object) -> None:
        """Ignore a state."""


def split_parameter(values: Tensor) -> nn.Parameter:
    """Make a parameter from this rank's rows of a tensor that tensor-parallel ranks split."""
    parameter = nn.Parameter(values)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    return parameter


class SplitOverRanks(nn.Module):
    """Mixin of modules with parameters from `split_parameter`, so that their checkpoints load at
    any parallelism."""

    tp_group: ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return Megatron's distributed-checkpoint entries of the module and its children."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        entries = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {
                name: value.partition_dim
                for name, value in own.items()
                if hasattr(value, "partition_dim")
            },
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            child = f"{prefix}{name}."
            entries |= sharded_state_dict_default(
                module, child, sharded_offsets, metadata, tp_group=self.tp_group
            )
        return entries


@contextmanager
def keeping_inputs() -> Iterator[None]:
    """Make linears inside keep their inputs: for code that is recomputed as a whole in the backward
    anyway."""
    token = _keeps.set(True)
    try:
        yield
    finally:
        _keeps.reset(token)


def linear_of[R](
    linear: Callable[[Tensor], R], function: Callable[..., Tensor], *inputs: Tensor
) -> R:
    """Compute linear(function(*inputs)); the linear's backward calls `function` again, so it must
    not be random."""
    made = function(*inputs)
    if _keeps.get() or not (torch.is_grad_enabled() and made.requires_grad):
        return linear(made)
    # What the linear keeps of its input may be a view of it: the storage tells.
    storage = made.untyped_storage()._cdata
    kept = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]

    def pack(tensor: Tensor) -> Tensor | tuple:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Tensor | tuple) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.enable_grad():  # so that the same kernels run as in the forward
            return function(*kept).detach().as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        return linear(made)
