# mypy: disable-error-code="no-untyped-def"
"""Device functions that the kernels of training attention share: loads and stores of rows of a strided tensor."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """A tensor [b, s, heads, d] with contiguous channels in the form that kernels take: pointer and strides."""

    data: Tensor
    batch: int
    token: int
    head: int
    """The three strides are in elements."""


def rows_of(t: Tensor) -> Rows:
    """Rows of t [b, s, heads, d], whose last dimension is contiguous."""
    assert t.stride(-1) == 1
    return Rows(t, *t.stride()[:3])


class Bounds(NamedTuple):
    """First token of each token's document, and the token after its last: int32 [b, s], indices into the row."""

    start: Tensor
    end: Tensor


def document_bounds(documents: Tensor) -> Bounds:
    """Bounds of documents [b, s], which must not decrease along a row."""
    ids = documents.contiguous()
    return Bounds(*(torch.searchsorted(ids, ids, right=right, out_int32=True) for right in (False, True)))


@triton.jit
def _offsets(rows, batch, head, first, ROWS: tl.constexpr, D: tl.constexpr):
    token = (first + tl.arange(0, ROWS)).to(tl.int64) * rows.token
    line = batch.to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head
    return (line + token)[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _inside(first, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    inside = (first + tl.arange(0, ROWS) < length)[:, None]
    if WIDTH < D:
        inside = inside & (tl.arange(0, D) < WIDTH)[None, :]
    return inside


@triton.jit
def load_rows(rows, batch, head, first, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Load [ROWS, D] of a head from token `first` on; zero from token `length` and from channel WIDTH on."""
    place = rows.data + _offsets(rows, batch, head, first, ROWS, D)
    return tl.load(place, mask=_inside(first, length, WIDTH, ROWS, D), other=0.0)


@triton.jit
def store_rows(rows, values, batch, head, first, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Store what `load_rows` loads."""
    place = rows.data + _offsets(rows, batch, head, first, ROWS, D)
    tl.store(place, values.to(rows.data.dtype.element_ty), mask=_inside(first, length, WIDTH, ROWS, D))


@triton.jit
def load_numbers(ptr, line, token, length):
    """Load one number per token of `token` from a line of `length` numbers; 0 past its end."""
    return tl.load(ptr + line.to(tl.int64) * length + token, mask=token < length, other=0)


@triton.jit
def row_dot(left, right):
    """[ROWS] fp32 dot products of the rows of two tiles."""
    return tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
