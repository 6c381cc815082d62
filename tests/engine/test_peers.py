"""Sums over ranks in peer memory, decoding with them, and what happens where there is none.

On a GPU two processes share one, which NCCL refuses: all else that they exchange goes over gloo, without graphs.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mtpkit.engine.ranks import peers
from mtpkit.engine.ranks.join import _control_group
from mtpkit.kernels.all_reduce.window import BUFFERS_AT
from mtpkit.model import build_model, collectives
from mtpkit.model.collectives import all_reduce
from mtpkit.platform import init_processes
from tests.engine.rank_cases import MIXED, Case, config, decode, names, split_model
from tests.ranks import run_ranks, share_gpu

SIZES = [1, 3, 500, 4096, 4097, 8192, 100_001]
CALLS = 1000
ON_GPU = dict(device="cuda", enforce_eager=True)
DECODED = [
    Case("mamba2", 0),
    Case("mamba2", 3, settings=MIXED),
    Case("delta", 2, settings=MIXED),
    Case("attention", 0),
    Case("latent", 3, True),
    Case("recurrent experts", 2, True, settings=MIXED),
]


def joined() -> tuple[object, peers.PeerMemory]:
    """A group of all ranks, and its memory, the buffers of this rank full of NaN."""
    group, control = dist.new_group(backend="gloo"), _control_group()
    peers.sum_in_peer_memory(group, control, torch.empty(1, device="cuda"), True)
    memory = collectives._chosen[group]
    assert isinstance(memory, peers.PeerMemory)
    memory.windows.windows[dist.get_rank()][BUFFERS_AT:] = 255
    torch.cuda.synchronize()
    dist.barrier(control)
    return group, memory


def draw(count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Values of both ranks."""
    generator = torch.Generator().manual_seed(seed)
    return list((torch.randn(2, count, generator=generator) * 100).to(dtype).cuda())


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    return (parts[0].float() + parts[1].float()).to(parts[0].dtype)


def exact_sums(rank: int) -> None:
    share_gpu()
    group, memory = joined()
    limit = memory.windows.limit
    for dtype in (torch.bfloat16, torch.float32):
        most = limit // dtype.itemsize
        for seed, size in enumerate([*SIZES, most - 1, most, most + 1]):
            before = int(memory.windows.epochs[0])
            parts = draw(size, dtype, seed)
            have = all_reduce(parts[rank].clone(), group)
            assert torch.equal(have, in_order(parts)), (dtype, size)
            assert int(memory.windows.epochs[0]) - before == (size <= most)
    for dtype in (torch.int64, torch.float64):
        parts = [torch.arange(7, device="cuda", dtype=dtype) * (10**12 + other) for other in range(2)]
        assert torch.equal(all_reduce(parts[rank].clone(), group), parts[0] + parts[1])
    odd = draw(4001, torch.bfloat16, 5)  # not aligned, not dense
    assert torch.equal(all_reduce(odd[rank][1:], group), in_order(odd)[1:])
    assert torch.equal(all_reduce(odd[rank].view(1, -1).expand(2, -1).t(), group)[:, 1], in_order(odd))


def many_sums(rank: int) -> None:
    """Values change with each call, and nothing waits for the host."""
    share_gpu()
    group, _ = joined()
    sizes = [4096, 5, 20_000, 1, 130_000]
    parts = {size: draw(size, torch.bfloat16, size) for size in sizes}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for call in range(CALLS):
        mine = [part * (call % 7 - 3) for part in parts[sizes[call % len(sizes)]]]
        wrong += (all_reduce(mine[rank].clone(), group) != in_order(mine)).sum()
    assert int(wrong) == 0


def sums_in_graphs(rank: int) -> None:
    """Three sums per graph, replayed between eager ones."""
    share_gpu()
    group, memory = joined()
    inputs = [draw(size, torch.bfloat16, size) for size in (4096, 33, 50_000)]
    for parts in inputs:  # compiled before they are captured
        all_reduce(parts[rank].clone(), group)
    torch.cuda.synchronize()
    before, graph = int(memory.windows.epochs[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [all_reduce(parts[rank].clone(), group) for parts in inputs]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(50):
        for parts in inputs:
            for part in parts:
                part.mul_(-1).add_(step % 3)
        graph.replay()
        for have, parts in zip(outputs, inputs, strict=True):
            wrong += (have != in_order(parts)).sum()
        for _ in range(step % 3):
            parts = draw(700 * (1 + step % 4), torch.float32, step)
            wrong += (all_reduce(parts[rank].clone(), group) != in_order(parts)).sum()
    assert int(wrong) == 0
    assert int(memory.windows.epochs[0]) - before == 50 * 3 + sum(step % 3 for step in range(50))


@pytest.mark.gpu
@pytest.mark.parametrize("function", [exact_sums, many_sums, sums_in_graphs])
def test_sums_on_one_gpu(function):
    run_ranks(function, device="cuda")


def on_gpu(case: Case, **settings) -> Case:
    return replace(case, guided=False, settings=case.settings | ON_GPU | settings)


def decode_on_gpu(rank: int, out: Path) -> None:
    share_gpu()
    found = []
    for case in DECODED:
        model = split_model(config(case.base), case.whole_experts)
        tokens, llm = decode(model, on_gpu(case, disable_custom_all_reduce=False))
        memory = collectives._chosen[llm.ranks._tensor_group]
        found.append(dict(tokens=tokens, sums=int(memory.windows.epochs[0])))
    (out / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_decode_what_one_does(tmp_path):
    """In fp32, token for token; partial results of layers are summed in peer memory."""
    wanted = [decode(build_model(config(case.base), device="cpu", seed=1), on_gpu(case))[0] for case in DECODED]
    run_ranks(decode_on_gpu, tmp_path, device="cuda")
    every = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for case, want, *both in zip(DECODED, wanted, *every, strict=True):
        assert [one["tokens"] for one in both] == [want] * 2, names(case)
        assert all(one["sums"] > 50 for one in both), names(case)


def no_memory(rank: int, out: Path) -> None:
    """Ranks that cannot reach each other's memory agree to leave sums to the group, and close in order."""
    init_processes()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(peers.__name__).addHandler(handler)
    logging.getLogger(peers.__name__).setLevel(logging.INFO)
    group, control = dist.new_group(backend="gloo"), _control_group()
    for _ in range(2):
        peers.sum_in_peer_memory(group, control, torch.empty(1), True)
        assert group not in collectives._chosen
    values = all_reduce(torch.tensor([rank + 1.0]), group)
    (out / f"{rank}").write_text(json.dumps([values.item(), lines]))


def test_ranks_without_peer_memory(tmp_path):
    run_ranks(no_memory, tmp_path)
    said = "sums over ranks are left to gloo: rank 0 decodes on cpu, rank 1 decodes on cpu"
    assert [json.loads((tmp_path / f"{rank}").read_text()) for rank in (0, 1)] == [[3.0, [said]], [3.0, []]]
