"""Inputs of kernels as a model's layers give them, for the tests and for `benchmarks.kernels`.

Layers hand kernels slices of wider tensors: of a projection, or of a convolution's output. Each
function takes `normal`, which makes random numbers of a shape as `torch.randn` does, on the device,
of the type and from the generator that its caller chose. `beside` is the number of columns beside
the slices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Normal = Callable[..., Tensor]
Permutation = Callable[[int], Tensor]
"""Makes 0 .. n - 1 in random order, as `torch.randperm` does."""


class MambaSizes(NamedTuple):
    """Sizes of a Mamba2 layer."""

    heads: int
    width: int
    groups: int
    state: int


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net: heads of values and of keys, and their widths."""

    heads: int
    width: int
    groups: int
    state: int


def mamba_tokens(
    normal: Normal, *lead: int, sizes: MambaSizes, beside: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """x [*lead, heads, width], B and C [*lead, groups, state]: slices of one tensor."""
    heads, width, groups, state = sizes
    x, B, C = _slices(normal, lead, [(heads, width), (groups, state), (groups, state)], beside)
    return x, B, C


def delta_tokens(
    normal: Normal, *lead: int, sizes: DeltaSizes, beside: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [*lead, groups, state], v [*lead, heads, width]: slices of one tensor."""
    heads, width, groups, state = sizes
    q, k, v = _slices(normal, lead, [(groups, state), (groups, state), (heads, width)], beside)
    return q, k, v


def _slices(
    normal: Normal, lead: Sequence[int], shapes: Sequence[tuple[int, int]], beside: int
) -> list[Tensor]:
    """Tensors [*lead, heads, width], one for each shape: slices of one tensor."""
    parts = [heads * width for heads, width in shapes]
    *slices, _ = normal(*lead, sum(parts) + beside).split([*parts, beside], -1)
    return [one.unflatten(-1, shape) for one, shape in zip(slices, shapes, strict=True)]


def delta_rates(normal: Normal, *lead: int, heads: int, beside: int = 0) -> tuple[Tensor, Tensor]:
    """a and b [*lead, heads]: the last columns of a projection, b before a."""
    b, a = normal(*lead, beside + 2 * heads)[..., beside:].split(heads, -1)
    return a, b


def last_columns(normal: Normal, *lead: int, width: int, beside: int = 0) -> Tensor:
    """The last `width` columns of a wider tensor, as Mamba2's step sizes are of its projection."""
    return normal(*lead, beside + width)[..., beside:]


def projected_qkv(
    normal: Normal, tokens: int, groups: int, heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, groups, heads, width], k and v [tokens, groups, width]: slices of one projection,
    in which each group's queries, key and value stand side by side."""
    fused = normal(tokens, groups, heads + 2, width)
    return fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]


def matrix(normal: Normal, *sizes: int) -> Tensor:
    """A weight [*sizes] that keeps the scale of its input."""
    # In place: there may be no room for a second copy of all experts.
    return normal(*sizes).div_(sizes[-1] ** 0.5)


def expert_weights(
    normal: Normal, experts: int, width: int, inner: int, activation: str
) -> tuple[Tensor, Tensor]:
    """fc1 [experts, inner or twice that, width] and fc2 [experts, width, inner] of a mixture."""
    rows = inner * (2 if activation == "swiglu" else 1)
    return matrix(normal, experts, rows, width), matrix(normal, experts, width, inner)


def conv_parameters(
    normal: Normal, channels: int, width: int, biased: bool
) -> tuple[Tensor, Tensor | None]:
    """Weight [channels, 1, width] and bias [channels] of a convolution of each channel by
    itself."""
    weight = normal(channels, 1, width)
    return weight, normal(channels) if biased else None


def block_tables(order: Tensor, counts: Sequence[int], spare: int = 0) -> Tensor:
    """Block tables [rows, the largest count + spare]: row i gets the next counts[i] blocks of
    `order`, and zeros after them."""
    tables = order.new_zeros(len(counts), max(counts) + spare)
    for row, blocks in enumerate(order[: sum(counts)].split(list(counts))):
        tables[row, : len(blocks)] = blocks
    return tables


def write_history(cache: Tensor, table: Tensor, history: Tensor) -> None:
    """Write the entries of a row's tokens, [tokens, ...], to the blocks of its table, in a cache
    [blocks, block size, ...]."""
    place = torch.arange(len(history), device=cache.device)
    block_size = cache.shape[1]
    cache[table[place // block_size], place % block_size] = history


def random_slots(permutation: Permutation, cache: Tensor, count: int) -> Tensor:
    """Different slots [count] of a cache [blocks, block size, ...], in random order."""
    blocks, block_size = cache.shape[:2]
    return permutation(blocks * block_size)[:count]


def starts_of(lens: Sequence[int], first: int = 0) -> Tensor:
    """Indices [rows + 1] of each row's first token, and the end of the last row; the first row
    begins at `first`."""
    return torch.tensor([0, *lens]).cumsum(0) + first
