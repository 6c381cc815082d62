# mypy: disable-error-code="no-untyped-def"
"""Training attention in Triton: flash attention (Dao 2023, FlashAttention-2, arXiv:2307.08691) with a backward.

One set of kernels serves both ops: a plain sequence is depth 1 with no later depth. The running softmax of a query
starts with the entries of depths 2..k at its own position, so that no merge is needed. Memory is linear in s. Key
blocks outside the documents of a query block are skipped. torch's own flash kernels take only one document per row, and
their backward is not deterministic.
"""

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mtpkit.kernels.attention.flash_backward import Saved, attend_backward
from mtpkit.kernels.attention.flash_forward import attend_forward
from mtpkit.kernels.attention.flash_tile import Bounds, document_bounds
from mtpkit.kernels.device import with_rows


class _DepthAttention(Function):
    @staticmethod
    def forward(ctx, bounds, *inputs):
        q, k, v, *later = map(with_rows, inputs)
        count = len(later) // 2
        out, lse = attend_forward(q, k, v, later[:count], later[count:], bounds)
        ctx.save_for_backward(q, k, v, out, lse, *(bounds or ()), *later)
        ctx.packed = bounds is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, out, lse, *rest = ctx.saved_tensors
        bounds = Bounds(*rest[:2]) if ctx.packed else None
        later = rest[2:] if ctx.packed else rest
        count = len(later) // 2
        saved = Saved(q, k, v, later[:count], later[count:], out, lse)
        grad_q, grad_k, grad_v, *grad_later = attend_backward(with_rows(grad_out), saved, bounds)
        return None, grad_q, grad_k, grad_v, *grad_later[0], *grad_later[1]


def sequence_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """See the reference. Documents must not decrease along a row."""
    return _DepthAttention.apply(None if documents is None else document_bounds(documents), q, k, v)


def depth_attention(
    q: Tensor,
    first_k: Tensor,
    first_v: Tensor,
    later_k: list[Tensor],
    later_v: list[Tensor],
    documents: Tensor | None = None,
) -> Tensor:
    """See the reference. Documents must not decrease along a row."""
    bounds = None if documents is None else document_bounds(documents)
    return _DepthAttention.apply(bounds, q, first_k, first_v, *later_k, *later_v)
