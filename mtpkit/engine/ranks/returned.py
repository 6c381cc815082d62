"""Results of a step that the last pipeline stage sends back: integers, one row per request that
samples.

For chains, they are the integers that the host gets, see `pack_result`. For trees, two things
follow: the accepted path, along which every stage moves keys, windows and rings, and the new tree.
Each integer is sent in as few bits as its column needs.

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
    """A group of integers in each row: their number, and their smallest and largest values."""

    width: int
    least: int
    most: int

    @property
    def bits(self) -> int:
        """Bits per integer. They encode its distance from `least - 1`: one code stands for values
        that are too small, and one for values that are too large."""
        return (self.most - self.least + 2).bit_length()


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
        parts.append(F.pad(path, (0, 0, 0, len(packed) - len(path))))
    parts += [drafts.token_ids] if drafts.parents is None else [drafts.token_ids, drafts.parents]
    return torch.cat(parts, 1)


def nbytes_of(columns: dict[str, Column]) -> int:
    """Bytes per row of a message."""
    return -(-sum(column.width * column.bits for column in columns.values()) // 8)


def to_bytes(packed: Tensor, columns: dict[str, Column]) -> Tensor:
    """[S, nbytes] uint8, the message for the result of `pack_returned`, low bits first. Integers
    outside their column's range become the nearest value outside it."""
    bits = []
    parts = packed.split([column.width for column in columns.values()], 1)
    for part, column in zip(parts, columns.values(), strict=True):
        numbers = part.clamp(column.least - 1, column.most + 1) - (column.least - 1)
        bits.append(
            (numbers[..., None] >> torch.arange(column.bits, device=packed.device) & 1).flatten(1)
        )
    row = torch.cat(bits, 1)
    row = F.pad(row, (0, 8 * nbytes_of(columns) - row.shape[1])).unflatten(1, (-1, 8))
    return (row << torch.arange(8, device=packed.device)).sum(-1).to(torch.uint8)


def from_bytes(message: Tensor, columns: dict[str, Column]) -> Tensor:
    """[S, columns] int64, the integers in a message [S, nbytes] uint8; the inverse of
    `to_bytes`."""
    row = (message[..., None].long() >> torch.arange(8, device=message.device) & 1).flatten(1)
    sizes = [column.width * column.bits for column in columns.values()]
    found = []
    for part, column in zip(row[:, : sum(sizes)].split(sizes, 1), columns.values(), strict=True):
        bits = part.unflatten(1, (column.width, column.bits)) << torch.arange(
            column.bits, device=message.device
        )
        found.append(bits.sum(-1) + (column.least - 1))
    return torch.cat(found, 1)


def unpack_returned(packed: Tensor, batch: Batch) -> tuple[Verdict, Drafts]:
    """Unpack the result of `pack_returned` for a pipeline stage without lm_head and heads. Values
    outside the range of their column are clamped to it: the host refuses them later, see
    `check_returned`.

    Args:
        packed: [S, columns] int64.
    """
    shape = batch.shape
    columns = columns_of(shape.drafts, shape.decode_rows > 0, batch.sampling.vocabulary.size)
    split = packed.split([column.width for column in columns.values()], 1)
    parts = {
        name: part.clamp(column.least, column.most)
        for (name, column), part in zip(columns.items(), split, strict=True)
    }
    missing = (0, 0, 0, len(batch.inputs.state_slots) - len(packed))
    accepted, token_ids = (F.pad(parts[name], missing) for name in ("accepted drafts", "tokens"))
    path = parts.get("places on the path")
    if path is not None:
        path = F.pad(path[: batch.inputs.num_decode_rows], (1, 0))
    drafts = parts["tokens of the tree" if shape.trees else "drafts"]
    return Verdict(accepted[:, 0], token_ids, path), Drafts(drafts, None, parts.get("parents"))


def check_returned(packed: np.ndarray, columns: dict[str, Column]) -> None:
    """Check results [S, columns] that came from another stage.

    Raises:
        MtpkitError: a value is outside its column's range.
    """
    ends = np.cumsum([column.width for column in columns.values()])[:-1]
    for (name, (_, least, most)), values in zip(
        columns.items(), np.split(packed, ends, axis=1), strict=True
    ):
        wrong = values[(values < least) | (values > most)]
        if len(wrong):
            raise MtpkitError(
                f"the last stage sent {wrong[0]} for {name}, which must be from {least} to {most}"
            )
