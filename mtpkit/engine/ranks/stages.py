"""Pipeline stages of decoding: each has some of the base's layers, the last one also the final
norm, the lm_head, the heads and an embedding for their drafts.

Hidden states go forward, from each stage to the next. The last stage sends integers back, see
`mtpkit.engine.ranks.returned`: per row that samples, the number of accepted drafts, the chosen
tokens and the new drafts, and for trees the accepted path. Every stage stores these in its own
`DeviceState`, from which its next step begins. Each stage therefore rolls back its keys, windows
and recurrent states by itself, as a single stage would.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Stage:
    """The only stage of a model that is not split into stages."""

    stages = 1
    """Number of stages."""
    first = last = True
    """Whether this stage has the base's embedding (`first`), and the lm_head and the heads
    (`last`)."""
    copies = 0
    """Number of buffers with hidden states of a step, besides those being computed: for receiving
    and for sending."""
    returned_bytes = returned_rows = 0
    """Bytes of results that went back to one stage, and the number of their rows over all steps."""

    def connect(self, device: torch.device) -> None:
        """Connect the stages' devices; `device` is this stage's. All stages must call this before
        the first step."""

    def receive(self, hidden: Tensor) -> None:
        """Fill `hidden` [T, 1, h] with the hidden states from the previous stage, on all stages but
        the first."""

    def send(self, hidden: Tensor) -> None:
        """Hand hidden states [T, 1, h] to the next stage; nothing may write to them afterwards."""

    def send_results(self, message: Tensor) -> None:
        """Send the results of a step, [S, columns] int32, from the last stage to all other stages;
        nothing may write to them afterwards."""

    def receive_results(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """[rows, columns] int32, the results of this step that `send_results` sent; on all stages
        but the last."""
        raise NotImplementedError("the last stage finds the results itself")

    def wait_for_sends(self) -> None:
        """Wait until everything sent has arrived: a tensor that is dropped before it has arrived is
        lost."""


class PipelineStage(Stage):
    """One of several stages.

    Args:
        forward, back: groups for hidden states and for results, both of the ranks that hold the
            stages of one model, in the order of the stages. A device runs the transfers of a group
            one after the other, so that in a single group hidden states and results would wait for
            each other.
    """

    def __init__(self, forward: ProcessGroup, back: ProcessGroup) -> None:
        self._forward = forward
        self._back = back
        self._stage = forward.rank()
        self.stages = forward.size()
        self.first = self._stage == 0
        self.last = self._stage == self.stages - 1

        # Each batch has a step under way, as one plan of decode rows and one of chunks.
        self._max_sends = 2 * self.stages
        receiving = 0 if self.first else 1
        sending = 0 if self.last else 2 + self._max_sends
        self.copies = receiving + sending
        self._sends: deque[tuple[dist.Work | None, Tensor]] = deque()

    def connect(self, device: torch.device) -> None:
        """See `Stage.connect`; exchanges a byte with each stage that this one sends to or receives
        from.

        NCCL connects two ranks at their first transfer; until both have come to it, the hosts of
        both are blocked. In the middle of a run that can be forever. The last stage's host is
        blocked in its first `send_results` to an earlier stage. That one does not come to
        `receive_results`, because its host captures a graph: it waits until the next stage has
        received what was sent, or for sums with another tensor-parallel rank, whose host waits for
        rank 0's next decision. Both wait for the last stage's host.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        last = self.stages - 1

        # All stages go through the same list: in different orders, two stages could each wait for
        # the other in another transfer.
        pairs = [(self._forward, stage, stage + 1) for stage in range(last)]
        pairs += [(self._back, last, stage) for stage in range(last)]

        for group, source, destination in pairs:
            if self._stage == source:
                dist.send(byte, group=group, group_dst=destination)
            elif self._stage == destination:
                dist.recv(byte, group=group, group_src=source)

    def receive(self, hidden: Tensor) -> None:
        """See `Stage.receive`."""
        dist.recv(hidden, group=self._forward, group_src=self._stage - 1)

    def send(self, hidden: Tensor) -> None:
        """See `Stage.send`; does not wait for the next stage."""
        if self.last:
            return
        self._begin(hidden.contiguous(), self._forward, self._stage + 1, self._max_sends)

    def send_results(self, message: Tensor) -> None:
        """See `Stage.send_results`; does not wait for the other stages."""
        if not len(message):
            return
        self._count(message)

        # Each stage may have run two plans, of decode rows and of chunks, for as many batches as
        # there are stages before it receives the first results. With fewer messages under way,
        # stages would wait forever.
        max_sends = 2 * self.stages**2
        for stage in range(self.stages - 1):
            self._begin(message, self._back, stage, max_sends)

    def receive_results(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """See `Stage.receive_results`."""
        message = torch.empty(rows, columns, dtype=torch.int32, device=device)
        if rows:
            dist.recv(message, group=self._back, group_src=self.stages - 1)
            self._count(message)
        return message

    def _begin(self, values: Tensor, group: ProcessGroup, stage: int, max_sends: int) -> None:
        """Begin a transfer and keep its tensor until it is sent; of more than `max_sends`
        transfers, wait for the oldest."""
        work = dist.isend(values, group=group, group_dst=stage)
        # The backend holds no reference to the tensor: freed memory would be sent.
        self._sends.append((work, values))
        self._wait(max_sends)

    def wait_for_sends(self) -> None:
        """See `Stage.wait_for_sends`."""
        self._wait(0)

    def _wait(self, max_sends: int) -> None:
        while len(self._sends) > max_sends:
            work, _ = self._sends.popleft()
            assert work is not None, "this rank is not in its own pipeline"
            work.wait()

    def _count(self, message: Tensor) -> None:
        self.returned_bytes += message.nbytes
        self.returned_rows += len(message)
