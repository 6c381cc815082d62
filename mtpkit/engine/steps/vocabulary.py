"""Choice of tokens from a vocabulary that one rank holds whole, or that several ranks hold in
parts.

All ranks get the same results, and the same as a single rank that holds the whole vocabulary. Ranks
exchange best tokens, sums and histograms, never logits. Nothing waits for the host, so that CUDA
graphs can capture all of it.

Shape legend: N rows, V vocabulary, v the part of it that this rank holds, R decode rows, K drafts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from mtpkit.kernels import NO_TOKEN, acceptance, draft_head
from mtpkit.kernels import sampling as ops
from mtpkit.kernels.acceptance.reference import cut
from mtpkit.kernels.draft_head.reference import to_token_ids
from mtpkit.model.collectives import all_gather, all_reduce, best_of_ranks, top_of_ranks
from mtpkit.model.inputs import TreeInput

_DIGIT_BITS = 8
"""Bits of a logit's distance from the best one that each exchange determines; each row sends 2^bits
sums of 8 bytes."""
_BELOW_ONE = 1 - 2.0**-50

RowShaping = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""[N] temperature, top-k, top-p and min-p of rows; None for a filter that no row uses."""


class Vocabulary(acceptance.Whole):
    """A vocabulary that this rank holds whole."""

    def __init__(self, size: int) -> None:
        self.size = size
        """V."""
        self.first = 0
        self.width = size
        """The first token that this rank holds, and v, the number of tokens that it holds."""

    def argmax(self, logits: Tensor) -> Tensor:
        """[N] int64, the first best token of logits [N, v], or `NO_TOKEN`: see
        `kernels.draft_head.argmax`."""
        return draft_head.argmax(logits)

    def probabilities(self, logits: Tensor, shaping: RowShaping) -> Tensor:
        """[N, v] float32, see `kernels.sampling.probabilities`."""
        return ops.probabilities(logits, *shaping)

    def top_tokens(
        self, logits: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[N, count] int64 and float32, see `kernels.draft_head.top_tokens`.

        Args:
            logits: [N, v], or the logits of a subset of the tokens, of which this rank may hold any
                number.
            token_ids: [..] int64, ascending: the tokens of the subset that this rank holds. None:
                there is no subset.
        """
        # A subset may have fewer tokens than are wanted.
        found = min(count, logits.shape[1])
        tokens, log_probs = draft_head.top_tokens(logits, found)
        missing = (0, count - found)
        tokens = F.pad(to_token_ids(tokens, token_ids), missing, value=NO_TOKEN)
        return tokens, F.pad(log_probs, missing, value=torch.nan)

    def log_probs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of one token per row.

        Args:
            logits: [N, v].
            token_ids: [N] int64.

        Returns:
            [N] float32, and [N] int64, the tokens' ranks: 1 + the number of larger logits.
        """
        logits = logits.float()
        place = self.place(token_ids)
        own = logits.gather(1, place.clamp_min(0)[:, None])[:, 0].double()
        chosen = self.sum(torch.where(place < 0, 0.0, own))
        larger = (logits > chosen[:, None].float()).sum(-1, dtype=torch.float64)
        return (chosen - self.log_sum(logits)).float(), self.sum(larger).long() + 1

    def log_sum(self, logits: Tensor) -> Tensor:
        """[N] float64, the logarithm of the sum of exp(logits [N, v]) over the vocabulary."""
        return logits.logsumexp(-1).double()

    def without(self, weights: Tensor, token_ids: Tensor) -> Tensor:
        """`weights` [N, v] with 0 at one token per row, `token_ids` [N]."""
        return acceptance.without(weights, self.place(token_ids)[:, None])

    def sample_logits(self, logits: Tensor, shaping: RowShaping, uniforms: Tensor) -> Tensor:
        """[N] int64 tokens drawn from logits [N, v], see `kernels.sampling.sample_logits`."""
        return ops.sample_logits(logits, *shaping, uniforms)

    def accept_rejection(
        self,
        drafts: Tensor,
        draft_probs: Tensor,
        probs: Tensor,
        accept_uniforms: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.acceptance.accept_rejection`; draft_probs [R, K, v], probs [R, 1 + K, v]."""
        return acceptance.accept_rejection(drafts, draft_probs, probs, accept_uniforms, uniforms)

    def accept_drawn_tree(
        self,
        tokens: Tensor,
        tree: TreeInput,
        draft_probs: Tensor,
        probs: Tensor,
        accept_uniforms: Tensor,
        uniforms: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `kernels.acceptance.accept_drawn_tree`; draft_probs [R, E, v], probs [R, T, v]."""
        assert tree.children is not None and tree.draft_index is not None
        shape = (tree.children, draft_probs, tree.draft_index, probs)
        numbers = (accept_uniforms, uniforms)
        return acceptance.accept_drawn_tree(tokens, *shape, *numbers, depth, self)


class AbsentVocabulary(Vocabulary):
    """A vocabulary of which this rank holds no part, since a later pipeline stage chooses the
    tokens."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.width = 0

    def place(self, token_ids: Tensor) -> Tensor:
        """See `Vocabulary.place`."""
        return torch.full_like(token_ids, -1)


class SplitVocabulary(Vocabulary):
    """A vocabulary that the ranks of a group hold in parts of equal size, in the order of the
    ranks.

    Bytes that each rank sends per row: 16 for the best token; 16 more for a draw, 8,192 more with
    top-k and 8,208 more with top-p, whatever k and p are; 24 for the acceptance of a drawn draft,
    32 in a tree; 16 n + 8 for the n best tokens. Sending the logits would take 4 V / ranks.

    Args:
        size: V, which the number of ranks must divide.
    """

    def __init__(self, size: int, group: ProcessGroup) -> None:
        super().__init__(size)
        self.group = group
        self.rank = group.rank()
        self.width = size // group.size()
        self.first = self.rank * self.width

    def place(self, token_ids: Tensor) -> Tensor:
        """See `Vocabulary.place`."""
        own = token_ids - self.first
        return torch.where((own >= 0) & (own < self.width), own, -1)

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Vocabulary.argmax`."""
        return self._best(logits)[1]

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return best_of_ranks(*draft_head.best(logits), self.group, self.first)

    def top_tokens(
        self, logits: Tensor, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Vocabulary.top_tokens`: ranks exchange their best tokens and the mass of their
        parts."""
        # A rank may hold fewer tokens of a subset than are wanted; all ranks exchange equally many.
        short = count - logits.shape[1]
        padded = F.pad(logits, (0, short), value=-torch.inf) if short > 0 else logits
        columns, log_probs = draft_head.top_tokens(padded, count)
        top, _ = draft_head.best(padded)
        values = torch.where(
            columns < 0, -torch.inf, padded.gather(1, columns.clamp_min(0)).float()
        )
        log_sums = torch.where(columns[:, 0] < 0, top, values[:, 0] - log_probs[:, 0])
        tokens = columns + self.first if token_ids is None else F.pad(token_ids, (0, 1))[columns]
        return top_of_ranks(values, tokens, log_sums, self.group)

    def probabilities(self, logits: Tensor, shaping: RowShaping) -> Tensor:
        """See `Vocabulary.probabilities`."""
        weights = self._weights(logits, shaping)
        return (weights / self.sum(weights.sum(-1, dtype=torch.float64))[:, None]).float()

    def sample_logits(self, logits: Tensor, shaping: RowShaping, uniforms: Tensor) -> Tensor:
        """See `Vocabulary.sample_logits`."""
        return self.sample(self._weights(logits, shaping), uniforms)

    def sample(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """See `Vocabulary.sample`: ranks exchange the sums of their weights, and the rank into
        whose part the random number falls gives the token."""
        # In float64: rounding should not make a draw depend on the number of ranks.
        cumulative = weights.double().cumsum(-1)
        own = cumulative[:, -1]
        up_to = all_gather(own, self.group).cumsum(0)
        threshold = uniforms * up_to[-1]
        holder = (up_to <= threshold).sum(0)
        rest = threshold - (up_to[self.rank - 1] if self.rank else 0.0)
        rest = torch.minimum(rest, own * _BELOW_ONE)  # rounding must not lead past the last weight
        column = torch.searchsorted(cumulative, rest[:, None], right=True)[:, 0].clamp_max(
            self.width - 1
        )
        token = self.sum(torch.where(holder == self.rank, self.first + column, 0))
        return torch.where(up_to[-1] > 0, token, NO_TOKEN)

    def accept_rejection(
        self,
        drafts: Tensor,
        draft_probs: Tensor,
        probs: Tensor,
        accept_uniforms: Tensor,
        uniforms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `Vocabulary.accept_rejection`: the rank that holds a draft sends its p and q, all
        ranks exchange the mass of (p - q)+, and the token is drawn as in `sample`."""
        rows, _, width = probs.shape
        place = self.place(drafts)[..., None]
        chosen = torch.cat(
            [part.gather(-1, place.clamp_min(0)) for part in (probs[:, :-1], draft_probs)], -1
        )
        residual = (probs[:, :-1] - draft_probs).clamp_min(0)
        own = torch.cat(
            [
                torch.where(place < 0, 0.0, chosen).double(),
                residual.sum(-1, True, dtype=torch.float64),
            ],
            -1,
        )
        p, q, mass = self.sum(own).unbind(-1)
        accepted = (accept_uniforms * q < p).long().cumprod(-1).sum(-1)
        residual = torch.where(mass[..., None] > 0, residual, probs[:, :-1])
        weights = torch.cat([residual, probs[:, -1:]], 1)
        at_stop = weights.gather(1, accepted[:, None, None].expand(rows, 1, width))[:, 0]
        token = self.sample(at_stop, uniforms.gather(1, accepted[:, None])[:, 0])
        token_ids = torch.cat([drafts, drafts.new_zeros(rows, 1)], 1)
        return accepted, cut(token_ids.scatter(1, accepted[:, None], token[:, None]), accepted)

    def sum(self, values: Tensor) -> Tensor:
        """See `Part.sum`."""
        return all_reduce(values, self.group)

    def log_sum(self, logits: Tensor) -> Tensor:
        """See `Vocabulary.log_sum`."""
        return all_gather(super().log_sum(logits), self.group).logsumexp(0)

    def _weights(
        self,
        logits: Tensor,
        shaping: RowShaping,
    ) -> Tensor:
        """[N, v] float32, the rows' distributions up to a factor per row; NaN in invalid rows."""
        temperature, top_k, top_p, min_p = shaping
        top, token = self._best(logits)
        greedy = temperature == 0
        scaled = (logits.float() - top[:, None]) / torch.where(greedy, 1.0, temperature)[:, None]
        if min_p is not None:
            scaled = scaled.masked_fill(scaled.exp() < min_p[:, None], -torch.inf)
        if top_k is not None:
            scaled = self._keep_best(scaled, top_k)
        if top_p is not None:
            scaled = self._keep_mass(scaled, top_p)

        column = torch.arange(self.first, self.first + self.width, device=logits.device)
        weights = torch.where(greedy[:, None], (column == token[:, None]).float(), scaled.exp())
        return torch.where((token == NO_TOKEN)[:, None], torch.nan, weights)

    def _keep_best(self, scaled: Tensor, top_k: Tensor) -> Tensor:
        """Mask logits below the k-th best; ties with the k-th best stay."""
        distance = _distance(scaled)
        last, _ = self._reach(
            distance, torch.ones_like(scaled, dtype=torch.float64), top_k.double()
        )
        return scaled.masked_fill(distance > last[:, None], -torch.inf)

    def _keep_mass(self, scaled: Tensor, top_p: Tensor) -> Tensor:
        """Mask logits with a mass of `top_p` or more before them; among equal logits the first
        tokens stay."""
        distance = _distance(scaled)
        mass = scaled.exp().double()
        wanted = top_p * self.sum(mass.sum(-1))
        last, before = self._reach(distance, mass, wanted)
        tied = distance == last[:, None]
        counts = all_gather(tied.sum(-1), self.group)
        index = counts[: self.rank].sum(0)[:, None] + tied.cumsum(-1) - 1
        dropped = (distance > last[:, None]) | (
            tied & (before[:, None] + index * mass >= wanted[:, None])
        )
        return scaled.masked_fill(dropped & (top_p < 1)[:, None], -torch.inf)

    def _reach(self, distance: Tensor, amounts: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Find the distance from the best logit within which a row's amounts first add up to
        `wanted` [N]. Each exchange determines one digit of the distance.

        Args:
            distance: [N, v] int64 of 32 bits.
            amounts: [N, v] float64.

        Returns:
            [N] int64, this distance; [N] float64, the sum of the amounts at smaller distances.
        """
        prefix = torch.zeros_like(distance[:, 0])
        before = torch.zeros_like(wanted)
        for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
            inside = distance >> (shift + _DIGIT_BITS) == prefix[:, None]
            digit = (distance >> shift) & ((1 << _DIGIT_BITS) - 1)
            sums = amounts.new_zeros(len(amounts), 1 << _DIGIT_BITS)
            sums = self.sum(sums.scatter_add_(1, digit, torch.where(inside, amounts, 0.0)))
            up_to = before[:, None] + sums.cumsum(1)
            chosen = (up_to < wanted[:, None]).sum(1, keepdim=True).clamp_max(sums.shape[1] - 1)
            before = torch.where(
                chosen[:, 0] > 0, up_to.gather(1, (chosen - 1).clamp_min(0))[:, 0], before
            )
            prefix = (prefix << _DIGIT_BITS) + chosen[:, 0]
        return prefix, before


def _distance(scaled: Tensor) -> Tensor:
    """[N, v] int64 of 32 bits that order logits by their distance below the best one, the nearest
    first."""
    return scaled.abs().view(torch.int32).long()
