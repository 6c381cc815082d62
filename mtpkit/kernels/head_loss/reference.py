"""The passes over a chunk of logits that give the losses of draft heads and the gradient of the logits."""

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
"""Logits of which `best` keeps the largest."""


class HeadLoss:
    """One chunk: C target positions, at each of which the teacher and up to K depths predict the same token.

    The logits are used up: they are worked on in place, and what the buffers hold between the calls is the twin's own.
    Here that is the exponentials, so that each is taken once.

    Args:
        teacher: [C, V].
        students: [S, V], one row for each True of `mask`, in the order of `mask.nonzero()`.
        mask: [K, C] bool, the depths that predict at each position.
        targets: [C] int64, for `ce` the column of the token at each position; it may lie outside 0 .. V - 1, in the
            slice that another rank holds.
        kind: `kl` is KL(teacher || student) at a temperature, times its square, `tv` total variation distance, `ce`
            cross-entropy against the targets.
        temperature: of `kl`, 1 for the others.
        floor: [C] for `kl`: tokens of which the teacher's logit is below it have no part in the teacher's
            distribution, which is renormalised over the others. None: all have.

    Sums are in fp32 whatever the logits' dtype (fp64 of fp64 logits).

    Shape legend: C positions, V vocabulary (one rank's slice of it), K depths, S student rows, P slices.
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
        self.kind, self.temperature, self.floor = kind, temperature, floor
        self.mask, self.targets, self.out = mask, targets, students
        wide = torch.promote_types(students.dtype, torch.float32)
        self.teacher, self.students = teacher.to(wide), students.to(wide)
        self.parts = students.new_zeros(1, NUM_STATISTICS, len(students), dtype=wide)
        self.weights = self.teacher

    def statistics(self) -> Tensor:
        """[P, 7, S], see `slices`; P = 1 here."""
        base = self._weigh_teacher()
        for span, rows in self._depths():
            part, student = self.parts[0, :, span], self.students[span]
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
        """For `tv`, after `statistics`: its loss and the gradient's pull, [P, 2, S], to be summed over P.

        After statistics of `kl` at temperature 1 it gives the same, but no gradient can follow.

        With p the teacher's probability of a token, q the student's and d the half of sign(q - p), the loss is the sum
        of d (q - p), the pull the sum of d q.

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
        """Put the gradient of each row's loss with respect to its logits in the place of `students`, in their dtype.

        Args:
            whole: [7, S], the folded statistics.
            pull: [S] for `tv`, the summed second part of `overlap`.
        """
        scale, base_scale = self._scales(whole)
        for span, rows in self._depths():
            student = self.students[span]
            if self.kind == "tv":
                assert pull is not None
                excess = torch.addcmul(student, self.weights[rows], base_scale[span, None], value=-1)
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
        """Statistics [7, C] of the teacher, CROSS being its part of that; `weights` from here on."""
        base = self.parts.new_zeros(NUM_STATISTICS, len(self.teacher))
        base[BASE_PEAK], base[BASE_TOKEN] = best(self.teacher)
        if self.kind == "ce":
            base[BASE_TOTAL] = base[BASE_PEAK] * 0  # NaN of a peak that is not finite
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
        """What turns a row's weights, which are beside this slice's peak, into probabilities (times T for `kl`)."""
        own, factor = self.parts[0], self.temperature
        scale = ((own[PEAK] - whole[PEAK]) / self.temperature).exp() * (factor / whole[TOTAL])
        base_scale = ((own[BASE_PEAK] - whole[BASE_PEAK]) / self.temperature).exp() * (factor / whole[BASE_TOTAL])
        return scale, base_scale

    def _depths(self) -> Iterator[tuple[slice, slice | Tensor]]:
        """Each depth's rows of `students`, and the rows of `teacher` that belong to them."""
        start = 0
        for chosen in self.mask:
            rows = slice(None) if chosen.all() else chosen.nonzero().squeeze(-1)
            span = slice(start, start + int(chosen.sum()))
            yield span, rows
            start = span.stop


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit [n] of each row [n, V], and its column [n], the first of equals.

    A search for the largest goes many times faster than one for its place: the place is looked for in one block.
    """
    width = logits.shape[1]
    whole = width // GROUP * GROUP
    if not whole:
        return logits.max(-1)
    tops = logits[:, :whole].unflatten(1, (-1, GROUP)).amax(-1)
    if whole < width:
        tops = torch.cat([tops, logits[:, whole:].amax(-1, keepdim=True)], 1)
    # The last block is shorter, and is made whole by logits before it: they are smaller where it is the first.
    start = (tops.argmax(-1, keepdim=True) * GROUP).clamp_(max=width - GROUP)
    columns = start + torch.arange(GROUP, device=logits.device)
    peak, place = logits.gather(1, columns).max(-1)
    return peak, start.squeeze(-1) + place


def _shift(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """(logits - peak) / T, in place."""
    logits.sub_(peak[:, None])
    return logits if temperature == 1 else logits.div_(temperature)


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    """[n] the logit in each row's column, 0 where it has none."""
    held = (columns >= 0) & (columns < logits.shape[1])
    return logits.gather(1, columns.where(held, 0)[:, None]).squeeze(1).where(held, 0)


def _lower(probs: Tensor, columns: Tensor) -> None:
    """Take 1 from each row's column, where it has one."""
    held = (columns >= 0) & (columns < probs.shape[1])
    probs.scatter_add_(1, columns.where(held, 0)[:, None], -held[:, None].to(probs.dtype))
