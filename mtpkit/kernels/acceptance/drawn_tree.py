"""Recursive rejection sampling of siblings that were drawn without replacement, in plain PyTorch on every device.

SpecInfer (Miao et al. 2023, arXiv:2305.09781, section 4.3); without replacement as in Yang et al. 2024,
arXiv:2402.14160. Shape legend: R rows, T tokens of a tree, E tokens with children, V vocabulary.
"""

import torch
from torch import Tensor

from mtpkit.kernels.sampling import sample


def accept_drawn_tree(
    token_ids: Tensor,
    children: Tensor,
    draft_probs: Tensor,
    draft_index: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accept at most one child of each token on the path, and draw one more token where the path ends.

    At a token with target p and draft distribution q, child d is accepted when u < p(d) / q(d). If not, p becomes the
    normalised (p - q)+ and q loses d, for the next child, which was drawn from what was left of q; a child that had
    nothing left to be drawn from is no candidate. Once all children are rejected the next token is drawn from p. So the
    token is distributed as the first p, whatever q was.

    Args:
        token_ids: [R, T] int64.
        children: [T, C] int64, the children of each token in the order of their draws, then -1; the same for all rows.
        draft_probs: [R, E, V], q at each token that has children.
        draft_index: [T] int64, where in E each token's q is; any number for tokens without children.
        target_probs: [R, T, V], p after each token. A row that stops where p is NaN gets `NO_TOKEN` there.
        accept_uniforms, sample_uniforms: [R, T] float64, the u of each draft, and that of a draw after each token.
        depth: K, the largest depth of a token.

    Returns:
        The same as `accept_tree`.
    """
    rows = torch.arange(len(token_ids), device=token_ids.device)
    current = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    path, ranks = [current], []
    p = target_probs[:, 0]
    for _ in range(depth):
        q = draft_probs[rows, draft_index[current]]
        found, rank = torch.full_like(rows, -1), torch.full_like(rows, -2)
        for place in range(children.shape[1]):
            child = children[current, place]
            tried = alive & (found < 0) & (child >= 0)
            child = child.clamp_min(0)
            token = token_ids[rows, child]
            mass = q[rows, token].double()
            tried = tried & (mass > 0)
            accepted = tried & (accept_uniforms[rows, child] * mass < p[rows, token].double())
            found, rank = torch.where(accepted, child, found), torch.where(accepted, place, rank)
            rejected = tried & ~accepted
            rank = torch.where(rejected, -1, rank)
            p = torch.where(rejected[:, None], _normalised((p - q).clamp_min(0), p), p)
            left = q.scatter(1, token[:, None], 0.0)
            q = torch.where(rejected[:, None], _normalised(left, left), q)
        alive = found >= 0
        current = torch.where(alive, found, current)
        p = torch.where(alive[:, None], target_probs[rows, current], p)
        path.append(found.clamp_min(0))
        ranks.append(rank)
    along = torch.stack(path, 1)
    accepted = (along > 0).sum(1)
    last = sample(p, sample_uniforms[rows, current])
    drafts = torch.cat([token_ids.gather(1, along[:, 1:]), along[:, :1]], 1)
    drafts = torch.where(torch.arange(depth + 1, device=rows.device) < accepted[:, None], drafts, 0)
    chosen = drafts.scatter(1, accepted[:, None], last[:, None])
    return accepted, chosen, along, torch.stack(ranks, 1)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """weights [R, V] over their sums; `otherwise` where a sum is not positive: rounding can leave nothing of p - q."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)
