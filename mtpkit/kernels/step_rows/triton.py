"""Bookkeeping of a step's rows in Triton: one launch per op, where PyTorch takes up to ten."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import Early, strided, wait_for_previous
from mtpkit.kernels.ring import ring_capacity
from mtpkit.kernels.step_rows.reference import DecodeRows

_BLOCK = 128
"""Tokens per program of `kv_slots`, and rows per program of `ring_lens_after`."""


@Early
@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["slots_ptr", "live_ptr"])
def _decode_rows_kernel(
    slots_ptr,
    live_ptr,
    computed_ptr,
    token_rows,
    counts,
    table_rows,
    found,
    slots,
    COUNTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute what one row needs per program."""
    wait_for_previous(EARLY)
    tokens_ptr, tokens_stride = token_rows
    table_ptr, table_stride = table_rows
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    inside = t < WIDTH
    slot = tl.load(slots_ptr + row)
    # A null row's slot is -1, which is the last slot in the twin's indexing.
    slot = tl.where(slot < 0, slot + slots, slot)
    context = tl.load(computed_ptr + slot)
    position = context + t
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
    place = block * BLOCK_SIZE + position % BLOCK_SIZE
    if live_ptr is not None:
        place = tl.where(tl.load(live_ptr + row) < 0, -1, place)
    index = row * WIDTH + t
    tl.store(
        found.token_ids + index,
        tl.load(tokens_ptr + slot * tokens_stride + t, mask=inside, other=0),
        mask=inside,
    )
    tl.store(found.rows + index, row + tl.zeros([BLOCK], tl.int64), mask=inside)
    tl.store(found.positions + index, position, mask=inside)
    tl.store(found.kv_slots + index, place, mask=inside)
    tl.store(found.flat + index, index, mask=inside)
    if row == 0:
        tl.store(found.starts, row)
    tl.store(found.starts + row + 1, (row + 1) * WIDTH)
    tl.store(found.context_lens + row, context)
    for index in tl.static_range(COUNTS):
        tl.store(found.counts[index] + row, tl.load(counts[index] + slot))


def decode_rows(
    slots: Tensor,
    live: Tensor | None,
    num_computed: Tensor,
    tokens: Tensor,
    counts: tuple[Tensor, ...],
    block_tables: Tensor,
    width: int,
    block_size: int,
) -> DecodeRows:
    """See the reference."""
    count = len(slots)

    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=slots.device)

    token_ids, rows, positions, places, index = (ints(count * width) for _ in range(5))
    counted = tuple(ints(count) for _ in counts)
    found = DecodeRows(
        token_ids, rows, positions, places, index, ints(count + 1), ints(count), counted
    )
    if count:
        _decode_rows_kernel[(count,)](
            slots.contiguous(),
            live,
            num_computed,
            strided(tokens),
            counts,
            strided(block_tables),
            found,
            len(num_computed),
            COUNTS=len(counts),
            WIDTH=width,
            BLOCK_SIZE=block_size,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )
    return found


@Early
@triton.jit(
    do_not_specialize=["tokens"], do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"]
)
def _kv_slots_kernel(
    table_rows,
    rows_ptr,
    positions_ptr,
    out_ptr,
    tokens,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute the slots of BLOCK tokens per program."""
    wait_for_previous(EARLY)
    table_ptr, table_stride = table_rows
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    row = tl.load(rows_ptr + token, mask=inside, other=0)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
    tl.store(out_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)


def kv_slots(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """See the reference."""
    out = torch.empty_like(positions)
    count = len(positions)
    if count:
        _kv_slots_kernel[(triton.cdiv(count, _BLOCK),)](
            strided(block_tables),
            rows.contiguous(),
            positions.contiguous(),
            out,
            count,
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return out


@Early
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lens_ptr", "new_ptr"])
def _ring_lens_kernel(
    lens_ptr, new_ptr, out_ptr, rows, KEPT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Count the entries of BLOCK rings per program; a ring of more than KEPT old entries has been
    emptied."""
    wait_for_previous(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lens = tl.load(lens_ptr + row, mask=row < rows, other=0)
    new = tl.load(new_ptr + row, mask=row < rows, other=0)
    tl.store(out_ptr + row, tl.where(lens > KEPT, 0, lens) + new, mask=row < rows)


def ring_lens_after(ring_lens: Tensor, new: Tensor, width: int, length: int) -> Tensor:
    """See the reference."""
    rows = len(ring_lens)
    out = torch.empty_like(ring_lens)
    if rows:
        kept = ring_capacity(length) - width
        grid = (triton.cdiv(rows, _BLOCK),)
        _ring_lens_kernel[grid](
            ring_lens.contiguous(),
            new.contiguous(),
            out,
            rows,
            KEPT=kept,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return out


@Early
@triton.jit(
    do_not_specialize=["slots", "count"],
    do_not_specialize_on_alignment=["slots_ptr", "accepted_ptr"],
)
def _store_rows_kernel(
    slots_ptr,
    computed_ptr,
    token_rows,
    contexts_ptr,
    last_ptr,
    accepted_ptr,
    chosen_rows,
    draft_rows,
    counts,
    new_counts,
    slots,
    count,
    COUNTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write one row per program."""
    wait_for_previous(EARLY)
    tokens_ptr, tokens_stride = token_rows
    chosen_ptr, chosen_stride = chosen_rows
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    slot = tl.where(slot < 0, slot + slots, slot)
    tl.store(computed_ptr + slot, tl.load(contexts_ptr + row) + tl.load(last_ptr + row) + 1)
    for index in tl.static_range(COUNTS):
        tl.store(counts[index] + slot, tl.load(new_counts[index] + row))
    if row < count:
        tokens_ptr += slot * tokens_stride
        newest = tl.load(chosen_ptr + row * chosen_stride + tl.load(accepted_ptr + row))
        tl.store(tokens_ptr, tl.maximum(newest, 0))
        if DRAFTS > 0:
            drafts_ptr, draft_row, draft_column = draft_rows
            inside = t < DRAFTS
            drafts = tl.load(drafts_ptr + row * draft_row + t * draft_column, mask=inside, other=0)
            tl.store(tokens_ptr + 1 + t, tl.maximum(drafts, 0), mask=inside)


def store_rows(
    slots: Tensor,
    num_computed: Tensor,
    tokens: Tensor,
    context_lens: Tensor,
    last: Tensor,
    accepted: Tensor,
    chosen: Tensor,
    drafts: Tensor,
    counts: tuple[Tensor, ...] = (),
    new_counts: tuple[Tensor, ...] = (),
) -> None:
    """See the reference."""
    if not len(slots):
        return
    depths = drafts.shape[1]
    _store_rows_kernel[(len(slots),)](
        slots.contiguous(),
        num_computed,
        strided(tokens),
        context_lens.contiguous(),
        last.contiguous(),
        accepted.contiguous(),
        strided(chosen),
        (drafts, *drafts.stride()),
        counts,
        tuple(new.contiguous() for new in new_counts),
        len(num_computed),
        len(drafts),
        COUNTS=len(counts),
        DRAFTS=depths,
        BLOCK=triton.next_power_of_2(max(1, depths)),
        num_warps=1,
    )
