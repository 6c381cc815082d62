"""What rank 0 sends to all other ranks before each step."""

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from mtpkit.config import LARGEST_COUNT, MOST_DRAFTS
from mtpkit.engine.requests.tree import DraftShape, Tree, depth_of
from mtpkit.engine.scheduling.decision import Decision
from mtpkit.engine.steps.plan import Plan
from mtpkit.errors import MtpkitError

_NONE = -1
"""Value of `Announcement.prompt_tokens` if the token budget is the only limit."""


@dataclass(frozen=True)
class Announcement:
    """Rank 0's decision on a step, and a summary of its plans, which those of all ranks must equal.

    The message has these integers in this order, 64 bits each.
    """

    step: int
    """Number of the step, from 0."""
    num_speculative_tokens: int
    """K of decode rows."""
    trees: int
    """1: the drafts of decode rows are trees; 0: they are chains."""
    short_rows: int
    short_drafts: int
    """See `Decision.short`."""
    prompt_tokens: int
    """Most prompt tokens of the step, or -1. Batches that were skipped have nothing to run,
    whatever the limit is."""
    plans: int
    """Forward passes of the step."""
    decode_rows: int
    """Decode rows of all plans."""
    chunks: int
    """Chunks of prompts in all plans."""
    chunk_tokens: int
    """Tokens of these chunks."""
    preemptions: int
    """Number of preemptions in all steps so far."""
    digest: int
    """CRC-32 of the request, seed, start, length, slot and last block of each row."""

    @classmethod
    def of(
        cls, step: int, decision: Decision, plans: Sequence[Plan], preemptions: int
    ) -> "Announcement":
        """The announcement of the `plans` that were made by a decision.

        Args:
            preemptions: their number in all steps so far.
        """
        limit = decision.prompt_tokens
        return cls(
            step=step,
            num_speculative_tokens=depth_of(decision.drafts),
            trees=int(not isinstance(decision.drafts, int)),
            short_rows=decision.short[0],
            short_drafts=decision.short[1],
            prompt_tokens=_NONE if limit is None else limit,
            plans=len(plans),
            decode_rows=sum(plan.num_decode_rows for plan in plans),
            chunks=sum(len(plan.chunks) for plan in plans),
            chunk_tokens=sum(plan.num_chunk_tokens for plan in plans),
            preemptions=preemptions,
            digest=_digest(plans),
        )

    @classmethod
    def unpack(cls, values: Sequence[int]) -> "Announcement":
        """The announcement in a message.

        Raises:
            MtpkitError: a value is out of range.
        """
        announcement = cls(*values)
        limits = {
            "num_speculative_tokens": (0, MOST_DRAFTS),
            "trees": (0, 1),
            "short_rows": (0, LARGEST_COUNT),
            "short_drafts": (0, MOST_DRAFTS),
            "prompt_tokens": (_NONE, LARGEST_COUNT),
        }
        for name, value in vars(announcement).items():
            smallest, largest = limits.get(name, (0, 2**62))
            if not smallest <= value <= largest:
                raise MtpkitError(
                    f"rank 0 sent {name} {value}, which must be from {smallest} to {largest}"
                )
        return announcement

    def decision(self, tree: Tree | None) -> Decision:
        """The decision; `tree` is the configured shape of trees."""
        limit = None if self.prompt_tokens == _NONE else self.prompt_tokens
        drafts: DraftShape = self.num_speculative_tokens
        if self.trees:
            assert tree is not None, "ranks with other options were refused"
            drafts = tree
        return Decision(drafts, (self.short_rows, self.short_drafts), limit)

    def differences(self, other: "Announcement") -> list[str]:
        """The fields in which this announcement and another one differ, with both values."""
        pairs = zip(fields(self), astuple(self), astuple(other), strict=True)
        return [
            f"{field.name} {mine}, not {theirs}" for field, mine, theirs in pairs if mine != theirs
        ]


def _digest(plans: Sequence[Plan]) -> int:
    """See `Announcement.digest`."""
    flat: list[int] = []
    for row in (row for plan in plans for row in plan.rows):
        request = row.request
        assert request.slot is not None
        flat += (request.arrival, request.seed, row.start, row.length, request.slot)
        # The last block tells of all allocations so far: allocators hand out in a fixed order.
        flat += request.block_table[-1:]
    return zlib.crc32(np.array(flat, np.int64).tobytes())
