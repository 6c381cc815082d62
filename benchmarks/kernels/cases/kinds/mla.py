"""Multi-head latent attention: through the paged cache of latents, and the linears around it.

Shape legend: R rows (requests), T = 1 + K tokens per row, B blocks per row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.case import BLOCK_SIZE, Args, Case, Shapes, size
from benchmarks.kernels.cases.training import Heads, depth_attention, sequence_attention
from mtpkit.config.sections import MlaConfig
from mtpkit.kernels import kv_store, latent_attention
from tests.kernels.inputs import block_tables, random_slots, starts_of


def decode(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step."""
    yield from (step(shapes), store(shapes))


def prefill(shapes: Shapes, lens: tuple[int, ...]) -> Iterator[Case]:
    """The ops of prompts."""
    yield from (context(shapes, lens), chunk(shapes, lens))


def base(shapes: Shapes, length: int) -> Iterator[Case]:
    """The ops of a training sequence in the base."""
    if MlaConfig.letter in shapes.config.pattern:
        yield sequence_attention(shapes, length, _heads(shapes))


def heads(shapes: Shapes, length: int) -> Iterator[Case]:
    """The ops of a training sequence in the MTP heads."""
    if MlaConfig.letter in shapes.config.mtp.pattern and shapes.k > 1:
        yield depth_attention(shapes, length, _heads(shapes))


def _heads(shapes: Shapes) -> Heads:
    count = shapes.config.attention.num_attention_heads
    sizes = shapes.config.mla
    return Heads(count, count, sizes.qk_width, sizes.v_head_dim)


def _cache(shapes: Shapes, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The cache, and the block tables [R, B] of rows with `tokens` tokens each, with blocks in
    random places."""
    blocks = -(-tokens // BLOCK_SIZE)
    cache = shapes.normal(rows * blocks, BLOCK_SIZE, shapes.config.mla.row)
    return cache, block_tables(shapes.permutation(rows * blocks), [blocks] * rows)


def _queries(shapes: Shapes, *lead: int) -> tuple[Tensor, Tensor]:
    """Latent queries, laid out as a product of all heads at once leaves them, and rotary
    queries."""
    sizes = shapes.config.mla
    heads = shapes.config.attention.num_attention_heads
    latent = shapes.normal(heads, *lead, sizes.kv_lora_rank).movedim(0, -2)
    return latent, shapes.normal(*lead, heads, sizes.qk_pos_emb_head_dim)


def _row_bytes(shapes: Shapes, tokens: float) -> float:
    return tokens * shapes.config.mla.row * shapes.dtype.itemsize


def _flops(shapes: Shapes, pairs: float) -> float:
    """FLOPs of `pairs` pairs of a token and a token that it attends to."""
    sizes = shapes.config.mla
    return (
        2.0 * pairs * shapes.config.attention.num_attention_heads * (sizes.row + sizes.kv_lora_rank)
    )


def _scale(shapes: Shapes) -> float:
    return shapes.config.mla.qk_width**-0.5


def step(shapes: Shapes) -> Case:
    """Attention of a step."""
    rows = shapes.rows
    tokens = shapes.tokens
    context = shapes.context_len

    def make() -> Args:
        queries = _queries(shapes, rows, tokens)
        cache = _cache(shapes, rows, context + tokens)
        return *queries, *cache, shapes.full(context, rows), _scale(shapes)

    return Case(
        latent_attention.latent_attention,
        f"{shapes.step}, {context} before",
        make,
        lambda args: (
            _row_bytes(shapes, rows * (context + tokens)) + size(args[0], args[0], args[1])
        ),
        flops=_flops(shapes, rows * tokens * (context + tokens / 2)),
    )


def context(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """Attention of chunks of one length to an equal number of earlier tokens."""
    rows = len(lens)
    length = lens[0]

    def make() -> Args:
        queries = _queries(shapes, rows * length)
        cache = _cache(shapes, rows, length)
        return (
            *queries,
            *cache,
            shapes.full(length, rows),
            starts_of(lens).to(shapes.device),
            _scale(shapes),
        )

    return Case(
        latent_attention.latent_context_attention,
        f"{rows} x {length}, {length} before",
        make,
        lambda args: _row_bytes(shapes, rows * length) + size(args[0], args[0], args[1]),
        flops=_flops(shapes, rows * length * length),
        judge=lambda _, outputs: outputs[0],
    )


def chunk(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """Attention within chunks of one length, joined with the attention to earlier tokens."""
    rows = len(lens)
    length = lens[0]
    sizes = shapes.config.mla
    heads = shapes.config.attention.num_attention_heads

    def make() -> Args:
        widths = (sizes.qk_width, sizes.qk_width, sizes.v_head_dim, sizes.v_head_dim)
        parts = (shapes.normal(rows * length, heads, width) for width in widths)
        before = shapes.normal(rows * length, heads, dtype=torch.float32)
        return (
            *parts,
            before,
            shapes.full(length, rows),
            starts_of(lens).to(shapes.device),
            _scale(shapes),
        )

    return Case(
        latent_attention.chunk_attention,
        f"{rows} x {length}",
        make,
        lambda args: size(*args[:5], args[3]),
        flops=1.0 * rows * length**2 * heads * (sizes.qk_width + sizes.v_head_dim),
    )


def store(shapes: Shapes) -> Case:
    """Writing the step's latents and rotary keys, each token's to a random slot."""
    sizes = shapes.config.mla
    count = shapes.count
    widths = [sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim]

    def make() -> Args:
        cache, _ = _cache(shapes, shapes.rows, shapes.tokens)  # earlier entries are not touched
        new = shapes.normal(count, 1, sizes.row).split(widths, -1)
        slots = random_slots(shapes.permutation, cache, count)
        return *new, *cache[:, :, None].split(widths, -1), slots

    return Case(kv_store.store_kv, shapes.step, make, lambda args: 2 * _row_bytes(shapes, count))
