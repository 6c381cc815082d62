"""Losses of all MTP depths through the frozen lm_head, without holding the [tokens, vocabulary]
logits in memory.

Tokens are processed in chunks. One product gives the logits of base and depths for a chunk, in a
buffer that all chunks share; `kernels.head_loss` computes the losses and, in place of the logits,
their gradient; a second product gives the gradient of the hidden states. Tokens outside a depth's
mask get no row of logits. The gradient of lm_head is never computed.

The forward pass saves the gradient of the hidden states, [N, h] per depth in the model's dtype, and
the backward pass only scales it, since the losses of a depth are summed here. Recomputing logits
and statistics in the backward pass would have to save as many bytes, and would take 1 + K products
on top of these 1 + 2 K.

A quantised lm_head gives the logits that decoding gives, with its inputs quantised if they are
there. The gradient passes through that quantisation as if it were not there: the second product is
with the widened matrix, which exists for the time of a call.

Under tensor parallelism each rank holds a slice of the vocabulary. The ranks exchange seven numbers
per row (nine for `tv`) and sum the gradient of the hidden states; the results are the same on all
ranks.

Shape legend: N tokens, h hidden size, V vocabulary (of one rank: V/tp), K depths, C tokens of a
chunk, S rows of logits of a chunk's depths, at most K * C.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.kernels.head_loss import HeadLoss
from mtpkit.kernels.head_loss.slices import (
    base_tokens,
    draft_tokens,
    fold,
    is_finite,
    log_probs,
    matches,
    number_tokens,
    row_losses,
)
from mtpkit.model.formats.weight import QuantizedWeight, Weight, widened
from mtpkit.platform import to_device
from mtpkit.training.config.settings import LossConfig

CHUNK_BYTES = {"cuda": 384 << 20, "cpu": 16 << 20}
"""Bytes of a chunk's logits, base and depths together. On a GPU they give enough rows for products
at full rate, on a CPU they stay in its cache. The products for logits and gradient take 38 ms on an
H200 for 4,096 tokens at h = 4,096, V = 131,072, K = 3; with 512 MiB they take 43 ms, with 256 MiB
39 ms."""
LEAST_TOKENS = 64
"""The default number of tokens per chunk is a multiple of this, however large the vocabulary, since
each chunk reads the whole lm_head."""
_ALIGNMENT = 64  # elements between rows of logits are a multiple of this, for loads of 16 bytes


class VocabShard:
    """The slice of the vocabulary on this rank of `group`; all of it if `group` is None."""

    def __init__(self, size: int, group: dist.ProcessGroup | None = None):
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.first = size * dist.get_rank(self.group) if self.group else 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Gather the `values` of all ranks, [tp, ...]."""
        if self.group is None:
            return values[None]
        every = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, values.contiguous(), group=self.group)
        return torch.stack(every)

    def pick(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Pick the logits of `tokens` [n] from `rows` [n] of logits [.., V/tp]; returns [n] in at
        least fp32."""
        columns = tokens - self.first
        held = (columns >= 0) & (columns < logits.shape[1])
        return self.sum(logits[rows, columns.where(held, 0)].to(_wide(logits)).where(held, 0))

    def kth_largest(self, logits: Tensor, k: int) -> Tensor:
        """The k-th largest logit [C] of each row of [C, V/tp] over all slices; the smallest if a
        row has fewer than k."""
        best = self.gather(logits.topk(min(k, logits.shape[1])).values).transpose(0, 1).flatten(1)
        return best.topk(min(k, best.shape[1])).values[:, -1]


def head_losses(
    students: Sequence[Tensor],
    teacher: Tensor,
    weight: Weight,
    targets: Tensor,
    mask: Tensor,
    options: LossConfig,
    group: dist.ProcessGroup | None = None,
    mask_on_host: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of each depth's loss over its selected tokens, and the greedy choices of depths, base and
    text compared.

    Row n is one target position: the base predicts its token from `teacher[n]`, depth k from
    `students[k - 1][n]`.

    Args:
        students: K tensors [N, h], the only inputs that receive a gradient.
        teacher: [N, h], the base's hidden states after the final norm.
        weight: [V/tp, h], the lm_head, which may be quantised.
        targets: [N] int64, the text's tokens.
        mask: [K, N] bool, the tokens that count for each depth.
        options: `top_k` also keeps logits of the base that tie with the smallest of its `top_k`
            largest.
        group: the tensor-parallel group, or None when `weight` is whole.
        mask_on_host: a copy of `mask` on the host; None: it is read from the device.

    Returns:
        losses [K] in at least fp32; matches [K, N] bool, True where the mask is True and student
        and base have the same argmax of the logits in the model's dtype (of tied tokens, the
        smallest id); and follows [K, N] bool, True where the mask is True and the text's token is
        the base's argmax. If a logit in a row of student or base is NaN or infinite, the depth's
        loss is NaN or infinite too, and the row is False in both. The gradient on the ranks of
        `group` is that of a single loss.
    """
    wants_grad = torch.is_grad_enabled() and any(student.requires_grad for student in students)
    return _HeadLosses.apply(
        teacher, weight, targets, mask, mask_on_host, options, group, wants_grad, *students
    )


@dataclass(frozen=True)
class Agreement:
    """Agreement of depths and base about each token; all fields are [K, N] in at least fp32, and 0
    outside the mask.

    p is the base's distribution of the token at a target position, q the depth's, d = argmax q, t
    the text's token. With logits that are not finite `match`, `draft_is_token` and `base_is_token`
    are 0, and the other numbers are NaN.
    """

    match: Tensor
    """1 where d = argmax p: greedy decoding accepts the draft."""
    draft_prob: Tensor
    """p(d): sampling at temperature 1 accepts the draft d."""
    draft_is_token: Tensor
    """1 where d = t."""
    base_is_token: Tensor
    """1 where argmax p = t: the text follows the base's greedy choice."""
    overlap: Tensor
    """sum_v min(p(v), q(v)): the probability that rejection sampling accepts a draft sampled from
    q."""
    token_accept: Tensor
    """min(1, q(t) / p(t)): for t sampled from p, the probability that an accepted draft from q
    gives it."""


@torch.no_grad()
def head_agreement(
    students: Sequence[Tensor],
    teacher: Tensor,
    weight: Weight,
    targets: Tensor,
    mask: Tensor,
    options: LossConfig,
    group: dist.ProcessGroup | None = None,
    mask_on_host: Tensor | None = None,
) -> tuple[Tensor, Agreement]:
    """Sum of each depth's loss over its selected tokens [K], and its agreement with the base at
    each of them.

    Arguments as in `head_losses`. One pass over the logits gives all numbers but the overlap, which
    takes a second pass. A loss other than `kl` at temperature 1 over all tokens takes additional
    passes.
    """
    shard = VocabShard(weight.shape[0], group)
    losses = torch.zeros(len(students), dtype=_wide(teacher), device=teacher.device)
    found = losses.new_zeros(len(Agreement.__dataclass_fields__), *mask.shape)
    for rows, parts, base, drafts in _chunks(
        students, teacher, weight, mask, mask_on_host, options.chunk_size
    ):
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
        weight: Weight,
        targets: Tensor,
        mask: Tensor,
        mask_on_host: Tensor | None,
        options: LossConfig,
        group: dist.ProcessGroup | None,
        wants_grad: bool,
        *students: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shard = VocabShard(weight.shape[0], group)
        losses = torch.zeros(len(students), dtype=_wide(teacher), device=teacher.device)
        # Rows outside of the mask are written by no chunk and keep these values.
        same = torch.zeros_like(mask)
        chosen = torch.full_like(mask, -1, dtype=targets.dtype)
        grads = [torch.zeros_like(student) for student in students] if wants_grad else []
        plain = widened(weight) if wants_grad else None
        for rows, parts, base, drafts in _chunks(
            students, teacher, weight, mask, mask_on_host, options.chunk_size
        ):
            values, whole = _finish(
                base, drafts, mask[:, rows], targets[rows], options, shard, wants_grad
            )
            row_same = matches(whole)
            row_chosen = base_tokens(whole)
            # `_finish` left the gradient of the logits in `drafts`.
            grad = None if plain is None else drafts @ plain
            for part in parts:
                losses[part.depth] += values[part.span].sum()
                same[part.depth][part.rows] = row_same[part.span]
                chosen[part.depth][part.rows] = row_chosen[part.span]
                if grad is not None:
                    grads[part.depth][part.rows] = grad[part.span]
        # One sum over ranks here, where gradients of all chunks are complete, and none per chunk.
        ctx.save_for_backward(*[shard.sum(grad) for grad in grads])
        follows = chosen == targets
        ctx.mark_non_differentiable(same, follows)
        return losses, same, follows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.Function, grad_losses: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
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
    options: LossConfig,
    shard: VocabShard,
    wants_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [S] and statistics [7, S] of a chunk's logits.

    With `wants_grad`, drafts [S, V/tp] become their gradient.
    """
    kind = options.kind
    temperature = options.temperature
    floor = shard.kth_largest(base, options.top_k) if options.top_k else None
    loss = HeadLoss(base, drafts, mask, targets - shard.first, kind, temperature, floor)
    own = fold(loss.statistics(), kind, temperature)
    whole = fold(shard.gather(number_tokens(own, shard.first)), kind, temperature)
    pull = None
    # Total variation needs the normalised probabilities, so a second pass over the logits.
    if kind == "tv":
        losses, pull = shard.sum(loss.overlap(whole).sum(0))
    else:
        losses = row_losses(whole, kind, temperature)
    if wants_grad:
        loss.gradient_(whole, pull)
    return losses, whole


def _agree(
    base: Tensor,
    drafts: Tensor,
    mask: Tensor,
    targets: Tensor,
    options: LossConfig,
    shard: VocabShard,
) -> tuple[Tensor, Tensor]:
    """Losses [S] and the numbers of `Agreement` [6, S] from a chunk's logits, which are
    overwritten."""
    plain = options.kind == "kl" and options.temperature == 1 and not options.top_k
    if not plain:
        losses, _ = _finish(
            base.clone(), drafts.clone(), mask, targets, options, shard, wants_grad=False
        )
    rows = mask.nonzero()[:, 1]
    each = torch.arange(len(drafts), device=drafts.device)
    tokens = targets[rows]
    token_logits = shard.pick(drafts, each, tokens)
    # A copy, since the kernel overwrites the base's logits.
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
        "base_is_token": base_tokens(whole) == tokens,
        "overlap": 1 - distance,
        "token_accept": (log_q - log_p).clamp(max=0).exp(),
    }
    values = torch.stack(
        [agreement[name].to(whole.dtype) for name in Agreement.__dataclass_fields__]
    )
    return row_losses(whole, "kl") if plain else losses, values


@dataclass(frozen=True)
class _Part:
    """A depth's part of a chunk: `rows` are its tokens among all N, `span` are their rows among the
    chunk's S rows."""

    depth: int
    rows: slice | Tensor
    span: slice


def _chunks(
    students: Sequence[Tensor],
    teacher: Tensor,
    weight: Weight,
    mask: Tensor,
    on_host: Tensor | None,
    chunk_size: int,
) -> Iterator[tuple[slice, list[_Part], Tensor, Tensor]]:
    """Yield (rows, parts, logits of the base, logits of the depths) for each chunk of mask [K, N]
    that selects a token.

    The logits are [C, V/tp] and [S, V/tp], in one buffer for all chunks. If the host has no copy of
    the mask, it is read from the device once.
    """
    width = -(-len(weight) // _ALIGNMENT) * _ALIGNMENT
    if not chunk_size:
        in_bytes = CHUNK_BYTES[teacher.device.type] // (
            (len(students) + 1) * width * teacher.element_size()
        )
        chunk_size = max(LEAST_TOKENS, in_bytes // LEAST_TOKENS * LEAST_TOKENS)
    buffer = teacher.new_empty((len(students) + 1) * min(chunk_size, len(teacher)), width)
    on_host = mask.cpu() if on_host is None else on_host
    for start in range(0, mask.shape[1], chunk_size):
        rows = slice(start, min(start + chunk_size, mask.shape[1]))
        parts = []
        end = 0
        for depth, chosen in enumerate(on_host[:, rows]):
            span = slice(end, end := end + int(chosen.sum()))
            full = span.stop - span.start == len(chosen)
            index = (
                rows
                if full
                else to_device((start + chosen.nonzero()[:, 0]).tolist(), torch.int64, mask.device)
            )
            parts.append(_Part(depth, index, span))
        if end:
            hidden = torch.cat(
                [teacher[rows], *(students[part.depth][part.rows] for part in parts)]
            )
            logits = buffer[: len(hidden), : len(weight)]
            if isinstance(weight, QuantizedWeight):
                logits.copy_(weight.multiply(hidden))
            else:
                torch.mm(hidden, weight.t(), out=logits)
            yield rows, parts, logits[:-end], logits[-end:]


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(tensor.dtype, torch.float32)
