# mypy: disable-error-code="assignment"
"""Copies of units in Triton: one launch for many pairs of tensors with the same strides and
dtypes."""

from itertools import batched

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import only_if

_AT_ONCE = 16
"""Most pairs per launch; the kernel is compiled for each number of pairs."""


@triton.jit
def _copy_kernel(
    read,
    written,
    sources_ptr,
    targets_ptr,
    READ_STRIDE,
    WRITTEN_STRIDE,
    WIDTH,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK elements of one unit of one pair per program."""
    copy = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources_ptr + copy)
    target = tl.load(targets_ptr + copy)
    mask = only_if((place < WIDTH) & (source >= 0), target >= 0)
    for index in tl.static_range(COUNT):
        # A tuple takes only constants as indices, hence one branch per pair.
        if tl.program_id(2) == index:
            values = tl.load(read[index] + source * READ_STRIDE + place, mask=mask)
            to = written[index] + target * WRITTEN_STRIDE + place
            tl.store(to, values.to(written[index].dtype.element_ty), mask=mask)


def _width(tensor: Tensor) -> int:
    """Number of elements of a unit, which must be dense."""
    width = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        assert size == 1 or stride == width
        width *= size
    return width


def _form(read: Tensor, written: Tensor) -> tuple[int, int, int, torch.dtype, torch.dtype]:
    """Elements of a unit, strides of units in both tensors, and both dtypes; a launch takes pairs
    with equal forms."""
    width = _width(read)
    assert width == _width(written)
    return width, read.stride(0), written.stride(0), read.dtype, written.dtype


def copy_units(sources: Tensor, targets: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """See the reference."""
    if not len(sources):
        return
    sources = sources.contiguous()
    targets = targets.contiguous()
    groups: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        groups.setdefault(_form(*pair), []).append(pair)
    for (width, read_stride, written_stride, *_), group in groups.items():
        block = min(1024, triton.next_power_of_2(width))
        for some in batched(group, _AT_ONCE):
            read, written = zip(*some, strict=True)
            _copy_kernel[(triton.cdiv(width, block), len(sources), len(some))](
                read,
                written,
                sources,
                targets,
                read_stride,
                written_stride,
                width,
                COUNT=len(some),
                BLOCK=block,
                num_warps=4 if block > 128 else 1,
            )
