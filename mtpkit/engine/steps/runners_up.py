"""Runners-up of drafts: the tokens that a head finds best after the one that it drafts.

A grammar often refuses what the head drafts, and what the base says then is one of the next best
tokens. In steps with constrained rows the heads therefore report a few more of them, from which
`mtpkit.engine.requests.walk.Walk` takes the first that is legal. Only for chains of best tokens: a
tree has other tokens by itself, and a draft that was drawn must not be replaced for being refused,
see `HostDrafts.chosen`.

Shape legend: S rows that sample, K drafts.
"""

import torch
from torch import Tensor

from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.steps.plan import Batch, Drafts
from mtpkit.engine.steps.processor import GRAMMAR, Use
from mtpkit.kernels import NO_TOKEN

COUNT = 3
"""Runners-up of each draft."""


def columns_of(use: Use, drafts: DraftShape) -> int:
    """Integers in each row of a step's result, see `pack`."""
    return drafts * COUNT if isinstance(drafts, int) and GRAMMAR in use else 0


def pack(drafts: Drafts, batch: Batch) -> Tensor | None:
    """[S, K * COUNT] int64, the runners-up of each draft, `NO_TOKEN` where there are none; None: no
    row is constrained."""
    columns = columns_of(batch.sampling.use, batch.shape.drafts)
    if not columns:
        return None
    if drafts.runners_up is None:
        rows = len(drafts.token_ids)
        return torch.full((rows, columns), NO_TOKEN, device=drafts.token_ids.device)
    return drafts.runners_up.flatten(1)
