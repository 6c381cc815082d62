"""Acceptance of drafts in Triton.

Rejection sampling reads p and q of each draft, and all of p and q only at the position where a row
stops.

Padding rows may hold anything: each yields a token of the vocabulary or `NO_TOKEN`, and accepts at
most K drafts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.acceptance.tree import accept_tree
from mtpkit.kernels.device import NO_TOKEN, only_if, strided, with_rows
from mtpkit.kernels.sampling.weights import chunk_size, first_above, pick_chunk

__all__ = ["accept_matching", "accept_rejection", "accept_tree"]

MATCHING_ROWS = 32
"""Rows per program of `accept_matching`."""


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["drafts", "choices"])
def _matching_kernel(
    drafts,
    choices,
    strides,
    accepted,
    token_ids,
    rows,
    depths,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    draft_row, draft_depth, choice_row, choice_depth = strides
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    depth = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (depth <= depths)
    choice = tl.load(
        choices + row[:, None] * choice_row + depth * choice_depth, mask=inside, other=0
    )
    draft = tl.load(
        drafts + row[:, None] * draft_row + depth * draft_depth,
        mask=inside & (depth < depths),
        other=0,
    )
    count = tl.min(tl.where((depth < depths) & (draft == choice), depths, depth), 1)
    tl.store(accepted + row, count.to(tl.int64), mask=row < rows)
    kept = tl.where(depth <= count[:, None], choice, 0)
    tl.store(token_ids + row[:, None] * (depths + 1) + depth, kept, mask=inside)


@triton.jit
def _stop(drafts, accept_uniforms, strides, probs, row, depths, vocab_size, WIDTH):
    """The number of accepted drafts of the row, and its drafts [WIDTH]."""
    draft_row, draft_depth, u_row, u_depth = strides
    draft_probs, q_row, q_depth, target_probs, p_row, p_depth = probs
    depth = tl.arange(0, WIDTH)
    inside = depth < depths
    draft = tl.load(drafts + row * draft_row + depth * draft_depth, mask=inside, other=0)
    # Drafts of padding rows may be any numbers, for which there are no probabilities to read. They
    # get p = 0 and q = 1, which rejects them.
    known = inside & (draft >= 0) & (draft < vocab_size)
    far = depth.to(tl.int64)
    q = tl.load(draft_probs + row * q_row + far * q_depth + draft, mask=known, other=1.0).to(
        tl.float64
    )
    p = tl.load(target_probs + row * p_row + far * p_depth + draft, mask=known, other=0.0).to(
        tl.float64
    )
    u = tl.load(accept_uniforms + row * u_row + depth * u_depth, mask=inside, other=0.0)
    return tl.min(tl.where(inside & (u * q < p), depths, tl.minimum(depth, depths)), 0), draft


@triton.jit
def _weights(probs, row, stop, index, depths, vocab_size):
    """p and the residual (p - q)+ of the tokens `index` at the position where the row stops; q
    counts as 0 after the last draft."""
    draft_probs, q_row, q_depth, target_probs, p_row, p_depth = probs
    inside = index < vocab_size
    far = stop.to(tl.int64)
    p = tl.load(target_probs + row * p_row + far * p_depth + index, mask=inside, other=0.0).to(
        tl.float32
    )
    q = tl.load(
        draft_probs + row * q_row + far * q_depth + index,
        mask=only_if(inside, stop < depths),
        other=0.0,
    )
    return p.to(tl.float64), tl.maximum(p - q.to(tl.float32), 0.0).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["drafts", "accept_uniforms"])
def _sums_kernel(
    drafts,
    accept_uniforms,
    strides,
    probs,
    sums,
    depths,
    vocab_size,
    num_chunks,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store sums [2, R, num_chunks] float64: per chunk, the mass of p and of the residual at the
    position where the row stops."""
    row = (tl.program_id(0) // num_chunks).to(tl.int64)
    chunk = tl.program_id(0) % num_chunks
    stop, _draft = _stop(drafts, accept_uniforms, strides, probs, row, depths, vocab_size, WIDTH)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    p, residual = _weights(probs, row, stop, index, depths, vocab_size)
    tl.store(sums + tl.program_id(0), tl.sum(p, 0))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(residual, 0))


@triton.jit(do_not_specialize_on_alignment=["drafts", "accept_uniforms", "sample_uniforms"])
def _rejection_kernel(
    drafts,
    accept_uniforms,
    strides,
    probs,
    sums,
    sample_uniforms,
    s_row,
    s_depth,
    accepted,
    token_ids,
    depths,
    vocab_size,
    num_chunks,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    stop, draft = _stop(drafts, accept_uniforms, strides, probs, row, depths, vocab_size, WIDTH)
    each = tl.arange(0, CHUNKS)
    here = sums + row * num_chunks + each
    p_sums = tl.load(here, mask=each < num_chunks, other=0.0)
    residual_sums = tl.load(
        here + tl.num_programs(0) * num_chunks, mask=each < num_chunks, other=0.0
    )
    # Where p equals q up to rounding, the residual may be all zeros; p then takes its place.
    any_residual = tl.sum(residual_sums, 0) > 0
    uniform = tl.load(sample_uniforms + row * s_row + stop * s_depth)
    chunk, threshold = pick_chunk(tl.where(any_residual, residual_sums, p_sums), uniform, CHUNKS)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    p, residual = _weights(probs, row, stop, index, depths, vocab_size)
    token = chunk * CHUNK + first_above(tl.where(any_residual, residual, p), threshold, CHUNK)
    # A sum of NaN fails this comparison, too.
    token = tl.where(tl.sum(p_sums, 0) > 0, token, NO_TOKEN)
    depth = tl.arange(0, WIDTH)
    out = tl.where(depth < stop, draft, tl.where(depth == stop, token, 0))
    tl.store(accepted + row, stop.to(tl.int64))
    tl.store(token_ids + row * (depths + 1) + depth, out.to(tl.int64), mask=depth <= depths)


def accept_matching(draft_token_ids: Tensor, sampled_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    rows, depths = draft_token_ids.shape
    accepted, token_ids = _results(rows, depths, sampled_token_ids.device)
    if rows:
        _matching_kernel[(triton.cdiv(rows, MATCHING_ROWS),)](
            draft_token_ids,
            sampled_token_ids,
            (*draft_token_ids.stride(), *sampled_token_ids.stride()),
            accepted,
            token_ids,
            rows,
            depths,
            ROWS=MATCHING_ROWS,
            WIDTH=triton.next_power_of_2(1 + depths),
            num_warps=1,
        )
    return accepted, token_ids


def accept_rejection(
    draft_token_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    probs = (*strided(with_rows(draft_probs)), *strided(with_rows(target_probs)))
    rows, depths = draft_token_ids.shape
    vocab_size = target_probs.shape[2]
    accepted, token_ids = _results(rows, depths, target_probs.device)
    if not rows:
        return accepted, token_ids
    chunk = chunk_size(vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    width = triton.next_power_of_2(1 + depths)
    sums = torch.empty(2, rows, num_chunks, dtype=torch.float64, device=target_probs.device)
    strides = (*draft_token_ids.stride(), *accept_uniforms.stride())
    inputs = (draft_token_ids, accept_uniforms, strides, probs, sums)
    _sums_kernel[(rows * num_chunks,)](
        *inputs, depths, vocab_size, num_chunks, WIDTH=width, CHUNK=chunk, num_warps=4
    )
    _rejection_kernel[(rows,)](
        *inputs,
        sample_uniforms,
        *sample_uniforms.stride(),
        accepted,
        token_ids,
        depths,
        vocab_size,
        num_chunks,
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )
    return accepted, token_ids


def _results(rows: int, depths: int, device: torch.device) -> tuple[Tensor, Tensor]:
    accepted = torch.empty(rows, dtype=torch.int64, device=device)
    return accepted, torch.empty(rows, 1 + depths, dtype=torch.int64, device=device)
