# mypy: disable-error-code="no-untyped-def"
"""Input of `eh_proj` in Triton: gather, both norms and the concatenation in one launch, two programs per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import as_rows
from mtpkit.kernels.norm.triton import normalise


@triton.jit
def _norm_row(source, weight, out, eps, width, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    value = tl.load(source + column, mask=column < width, other=0.0).to(tl.float32)
    normed = normalise(value, weight, column, width, eps)
    tl.store(out + column, normed.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _mtp_input_kernel(
    token_ids,
    hidden,
    embedding,
    enorm_weight,
    hnorm_weight,
    out,
    eps,
    width,
    hidden_stride,
    embedding_stride,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    out += token * 2 * width
    if tl.program_id(1) == 0:
        row = tl.load(token_ids + token).to(tl.int64)
        _norm_row(embedding + row * embedding_stride, enorm_weight, out, eps, width, BLOCK)
    else:
        _norm_row(hidden + token * hidden_stride, hnorm_weight, out + width, eps, width, BLOCK)


def mtp_input(
    token_ids: Tensor, hidden: Tensor, embedding: Tensor, enorm_weight: Tensor, hnorm_weight: Tensor, eps: float
) -> Tensor:
    """See the reference."""
    hidden, token_ids = as_rows(hidden), token_ids.contiguous()
    tokens, width = hidden.shape
    out = torch.empty(tokens, 2 * width, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(width)
    _mtp_input_kernel[(tokens, 2)](
        token_ids,
        hidden,
        embedding,
        enorm_weight,
        hnorm_weight,
        out,
        eps,
        width,
        hidden.stride(0),
        embedding.stride(0),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
