"""Verification: which drafts are accepted, and the token after them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpkit.engine import sampler
from mtpkit.engine.step import Batch, Verdict
from mtpkit.errors import UserError
from mtpkit.kernels import NO_TOKEN
from mtpkit.kernels.acceptance import accept_matching, accept_rejection
from mtpkit.kernels.sampling import uniform


def verify(logits: Tensor, batch: Batch) -> Verdict:
    """Verify the drafts of decode rows, or choose the first token of the chunks that end a prompt.

    The output has the base's own distribution. If drafts are the heads' best tokens (`draft_probs` is None), the output
    for a given seed is also the same for every K. A row whose logits are invalid stops there with `NO_TOKEN`; logits
    after the position at which a row stops have no effect. There is no host-device sync.

    Args:
        logits: [N, V], see `Batch.logit_indices`.
    """
    if batch.draft_probs is not None:
        return _verify_drawn(logits, batch, batch.draft_probs)
    own = own_tokens(logits, batch)
    rows = len(batch.drafts)
    return Verdict(*accept_matching(batch.drafts, own.view(rows, -1))) if rows else _first_tokens(batch, own)


def own_tokens(logits: Tensor, batch: Batch) -> Tensor:
    """[N] int64, the base's own choice at each of the logits [N, V]: its best token, a draw, or `NO_TOKEN`."""
    logits = sampler.process(logits, batch.sampling, batch.logit_rows, batch.drafts)
    return sampler.sample(logits, batch.sampling, batch.logit_rows, _logit_positions(batch))


def _logit_positions(batch: Batch) -> Tensor:
    """[N] int64, the position of the token chosen from each logit."""
    return batch.inputs.positions[batch.logit_indices] + 1


def _verify_drawn(logits: Tensor, batch: Batch, draft_probs: Tensor) -> Verdict:
    """Verify drafts that were drawn from `draft_probs` [D, K, V]."""
    logits = sampler.process(logits, batch.sampling, batch.logit_rows, batch.drafts)
    positions = _logit_positions(batch)
    rows, depths = batch.drafts.shape
    token_uniforms, accept_uniforms = (
        sampler.uniforms(batch.sampling, batch.logit_rows, positions, stream).view(rows, 1 + depths)
        for stream in (sampler.TOKEN_STREAM, sampler.ACCEPT_STREAM)
    )
    probs = sampler.probabilities(logits, batch.sampling, batch.logit_rows).view(rows, 1 + depths, -1)
    accept_uniforms = accept_uniforms[:, :-1]
    return Verdict(*accept_rejection(batch.drafts, draft_probs, probs, accept_uniforms, token_uniforms))


def _first_tokens(batch: Batch, chosen: Tensor) -> Verdict:
    """Verdict for R chunks: the known token after each, or else the one in `chosen` [S]."""
    known = batch.lookahead[:, 0]
    token_ids = known.new_zeros(len(known), 1 + batch.plan.num_speculative_tokens)
    token_ids[:, 0] = known
    token_ids[: len(chosen), 0] = torch.where(known[: len(chosen)] < 0, chosen, known[: len(chosen)])
    return Verdict(torch.zeros_like(known), token_ids)


class SyntheticAcceptance:
    """Accepts drafts at random, at a given rate per depth; for benchmarks with random weights.

    The token after the accepted drafts is the base's own. For realistic times, `verify`'s computation is done as well
    (somewhat more for drawn drafts). As in sampling, results depend on a request's seed and the position.

    Raises:
        UserError: fewer rates than drafts, or a rate outside 0 to 1.
    """

    def __init__(self, conditional_rates: Sequence[float], depths: int, device: torch.device) -> None:
        if len(conditional_rates) < depths or not all(0 <= rate <= 1 for rate in conditional_rates):
            raise UserError(
                f"synthetic_acceptance is {list(conditional_rates)}, must be {depths} rates from 0 to 1, one per draft"
            )
        self.rates = torch.tensor(list(conditional_rates), dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, batch: Batch) -> Verdict:
        rows, depths = batch.drafts.shape
        if not rows or not depths:
            return verify(logits, batch)
        own = own_tokens(logits, batch).view(rows, 1 + depths)
        # These results are not used: only their time counts.
        if batch.draft_probs is None:
            accept_matching(batch.drafts, own)
        else:
            _verify_drawn(logits, batch, batch.draft_probs)
        positions = batch.inputs.positions.view(rows, 1 + depths)[:, 1:]
        seeds = batch.sampling.seeds[:, None].expand(-1, depths)
        numbers = uniform(seeds.flatten(), positions.flatten(), sampler.ACCEPT_STREAM).view(rows, depths)
        accepted = (numbers < self.rates[:depths]).long().cumprod(-1).sum(-1)
        place, last = torch.arange(1 + depths, device=own.device), accepted[:, None]
        drafted = (place < last) & (own != NO_TOKEN)
        token_ids = torch.where(drafted, torch.cat([batch.drafts, own[:, -1:]], 1), own)
        return Verdict(accepted, token_ids * (place <= last))
