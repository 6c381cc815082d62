"""Decides which drafts stand and which token follows them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpkit.engine import sampler
from mtpkit.engine.step import Batch, Verdict
from mtpkit.errors import UserError
from mtpkit.kernels.acceptance import accept_matching, accept_rejection
from mtpkit.kernels.sampling import uniform


def verify(logits: Tensor, batch: Batch) -> Verdict:
    """Verify the drafts of decode rows, or choose the first token of the chunks that end a prompt.

    The output is distributed as the base's own. With drafts that are the heads' best tokens (`draft_probs` None) it is,
    for a given seed, also the same for every K. Tensor code throughout: nothing waits for the device.

    Args:
        logits: [N, V], see `Batch.logit_indices`.
    """
    logits = sampler.penalise(logits, batch.sampling, batch.logit_rows, batch.drafts)
    positions = batch.inputs.positions[batch.logit_indices] + 1
    rows, depths = batch.drafts.shape
    if batch.draft_probs is None:
        chosen = sampler.sample(logits, batch.sampling, batch.logit_rows, positions)
        if not rows:
            return _first_tokens(batch, chosen)
        return Verdict(*accept_matching(batch.drafts, chosen.view(rows, 1 + depths)))
    token_uniforms, accept_uniforms = (
        sampler.uniforms(batch.sampling, batch.logit_rows, positions, stream).view(rows, 1 + depths)
        for stream in (sampler.TOKEN_STREAM, sampler.ACCEPT_STREAM)
    )
    probs = sampler.probabilities(logits, batch.sampling, batch.logit_rows).view(rows, 1 + depths, -1)
    accept_uniforms = accept_uniforms[:, :-1]
    return Verdict(*accept_rejection(batch.drafts, batch.draft_probs, probs, accept_uniforms, token_uniforms))


def _first_tokens(batch: Batch, chosen: Tensor) -> Verdict:
    """Of R chunks: the known token after each where there is one, the `chosen` [S] of the others."""
    known = batch.lookahead[:, 0]
    token_ids = known.new_zeros(len(known), 1 + batch.plan.num_speculative_tokens)
    token_ids[:, 0] = known
    token_ids[: len(chosen), 0] = torch.where(known[: len(chosen)] < 0, chosen, known[: len(chosen)])
    return Verdict(torch.zeros_like(known), token_ids)


class SyntheticAcceptance:
    """Accepts drafts by chance, at a given rate a depth; for benchmarks whose weights mean nothing.

    Does the work of `verify` as well. A function of a request's seed and the position, as sampling is.

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
        verdict = verify(logits, batch)
        rows, depths = batch.drafts.shape
        if not rows or not depths:
            return verdict
        positions = batch.inputs.positions.view(rows, 1 + depths)[:, 1:]
        seeds = batch.sampling.seeds[:, None].expand(-1, depths)
        numbers = uniform(seeds.flatten(), positions.flatten(), sampler.ACCEPT_STREAM).view(rows, depths)
        accepted = (numbers < self.rates[:depths]).long().cumprod(-1).sum(-1)
        token_ids = torch.cat([batch.drafts, batch.drafts[:, -1:]], 1)
        keep = torch.arange(1 + depths, device=token_ids.device) <= accepted[:, None]
        return Verdict(accepted, token_ids * keep)
