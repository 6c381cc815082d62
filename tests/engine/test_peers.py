"""Sums over ranks in memory that all of them map, decoding with them, and what happens where there
is no such memory.

On a GPU two processes share one, which NCCL refuses: all else that they exchange goes over gloo,
without graphs. On the CPU they map files, and the reference sums.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mtpkit import platform
from mtpkit.engine import LLM
from mtpkit.engine.ranks import Ranks, peers
from mtpkit.engine.ranks.join import _control_group
from mtpkit.kernels.exchange import CHANNELS, Windows
from mtpkit.kernels.exchange.window import BUFFERS_AT
from mtpkit.model import build_model, collectives
from mtpkit.model.collectives import Exchange, all_reduce, use_exchange
from mtpkit.platform import init_processes
from tests.engine.rank_cases import MIXED, Case, config, decode, names, split_model
from tests.engine.tiny import tiny_model
from tests.ranks import run_ranks, share_device

SIZES = [1, 3, 500, 4096, 4097, 8192, 100_001]
CALLS = 1000
DECODED = [
    Case("recurrent experts", 2, True, settings=MIXED),
    Case("mamba2", 0),
    Case("mamba2", 3, settings=MIXED),
    Case("delta", 2, settings=MIXED),
    Case("attention", 0),
    Case("latent", 3, True),
]
ON_CPU = 1
"""The first cases of those, for which the CPU has time: linears and experts, which is all that is
summed."""


def map_files(group, path: Path) -> peers.PeerMemory:
    """Memory of the host that all ranks of a group map, full of zeros."""
    limit = peers.limit_of(group.size())
    mine = group.rank()
    size = Windows.nbytes(limit)
    path.mkdir(exist_ok=True)
    windows = {}
    for rank in (mine, *range(group.size())):
        if rank != mine:
            dist.barrier(group)
        windows[rank] = torch.from_file(
            str(path / str(rank)), shared=True, size=size, dtype=torch.uint8
        )
    every = tuple(windows[rank] for rank in range(group.size()))
    return peers.PeerMemory(Windows(mine, every, torch.zeros(CHANNELS, dtype=torch.int64), limit))


def joined(device: str, path: Path) -> tuple[object, peers.PeerMemory]:
    """A group of both ranks, and its memory, the buffers of this rank full of NaN."""
    share_device(device)
    group = dist.new_group(backend="gloo")
    control = _control_group()
    if device == "cuda":
        peers.exchange_in_peer_memory(group, control, torch.empty(1, device=device), True)
    else:
        use_exchange(group, map_files(group, path))
    memory = collectives._chosen[group]
    assert isinstance(memory, peers.PeerMemory)
    memory.windows.windows[dist.get_rank()][BUFFERS_AT:] = 255
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier(control)
    return group, memory


def draw(count: int, dtype: torch.dtype, seed: int, device: str) -> list[torch.Tensor]:
    """Values of both ranks."""
    generator = torch.Generator().manual_seed(seed)
    return list((torch.randn(2, count, generator=generator) * 100).to(dtype).to(device))


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    return (parts[0].float() + parts[1].float()).to(parts[0].dtype)


def exact_sums(rank: int, device: str, path: Path) -> None:
    group, memory = joined(device, path)
    limit = memory.windows.limit
    for dtype in (torch.bfloat16, torch.float32):
        most = limit // dtype.itemsize
        for seed, size in enumerate([*SIZES, most - 1, most, most + 1]):
            before = int(memory.windows.epochs[0])
            parts = draw(size, dtype, seed, device)
            have = all_reduce(parts[rank].clone(), group)
            assert torch.equal(have, in_order(parts)), (dtype, size)
            assert int(memory.windows.epochs[0]) - before == (size <= most)
    for dtype in (torch.int64, torch.float64):
        parts = [
            torch.arange(7, device=device, dtype=dtype) * (10**12 + other) for other in range(2)
        ]
        assert torch.equal(all_reduce(parts[rank].clone(), group), parts[0] + parts[1]), dtype
    odd = draw(4001, torch.bfloat16, 5, device)
    want = in_order(odd)
    spread = odd[rank].view(1, -1).expand(2, -1).t()
    assert torch.equal(all_reduce(spread, group)[:, 1], want), "not dense"
    assert torch.equal(all_reduce(odd[rank].clone()[1:], group), want[1:]), "not aligned"


def many_sums(rank: int, device: str, path: Path) -> None:
    """Values change with each call, and nothing waits for the host."""
    group, _ = joined(device, path)
    sizes = [4096, 5, 20_000, 1, 130_000]
    parts = {size: draw(size, torch.bfloat16, size, device) for size in sizes}
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(CALLS):
        mine = [part * (call % 7 - 3) for part in parts[sizes[call % len(sizes)]]]
        wrong += (all_reduce(mine[rank].clone(), group) != in_order(mine)).sum()
    assert int(wrong) == 0


def sums_in_graphs(rank: int, device: str, path: Path) -> None:
    """Three sums per graph, replayed between eager ones."""
    group, memory = joined(device, path)
    inputs = [draw(size, torch.bfloat16, size, device) for size in (4096, 33, 50_000)]
    for parts in inputs:  # compiled before they are captured
        all_reduce(parts[rank].clone(), group)
    torch.cuda.synchronize()
    before = int(memory.windows.epochs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [all_reduce(parts[rank].clone(), group) for parts in inputs]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(50):
        for parts in inputs:
            for part in parts:
                part.mul_(-1).add_(step % 3)
        graph.replay()
        for have, parts in zip(outputs, inputs, strict=True):
            wrong += (have != in_order(parts)).sum()
        for _ in range(step % 3):
            parts = draw(700 * (1 + step % 4), torch.float32, step, device)
            wrong += (all_reduce(parts[rank].clone(), group) != in_order(parts)).sum()
    assert int(wrong) == 0
    assert int(memory.windows.epochs[0]) - before == 50 * 3 + sum(step % 3 for step in range(50))


def test_sums_are_exact(device, tmp_path):
    run_ranks(exact_sums, device, tmp_path, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [many_sums, sums_in_graphs])
def test_sums_on_one_gpu(function, tmp_path):
    run_ranks(function, "cuda", tmp_path, device="cuda")


def on_device(case: Case, device: str, **settings) -> Case:
    return replace(
        case,
        guided=False,
        settings=case.settings | dict(device=device, enforce_eager=True) | settings,
    )


def decode_cases(rank: int, tested: list[Case], device: str, out: Path) -> None:
    share_device(device)
    found = []
    for number, case in enumerate(tested):
        model = split_model(config(case.base), case.whole_experts)
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                mapped = out / f"windows{number}"
                patch.setattr(
                    peers, "_peers", lambda group, *_, mapped=mapped: map_files(group, mapped)
                )
            tokens, llm = decode(model, on_device(case, device, disable_custom_all_reduce=False))
        memory = collectives._chosen[llm.ranks._tensor_group]
        found.append(dict(tokens=tokens, sums=int(memory.windows.epochs[0])))
    (out / f"{rank}.json").write_text(json.dumps(found))


def test_two_ranks_decode_what_one_does(device, tmp_path):
    """In fp32, token for token; partial results of layers are summed in memory that both map."""
    tested = DECODED if device == "cuda" else DECODED[:ON_CPU]
    wanted = [
        decode(build_model(config(case.base), device="cpu", seed=1), on_device(case, device))[0]
        for case in tested
    ]
    run_ranks(decode_cases, tested, device, tmp_path, device=device)
    every = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for case, want, *both in zip(tested, wanted, *every, strict=True):
        assert [one["tokens"] for one in both] == [want] * 2, names(case)
        assert all(one["sums"] > 30 for one in both), names(case)


class SevenMore(Exchange):
    def all_reduce(self, values, group):
        return values + 7


def no_memory(rank: int, out: Path) -> None:
    """Ranks that cannot reach each other's memory agree to leave sums to the group, and close in
    order."""
    init_processes()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(peers.__name__).addHandler(handler)
    logging.getLogger(peers.__name__).setLevel(logging.INFO)
    group = dist.new_group(backend="gloo")
    control = _control_group()
    for _ in range(2):
        peers.exchange_in_peer_memory(group, control, torch.empty(1), True)
        assert group not in collectives._chosen
    values = all_reduce(torch.tensor([rank + 1.0]), group)
    use_exchange(group, SevenMore())
    assert all_reduce(torch.zeros(1), group) == 7
    peers.exchange_in_peer_memory(group, control, torch.empty(1), False)
    assert group not in collectives._chosen, "the newest engine does not want it"
    (out / f"{rank}").write_text(json.dumps([values.item(), lines]))


def test_ranks_without_peer_memory(tmp_path):
    run_ranks(no_memory, tmp_path)
    said = (
        "ranks exchange data by gloo instead of peer memory: rank 0 decodes on cpu, rank 1 decodes"
        " on cpu"
    )
    assert [json.loads((tmp_path / f"{rank}").read_text()) for rank in (0, 1)] == [
        [3.0, [said]],
        [3.0, []],
    ]


def test_the_option_reaches_the_ranks(monkeypatch):
    said = []
    monkeypatch.setattr(
        Ranks, "connect", lambda self, weight, peer_memory: said.append(peer_memory)
    )
    for settings in ({}, {"disable_custom_all_reduce": False}, {"disable_custom_all_reduce": True}):
        LLM(tiny_model(), num_blocks=20, warm_up=False, **settings)
    assert said == [True, True, False]


def test_memory_that_cannot_be_reached(monkeypatch):
    here = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peers, "gpu_uuid", lambda index: f"gpu {index}")
    monkeypatch.setattr(platform.torch.cuda, "can_device_access_peer", lambda one, other: False)
    with pytest.raises(
        RuntimeError, match="does not see GPU gpu 2, which is on another host or hidden by CUDA_VIS"
    ):
        peers._open(("gpu 2", None), here)
    with pytest.raises(RuntimeError, match="has no peer access from GPU 0 to GPU 1"):
        peers._open(("gpu 1", None), here)


@pytest.mark.parametrize(
    ("access", "atomics", "status", "reached"),
    [(1, 1, 0, True), (0, 1, 0, False), (1, 0, 0, False), (1, 1, 5, False)],
)
def test_what_gpus_must_be_able_to_do(monkeypatch, access, atomics, status, reached):
    """To read each other's memory, and atomic operations there; one GPU reaches itself."""

    def answer(found, attribute, device, peer) -> int:
        assert (attribute, device, peer) == (3, 0, 1)
        found._obj.value = atomics
        return status

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: bool(access))
    monkeypatch.setattr(
        platform.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetP2PAttribute=answer)
    )
    assert platform.shares_memory(0, 1) is reached
    assert platform.shares_memory(1, 1) is True
