"""Results of a step that the last pipeline stage sends back: one tensor [S, columns] int32, with a
row for each request that samples.

For chains, the columns are the integers that the host gets, see `pack_result`. For trees, two
things follow: the accepted path, along which every stage moves keys, windows and rings, and the new
tree. `columns_of` names the columns in their order.

Shape legend: S rows that sample, K depth, T tokens of a tree.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.requests.tree import DraftShape, DynamicTree, depth_of
from mtpkit.engine.steps.plan import Batch, Drafts, Verdict, pack_result
from mtpkit.errors import MtpkitError
from mtpkit.kernels import NO_TOKEN

_NO_RANK = -2
"""The smallest value in `Verdict.ranks`."""


class Column(NamedTuple):
    """A group of adjacent integers in each row: their number, and their smallest and largest
    values."""

    width: int
    smallest: int
    largest: int


def columns_of(drafts: DraftShape, decoding: bool, vocab_size: int) -> dict[str, Column]:
    """The columns of a step's results, in their order, by their names in error messages.

    Args:
        drafts: the drafts that rows verify and get.
        decoding: whether there are decode rows.
    """
    depths = depth_of(drafts)
    tokens = (NO_TOKEN, vocab_size - 1)
    columns = {
        "accepted drafts": Column(1, 0, depths),
        "tokens": Column(1 + depths, *tokens),
        "drafts": Column(depths, *tokens),
    }
    if isinstance(drafts, int):
        return columns
    columns["drafts"] = Column(depths, NO_TOKEN, 0)
    last = drafts.tokens - 1
    if decoding:
        columns |= {
            "ranks": Column(depths, _NO_RANK, last),
            "places on the path": Column(depths, 0, last),
        }
    columns["tokens of the tree"] = Column(last, *tokens)
    if isinstance(drafts, DynamicTree):
        columns["parents"] = Column(drafts.tokens, -1, last - 1)
    return columns


def pack_returned(verdict: Verdict, drafts: Drafts) -> Tensor:
    """[S, columns] int64, see `columns_of`. For trees, the host only needs to know which depths are
    invalid."""
    if drafts.best is None:
        return pack_result(verdict, drafts)
    packed = pack_result(verdict, replace(drafts, best=drafts.best.clamp_max(0)))
    parts = [packed]
    if verdict.path is not None:
        path = verdict.path[:, 1:]
        chunks = len(packed) - len(path)
        parts.append(F.pad(path, (0, 0, 0, chunks)))
    parts.append(drafts.token_ids)
    if drafts.parents is not None:
        parts.append(drafts.parents)
    return torch.cat(parts, 1)


def num_columns(columns: dict[str, Column]) -> int:
    """Integers per row."""
    return sum(column.width for column in columns.values())


def unpack_returned(packed: Tensor, batch: Batch) -> tuple[Verdict, Drafts]:
    """Unpack the result of `pack_returned` for a pipeline stage without lm_head and heads. Values
    outside the range of their column are clamped to it: the host refuses them later, see
    `check_returned`.

    Args:
        packed: [S, columns] int64.
    """
    shape = batch.shape
    columns = columns_of(shape.drafts, shape.decode_rows > 0, batch.sampling.vocabulary.size)
    widths = [column.width for column in columns.values()]
    parts = {
        name: values.clamp(column.smallest, column.largest)
        for (name, column), values in zip(columns.items(), packed.split(widths, 1), strict=True)
    }

    # A verdict also has rows that do not sample.
    missing = (0, 0, 0, len(batch.inputs.state_slots) - len(packed))
    accepted = F.pad(parts["accepted drafts"], missing)[:, 0]
    token_ids = F.pad(parts["tokens"], missing)
    path = parts.get("places on the path")
    if path is not None:
        # The first place on every path is token 0, which is not sent.
        path = F.pad(path[: batch.inputs.num_decode_rows], (1, 0))

    drafts = parts["tokens of the tree"] if shape.trees else parts["drafts"]
    return Verdict(accepted, token_ids, path), Drafts(drafts, None, parts.get("parents"))


def check_returned(packed: np.ndarray, columns: dict[str, Column]) -> None:
    """Check results [S, columns] that came from another stage.

    Raises:
        MtpkitError: a value is outside its column's range.
    """
    ends = np.cumsum([column.width for column in columns.values()])[:-1]
    groups = np.split(packed, ends, axis=1)
    for (name, column), values in zip(columns.items(), groups, strict=True):
        wrong = values[(values < column.smallest) | (values > column.largest)]
        if len(wrong):
            raise MtpkitError(
                f"the last stage sent {wrong[0]} for {name}, which must be from"
                f" {column.smallest} to {column.largest}"
            )
