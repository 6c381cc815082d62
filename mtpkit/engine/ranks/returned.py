"""What the last pipeline stage sends back of a step: integers, a row for each request that samples.

Of chains they are what the host gets, see `pack_result`. Of trees there follow the accepted path, along which every
stage moves keys, windows and rings, and the new tree. Each integer is sent in as few bytes as its column needs.

Shape legend: S rows that sample, K depth, T tokens of a tree.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.step import Batch, Drafts, Plan, Verdict, pack_result
from mtpkit.engine.tree import DynamicTree, Tree
from mtpkit.errors import MtpkitError
from mtpkit.kernels import NO_TOKEN

_NO_RANK = -2
"""The least of `Verdict.ranks`."""


class Column(NamedTuple):
    """Some integers of a row."""

    width: int
    least: int
    most: int

    @property
    def nbytes(self) -> int:
        """Bytes of each integer, with its sign, from 1 to 4."""
        return max(self.most, -self.least - 1).bit_length() // 8 + 1


def columns_of(plan: Plan, tree: Tree | None, vocab_size: int) -> dict[str, Column]:
    """The columns of a plan's results by their names in messages, in their order.

    Args:
        tree: the shape of the drafts in steps of trees.
    """
    depths, tokens = plan.num_speculative_tokens, (NO_TOKEN, vocab_size - 1)
    columns = {
        "accepted drafts": Column(1, 0, depths),
        "tokens": Column(1 + depths, *tokens),
        "drafts": Column(depths, *tokens),
    }
    if not plan.trees:
        return columns
    assert tree is not None
    columns["drafts"] = Column(depths, NO_TOKEN, 0)
    last = tree.tokens - 1
    if plan.num_decode_rows:
        columns |= {"ranks": Column(depths, _NO_RANK, last), "places on the path": Column(depths, 0, last)}
    columns["tokens of the tree"] = Column(last, *tokens)
    if isinstance(tree, DynamicTree):
        columns["parents"] = Column(tree.tokens, -1, last - 1)
    return columns


def pack_returned(verdict: Verdict, drafts: Drafts) -> Tensor:
    """[S, columns] int64, see `columns_of`. Of drafts in trees the host only asks which depths are invalid."""
    if drafts.best is None:
        return pack_result(verdict, drafts)
    packed = pack_result(verdict, replace(drafts, best=drafts.best.clamp_max(0)))
    parts = [packed]
    if verdict.path is not None:
        path = verdict.path[:, 1:]
        parts.append(F.pad(path, (0, 0, 0, len(packed) - len(path))))
    parts += [drafts.token_ids] if drafts.parents is None else [drafts.token_ids, drafts.parents]
    return torch.cat(parts, 1)


def nbytes_of(columns: dict[str, Column]) -> int:
    """Bytes of a row."""
    return sum(column.width * column.nbytes for column in columns.values())


def to_bytes(packed: Tensor, columns: dict[str, Column]) -> Tensor:
    """[S, nbytes] uint8, what `pack_returned` gives as it is sent: integers in two's complement, the low byte first."""
    every = packed.to(torch.int32)[..., None].view(torch.uint8)
    parts = every.split([column.width for column in columns.values()], 1)
    return torch.cat([p[..., : c.nbytes].flatten(1) for p, c in zip(parts, columns.values(), strict=True)], 1)


def from_bytes(message: Tensor, columns: dict[str, Column]) -> Tensor:
    """[S, columns] int64 of [S, nbytes] uint8."""
    found = []
    parts = message.split([column.width * column.nbytes for column in columns.values()], 1)
    for part, (column, count) in zip(parts, ((one, one.nbytes) for one in columns.values()), strict=True):
        # In the upper bytes, so that the shift repeats the sign.
        upper = F.pad(part.unflatten(1, (column.width, count)), (4 - count, 0)).view(torch.int32)[..., 0]
        found.append(upper >> (8 * (4 - count)))
    return torch.cat(found, 1).long()


def unpack_returned(packed: Tensor, batch: Batch, tree: Tree | None) -> tuple[Verdict, Drafts]:
    """What `pack_returned` packed of a batch, as a pipeline stage needs it that has neither lm_head nor heads. Values
    that no step can have become others that it can have: the host refuses them later, see `check_returned`.

    Args:
        packed: [S, columns] int64.
    """
    columns = columns_of(batch.plan, tree, batch.sampling.vocabulary.size)
    split = packed.split([column.width for column in columns.values()], 1)
    parts = {
        name: part.clamp(column.least, column.most) for (name, column), part in zip(columns.items(), split, strict=True)
    }
    missing = (0, 0, 0, len(batch.inputs.state_slots) - len(packed))
    accepted, token_ids = (F.pad(parts[name], missing) for name in ("accepted drafts", "tokens"))
    path = parts.get("places on the path")
    if path is not None:
        path = F.pad(path[: batch.inputs.num_decode_rows], (1, 0))
    drafts = parts["tokens of the tree" if batch.plan.trees else "drafts"]
    return Verdict(accepted[:, 0], token_ids, path), Drafts(drafts, None, parts.get("parents"))


def check_returned(packed: np.ndarray, columns: dict[str, Column]) -> None:
    """Check results [S, columns] that came from another stage.

    Raises:
        MtpkitError: they cannot be those of a step.
    """
    ends = np.cumsum([column.width for column in columns.values()])[:-1]
    for (name, (_, least, most)), values in zip(columns.items(), np.split(packed, ends, axis=1), strict=True):
        wrong = values[(values < least) | (values > most)]
        if len(wrong):
            raise MtpkitError(f"the last stage sent {wrong[0]} for {name}, which is not from {least} to {most}")
