"""Attention through the paged cache of keys and values.

Shape legend: R rows (requests), T = 1 + K tokens a row, B blocks a row.
"""

import torch
from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.kernels import attention as ops
from mtpkit.kernels import kv_store

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
        ops.paged_attention,
        f"{shapes.step}, {context} before",
        make,
        lambda args: _cached_bytes(shapes, rows * (context + tokens)) + size(args[0], args[0]),
        flops=4.0 * rows * tokens * heads * width * (context + tokens / 2),
    )


def prefill_attention(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """Attention of prompts of one length."""
    sizes, length, rows = shapes.config.attention, lens[0], len(lens)
    heads, width = sizes.num_attention_heads, sizes.kv_channels

    def make() -> Args:
        cache = _cache(shapes, rows, length)
        query_start = torch.arange(0, rows * length + 1, length, device=shapes.device)
        q = shapes.normal(rows * length, heads, width)
        return q, *cache, shapes.full(0, rows), query_start, lens

    return Case(
        ops.prefill_attention,
        f"{rows} x {length}",
        make,
        lambda args: _cached_bytes(shapes, rows * length) + size(args[0], args[0]),
        flops=4.0 * rows * length * heads * width * length / 2,
    )


def store_kv(shapes: Shapes) -> Case:
    """Writing the step's keys and values, each token's to any place."""
    rows, tokens, sizes = shapes.rows, shapes.tokens, shapes.config.attention
    count = rows * tokens

    def make() -> Args:
        key, value, _ = _cache(shapes, rows, tokens)  # what lies before them is not touched
        fused = shapes.normal(count, sizes.num_query_groups, 2 * sizes.kv_channels)
        slots = shapes.permutation(len(key) * _BLOCK)[:count]
        return fused[..., : sizes.kv_channels], fused[..., sizes.kv_channels :], key, value, slots

    return Case(kv_store.store_kv, shapes.step, make, lambda args: 2 * _cached_bytes(shapes, count))
