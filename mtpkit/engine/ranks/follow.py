"""Keeps ranks in step: rank 0 decides, all other ranks follow.

Every rank has the whole host side of an engine: requests, scheduler, allocators. Their decisions
follow from the requests and the results of steps, which are the same on all ranks. A few other
values depend on a rank's clock, memory or random numbers. Of these, rank 0 chooses K and the prompt
tokens of each step, and announces them before the step in a few integers, with a summary of its
plan. All ranks take the seed of rank 0, and the smallest number of blocks of any rank. A rank whose
plan differs from rank 0's stops with an error: otherwise its next all-reduce would mix different
steps, or wait forever.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mtpkit.config import LARGEST_COUNT, MOST_DRAFTS
from mtpkit.engine.ranks.peers import exchange_in_peer_memory
from mtpkit.engine.ranks.stages import Stage
from mtpkit.engine.ranks.watch import Watch
from mtpkit.engine.requests.tree import DraftShape
from mtpkit.engine.scheduling.scheduler import Scheduler
from mtpkit.engine.steps.plan import Plan
from mtpkit.engine.steps.vocabulary import AbsentVocabulary, SplitVocabulary, Vocabulary
from mtpkit.errors import MtpkitError, listed

_NONE = -1
"""Value of `Decision.prompt_tokens` if the token budget is the only limit."""

_STEPS_AHEAD = 2
"""Steps per batch that rank 0 may announce before all other ranks have received the first
announcement."""


@dataclass(frozen=True)
class Decision:
    """Rank 0's announcement of a step. The message has these integers in this order, 64 bits
    each."""

    step: int
    """Number of the step, from 0."""
    num_speculative_tokens: int
    """K of decode rows."""
    trees: int
    """1: the drafts of decode rows are trees; 0: they are chains."""
    prompt_tokens: int
    """Most prompt tokens of the step, or -1. Batches that were skipped have nothing to run,
    whatever the limit is."""
    plans: int
    decode_rows: int
    chunks: int
    chunk_tokens: int
    preemptions: int
    """In all steps so far."""
    digest: int
    """CRC-32 of the request, seed, start, length, slot and last block of each row."""

    @classmethod
    def of(cls, step: int, scheduler: Scheduler, plans: Sequence[Plan]) -> "Decision":
        """The announcement of the `plans` that `scheduler` has just made."""
        rows = [row for plan in plans for row in plan.rows]
        asked = ((one, row) for row in rows for one in [row.request])
        numbers = [
            (one.arrival, one.seed, r.start, r.length, one.slot, *one.block_table[-1:])
            for one, r in asked
        ]
        flat = [number for row in numbers for number in row]
        pacing = scheduler.prompt_budget.pacing
        return cls(
            step=step,
            num_speculative_tokens=scheduler.num_speculative_tokens,
            trees=int(scheduler.trees),
            prompt_tokens=_NONE if pacing is None or pacing.chosen is None else pacing.chosen,
            plans=len(plans),
            decode_rows=sum(plan.num_decode_rows for plan in plans),
            chunks=sum(len(plan.chunks) for plan in plans),
            chunk_tokens=sum(plan.num_chunk_tokens for plan in plans),
            preemptions=scheduler.admission.num_preemptions,
            digest=zlib.crc32(np.array(flat, np.int64).tobytes()),
        )

    @classmethod
    def unpack(cls, values: Sequence[int]) -> "Decision":
        """The decision in a message.

        Raises:
            MtpkitError: a value is out of range.
        """
        decision = cls(*values)
        limits = {
            "num_speculative_tokens": (0, MOST_DRAFTS),
            "trees": (0, 1),
            "prompt_tokens": (_NONE, LARGEST_COUNT),
        }
        for name, value in vars(decision).items():
            least, most = limits.get(name, (0, 2**62))
            if not least <= value <= most:
                raise MtpkitError(
                    f"rank 0 sent {name} {value}, which must be from {least} to {most}"
                )
        return decision

    def differences(self, other: "Decision") -> list[str]:
        """The fields in which this decision and another one differ, with both values."""
        pairs = zip(fields(self), astuple(self), astuple(other), strict=True)
        return [
            f"{field.name} {mine}, not {theirs}" for field, mine, theirs in pairs if mine != theirs
        ]


class Ranks:
    """The only rank of a model that is not split; it decides for itself."""

    rank = 0
    size = 1
    tensor_size = 1
    """Number of ranks that split every matrix."""
    stage = Stage()
    """The pipeline stage of this rank."""

    def vocabulary(self, size: int) -> Vocabulary:
        """This rank's part of the vocabulary of `size` tokens."""
        return Vocabulary(size)

    def plan(self, scheduler: Scheduler, choose: Callable[[int], DraftShape]) -> list[Plan]:
        """Plan a step.

        Args:
            choose: returns the shape of the drafts for a number of decode rows.
        """
        if num_decoding := scheduler.num_decoding:
            scheduler.take(choose(num_decoding))
        return scheduler.plan() if scheduler.has_unfinished else []

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        return value

    def most(self, value: int) -> int:
        """The largest `value` of all ranks."""
        return -self.least(-value)

    def over_stages(self, value: int) -> int:
        """The sum of the `value` of all pipeline stages."""
        return value

    def of_first(self, value: int) -> int:
        """The `value` of rank 0."""
        return value

    def connect(self, weight: torch.Tensor, peer_memory: bool) -> None:
        """Choose how tensor-parallel ranks exchange, and connect pipeline stages. All ranks must
        call it together.

        Args:
            weight: a tensor on this rank's device.
            peer_memory: whether tensor-parallel ranks may exchange in peer memory, see
                `exchange_in_peer_memory`.
        """

    def settle(self) -> None:
        """Wait until all ranks have received what this rank has announced. Call it before the rank
        ends."""

    def working(self) -> AbstractContextManager[object]:
        """A context in which this rank needs all other ranks."""
        return nullcontext()


class SplitRanks(Ranks):
    """One of several ranks that split the matrices of a model, or share out its layers as pipeline
    stages, or both.

    Args:
        tensor_group: the ranks that split the matrices of one stage; for exchanges between devices.
        control_group: all ranks; for exchanges between hosts, with gloo.
        watch: notices ranks that die.
        stage: the pipeline stage of this rank.
    """

    def __init__(
        self,
        tensor_group: ProcessGroup,
        control_group: ProcessGroup,
        watch: Watch | None,
        stage: Stage,
    ) -> None:
        self.rank, self.size, self.tensor_size = (
            control_group.rank(),
            control_group.size(),
            tensor_group.size(),
        )
        self.stage = stage
        self._tensor_group = tensor_group
        self._control = control_group
        self._watch = watch
        self._steps = 0
        self._announced: deque[tuple[Any, torch.Tensor]] = deque()

    def vocabulary(self, size: int) -> Vocabulary:
        """See `Ranks.vocabulary`."""
        if not self.stage.last:
            return AbsentVocabulary(size)
        return (
            SplitVocabulary(size, self._tensor_group) if self.tensor_size > 1 else Vocabulary(size)
        )

    def plan(self, scheduler: Scheduler, choose: Callable[[int], DraftShape]) -> list[Plan]:
        """See `Ranks.plan`; rank 0 plans first and announces its decision to all other ranks.

        Raises:
            MtpkitError: this rank's plan differs from rank 0's.
        """
        if not scheduler.has_unfinished:
            return []
        if self.rank == 0:
            plans = super().plan(scheduler, choose)
            self._announce(astuple(Decision.of(self._steps, scheduler, plans)))
        else:
            told = Decision.unpack(self._tell([0] * len(fields(Decision))))
            scheduler.num_speculative_tokens = told.num_speculative_tokens
            scheduler.trees = bool(told.trees)
            if scheduler.prompt_budget.pacing:
                scheduler.prompt_budget.pacing.told = told.prompt_tokens
            plans = scheduler.plan()
            if wrong := told.differences(Decision.of(self._steps, scheduler, plans)):
                raise MtpkitError(
                    f"rank 0 plans another step than rank {self.rank}: {listed(wrong)}; all ranks"
                    " must be given the same requests in the same order"
                )
        self._steps += 1
        return plans

    def least(self, value: int) -> int:
        """See `Ranks.least`."""
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self._control)
        return int(values)

    def over_stages(self, value: int) -> int:
        """See `Ranks.over_stages`; the value of a stage is the mean over its ranks."""
        values = torch.tensor([value])
        dist.all_reduce(values, group=self._control)
        return int(values) // self.tensor_size

    def of_first(self, value: int) -> int:
        """See `Ranks.of_first`."""
        return self._tell([value])[0]

    def connect(self, weight: torch.Tensor, peer_memory: bool) -> None:
        """See `Ranks.connect`."""
        exchange_in_peer_memory(self._tensor_group, self._control, weight, peer_memory)
        self.stage.connect(weight.device)

    def settle(self) -> None:
        """See `Ranks.settle`."""
        while self._announced:
            self._announced.popleft()[0].wait()

    def working(self) -> AbstractContextManager[object]:
        """See `Ranks.working`."""
        return self._watch.working() if self._watch else nullcontext()

    def _announce(self, values: Sequence[int]) -> None:
        """Send integers from rank 0 without waiting for the other ranks, which may still compute
        the previous step."""
        message = torch.tensor(list(values), dtype=torch.int64)
        self._announced.append(
            (dist.broadcast(message, group=self._control, group_src=0, async_op=True), message)
        )
        if len(self._announced) > _STEPS_AHEAD * self.stage.stages:
            self._announced.popleft()[0].wait()

    def _tell(self, values: Sequence[int]) -> list[int]:
        """Rank 0's integers, on every rank; each rank gives the same number of them."""
        message = torch.tensor(list(values), dtype=torch.int64)
        dist.broadcast(message, group=self._control, group_src=0)
        return message.tolist()
