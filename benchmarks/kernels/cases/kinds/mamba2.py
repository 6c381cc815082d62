"""Mamba2: state update, scan, and the ops around them.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens.
"""

import inspect
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels.case import Args, Case, Shapes, size
from benchmarks.kernels.cases.recurrent import (
    Convolution,
    conv_update,
    conv_varlen,
    fold_case,
    ring_places,
)
from benchmarks.kernels.cases.training import differentiated
from mtpkit.config import ModelConfig
from mtpkit.kernels import copy_units as units
from mtpkit.kernels import norm, ring, rounding, ssd, ssm_update
from tests.kernels.inputs import MambaSizes, last_columns, mamba_tokens, starts_of


def decode(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step."""
    yield from (replay(shapes), snapshot(shapes), conv_update(shapes, _convolution(shapes)))
    yield from (gated_norm(shapes), fold(shapes), leave_state(shapes), narrow_state(shapes))


def prefill(shapes: Shapes, lens: tuple[int, ...]) -> Iterator[Case]:
    """The ops of prompts."""
    yield from (conv_varlen(shapes, lens, _convolution(shapes)), varlen(shapes, lens))


def heads(shapes: Shapes, length: int) -> Iterator[Case]:
    """The ops of a training sequence in the MTP heads."""
    yield scan(shapes, length)


def _convolution(shapes: Shapes) -> Convolution:
    sizes = shapes.config.mamba2
    return Convolution(sizes.conv_kernel, sizes.inner + 2 * sizes.bc_width, True)


def scan_inputs(shapes: Shapes, *lead: int) -> Args:
    """x, dt, A_log, B, C, D, dt_bias and the range of dt.

    x, dt, B and C [*lead, ...] are views of the projection and of the convolution's output.
    """
    sizes = shapes.config.mamba2
    heads = sizes.num_heads
    dt = last_columns(
        shapes.normal, *lead, width=heads, beside=2 * sizes.inner + 2 * sizes.bc_width
    )
    layer = MambaSizes(heads, sizes.head_dim, sizes.num_groups, sizes.state_dim)
    x, B, C = mamba_tokens(shapes.normal, *lead, sizes=layer)
    A_log = (1 + 15 * shapes.uniform(heads, dtype=torch.float32)).log()
    D = torch.ones(heads, device=shapes.device)
    dt_bias = shapes.normal(heads) - 4
    return x, dt, A_log, B, C, D, dt_bias, sizes.dt_limit


def _state_shape(config: ModelConfig) -> tuple[int, int, int]:
    return config.mamba2.num_heads, config.mamba2.head_dim, config.mamba2.state_dim


def _state(shapes: Shapes, *lead: int) -> Tensor:
    return shapes.normal(*lead, *_state_shape(shapes.config), dtype=shapes.state_dtype)


def fold(shapes: Shapes) -> Case:
    """Folding the ring of a Mamba2 layer, which holds step sizes too."""

    def contents(length: int) -> tuple[Tensor, ...]:
        x, _, A_log, B, *_ = scan_inputs(shapes, shapes.rows, length)
        dt = 0.1 * shapes.uniform(
            shapes.rows, length, shapes.config.mamba2.num_heads, dtype=torch.float32
        )
        return _state(shapes, shapes.rows), x.contiguous(), B.contiguous(), dt, A_log

    return fold_case(shapes, contents)


def leave_state(shapes: Shapes) -> Case:
    """Copying the rows' states of a Mamba2 layer to checkpoints of the prefix cache."""

    def make() -> Args:
        rows = shapes.rows
        return (
            shapes.permutation(rows),
            shapes.permutation(rows),
            _state(shapes, rows),
            _state(shapes, rows),
        )

    def over_pairs(op: Callable[..., None]) -> Callable[..., None]:
        return lambda sources, targets, *pair: op(sources, targets, pair)

    return Case(
        over_pairs(units.copy_units),
        f"R = {shapes.rows}, {list(_state_shape(shapes.config))} each",
        make,
        lambda args: size(*args[2:]),
        name="copy_units",
        reference=over_pairs(inspect.unwrap(units.copy_units)),
    )


def narrow_state(shapes: Shapes) -> Case:
    """Rounding the rows' states of a Mamba2 layer to float16 in the prefix cache."""

    def make() -> Args:
        rows = shapes.rows
        kept = _state(shapes, rows).half()
        positions = shapes.ints(shapes.context_len, rows)
        noise = rounding.Noise(shapes.permutation(rows), 0, 0, positions)
        places = shapes.permutation(rows)
        return places, shapes.permutation(rows), _state(shapes, rows).float(), kept, noise

    return Case(
        rounding.narrow_units,
        f"R = {shapes.rows}, {list(_state_shape(shapes.config))} each",
        make,
        lambda args: size(args[2], args[3]),
    )


def replay(shapes: Shapes) -> Case:
    """The state update that replays the entries of a ring."""
    rows = shapes.rows
    tokens = shapes.tokens
    config = shapes.config
    length = ring.ring_length(tokens)

    def make() -> Args:
        x, _, _, B, *_ = inputs = scan_inputs(shapes, rows, tokens)
        ring_dt = 0.1 * shapes.uniform(rows, length, config.mamba2.num_heads, dtype=torch.float32)
        rings = (
            shapes.normal(rows, length, *x.shape[2:]),
            shapes.normal(rows, length, *B.shape[2:]),
            ring_dt,
        )
        places = ring_places(shapes, length)
        return _state(shapes, rows), *rings, *places, *inputs

    def count(args: Args) -> float:
        state, ring_x, ring_B, ring_dt, _, _, lens, x, dt, _, B, C, *_ = args
        folded = int((ring.ring_base(lens, tokens, length) == 0).sum() - (lens == 0).sum())
        entry = size(ring_x[0, 0], ring_B[0, 0], ring_dt[0, 0])
        return (
            size(state)
            + folded * size(state[0])
            + (int(lens.sum()) + rows * tokens) * entry
            + size(x, x, dt, B, C)
        )

    whole = rows * math.prod(_state_shape(config)) * shapes.state_dtype.itemsize
    return Case(
        ssm_update.ssm_replay_update,
        shapes.step,
        make,
        count,
        note=lambda moved: f"{moved / whole:.2f} x the state",
    )


def snapshot(shapes: Shapes) -> Case:
    """The state update that keeps the state after every token."""
    rows = shapes.rows
    tokens = shapes.tokens

    def make() -> Args:
        inputs = scan_inputs(shapes, rows, tokens)
        places = (shapes.permutation(rows), shapes.ints(tokens, rows))
        return _state(shapes, rows, tokens), *places, *inputs

    def count(args: Args) -> float:
        state, _, _, x, dt, _, B, C, *_ = args
        return size(state) * (1 + 1 / tokens) + size(x, x, dt, B, C)

    return Case(ssm_update.ssm_snapshot_update, shapes.step, make, count)


def varlen(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """The scan over prompts, each of which continues from a state."""
    config = shapes.config
    rows = len(lens)

    def make() -> Args:
        places = (
            _state(shapes, rows),
            shapes.permutation(rows),
            shapes.full(shapes.context_len, rows),
        )
        return (
            *scan_inputs(shapes, sum(lens)),
            starts_of(lens).to(shapes.device),
            config.mamba2.chunk_size,
            *places,
        )

    def count(args: Args) -> float:
        x, dt, _, B, C, *_ = args
        return size(x, x, dt, B, C, args[10], args[10])

    flops = 4.0 * sum(lens) * math.prod(_state_shape(config))
    return Case(ssd.ssd_varlen, f"{rows} x {lens[0]}", make, count, flops=flops)


def scan(shapes: Shapes, length: int) -> Case:
    """The scan of Mamba2 at depth 1, and its backward."""
    sizes = shapes.config.mamba2
    starts = starts_of((length,)).to(shapes.device)

    def split(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return differentiated(
            lambda *tensors: function(*tensors, sizes.dt_limit, starts, sizes.chunk_size)
        )

    def moved(args: Args) -> float:
        x, dt, _, B, C, *_ = args
        return size(x, x, dt, B, C) + size(x, x, x, dt, dt, B, B, C, C)

    return Case(
        split(ssd.ssd_scan),
        f"s = {length}, with backward",
        lambda: scan_inputs(shapes, length)[:-1],
        moved,
        # A token adds to a state and reads it; both products have a gradient for each factor.
        flops=3 * 4.0 * length * sizes.inner * sizes.state_dim,
        name="ssd_scan",
        reference=split(inspect.unwrap(ssd.ssd_scan)),
        # Gradients of rates are fp32 sums of products that are rounded to the dtype of x.
        tolerance=2e-2 if shapes.dtype == torch.bfloat16 else None,
    )


def gated_norm(shapes: Shapes) -> Case:
    """The norm before Mamba's output projection, which no linear fuses."""
    config = shapes.config
    count = shapes.count
    inner = config.mamba2.inner

    def make() -> Args:
        group_size = inner // config.mamba2.num_groups
        x = shapes.normal(count, inner)
        gate = shapes.normal(count, config.mamba2.projected)[:, :inner]
        return x, gate, shapes.normal(inner), group_size, config.layernorm_epsilon

    return Case(norm.gated_rms_norm, f"[{count}, {inner}]", make, lambda args: size(args[0], *args))
