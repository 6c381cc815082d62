"""Verification of drafts: decides which drafts are accepted, and chooses the token after them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.steps import sampler
from mtpkit.engine.steps.plan import Batch, Verdict
from mtpkit.engine.steps.processor import NO_DRAFTS
from mtpkit.engine.steps.processors import Seen
from mtpkit.errors import UserError
from mtpkit.kernels import NO_TOKEN
from mtpkit.kernels.acceptance import accept_matching, accept_tree
from mtpkit.kernels.sampling import uniform
from mtpkit.model.inputs import DecodeGroup

VerifyDrafts = Callable[[Tensor, Batch, DecodeGroup], Verdict]
"""Verifies the drafts of D decode rows with T tokens each, given their processed logits [D * T, V].
The verdict has T columns."""


def verify(logits: Tensor, batch: Batch, verify_drafts: VerifyDrafts | None = None) -> Verdict:
    """Verify the drafts of decode rows, and choose the first token after the chunks that end a
    prompt.

    The output has the base's own distribution. If drafts are the heads' best tokens (`draft_probs`
    is None), the output for a given seed is also the same for every K. A row whose logits are
    invalid stops there with `NO_TOKEN`; logits after the position at which a row stops have no
    effect. There is no host-device sync.

    Args:
        logits: [N, V], see `Batch.logit_indices`.
        verify_drafts: verifies the drafts in another way; for benchmarks.
    """
    inputs = batch.inputs
    # Every token of a decode row has a logit, and decode rows come first.
    groups = inputs.decode_groups
    processed = _processed(logits, batch, groups)
    verdicts = []
    for group, drafted in zip(groups, processed, strict=False):
        decoded = (verify_drafts or _verify_group)(drafted, batch, group)
        if NO_DRAFTS in batch.sampling.use:
            decoded = _without_drafts(decoded, drafted, batch, group)
        verdicts.append(decoded)
    if inputs.num_chunk_rows:
        part = slice(inputs.num_decode_tokens, None)
        verdicts.append(_first_tokens(own_tokens(processed[-1], batch, part), batch))
    return _joined(verdicts, batch.shape.num_speculative_tokens)


def _verify_group(logits: Tensor, batch: Batch, group: DecodeGroup) -> Verdict:
    """See `VerifyDrafts`."""
    if batch.draft_probs is None:
        return _follow(own_tokens(logits, batch, group.tokens), batch, group)
    if batch.inputs.tree is None:
        return _verify_drawn(logits, batch, group, group.width - 1)
    return _verify_drawn_tree(logits, batch)


def _joined(verdicts: list[Verdict], depths: int) -> Verdict:
    """The verdicts of all rows of a step, those of K = `depths`."""
    if len(verdicts) == 1:
        return _widened(verdicts[0], depths)
    first = verdicts[0]
    ranks = None
    if first.ranks is not None:
        # A chunk has no drafts, whose ranks are -2, see `accept_tree`.
        no_ranks = [torch.full_like(one.token_ids[:, 1:], -2) for one in verdicts[1:]]
        ranks = torch.cat([first.ranks, *no_ranks])
    return Verdict(
        torch.cat([one.accepted for one in verdicts]),
        torch.cat([_widened(one, depths).token_ids for one in verdicts]),
        first.path,
        ranks,
    )


def _widened(verdict: Verdict, depths: int) -> Verdict:
    """The verdict with zeros for drafts that its rows do not verify."""
    missing = 1 + depths - verdict.token_ids.shape[1]
    if not missing:
        return verdict
    return replace(verdict, token_ids=F.pad(verdict.token_ids, (0, missing)))


def _processed(logits: Tensor, batch: Batch, groups: list[DecodeGroup]) -> list[Tensor]:
    """Logits after the processors that the rows use, but for temperature and filters: those of each
    group, then those of the chunks. Chunks share the call of the last group."""
    if len(groups) < 2:
        group = groups[0] if groups else DecodeGroup(slice(0, 0), slice(0, 0), 1)
        found = _processed_part(logits, batch, group, slice(None))
        end = group.tokens.stop
        return [found[:end], found[end:]] if groups else [found]
    first, last = groups
    cut = first.tokens.stop
    others = _processed_part(logits[cut:], batch, last, slice(cut, None))
    end = last.tokens.stop - cut
    return [_processed_part(logits[:cut], batch, first, slice(cut)), others[:end], others[end:]]


def _processed_part(logits: Tensor, batch: Batch, group: DecodeGroup, part: slice) -> Tensor:
    """Processed logits of a group, and of the chunks after it if `part` reaches so far."""
    drafts = batch.drafts[group.rows, : group.width - 1]
    positions = partial(_positions, batch, part)
    seen = Seen(drafts, batch.sampling.vocabulary, positions, batch.inputs.tree)
    return sampler.process(logits, batch.sampling, batch.logit_rows[part], seen)


def log_distributions(logits: Tensor, batch: Batch) -> Tensor:
    """[N, V] float32, logarithms of the distributions that tokens are drawn from. A greedy row has
    that of its processed logits at temperature 1.

    Args:
        logits: [N, V], the model's.
    """
    processed = torch.cat(_processed(logits, batch, batch.inputs.decode_groups))
    return sampler.log_distributions(processed, batch.sampling, batch.logit_rows)


def own_tokens(logits: Tensor, batch: Batch, part: slice) -> Tensor:
    """[n] int64, the base's choice at processed logits [n, V]: its best token, a draw, or
    `NO_TOKEN`.

    Args:
        part: where these logits are among the logits of the batch.
    """
    return sampler.sample(
        logits, batch.sampling, batch.logit_rows[part], partial(_positions, batch, part)
    )


def _positions(batch: Batch, part: slice) -> Tensor:
    """[n] int64, the positions of the tokens chosen from a part of the logits."""
    return batch.inputs.positions[batch.logit_indices[part]] + 1


def _first_tokens(chosen: Tensor, batch: Batch) -> Verdict:
    """Verdict for the chunks: the known token after each chunk, or its entry in `chosen` [chunks
    that sample] if the token is not known."""
    known = batch.lookahead[batch.inputs.num_decode_rows :, 0]
    token_ids = known.new_zeros(len(known), 1 + batch.shape.num_speculative_tokens)
    token_ids[:, 0] = known

    # Chunks that sample come first.
    count = len(chosen)
    sampling = known[:count]
    token_ids[:count, 0] = torch.where(sampling < 0, chosen, sampling)
    return Verdict(torch.zeros_like(known), token_ids)


def _follow(own: Tensor, batch: Batch, group: DecodeGroup) -> Verdict:
    """Verify drafts that are the heads' best tokens: follow those that are the base's own choice.

    Args:
        own: the base's choice at each token of the group's rows, row after row.
    """
    own = own.view(group.num_rows, group.width)
    if batch.inputs.tree is None:
        return Verdict(*accept_matching(_drafts_of(batch, group), own))

    tokens, parents = _tree_tokens(batch)
    depth = batch.shape.num_speculative_tokens
    return Verdict(*accept_tree(tokens, parents, own, depth))


def _drafts_of(batch: Batch, group: DecodeGroup) -> Tensor:
    """[D, T - 1] the drafts that the rows of a group verify."""
    return batch.drafts[group.rows, : group.width - 1]


def _tree_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """[D, T] the tokens of the decode rows' trees, and their parents."""
    assert batch.inputs.tree is not None and batch.inputs.tree.parents is not None
    parents = batch.inputs.tree.parents
    return batch.token_ids[: parents.numel()].view_as(parents), parents


def _without_drafts(decoded: Verdict, logits: Tensor, batch: Batch, group: DecodeGroup) -> Verdict:
    """The verdict on decode rows, but for those whose requests do not speculate: they get the token
    that a step with K = 0 chooses, from the logits [D * T, V] of their first token.

    All rows choose such a token: picking rows would need their number on the host.
    """
    if batch.draft_probs is None:
        chosen = own_tokens(logits[:: group.width], batch, _firsts(group))
    else:
        chosen = _verify_drawn(logits, batch, group, depths=0).token_ids[:, 0]

    found = decoded.token_ids
    alone = torch.cat([chosen[:, None], torch.zeros_like(found[:, 1:])], 1)
    refused = batch.sampling.columns[NO_DRAFTS][batch.sampling.slots[group.rows]]
    each = refused[:, None]
    path = decoded.path
    ranks = decoded.ranks
    return Verdict(
        torch.where(refused, 0, decoded.accepted),
        torch.where(each, alone, found),
        None if path is None else torch.where(each, 0, path),
        None if ranks is None else torch.where(each, -2, ranks),
    )


def _firsts(group: DecodeGroup) -> slice:
    """The first token of each row."""
    return slice(group.tokens.start, group.tokens.stop, group.width)


def _verify_drawn(logits: Tensor, batch: Batch, group: DecodeGroup, depths: int) -> Verdict:
    """Verify the first `depths` drafts of chains, which were drawn from `draft_probs` [D, K, V].

    Args:
        logits: [D * T, V]; T may exceed 1 + depths only for depths = 0.
    """
    assert batch.draft_probs is not None
    shape = group.num_rows, 1 + depths
    part = group.tokens
    if not depths:
        part = _firsts(group)
        logits = logits[:: group.width]
    row_of_logit = batch.logit_rows[part]
    positions = _positions(batch, part)

    # Both numbers of a position come from the seed and the position, so that they do not depend on
    # K or on the other rows of the batch.
    def uniforms(stream: int) -> Tensor:
        return sampler.uniforms(batch.sampling, row_of_logit, positions, stream).view(shape)

    token = uniforms(sampler.TOKEN_STREAM)
    # No draft follows the last token of a row.
    accept = uniforms(sampler.ACCEPT_STREAM)[:, :-1]

    probs = sampler.probabilities(logits, batch.sampling, row_of_logit).view(*shape, -1)
    drawn = batch.draft_probs[group.rows, :depths]
    drafts = batch.drafts[group.rows, :depths]
    found = batch.sampling.vocabulary.accept_rejection(drafts, drawn, probs, accept, token)
    return Verdict(*found)


def _verify_drawn_tree(logits: Tensor, batch: Batch) -> Verdict:
    """Verify trees whose siblings were drawn without replacement from `draft_probs` [D, E, v]."""
    assert batch.draft_probs is not None
    tree = batch.inputs.tree
    assert tree is not None
    rows, drafts = batch.drafts.shape
    shape = rows, 1 + drafts
    part = slice(rows * (1 + drafts))
    row_of_logit = batch.logit_rows[part]

    # A draft is accepted at its own position, which is the one after its parent's.
    at_draft = batch.inputs.positions[batch.logit_indices[part]]
    # Siblings share a position: each needs a number of its own.
    branches = torch.arange(1 + drafts, device=logits.device).repeat(rows)
    accept = sampler.uniforms(
        batch.sampling, row_of_logit, at_draft, sampler.ACCEPT_STREAM, branches
    )
    positions = _positions(batch, part)
    token = sampler.uniforms(batch.sampling, row_of_logit, positions, sampler.TOKEN_STREAM)

    probs = sampler.probabilities(logits, batch.sampling, row_of_logit).view(*shape, -1)
    tokens = batch.token_ids[part].view(shape)
    depth = batch.shape.num_speculative_tokens
    found = batch.sampling.vocabulary.accept_drawn_tree(
        tokens, tree, batch.draft_probs, probs, accept.view(shape), token.view(shape), depth
    )
    return Verdict(*found)


class SyntheticAcceptance:
    """Accepts drafts at random, at a given rate per depth; for benchmarks with random weights.

    The token after the accepted drafts is the base's own. For realistic times, all that `verify`
    computes is computed too (for drawn drafts, somewhat more). As in sampling, results depend on a
    request's seed and the position.

    Args:
        conditional_rates: a rate for each depth. Of n such lists, a request with seed s has number
            s modulo n, counted from 0.

    Raises:
        UserError: fewer rates than drafts, or a rate outside 0 to 1.
    """

    def __init__(
        self,
        conditional_rates: Sequence[float] | Sequence[Sequence[float]],
        depths: int,
        device: torch.device,
    ) -> None:
        given = [*conditional_rates]
        lists = given if given and isinstance(given[0], Sequence) else [given]
        for rates in lists:
            valid = all(0 <= rate <= 1 for rate in rates)
            if len(rates) < depths or not valid:
                each = ", in each of its lists" if lists is given else ""
                raise UserError(
                    f"synthetic_acceptance is {given}, must be {depths} rates from 0 to 1, one per"
                    f" draft{each}"
                )
        kept = [rates[:depths] for rates in lists]
        self._rates = torch.tensor(kept, dtype=torch.float64, device=device)

    def _rates_of(self, batch: Batch, rows: slice, depths: int) -> Tensor:
        """[D, depths] the rates of decode rows."""
        return self._rates[batch.sampling.seeds[rows] % len(self._rates), :depths]

    def __call__(self, logits: Tensor, batch: Batch) -> Verdict:
        if not batch.shape.num_speculative_tokens:
            return verify(logits, batch)
        if batch.inputs.tree is None:
            return verify(logits, batch, self._verify_drafts)
        return verify(logits, batch, self._verify_trees)

    def _verify_trees(self, logits: Tensor, batch: Batch, group: DecodeGroup) -> Verdict:
        """Accept the first child of a token at the rate of its depth, the probability that any
        child is right."""
        own = own_tokens(logits, batch, slice(len(logits)))
        # This verdict is not used: only its time counts.
        if batch.draft_probs is None:
            _follow(own, batch, group)
        else:
            _verify_drawn_tree(logits, batch)

        tokens, parents = _tree_tokens(batch)
        rows, width = tokens.shape
        own = own.view(rows, width)
        depth = batch.shape.num_speculative_tokens

        # A random number per row and depth
        first_position = batch.inputs.context_lens[:rows, None]
        position = first_position + torch.arange(1, 1 + depth, device=own.device)
        seeds = batch.sampling.seeds[:rows, None].expand_as(position)
        numbers = uniform(seeds.flatten(), position.flatten(), sampler.ACCEPT_STREAM)
        numbers = numbers.view_as(position)

        # The first child of each token; `width`: the token has none
        index = torch.arange(width, device=own.device)
        below = parents[:, None] == index[:, None]  # [D, parent, child]
        first = torch.where(below & (index > 0), index, width).amin(2)

        depths = batch.inputs.positions[: rows * width].view_as(own) - first_position
        right = numbers < self._rates_of(batch, group.rows, depth)
        right = right.gather(1, depths.clamp_max(depth - 1))
        right &= first < width
        drafted = tokens.gather(1, first.clamp_max(width - 1))

        # An accepted first child replaces the base's choice. Any other choice becomes -2 - token
        # and matches no draft.
        valid = own != NO_TOKEN
        refused = torch.where(valid, -2 - own, own)
        own = torch.where(right & valid, drafted, refused)
        accepted, token_ids, path, ranks = accept_tree(tokens, parents, own, depth)
        token_ids = torch.where(token_ids < NO_TOKEN, -2 - token_ids, token_ids)
        return Verdict(accepted, token_ids, path, ranks)

    def _verify_drafts(self, logits: Tensor, batch: Batch, group: DecodeGroup) -> Verdict:
        """Accept each draft at the rate of its depth, if all drafts before it are accepted."""
        drafted = _drafts_of(batch, group)
        rows, depths = drafted.shape
        own = own_tokens(logits, batch, group.tokens).view(rows, 1 + depths)
        # This verdict is not used: only its time counts.
        if batch.draft_probs is None:
            accept_matching(drafted, own)
        else:
            _verify_drawn(logits, batch, group, depths)

        # A random number per row and draft
        positions = batch.inputs.positions[group.tokens].view(rows, 1 + depths)[:, 1:]
        seeds = batch.sampling.seeds[group.rows, None].expand(-1, depths)
        numbers = uniform(seeds.flatten(), positions.flatten(), sampler.ACCEPT_STREAM)
        right = numbers.view(rows, depths) < self._rates_of(batch, group.rows, depths)
        accepted = right.long().cumprod(-1).sum(-1)

        # Accepted drafts take the place of the base's choices, except where logits are invalid.
        place = torch.arange(1 + depths, device=own.device)
        last = accepted[:, None]
        taken = (place < last) & (own != NO_TOKEN)
        drafts = torch.cat([drafted, own[:, -1:]], 1)
        token_ids = torch.where(taken, drafts, own)
        return Verdict(accepted, token_ids * (place <= last))
