"""Every op of a decode or a prefill step with inputs as a model's layers give them.

Shape legend: R rows (requests), T = 1 + K tokens a row, N = R * T tokens, h hidden size, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.bench.roofline import depth_rates, layer_matrices
from mtpkit.config import ModelConfig
from mtpkit.kernels import (
    acceptance,
    activation,
    attention,
    causal_conv1d,
    draft_head,
    kv_store,
    mtp_input,
    norm,
    sampling,
    ssd,
    ssm_update,
)
from mtpkit.kernels.linear import linear

_BLOCK = 16
_PREFILL_ROWS = 16
_ACCEPTANCE = (0.85,)
"""Conditional rates from which the fill of the replay rings follows."""


def decode_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step of `rows` decoding requests."""
    pattern = shapes.config.pattern + shapes.config.mtp_pattern
    if "M" in pattern:
        yield from (_ssm_replay(shapes), _ssm_snapshot(shapes), _conv_update(shapes), _gated_norm(shapes))
    if "*" in pattern:
        yield from (_paged_attention(shapes), _store_kv(shapes))
    yield from (_rms_norm(shapes), _add_rms_norm(shapes))
    if "-" in pattern:
        yield _activation(shapes)
    if shapes.config.mtp_num_depths:
        yield from (_mtp_input(shapes), _linear_argmax(shapes))
    yield from (_argmax(shapes), _probabilities(shapes), _sample_logits(shapes))
    if shapes.k:
        yield from (_accept_matching(shapes), _accept_rejection(shapes))
    yield from _linears(shapes)


def prefill_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step of prompts, 16 of `context_len` tokens; whatever `rows` is. Such steps are not captured."""
    pattern = shapes.config.pattern + shapes.config.mtp_pattern
    if "*" in pattern:
        yield replace(_prefill_attention(shapes), capture=False)
    if "M" in pattern:
        yield from (replace(case, capture=False) for case in (_conv_varlen(shapes), _ssd_varlen(shapes)))


def ring_lens(shapes: Shapes, length: int) -> Tensor:
    """[R] int64 entries of replay rings after many steps, each row's drawn for itself."""
    rates = torch.tensor(depth_rates(_ACCEPTANCE, shapes.k), dtype=torch.float64, device=shapes.device)
    lens = shapes.full(0, shapes.rows)
    for _ in range(4 * length):
        accepted = (shapes.uniform(shapes.rows, shapes.k) < rates).long().cumprod(-1).sum(-1)
        lens = ssm_update.ring_base(lens, shapes.tokens, length) + accepted + 1
    return lens.clamp_max(shapes.context_len)


def _mamba_inputs(shapes: Shapes, *lead: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, dt, B, C and z [*lead, ...], as views of the projection and of the convolution's output."""
    config = shapes.config
    heads, groups = config.mamba_num_heads, config.mamba_num_groups
    inner, bc_width = heads * config.mamba_head_dim, groups * config.mamba_state_dim
    projected = shapes.normal(*lead, 2 * inner + 2 * bc_width + heads)
    x, B, C = shapes.normal(*lead, inner + 2 * bc_width).split([inner, bc_width, bc_width], -1)
    by_group = (groups, config.mamba_state_dim)
    x = x.unflatten(-1, (heads, config.mamba_head_dim))
    return x, projected[..., -heads:], B.unflatten(-1, by_group), C.unflatten(-1, by_group), projected[..., :inner]


def _mamba_parameters(shapes: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """A_log, D, dt_bias."""
    heads = shapes.config.mamba_num_heads
    A_log = (1 + 15 * shapes.uniform(heads, dtype=torch.float32)).log()
    return A_log, torch.ones(heads, device=shapes.device), shapes.normal(heads) - 4


def _state_shape(config: ModelConfig) -> tuple[int, int, int]:
    return config.mamba_num_heads, config.mamba_head_dim, config.mamba_state_dim


def _state(shapes: Shapes, *lead: int) -> Tensor:
    return shapes.normal(*lead, *_state_shape(shapes.config), dtype=shapes.state_dtype)


def _ssm_replay(shapes: Shapes) -> Case:
    rows, tokens, config = shapes.rows, shapes.tokens, shapes.config
    length = 5 * (1 << (max(4, tokens) - 1).bit_length())  # as `CacheLayout.ring_length`

    def make() -> Args:
        x, dt, B, C, _ = _mamba_inputs(shapes, rows, tokens)
        A_log, D, dt_bias = _mamba_parameters(shapes)
        ring_dt = 0.1 * shapes.uniform(rows, length, config.mamba_num_heads, dtype=torch.float32)
        rings = (shapes.normal(rows, length, *x.shape[2:]), shapes.normal(rows, length, *B.shape[2:]), ring_dt)
        places = (shapes.permutation(rows), shapes.full(shapes.context_len, rows), ring_lens(shapes, length))
        return _state(shapes, rows), *rings, *places, x, dt, A_log, B, C, D, dt_bias, config.mamba_dt_limit

    def count(args: Args) -> float:
        state, ring_x, ring_B, ring_dt, _, _, lens, x, dt, _, B, C, *_ = args
        folded = int((ssm_update.ring_base(lens, tokens, length) == 0).sum() - (lens == 0).sum())
        entry = size(ring_x[0, 0], ring_B[0, 0], ring_dt[0, 0])
        return size(state) + folded * size(state[0]) + (int(lens.sum()) + rows * tokens) * entry + size(x, x, dt, B, C)

    whole = rows * math.prod(_state_shape(config)) * shapes.state_dtype.itemsize
    return Case(
        ssm_update.ssm_replay_update, shapes.step, make, count, note=lambda moved: f"{moved / whole:.2f} x the state"
    )


def _ssm_snapshot(shapes: Shapes) -> Case:
    rows, tokens = shapes.rows, shapes.tokens

    def make() -> Args:
        x, dt, B, C, _ = _mamba_inputs(shapes, rows, tokens)
        A_log, D, dt_bias = _mamba_parameters(shapes)
        places = (shapes.permutation(rows), shapes.ints(tokens, rows))
        return _state(shapes, rows, tokens), *places, x, dt, A_log, B, C, D, dt_bias, shapes.config.mamba_dt_limit

    def count(args: Args) -> float:
        state, _, _, x, dt, _, B, C, *_ = args
        return size(state) * (1 + 1 / tokens) + size(x, x, dt, B, C)

    return Case(ssm_update.ssm_snapshot_update, shapes.step, make, count)


def _conv_dim(config: ModelConfig) -> int:
    return config.mamba_num_heads * config.mamba_head_dim + 2 * config.mamba_num_groups * config.mamba_state_dim


def _conv_update(shapes: Shapes) -> Case:
    rows, tokens, config = shapes.rows, shapes.tokens, shapes.config
    width, channels = config.mamba_conv_kernel, _conv_dim(config)

    def make() -> Args:
        x = shapes.normal(rows, tokens, channels + 64)[..., 32 : 32 + channels]  # between z and dt of the projection
        state = shapes.normal(rows, width - 2 + tokens, channels)
        weight, bias = shapes.normal(channels, 1, width, std=0.3), shapes.normal(channels)
        return x, state, weight, bias, shapes.permutation(rows), shapes.ints(tokens, rows)

    def count(args: Args) -> float:
        x, state, weight, bias, *_ = args
        return size(x, x, state, state[:, : width - 1], weight, bias)

    return Case(causal_conv1d.causal_conv1d_update, shapes.step, make, count)


def _gated_norm(shapes: Shapes) -> Case:
    config = shapes.config
    inner = config.mamba_num_heads * config.mamba_head_dim

    def make() -> Args:
        x, _, _, _, z = _mamba_inputs(shapes, shapes.rows * shapes.tokens)
        weight = shapes.normal(inner)
        return x.flatten(-2).contiguous(), z, weight, inner // config.mamba_num_groups, config.layernorm_epsilon

    return Case(norm.gated_rms_norm, f"[{shapes.rows * shapes.tokens}, {inner}]", make, _in_and_out)


def _in_and_out(args: Args) -> float:
    """Bytes of an op that gives something like its first input and reads all tensors."""
    return size(args[0], *(arg for arg in args if isinstance(arg, Tensor)))


def _cache(shapes: Shapes, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the block tables [R, B] of rows with so many tokens each, the blocks lying anywhere."""
    config, blocks = shapes.config, -(-tokens // _BLOCK)
    page = (_BLOCK, config.num_query_groups, config.kv_channels)
    key, value = (shapes.normal(rows * blocks, *page) for _ in range(2))
    return key, value, shapes.permutation(rows * blocks).view(rows, blocks)


def _cached_bytes(shapes: Shapes, tokens: float) -> float:
    """Keys and values of so many tokens in one layer."""
    return 2 * tokens * shapes.config.num_query_groups * shapes.config.kv_channels * shapes.dtype.itemsize


def _paged_attention(shapes: Shapes) -> Case:
    rows, tokens, config, context = shapes.rows, shapes.tokens, shapes.config, shapes.context_len
    heads, width = config.num_attention_heads, config.kv_channels

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


def _prefill_attention(shapes: Shapes) -> Case:
    config, length, rows = shapes.config, shapes.context_len, _PREFILL_ROWS
    heads, width = config.num_attention_heads, config.kv_channels

    def make() -> Args:
        cache = _cache(shapes, rows, length)
        query_start = torch.arange(0, rows * length + 1, length, device=shapes.device)
        q = shapes.normal(rows * length, heads, width)
        return q, *cache, shapes.full(0, rows), query_start, (length,) * rows

    return Case(
        attention.prefill_attention,
        f"{rows} x {length}",
        make,
        lambda args: _cached_bytes(shapes, rows * length) + size(args[0], args[0]),
        flops=4.0 * rows * length * heads * width * length / 2,
    )


def _store_kv(shapes: Shapes) -> Case:
    rows, tokens, config = shapes.rows, shapes.tokens, shapes.config
    count = rows * tokens

    def make() -> Args:
        key, value, _ = _cache(shapes, rows, shapes.context_len + tokens)
        fused = shapes.normal(count, config.num_query_groups, 2 * config.kv_channels)
        slots = shapes.permutation(len(key) * _BLOCK)[:count]
        return fused[..., : config.kv_channels], fused[..., config.kv_channels :], key, value, slots

    return Case(kv_store.store_kv, shapes.step, make, lambda args: 2 * _cached_bytes(shapes, count))


def _rms_norm(shapes: Shapes) -> Case:
    count, hidden, eps = shapes.rows * shapes.tokens, shapes.config.hidden_size, shapes.config.layernorm_epsilon
    return Case(
        norm.rms_norm,
        f"[{count}, {hidden}]",
        lambda: (shapes.normal(count, hidden), shapes.normal(hidden), eps),
        _in_and_out,
    )


def _add_rms_norm(shapes: Shapes) -> Case:
    count, hidden, eps = shapes.rows * shapes.tokens, shapes.config.hidden_size, shapes.config.layernorm_epsilon
    return Case(
        norm.add_rms_norm,
        f"[{count}, {hidden}]",
        lambda: (shapes.normal(count, hidden), shapes.normal(count, hidden), shapes.normal(hidden), eps),
        lambda args: _in_and_out(args) + size(args[0]),
    )


def _activation(shapes: Shapes) -> Case:
    count, width = shapes.rows * shapes.tokens, shapes.config.ffn_hidden_size
    if shapes.config.activation == "swiglu":
        return Case(
            activation.swiglu,
            f"[{count}, {2 * width}]",
            lambda: (shapes.normal(count, 2 * width),),
            lambda args: 1.5 * size(args[0]),
        )
    return Case(activation.relu2, f"[{count}, {width}]", lambda: (shapes.normal(count, width),), _in_and_out)


def _mtp_input(shapes: Shapes) -> Case:
    config, count = shapes.config, shapes.rows * shapes.tokens
    hidden, vocab_size = config.hidden_size, config.vocab_size

    def make() -> Args:
        weights = (shapes.normal(vocab_size, hidden), shapes.normal(hidden), shapes.normal(hidden))
        return shapes.ints(vocab_size, count), shapes.normal(count, hidden), *weights, config.layernorm_epsilon

    return Case(mtp_input.mtp_input, f"[{count}, {2 * hidden}]", make, lambda args: 4 * size(args[1]))


def _linear_argmax(shapes: Shapes) -> Case:
    rows, hidden = shapes.rows, shapes.config.hidden_size
    vocab_size = shapes.draft_vocab_size or shapes.config.vocab_size

    def make() -> Args:
        token_ids = None if shapes.draft_vocab_size is None else torch.arange(vocab_size, device=shapes.device)
        return shapes.normal(rows, hidden), shapes.normal(vocab_size, hidden, std=hidden**-0.5), token_ids

    return Case(
        draft_head.linear_argmax,
        f"[{rows}, {hidden}] x [{vocab_size}, {hidden}]",
        make,
        lambda args: size(args[0], args[1]),
        flops=2.0 * rows * hidden * vocab_size,
        judge=lambda args, tokens: (args[0].float() * args[1][tokens].float()).sum(-1),
        tolerance=1e-2,
    )


def _logits(shapes: Shapes) -> Tensor:
    return shapes.normal(shapes.rows * shapes.tokens, shapes.config.vocab_size, std=3)


def _vocabulary(shapes: Shapes) -> str:
    return f"[{shapes.rows * shapes.tokens}, {shapes.config.vocab_size}]"


def _argmax(shapes: Shapes) -> Case:
    return Case(
        draft_head.argmax,
        _vocabulary(shapes),
        lambda: (_logits(shapes),),
        lambda args: size(args[0]),
        judge=lambda args, tokens: args[0].gather(-1, tokens[:, None]),
    )


def _filters(shapes: Shapes) -> tuple[Tensor, Tensor, Tensor, None]:
    """temperature, top_k, top_p and min_p of each logits row."""
    count = shapes.rows * shapes.tokens
    ones = torch.ones(count, device=shapes.device)
    return 0.8 * ones, shapes.full(min(50, shapes.config.vocab_size), count), 0.95 * ones, None


def _probabilities(shapes: Shapes) -> Case:
    def count(args: Args) -> float:
        return size(args[0]) + 4 * args[0].numel()

    shape = f"{_vocabulary(shapes)}, top-k, top-p"
    return Case(sampling.probabilities, shape, lambda: (_logits(shapes), *_filters(shapes)), count)


def _sample_logits(shapes: Shapes) -> Case:
    def make() -> Args:
        return _logits(shapes), *_filters(shapes), shapes.uniform(shapes.rows * shapes.tokens)

    # A number that falls on the edge between two tokens may fall on either side.
    shape = f"{_vocabulary(shapes)}, top-k, top-p"
    return Case(sampling.sample_logits, shape, make, lambda args: size(args[0]), tolerance=0.02)


def _accept_matching(shapes: Shapes) -> Case:
    def make() -> Args:
        chosen = shapes.ints(3, shapes.rows, shapes.tokens)
        return shapes.ints(3, shapes.rows, shapes.k), chosen

    return Case(acceptance.accept_matching, shapes.step, make, lambda args: size(*args, args[1], args[1][:, 0]))


def _accept_rejection(shapes: Shapes) -> Case:
    rows, k, vocab_size = shapes.rows, shapes.k, shapes.config.vocab_size

    def make() -> Args:
        target = shapes.normal(rows, 1 + k, vocab_size, std=3, dtype=torch.float32).softmax(-1)
        drafted = (target[:, :-1].log() + shapes.normal(rows, k, vocab_size, dtype=torch.float32)).softmax(-1)
        tokens = torch.multinomial(drafted.flatten(0, 1), 1, generator=shapes.generator).view(rows, k)
        return tokens, drafted, target, shapes.uniform(rows, k), shapes.uniform(rows, 1 + k)

    def count(args: Args) -> float:
        # The residual at the first rejected draft is all that must be read whole.
        return size(args[1][:, 0], args[2][:, 0])

    return Case(acceptance.accept_rejection, f"{shapes.step}, V = {vocab_size}", make, count, tolerance=0.02)


def _conv_varlen(shapes: Shapes) -> Case:
    config, lens = shapes.config, (shapes.context_len,) * _PREFILL_ROWS
    width, channels = config.mamba_conv_kernel, _conv_dim(config)

    def make() -> Args:
        x = shapes.normal(sum(lens), channels + 64)[:, 32 : 32 + channels]
        weights = (shapes.normal(channels, 1, width, std=0.3), shapes.normal(channels))
        return x, *weights, shapes.normal(len(lens), width - 1, channels), lens

    shape = f"{len(lens)} x {lens[0]}"
    return Case(causal_conv1d.causal_conv1d_varlen, shape, make, lambda args: size(args[0], args[0]))


def _ssd_varlen(shapes: Shapes) -> Case:
    config, lens = shapes.config, (shapes.context_len,) * _PREFILL_ROWS

    def make() -> Args:
        x, dt, B, C, _ = _mamba_inputs(shapes, sum(lens))
        A_log, D, dt_bias = _mamba_parameters(shapes)
        initial = shapes.normal(len(lens), *_state_shape(config), dtype=torch.float32)
        return x, dt, A_log, B, C, D, dt_bias, config.mamba_dt_limit, initial, lens, config.mamba_chunk_size

    def count(args: Args) -> float:
        return size(args[0], args[0], args[1], args[3], args[4], args[8], args[8])

    flops = 4.0 * sum(lens) * math.prod(_state_shape(config))
    return Case(ssd.ssd_varlen, f"{len(lens)} x {lens[0]}", make, count, flops=flops)


def _linears(shapes: Shapes) -> Iterator[Case]:
    """The matrix products of each layer kind: what they reach is the floor of a step."""
    config, count = shapes.config, shapes.rows * shapes.tokens
    hidden, inner = config.hidden_size, config.mamba_num_heads * config.mamba_head_dim
    queries = config.num_attention_heads * config.kv_channels
    pattern = config.pattern + config.mtp_pattern
    weights: dict[str, tuple[int, int]] = {}
    if "M" in pattern:
        weights |= {"in_proj": (layer_matrices(config, "M") // hidden - inner, hidden), "out_proj": (hidden, inner)}
    if "*" in pattern:
        weights |= {"linear_qkv": (layer_matrices(config, "*") // hidden - queries, hidden)}
        weights |= {"linear_proj": (hidden, queries)}
    if "-" in pattern:
        width = config.ffn_hidden_size
        weights |= {"linear_fc1": (layer_matrices(config, "-") // hidden - width, hidden)}
        weights |= {"linear_fc2": (hidden, width)}
    if config.mtp_num_depths:
        weights["eh_proj"] = (hidden, 2 * hidden)
    weights["lm_head"] = (config.vocab_size, hidden)
    for name, (rows, columns) in weights.items():
        yield _linear(shapes, name, count, rows, columns)


def _linear(shapes: Shapes, name: str, count: int, rows: int, columns: int) -> Case:
    def make() -> Args:
        return shapes.normal(count, columns), shapes.normal(rows, columns, std=1 / math.sqrt(columns))

    def count_bytes(args: Args) -> float:
        return size(*args) + count * rows * shapes.dtype.itemsize

    return Case(
        linear,
        f"[{count}, {columns}] x [{rows}, {columns}]",
        make,
        count_bytes,
        flops=2.0 * count * rows * columns,
        name=f"linear {name}",
        reference=lambda x, weight: (x.float() @ weight.float().t()).to(x.dtype),
    )
