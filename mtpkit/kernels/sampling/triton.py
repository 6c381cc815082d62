# mypy: disable-error-code="no-untyped-def"
"""Sampling in Triton, without a sort; see `cut` and `softmax`.

A row of logits is read once for its statistics, and again if probabilities are written. A filtered row usually needs
only a few more groups of tokens; a flat one takes several passes for each of top-k and top-p (`_cut_row` in `cut`), and
a draw from it one more.

All functions can be captured in a CUDA graph. Padding rows may hold anything; they yield a token of the vocabulary or
`NO_TOKEN`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import MULTIPROCESSORS, with_rows
from mtpkit.kernels.sampling import cut, draw, reference, softmax

BLOCK = 1024
"""Elements per program of the elementwise kernels."""
_SMALLEST, _LARGEST = tl.constexpr(reference.SMALLEST), tl.constexpr(reference.LARGEST)


@triton.jit(do_not_specialize=["count", "stream"], do_not_specialize_on_alignment=["seeds", "positions", "branches"])
def _uniform_kernel(
    seeds, seed_stride, positions, position_stride, branches, branch_stride, out, count, stream, BLOCK: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    seed = tl.load(seeds + place * seed_stride, mask=inside, other=0)
    position = tl.load(positions + place * position_stride, mask=inside, other=0)
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = tl.zeros([BLOCK], tl.uint32) + stream, tl.zeros([BLOCK], tl.uint32)
    if branches is not None:
        c3 = tl.load(branches + place * branch_stride, mask=inside, other=0).to(tl.uint32)
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
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
    out,
    logits_stride,
    mask_stride,
    counts_stride,
    draft_row,
    draft_depth,
    num_drafted,
    num_slots,
    vocab_size,
    num_blocks,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    index = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab_size
    slot = tl.load(slots + row)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    x = tl.load(logits + row * logits_stride + index, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(repetition + slot).to(tl.float32)
    a_count, a_token = tl.load(frequency + slot).to(tl.float32), tl.load(presence + slot).to(tl.float32)
    if (factor != 1) | (a_count != 0) | (a_token != 0):
        count = tl.load(output_counts + slot * counts_stride + index, mask=inside, other=0).to(tl.float32)
        prompt = tl.load(prompt_mask + slot * mask_stride + index, mask=inside, other=0) != 0
        # Of a row's 1 + K logits each sees the drafts before its own index.
        seen = tl.where(row < num_drafted, row % (1 + DEPTHS), 0)
        for depth in tl.static_range(DEPTHS):
            place = drafts + row // (1 + DEPTHS) * draft_row + depth * draft_depth
            count += (tl.load(place, mask=depth < seen, other=-1) == index).to(tl.float32)
        factors = tl.where(prompt | (count > 0), tl.minimum(tl.maximum(factor, _SMALLEST), _LARGEST), 1.0)
        y = tl.where(x > 0, tl.div_rn(x, factors), x * factors)
        y = y - a_count * count - tl.where(count > 0, a_token, 0.0)
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST), x)
    tl.store(out + row * vocab_size + index, x, mask=inside)


def uniform(seeds: Tensor, positions: Tensor, stream: int, branches: Tensor | None = None) -> Tensor:
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
) -> Tensor:
    """See the reference. For a row without penalties only the logits are read."""
    logits, prompt_mask, output_counts = map(with_rows, (logits, prompt_mask, output_counts))
    repetition, frequency, presence, slots = (v.contiguous() for v in (repetition, frequency, presence, slots))
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
            out,
            logits.stride(0),
            prompt_mask.stride(0),
            output_counts.stride(0),
            *drafts.stride(),
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
        rows = _Rows.of(logits, temperature, filtered=any(f is not None for f in (top_k, top_p, min_p)))
        bounds = rows.cut(top_k, top_p, min_p) if rows.heads is not None else None
        t, last, weight = bounds or (rows.maxima,) * 3
        softmax.probabilities_kernel[(rows.count * rows.num_chunks,)](
            *rows.logits_and_statistics,
            rows.best,
            t,
            last,
            weight,
            probs,
            rows.vocab_size,
            rows.num_chunks,
            CUT=bounds is not None,
            CHUNK=rows.chunk,
            CHUNKS=rows.padded_chunks,
            num_warps=4,
        )
    return probs


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """See the reference."""
    weights = with_rows(weights)
    count, vocab_size = weights.shape
    tokens = torch.empty(count, dtype=torch.int64, device=weights.device)
    if count:
        chunk = draw.chunk_size(vocab_size)
        num_chunks = triton.cdiv(vocab_size, chunk)
        sums = torch.empty(count, num_chunks, dtype=torch.float64, device=weights.device)
        draw.sum_chunks_kernel[(count * num_chunks,)](
            weights, sums, weights.stride(0), vocab_size, num_chunks, CHUNK=chunk, num_warps=4
        )
        draw.draw_kernel[(count,)](
            weights,
            sums,
            uniforms,
            uniforms.stride(0),
            tokens,
            weights.stride(0),
            vocab_size,
            num_chunks,
            CHUNK=chunk,
            CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=8,
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
    rows = _Rows.of(logits, temperature, filtered=any(f is not None for f in (top_k, top_p, min_p)))
    t = last = kept_sums = rows.maxima
    if rows.heads is not None:
        t, last, _ = rows.cut(top_k, top_p, min_p, uniforms, tokens)
        kept_sums = torch.empty(rows.count, rows.num_chunks, dtype=torch.float64, device=logits.device)
        softmax.kept_sums_kernel[(rows.count * rows.num_chunks,)](
            *rows.logits_and_statistics,
            t,
            last,
            tokens,
            kept_sums,
            rows.vocab_size,
            rows.num_chunks,
            CHUNK=rows.chunk,
            CHUNKS=rows.padded_chunks,
            num_warps=4,
        )
    softmax.draw_logits_kernel[(rows.count,)](
        *rows.logits_and_statistics,
        rows.best,
        t,
        last,
        kept_sums,
        uniforms,
        uniforms.stride(0),
        tokens,
        rows.vocab_size,
        rows.num_chunks,
        CUT=rows.heads is not None,
        CHUNK=rows.chunk,
        CHUNKS=rows.padded_chunks,
        num_warps=8,
    )
    return tokens


@dataclass(frozen=True)
class _Rows:
    """Logits and their statistics from one pass."""

    logits: Tensor
    """[N, V] with contiguous rows."""
    temperature: Tensor
    """[N]."""
    chunk: int
    maxima: Tensor
    """[N, num_chunks] float32, largest logit of each chunk."""
    sums: Tensor
    """[N, num_chunks] float32, sum of each chunk's weights relative to its largest logit."""
    best: Tensor
    """[N, num_chunks] int32, best token of each chunk; only for greedy rows."""
    heads: Tensor | None
    """[N, groups] float32, largest logit of each group; None if no row is filtered."""

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor, filtered: bool) -> "_Rows":
        logits, temperature = with_rows(logits), temperature.contiguous()
        count, vocab_size = logits.shape
        chunk = draw.chunk_size(vocab_size)
        num_chunks = triton.cdiv(vocab_size, chunk)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        maxima, sums = empty(count, num_chunks), empty(count, num_chunks)
        best = empty(count, num_chunks, dtype=torch.int32)
        heads = empty(count, num_chunks * chunk // cut.GROUP.value) if filtered else None
        softmax.statistics_kernel[(count * num_chunks,)](
            logits,
            logits.stride(0),
            temperature,
            maxima,
            sums,
            best,
            maxima if heads is None else heads,
            vocab_size,
            num_chunks,
            HEADS=filtered,
            CHUNK=chunk,
            GROUP=cut.GROUP.value,
            num_warps=4,
        )
        return cls(logits, temperature, chunk, maxima, sums, best, heads)

    @property
    def count(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    @property
    def num_chunks(self) -> int:
        return self.maxima.shape[1]

    @property
    def padded_chunks(self) -> int:
        return triton.next_power_of_2(self.num_chunks)

    @property
    def logits_and_statistics(self) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
        """First arguments of the later kernels."""
        return self.logits, self.logits.stride(0), self.temperature, self.maxima, self.sums

    def cut(
        self,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        uniforms: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """t [N] float32, last [N] int32 and weight [N] float32, see `cut.cut_kernel`; also draws `tokens` if given."""
        assert self.heads is not None
        tuning = cut.FEW if self.count <= MULTIPROCESSORS else cut.MANY
        device = self.logits.device
        t, weight = (torch.empty(self.count, dtype=torch.float32, device=device) for _ in range(2))
        last = torch.empty(self.count, dtype=torch.int32, device=device)
        buffers = torch.empty(self.count, tuning.room, dtype=torch.int64, device=device)
        filters = (t if f is None else f.contiguous() for f in (top_k, top_p, min_p))
        cut.cut_kernel[(self.count,)](
            *self.logits_and_statistics,
            *filters,
            self.heads,
            buffers,
            t,
            last,
            weight,
            t if uniforms is None else uniforms,
            0 if uniforms is None else uniforms.stride(0),
            t if tokens is None else tokens,
            self.vocab_size,
            self.num_chunks,
            self.heads.shape[1],
            TOP_K=top_k is not None,
            TOP_P=top_p is not None,
            MIN_P=min_p is not None,
            DRAW=tokens is not None,
            CHUNKS=self.padded_chunks,
            HEADS=triton.next_power_of_2(self.heads.shape[1]),
            ROOM=tuning.room,
            TILE=tuning.tile,
            PIVOT_TILE=tuning.pivot_tile,
            STAGES=tuning.stages,
            num_warps=tuning.num_warps,
            maxnreg=tuning.max_registers,
            enable_fp_fusion=False,  # threads branch on sums, see `row_statistics`
        )
        return t, last, weight
