"""Sampling in Triton, without a sort; see `cut` and `softmax`.

A row of logits is read once for its statistics, and again if probabilities are written. A filtered
row usually needs only a few more groups of tokens; a flat one takes several passes for each of
top-k and top-p (`_cut_row` in `cut`), and a draw from it one more.

All functions can be captured in a CUDA graph. Padding rows may hold anything; they yield a token of
the vocabulary or `NO_TOKEN`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import multiprocessors, with_rows
from mtpkit.kernels.sampling import cut, reference, softmax
from mtpkit.kernels.sampling.cut import GROUP, Cut
from mtpkit.kernels.sampling.philox import philox
from mtpkit.kernels.sampling.weights import Logits, chunk_size

Filters = tuple[Tensor | None, Tensor | None, Tensor | None]
"""top_k, top_p and min_p; None: no row uses the filter."""

BLOCK = 1024
"""Elements per program of the elementwise kernels."""
_SMALLEST = tl.constexpr(reference.SMALLEST)
_LARGEST = tl.constexpr(reference.LARGEST)


@triton.jit(
    do_not_specialize=["count", "stream"],
    do_not_specialize_on_alignment=["seeds", "positions", "branches"],
)
def _uniform_kernel(
    seeds,
    seed_stride,
    positions,
    position_stride,
    branches,
    branch_stride,
    out,
    count,
    stream,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    seed = tl.load(seeds + place * seed_stride, mask=inside, other=0)
    position = tl.load(positions + place * position_stride, mask=inside, other=0)
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    c1 = (position >> 32).to(tl.uint32)
    c2 = tl.zeros([BLOCK], tl.uint32) + stream
    c3 = tl.zeros([BLOCK], tl.uint32)
    if branches is not None:
        c3 = tl.load(branches + place * branch_stride, mask=inside, other=0).to(tl.uint32)
    c0, c1, _, _ = philox(key0, key1, c0, c1, c2, c3)
    # 48 bits, see the twin's docstring: the product with any total must stay below that total.
    bits = (c0.to(tl.int64) << 16) + (c1 >> 16).to(tl.int64)
    tl.store(out + place, bits.to(tl.float64) * 3.552713678800501e-15, mask=inside)  # 2^-48


@triton.jit(
    do_not_specialize=["num_drafted"],
    do_not_specialize_on_alignment=["repetition", "frequency", "presence", "slots", "drafts"],
)
def _penalties_kernel(
    logits,
    prompt_mask,
    output_counts,
    repetition,
    frequency,
    presence,
    slots,
    drafts,
    ancestors,
    out,
    strides,
    num_drafted,
    num_slots,
    vocab_size,
    num_blocks,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    logits_stride, mask_stride, counts_stride, draft_row, draft_depth = strides
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    index = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab_size
    slot = tl.load(slots + row)
    # A null row's slot is -1, which is the last slot in the twin's indexing.
    slot = tl.where(slot < 0, slot + num_slots, slot)
    x = tl.load(logits + row * logits_stride + index, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(repetition + slot).to(tl.float32)
    a_count = tl.load(frequency + slot).to(tl.float32)
    a_token = tl.load(presence + slot).to(tl.float32)
    if (factor != 1) | (a_count != 0) | (a_token != 0):
        count = tl.load(output_counts + slot * counts_stride + index, mask=inside, other=0).to(
            tl.float32
        )
        prompt = tl.load(prompt_mask + slot * mask_stride + index, mask=inside, other=0) != 0
        # Each of a row's 1 + K rows of logits sees the drafts before its own index.
        seen = tl.where(row < num_drafted, row % (1 + DEPTHS), 0)
        for depth in tl.static_range(DEPTHS):
            place = drafts + row // (1 + DEPTHS) * draft_row + depth * draft_depth
            before = depth < seen
            if ancestors is not None:
                before = (
                    tl.load(ancestors + row, mask=row < num_drafted, other=0) >> (depth + 1)
                ) & 1 != 0
            count += (tl.load(place, mask=before, other=-1) == index).to(tl.float32)
        factors = tl.where(
            prompt | (count > 0), tl.minimum(tl.maximum(factor, _SMALLEST), _LARGEST), 1.0
        )
        # div_rn rounds as PyTorch does; Triton's own `/` is an approximation in fp32.
        y = tl.where(x > 0, tl.div_rn(x, factors), x * factors)
        y = y - a_count * count - tl.where(count > 0, a_token, 0.0)
        # A logit that is not finite must stay so, or an invalid row would look valid.
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST), x)
    tl.store(out + row * vocab_size + index, x, mask=inside)


def uniform(
    seeds: Tensor, positions: Tensor, stream: int, branches: Tensor | None = None
) -> Tensor:
    """See the reference; the results are equal to the bit."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(out):
        block = min(BLOCK, triton.next_power_of_2(len(out)))
        _uniform_kernel[(triton.cdiv(len(out), block),)](
            seeds,
            seeds.stride(0),
            positions,
            positions.stride(0),
            branches,
            0 if branches is None else branches.stride(0),
            out,
            len(out),
            stream,
            BLOCK=block,
            num_warps=4,
        )
    return out


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    slots: Tensor,
    drafts: Tensor,
    ancestors: Tensor | None = None,
) -> Tensor:
    """See the reference. For a row without penalties, only the logits are read."""
    logits, prompt_mask, output_counts = map(with_rows, (logits, prompt_mask, output_counts))
    repetition, frequency, presence, slots = (
        v.contiguous() for v in (repetition, frequency, presence, slots)
    )
    rows, depths = drafts.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        blocks = triton.cdiv(logits.shape[1], BLOCK)
        _penalties_kernel[(len(logits) * blocks,)](
            logits,
            prompt_mask,
            output_counts,
            repetition,
            frequency,
            presence,
            slots,
            drafts,
            None if ancestors is None else ancestors.contiguous(),
            out,
            (logits.stride(0), prompt_mask.stride(0), output_counts.stride(0), *drafts.stride()),
            rows * (1 + depths),
            len(output_counts),
            logits.shape[1],
            blocks,
            DEPTHS=depths,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """See the reference."""
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if probs.numel():
        filters = (top_k, top_p, min_p)
        rows, temperature, heads, sizes = _read(logits, temperature, filters)
        bounds = (
            Cut(*[rows.maxima] * 3) if heads is None else _cut(rows, temperature, heads, filters)
        )
        softmax.probabilities_kernel[(len(logits) * rows.num_chunks,)](
            rows, temperature, bounds, probs, CUT=heads is not None, num_warps=4, **sizes
        )
    return probs


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """See the reference."""
    weights = with_rows(weights)
    count, vocab_size = weights.shape
    tokens = torch.empty(count, dtype=torch.int64, device=weights.device)
    if count:
        chunk = chunk_size(vocab_size)
        num_chunks = triton.cdiv(vocab_size, chunk)
        sums = torch.empty(count, num_chunks, dtype=torch.float64, device=weights.device)
        parts = (weights, weights.stride(0), vocab_size, num_chunks)
        softmax.sum_chunks_kernel[(count * num_chunks,)](parts, sums, CHUNK=chunk, num_warps=4)
        sizes = dict(CHUNK=chunk, CHUNKS=triton.next_power_of_2(num_chunks))
        softmax.draw_kernel[(count,)](
            parts, sums, uniforms, uniforms.stride(0), tokens, num_warps=8, **sizes
        )
    return tokens


def sample_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """See the reference. No probabilities are written."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if not len(tokens):
        return tokens
    filters = (top_k, top_p, min_p)
    rows, temperature, heads, sizes = _read(logits, temperature, filters)
    kept_sums = rows.maxima
    bounds = Cut(*[rows.maxima] * 3)
    if heads is not None:
        bounds = _cut(rows, temperature, heads, filters, uniforms, tokens)
        kept_sums = torch.empty(
            len(logits), rows.num_chunks, dtype=torch.float64, device=logits.device
        )
        softmax.kept_sums_kernel[(len(logits) * rows.num_chunks,)](
            rows, temperature, bounds, tokens, kept_sums, num_warps=4, **sizes
        )
    softmax.draw_logits_kernel[(len(logits),)](
        rows,
        temperature,
        bounds,
        kept_sums,
        uniforms,
        uniforms.stride(0),
        tokens,
        CUT=heads is not None,
        num_warps=8,
        **sizes,
    )
    return tokens


def _read(
    logits: Tensor, temperature: Tensor, filters: Filters
) -> tuple[Logits, Tensor, Tensor | None, dict[str, int]]:
    """Read logits [N, V] once.

    Returns:
        The logits with their statistics; temperature [N]; the largest logit of each group, [N,
        groups] float32, or None if no row is filtered; the sizes of chunks for later kernels.
    """
    logits = with_rows(logits)
    temperature = temperature.contiguous()
    count, vocab_size = logits.shape
    chunk = chunk_size(vocab_size)
    filtered = any(values is not None for values in filters)
    num_chunks = triton.cdiv(vocab_size, chunk)
    maxima, sums = (
        torch.empty(count, num_chunks, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    best = torch.empty(count, num_chunks, dtype=torch.int32, device=logits.device)
    heads = maxima
    if filtered:
        heads = maxima.new_empty(count, num_chunks * chunk // GROUP.value)
    rows = Logits(logits, logits.stride(0), vocab_size, num_chunks, maxima, sums, best)
    softmax.statistics_kernel[(count * num_chunks,)](
        rows, temperature, heads, HEADS=filtered, CHUNK=chunk, GROUP=GROUP.value, num_warps=4
    )
    sizes = dict(CHUNK=chunk, CHUNKS=triton.next_power_of_2(num_chunks))
    return rows, temperature, heads if filtered else None, sizes


def _cut(
    rows: Logits,
    temperature: Tensor,
    heads: Tensor,
    filters: Filters,
    uniforms: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Cut:
    """Find where the filters cut each row; also draw `tokens` if given, see `cut_kernel`."""
    (count, num_groups), device = heads.shape, heads.device
    tuning = cut.FEW if count <= multiprocessors() else cut.MANY
    t, weight = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    last = torch.empty(count, dtype=torch.int32, device=device)
    top_k, top_p, min_p = filters
    cut.cut_kernel[(count,)](
        rows,
        temperature,
        # `t` takes the places of tensors that the kernel will not read.
        *(t if values is None else values.contiguous() for values in filters),
        heads,
        num_groups,
        torch.empty(count, tuning.room, dtype=torch.int64, device=device),
        Cut(t, last, weight),
        t if uniforms is None else uniforms,
        0 if uniforms is None else uniforms.stride(0),
        t if tokens is None else tokens,
        TOP_K=top_k is not None,
        TOP_P=top_p is not None,
        MIN_P=min_p is not None,
        DRAW=tokens is not None,
        CHUNKS=triton.next_power_of_2(rows.num_chunks),
        HEADS=triton.next_power_of_2(num_groups),
        ROOM=tuning.room,
        TILE=tuning.tile,
        PIVOT_TILE=tuning.pivot_tile,
        STAGES=tuning.stages,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
        enable_fp_fusion=False,  # threads branch on sums, see `row_statistics`
    )
    return Cut(t, last, weight)
