"""Launches of kernels with sizes of published models, for `compiled`: linears and experts with
quantised weights, states in float16, keys and values in fp8.

Tensors are on device meta: a launcher needs their shapes, types and strides, but no numbers.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mtpkit.kernels.attention.triton import paged_attention, prefill_attention
from mtpkit.kernels.gated_delta_rule.triton import (
    delta_replay_update,
    delta_snapshot_update,
    delta_varlen,
)
from mtpkit.kernels.kv_store.reference import KVScales
from mtpkit.kernels.kv_store.triton import store_kv
from mtpkit.kernels.latent_attention.triton import latent_attention, latent_context_attention
from mtpkit.kernels.linear import FP8
from mtpkit.kernels.place_qkv.triton import place_qkv
from mtpkit.kernels.quantized.triton import quantized_experts, quantized_linear
from mtpkit.kernels.ring import ring_length
from mtpkit.kernels.ring_fold.triton import fold_ring
from mtpkit.kernels.rounding.reference import Noise
from mtpkit.kernels.rounding.triton import narrow_units
from mtpkit.kernels.ssd.triton import ScanTiles, ssd_varlen
from mtpkit.kernels.ssm_update.triton import ssm_replay_update, ssm_snapshot_update
from tests.kernels import inputs
from tests.kernels.inputs import DeltaSizes, MambaSizes
from tests.kernels.quantized import RULES, draw_matrix

Case = tuple[str, Callable[[], object]]

SERVED = (
    ("block", "group"),
    ("block", "none"),
    ("row", "token"),
    ("matrix", "static"),
    ("int4", "none"),
    ("int4, groups of 32", "none"),
    ("int4, zero points", "none"),
    ("nvfp4", "none"),
)
"""Formats, each with how its files have the inputs quantised; weights alone where it is `none`."""
HIDDEN = 2688
INNER = 1856
"""Sizes of Nemotron 3 Nano. The second one divides neither into blocks of 128 nor into steps."""
EXPERTS = 128
TOP_K = 6
ROWS = 10
TOKENS = 4


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def indices(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def halves(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float16)


RING = ring_length(TOKENS)
PLACES = [indices(ROWS) for _ in range(3)]
"""Slots, context lengths and lengths of rings."""
STARTS = indices(ROWS + 1)
STEPS = indices(ROWS, TOKENS)
NOISE = Noise(indices(ROWS), 3, 0)
CONTINUED = dict(slots=PLACES[0], context_lens=PLACES[1], noise=NOISE)


def linears() -> Iterator[Case]:
    """A linear of each format in each of its tiles, and of one row; what surrounds the product
    differs between the tiles."""
    around = {
        1: dict(norm_weight=empty(INNER), residual=empty(1, HIDDEN)),
        TOKENS: dict(norm_weight=empty(INNER), residual=empty(TOKENS, HIDDEN)),
        64: dict(norm_weight=empty(INNER), gate=empty(64, INNER), group_size=INNER // 2),
        128: dict(bias=empty(HIDDEN), activation="relu2"),
        300: dict(swiglu=True),
    }
    for name, rule in SERVED:
        for rows, more in around.items():
            matrix = draw_matrix(name, HIDDEN, INNER, device="meta")
            width = INNER * 2 if "swiglu" in more else INNER
            rest = dict(inputs=RULES[rule], input_scale=numbers()) | more
            yield (
                f"{name}, inputs {rule}, {rows} rows",
                partial(quantized_linear, empty(rows, width), matrix, **rest),
            )


def experts() -> Iterator[Case]:
    """Experts of each codes, of one token and in each of their tiles, and those of each format in
    the largest one, which takes the most registers."""
    whole = ("block", "int4, groups of 32", "nvfp4")
    for name, rule in SERVED:
        for size in (None, 16, 32, 64, 128) if name in whole else (128,):
            gated = name in whole[:2]
            inner = 512 if gated else INNER
            tokens = 1 if size is None else 16
            scales = numbers(EXPERTS), numbers(EXPERTS)
            yield (
                f"{name}, inputs {rule}, blocks of {size}",
                partial(
                    quantized_experts,
                    empty(tokens, HIDDEN),
                    draw_matrix(name, EXPERTS, inner * (1 + gated), HIDDEN, device="meta"),
                    draw_matrix(name, EXPERTS, HIDDEN, inner, device="meta"),
                    indices(tokens, TOP_K),
                    numbers(tokens, TOP_K),
                    "swiglu" if gated else "relu2",
                    residual=empty(tokens, HIDDEN),
                    inputs=RULES[rule],
                    input_scales=scales if rule == "static" else None,
                    size=size,
                ),
            )


def keys_and_values() -> Iterator[Case]:
    """Attention over keys, values and latents in fp8, and what stores them."""
    scales = KVScales(0.5, 2.0)
    slots = indices(ROWS * TOKENS)
    tables = empty(ROWS, 64, dtype=torch.int32)
    contexts = indices(ROWS)
    # Groups, queries in each of them, width and rotated half: Nemotron 3 Nano, Qwen3-Next.
    for groups, heads, width, half in ((2, 16, 128, 0), (2, 8, 256, 32)):
        cache = empty(512, 16, groups, width, dtype=FP8)
        q, k, v = inputs.projected_qkv(empty, ROWS * TOKENS, groups, heads, width)
        stored = cache, cache, slots
        yield f"store of {width}", partial(store_kv, k, v, *stored, scales)
        norms = empty(width), empty(width)
        turned = partial(place_qkv, q, k, v, *stored, slots, numbers(max(1, half)), *norms)
        yield f"placement of {width}", partial(turned, scales=scales)
        queries = empty(ROWS, TOKENS, groups * heads, width)
        read = cache, cache, tables, contexts
        yield f"decode of {width}", partial(paged_attention, queries, *read, scales=scales)
        masks = indices(ROWS, TOKENS)
        tree = partial(paged_attention, queries, *read, masks, scales=scales)
        yield f"tree of {width}", tree
        queries = empty(2000, groups * heads, width)
        yield f"prefill of {width}", partial(prefill_attention, queries, *read, STARTS, scales)

    latents = empty(512, 16, 576, dtype=FP8), tables, contexts
    queries = empty(ROWS, TOKENS, 128, 512), empty(ROWS, TOKENS, 128, 64)
    yield "latents", partial(latent_attention, *queries, *latents, 0.1)
    queries = empty(1000, 128, 512), empty(1000, 128, 64)
    chunk = partial(latent_context_attention, *queries, *latents, STARTS, 0.1)
    yield "prefill of latents", chunk


def states() -> Iterator[Case]:
    """Everything that rounds recurrent states to float16."""
    yield from mamba_states(MambaSizes(64, 64, 8, 128))
    yield from delta_states(DeltaSizes(32, 128, 16, 128))


def mamba_states(sizes: MambaSizes) -> Iterator[Case]:
    """What rounds the states of a Mamba2 layer."""
    heads, width, groups, state = sizes
    kept = halves(16, heads, width, state)
    entries = halves(16, TOKENS, heads, width, state)
    rings = [empty(16, RING, heads, width), empty(16, RING, groups, state)]
    rings.append(numbers(16, RING, heads))
    own = dict(A_log=numbers(heads), D=numbers(heads), dt_bias=numbers(heads))
    own |= dict(dt_limit=(0.0, float("inf")))
    step = dict(zip("xBC", inputs.mamba_tokens(empty, ROWS, TOKENS, sizes=sizes), strict=True))
    step |= own | dict(dt=empty(ROWS, TOKENS, heads))
    prompt = dict(zip("xBC", inputs.mamba_tokens(empty, 1000, sizes=sizes), strict=True))
    prompt |= own | dict(dt=empty(1000, heads), starts=STARTS, chunk_size=128)
    yield "mamba2 replay", partial(ssm_replay_update, kept, *rings, *PLACES, **step, noise=NOISE)
    snapshot = partial(ssm_snapshot_update, entries, *PLACES[:2], **step)
    yield "mamba2 snapshot", partial(snapshot, noise=NOISE._replace(positions=STEPS))
    scan = partial(ssd_varlen, **prompt, states=kept, **CONTINUED)
    yield "mamba2 scan", scan
    pairs = ScanTiles(width=16, heads=2, chunk=16, num_warps=4, num_stages=2)
    yield "mamba2 scan, two heads per program", partial(scan, tiles=pairs)
    fold = partial(fold_ring, kept, *rings, *PLACES, A_log=numbers(heads))
    yield "mamba2 fold", partial(fold, noise=NOISE)
    copy = partial(narrow_units, *PLACES[:2], numbers(16, heads, width, state), kept)
    yield "mamba2 copy", partial(copy, NOISE._replace(positions=indices(ROWS)))


def delta_states(sizes: DeltaSizes) -> Iterator[Case]:
    """What rounds the states of a gated delta net."""
    heads, width, groups, state = sizes
    kept = halves(16, heads, width, state)
    entries = halves(16, TOKENS, heads, width, state)
    keys = empty(16, RING, groups, state)
    values = empty(16, RING, heads, width)
    decays = numbers(16, RING, heads)
    step = dict(zip("qkv", inputs.delta_tokens(empty, ROWS, TOKENS, sizes=sizes), strict=True))
    rates = inputs.delta_rates(empty, ROWS, TOKENS, heads=heads)
    step |= dict(zip("ab", rates, strict=True))
    step |= dict(A_log=numbers(heads), dt_bias=numbers(heads))
    prompt = inputs.delta_tokens(empty, 1000, sizes=sizes)
    replay = partial(delta_replay_update, kept, keys, values, decays, *PLACES, **step)
    yield "delta replay", partial(replay, noise=NOISE)
    snapshot = partial(delta_snapshot_update, entries, *PLACES[:2], **step)
    yield "delta snapshot", partial(snapshot, noise=NOISE._replace(positions=STEPS))
    scan = partial(delta_varlen, *prompt, numbers(1000, heads), numbers(1000, heads), STARTS)
    yield "delta scan", partial(scan, states=kept, **CONTINUED)
    yield "delta fold", partial(fold_ring, kept, values, keys, decays, *PLACES, noise=NOISE)


GROUPS = {
    "linears": linears,
    "experts": experts,
    "keys and values": keys_and_values,
    "states": states,
}
