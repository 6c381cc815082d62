"""Growth of trees of drafts, level by level: each parent token gets its best children or drawn
children.

All sizes are fixed by the shape of the tree, so that drafting can be captured in a CUDA graph.

Shape legend: S rows that sample, f tokens of a level that get children, b children of each, C
candidates, T tokens of a tree, N = T - 1 drafts, K depth.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.requests.tree import DynamicTree, TokenTree, Tree
from mtpkit.platform import to_device


@dataclass(frozen=True)
class Level:
    """Drafts of one depth that get children. Each is an entry of the heads' caches of keys and
    values."""

    depth: int
    tokens: Tensor
    """[S, f] int64."""
    above: Tensor
    """[S, f] int64, index of each draft's parent in the level before; 0 at depth 1."""
    masks: Tensor
    """[S, f] int64, bit masks of the entries that each draft sees: those of its ancestors and its
    own."""
    offset: int
    """Number of entries of all levels before."""
    earlier: tuple[int, ...]
    """For each level before, the mask of its entries."""

    def masks_from(self, starts: Tensor) -> Tensor:
        """[S, f] masks without the levels at negative positions; the first level is at positions
        `starts` [S]."""
        masks = self.masks
        for depth, entries in enumerate(self.earlier):
            masks = masks & ~torch.where(starts + depth < 0, entries, 0)[:, None]
        return masks


class Shape:
    """A tree's shape as tensors on a device, from which growths start."""

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.tree = tree
        self.chosen: list[Tensor] = []
        """Static trees: for each depth, the candidates that become drafts, as indices into [f
        b]."""
        self.frontier: list[Tensor] = []
        """Static trees: for each depth, the drafts that get children, as indices into the drafts of
        that depth."""
        self.above: list[Tensor] = []
        """Static trees: for each draft in `frontier`, the index of its parent in the frontier of
        the depth before."""
        self.nodes: list[Tensor] = []
        """Static trees: for each depth [f, b], the token of the tree that each candidate is; 0:
        none."""
        self.widths: list[int] = [tree.most_children] * tree.depth
        """b of each depth."""
        if isinstance(tree, TokenTree):
            self._place(tree, device)

    def _place(self, tree: TokenTree, device: torch.device) -> None:
        front = [0]
        for depth in range(tree.depth):
            families = [tree.children(token) for token in front]
            width = self.widths[depth] = max(map(len, families))
            places = [
                place * width + rank
                for place, family in enumerate(families)
                for rank in range(len(family))
            ]
            nodes = [child for family in families for child in family]
            expanded = [
                (index, child) for index, child in enumerate(nodes) if child in tree.expanded
            ]
            owners = [place for place, family in enumerate(families) for _ in family]
            table = [family + [0] * (width - len(family)) for family in families]
            ints = ([index for index, _ in expanded], [owners[index] for index, _ in expanded])
            self.chosen.append(to_device(places, torch.int64, device))
            self.frontier.append(to_device(ints[0], torch.int64, device))
            self.above.append(to_device(ints[1], torch.int64, device))
            self.nodes.append(to_device(table, torch.int64, device))
            front = [child for _, child in expanded]

    def start(self) -> "Growth":
        """Start a growth from the newest tokens of some rows."""
        return StaticGrowth(self) if isinstance(self.tree, TokenTree) else DynamicGrowth(self.tree)


class Growth:
    """Base class: a tree that grows for S rows."""

    def __init__(self) -> None:
        self.levels: list[Level] = []
        """The levels that the heads can be run on."""
        self._best: list[Tensor] = []

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Add candidates of the next depth: tokens and log-probabilities [S, f, b], children of the
        newest level."""
        raise NotImplementedError

    def drafts(self) -> tuple[Tensor, Tensor | None]:
        """[S, N] int64 drafts, and [S, T] parents where the tree is not the same for all rows."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Depth of the next candidates."""
        return len(self._best) + 1

    def best(self) -> Tensor:
        """[S, K] int64, one draft of each depth, or `NO_TOKEN` if no parent has children with valid
        logits. Some may have none: the heads cannot read every draft, and the base may reject
        those."""
        return torch.stack(self._best, 1)

    def _note(self, tokens: Tensor) -> None:
        """Keep the best draft of the children [S, f, b], whose first is `NO_TOKEN` where a parent
        has none."""
        self._best.append(tokens[:, :, 0].amax(1))

    def _append(self, tokens: Tensor, above: Tensor) -> None:
        last = self.levels[-1] if self.levels else None
        offset = 0
        earlier = tuple[int, ...]()
        if last:
            width = last.tokens.shape[1]
            offset = last.offset + width
            earlier = (*last.earlier, ((1 << width) - 1) << last.offset)
        own = 1 << (offset + torch.arange(tokens.shape[1], device=tokens.device))
        masks = own.expand_as(tokens) if last is None else last.masks.gather(1, above) | own
        self.levels.append(Level(len(self.levels) + 1, tokens, above, masks, offset, earlier))


class StaticGrowth(Growth):
    """A tree of a given shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self._tokens: list[Tensor] = []

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        """See `Growth.add`."""
        depth = len(self._tokens)
        drafts = tokens.flatten(1)[:, self._shape.chosen[depth]]
        self._tokens.append(drafts)
        self._note(tokens)
        if depth + 1 < self._shape.tree.depth:
            above = self._shape.above[depth]
            self._append(drafts[:, self._shape.frontier[depth]], above.expand(len(drafts), -1))

    def drafts(self) -> tuple[Tensor, None]:
        """See `Growth.drafts`."""
        return torch.cat(self._tokens, 1), None


class DynamicGrowth(Growth):
    """A tree of the most probable drafts, see `DynamicTree`."""

    def __init__(self, tree: DynamicTree) -> None:
        super().__init__()
        self._tree = tree
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        """[S, C'] for each depth, index of each candidate's parent among all candidates; -1: token
        0."""
        self._front: tuple[Tensor, Tensor] | None = None
        """[S, f] scores of the newest level and their indices among all candidates."""

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        """See `Growth.add`."""
        width = tokens.shape[2]
        self._note(tokens)
        before = sum(part.shape[1] for part in self._tokens)
        scores = log_probs.nan_to_num(nan=-torch.inf)
        parents = torch.full_like(tokens, -1)
        if self._front is not None:
            # Rounding must not put a child before its parent.
            scores = (self._front[0][..., None] + scores).minimum(self._front[0][..., None])
            parents = self._front[1][..., None].expand_as(tokens)
        flat = scores.flatten(1)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(flat)
        self._parents.append(parents.flatten(1))
        if len(self._tokens) < self._tree.depth:
            # `topk` promises no order among equal scores, which must be the same in every run.
            ranked = torch.sort(flat, dim=1, descending=True, stable=True).indices
            order = ranked[:, : self._tree.topk]
            self._front = flat.gather(1, order), before + order
            above = order // width if before else torch.zeros_like(order)
            self._append(tokens.flatten(1).gather(1, order), above)

    def drafts(self) -> tuple[Tensor, Tensor]:
        """See `Growth.drafts`: the best candidates, in the order in which they were made. Among
        equal scores the earlier candidate is better, so that a draft's parent is a draft, too."""
        scores, tokens, parents = (
            torch.cat(part, 1) for part in (self._scores, self._tokens, self._parents)
        )
        count = self._tree.tokens - 1
        ranked = torch.sort(scores, dim=1, descending=True, stable=True).indices
        kept = ranked[:, :count].sort(1).values

        # Parents are indices among all candidates and become indices among the kept ones.
        places = torch.zeros_like(F.pad(tokens, (0, 1)))  # the last column stands for token 0
        numbers = torch.arange(1, 1 + count, device=tokens.device).expand_as(kept)
        places = places.scatter(1, kept, numbers)
        above = places.gather(1, parents.gather(1, kept) % places.shape[1])
        return tokens.gather(1, kept), F.pad(above, (1, 0), value=-1)
