"""Two processes compute what Megatron's layers computed, and write what Megatron writes."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from mtpkit.checkpoint import load_config, load_model, load_model_weights, save_model
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits, unroll_depths
from tests.checkpoint.builders import GOLDEN
from tests.kernels.recurrence import relative
from tests.model import toy
from tests.ranks import run_ranks

TENSOR_CASES = [
    "tp2/mamba_attention_mlp",
    "tp2/moe",
    "tp1/distinct_heads",
    "tp1/gated_rope",
    "tp1/mla",
    "tp1/gdn",
]
PIPELINE_CASE = "pp2/mamba_attention_mlp"
LENGTH = 24
TOLERANCE = 1e-5
LATENT = toy.CONFIG.replace(moe_latent_size=8, activation="swiglu")


def build(case: str, **sizes: int):
    model = build_model(load_config(GOLDEN / case), device="cpu", **sizes)
    load_model_weights(model, GOLDEN / case)
    return model


def run_depths(model, hidden, ids):
    return list(
        unroll_depths(model, hidden, ids, model.mtpkit_config.mtp.num_depths, attention="per_depth")
    )


def fresh_rank(rank: int, out: Path) -> None:
    model = build_model(LATENT, device="cpu", tensor_parallel=2)
    save_file(
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        out / f"{rank}.st",
    )
    save_model(model, out / "megatron")


@torch.no_grad()
def tensor_parallel_rank(rank: int, out: Path) -> None:
    for case in TENSOR_CASES:
        model = build(case, tensor_parallel=2)
        golden = load_file(GOLDEN / case / "golden.safetensors")
        hidden = base_forward(model, golden["ids"], SequenceInput())
        logits = compute_logits(model, hidden).transpose(0, 1)
        assert relative(logits, golden["logits"]) < TOLERANCE, case
        states = [hidden, *run_depths(model, hidden, golden["ids"])]
        part = LENGTH // 2 if model.config.sequence_parallel else LENGTH
        assert all(len(state) == part for state in states)
        # Under sequence parallelism Megatron's own states are those of the first rank.
        if rank == 0 or part == LENGTH:
            for k, want in enumerate(golden["mtp_chain_sbh"].chunk(len(states))):
                count = min(part, LENGTH - k)
                assert relative(states[k][:count], want[:count]) < TOLERANCE, (case, k)
        if case.startswith("tp2"):
            save_model(model, out / case)


@torch.no_grad()
def pipeline_rank(rank: int, out: Path) -> None:
    model = build(PIPELINE_CASE, pipeline_parallel=2)
    ids = load_file(out / "one.safetensors")["ids"]
    stage_input = torch.empty(LENGTH, 2, model.config.hidden_size)
    if rank == 1:
        dist.recv(stage_input, src=0)
        model.set_input_tensor(stage_input)
    hidden = base_forward(model, ids, SequenceInput())
    if rank == 0:
        dist.send(hidden, dst=1)
    else:
        states = torch.stack([hidden, *run_depths(model, hidden, ids)])
        save_file(
            {"logits": compute_logits(model, hidden), "states": states},
            out / "last_stage.safetensors",
        )
    save_model(model, out / PIPELINE_CASE)


def parts_on_disk(checkpoint: Path) -> dict[str, object]:
    """Dtype, shape and stored chunks of every key."""
    items = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: (
            (item.properties.dtype, item.size, sorted((c.offsets, c.sizes) for c in item.chunks))
            if hasattr(item, "chunks")
            else None
        )
        for name, item in items.items()
    }


def assert_same_parts(case: str, out: Path) -> None:
    have = parts_on_disk(out / case / "release")
    want = parts_on_disk(GOLDEN / case / "checkpoint")
    assert have.keys() == want.keys()
    assert have == want


def test_tensor_parallel(tmp_path):
    run_ranks(tensor_parallel_rank, tmp_path)
    for case in ("tp2/mamba_attention_mlp", "tp2/moe"):
        assert_same_parts(case, tmp_path)


def test_fresh_weights_of_two_ranks(tmp_path):
    """Parts of one matrix differ; what every rank holds whole, such as a router, is the same.
    Together they are the weights of one process."""
    run_ranks(fresh_rank, tmp_path)
    first, second = (load_file(tmp_path / f"{rank}.st") for rank in (0, 1))
    assert any("router" in name for name in first)
    for name, value in first.items():
        # D starts as ones
        whole = any(part in name for part in ("router", "norm", "latent")) or name.endswith(".D")
        assert torch.equal(value, second[name]) == whole, name
    model = load_model(tmp_path / "megatron", device="cpu")
    assert all(
        torch.equal(model.get_parameter(name), value)
        for name, value in build_model(LATENT).named_parameters()
    )


@torch.no_grad()
def test_pipeline_parallel(tmp_path):
    model = load_model(GOLDEN / PIPELINE_CASE)
    ids = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, tmp_path / "one.safetensors")
    run_ranks(pipeline_rank, tmp_path)
    last = load_file(tmp_path / "last_stage.safetensors")
    hidden = base_forward(model, ids, SequenceInput())
    assert relative(last["logits"], compute_logits(model, hidden)) < TOLERANCE
    for have, want in zip(last["states"], [hidden, *run_depths(model, hidden, ids)], strict=True):
        assert relative(have, want) < TOLERANCE
    assert_same_parts(PIPELINE_CASE, tmp_path)


def test_one_process_writes_the_same_parts(tmp_path):
    for case in (
        "tp1/mamba_attention_mlp",
        "tp1/moe",
        "tp1/distinct_heads",
        "tp1/gated_rope",
        "tp1/mla",
        "tp1/gdn",
    ):
        save_model(load_model(GOLDEN / case), tmp_path / case)
        assert_same_parts(case, tmp_path)
