"""Keeps ranks in step: rank 0 decides, all other ranks follow.

Every rank has the whole host side of an engine: requests, scheduler, allocators. Their decisions
follow from the requests and the results of steps, which are the same on all ranks. A few other
values depend on a rank's clock, memory or random numbers. Of these, rank 0 decides on the drafts
and the prompt tokens of each step, and announces its decision before the step in a few integers,
with a summary of its plan. All ranks take the seed of rank 0, and the smallest number of blocks of
any rank. A rank whose plan differs from rank 0's stops with an error: otherwise its next all-reduce
would mix different steps, or wait forever.
"""

import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mtpkit.engine.ranks.announcement import Announcement
from mtpkit.engine.ranks.peers import exchange_in_peer_memory
from mtpkit.engine.ranks.stages import Stage
from mtpkit.engine.ranks.watch import Watch
from mtpkit.engine.scheduling.adaptive import Speculation
from mtpkit.engine.scheduling.decision import Decision
from mtpkit.engine.scheduling.scheduler import Scheduler
from mtpkit.engine.steps.plan import Plan
from mtpkit.engine.steps.vocabulary import AbsentVocabulary, SplitVocabulary, Vocabulary
from mtpkit.errors import MtpkitError, listed

_MAX_SENDS = 2
"""Steps per batch that rank 0 may announce before all other ranks have received the first
announcement: the one that they compute and the one after it."""


class _Send(NamedTuple):
    """A message under way from rank 0 to all other ranks."""

    step: int
    """Number of the step that it belongs to."""
    work: Any
    message: torch.Tensor
    """Kept with its transfer, which reads it."""


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

    def plan(self, scheduler: Scheduler, speculation: Speculation) -> list[Plan]:
        """Plan a step, with the drafts that `speculation` decides on."""
        if not scheduler.has_unfinished:
            return []
        # Without decode rows no drafts are verified, whatever is decided.
        decision = Decision(scheduler.config.drafts)
        if decoding := scheduler.decoding:
            decision = Decision(*speculation.decide(decoding))
        return scheduler.plan(decision)

    def all_reduce_min(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        return value

    def all_reduce_max(self, value: int) -> int:
        """The largest `value` of all ranks."""
        return -self.all_reduce_min(-value)

    def sum_over_stages(self, value: int) -> int:
        """The sum of the `value` of all pipeline stages."""
        return value

    def broadcast(self, value: int) -> int:
        """The `value` of rank 0."""
        return value

    def share[T](self, value: T | None) -> T | None:
        """The `value` of rank 0, any object that can be pickled."""
        return value

    def connect(self, weight: torch.Tensor, peer_memory: bool) -> None:
        """Choose how tensor-parallel ranks exchange, and connect pipeline stages. All ranks must
        call it together.

        Args:
            weight: a tensor on this rank's device.
            peer_memory: whether tensor-parallel ranks may exchange in peer memory, see
                `exchange_in_peer_memory`.
        """

    def wait_for_sends(self) -> None:
        """Wait until all ranks have received what this rank has sent. Call it before the rank
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
        watch: Watch,
        stage: Stage,
    ) -> None:
        self.rank = control_group.rank()
        self.size = control_group.size()
        self.tensor_size = tensor_group.size()
        self.stage = stage
        self._tensor_group = tensor_group
        self._control = control_group
        self._watch = watch
        self._steps = 0
        self._sends: deque[_Send] = deque()

    def vocabulary(self, size: int) -> Vocabulary:
        """See `Ranks.vocabulary`."""
        if not self.stage.last:
            return AbsentVocabulary(size)
        if self.tensor_size > 1:
            return SplitVocabulary(size, self._tensor_group)
        return Vocabulary(size)

    def plan(self, scheduler: Scheduler, speculation: Speculation) -> list[Plan]:
        """See `Ranks.plan`; rank 0 plans first and announces its decision to all other ranks.

        Raises:
            MtpkitError: this rank's plan differs from rank 0's.
        """
        if not scheduler.has_unfinished:
            return []
        if self.rank == 0:
            plans = super().plan(scheduler, speculation)
            self._send(torch.tensor(astuple(self._announcement(scheduler, plans))))
        else:
            received = Announcement.unpack(self._broadcast([0] * len(fields(Announcement))))
            plans = scheduler.plan(received.decision(scheduler.config.tree))
            wrong = received.differences(self._announcement(scheduler, plans))
            if wrong:
                raise MtpkitError(
                    f"rank 0 plans another step than rank {self.rank}: {listed(wrong)}; all ranks"
                    " must be given the same requests in the same order"
                )
        self._steps += 1
        return plans

    def _announcement(self, scheduler: Scheduler, plans: Sequence[Plan]) -> Announcement:
        """The announcement of the plans that this rank's scheduler has just made."""
        preemptions = scheduler.admission.num_preemptions
        return Announcement.of(self._steps, scheduler.decision, plans, preemptions)

    def all_reduce_min(self, value: int) -> int:
        """See `Ranks.all_reduce_min`."""
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self._control)
        return int(values)

    def sum_over_stages(self, value: int) -> int:
        """See `Ranks.sum_over_stages`; the value of a stage is the mean over its ranks."""
        values = torch.tensor([value])
        dist.all_reduce(values, group=self._control)
        return int(values) // self.tensor_size

    def broadcast(self, value: int) -> int:
        """See `Ranks.broadcast`."""
        return self._broadcast([value])[0]

    def share[T](self, value: T | None) -> T | None:
        """See `Ranks.share`. Rank 0 does not wait for the other ranks."""
        if self.rank:
            length = self.broadcast(0)
            if not length:
                return None
            message = torch.empty(length, dtype=torch.uint8)
            dist.broadcast(message, group=self._control, group_src=0)
            return pickle.loads(message.numpy().tobytes())

        # Most steps share nothing: that costs one integer.
        data = b"" if value is None else pickle.dumps(value)
        self._send(torch.tensor([len(data)]))
        if data:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return value

    def connect(self, weight: torch.Tensor, peer_memory: bool) -> None:
        """See `Ranks.connect`."""
        exchange_in_peer_memory(self._tensor_group, self._control, weight, peer_memory)
        self.stage.connect(weight.device)

    def wait_for_sends(self) -> None:
        """See `Ranks.wait_for_sends`."""
        while self._sends:
            self._sends.popleft().work.wait()

    def working(self) -> AbstractContextManager[object]:
        """See `Ranks.working`."""
        return self._watch.working()

    def _send(self, message: torch.Tensor) -> None:
        """Send a message from rank 0 without waiting for the other ranks, which may still compute
        the previous step."""
        work = dist.broadcast(message, group=self._control, group_src=0, async_op=True)
        self._sends.append(_Send(self._steps, work, message))
        oldest = self._steps - _MAX_SENDS * self.stage.stages
        while self._sends[0].step <= oldest:
            self._sends.popleft().work.wait()

    def _broadcast(self, values: Sequence[int]) -> list[int]:
        """Rank 0's integers, on every rank; each rank gives the same number of them."""
        message = torch.tensor(list(values), dtype=torch.int64)
        dist.broadcast(message, group=self._control, group_src=0)
        return message.tolist()
