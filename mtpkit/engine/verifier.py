"""Decides which drafts stand and which token follows them."""

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

    The output is distributed as the base's own. With drafts that are the heads' best tokens (`draft_probs` None) it is,
    for a given seed, also the same for every K. Where a row's logits are invalid it stops with `NO_TOKEN`;
    those after the position at which a row stops do not matter. Tensor code throughout: nothing waits for the device.

    Args:
        logits: [N, V], see `Batch.logit_indices`.
    """
    if batch.draft_probs is not None:
        return _verify_drawn(logits, batch, batch.draft_probs)
    own = own_tokens(logits, batch)
    rows = len(batch.drafts)
    return Verdict(*accept_matching(batch.drafts, own.view(rows, -1))) if rows else _first_tokens(batch, own)


def own_tokens(logits: Tensor, batch: Batch) -> Tensor:
    """[N] int64, what the base itself takes at each of the batch's logits [N, V]: its best token, a draw, or
    `NO_TOKEN`."""
    logits = sampler.process(logits, batch.sampling, batch.logit_rows, batch.drafts)
    return sampler.sample(logits, batch.sampling, batch.logit_rows, _logit_positions(batch))


def _logit_positions(batch: Batch) -> Tensor:
    """[N] int64, the position of the token that each logit chooses."""
    return batch.inputs.positions[batch.logit_indices] + 1


def _verify_drawn(logits: Tensor, batch: Batch, draft_probs: Tensor) -> Verdict:
    """Of drafts that were drawn from `draft_probs` [D, K, V]."""
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
    """Of R chunks: the known token after each where there is one, the `chosen` [S] of the others."""
    known = batch.lookahead[:, 0]
    token_ids = known.new_zeros(len(known), 1 + batch.plan.num_speculative_tokens)
    token_ids[:, 0] = known
    token_ids[: len(chosen), 0] = torch.where(known[: len(chosen)] < 0, chosen, known[: len(chosen)])
    return Verdict(torch.zeros_like(known), token_ids)


class SyntheticAcceptance:
    """Accepts drafts by chance, at a given rate a depth; for benchmarks whose weights mean nothing.

    After them comes the base's own token. Does the work of `verify` as well, of drawn drafts somewhat more. A function
    of a request's seed and the position, as sampling is.

    Raises:
        UserError: not one rate from 0 to 1 for each of the K drafts.
    """

    def __init__(self, conditional_rates: Sequence[float], depths: int, device: torch.device) -> None:
        if len(conditional_rates) < depths or not all(0 <= rate <= 1 for rate in conditional_rates):
            raise UserError(
                f"synthetic_acceptance is {list(conditional_rates)}, must be {depths} rates from 0 to 1, one a draft"
            )
        self.rates = torch.tensor(list(conditional_rates), dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, batch: Batch) -> Verdict:
        """See `verify`."""
        rows, depths = batch.drafts.shape
        if not rows or not depths:
            return verify(logits, batch)
        own = own_tokens(logits, batch).view(rows, 1 + depths)
        # Verified for the time that it takes.
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
