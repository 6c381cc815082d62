"""Passes over a chunk of logits that compute the losses of draft heads and the gradient with
respect to the logits."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mtpkit.kernels.head_loss.slices import (
    BASE_PEAK,
    BASE_TOKEN,
    BASE_TOTAL,
    CROSS,
    NUM_STATISTICS,
    PEAK,
    TOKEN,
    TOTAL,
    LossKind,
)

GROUP = 64
"""Number of neighbouring logits that `best` first reduces to their maximum."""


class HeadLoss:
    """Loss of one chunk: C target positions, at each of which the teacher and up to K depths
    predict the same token.

    The logits are overwritten: both twins work in place, and what their buffers hold between calls
    is up to each twin. The reference keeps exponentials there, so that each exponential is computed
    once.

    Args:
        teacher: [C, V].
        students: [S, V], one row for each True of `mask`, in the order of `mask.nonzero()`.
        mask: [K, C] bool, the depths that predict at each position.
        targets: [C] int64, for `ce` the column of the target token at each position. A column
            outside 0 .. V - 1 belongs to the slice of another rank.
        kind: `kl` is KL(teacher || student) at a temperature, times the temperature squared; `tv`
            is total variation distance; `ce` is cross-entropy against the targets.
        temperature: temperature of `kl`; 1 for the other kinds.
        floor: [C], for `kl`: the teacher's distribution leaves out tokens whose teacher logit is
            below the floor, and is renormalised over the remaining tokens. None: all tokens count.

    Sums are fp32 whatever the dtype of the logits; in the reference they are fp64 for fp64 logits.

    Shape legend: C positions, V vocabulary (one rank's slice of it), K depths, S student rows, P
    slices.
    """

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
        self.kind = kind
        self.temperature = temperature
        self.floor = floor
        self.mask = mask
        self.targets = targets
        self.out = students
        wide = torch.promote_types(students.dtype, torch.float32)
        self.teacher, self.students = teacher.to(wide), students.to(wide)
        self.parts = students.new_zeros(1, NUM_STATISTICS, len(students), dtype=wide)
        self.weights = self.teacher

    def statistics(self) -> Tensor:
        """Statistics [P, 7, S], see `slices`; P = 1 here."""
        base = self._weigh_teacher()
        for span, rows in self._depths():
            part = self.parts[0, :, span]
            student = self.students[span]
            part[PEAK], part[TOKEN] = best(student)
            part[BASE_PEAK], part[BASE_TOKEN] = base[BASE_PEAK, rows], base[BASE_TOKEN, rows]
            if self.kind == "ce":
                part[CROSS] = _pick(student, self.targets[rows])
            shifted = _shift(student, part[PEAK], self.temperature)
            part[BASE_TOTAL] = base[BASE_TOTAL, rows]
            if self.kind == "kl":
                part[CROSS] = base[CROSS, rows] - torch.linalg.vecdot(self.weights[rows], shifted)
            part[TOTAL] = shifted.exp_().sum(-1)
        return self.parts

    def overlap(self, whole: Tensor) -> Tensor:
        """Loss and gradient pull of `tv`, [P, 2, S], to be summed over P; call `statistics` first.

        With p the teacher's probability of a token, q the student's and d = sign(q - p) / 2, the
        loss is the sum of d (q - p), and the pull is the sum of d q. After `statistics` of `kl` at
        temperature 1 the result is the same, but `gradient_` can no longer be called.

        Args:
            whole: [7, S], the folded statistics.
        """
        parts = torch.empty_like(self.parts[:, :2])
        scale, base_scale = self._scales(whole)
        for span, rows in self._depths():
            probs = self.students[span].mul_(scale[span, None])
            excess = torch.addcmul(probs, self.weights[rows], base_scale[span, None], value=-1)
            parts[0, 0, span] = excess.abs().sum(-1) / 2
            parts[0, 1, span] = torch.linalg.vecdot(probs, excess.sign_()) / 2
        return parts

    def gradient_(self, whole: Tensor, pull: Tensor | None = None) -> None:
        """Overwrite `students` with the gradient of each row's loss with respect to its logits, in
        their dtype.

        Args:
            whole: [7, S], the folded statistics.
            pull: [S], for `tv`: the second result of `overlap`, summed over P.
        """
        scale, base_scale = self._scales(whole)
        for span, rows in self._depths():
            student = self.students[span]
            if self.kind == "tv":
                assert pull is not None
                excess = torch.addcmul(
                    student, self.weights[rows], base_scale[span, None], value=-1
                )
                student.mul_(excess.sign_().div_(2).sub_(pull[span, None]))
                continue
            student.mul_(scale[span, None])
            if self.kind == "kl":
                student.addcmul_(self.weights[rows], base_scale[span, None], value=-1)
            else:
                _lower(student, self.targets[rows])
        if self.students is not self.out:
            self.out.copy_(self.students)

    def _weigh_teacher(self) -> Tensor:
        """Set `weights` and return the teacher's statistics [7, C], including the teacher's term of
        CROSS."""
        base = self.parts.new_zeros(NUM_STATISTICS, len(self.teacher))
        base[BASE_PEAK], base[BASE_TOKEN] = best(self.teacher)
        if self.kind == "ce":
            base[BASE_TOTAL] = base[BASE_PEAK] * 0  # NaN if the peak is not finite
            return base
        left_out = None if self.floor is None else self.teacher < self.floor[:, None]
        shifted = _shift(self.teacher, base[BASE_PEAK], self.temperature)
        if self.kind == "tv":
            self.weights = shifted.exp_()
        else:
            self.weights = shifted.exp()
            if left_out is not None:
                self.weights.masked_fill_(left_out, 0)
            base[CROSS] = torch.linalg.vecdot(self.weights, shifted)
        base[BASE_TOTAL] = self.weights.sum(-1)
        return base

    def _scales(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for student and teacher that turn weights relative to this slice's peaks into
        probabilities, times T for `kl`."""
        own = self.parts[0]
        factor = self.temperature
        scale = ((own[PEAK] - whole[PEAK]) / self.temperature).exp() * (factor / whole[TOTAL])
        base_scale = ((own[BASE_PEAK] - whole[BASE_PEAK]) / self.temperature).exp() * (
            factor / whole[BASE_TOTAL]
        )
        return scale, base_scale

    def _depths(self) -> Iterator[tuple[slice, slice | Tensor]]:
        """Yield each depth's rows of `students`, and the matching rows of `teacher`."""
        start = 0
        for chosen in self.mask:
            rows = slice(None) if chosen.all() else chosen.nonzero().squeeze(-1)
            span = slice(start, start + int(chosen.sum()))
            yield span, rows
            start = span.stop


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit [n] of each row [n, V], and its column [n], the first among equals.

    torch's maximum is many times faster than its argmax, so only one block of each row gets an
    argmax.
    """
    width = logits.shape[1]
    whole = width // GROUP * GROUP
    if not whole:
        return logits.max(-1)
    tops = logits[:, :whole].unflatten(1, (-1, GROUP)).amax(-1)
    if whole < width:
        tops = torch.cat([tops, logits[:, whole:].amax(-1, keepdim=True)], 1)
    # The last block is shorter and is extended to the left; if it wins, the logits added are
    # smaller than its maximum.
    start = (tops.argmax(-1, keepdim=True) * GROUP).clamp_(max=width - GROUP)
    columns = start + torch.arange(GROUP, device=logits.device)
    peak, place = logits.gather(1, columns).max(-1)
    return peak, start.squeeze(-1) + place


def _shift(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """Compute (logits - peak) / T in place."""
    logits.sub_(peak[:, None])
    return logits if temperature == 1 else logits.div_(temperature)


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    """[n], the logit in each row's column; 0 where the column is outside this slice."""
    held = (columns >= 0) & (columns < logits.shape[1])
    return logits.gather(1, columns.where(held, 0)[:, None]).squeeze(1).where(held, 0)


def _lower(probs: Tensor, columns: Tensor) -> None:
    """Subtract 1 in each row's column, unless the column is outside this slice."""
    held = (columns >= 0) & (columns < probs.shape[1])
    probs.scatter_add_(1, columns.where(held, 0)[:, None], -held[:, None].to(probs.dtype))
