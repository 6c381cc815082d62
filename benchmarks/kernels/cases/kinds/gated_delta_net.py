"""Gated delta nets: state update, rule over sequences, and the ops around them.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens.
"""

import math
from collections.abc import Iterator

from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from benchmarks.kernels.cases.recurrent import (
    Convolution,
    conv_update,
    conv_varlen,
    fold_case,
    ring_places,
)
from mtpkit.kernels import gated_delta_rule, norm, ring
from tests.kernels.inputs import DeltaSizes, delta_rates, delta_tokens, starts_of

_PER_PAIR = 2.0
"""FLOPs of a multiplication and an addition."""


def decode(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step."""
    yield from (replay(shapes), snapshot(shapes), gated_norm(shapes), fold(shapes))
    yield conv_update(shapes, _convolution(shapes))


def prefill(shapes: Shapes, lens: tuple[int, ...]) -> Iterator[Case]:
    """The ops of prompts."""
    yield from (
        inputs(shapes, sum(lens)),
        varlen(shapes, lens),
        conv_varlen(shapes, lens, _convolution(shapes)),
    )


def base(shapes: Shapes, length: int) -> Iterator[Case]:
    """The ops of a training sequence in the base."""
    yield rule(shapes, length)


def _convolution(shapes: Shapes) -> Convolution:
    sizes = shapes.config.gated_delta_net
    return Convolution(sizes.conv_kernel_dim, sizes.convolved, False)


def _raw(shapes: Shapes, *lead: int) -> tuple[Tensor, ...]:
    """q, k, v, a, b, A_log and dt_bias; the first five are views of the convolution's output and of
    the projection."""
    sizes = shapes.config.gated_delta_net
    heads = sizes.num_value_heads
    layer = DeltaSizes(heads, sizes.value_head_dim, sizes.num_key_heads, sizes.key_head_dim)
    q, k, v = delta_tokens(shapes.normal, *lead, sizes=layer)
    a, b = delta_rates(shapes.normal, *lead, heads=heads, beside=sizes.projected - 2 * heads)
    A_log = shapes.uniform(heads).float().log()
    dt_bias = shapes.normal(heads).float() - 4
    return q, k, v, a, b, A_log, dt_bias


def _state(shapes: Shapes, *lead: int) -> Tensor:
    sizes = shapes.config.gated_delta_net
    widths = sizes.num_value_heads, sizes.value_head_dim, sizes.key_head_dim
    return shapes.normal(*lead, *widths, std=0.1, dtype=shapes.state_dtype)


def _rings(shapes: Shapes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, corrections and log decays of each row's last `length` tokens."""
    sizes = shapes.config.gated_delta_net
    lead = (shapes.rows, length)
    keys = shapes.normal(
        *lead, sizes.num_key_heads, sizes.key_head_dim, std=1 / math.sqrt(sizes.key_head_dim)
    )
    corrections = shapes.normal(*lead, sizes.num_value_heads, sizes.value_head_dim).float()
    return keys, corrections, -0.1 * shapes.uniform(*lead, sizes.num_value_heads).float()


def fold(shapes: Shapes) -> Case:
    """Folding the rings into the states, see `recurrent.fold_case`."""

    def contents(length: int) -> tuple[Tensor, ...]:
        keys, corrections, decays = _rings(shapes, length)
        return _state(shapes, shapes.rows), corrections, keys, decays

    return fold_case(shapes, contents)


def replay(shapes: Shapes) -> Case:
    """The state update that replays the entries of a ring."""
    rows = shapes.rows
    tokens = shapes.tokens
    sizes = shapes.config.gated_delta_net
    length = ring.ring_length(tokens)

    def make() -> Args:
        raw = _raw(shapes, rows, tokens)
        places = ring_places(shapes, length)
        return _state(shapes, rows), *_rings(shapes, length), *places, *raw

    def count(args: Args) -> float:
        state, ring_k, ring_u, ring_g, _, _, lens, q, k, v, a, b, *_ = args
        folded = int((ring.ring_base(lens, tokens, length) == 0).sum() - (lens == 0).sum())
        entry = size(ring_k[0, 0], ring_u[0, 0], ring_g[0, 0])
        moved = size(state) + folded * size(state[0]) + (int(lens.sum()) + rows * tokens) * entry
        return moved + size(q, k, v, v, a, b)

    def whole() -> float:
        return rows * sizes.value_width * sizes.key_head_dim * shapes.state_dtype.itemsize

    op = gated_delta_rule.delta_replay_update
    return Case(
        op, shapes.step, make, count, note=lambda moved: f"{moved / whole():.2f} x the state"
    )


def snapshot(shapes: Shapes) -> Case:
    """The state update that keeps the state after every token."""
    rows = shapes.rows
    tokens = shapes.tokens

    def make() -> Args:
        raw = _raw(shapes, rows, tokens)
        return (
            _state(shapes, rows, tokens),
            shapes.permutation(rows),
            shapes.ints(tokens, rows),
            *raw,
        )

    def count(args: Args) -> float:
        state, _, _, q, k, v, a, b, *_ = args
        return size(state) * (1 + 1 / tokens) + size(q, k, v, v, a, b)

    return Case(gated_delta_rule.delta_snapshot_update, shapes.step, make, count)


def inputs(shapes: Shapes, count: int) -> Case:
    """Making queries and keys of unit length, decays and rates for prompts and training
    sequences."""

    def make() -> Args:
        q, k, _, *rest = _raw(shapes, count)
        return q, k, *rest

    def moved(args: Args) -> float:
        q, k, a, b, *_ = args
        return 2 * size(q, k) + size(a, b) + 2 * 4 * a.numel()

    return Case(gated_delta_rule.delta_inputs, f"{count} tokens", make, moved)


def _made(shapes: Shapes, count: int) -> tuple[Tensor, ...]:
    """q, k, v, g and beta as `delta_inputs` makes them."""
    q, k, v, *rest = _raw(shapes, count)
    q, k, g, beta = gated_delta_rule.delta_inputs(q, k, *rest)
    return q, k, v, g, beta


def _flops(shapes: Shapes, tokens: int) -> float:
    """FLOPs of the recurrence: a key and a query read the state, and one product is added to it."""
    sizes = shapes.config.gated_delta_net
    return 3 * _PER_PAIR * tokens * sizes.value_width * sizes.key_head_dim


def varlen(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """The rule over prompts, each of which continues from a state."""
    rows = len(lens)

    def make() -> Args:
        places = (
            _state(shapes, rows),
            shapes.permutation(rows),
            shapes.full(shapes.context_len, rows),
        )
        return *_made(shapes, sum(lens)), starts_of(lens).to(shapes.device), *places

    def count(args: Args) -> float:
        q, k, v, g, beta, _, states, *_ = args
        return size(q, k, v, v, g, beta, states, states)

    op = gated_delta_rule.delta_varlen
    return Case(op, f"{rows} x {lens[0]}", make, count, flops=_flops(shapes, sum(lens)))


def rule(shapes: Shapes, length: int) -> Case:
    """The rule over a training sequence."""

    def make() -> Args:
        q, *rest = _made(shapes, length)
        return q[:, None], *rest, starts_of((length,)).to(shapes.device)

    def count(args: Args) -> float:
        q, k, v, g, beta, *_ = args
        return size(q, k, v, v, g, beta)

    return Case(
        gated_delta_rule.delta_rule, f"{length} tokens", make, count, flops=_flops(shapes, length)
    )


def gated_norm(shapes: Shapes) -> Case:
    """The norm of each value head, then its gate."""
    config = shapes.config
    sizes = shapes.config.gated_delta_net

    def make() -> Args:
        z = shapes.normal(shapes.count, sizes.projected)[:, sizes.convolved :][
            :, : sizes.value_width
        ]
        x = shapes.normal(shapes.count, sizes.value_width)
        weight = shapes.normal(sizes.value_head_dim)
        return x, z, weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma

    shape = f"[{shapes.count}, {sizes.value_width}]"
    return Case(norm.norm_gate, shape, make, lambda args: size(args[0], args[0], args[1]))
