# mypy: disable-error-code="assignment"
"""Move cache entries in Triton: one launch for many tensors whose entries have the same size and
dtype."""

from itertools import batched, groupby
from math import prod

import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import only_if

_AT_ONCE = 16
"""Most tensors per launch; the kernel is compiled for each number of tensors."""


@triton.jit
def _move(ptr, sources_ptr, targets_ptr, channel, ENTRIES, WIDTH):
    inside = channel < WIDTH
    values = ()
    for i in tl.static_range(ENTRIES):
        source = tl.load(sources_ptr + i)
        value = tl.load(ptr + source * WIDTH + channel, mask=only_if(inside, source >= 0))
        values = values + (value,)  # noqa: RUF005
    tl.debug_barrier()  # a thread may write entries that another thread still reads
    for i in tl.static_range(ENTRIES):
        source = tl.load(sources_ptr + i)
        target = tl.load(targets_ptr + i)
        tl.store(
            ptr + target * WIDTH + channel,
            values[i],
            mask=only_if(inside & (source >= 0), source != target),
        )


@triton.jit
def _move_kernel(
    tensors,
    sources_ptr,
    targets_ptr,
    COUNT: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move BLOCK channels of one row's entries of one tensor per program."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ENTRIES
    for index in tl.static_range(COUNT):
        # A tuple takes only constants as indices, hence one branch per tensor.
        if tl.program_id(2) == index:
            _move(tensors[index], sources_ptr + row, targets_ptr + row, channel, ENTRIES, WIDTH)


def _form(tensor: Tensor) -> tuple[int, str]:
    """Number of elements per entry, and their dtype."""
    return prod(tensor.shape[1:]), str(tensor.dtype)


def move_entries(sources: Tensor, targets: Tensor, *tensors: Tensor) -> None:
    """See the reference."""
    rows, entries = sources.shape
    if not sources.numel():
        return
    sources = sources.contiguous()
    targets = targets.contiguous()
    assert all(tensor.is_contiguous() for tensor in tensors)
    for (width, _), group in groupby(sorted(tensors, key=_form), key=_form):
        block = min(1024, triton.next_power_of_2(width))
        for some in batched(group, _AT_ONCE):
            _move_kernel[(triton.cdiv(width, block), rows, len(some))](
                some,
                sources,
                targets,
                COUNT=len(some),
                ENTRIES=entries,
                WIDTH=width,
                BLOCK=block,
                num_warps=4 if block > 128 else 1,
            )
