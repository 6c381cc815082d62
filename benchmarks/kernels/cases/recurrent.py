"""Cases that recurrent layers share: convolution, replay rings, and starts of sequences.

Shape legend: R rows (requests), T = 1 + K tokens per row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from mtpkit.bench.settings import depth_rates
from mtpkit.kernels import causal_conv1d, ring, ring_fold
from tests.kernels.inputs import conv_parameters, starts_of

_ACCEPTANCE = (0.85,)
"""Conditional rates from which the fill of the replay rings follows."""


def ring_lens(shapes: Shapes, length: int) -> Tensor:
    """Numbers of entries, [R] int64, in replay rings of `length` places after many steps, drawn for
    each row by itself. Rows began at different times: otherwise, without drafts, all would fold
    their rings in the same step."""
    rates = torch.tensor(
        depth_rates(_ACCEPTANCE, shapes.k), dtype=torch.float64, device=shapes.device
    )
    lens = 1 + shapes.ints(ring.ring_capacity(length), shapes.rows)
    for _ in range(4 * length):
        accepted = (shapes.uniform(shapes.rows, shapes.k) < rates).long().cumprod(-1).sum(-1)
        lens = ring.ring_base(lens, shapes.tokens, length) + accepted + 1
    return lens.clamp_max(shapes.context_len)


def ring_places(shapes: Shapes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, context lengths and numbers of ring entries of all rows, each [R] int64."""
    rows = shapes.rows
    return (
        shapes.permutation(rows),
        shapes.full(shapes.context_len, rows),
        ring_lens(shapes, length),
    )


def fold_case(shapes: Shapes, contents: Callable[[int], tuple[Tensor, ...]]) -> Case:
    """Folding the entries of all rows' rings into their states, as for a checkpoint of the prefix
    cache.

    Args:
        contents: given L, makes state [R, h, p, n], values [R, L, h, p], keys [R, L, g, n], rates
            [R, L, h] and, for some layers, A_log.
    """
    rows = shapes.rows
    length = ring.ring_length(shapes.tokens)

    def make() -> Args:
        state, values, keys, rates, *A_log = contents(length)
        return state, values, keys, rates, *ring_places(shapes, length), *A_log

    def count(args: Args) -> float:
        state, values, keys, rates, _, _, lens, *_ = args
        return 2 * size(state) + int(lens.sum()) * size(values[0, 0], keys[0, 0], rates[0, 0])

    return Case(ring_fold.fold_ring, f"R = {rows}, {length} places", make, count)


class Convolution(NamedTuple):
    """Sizes of a causal convolution of each channel by itself."""

    width: int
    channels: int
    biased: bool


def _projected(shapes: Shapes, *lead: int, channels: int) -> Tensor:
    """Inputs [*lead, channels] of a convolution, which stand between z and dt of the
    projection."""
    return shapes.normal(*lead, channels + 64)[..., 32 : 32 + channels]


def conv_update(shapes: Shapes, sizes: Convolution) -> Case:
    """The convolution of a step."""
    rows = shapes.rows
    tokens = shapes.tokens
    width, channels, biased = sizes

    def make() -> Args:
        x = _projected(shapes, rows, tokens, channels=channels)
        state = shapes.normal(rows, width - 2 + tokens, channels)
        weights = conv_parameters(shapes.normal, channels, width, biased)
        return x, state, *weights, shapes.permutation(rows), shapes.ints(tokens, rows)

    def count(args: Args) -> float:
        x, state, weight, bias, *_ = args
        return size(x, x, state, state[:, : width - 1], weight, bias)

    return Case(causal_conv1d.causal_conv1d_update, shapes.step, make, count)


def conv_varlen(shapes: Shapes, lens: tuple[int, ...], sizes: Convolution) -> Case:
    """The convolution of prompts, each of which continues a window of earlier inputs."""
    width, channels, biased = sizes
    rows = len(lens)

    def make() -> Args:
        x = _projected(shapes, sum(lens), channels=channels)
        weights = conv_parameters(shapes.normal, channels, width, biased)
        windows = shapes.normal(rows, width - 1, channels)
        places = (shapes.permutation(rows), shapes.full(shapes.context_len, rows))
        return x, *weights, starts_of(lens).to(shapes.device), windows, *places

    return Case(
        causal_conv1d.causal_conv1d_varlen,
        f"{rows} x {lens[0]}",
        make,
        lambda args: size(args[0], args[0], args[4], args[4]),
    )
