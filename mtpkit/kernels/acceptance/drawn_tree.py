"""Recursive rejection sampling of siblings that were drawn without replacement, in plain PyTorch on
every device.

The method is that of SpecInfer (Miao et al. 2023, arXiv:2305.09781, section 4.3), without
replacement as in Yang et al. 2024, arXiv:2402.14160. Shape legend: R rows, T tokens of a tree, E
tokens with children, V vocabulary, v the part of the vocabulary that this rank holds.
"""

from typing import Protocol

import torch
from torch import Tensor

from mtpkit.kernels.sampling import sample


class Part(Protocol):
    """The part of a vocabulary that a rank holds, and the exchanges between ranks that it needs."""

    def place(self, token_ids: Tensor) -> Tensor:
        """The column of each token in this rank's part; -1 where another rank holds the token."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum of float64 `values` over all ranks."""
        ...

    def sample(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """See `kernels.sampling.sample`; weights [N, v]."""
        ...


class Whole:
    """A vocabulary that is not split: this rank holds all of it."""

    def place(self, token_ids: Tensor) -> Tensor:
        """See `Part.place`."""
        return token_ids

    def sum(self, values: Tensor) -> Tensor:
        """See `Part.sum`."""
        return values

    def sample(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """See `Part.sample`."""
        return sample(weights, uniforms)


def accept_drawn_tree(
    token_ids: Tensor,
    children: Tensor,
    draft_probs: Tensor,
    draft_index: Tensor,
    target_probs: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    depth: int,
    part: Part | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accept at most one child of each token on the path, and draw one more token where the path
    ends.

    At a token with target distribution p and draft distribution q, child d is accepted if u < p(d)
    / q(d). If d is rejected, p becomes the normalised (p - q)+, and d is removed from q, which is
    normalised again; the next child, which was drawn from that q, is tested against the new p and
    q, or skipped if its q is 0 by then. Once all children are rejected, the next token is drawn
    from the last p. The token is distributed as the first p, whatever q was.

    Args:
        token_ids: [R, T] int64.
        children: [T, C] int64, the children of each token in the order drawn, then -1; the same for
            all rows.
        draft_probs: [R, E, v], q at each token that has children.
        draft_index: [T] int64, place of each token in E; any valid one for tokens without children.
        target_probs: [R, T, v], p after each token. A row whose path ends where p has NaN gets
            `NO_TOKEN` there.
        accept_uniforms, sample_uniforms: [R, T] float64, the u of each draft, and that of the draw
            after each token.
        depth: K, the largest depth of a token.
        part: the part of the vocabulary that this rank holds; None: all of it. For each child, the
            ranks sum four numbers per row: p and q of the child, the mass of (p - q)+, and the mass
            of q without the child.

    Returns:
        The same as `accept_tree`.
    """
    part = Whole() if part is None else part
    rows = torch.arange(len(token_ids), device=token_ids.device)
    current = torch.zeros_like(rows)
    alive = torch.ones_like(rows, dtype=torch.bool)
    path = [current]
    ranks = []
    p = target_probs[:, 0]
    # No early end: only the device knows whether a row is alive.
    for _ in range(depth):
        q = draft_probs[rows, draft_index[current]]
        found = torch.full_like(rows, -1)
        rank = torch.where(alive & (children[current, 0] >= 0), -1, -2)
        for place in range(children.shape[1]):
            child = children[current, place]
            tried = alive & (found < 0) & (child >= 0)
            # Any valid index will do: a row without a child is not `tried`.
            child = child.clamp_min(0)
            token = token_ids[rows, child]
            column = part.place(token)[:, None]
            residual = (p - q).clamp_min(0)
            left = without(q, column)
            # One exchange for all four numbers, since every exchange waits for all ranks.
            p_child, q_child, mass, left_mass = part.sum(
                torch.cat(
                    [
                        *(_at(one, column) for one in (p, q)),
                        *(_total(one) for one in (residual, left)),
                    ],
                    1,
                )
            ).unbind(1)
            tried = tried & (q_child > 0)
            accepted = tried & (accept_uniforms[rows, child] * q_child < p_child)
            found = torch.where(accepted, child, found)
            rank = torch.where(accepted, place, rank)
            rejected = tried & ~accepted
            p = torch.where(rejected[:, None], _normalised(residual, p, mass), p)
            q = torch.where(rejected[:, None], _normalised(left, left, left_mass), q)
        alive = found >= 0
        current = torch.where(alive, found, current)
        p = torch.where(alive[:, None], target_probs[rows, current], p)
        path.append(found.clamp_min(0))
        ranks.append(rank)
    along = torch.stack(path, 1)
    accepted = (along > 0).sum(1)
    last = part.sample(p, sample_uniforms[rows, current])
    # The last column, zeros, only makes room for the token that is drawn after K accepted drafts.
    drafts = torch.cat([token_ids.gather(1, along[:, 1:]), along[:, :1]], 1)
    drafts = torch.where(torch.arange(depth + 1, device=rows.device) < accepted[:, None], drafts, 0)
    chosen = drafts.scatter(1, accepted[:, None], last[:, None])
    return accepted, chosen, along, torch.stack(ranks, 1)


def without(weights: Tensor, column: Tensor) -> Tensor:
    """Copy of weights [N, v] with 0 at `column` [N, 1]; unchanged where the column is -1, as
    another rank holds the token."""
    column, held = column.clamp_min(0), column >= 0
    return weights.scatter(1, column, weights.gather(1, column).masked_fill(held, 0.0))


def _at(weights: Tensor, column: Tensor) -> Tensor:
    """Elements of weights [R, v] at `column` [R, 1], as [R, 1] float64; 0 where this rank does not
    hold the token."""
    return weights.gather(1, column.clamp_min(0)).double().masked_fill(column < 0, 0.0)


def _total(weights: Tensor) -> Tensor:
    return weights.sum(1, keepdim=True, dtype=torch.float64)


def _normalised(weights: Tensor, otherwise: Tensor, total: Tensor) -> Tensor:
    """Weights [R, v] divided by their sums `total` [R] over all ranks; `otherwise` where a sum is
    not positive, since rounding can make all of (p - q)+ zero."""
    total = total[:, None].float()
    return torch.where(total > 0, weights / total, otherwise)
