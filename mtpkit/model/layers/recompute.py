"""Linears that make their input again in the backward instead of keeping it.

What an activation or a norm gives is as large as what it reads, which its own backward keeps, and costs little beside
the product that follows (selective activation recomputation: Korthikanti et al. 2022, arXiv:2205.05198).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_keeps = ContextVar("mtpkit_keeps_inputs", default=False)


@contextmanager
def keeping_inputs() -> Iterator[None]:
    """Linears inside keep their inputs: for what is run again as a whole, which keeps nothing in the first place."""
    token = _keeps.set(True)
    try:
        yield
    finally:
        _keeps.reset(token)


def linear_of[R](linear: Callable[[Tensor], R], function: Callable[..., Tensor], *inputs: Tensor) -> R:
    """linear(function(*inputs)); the backward of the linear calls `function`, nothing of which is random, once more."""
    made = function(*inputs)
    if _keeps.get() or not (torch.is_grad_enabled() and made.requires_grad):
        return linear(made)
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
