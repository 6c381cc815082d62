"""What the host tells the device of constrained requests before a step: the masks along their
drafts, and the drafts, as far as the grammar forces other ones.

The host must know the drafts of a constrained request before it launches the request's next step.

Shape legend: K drafts, T tokens of a decode row, M masks, W integers per mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import DynamicTree, TokenTree, width_of
from mtpkit.engine.requests.walk import Walk, masks_along
from mtpkit.engine.steps import runners_up
from mtpkit.engine.steps.host_drafts import HostDrafts
from mtpkit.engine.steps.plan import Plan
from mtpkit.engine.steps.token_rules import BITS
from mtpkit.kernels import NO_TOKEN


class Masks(NamedTuple):
    """Masks of tokens that may follow, see `mtpkit.engine.steps.grammar`."""

    slots: list[int]
    """M slots."""
    places: list[int]
    """M indices of the tokens within the decode rows at these slots, after which the masks hold; 0
    for the last token of a chunk."""
    allowed: np.ndarray
    """[M, W] int32, a bit for each token that may follow."""


def constrained_rows(
    plan: Plan, size: int, drawn: bool = False
) -> tuple[Masks, HostDrafts | None] | None:
    """What the host tells the device of the constrained rows of a plan, before it is launched.

    Args:
        size: number of tokens of the vocabulary.
        drawn: whether drafts are drawn from the heads' distributions.

    Returns:
        The masks, and the drafts of the decode rows if the host may write any; None: no row is
        constrained.
    """
    decoding = [row.request for row in plan.decode_rows if row.request.constraint]
    # The token after the prompt of a preempted request is known.
    begun = [
        row.request for row in plan.chunks if row.request.constraint and row.samples and row.emits
    ]
    if not decoding and not begun:
        return None

    # Siblings of a tree are drawn without replacement, which leaves no place for another draft.
    writes = plan.num_speculative_tokens > 0 and not (drawn and plan.trees)
    trees = [_tree_of(request, plan, writes) for request in decoding]
    walks = [
        _walk(request, tree, plan, writes) for request, tree in zip(decoding, trees, strict=True)
    ]
    walks += [_walk(request, _Tree([0], [-1]), plan, writes) for request in begun]

    slots = slots_of([*decoding, *begun])
    masks = Masks(
        [slot for slot, walk in zip(slots, walks, strict=True) for _ in walk.places],
        [place for walk in walks for place in walk.places],
        masks_along(walks, -(-size // BITS)),
    )
    if not decoding or not writes:
        return masks, None
    return masks, _host_drafts(slots[: len(decoding)], trees, walks, plan)


class _Tree(NamedTuple):
    """The drafts of a row, see `TokenTree`."""

    token_ids: list[int]
    parents: Sequence[int]
    chosen: int | None = None
    """The first token that the heads did not draft; None: there is none."""
    runners_up: Sequence[Sequence[int]] = ()
    """See `Walk`."""


def _walk(request: Request, tree: _Tree, plan: Plan, writes: bool) -> Walk:
    assert request.constraint is not None
    # The drafts of a request that does not speculate are rejected, whatever they are.
    depth = plan.num_speculative_tokens if request.params.speculate else 0
    return request.constraint.walk(tree.token_ids, tree.parents, depth, writes, tree.runners_up)


def slots_of(requests: Sequence[Request]) -> list[int]:
    """Slots of running requests."""
    return [request.slot for request in requests if request.slot is not None]


def _tree_of(request: Request, plan: Plan, writes: bool) -> _Tree:
    """The drafts that a constrained decode row verifies, before the grammar replaces any."""
    width = width_of(plan.drafts)
    # Invalid drafts are 0 on the device, too; the newest output token itself is not read.
    known = [0, *(max(0, token) for token in request.newest_draft_ids[: width - 1])]
    token_ids = known + [0] * (width - len(known))
    chain = range(-1, width - 1)
    if not plan.trees:
        return _Tree(token_ids, chain, len(known), _runners_up(request))
    if isinstance(plan.drafts, TokenTree):
        return _Tree(token_ids, plan.drafts.parents)
    # The parents follow the drafts.
    parents = request.newest_draft_ids[width - 1 :] or chain
    if writes:
        assert request.constraint is not None
        forced = request.constraint.forced(plan.num_speculative_tokens)
        # A tree that grows is wide where the heads are unsure, and may not be deep enough.
        if forced and not _has_path(token_ids, parents, forced):
            token_ids[1 : 1 + len(forced)] = forced
            parents = chain
    return _Tree(token_ids, parents)


def _runners_up(request: Request) -> list[list[int]]:
    """The runners-up of each draft of a chain."""
    flat = request.runners_up
    count = runners_up.COUNT
    each = [flat[first : first + count] for first in range(0, len(flat), count)]
    return [[token for token in tokens if token != NO_TOKEN] for tokens in each]


def _has_path(token_ids: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> bool:
    """Whether a tree has room for a path of drafts, whatever its last ones are now."""
    place = 0
    for token in path:
        children = [child for child, parent in enumerate(parents) if parent == place]
        if not children:
            return False
        place = next((one for one in children if token_ids[one] == token), children[0])
    return True


def _host_drafts(
    slots: list[int], trees: Sequence[_Tree], walks: Sequence[Walk], plan: Plan
) -> HostDrafts:
    """The drafts of constrained decode rows, after their walks."""
    token_ids = np.array([tree.token_ids for tree in trees], np.int64)[:, 1:]
    chosen = np.zeros(token_ids.shape, np.bool_)
    for row, tree, walk in zip(chosen, trees, walks, strict=False):
        row[[place - 1 for place in walk.written]] = True
        if tree.chosen is not None:
            row[tree.chosen - 1 :] = True
    parents = None
    if isinstance(plan.drafts, DynamicTree):
        parents = np.array([list(tree.parents) for tree in trees], np.int64)
    return HostDrafts(slots, token_ids, chosen, parents)
