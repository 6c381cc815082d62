"""Stages decode where transfers wait as NCCL's do: the hosts of two ranks for each other at their
first one, and the capture of a graph for all that was sent. Sums of tensor-parallel ranks and rank
0's decisions wait by themselves.
"""

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from mtpkit.engine.device.capture import Capture
from mtpkit.engine.ranks import stages as stages_module
from mtpkit.engine.ranks.stages import PipelineStage
from mtpkit.model import build
from tests.engine.rank_cases import MIXED, Case, config, decode, one_rank, split_model
from tests.engine.replayed import replay_on_cpu
from tests.engine.test_stages import halves
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects

CASE = Case("mamba2", 3, settings=MIXED, guided=False)
SPLITS = [(1, 3), (2, 2)]
"""Tensor-parallel ranks of each stage, and stages."""


class Sent:
    """A transfer under way; gloo's own may be waited for once."""

    def __init__(self, work: dist.Work, patience: timedelta) -> None:
        self._work: dist.Work | None = work
        self._patience = patience

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait(self._patience)
            self._work = None


class Transfers:
    """`torch.distributed`'s transfers by gloo, which wait as NCCL's do.

    Args:
        groups: the number of groups that transfers are made in.
        patience: how long one rank waits for another, before it is taken to wait forever.
    """

    def __init__(self, groups: int, patience: timedelta) -> None:
        self._patience = patience
        self._meetings = [dist.new_group(backend="gloo") for _ in range(groups)]
        self._groups: list[dist.ProcessGroup] = []
        self._met: set[tuple[int, int]] = set()
        self.sent: list[Sent] = []

    def isend(self, values: torch.Tensor, group: dist.ProcessGroup, group_dst: int) -> Sent:
        self._meet(group, group_dst)
        sent = Sent(dist.isend(values, group=group, group_dst=group_dst), self._patience)
        # results, which go back, are few bytes: NCCL takes them at once
        if group_dst == group.rank() + 1:
            self.sent.append(sent)
        return sent

    def send(self, values: torch.Tensor, group: dist.ProcessGroup, group_dst: int) -> None:
        self.isend(values, group, group_dst).wait()

    def recv(self, values: torch.Tensor, group: dist.ProcessGroup, group_src: int) -> None:
        self._meet(group, group_src)
        dist.recv(values, group=group, group_src=group_src)

    def _meet(self, group: dist.ProcessGroup, other: int) -> None:
        if group not in self._groups:
            self._groups.append(group)
        place = self._groups.index(group)
        if (place, other) in self._met:
            return
        self._met.add((place, other))
        here = torch.zeros(1)
        there = torch.zeros(1)
        meeting = self._meetings[place]
        rank = dist.get_global_rank(group, other)
        both = [
            dist.isend(here, group=meeting, dst=rank),
            dist.irecv(there, group=meeting, src=rank),
        ]
        for one in both:
            assert one is not None
            one.wait(self._patience)


def decode_stages(
    rank: int, split: tuple[int, int], connected: bool, seconds: float, out: Path
) -> None:
    look_at_new_objects()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        model = split_model(config(CASE.base), False, *split)
        transfers = Transfers(2, timedelta(seconds=seconds))
        replay_on_cpu(patch)
        graph = Capture.graph

        def captured(self, *given):
            for sent in transfers.sent:
                sent.wait()
            return graph(self, *given)

        patch.setattr(Capture, "graph", captured)
        names = SimpleNamespace(isend=transfers.isend, send=transfers.send, recv=transfers.recv)
        patch.setattr(stages_module, "dist", names)
        if not connected:
            patch.setattr(PipelineStage, "connect", lambda self, device: None)
        tokens = decode(model, CASE)[0]
    (out / f"{rank}.json").write_text(json.dumps(tokens))


@pytest.mark.parametrize("split", SPLITS)
def test_connected_stages_do_not_wait_for_each_other(split, tmp_path):
    ranks = split[0] * split[1]
    (wanted,) = one_rank([CASE], split[0])
    run_ranks(decode_stages, split, True, 60.0, tmp_path, ranks=ranks)
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)] == [
        wanted
    ] * ranks


@pytest.mark.parametrize("split", SPLITS)
def test_stages_that_are_not_connected_wait_for_each_other(split, tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"Timed out waiting|closed by peer"):
        run_ranks(decode_stages, split, False, 5.0, tmp_path, ranks=split[0] * split[1])
