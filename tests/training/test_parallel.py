"""Tensor, sequence, pipeline, expert and data parallelism and their products against one
process."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtpkit.checkpoint import load_model, save_model
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, build_model
from mtpkit.training.config.reading import load_config
from mtpkit.training.config.settings import ParallelConfig
from mtpkit.training.loop import train
from mtpkit.training.parallel import check_layout, even_share
from tests.ranks import need_gpus, run_ranks
from tests.shared import made_once
from tests.training.parallel_ranks import CASES, EXPERTS, gradients, work
from tests.training.toy import CONFIG, cut, toy_batch

TWO = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "expert": {"expert_parallel": 2},
}
FOUR = {
    "stages": {"pipeline_parallel": 4},
    "tensor_pipeline": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tensor_expert": {"tensor_parallel": 2, "expert_parallel": 2},
    "pipeline_expert": {"pipeline_parallel": 2, "expert_parallel": 2},
    "tensor_data": {"tensor_parallel": 2},
}
TWO_PAIRS = [
    (n, c) for n in TWO for c in CASES if n != "expert" or "E" in CASES[c].model["pattern"]
]
FOUR_PAIRS = [
    ("stages", "experts"),
    ("tensor_pipeline", "experts"),
    ("tensor_pipeline", "distinct"),
    ("tensor_expert", "experts"),
    ("pipeline_expert", "experts_whole"),
    ("tensor_data", "recurrent"),
    ("tensor_data", "mixed"),
]
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}  # atomic additions and other tiles on a GPU


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """Device of the processes."""
    return request.param


def gradient_jobs(layouts, pairs, where):
    return [
        ("gradients", f"{name}-{case}", (case, layouts[name], True, where)) for name, case in pairs
    ]


MOVES = (
    ("pipeline", "parallel.balance=time"),
    ("tensor",),
    ("expert", "optimizer.distributed=false"),
)
"""What is split in each of a run's first steps, and other settings of it."""


def run_settings(base, text_files):
    """Settings of short runs at a constant learning rate, so that more steps can continue them."""
    values = {
        "model": base,
        # on a GPU the default is bf16, in which sums of another order differ by more
        "dtype": "float32",
        "data.train": f"[{text_files[0]}]",
        "data.eval": f"[{text_files[1]}]",
        "data.sequence_length": 32,
        "data.micro_batch_size": 2,
        "data.global_batch_size": 8,
        "data.eval_sequences": 5,
        "heads.num_depths": 2,
        "heads.pattern": "'*E'",
        "heads.init": "base",
        "heads.fit_tokens": 256,
        "optimizer.warmup_steps": 1,
        "optimizer.lr": 2e-3,
        "optimizer.min_lr": 2e-3,
        "steps": 4,
        "log_interval": 1,
        "eval_interval": 1,
        "save_interval": 100,
    }
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer_dir):
    """A base with experts, and a tokenizer."""

    def make(directory):
        sizes = dict(
            pattern="*EM-M",
            mtp_pattern="",
            mtp_num_depths=0,
            vocab_size=300,
            init_std=0.3,
            qk_layernorm=True,
        )
        save_model(build_model(CONFIG.replace(**{**EXPERTS, **sizes}), device="cpu"), directory)
        shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)

    return made_once(tmp_path_factory, "moe_base", make)


@pytest.fixture(scope="module")
def settings(base, text_files):
    return run_settings(base, text_files)


@pytest.fixture(scope="module")
def two(tmp_path_factory, settings, where):
    """Output of two processes: gradients of all cases, and runs."""
    need_gpus(2, where)

    def make(out):
        runs = [
            ["parallel.tensor=2", "optimizer.kind=muon", f"output={out / 'tensor'}"],
            *(
                [f"parallel.{kind}=2", f"steps={steps}", f"output={out / 'moves'}", *more]
                for steps, (kind, *more) in enumerate(MOVES, start=1)
            ),
        ]
        undistributed = ("gradients", "undistributed", ("experts", TWO["expert"], False, where))
        jobs = [*gradient_jobs(TWO, TWO_PAIRS, where), undistributed, ("stream", where)]
        run_ranks(
            work,
            out,
            [*jobs, *(("train", [*settings, *changes]) for changes in runs)],
            device=where,
        )

    return made_once(tmp_path_factory, f"two-{where}", make)


@pytest.fixture(scope="module")
def four(tmp_path_factory, where):
    """Output of four processes: gradients of some cases."""
    need_gpus(4, where)
    jobs = gradient_jobs(FOUR, FOUR_PAIRS, where)
    return made_once(
        tmp_path_factory,
        f"four-{where}",
        lambda out: run_ranks(work, out, jobs, ranks=4, device=where),
    )


@pytest.fixture(scope="module")
def alone(where):
    """Losses, norm and gradients of one process, by case."""
    return {name: gradients(case, {}, device=where) for name, case in CASES.items()}


def assembled(out: Path, name: str):
    """Losses, norm, and every whole gradient, put together from all ranks; parts that several have
    must be equal."""
    wholes: dict[str, torch.Tensor] = {}
    results = [torch.load(path, weights_only=False) for path in sorted(out.glob(f"{name}.*.pt"))]
    for _, _, parts in results:
        for key, (shape, pieces) in parts.items():
            whole = wholes.setdefault(key, torch.full(shape, torch.nan))
            for place, part in pieces:
                held = whole[place]
                assert held.isnan().all() or torch.allclose(held, part, rtol=1e-5, atol=1e-8), (
                    f"ranks differ in {key}"
                )
                whole[place] = part
    # pipeline stages without heads have none
    losses, norm, _ = next(result for result in results if result[2])
    return losses, norm, wholes


def whole(shape, pieces):
    """A tensor from its pieces."""
    tensor = torch.full(shape, torch.nan)
    for place, part in pieces:
        tensor[place] = part
    return tensor


def assert_equal_gradients(found, expected, tolerance):
    losses, norm, wholes = found
    want_losses, want_norm, want_parts = expected
    assert losses == pytest.approx(want_losses, rel=tolerance / 10)
    assert norm == pytest.approx(want_norm, rel=tolerance)
    assert wholes.keys() == want_parts.keys()
    for name, entry in want_parts.items():
        want = whole(*entry)
        assert want.any(), name
        error = (wholes[name] - want).norm() / want.norm()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("layout", "case"), TWO_PAIRS)
def test_two_processes_have_the_gradients_of_one(two, alone, where, layout, case):
    assert_equal_gradients(assembled(two, f"{layout}-{case}"), alone[case], TOLERANCE[where])


@pytest.mark.parametrize(("layout", "case"), FOUR_PAIRS)
def test_products_have_the_gradients_of_one(four, alone, where, layout, case):
    assert_equal_gradients(assembled(four, f"{layout}-{case}"), alone[case], TOLERANCE[where])


def test_an_optimizer_that_is_not_distributed_has_the_same_gradients(two, alone, where):
    assert_equal_gradients(assembled(two, "undistributed"), alone["experts"], TOLERANCE[where])


# draws are by place in the sequence
@pytest.mark.parametrize("case", [name for name in CASES if name != "mixed"])
def test_a_document_between_others_has_the_gradients_it_has_alone(case, where):
    """Not of processes, but of the same sums: what packing adds is nothing."""
    batch = toy_batch([[7, 10, 7]], wanted=1.0)
    batch.loss_mask[:, :7] = batch.loss_mask[:, 17:] = False
    packed, alone = (
        gradients(CASES[case], {}, device=where, batch=one) for one in (batch, cut(batch, 0, 7, 17))
    )
    packed = (*packed[:2], {key: whole(*entry) for key, entry in packed[2].items()})
    assert_equal_gradients(packed, alone, TOLERANCE[where])


def metrics(output, kind="train"):
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


@pytest.fixture(scope="module")
def runs_alone(tmp_path_factory, settings, where):
    """Runs of one process, by optimizer."""
    out = tmp_path_factory.mktemp("alone")
    return {
        kind: train(
            load_config(None, [*settings, f"output={out / kind}", f"optimizer.kind={kind}"])
        )
        for kind in ("adamw", "muon")
    }


def assert_equal_runs(have, want, tolerance):
    for kind in ("train", "eval"):
        lines = metrics(have, kind)
        expected = metrics(want, kind)
        assert lines.keys() == expected.keys()
        for step, line in expected.items():
            assert lines[step]["loss"] == pytest.approx(line["loss"], rel=tolerance)
            assert lines[step]["acceptance_length"] == pytest.approx(
                line["acceptance_length"], rel=1e-2
            )
            if kind == "train":
                assert lines[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)
    trained, expected = (load_model(path).state_dict() for path in (have, want))
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(trained[key], value, rtol=1e-2, atol=1e-3)


def test_muon_steps_whole_matrices_that_ranks_split(two, runs_alone, where):
    assert_equal_runs(two / "tensor", runs_alone["muon"], TOLERANCE[where])


def test_a_run_goes_on_at_another_layout(two, runs_alone, settings, where):
    """One step at each of `MOVES`, then one in a single process."""
    train(load_config(None, [*settings, f"output={two / 'moves'}"]))
    assert_equal_runs(two / "moves", runs_alone["adamw"], TOLERANCE[where])


TE_LAYOUTS = ("data", "tensor", "pipeline", "expert")
"""What two ranks of the Transformer Engine backend split."""


@pytest.fixture(scope="module")
def te_runs(tmp_path_factory, settings):
    """Directory of runs with Transformer Engine, by layout, and of one run of one process with the
    local backend."""
    pytest.importorskip("transformer_engine.pytorch")
    need_gpus(2)
    # Products of Transformer Engine take TF32, unless cuBLAS reads this when it is loaded.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"

    def make(out):
        runs = []
        for layout in TE_LAYOUTS:
            split = [] if layout == "data" else [f"parallel.{layout}=2"]
            runs.append(("train", [*settings, "backend=te", *split, f"output={out / layout}"]))
        run_ranks(work, out, runs, device="cuda")
        alone = [("train", [*settings, "backend=local", f"output={out / 'alone'}"])]
        run_ranks(work, out, alone, ranks=1, device="cuda")

    return made_once(tmp_path_factory, "te_runs", make)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", TE_LAYOUTS)
def test_two_ranks_with_transformer_engine_train_as_one_without(te_runs, layout):
    assert_equal_runs(te_runs / layout, te_runs / "alone", TOLERANCE["cuda"])


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            {"tensor": 3},
            r"hidden_size 32 cannot be split over tensor=3 .* set parallel\.tensor to a divisor",
        ),
        ({"tensor": 4}, r"mamba_num_groups 2 cannot"),
        (
            {"pipeline": 4},
            r"3 layers, too few for pipeline=4 stages; set parallel\.pipeline to at most 3",
        ),
        ({"expert": 2}, r"no experts .* set parallel\.expert=1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(sizes, says):
    with pytest.raises(UserError, match=says):
        check_layout(ParallelConfig(**sizes), CONFIG)


def test_a_short_share_is_filled_with_sequences_that_do_not_count():
    batches = [
        toy_batch([[5, 3], [8]]),
        replace(toy_batch([[2, 6]]), document_lens=(2, 6)),
        toy_batch([[8], [8]]),
    ]
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    filled, spare = even_share(batches, group)
    assert filled.token_ids[0].equal(filled.token_ids[1]) and not filled.loss_mask[1].any()
    assert filled.loss_mask[0].equal(batches[1].loss_mask[0])
    inputs = SequenceInput(filled.documents, filled.positions, filled.document_lens)
    assert inputs.starts(2, 8, torch.device("cpu")).tolist() == [0, 2, 8, 10, 16]
    assert spare.token_ids.equal(batches[2].token_ids) and not spare.loss_mask.any()


def test_settings_that_cannot_be_split_are_refused():
    with pytest.raises(UserError, match=r"data\.sequence_length 31 .* make it a multiple"):
        load_config(
            None,
            [
                "model=a",
                "output=b",
                "data.train=[c]",
                "data.sequence_length=31",
                "parallel.tensor=2",
            ],
        )
