"""Losses of all MTP depths through the frozen lm_head, without ever holding the [tokens, vocabulary] logits.

The work goes chunk by chunk over tokens. Inside a chunk the teacher's distribution is made once and serves every depth,
each depth's loss and its gradient with respect to the hidden states are finished in the same pass, and the logits are
dropped. What is kept for the backward is that gradient, [N, h] a depth; the backward only scales it. The lm_head's
own gradient is never computed.

Under tensor parallelism each rank holds a slice of the vocabulary; sums, maxima and the hidden states' gradient are
reduced over the group, and everything that leaves this module is the same on all of its ranks.

Shape legend: N tokens, h hidden size, V vocabulary (of one rank: V/tp), K depths, C tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

LossKind = Literal["kl", "tv", "ce"]


@dataclass(frozen=True)
class LossOptions:
    """What `head_losses` computes and how."""

    kind: LossKind = "kl"
    """`kl`: forward KL from the base's distribution at a temperature, times the temperature squared. `tv`: total
    variation distance to it, one minus the expected acceptance rate. `ce`: cross-entropy against the tokens."""
    temperature: float = 1.0
    """Of `kl`; the other kinds are at 1."""
    chunk_size: int = 1024
    """C: memory for logits is C * V, whatever N is."""


class VocabShard:
    """Reductions over the vocabulary, which the ranks of `group` hold slice by slice (all of it when None)."""

    def __init__(self, size: int, group: dist.ProcessGroup | None = None):
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.first = size * dist.get_rank(self.group) if self.group else 0
        self.last = self.first + size

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Combine every rank's `values` in place."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values

    def max(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Largest logit [C] and its index [C] in the whole vocabulary; the lowest index wins a tie between ranks."""
        local, index = logits.max(dim=-1)
        best = self.reduce(local.clone(), dist.ReduceOp.MAX)
        index = torch.where(local == best, index + self.first, torch.iinfo(index.dtype).max)
        return best, self.reduce(index, dist.ReduceOp.MIN)

    def log_sum_exp(self, shifted: Tensor) -> Tensor:
        """[C], of logits [C, V/tp] whose largest value is 0."""
        return self.reduce(shifted.exp().sum(dim=-1)).log_()

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n] whose token is in this slice and the columns [n] where it is."""
        rows = ((tokens >= self.first) & (tokens < self.last)).nonzero().squeeze(-1)
        return rows, tokens[rows] - self.first


@dataclass(frozen=True)
class _Teacher:
    """The base's view of one chunk: its greedy choice [C], its distribution at the temperature [C, V/tp] (not for
    `ce`), and that distribution's negative entropy [C] (for `kl`)."""

    choice: Tensor
    probs: Tensor
    neg_entropy: Tensor


def head_losses(
    students: Sequence[Tensor],
    teacher: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    options: LossOptions,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of each depth's loss over its selected tokens, and where its greedy choice is the base's.

    Row n belongs to one target position: the base predicts that token from `teacher[n]`, depth k from
    `students[k - 1][n]`.

    Args:
        students: K tensors [N, h], the only inputs that receive a gradient.
        teacher: [N, h], the base's hidden states after the final norm.
        weight: [V/tp, h], the lm_head.
        targets: [N] int64, the tokens; read by `ce` alone.
        mask: [K, N] bool, the tokens that count for each depth.
        group: the tensor-parallel group, or None when `weight` is whole.

    Returns:
        losses [K] in at least fp32, and matches [K, N] bool (True where student and base have the same argmax,
        whatever the mask). On ranks of `group` the gradient is that of one loss, computed by all together.
    """
    return _HeadLosses.apply(teacher, weight, targets, mask, options, group, *students)


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, teacher, weight, targets, mask, options, group, *students):
        shard = VocabShard(weight.shape[0], group)
        wants_grad = any(ctx.needs_input_grad[6:])
        accumulate = torch.promote_types(teacher.dtype, torch.float32)
        losses = torch.zeros(len(students), dtype=accumulate, device=teacher.device)
        matches = torch.empty_like(mask)
        grads = [torch.empty_like(student) for student in students] if wants_grad else []
        for start in range(0, teacher.shape[0], options.chunk_size):
            rows = slice(start, start + options.chunk_size)
            base = _teach(_logits(teacher[rows], weight), options, shard)
            for depth, student in enumerate(students):
                logits = _logits(student[rows], weight)
                peak, choice = shard.max(logits)
                matches[depth, rows] = choice == base.choice
                loss, grad = _LOSSES[options.kind](logits.sub_(peak[:, None]), base, targets[rows], options, shard)
                losses[depth] += (loss * mask[depth, rows]).sum()
                if wants_grad:
                    grad.mul_(mask[depth, rows, None])
                    torch.mm(grad.to(weight.dtype), weight, out=grads[depth][rows])
        ctx.save_for_backward(*[shard.reduce(grad) for grad in grads])
        ctx.mark_non_differentiable(matches)
        return losses, matches

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_losses, _):
        scaled = (grad * scale.to(grad.dtype) for grad, scale in zip(ctx.saved_tensors, grad_losses, strict=True))
        return (None,) * 6 + tuple(scaled)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[C, V/tp] in at least fp32."""
    return (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))


def _teach(logits: Tensor, options: LossOptions, shard: VocabShard) -> _Teacher:
    peak, choice = shard.max(logits)
    none = logits.new_empty(0)
    if options.kind == "ce":
        return _Teacher(choice, none, none)
    scaled = logits.sub_(peak[:, None]).div_(options.temperature if options.kind == "kl" else 1.0)
    log_sum = shard.log_sum_exp(scaled)
    probs = (scaled - log_sum[:, None]).exp_()
    if options.kind == "tv":
        return _Teacher(choice, probs, none)
    return _Teacher(choice, probs, shard.reduce(scaled.mul_(probs).sum(dim=-1)) - log_sum)


# Each loss takes logits [C, V/tp] shifted so that their largest is 0, owns that buffer, and returns the loss [C] and
# its gradient [C, V/tp] with respect to the logits.
LossAndGrad = tuple[Tensor, Tensor]


def _kl(logits: Tensor, base: _Teacher, targets: Tensor, options: LossOptions, shard: VocabShard) -> LossAndGrad:
    temperature = options.temperature
    scaled = logits.div_(temperature)
    log_sum = shard.log_sum_exp(scaled)
    cross_entropy = log_sum - shard.reduce(torch.linalg.vecdot(base.probs, scaled))
    loss = (base.neg_entropy + cross_entropy) * temperature**2
    return loss, scaled.sub_(log_sum[:, None]).exp_().sub_(base.probs).mul_(temperature)


def _tv(logits: Tensor, base: _Teacher, targets: Tensor, options: LossOptions, shard: VocabShard) -> LossAndGrad:
    probs = logits.sub_(shard.log_sum_exp(logits)[:, None]).exp_()
    excess = probs - base.probs
    loss = shard.reduce(excess.abs().sum(dim=-1)) / 2
    sign = excess.sign_().div_(2)
    mean = shard.reduce(torch.linalg.vecdot(probs, sign))
    return loss, probs.mul_(sign.sub_(mean[:, None]))


def _ce(logits: Tensor, base: _Teacher, targets: Tensor, options: LossOptions, shard: VocabShard) -> LossAndGrad:
    log_probs = logits.sub_(shard.log_sum_exp(logits)[:, None])
    rows, columns = shard.locate(targets)
    loss = torch.zeros_like(log_probs[:, 0])
    loss[rows] = -log_probs[rows, columns]
    grad = log_probs.exp_()
    grad[rows, columns] -= 1
    return shard.reduce(loss), grad


_LOSSES = {"kl": _kl, "tv": _tv, "ce": _ce}
