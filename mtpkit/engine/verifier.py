"""Decides which drafts stand and which token follows them."""

import torch
from torch import Tensor

from mtpkit.engine import sampler
from mtpkit.engine.step import Batch, Verdict
from mtpkit.kernels import sampling as ops
from mtpkit.kernels.acceptance import accept_matching, accept_rejection


def verify(logits: Tensor, batch: Batch) -> Verdict:
    """Verify the drafts of decode rows and choose a token for every row that samples.

    The output is distributed as the base's own. With drafts that are the heads' best tokens (`draft_probs` None) it is,
    for a given seed, also the same for every K. Tensor code throughout: nothing waits for the device.

    Args:
        logits: [N, V], see `Batch.logit_indices`.
    """
    logits = sampler.penalise(logits, batch.sampling, batch.logit_rows, batch.drafts)
    positions = batch.inputs.positions[batch.logit_indices] + 1
    num_rows, depths = batch.drafts.shape
    split = num_rows * (1 + depths)

    if batch.draft_probs is None:
        chosen = sampler.sample(logits, batch.sampling, batch.logit_rows, positions)
        accepted, token_ids = accept_matching(batch.drafts, chosen[:split].view(num_rows, 1 + depths))
        first_tokens = chosen[split:]
    else:
        probs = sampler.probabilities(logits, batch.sampling, batch.logit_rows)
        token_uniforms, accept_uniforms = (
            sampler.uniforms(batch.sampling, batch.logit_rows, positions, stream)
            for stream in (sampler.TOKEN_STREAM, sampler.ACCEPT_STREAM)
        )
        accepted, token_ids = accept_rejection(
            batch.drafts,
            batch.draft_probs,
            probs[:split].unflatten(0, (num_rows, 1 + depths)),
            accept_uniforms[:split].view(num_rows, 1 + depths)[:, :-1],
            token_uniforms[:split].view(num_rows, 1 + depths),
        )
        first_tokens = ops.sample(probs[split:], token_uniforms[split:])
    return _with_prefill_rows(batch, accepted, token_ids, first_tokens)


def _with_prefill_rows(batch: Batch, accepted: Tensor, token_ids: Tensor, first_tokens: Tensor) -> Verdict:
    """Append the prefill rows: [S - D] sampled first tokens, and the known next tokens of the other chunks."""
    known = batch.lookahead[batch.plan.num_sampling_rows :, 0]
    rest = torch.zeros(len(first_tokens) + len(known), token_ids.shape[1], dtype=torch.int64, device=token_ids.device)
    rest[:, 0] = torch.cat([first_tokens, known])
    return Verdict(torch.cat([accepted, torch.zeros_like(rest[:, 0])]), torch.cat([token_ids, rest]))
