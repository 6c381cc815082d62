"""A layer kind and a family from outside of mtpkit pass all front doors: train, save, load, export,
import, decode."""

import json
import random
import shutil

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from benchmarks.kernels.case import Case, Shapes, size
from benchmarks.kernels.cases import decode_cases
from benchmarks.kernels.cases.kinds import CASES, KindCases, register
from benchmarks.kernels.measure import KernelConfig, check_kernels
from mtpkit.bench.roofline import Roofline
from mtpkit.checkpoint import load_config, load_model, save_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.config import ModelConfig
from mtpkit.engine import LLM, SamplingParams
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits
from mtpkit.training.config.reading import load_config as load_train_config
from mtpkit.training.loop import train
from mtpkit.training.metrics import METRICS, read_metrics
from tests import toy_kind
from tests.checkpoint.toy_family import known
from tests.engine.prefix.compare import Pair, multi_turn
from tests.engine.tiny import greedy, make_llm, record_drafts, teacher_forced_drafts
from tests.ranks import run_ranks
from tests.toy_config import toy_config

VOCAB = 40
DECAY = "mtp.layers.0.mtp_model_layer.layers.0.mixer.decay"
BASE = dict(family="toy", vocab_size=300, mtp_num_depths=0, init_std=0.3, eos_token_ids=(0,))
MODELS = {"base and heads": ("MA*-A", "A-"), "heads with attention": ("M-A-", "A*-")}


@pytest.fixture(autouse=True, scope="module")
def known_kind_and_family():
    with known():
        yield


def toy_model(pattern, mtp_pattern, **changes):
    changes = {"vocab_size": VOCAB, "average_decay": 0.7, **changes}
    config = toy_config(pattern=pattern, mtp_pattern=mtp_pattern, **changes)
    return build_model(config, device="cpu", seed=2)


def tokens(length, batch=1, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_its_section_is_in_files_of_models_that_have_it(tmp_path):
    config = toy_config(pattern="MA*-", average_decay=0.7)
    assert (
        config.section(toy_kind.AverageConfig).decay == 0.7
        and config.to_dict()["average_decay"] == 0.7
    )
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "average_decay" not in toy_config().to_dict()
    with pytest.raises(UserError, match="average_decay is 1, must be above 0 and below 1"):
        toy_config(pattern="MA*-", average_decay=1)


@pytest.mark.parametrize("name", MODELS)
def test_megatrons_layout_keeps_it(name, tmp_path):
    model = toy_model(*MODELS[name])
    save_model(model, tmp_path / "megatron")
    loaded = load_model(tmp_path / "megatron", device="cpu")
    assert load_config(tmp_path / "megatron") == model.mtpkit_config
    want = dict(model.named_parameters())
    got = dict(loaded.named_parameters())
    assert want.keys() == got.keys() and all(torch.equal(want[key], got[key]) for key in want)


@pytest.fixture(scope="module")
def settings(base, tmp_path_factory):
    """Overrides of a short run, but for `output`."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(
        "".join(
            random.Random(0).choices(["the cat sat on the mat\n", "def add(left, right):\n"], k=300)
        )
    )
    values = {
        "model": base,
        "data.train": f"[{text}]",
        "data.sequence_length": 24,
        "data.global_batch_size": 8,
        "data.micro_batch_size": 4,
        "heads.pattern": "A*-",
        "heads.num_depths": 3,
        "heads.init": "fresh",
        "optimizer.lr": 2e-2,
        "optimizer.warmup_steps": 1,
        "steps": 16,
        "log_interval": 1,
    }
    return [f"{key}={value}" for key, value in values.items()]


def trained_on_a_rank(rank: int, runs: list[list[str]]) -> None:
    """Train with each run's settings; each has process groups of its own."""
    with known():
        for overrides in runs:
            parallel_state.destroy_model_parallel()
            train(load_train_config(None, overrides))


def losses(run):
    return [line["loss"] for line in read_metrics(run / METRICS) if line["kind"] == "train"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer_dir):
    """A base without heads in Megatron's layout, of the toy family, and its tokenizer."""
    directory = shutil.copytree(tokenizer_dir, tmp_path_factory.mktemp("toy") / "base")
    save_model(toy_model("A*-A", "", **BASE), directory)
    return directory


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    """Directory of a run of one process."""
    return train(load_train_config(None, [*settings, f"output={tmp_path_factory.mktemp('run')}"]))


def test_the_trainer_trains_its_heads(base, run):
    found = losses(run)
    assert len(found) == 16 and sum(found[-3:]) < 0.8 * sum(found[:3])
    before = load_model(base, device="cpu")
    model = load_model(run, device="cpu")
    assert (
        model.mtpkit_config.hybrid_layer_pattern == "A*-A/A*-/A*-/A*-"
        and load_config(run) == model.mtpkit_config
    )
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in before.named_parameters())
    fresh = build_model(model.mtpkit_config, device="cpu").get_parameter(DECAY)
    assert not torch.equal(parameters[DECAY], fresh)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_two_ranks_train_as_one(run, two_ranks, layout):
    """Tensor-parallel ranks have their own channels of an average, and between layers their own
    part of a sequence."""
    assert losses(two_ranks / layout) == pytest.approx(losses(run), rel=1e-3)
    want, found = (
        load_model(path, device="cpu").state_dict() for path in (run, two_ranks / layout)
    )
    assert want.keys() == found.keys()
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-3)


@pytest.fixture(scope="module")
def two_ranks(settings, tmp_path_factory):
    """Directory of a run at each layout of two processes."""
    out = tmp_path_factory.mktemp("ranks")
    runs = [
        [*settings, f"parallel.{name}=2", f"output={out / name}"] for name in ("tensor", "pipeline")
    ]
    run_ranks(trained_on_a_rank, runs)
    return out


@pytest.fixture
def exported(run, tmp_path):
    """The trained model in the toy family's own layout."""
    export_checkpoint(run, tmp_path / "hf")
    return tmp_path / "hf"


def test_its_family_exports_and_imports_it(run, exported, tmp_path):
    import_checkpoint(exported, tmp_path / "back")
    assert (
        compare_weights(run, tmp_path / "back").identical
        and compare_weights(run, exported).identical
    )
    config = load_config(exported)
    assert config == load_config(tmp_path / "back")
    assert (
        config.hybrid_layer_pattern == load_config(run).hybrid_layer_pattern == "A*-A/A*-/A*-/A*-"
    )
    values = json.loads((exported / "config.json").read_text())
    assert (values["blocks"], values["drafter"]) == (
        ["drift", "look", "think", "drift"],
        ["drift", "look", "think"],
    )
    assert values["model_type"] == "toy" and values["fade"] == 0.7
    assert torch.equal(
        load_file(exported / "model.safetensors")["drafter.0.a.fade"],
        load_model(run, device="cpu").get_parameter(DECAY),
    )


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
def test_what_was_exported_decodes(run, exported, rollback):
    prompts = ["the cat", "def add(left", "mat\nthe"]
    texts = {}
    for directory in (run, exported):
        for k in range(4):
            llm = LLM(
                directory,
                num_speculative_tokens=k,
                state_rollback=rollback,
                max_model_len=96,
                device="cpu",
            )
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            )
            texts[directory, k] = [output.outputs[0].token_ids for output in outputs]
    first = texts[run, 0]
    assert all(len(tokens) == 24 for tokens in first) and all(
        found == first for found in texts.values()
    )


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token_under_either_rollback(name, rollback):
    model = toy_model(*MODELS[name], init_std=0.3)
    prompts = [tokens(length, seed=length)[0].tolist() for length in (1, 4, 9, 21)]
    said = []
    for k in range(4):
        llm = LLM(
            model,
            num_speculative_tokens=k,
            state_rollback=rollback,
            max_model_len=96,
            max_num_batched_tokens=16,
            block_size=8,
            max_num_seqs=3,
            device="cpu",
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        greedy = SamplingParams(temperature=0, max_tokens=40)
        outputs = llm.generate(given, greedy)
        said.append([output.outputs[0].token_ids for output in outputs])
    with torch.inference_mode():
        plain = [list(prompt) for prompt in prompts]
        for known in plain:
            for _ in range(40):
                hidden = base_forward(model, torch.tensor([known]), SequenceInput())
                known.append(int(compute_logits(model, hidden[-1, 0]).argmax()))
    assert (
        said == [[known[len(prompt) :] for known, prompt in zip(plain, prompts, strict=True)]] * 4
    )


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_next_turn_goes_on_from_the_prefix_cache(name, k, rollback):
    pair = Pair(toy_model(*MODELS[name], init_std=0.3), k, state_rollback=rollback)
    multi_turn(pair, tokens(9)[0].tolist(), 3, greedy(13))
    pair.check()
    assert pair.hits


def test_a_ring_that_cannot_be_folded_is_no_cache(monkeypatch):
    monkeypatch.delattr(toy_kind.Mixer, "fold")
    with pytest.raises(
        NotImplementedError,
        match=r"Mixer keeps a ring, .* or decode with enable_prefix_caching=False",
    ):
        LLM(toy_model("MA*-", "A-"), 0, max_model_len=64, device="cpu")


@pytest.mark.parametrize("rollback", ["snapshot", "replay"])
@pytest.mark.parametrize("k", [2, 3])
def test_distinct_heads_draft_as_without_caches(k, rollback):
    model = toy_model("MA*-", "A-", init_std=0.3, mtp_num_depths=3, mtp_use_repeated_layer=False)
    prompts = [tokens(length, seed=length)[0].tolist() for length in (1, 2, 3, 9)]
    drafts = record_drafts(
        make_llm(model, k, state_rollback=rollback, max_num_batched_tokens=8), prompts, 12
    )
    assert len(drafts) > 20
    assert drafts == {known: teacher_forced_drafts(model, known, k) for known in drafts}


def test_the_memory_plan_and_the_roofline_count_it():
    with_it, without = (toy_model(pattern, "*-") for pattern in ("M*-A", "M*-"))
    sizes = [
        LLM(
            model,
            num_speculative_tokens=3,
            state_rollback="snapshot",
            max_model_len=64,
            device="cpu",
        ).memory_plan
        for model in (with_it, without)
    ]
    width = with_it.mtpkit_config.hidden_size
    drafts = 3
    assert sizes[0].slot_bytes - sizes[1].slot_bytes == (1 + drafts) * width * 4
    costs = [
        Roofline(model.mtpkit_config, torch.float32).decode(2, [0.5])
        for model in (with_it, without)
    ]
    by_name = [{work.name: work for work in cost.phases["verify"]} for cost in costs]
    more = by_name[0]["state"].flops - by_name[1]["state"].flops
    assert more == 3 * width * 2 * 2, "3 FLOPs for each channel of 2 tokens of 2 rows"
    assert by_name[0]["matrices"].bytes - by_name[1]["matrices"].bytes == width**2 * 4


def blend(means, x, decay):
    """The op of a moving average."""
    return torch.lerp(x, means, decay)


def blend_case(shapes):
    def make():
        width = shapes.config.hidden_size
        return (
            shapes.normal(shapes.rows, width),
            shapes.normal(shapes.rows, width),
            shapes.normal(width),
        )

    yield Case(
        blend, f"[{shapes.rows}, {shapes.config.hidden_size}]", make, lambda args: size(*args)
    )


def test_the_kernel_benchmark_has_its_linears_and_ops(monkeypatch):
    config = toy_config(pattern="A*-", mtp_pattern="*-")
    width = config.hidden_size

    def found(config=config):
        made = decode_cases(Shapes(config, 3, 2, 16, torch.device("cpu"), torch.float32))
        return {case.op: case.shape for case in made}

    unregistered = found()
    assert unregistered["linear out_proj"] == f"[9, {width}] x [{width}, {width}]"
    assert "ring_lens_after" in unregistered and "blend" not in unregistered
    monkeypatch.setitem(CASES, toy_kind.LETTER, KindCases())  # is taken out afterwards
    register(toy_kind.AverageConfig, KindCases(decode=blend_case))
    assert found() == unregistered | {"blend": f"[3, {width}]"} and next(iter(found())) == "blend"
    lines = list(check_kernels(config, KernelConfig((3,), ops=("blend",)), "cpu"))
    assert lines[1:] == [f"blend [3, {width}]: relative difference 0.0e+00"]
    assert "blend" not in found(toy_config())
