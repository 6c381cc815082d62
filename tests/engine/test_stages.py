"""Two pipeline stages decode what one rank decodes, token for token, in fp32; each has its layers'
weights and states.

Broken on purpose, they do not: see `SABOTAGE`.
"""

import contextlib
import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

from mtpkit.checkpoint import save_hf_model
from mtpkit.cli import bench, generate
from mtpkit.engine import LLM, loading
from mtpkit.engine import llm as llm_module
from mtpkit.engine.device import pipeline
from mtpkit.engine.device.executor import Executor
from mtpkit.engine.device.pipeline import StageExecutor
from mtpkit.engine.memory import plan_memory
from mtpkit.engine.ranks import Ranks
from mtpkit.engine.ranks.returned import check_returned, columns_of, unpack_returned
from mtpkit.engine.ranks.stages import PipelineStage
from mtpkit.engine.scheduling import adaptive as adaptive_module
from mtpkit.engine.scheduling.adaptive import AdaptiveSpeculation
from mtpkit.engine.steps.plan import Drafts, Plan, StepShape, Verdict
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import StepInput, build, build_model
from mtpkit.model.stages import Decoding
from tests.engine.rank_cases import (
    CACHED,
    HEAD,
    MIXED,
    PROMPTS,
    Case,
    config,
    decode,
    names,
    one_rank,
    split_model,
)
from tests.engine.replayed import TruthOnDevice, replay_on_cpu
from tests.engine.test_trees import FIXED, GROWN
from tests.engine.tiny import held_bytes, make_llm, record_drafts, tiny_model
from tests.ranks import run_ranks
from tests.shared import look_at_new_objects, made_once

PREEMPTED = dict(block_size=2, num_blocks=24)
GROWN_SHAPE = {key: value for key, value in GROWN.items() if key != "num_speculative_tokens"}
SETTINGS = {0: {}, 1: dict(state_rollback="snapshot"), 2: MIXED, 3: PREEMPTED}
TESTED = [
    Case(base, k, settings=SETTINGS[k])
    for base in ("mamba2", "delta", "latent", "attention")
    for k in SETTINGS
]
TESTED += [
    Case("mamba2", 3, settings=dict(async_scheduling=False, **MIXED)),
    Case("mamba2", 2, penalised=True, settings=dict(draft_vocab=[1, 5, 31, 32, 60])),
    Case("mamba2", 3, guided=False, settings=dict(draft_sampling=True)),
    Case("distinct heads", 3, settings=PREEMPTED),
    Case("delta", 3, settings=dict(max_mixed_tokens=0, **MIXED)),
]
FOUR = [
    (Case("mamba2", 3, settings=dict(draft_embedding_dtype="int4", **MIXED)), 2, 2),
    (Case("latent", 2, True, settings=MIXED), 2, 2),
    (Case("delta", 3, settings=PREEMPTED), 1, 4),
    (Case("delta", 1), 1, 4),
    (Case("mamba2", 3, settings=PREEMPTED), 2, 2),
    (Case("attention", 3, settings=CACHED), 2, 2),
    (Case("mamba2", 3, guided=False, settings=FIXED | CACHED), 2, 2),
    (Case("latent", 3, True, guided=False, settings=GROWN_SHAPE | CACHED), 2, 2),
    (Case("mamba2", 3, settings=MIXED), 4, 1),
    (Case("delta", 1), 4, 1),
    (Case("latent", 3, True), 4, 1),
    (Case("attention", 2), 4, 1),
]
"""For four processes: tensor-parallel ranks of each stage, and stages."""
TWO = [
    (Case("mamba2", 3, settings=dict(async_scheduling=True, **PREEMPTED)), 2, 1),
    (Case("latent", 3, True, settings=MIXED), 2, 1),
    (Case("attention", 2, settings=CACHED), 2, 1),
    (Case("delta", 2, penalised=True, settings=dict(state_rollback="snapshot")), 1, 2),
    (Case("distinct heads", 3, settings=PREEMPTED), 1, 2),
    (Case("mamba2", 3, guided=False, settings=dict(draft_sampling=True)), 1, 2),
    (Case("mamba2", 3, guided=False, settings=HEAD), 1, 2),
]
"""The same for two processes: few cases, since the fast tier runs them."""
GRAPHS = [
    Case("mamba2", 3, settings=MIXED),
    Case("delta", 2),
    Case("latent", 3),
    Case("attention", 0, settings=MIXED),
    Case("distinct heads", 3, settings=PREEMPTED),
]
"""With steps that are CUDA graphs, or run as those are."""
DRAFTING = ("mamba2", "distinct heads")
GREEDY = Case("mamba2", 3, settings=PREEMPTED)
SAMPLED = Case("delta", 2, settings=MIXED)


def none_accepted(packed, batch):
    verdict, drafts = unpack_returned(packed, batch)
    return Verdict(verdict.accepted * 0, verdict.token_ids), drafts


def of_other_rows(packed, batch):
    verdict, drafts = unpack_returned(packed, batch)
    return verdict, Drafts(drafts.token_ids.roll(1, 0))


def one_more(inputs, new):
    return committed_after(inputs, (new + 1).clamp_max(inputs.decode_width))


committed_after = StepInput.committed_after
SABOTAGE = {
    "nothing": (GREEDY, None),
    "nothing of gated delta nets": (SAMPLED, None),
    "a rejected draft that stays in states": (GREEDY, (StepInput, "committed_after", one_more)),
    "a rejected draft that stays in gated delta nets": (
        SAMPLED,
        (StepInput, "committed_after", one_more),
    ),
    "accepted drafts that go": (GREEDY, (pipeline, "unpack_returned", none_accepted)),
    "drafts of other rows": (GREEDY, (pipeline, "unpack_returned", of_other_rows)),
}
"""What is broken on the first stage, the case in which it must show, and how."""


TIMED = [
    "--prompt-length",
    "6",
    "--max-tokens",
    "12",
    "--num-speculative-tokens",
    "1",
    "--batch-size",
    "2",
]
TIMED += ["--repeats", "1", "--pipeline-parallel-size", "2"]


def halves(config, stages, balance="memory") -> list[str]:
    """Both stages get layers with states."""
    share = len(config.pattern) // stages
    ends = [stage * share for stage in range(stages)] + [None]
    return [config.pattern[start:end] for start, end in itertools.pairwise(ends)]


def measured(model, case: Case, truth) -> dict:
    launch = StageExecutor.launch
    opened = []

    def counted(executor: StageExecutor, plan: Plan):
        launched = launch(executor, plan)
        opened.append(len(executor._open))
        return launched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageExecutor, "launch", counted)
        tokens, llm = decode(model, case, truth)
    executor = llm.engine.executor
    if executor.stage.stages > 1:
        assert not executor._open and not executor.stage._sends, "a message that is dropped is lost"
    stats = llm.stats()
    return dict(
        tokens=tokens,
        preemptions=stats.preemptions,
        accepted=sum(stats.acceptance.accepted_per_depth),
        returned=stats.returned_bytes,
        opened=max(opened, default=0),
        weights=sum(parameter.nbytes for parameter in llm.model.parameters()),
        held=held_bytes(llm.engine),
        planned=llm.memory_plan.slot_bytes * llm.memory_plan.max_num_seqs
        + llm.memory_plan.kv_bytes,
        columns=sum(column.nbytes for column in llm.engine.executor.state.columns.values()),
    )


def replayed(model, case: Case, truth) -> dict:
    llm = make_llm(model, case.k, **case.settings)
    following = [prompt + tokens for prompt, tokens in zip(PROMPTS, truth, strict=True)]
    llm.engine.executor.drafter = TruthOnDevice(llm.engine.executor.drafter, following, "cpu")
    outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params)
    accepted = sum(llm.stats().acceptance.accepted_per_depth)
    tokens = [output.outputs[0].token_ids for output in outputs]
    executor = llm.engine.executor
    stores = len(executor.stores._graphs) if executor.stores else 0
    return dict(
        tokens=tokens, accepted=accepted, graphs=len(executor.graphs._graphs), stores=stores
    )


def after_aborts(model) -> list[list[int]]:
    """Outputs of requests that come when others were dropped while batches of theirs were under
    way; with replayed graphs, a stage stores the results of a batch whose requests it no longer
    has."""
    llm = make_llm(model, 3, max_num_seqs=3)
    params = [GREEDY.params[0]] * len(PROMPTS)
    ids = [llm.engine.add_request(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    for name in (None, ids[1], None, *ids):
        if name is not None:
            llm.engine.abort(name)
        if llm.engine.has_unfinished:
            llm.engine.step()
    outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], params)
    return [output.outputs[0].token_ids for output in outputs]


def drafts_of(model) -> list:
    """The heads' own drafts; none on a rank that has no heads."""
    recorded = record_drafts(
        make_llm(model, 3, async_scheduling=False), PROMPTS[:3], max_tokens=6, guided=False
    )
    return sorted([list(known), list(drafts)] for known, drafts in recorded.items())


def two_stages(rank: int, wanted: list, replays: list, directory: Path, out: Path) -> None:
    look_at_new_objects()
    models: dict[str, Any] = {}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        for case, truth in zip(TESTED, wanted, strict=True):
            if case.base not in models:
                models[case.base] = split_model(config(case.base), ranks=1, stages=2)
            found.append(measured(models[case.base], case, truth))
        drafts = {base: drafts_of(models[base]) for base in DRAFTING}
        replay_on_cpu(patch)
        graphs = [
            replayed(models[case.base], case, truth)
            for case, truth in zip(GRAPHS, replays, strict=True)
        ]
        aborted = [after_aborts(models["mamba2"])]
    shown = {}
    for name, (case, broken) in SABOTAGE.items():
        with pytest.MonkeyPatch.context() as patch:
            if broken and rank == 0:
                patch.setattr(*broken)
            index = TESTED.index(case)
            shown[name] = decode(models[case.base], case, wanted[index])[0] != wanted[index]
    refused(models["mamba2"])
    aborted.append(after_aborts(models["mamba2"]))
    auto = adaptive(rank, models["mamba2"], wanted[TESTED.index(GREEDY)])
    timed = make_llm(models["mamba2"], "auto", max_num_seqs=2).engine.speculation.step_times
    assert {rows for rows, _ in timed} == {1, 2} and all(seconds > 0 for seconds in timed.values())
    (out / f"{rank}.json").write_text(
        json.dumps(
            dict(found=found, drafts=drafts, shown=shown, aborted=aborted, graphs=graphs, auto=auto)
        )
    )
    with pytest.raises(
        UserError,
        match=r"rank 1 differs from rank 0: num_blocks is 41, not 40; start all ranks alike",
    ):
        LLM(directory, num_blocks=40 + rank, pipeline_parallel_size=2)
    say(out / f"{rank}.said", generate.app, command(directory, 2))
    say(out / f"{rank}.timed", bench.app, ["decode", "--model", str(directory), *TIMED])


def say(path: Path, app: typer.Typer, arguments: list[str]) -> None:
    """Run a command; what it says goes to a file, with statistics to another."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        typer.main.get_command(app)(arguments, standalone_mode=False)
    path.write_text(stdout.getvalue())
    path.with_name(f"{path.name}.err").write_text(stderr.getvalue())


def one_step(rows: int, k: int) -> float:
    """Made-up seconds: drafts are cheap for one request and dear for more."""
    return 1 + (0.1 if rows == 1 else 2) * k


def adaptive(rank: int, model, truth: list[list[int]]) -> dict:
    """With K that the first stage chooses, by times that differ between stages."""
    chosen = []
    choose = AdaptiveSpeculation.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Executor,
            "time_step",
            lambda self, shape, repeats: (1 + 2 * rank) * one_step(shape.decode_rows, shape.drafts),
        )
        patch.setattr(
            AdaptiveSpeculation, "choose", lambda *args: chosen.append(choose(*args)) or chosen[-1]
        )
        patch.setattr(adaptive_module, "_PROBE_INTERVAL", 5)
        tokens, llm = decode(model, Case("mamba2", "auto", settings=dict(max_num_seqs=4)), truth)
    times = [[*key, value] for key, value in llm.engine.speculation.step_times.items()]
    return dict(
        tokens=tokens,
        chosen=chosen,
        times=times,
        accepted=sum(llm.stats().acceptance.accepted_per_depth),
    )


def refused(model) -> None:
    """Sizes that are not those of the model."""
    with pytest.raises(
        UserError,
        match="split over 1 ranks, experts over 1, layers over 2 stages: leave all sizes out",
    ):
        make_llm(model, 2, pipeline_parallel_size=3)


def command(directory: Path, stages: int) -> list[str]:
    prompts = ["--prompts", str(directory / "prompts.jsonl"), "--json"]
    sizes = [
        "--num-speculative-tokens",
        "2",
        "--max-tokens",
        "6",
        "--pipeline-parallel-size",
        str(stages),
    ]
    return ["--model", str(directory), *prompts, *sizes]


def several_ranks(rank: int, tested: list, wanted: list, out: Path) -> None:
    look_at_new_objects()
    found = []
    for (case, *sizes), truth in zip(tested, wanted, strict=True):
        model = split_model(config(case.base, sizes[0]), case.whole_experts, *sizes)
        found.append(measured(model, case, truth))
    (out / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """What one rank decoded, and what each of two stages did."""

    def make(path: Path) -> None:
        wanted = one_rank(TESTED)
        replays = one_rank(GRAPHS)
        (path / "wanted.json").write_text(json.dumps(wanted))
        (path / "replays.json").write_text(json.dumps(replays))
        model = build_model(config("mamba2"), device="cpu", seed=1)
        save_hf_model(model, path / "hf")
        lines = [json.dumps(dict(prompt_token_ids=prompt)) for prompt in PROMPTS]
        (path / "hf" / "prompts.jsonl").write_text("\n".join(lines))
        run_ranks(two_stages, wanted, replays, path / "hf", path)

    path = made_once(tmp_path_factory, "two_stages", make)
    return (
        path,
        json.loads((path / "wanted.json").read_text()),
        [read(path / f"{rank}.json") for rank in (0, 1)],
    )


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("index", range(len(TESTED)), ids=[names(case) for case in TESTED])
def test_two_stages_decode_what_one_rank_does(decoded, index):
    _, wanted, stages = decoded
    for stage in stages:
        one = stage["found"][index]
        assert one["tokens"] == wanted[index]
        assert (one["preemptions"] > 0) == ("num_blocks" in TESTED[index].settings)
        assert one["accepted"] > 0 or not TESTED[index].k or not TESTED[index].guided
        assert one["returned"] == 4 * (2 + 2 * TESTED[index].k)


def test_stages_replay_graphs(decoded):
    """Transfers are outside of them, and what a stage stores later is not what later replays
    leave."""
    for number, stage in enumerate(decoded[2]):
        for case, want, one in zip(
            GRAPHS, read(decoded[0] / "replays.json"), stage["graphs"], strict=True
        ):
            assert one["tokens"] == want and one["graphs"] > 1, names(case)
            assert one["stores"] == (0 if number else one["graphs"]), names(case)
            assert one["accepted"] > 0 or not case.k, names(case)


def test_a_batch_runs_while_the_last_stage_has_another(decoded):
    for index, case in enumerate(TESTED):
        most = 2 if case.settings.get("async_scheduling", True) else 1
        # chunks of prompts are plans of their own
        most *= 1 + ("max_mixed_tokens" in case.settings)
        assert [stage["found"][index]["opened"] for stage in decoded[2]] == [most, 0]


def test_aborted_requests_leave_nothing(decoded):
    want = after_aborts(build_model(config("mamba2"), device="cpu", seed=1))
    assert [stage["aborted"] for stage in decoded[2]] == [[want, want]] * 2


def test_the_first_stage_chooses_the_drafts(decoded):
    """Of four requests both batches pass the slower stage one after the other; one request passes
    both stages."""
    wanted, (first, last) = (
        decoded[1][TESTED.index(GREEDY)],
        [stage["auto"] for stage in decoded[2]],
    )
    assert first["tokens"] == last["tokens"] == wanted and first["accepted"] == last["accepted"] > 0
    assert len(set(first["chosen"])) > 1 and not last["chosen"]
    times = {(rows, k): seconds for rows, k, seconds in first["times"]}
    assert first["times"] == last["times"] and {rows for rows, _ in times} == {1, 2, 4}
    for (rows, k), seconds in times.items():
        own = one_step(-(-rows // 2), k)
        assert seconds == pytest.approx(4 * own if rows == 1 else 2 * 3 * own)


def test_stages_draft_what_one_rank_drafts(decoded):
    """From an embedding that only the last one has: the first has no heads."""
    for base in DRAFTING:
        want = drafts_of(build_model(config(base), device="cpu", seed=1))
        assert len(want) > 10
        assert [stage["drafts"][base] for stage in decoded[2]] == [[], want]


@pytest.mark.parametrize("name", SABOTAGE)
def test_what_is_broken_shows(decoded, name):
    assert all(stage["shown"][name] != name.startswith("nothing") for stage in decoded[2])


@pytest.mark.parametrize("base", ["mamba2", "delta", "latent", "attention", "distinct heads"])
def test_each_stage_has_its_own_layers_alone(decoded, base):
    index = next(index for index, case in enumerate(TESTED) if case.base == base and case.k == 3)
    model = build_model(config(base), device="cpu", seed=1)
    case = TESTED[index]
    one = measured(model, case, decoded[1][index])
    first, last = (stage["found"][index] for stage in decoded[2])
    assert (
        first["weights"] + last["weights"]
        == one["weights"] + model.embedding.word_embeddings.weight.nbytes
    )
    assert first["held"] + last["held"] == one["held"] and first["held"] and last["held"]
    assert first["planned"] >= first["held"] and last["planned"] >= last["held"]
    assert first["columns"] < last["columns"] == one["columns"], (
        "penalties are counted where logits are"
    )


def test_the_command_of_two_stages_says_what_that_of_one_says(decoded, capsys):
    path = decoded[0]
    typer.main.get_command(generate.app)(command(path / "hf", 1), standalone_mode=False)
    assert [(path / f"{rank}.said").read_text() for rank in (0, 1)] == [capsys.readouterr().out, ""]
    said = (path / "0.said.err").read_text()
    assert ", 24 bytes per step and request went back between stages" in said


def test_stages_are_timed_by_the_benchmark(decoded):
    """And its own check passes, which compares tokens with a plain forward pass through both
    stages."""
    said = [(decoded[0] / f"{rank}.timed").read_text() for rank in (0, 1)]
    (row,) = json.loads(said[0].splitlines()[-1])["rows"]
    assert not said[1]
    # A step is one of all batches, so that each of the two requests gets so many tokens in it.
    assert row["tokens_per_s"] * row["step_ms"] / 1e3 == pytest.approx(
        2 * row["acceptance_length"], rel=0.2
    )


def run_several(tested: list, ranks: int, path: Path) -> list[list[dict]]:
    """What each rank did, its tokens being those of one rank."""
    wanted = [one_rank([case], tensor)[0] for case, tensor, _ in tested]
    run_ranks(several_ranks, tested, wanted, path, ranks=ranks)
    found = [read(path / f"{rank}.json") for rank in range(ranks)]
    for of_rank in found:
        assert [one["tokens"] for one in of_rank] == wanted
        assert [one["preemptions"] > 0 for one in of_rank] == [
            "num_blocks" in case.settings for case, *_ in tested
        ]
    return found


def test_two_ranks_decode_what_one_does(tmp_path):
    """Two tensor-parallel ranks, and two stages."""
    first, second = run_several(TWO, 2, tmp_path)
    assert [one["opened"] for one in first[3:]] == [2, 2, 2, 2]
    assert [one["opened"] for one in second[3:]] == [0, 0, 0, 0]


def test_four_ranks_decode_what_one_does(tmp_path):
    """Two stages of two tensor-parallel ranks, four stages, and four tensor-parallel ranks."""
    found = run_several(FOUR, 4, tmp_path)
    assert [of_rank[3]["opened"] for of_rank in found] == [4, 4, 4, 0]


def stage_of(rank: int, stages: int) -> PipelineStage:
    return PipelineStage(SimpleNamespace(rank=lambda: rank, size=lambda: stages), None)


def test_what_a_stage_hands_on_is_planned_for():
    """What came; what goes, and copies of it under way, of two for each stage and the newest."""
    llm = make_llm(tiny_model(), 2)
    model = llm.model.mtpkit_config
    engine = llm.engine
    cpu = torch.device("cpu")
    hidden = engine.config.max_num_batched_tokens * model.hidden_size * 4
    for rank, stages, copies in ((0, 2, 6), (1, 2, 1), (1, 3, 9)):
        ranks = Ranks()
        ranks.stage = stage_of(rank, stages)
        plan = plan_memory(model, engine.layout, engine.config, cpu, 0.9, 200, ranks=ranks)
        assert plan.activations - llm.memory_plan.activations == copies * hidden


def test_results_that_no_step_has_are_refused():
    good = np.array([[2, 5, 6, 7, -1, 60, 63, 0]])
    columns = columns_of(3, True, 64)
    check_returned(good, columns)
    for column, value, what in (
        (0, 4, "accepted drafts"),
        (0, -1, "accepted drafts"),
        (2, 64, "tokens"),
        (7, -2, "drafts"),
    ):
        wrong = good.copy()
        wrong[0, column] = value
        with pytest.raises(
            MtpkitError, match=f"the last stage sent {value} for {what}.*, which must be from"
        ):
            check_returned(wrong, columns)


def test_a_stage_stores_no_value_that_a_step_cannot_have():
    """Its next step would index with it, before the host refuses it."""
    shape = StepShape.decoding(1, 3)
    rows = SimpleNamespace(state_slots=[0], num_decode_rows=1)
    sampling = SimpleNamespace(vocabulary=SimpleNamespace(size=64))
    batch = SimpleNamespace(shape=shape, inputs=rows, sampling=sampling)
    verdict, drafts = unpack_returned(torch.tensor([[9, 64, -5, 63, -1, 99, 0, -2]]), batch)
    assert verdict.accepted.tolist() == [3] and verdict.token_ids.tolist() == [[63, -1, 63, -1]]
    assert drafts.token_ids.tolist() == [[63, 0, -1]]


def test_more_stages_than_layers_or_processes(decoded):
    path = decoded[0] / "hf"
    with pytest.raises(
        UserError,
        match="pipeline_parallel_size 6: the model's base has 5 layers; take no more stages",
    ):
        LLM(path, pipeline_parallel_size=6)
    with pytest.raises(
        UserError,
        match="pipeline_parallel_size 2 needs 2 processes, but there is 1: start them with",
    ):
        LLM(path, pipeline_parallel_size=2)
    with pytest.raises(
        UserError, match=r"_size 2 x pipeline_parallel_size 2 needs 4 .* --nproc-per-node 4"
    ):
        LLM(path, tensor_parallel_size=2, pipeline_parallel_size=2)


@pytest.mark.parametrize(("k", "drafts"), [(0, 0), (2, 2), ("auto", 2)])
def test_layers_are_dealt_for_the_drafts_and_requests_asked_for(k, drafts, monkeypatch):
    """Of two batches of 5 requests one has 3."""
    asked = []

    def opened(*args, **_):
        asked.append(args[-1])
        raise MtpkitError("enough")

    monkeypatch.setattr(loading, "open_model", opened)
    ranks = SimpleNamespace(stage=SimpleNamespace(stages=2), tensor_size=1)
    monkeypatch.setattr(llm_module, "join", lambda *_: ranks)
    with pytest.raises(MtpkitError, match="enough"):
        make_llm(tiny_model(), k, max_num_seqs=5)
    assert asked == [Decoding(drafts, 3)]
