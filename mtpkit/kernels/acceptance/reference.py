"""Acceptance of drafts in plain PyTorch.

Shape legend: R rows, K drafts per row, V vocabulary.
"""

import torch
from torch import Tensor

from mtpkit.kernels.sampling import sample


def accept_matching(draft_token_ids: Tensor, sampled_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts up to the first that differs from the target's own choice at its position.

    If the choice is the argmax, this is greedy verification. If it is drawn from p, this is exact
    rejection sampling (Leviathan et al., 2023) of drafts whose q is one-hot: a draft d is accepted
    with probability p(d), and a draw that differs from d is distributed as the normalised (p - q)+.
    Decoding without drafts then draws the same tokens from the same uniforms.

    Example: drafts [5, 7, 9], choices [5, 7, 2, 4] -> accepted 2, token ids [5, 7, 2, 0].
    `NO_TOKEN` equals no draft: with choices [5, NO_TOKEN, 2, 4] the row stops there, accepted 1,
    token ids [5, NO_TOKEN, 0, 0].

    Args:
        draft_token_ids: [R, K] int64.
        sampled_token_ids: [R, 1 + K] int64, the target's choice at each draft's position and after
            the last draft.

    Returns:
        accepted [R] int64 in 0..K, and token ids [R, 1 + K]: the accepted drafts, the next token,
        then zeros.
    """
    matches = draft_token_ids == sampled_token_ids[:, :-1]
    accepted = matches.long().cumprod(-1).sum(-1)
    return accepted, cut(sampled_token_ids, accepted)


def accept_rejection(
    draft_token_ids: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Exact rejection sampling of drafts that were drawn from q (Leviathan et al., 2023; Chen et
    al., 2023).

    Draft d is accepted if u < p(d) / q(d). The first rejected draft is replaced by a draw from the
    normalised (p - q)+. If no draft is rejected, one more token is drawn from p.

    Args:
        draft_token_ids: [R, K] int64.
        draft_probs: [R, K, V], q at each draft.
        target_probs: [R, 1 + K, V], p at each draft and after the last draft. A row that stops at a
            position where p is NaN gets `NO_TOKEN` there.
        accept_uniforms: [R, K] float64, the u of each draft.
        sample_uniforms: [R, 1 + K] float64, for the draw that replaces a rejected draft or follows
            the last draft.

    Returns:
        The same as `accept_matching`.
    """
    rows, _, vocab_size = target_probs.shape

    # In float64: float32 would round the largest u to 1, and reject a draft whose p equals its q.
    p = target_probs[:, :-1].gather(-1, draft_token_ids[..., None])[..., 0].double()
    q = draft_probs.gather(-1, draft_token_ids[..., None])[..., 0].double()
    # Not u < p / q: q may be 0.
    accepted = (accept_uniforms * q < p).long().cumprod(-1).sum(-1)

    residual = (target_probs[:, :-1] - draft_probs).clamp_min(0)
    # Where p equals q up to rounding, the residual may be all zeros; p then takes its place.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs[:, :-1])
    weights = torch.cat([residual, target_probs[:, -1:]], dim=1)

    # One draw per row, at the position where the row stops
    stop = accepted[:, None]
    stop_weights = weights.gather(1, stop[..., None].expand(rows, 1, vocab_size))[:, 0]
    stop_uniforms = sample_uniforms.gather(1, stop)[:, 0]
    chosen = sample(stop_weights, stop_uniforms)

    token_ids = torch.cat([draft_token_ids, draft_token_ids.new_zeros(rows, 1)], dim=1)
    token_ids = token_ids.scatter(1, stop, chosen[:, None])
    return accepted, cut(token_ids, accepted)


def cut(token_ids: Tensor, accepted: Tensor) -> Tensor:
    """Zero everything after the next token, which is at index `accepted`."""
    keep = torch.arange(token_ids.shape[1], device=token_ids.device) <= accepted[:, None]
    return token_ids * keep


def accept_tree(
    token_ids: Tensor, parents: Tensor, sampled_token_ids: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Follow, from token 0 on, the child that equals the target's own choice; exact for any tree,
    see `accept_matching`.

    Args:
        token_ids, parents: [R, T] int64, trees of drafts, see `kernels.ancestors`; token 0 is the
            root and not a draft.
        sampled_token_ids: [R, T] int64, the target's choice after each token.
        depth: K, the largest depth of a token.

    Returns:
        accepted [R] int64; token ids [R, 1 + K]: the accepted drafts, the next token, then zeros;
        path [R, 1 + K]: index 0, the tree indices of the accepted drafts, then zeros; ranks [R, K]:
        at each depth, the rank of the accepted child among its siblings; -1 if all children of the
        path's last token were rejected there; -2 if that token has no children, or if the path has
        ended at an earlier depth.
    """
    index = torch.arange(token_ids.shape[1], device=token_ids.device)
    current = parents.new_zeros(len(parents))
    alive = torch.ones_like(current, dtype=torch.bool)

    # All rows go through all depths, since asking which rows have ended needs a host-device sync.
    path = [current]
    chosen = []
    ranks = []
    for _ in range(depth):
        choice = sampled_token_ids.gather(1, current[:, None])
        chosen.append(torch.where(alive, choice[:, 0], 0))

        below = (parents == current[:, None]) & (index > 0)
        matches = below & (token_ids == choice)
        # argmax takes no bool; among equal integers it finds the first.
        child = matches.long().argmax(1)
        found = alive & matches.any(1)

        rank = (below & (index < child[:, None])).sum(1)
        none = torch.where(alive & below.any(1), -1, -2)
        ranks.append(torch.where(found, rank, none))

        current = torch.where(found, child, current)
        alive = found
        path.append(torch.where(found, child, 0))

    # After a path of K drafts one more token is chosen.
    choice = sampled_token_ids.gather(1, current[:, None])
    chosen.append(torch.where(alive, choice[:, 0], 0))

    along = torch.stack(path, 1)
    # With K = 0 there is nothing to stack.
    ranked = torch.stack(ranks, 1) if ranks else along[:, :0]
    return (along > 0).sum(1), torch.stack(chosen, 1), along, ranked
