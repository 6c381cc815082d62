"""Losses of all MTP depths through the frozen lm_head, without ever holding the [tokens, vocabulary] logits.

The work goes chunk by chunk over tokens. One product gives a chunk's logits of the base and of every depth, in a buffer
that all chunks share; `kernels.head_loss` makes of them the losses and, in their place, their gradient; a second
product takes that to the hidden states. Tokens that a depth's mask leaves out have no row in any of this. The lm_head's
own gradient is never computed.

What is kept for the backward is the hidden states' gradient, [N, h] a depth in the model's dtype, and the backward only
scales it: a depth's losses are summed here, so what comes from above is one number a depth. Making logits and
statistics again in the backward would keep as much, the hidden states, and take 1 + K products more than the 1 + 2 K
that there are: 1 + K for logits, K for the gradient.

Under tensor parallelism each rank holds a slice of the vocabulary. The ranks exchange seven numbers a row and chunk,
two more for `tv`, and add up the hidden states' gradient; what leaves this module is the same on all of them.

Shape legend: N tokens, h hidden size, V vocabulary (of one rank: V/tp), K depths, C tokens of a chunk, S rows of
logits of a chunk's depths, at most K * C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.kernels.head_loss import HeadLoss, LossKind
from mtpkit.kernels.head_loss.slices import draft_tokens, fold, is_finite, log_probs, matches, number_tokens, row_losses
from mtpkit.platform import to_device

CHUNK_BYTES = {"cuda": 384 << 20, "cpu": 16 << 20}
"""What the logits of a chunk take, base and depths together: on a GPU enough rows for products at full rate, on a CPU
what stays in its cache. The products for logits and for the gradient take 38 ms on an H200 for 4,096 tokens at h =
4,096, V = 131,072, K = 3; with 512 MiB 43 ms, with 256 MiB 39."""
LEAST_TOKENS = 64
"""A chunk has at least so many, and a multiple of them, however large the vocabulary: each reads the whole lm_head."""
_ALIGNMENT = 64  # elements between rows of logits are a multiple of this, for loads of 16 bytes


@dataclass(frozen=True)
class LossOptions:
    """What `head_losses` computes and how."""

    kind: LossKind = "kl"
    """`kl`: forward KL from the base's distribution at a temperature, times the temperature squared. `tv`: total
    variation distance to it, one minus the expected acceptance rate. `ce`: cross-entropy against the tokens."""
    temperature: float = 1.0
    """Of `kl`; the other kinds are at 1."""
    chunk_size: int = 0
    """C; 0: as many tokens as CHUNK_BYTES hold the logits of, whatever N and V are."""
    top_k: int = 0
    """Of `kl`: the base's distribution is cut to its `top_k` largest logits, and to those that equal the smallest of
    them, and made to sum to 1 again. Left out is what the base gives all other tokens: the loss is that of a base that
    never says them, and is least where the head never does either. 0: all tokens."""


class VocabShard:
    """The slice of the vocabulary that this rank of `group` holds; all of it when that is None."""

    def __init__(self, size: int, group: dist.ProcessGroup | None = None):
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.first = size * dist.get_rank(self.group) if self.group else 0

    def sum(self, values: Tensor) -> Tensor:
        """Add up every rank's `values` in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """[tp, ...], every rank's `values`."""
        if self.group is None:
            return values[None]
        every = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, values.contiguous(), group=self.group)
        return torch.stack(every)

    def pick(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """[n] in at least fp32: the logit of each of `tokens` [n] in each of `rows` [n] of logits [.., V/tp]."""
        columns = tokens - self.first
        held = (columns >= 0) & (columns < logits.shape[1])
        return self.sum(logits[rows, columns.where(held, 0)].to(_wide(logits)).where(held, 0))

    def kth_largest(self, logits: Tensor, k: int) -> Tensor:
        """[C] the k-th largest logit of each row [C, V/tp] over all slices; the smallest where there are fewer."""
        best = self.gather(logits.topk(min(k, logits.shape[1])).values).transpose(0, 1).flatten(1)
        return best.topk(min(k, best.shape[1])).values[:, -1]


def head_losses(
    students: Sequence[Tensor],
    teacher: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    options: LossOptions,
    group: dist.ProcessGroup | None = None,
    mask_on_host: Tensor | None = None,
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
        mask_on_host: the same as `mask`, if the caller has it: else the host waits for the device to read it.

    Returns:
        losses [K] in at least fp32, and matches [K, N] bool, True where the mask is and student and base have the same
        argmax of the logits in the model's dtype, the smallest token of equals. Where a row's logits are NaN or
        infinity, of student or base, the depth's loss is, too, and the row is no match. On ranks of `group` the
        gradient is that of one loss, computed by all together.
    """
    wants_grad = torch.is_grad_enabled() and any(student.requires_grad for student in students)
    return _HeadLosses.apply(teacher, weight, targets, mask, mask_on_host, options, group, wants_grad, *students)


@dataclass(frozen=True)
class Agreement:
    """How far depths and base agree about each token; all [K, N] in at least fp32, 0 where the mask is not.

    Where logits are not finite `match` and `draft_is_token` are 0, and the other numbers are NaN.

    p is the base's distribution of the token at a target position, q the depth's, d = argmax q, t the text's token.
    """

    match: Tensor
    """1 where d = argmax p: greedy decoding accepts the draft."""
    draft_prob: Tensor
    """p(d): sampling at temperature 1 accepts the draft d."""
    draft_is_token: Tensor
    """1 where d = t."""
    overlap: Tensor
    """sum_v min(p(v), q(v)), one minus the total variation distance: rejection sampling accepts a draft from q."""
    token_accept: Tensor
    """min(1, q(t) / p(t)): with t drawn from p, the share of it that such a draft gives."""


@torch.no_grad()
def head_agreement(
    students: Sequence[Tensor],
    teacher: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor,
    options: LossOptions,
    group: dist.ProcessGroup | None = None,
    mask_on_host: Tensor | None = None,
) -> tuple[Tensor, Agreement]:
    """Sum of each depth's loss over its selected tokens [K], and how far it agrees with the base at each of them.

    Arguments as in `head_losses`. Logits are made once, and read once more than for the loss: one pass gives the
    statistics, of which all but the overlap follow, and the overlap takes the place of the gradient. A loss other than
    `kl` at temperature 1 over all tokens has its own two passes.
    """
    shard = VocabShard(weight.shape[0], group)
    losses = torch.zeros(len(students), dtype=_wide(teacher), device=teacher.device)
    found = losses.new_zeros(len(Agreement.__dataclass_fields__), *mask.shape)
    logits = _Logits(teacher, weight, len(students), options.chunk_size)
    for rows, parts in _chunks(mask, mask_on_host, logits.chunk_size):
        base, drafts = logits.of(teacher[rows], [students[part.depth][part.rows] for part in parts])
        values, agreement = _agree(base, drafts, mask[:, rows], targets[rows], options, shard)
        for part in parts:
            losses[part.depth] += values[part.span].sum()
            found[:, part.depth][:, part.rows] = agreement[:, part.span]
    return losses, Agreement(*found)


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.Function,
        teacher: Tensor,
        weight: Tensor,
        targets: Tensor,
        mask: Tensor,
        mask_on_host: Tensor | None,
        options: LossOptions,
        group: dist.ProcessGroup | None,
        wants_grad: bool,
        *students: Tensor,
    ) -> tuple[Tensor, Tensor]:
        shard = VocabShard(weight.shape[0], group)
        losses = torch.zeros(len(students), dtype=_wide(teacher), device=teacher.device)
        same = torch.zeros_like(mask)
        grads = [torch.zeros_like(student) for student in students] if wants_grad else []
        logits = _Logits(teacher, weight, len(students), options.chunk_size)
        for rows, parts in _chunks(mask, mask_on_host, logits.chunk_size):
            base, drafts = logits.of(teacher[rows], [students[part.depth][part.rows] for part in parts])
            values, row_same = _finish(base, drafts, mask[:, rows], targets[rows], options, shard, wants_grad)
            grad = drafts @ weight if wants_grad else None
            for part in parts:
                losses[part.depth] += values[part.span].sum()
                same[part.depth][part.rows] = row_same[part.span]
                if grad is not None:
                    grads[part.depth][part.rows] = grad[part.span]
        ctx.save_for_backward(*[shard.sum(grad) for grad in grads])
        ctx.mark_non_differentiable(same)
        return losses, same

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.Function, grad_losses: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            (grad * scale.to(_wide(grad))).to(grad.dtype)
            for grad, scale in zip(ctx.saved_tensors, grad_losses.unsqueeze(-1), strict=True)
        ]
        return (None,) * 8 + tuple(scaled)


def _finish(
    base: Tensor,
    drafts: Tensor,
    mask: Tensor,
    targets: Tensor,
    options: LossOptions,
    shard: VocabShard,
    wants_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [S] and matches [S] of a chunk's logits; drafts [S, V/tp] become their gradient where that is wanted."""
    kind, temperature = options.kind, options.temperature if options.kind == "kl" else 1.0
    floor = shard.kth_largest(base, options.top_k) if options.top_k and kind == "kl" else None
    loss = HeadLoss(base, drafts, mask, targets - shard.first, kind, temperature, floor)
    own = fold(loss.statistics(), kind, temperature)
    whole = fold(shard.gather(number_tokens(own, shard.first)), kind, temperature)
    pull = None
    if kind == "tv":
        losses, pull = shard.sum(loss.overlap(whole).sum(0))
    else:
        losses = row_losses(whole, kind, temperature)
    if wants_grad:
        loss.gradient_(whole, pull)
    return losses, matches(whole)


def _agree(
    base: Tensor, drafts: Tensor, mask: Tensor, targets: Tensor, options: LossOptions, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Losses [S] and the numbers of `Agreement` [5, S] from a chunk's logits, which are used up."""
    plain = options.kind == "kl" and options.temperature == 1 and not options.top_k
    if not plain:
        losses, _ = _finish(base.clone(), drafts.clone(), mask, targets, options, shard, wants_grad=False)
    rows, each = mask.nonzero()[:, 1], torch.arange(len(drafts), device=drafts.device)
    tokens = targets[rows]
    token_logits = shard.pick(drafts, each, tokens)
    # A copy of the base's logits: what the statistics leave of them is the kernel's own.
    loss = HeadLoss(base.clone(), drafts, mask, targets - shard.first, "kl")
    whole = fold(shard.gather(number_tokens(fold(loss.statistics(), "kl"), shard.first)), "kl")
    log_q, log_p = log_probs(whole, token_logits, shard.pick(base, rows, tokens))
    _, log_p_draft = log_probs(whole, token_logits, shard.pick(base, rows, draft_tokens(whole)))
    distance, _ = shard.sum(loss.overlap(whole).sum(0))
    finite = is_finite(whole)
    agreement = {
        "match": matches(whole),
        "draft_prob": log_p_draft.exp().masked_fill(~finite, torch.nan),
        "draft_is_token": (draft_tokens(whole) == tokens) & finite,
        "overlap": 1 - distance,
        "token_accept": (log_q - log_p).clamp(max=0).exp(),
    }
    values = torch.stack([agreement[name].to(whole.dtype) for name in Agreement.__dataclass_fields__])
    return row_losses(whole, "kl") if plain else losses, values


class _Logits:
    """Room for the logits of one chunk."""

    def __init__(self, teacher: Tensor, weight: Tensor, num_depths: int, chunk_size: int):
        width = -(-len(weight) // _ALIGNMENT) * _ALIGNMENT
        in_bytes = CHUNK_BYTES[teacher.device.type] // ((num_depths + 1) * width * teacher.element_size())
        self.chunk_size = chunk_size or max(LEAST_TOKENS, in_bytes // LEAST_TOKENS * LEAST_TOKENS)
        self._weight = weight
        self._buffer = teacher.new_empty((num_depths + 1) * min(self.chunk_size, len(teacher)), width)

    def of(self, base: Tensor, drafts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits [C, V/tp] of base [C, h] and [S, V/tp] of all drafts [.., h], until the next call."""
        hidden = torch.cat([base, *drafts])
        logits = self._buffer[: len(hidden), : len(self._weight)]
        torch.mm(hidden, self._weight.t(), out=logits)
        return logits[: len(base)], logits[len(base) :]


@dataclass(frozen=True)
class _Part:
    """What a depth has in a chunk: `rows` of the N tokens, which are `span` of the chunk's S rows."""

    depth: int
    rows: slice | Tensor
    span: slice


def _chunks(mask: Tensor, on_host: Tensor | None, chunk_size: int) -> Iterator[tuple[slice, list[_Part]]]:
    """Chunks of mask [K, N] with anything in them. It is read on the host, once, where that has no copy of it."""
    on_host = mask.cpu() if on_host is None else on_host
    for start in range(0, mask.shape[1], chunk_size):
        rows = slice(start, min(start + chunk_size, mask.shape[1]))
        parts, end = [], 0
        for depth, chosen in enumerate(on_host[:, rows]):
            span = slice(end, end := end + int(chosen.sum()))
            full = span.stop - span.start == len(chosen)
            index = rows if full else to_device((start + chosen.nonzero()[:, 0]).tolist(), torch.int64, mask.device)
            parts.append(_Part(depth, index, span))
        if end:
            yield rows, parts


def _wide(tensor: Tensor) -> torch.dtype:
    """What sums are in."""
    return torch.promote_types(tensor.dtype, torch.float32)
