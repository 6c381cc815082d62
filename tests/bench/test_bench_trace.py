"""Traces of a GPU, read on any machine."""

import pytest
import torch

from mtpkit.bench.timing import Kernel, Trace, trace_kernels


def test_pauses_inside_a_graph_are_not_the_hosts():
    trace = Trace(
        [Kernel("a", 0, 2, 1), Kernel("b", 3, 4, 1), Kernel("c", 6, 7, 2), Kernel("d", 7, 10, 3)]
    )
    assert trace.span == 10
    # between graph 1 and launch 2; not the pause inside graph 1
    assert trace.host_gap_share == pytest.approx(2 / 10)
    assert trace.busy_seconds == 7


def test_kernels_that_overlap_leave_no_gap():
    trace = Trace([Kernel("long", 0, 10, 1), Kernel("short", 1, 2, 2), Kernel("late", 12, 16, 3)])
    assert trace.host_gap_share == pytest.approx(2 / 16)
    assert trace.busy_seconds == 14


def test_kernels_of_a_name_add_up_the_longest_first():
    trace = Trace([Kernel("a", 0, 1, 1), Kernel("b", 1, 4, 1), Kernel("a", 4, 5, 1)])
    assert list(trace.seconds_by_name().items()) == [("b", 3), ("a", 2)]


def test_nothing_at_all():
    trace = Trace([])
    assert trace.span == trace.host_gap_share == trace.busy_seconds == 0


@pytest.mark.gpu
def test_kernels_of_a_graph_share_a_launch():
    x = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.mul_(1.5)

    def run() -> None:
        graph.replay()
        graph.replay()
        x.add_(1)

    trace_kernels(run, x.device)
    trace = trace_kernels(run, x.device)
    assert len(trace.kernels) == 11
    assert len({kernel.launch for kernel in trace.kernels}) == 3
    assert 0 < trace.busy_seconds <= trace.span and 0 <= trace.host_gap_share < 1
