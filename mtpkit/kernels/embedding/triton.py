"""Rows of a part of an embedding table in Triton: one launch, with one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import only_if, strided, with_rows


@triton.jit
def _rows_kernel(token_ids, table_rows, out, first, count, width, BLOCK: tl.constexpr):
    table, stride = table_rows
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    place = tl.load(token_ids + token) - first
    mask = column < width
    held = only_if(mask & (place >= 0), place < count)
    tl.store(
        out + token * width + column,
        tl.load(table + place * stride + column, mask=held, other=0.0),
        mask=mask,
    )


def embedding_part(token_ids: Tensor, table: Tensor, first: int) -> Tensor:
    """See the reference."""
    table, (count, width) = with_rows(table), table.shape
    out = torch.empty(len(token_ids), width, dtype=table.dtype, device=table.device)
    if len(token_ids):
        block = triton.next_power_of_2(width)
        _rows_kernel[(len(token_ids),)](
            token_ids.contiguous(),
            strided(table),
            out,
            first,
            count,
            width,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )
    return out
