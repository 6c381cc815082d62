"""Attention through the paged cache and over sequences, and the ops around it.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens, B blocks per row.
"""

from collections.abc import Iterator

from torch import Tensor

from benchmarks.kernels.case import BLOCK_SIZE, Args, Case, Shapes, size
from benchmarks.kernels.cases.training import Heads, depth_attention, sequence_attention
from mtpkit.config.sections import AttentionConfig
from mtpkit.kernels import activation, attention, kv_store, rotary
from mtpkit.kernels import move_entries as moves
from mtpkit.kernels import place_qkv as placing
from tests.kernels.inputs import block_tables, projected_qkv, random_slots, starts_of


def decode(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step."""
    sizes = shapes.config.attention
    yield from (paged_attention(shapes), move_entries(shapes))
    turned = sizes.qk_layernorm or sizes.position_embedding_type != "none"
    yield place_qkv(shapes) if turned else store_kv(shapes)
    if sizes.attention_output_gate:
        yield sigmoid_gate(shapes)


def prefill(shapes: Shapes, lens: tuple[int, ...]) -> Iterator[Case]:
    """The ops of prompts."""
    yield prefill_attention(shapes, lens)


def base(shapes: Shapes, length: int) -> Iterator[Case]:
    """The ops of a training sequence in the base."""
    if AttentionConfig.letter in shapes.config.pattern:
        yield sequence_attention(shapes, length, _heads(shapes))
    if shapes.config.attention.position_embedding_type != "none":
        yield rotate(shapes)


def heads(shapes: Shapes, length: int) -> Iterator[Case]:
    """The ops of a training sequence in the MTP heads."""
    if AttentionConfig.letter in shapes.config.mtp.pattern and shapes.k > 1:
        yield depth_attention(shapes, length, _heads(shapes))


def _heads(shapes: Shapes) -> Heads:
    sizes = shapes.config.attention
    return Heads(
        sizes.num_attention_heads, sizes.num_query_groups, sizes.kv_channels, sizes.kv_channels
    )


def _cache(shapes: Shapes, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the block tables [R, B] of rows with `tokens` tokens each, with blocks in
    random places."""
    sizes = shapes.config.attention
    blocks = -(-tokens // BLOCK_SIZE)
    page = (BLOCK_SIZE, sizes.num_query_groups, sizes.kv_channels)
    key, value = (shapes.normal(rows * blocks, *page) for _ in range(2))
    return key, value, block_tables(shapes.permutation(rows * blocks), [blocks] * rows)


def _cached_bytes(shapes: Shapes, tokens: float) -> float:
    """Bytes of the keys and values of `tokens` tokens in one layer."""
    sizes = shapes.config.attention
    return 2 * tokens * sizes.num_query_groups * sizes.kv_channels * shapes.dtype.itemsize


def paged_attention(shapes: Shapes) -> Case:
    """Attention of a step."""
    rows = shapes.rows
    tokens = shapes.tokens
    sizes = shapes.config.attention
    context = shapes.context_len
    heads = sizes.num_attention_heads
    width = sizes.kv_channels

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


def prefill_attention(shapes: Shapes, lens: tuple[int, ...]) -> Case:
    """Attention of prompts of one length."""
    sizes = shapes.config.attention
    length = lens[0]
    rows = len(lens)
    heads = sizes.num_attention_heads
    width = sizes.kv_channels

    def make() -> Args:
        cache = _cache(shapes, rows, length)
        return (
            shapes.normal(rows * length, heads, width),
            *cache,
            shapes.full(0, rows),
            starts_of(lens).to(shapes.device),
        )

    return Case(
        attention.prefill_attention,
        f"{rows} x {length}",
        make,
        lambda args: _cached_bytes(shapes, rows * length) + size(args[0], args[0]),
        flops=4.0 * rows * length * heads * width * length / 2,
    )


def store_kv(shapes: Shapes) -> Case:
    """Writing the step's keys and values, each token's to a random slot."""
    sizes = shapes.config.attention
    count = shapes.count

    def make() -> Args:
        # earlier entries are not touched
        key, value, _ = _cache(shapes, shapes.rows, shapes.tokens)
        fused = shapes.normal(count, sizes.num_query_groups, 2 * sizes.kv_channels)
        slots = random_slots(shapes.permutation, key, count)
        return fused[..., : sizes.kv_channels], fused[..., sizes.kv_channels :], key, value, slots

    return Case(kv_store.store_kv, shapes.step, make, lambda args: 2 * _cached_bytes(shapes, count))


def place_qkv(shapes: Shapes) -> Case:
    """Norms and rotation of the step's queries and keys, slices of the projection, then writing
    keys and values."""
    config = shapes.config
    sizes = shapes.config.attention
    count = shapes.count
    groups = sizes.num_query_groups
    width = sizes.kv_channels
    heads = sizes.num_attention_heads // groups

    def make() -> Args:
        qkv = projected_qkv(shapes.normal, count, groups, heads, width)
        key, value, _ = _cache(shapes, shapes.rows, shapes.tokens)
        places = (
            random_slots(shapes.permutation, key, count),
            shapes.full(shapes.context_len, count),
        )
        rotates = sizes.position_embedding_type != "none"
        turns = shapes.normal(int(width * sizes.rotary_percent) // 2).float() if rotates else None
        norms = (shapes.normal(width), shapes.normal(width)) if sizes.qk_layernorm else (None, None)
        rest = *norms, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        return *qkv, key, value, *places, turns, *rest

    return Case(placing.place_qkv, shapes.step, make, lambda args: 2 * size(*args[:3]))


def move_entries(shapes: Shapes) -> Case:
    """Moving the keys and values of an accepted path to their final slots; here those of all tokens
    of a step."""
    sizes = shapes.config.attention
    rows = shapes.rows
    tokens = shapes.tokens

    def make() -> Args:
        key, value, _ = _cache(shapes, rows, tokens)
        places = random_slots(shapes.permutation, key, shapes.count).view(rows, tokens)
        return places.roll(1, 1), places, key.flatten(0, 1), value.flatten(0, 1)

    note = f"[{sizes.num_query_groups}, {sizes.kv_channels}] each"
    return Case(
        moves.move_entries,
        f"{shapes.step}, {note}",
        make,
        lambda args: 2 * _cached_bytes(shapes, shapes.count),
    )


def rotate(shapes: Shapes) -> Case:
    """Rotary embedding of a step's queries, which are views of the projection."""
    sizes = shapes.config.attention
    count = shapes.count
    groups = sizes.num_query_groups
    width = sizes.kv_channels
    per_group = sizes.num_attention_heads // groups
    half = int(width * sizes.rotary_percent) // 2

    def make() -> Args:
        q, _, _ = projected_qkv(shapes.normal, count, groups, per_group, width)
        return q, shapes.full(shapes.context_len, 1, count), shapes.normal(half).float()

    return Case(
        rotary.rotate,
        f"[{count}, {groups * per_group}, {width}]",
        make,
        lambda args: 2 * size(args[0]),
    )


def sigmoid_gate(shapes: Shapes) -> Case:
    """The gate of attention's output, which is a slice of the projection."""
    sizes = shapes.config.attention
    count = shapes.count
    groups = sizes.num_query_groups
    width = sizes.num_attention_heads * sizes.kv_channels

    def make() -> Args:
        projected = shapes.normal(count, groups, sizes.projected // groups)
        return shapes.normal(count, width), projected[..., width // groups : 2 * width // groups]

    return Case(
        activation.sigmoid_gate, f"[{count}, {width}]", make, lambda args: 3 * size(args[0])
    )
