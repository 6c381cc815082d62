"""`accept_tree` in Triton, one program per row."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pick(values, lane, at):
    """The element `at` of values [WIDTH]."""
    # Triton cannot index an element of a block.
    return tl.sum(tl.where(lane == at, values, 0), 0)


@triton.jit
def _tree_kernel(
    tokens_ptr,
    parents_ptr,
    choices_ptr,
    accepted_ptr,
    out_ptr,
    path_ptr,
    ranks_ptr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    inside = lane < TOKENS
    tokens = tl.load(tokens_ptr + row * TOKENS + lane, mask=inside, other=0)
    # No token has the index -2, so padding is nobody's child.
    parents = tl.load(parents_ptr + row * TOKENS + lane, mask=inside, other=-2)
    choices = tl.load(choices_ptr + row * TOKENS + lane, mask=inside, other=0)
    out_ptr += row * (DEPTH + 1)
    path_ptr += row * (DEPTH + 1)
    tl.store(path_ptr, tl.zeros([], tl.int64))
    at = row * 0
    accepted = row * 0
    alive = row == row
    for depth in tl.static_range(DEPTH):
        choice = _pick(choices, lane, at)
        tl.store(out_ptr + depth, tl.where(alive, choice, 0))
        below = (parents == at) & (lane > 0)
        child = tl.min(tl.where(below & (tokens == choice), lane, WIDTH), 0)
        found = alive & (child < WIDTH)
        rank = tl.sum((below & (lane < child)).to(tl.int64), 0)
        none = tl.where(alive & (tl.sum(below.to(tl.int32), 0) > 0), -1, -2)
        tl.store(ranks_ptr + row * DEPTH + depth, tl.where(found, rank, none))
        at = tl.where(found, child.to(tl.int64), at)
        alive = found
        accepted += found.to(tl.int64)
        tl.store(path_ptr + depth + 1, tl.where(found, at, 0))
    tl.store(out_ptr + DEPTH, tl.where(alive, _pick(choices, lane, at), 0))
    tl.store(accepted_ptr + row, accepted)


def accept_tree(
    token_ids: Tensor, parents: Tensor, sampled_token_ids: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the reference."""
    rows, tokens = token_ids.shape
    out = [
        token_ids.new_empty(rows, *shape) for shape in ((), (1 + depth,), (1 + depth,), (depth,))
    ]
    if rows:
        inputs = (t.contiguous() for t in (token_ids, parents, sampled_token_ids))
        width = triton.next_power_of_2(tokens)
        _tree_kernel[(rows,)](*inputs, *out, TOKENS=tokens, DEPTH=depth, WIDTH=width, num_warps=1)
    accepted, chosen, path, ranks = out
    return accepted, chosen, path, ranks
