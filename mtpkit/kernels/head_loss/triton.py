"""Losses of draft heads in Triton: each logit is read twice (for `tv` three times), and its
gradient is written once.

A program holds one block of a teacher row in registers and loops over the student rows of that
position, so that the teacher's statistics are computed once for all depths. Rows that the mask
leaves out take no memory. Each pass recomputes the exponentials, which is cheaper than storing
them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpkit.kernels.device import with_rows
from mtpkit.kernels.head_loss.slices import NUM_STATISTICS, LossKind

BLOCK = 4096
"""Number of logits of a row per program."""
NUM_WARPS = 8

_LOG2_E = 1.4426950408889634
_FIELDS = tl.constexpr(NUM_STATISTICS)
_BASE = tl.constexpr(3)  # index of the teacher's first statistic, BASE_PEAK


@triton.jit
def _place(width, BLOCK):
    """The position of this program, its slice of the vocabulary, the slice's columns, and a mask of
    the columns that exist."""
    parts = tl.cdiv(width, BLOCK)
    part = tl.program_id(0) % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // parts).to(tl.int64), part.to(tl.int64), column, column < width


@triton.jit
def _load(logits, row, stride, column, inside):
    return tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _first(x, peak, column):
    """The first column whose logit is the peak."""
    return tl.min(tl.where(x == peak, column, 2147483647), axis=0).to(tl.float32)


@triton.jit
def _slot(slots, depth, positions, row):
    return tl.load(slots + depth * positions + row).to(tl.int64)


@triton.jit
def _probabilities(x, whole, rows, slot, scale):
    """Probabilities of the student's logits x, given its statistics in `whole`; those of the
    teacher if `whole` is advanced by _BASE rows."""
    peak = tl.load(whole + slot)
    total = tl.load(whole + 2 * rows + slot)
    return tl.exp2((x - peak) * scale) * (1 / total)


@triton.jit
def _half_sign(x):
    return tl.where(x > 0, 0.5, tl.where(x < 0, -0.5, 0.0))


@triton.jit
def _statistics_kernel(
    chunk, sizes, out, KIND: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the statistics in out [P, 7, S], see `slices`."""
    teacher, teacher_stride, students, student_stride, slots, targets, floor = chunk
    positions, depths, rows, width, temperature, scale = sizes
    row, part, column, inside = _place(width, BLOCK)
    t = _load(teacher, row, teacher_stride, column, inside)
    base_peak = tl.max(t, axis=0)
    base_token = _first(t, base_peak, column)
    if KIND == "ce":
        base_total = tl.sum(tl.where(t < float("inf"), 0.0, float("nan")), axis=0)
    else:
        weight = tl.exp2((t - base_peak) * scale)
        if TOP_K:
            weight = tl.where(t >= tl.load(floor + row).to(tl.float32), weight, 0.0)
        base_total = tl.sum(weight, axis=0)
    for depth in range(depths):
        slot = _slot(slots, depth, positions, row)
        if slot >= 0:
            s = _load(students, slot, student_stride, column, inside)
            peak = tl.max(s, axis=0)
            if KIND == "kl":
                # Past the end, both logits are -inf, and their difference is NaN.
                lead = tl.where(inside, (t - base_peak) - (s - peak), 0.0)
                cross = tl.sum(weight * lead, axis=0) / temperature
            elif KIND == "ce":
                cross = tl.sum(
                    tl.where(inside & (column == tl.load(targets + row).to(tl.int32)), s, 0.0),
                    axis=0,
                )
            else:
                cross = 0.0
            place = out + part * _FIELDS * rows + slot
            tl.store(place, peak)
            tl.store(place + rows, _first(s, peak, column))
            tl.store(place + 2 * rows, tl.sum(tl.exp2((s - peak) * scale), axis=0))
            tl.store(place + _BASE * rows, base_peak)
            tl.store(place + (_BASE + 1) * rows, base_token)
            tl.store(place + (_BASE + 2) * rows, base_total)
            tl.store(place + 2 * _BASE * rows, cross)


@triton.jit
def _second_pass_kernel(
    chunk,
    sizes,
    whole,
    pulls,
    out,
    GRADIENT: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With GRADIENT, overwrite the students' logits with their gradient; otherwise store loss and
    pull of `tv` in out [P, 2, S]."""
    teacher, teacher_stride, students, student_stride, slots, targets, floor = chunk
    positions, depths, rows, width, temperature, scale = sizes
    row, part, column, inside = _place(width, BLOCK)
    each = tl.arange(0, DEPTHS)
    any_slot = tl.max(
        tl.load(slots + each * positions + row, mask=each < depths, other=-1), axis=0
    ).to(tl.int64)
    if any_slot >= 0:
        if KIND != "ce":
            t = _load(teacher, row, teacher_stride, column, inside)
            # All student rows of a position repeat the teacher's statistics.
            p = _probabilities(t, whole + _BASE * rows, rows, any_slot, scale)
            if TOP_K:
                p = tl.where(t >= tl.load(floor + row).to(tl.float32), p, 0.0)
        for depth in range(depths):
            slot = _slot(slots, depth, positions, row)
            if slot >= 0:
                s = _load(students, slot, student_stride, column, inside)
                q = _probabilities(s, whole, rows, slot, scale)
                if GRADIENT:
                    if KIND == "kl":
                        gradient = (q - p) * temperature
                    elif KIND == "tv":
                        gradient = q * (_half_sign(q - p) - tl.load(pulls + slot))
                    else:
                        gradient = q - tl.where(
                            column == tl.load(targets + row).to(tl.int32), 1.0, 0.0
                        )
                    # In place: no other program reads this part of the student's row.
                    place = students + slot * student_stride + column
                    tl.store(place, gradient.to(students.dtype.element_ty), mask=inside)
                else:
                    half = _half_sign(q - p)
                    place = out + part * 2 * rows + slot
                    tl.store(place, tl.sum(half * (q - p), axis=0))
                    tl.store(place + rows, tl.sum(half * q, axis=0))


class HeadLoss:
    """See the reference. Logits may have any row stride; loads are fastest if the stride is a
    multiple of 16 bytes."""

    def __init__(
        self,
        teacher: Tensor,
        students: Tensor,
        mask: Tensor,
        targets: Tensor,
        kind: LossKind,
        temperature: float = 1.0,
        floor: Tensor | None = None,
    ):
        assert students.stride(-1) == 1, (
            "the gradient overwrites the students, whose columns must be contiguous"
        )
        chosen = mask.flatten()
        teacher = with_rows(teacher)
        slots = (chosen.cumsum(0, dtype=torch.int32) - 1).masked_fill_(~chosen, -1)
        self.students = students
        self.depths = len(mask)
        self.parts = triton.cdiv(students.shape[1], BLOCK)
        self.grid = (mask.shape[1] * self.parts,)
        logits = (teacher, teacher.stride(0), students, students.stride(0))
        self.chunk = (
            *logits,
            slots,
            targets.contiguous(),
            slots if floor is None else floor.contiguous(),
        )
        self.sizes = (
            mask.shape[1],
            self.depths,
            *students.shape,
            temperature,
            _LOG2_E / temperature,
        )
        self.settings = dict(KIND=kind, TOP_K=floor is not None, BLOCK=BLOCK, num_warps=NUM_WARPS)

    def statistics(self) -> Tensor:
        """See the reference."""
        out = self._empty(NUM_STATISTICS)
        _statistics_kernel[self.grid](self.chunk, self.sizes, out, **self.settings)
        return out

    def overlap(self, whole: Tensor) -> Tensor:
        """See the reference."""
        out = self._empty(2)
        self._second_pass(whole, whole, out, gradient=False)
        return out

    def gradient_(self, whole: Tensor, pull: Tensor | None = None) -> None:
        """See the reference."""
        self._second_pass(whole, whole if pull is None else pull, whole, gradient=True)

    def _second_pass(self, whole: Tensor, pulls: Tensor, out: Tensor, gradient: bool) -> None:
        _second_pass_kernel[self.grid](
            self.chunk,
            self.sizes,
            whole.contiguous(),
            pulls.contiguous(),
            out,
            GRADIENT=gradient,
            DEPTHS=triton.next_power_of_2(self.depths),
            **self.settings,
        )

    def _empty(self, numbers: int) -> Tensor:
        shape = (self.parts, numbers, len(self.students))
        return torch.empty(shape, dtype=torch.float32, device=self.students.device)
