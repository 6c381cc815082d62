"""Attention through the paged cache, and Mamba's convolution, state update and scan.

Shape legend: R rows (requests), T = 1 + K tokens per row, B blocks per row.
"""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.bench.settings import depth_rates
from mtpkit.config import ModelConfig
from mtpkit.config.sections import Mamba2Config
from mtpkit.kernels import attention, causal_conv1d, kv_store, ring, ring_fold, ssd, ssm_update
from mtpkit.kernels import copy_units as units
from mtpkit.kernels import move_entries as moves
from mtpkit.kernels import place_qkv as placing

_BLOCK = 16


def _cache(shapes: Shapes, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the block tables [R, B] of rows with so many tokens each, the blocks lying anywhere."""
    sizes, blocks = shapes.config.attention, -(-tokens // _BLOCK)
    page = (_BLOCK, sizes.num_query_groups, sizes.kv_channels)
    key, value = (shapes.normal(rows * blocks, *page) for _ in range(2))
    return key, value, shapes.permutation(rows * blocks).view(rows, blocks)


def _cached_bytes(shapes: Shapes, tokens: float) -> float:
    """Keys and values of so many tokens in one layer."""
    sizes = shapes.config.attention
    return 2 * tokens * sizes.num_query_groups * sizes.kv_channels * shapes.dtype.itemsize


def paged_attention(shapes: Shapes) -> Case:
    """Attention of a step."""
    rows, tokens, sizes, context = shapes.rows, shapes.tokens, shapes.config.attention, shapes.context_len
    heads, width = sizes.num_attention_heads, sizes.kv_channels

    def make() -> Args:
        cache = _cache(shapes, rows, context + tokens)
        return shapes.normal(rows, tokens, heads, width), *cache, shapes.full(context, rows)

    return Case(
        attention.paged_attention,
        f"{shapes.step}, {context} before",
        make,
        lambda args: _cached_bytes(shapes, rows * (context + tokens)) + size(args[0], args[0]),
        flops=4.0 * rows * tokens * heads * width * (context + tokens / 2),
    )


def starts_of(shapes: Shapes, lens: tuple[int, ...]) -> Tensor:
    """[R + 1], first token of each prompt and the end of the last one."""
    return torch.tensor([0, *lens], device=shapes.device).cumsum(0)


def prefill_attention(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """Attention of prompts of one length."""
    sizes, length, rows = shapes.config.attention, lens[0], len(lens)
    heads, width = sizes.num_attention_heads, sizes.kv_channels

    def make() -> Args:
        cache = _cache(shapes, rows, length)
        return shapes.normal(rows * length, heads, width), *cache, shapes.full(0, rows), starts_of(shapes, lens)

    return Case(
        attention.prefill_attention,
        f"{rows} x {length}",
        make,
        lambda args: _cached_bytes(shapes, rows * length) + size(args[0], args[0]),
        flops=4.0 * rows * length * heads * width * length / 2,
    )


def store_kv(shapes: Shapes) -> Case:
    """Writing the step's keys and values, each token's to any place."""
    sizes, count = shapes.config.attention, shapes.count

    def make() -> Args:
        key, value, _ = _cache(shapes, shapes.rows, shapes.tokens)  # what lies before them is not touched
        fused = shapes.normal(count, sizes.num_query_groups, 2 * sizes.kv_channels)
        slots = shapes.permutation(len(key) * _BLOCK)[:count]
        return fused[..., : sizes.kv_channels], fused[..., sizes.kv_channels :], key, value, slots

    return Case(kv_store.store_kv, shapes.step, make, lambda args: 2 * _cached_bytes(shapes, count))


def place_qkv(shapes: Shapes) -> Case:
    """Norms and rotation of the step's queries and keys, slices of the projection, and writing keys and values."""
    config, sizes, count = shapes.config, shapes.config.attention, shapes.count
    groups, width = sizes.num_query_groups, sizes.kv_channels
    heads = sizes.num_attention_heads // groups

    def make() -> Args:
        fused = shapes.normal(count, groups, heads + 2, width)
        key, value, _ = _cache(shapes, shapes.rows, shapes.tokens)
        places = shapes.permutation(len(key) * _BLOCK)[:count], shapes.full(shapes.context_len, count)
        rotates = sizes.position_embedding_type != "none"
        turns = shapes.normal(int(width * sizes.rotary_percent) // 2).float() if rotates else None
        norms = (shapes.normal(width), shapes.normal(width)) if sizes.qk_layernorm else (None, None)
        rest = *norms, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        return fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1], key, value, *places, turns, *rest

    return Case(placing.place_qkv, shapes.step, make, lambda args: 2 * size(*args[:3]))


def move_entries(shapes: Shapes) -> Case:
    """Moving a step's keys and values to where those of an accepted path belong; here all of them."""
    sizes, rows, tokens = shapes.config.attention, shapes.rows, shapes.tokens

    def make() -> Args:
        key, value, _ = _cache(shapes, rows, tokens)
        places = shapes.permutation(len(key) * _BLOCK)[: shapes.count].view(rows, tokens)
        return places.roll(1, 1), places, key.flatten(0, 1), value.flatten(0, 1)

    note = f"[{sizes.num_query_groups}, {sizes.kv_channels}] each"
    return Case(
        moves.move_entries, f"{shapes.step}, {note}", make, lambda args: 2 * _cached_bytes(shapes, shapes.count)
    )


_ACCEPTANCE = (0.85,)
"""Conditional rates from which the fill of the replay rings follows."""


def ring_lens(shapes: Shapes, length: int) -> Tensor:
    """[R] int64 entries of replay rings of `length` places after many steps, each row's drawn for itself. Rows began at
    different times: otherwise, without drafts, all would fold their rings in the same step."""
    rates = torch.tensor(depth_rates(_ACCEPTANCE, shapes.k), dtype=torch.float64, device=shapes.device)
    lens = 1 + shapes.ints(ring.ring_capacity(length), shapes.rows)
    for _ in range(4 * length):
        accepted = (shapes.uniform(shapes.rows, shapes.k) < rates).long().cumprod(-1).sum(-1)
        lens = ring.ring_base(lens, shapes.tokens, length) + accepted + 1
    return lens.clamp_max(shapes.context_len)


def scan_inputs(shapes: Shapes, *lead: int) -> Args:
    """x, dt, A_log, B, C, D, dt_bias and the range of dt.

    x, dt, B and C [*lead, ...] are views of the projection and of the convolution's output.
    """
    sizes = shapes.config.mamba2
    heads, groups, inner, bc_width = sizes.num_heads, sizes.num_groups, sizes.inner, sizes.bc_width
    dt = shapes.normal(*lead, 2 * inner + 2 * bc_width + heads)[..., -heads:]
    x, B, C = shapes.normal(*lead, inner + 2 * bc_width).split([inner, bc_width, bc_width], -1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    A_log = (1 + 15 * shapes.uniform(heads, dtype=torch.float32)).log()
    D, dt_bias = torch.ones(heads, device=shapes.device), shapes.normal(heads) - 4
    return x, dt, A_log, B, C, D, dt_bias, sizes.dt_limit


def _state_shape(config: ModelConfig) -> tuple[int, int, int]:
    return config.mamba2.num_heads, config.mamba2.head_dim, config.mamba2.state_dim


def _state(shapes: Shapes, *lead: int) -> Tensor:
    return shapes.normal(*lead, *_state_shape(shapes.config), dtype=shapes.state_dtype)


def fold_case(shapes: Shapes, contents: Callable[[int], tuple[Tensor, ...]]) -> Case:
    """Folding the entries of all rows' rings into their states, as a checkpoint of the prefix cache has them.

    Args:
        contents: given L, state [R, h, p, n], values [R, L, h, p], keys [R, L, g, n], rates [R, L, h], perhaps A_log.
    """
    rows, length = shapes.rows, ring.ring_length(shapes.tokens)

    def make() -> Args:
        state, values, keys, rates, *A_log = contents(length)
        places = (shapes.permutation(rows), shapes.full(shapes.context_len, rows), ring_lens(shapes, length))
        return state, values, keys, rates, *places, *A_log

    def count(args: Args) -> float:
        state, values, keys, rates, _, _, lens, *_ = args
        return 2 * size(state) + int(lens.sum()) * size(values[0, 0], keys[0, 0], rates[0, 0])

    return Case(ring_fold.fold_ring, f"R = {rows}, {length} places", make, count)


def ssm_fold(shapes: Shapes) -> Case:
    """Folding the ring of a Mamba2 layer, which holds step sizes too."""

    def contents(length: int) -> tuple[Tensor, ...]:
        x, _, A_log, B, *_ = scan_inputs(shapes, shapes.rows, length)
        dt = 0.1 * shapes.uniform(shapes.rows, length, shapes.config.mamba2.num_heads, dtype=torch.float32)
        return _state(shapes, shapes.rows), x.contiguous(), B.contiguous(), dt, A_log

    return fold_case(shapes, contents)


def leave_state(shapes: Shapes) -> Case:
    """Copying the rows' states of a Mamba2 layer to checkpoints of the prefix cache."""

    def make() -> Args:
        rows = shapes.rows
        return shapes.permutation(rows), shapes.permutation(rows), _state(shapes, rows), _state(shapes, rows)

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


def ssm_replay(shapes: Shapes) -> Case:
    """The state update that replays the entries of a ring."""
    rows, tokens, config = shapes.rows, shapes.tokens, shapes.config
    length = ring.ring_length(tokens)

    def make() -> Args:
        x, _, _, B, *_ = inputs = scan_inputs(shapes, rows, tokens)
        ring_dt = 0.1 * shapes.uniform(rows, length, config.mamba2.num_heads, dtype=torch.float32)
        rings = (shapes.normal(rows, length, *x.shape[2:]), shapes.normal(rows, length, *B.shape[2:]), ring_dt)
        places = (shapes.permutation(rows), shapes.full(shapes.context_len, rows), ring_lens(shapes, length))
        return _state(shapes, rows), *rings, *places, *inputs

    def count(args: Args) -> float:
        state, ring_x, ring_B, ring_dt, _, _, lens, x, dt, _, B, C, *_ = args
        folded = int((ring.ring_base(lens, tokens, length) == 0).sum() - (lens == 0).sum())
        entry = size(ring_x[0, 0], ring_B[0, 0], ring_dt[0, 0])
        return size(state) + folded * size(state[0]) + (int(lens.sum()) + rows * tokens) * entry + size(x, x, dt, B, C)

    whole = rows * math.prod(_state_shape(config)) * shapes.state_dtype.itemsize
    return Case(
        ssm_update.ssm_replay_update, shapes.step, make, count, note=lambda moved: f"{moved / whole:.2f} x the state"
    )


def ssm_snapshot(shapes: Shapes) -> Case:
    """The state update that keeps the state after every token."""
    rows, tokens = shapes.rows, shapes.tokens

    def make() -> Args:
        inputs = scan_inputs(shapes, rows, tokens)
        places = (shapes.permutation(rows), shapes.ints(tokens, rows))
        return _state(shapes, rows, tokens), *places, *inputs

    def count(args: Args) -> float:
        state, _, _, x, dt, _, B, C, *_ = args
        return size(state) * (1 + 1 / tokens) + size(x, x, dt, B, C)

    return Case(ssm_update.ssm_snapshot_update, shapes.step, make, count)


def _conv(shapes: Shapes) -> tuple[int, int, bool]:
    """Width and channels of the convolution, and whether it has a bias."""
    mamba, delta = shapes.config.mamba2, shapes.config.gated_delta_net
    if shapes.config.has(Mamba2Config):
        return mamba.conv_kernel, mamba.inner + 2 * mamba.bc_width, True
    return delta.conv_kernel_dim, delta.convolved, False


def conv_update(shapes: Shapes) -> Case:
    """The convolution of a step."""
    rows, tokens = shapes.rows, shapes.tokens
    width, channels, biased = _conv(shapes)

    def make() -> Args:
        x = shapes.normal(rows, tokens, channels + 64)[..., 32 : 32 + channels]  # between z and dt of the projection
        state = shapes.normal(rows, width - 2 + tokens, channels)
        weight, bias = shapes.normal(channels, 1, width, std=0.3), shapes.normal(channels) if biased else None
        return x, state, weight, bias, shapes.permutation(rows), shapes.ints(tokens, rows)

    def count(args: Args) -> float:
        x, state, weight, bias, *_ = args
        return size(x, x, state, state[:, : width - 1], weight, bias)

    return Case(causal_conv1d.causal_conv1d_update, shapes.step, make, count)


def conv_varlen(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """The convolution of prompts, each after a window."""
    (width, channels, biased), rows = _conv(shapes), len(lens)

    def make() -> Args:
        x = shapes.normal(sum(lens), channels + 64)[:, 32 : 32 + channels]
        weights = (shapes.normal(channels, 1, width, std=0.3), shapes.normal(channels) if biased else None)
        windows = shapes.normal(rows, width - 1, channels)
        places = (shapes.permutation(rows), shapes.full(shapes.context_len, rows))
        return x, *weights, starts_of(shapes, lens), windows, *places

    return Case(
        causal_conv1d.causal_conv1d_varlen,
        f"{rows} x {lens[0]}",
        make,
        lambda args: size(args[0], args[0], args[4], args[4]),
    )


def ssd_varlen(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """The scan over prompts, each after a state."""
    config, rows = shapes.config, len(lens)

    def make() -> Args:
        places = _state(shapes, rows), shapes.permutation(rows), shapes.full(shapes.context_len, rows)
        return *scan_inputs(shapes, sum(lens)), starts_of(shapes, lens), config.mamba2.chunk_size, *places

    def count(args: Args) -> float:
        x, dt, _, B, C, *_ = args
        return size(x, x, dt, B, C, args[10], args[10])

    flops = 4.0 * sum(lens) * math.prod(_state_shape(config))
    return Case(ssd.ssd_varlen, f"{rows} x {lens[0]}", make, count, flops=flops)
