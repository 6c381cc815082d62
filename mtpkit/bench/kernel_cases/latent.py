"""Multi-head latent attention: through the paged cache of latents, and the linears around it.

Shape legend: R rows (requests), T = 1 + K tokens per row, B blocks per row.
"""

from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.kernels import kv_store, latent_attention

_BLOCK = 16


def _cache(shapes: Shapes, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The cache, and the block tables [R, B] of rows with so many tokens each, the blocks lying anywhere."""
    blocks = -(-tokens // _BLOCK)
    cache = shapes.normal(rows * blocks, _BLOCK, shapes.config.mla.row)
    return cache, shapes.permutation(rows * blocks).view(rows, blocks)


def _queries(shapes: Shapes, *lead: int) -> tuple[Tensor, Tensor]:
    """Queries in latents, a product of all heads at once, and rotated ones."""
    sizes, heads = shapes.config.mla, shapes.config.attention.num_attention_heads
    latent = shapes.normal(heads, *lead, sizes.kv_lora_rank).movedim(0, -2)
    return latent, shapes.normal(*lead, heads, sizes.qk_pos_emb_head_dim)


def _row_bytes(shapes: Shapes, tokens: float) -> float:
    return tokens * shapes.config.mla.row * shapes.dtype.itemsize


def _flops(shapes: Shapes, pairs: float) -> float:
    """FLOPs of so many pairs of a token and one that it attends to."""
    sizes = shapes.config.mla
    return 2.0 * pairs * shapes.config.attention.num_attention_heads * (sizes.row + sizes.kv_lora_rank)


def _scale(shapes: Shapes) -> float:
    return shapes.config.mla.qk_width**-0.5


def decode(shapes: Shapes) -> Case:
    """Attention of a step."""
    rows, tokens, context = shapes.rows, shapes.tokens, shapes.context_len

    def make() -> Args:
        queries, cache = _queries(shapes, rows, tokens), _cache(shapes, rows, context + tokens)
        return *queries, *cache, shapes.full(context, rows), _scale(shapes)

    return Case(
        latent_attention.latent_attention,
        f"{shapes.step}, {context} before",
        make,
        lambda args: _row_bytes(shapes, rows * (context + tokens)) + size(args[0], args[0], args[1]),
        flops=_flops(shapes, rows * tokens * (context + tokens / 2)),
    )


def prefill(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """Attention of prompts of one length."""
    rows, length = len(lens), lens[0]

    def make() -> Args:
        queries, cache = _queries(shapes, rows * length), _cache(shapes, rows, length)
        starts = length * shapes.full(1, rows + 1).cumsum(0) - length
        return *queries, *cache, shapes.full(0, rows), starts, _scale(shapes)

    return Case(
        latent_attention.latent_prefill_attention,
        f"{rows} x {length}",
        make,
        lambda args: _row_bytes(shapes, rows * length) + size(args[0], args[0], args[1]),
        flops=_flops(shapes, rows * length * length / 2),
    )


def store(shapes: Shapes) -> Case:
    """Writing the step's latents and rotary keys, each token's to any place."""
    sizes, count = shapes.config.mla, shapes.count
    widths = [sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim]

    def make() -> Args:
        cache, _ = _cache(shapes, shapes.rows, shapes.tokens)  # what lies before them is not touched
        new = shapes.normal(count, 1, sizes.row).split(widths, -1)
        slots = shapes.permutation(len(cache) * _BLOCK)[:count]
        return *new, *cache[:, :, None].split(widths, -1), slots

    return Case(kv_store.store_kv, shapes.step, make, lambda args: 2 * _row_bytes(shapes, count))
