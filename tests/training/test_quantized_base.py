"""Heads trained on a base whose files are quantised: it computes what it computes when it is
decoded, and a run keeps it as it is stored."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint import load_model, load_model_weights, open_directory, save_hf_model
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.load import fill_model
from mtpkit.checkpoint.matrices import StoredMatrices
from mtpkit.checkpoint.tensors import bits_equal
from mtpkit.data.samples import Columns
from mtpkit.engine import LLM
from mtpkit.engine.device import runner
from mtpkit.errors import UserError
from mtpkit.model import build_model, compute_logits, normed_states, output_weight
from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.quantized import quantized_as
from mtpkit.training import heads as heads_module
from mtpkit.training.cache import base_states
from mtpkit.training.config.reading import load_config
from mtpkit.training.evaluation import evaluate_directory
from mtpkit.training.header import held_bytes
from mtpkit.training.heads import (
    build_with_heads,
    check_unchanged,
    fingerprint,
    freeze_base,
    resolve,
)
from mtpkit.training.loop import Trainer, describe_run, train
from mtpkit.training.plan import Plan
from tests.checkpoint.builders import edit, edit_config
from tests.checkpoint.schemes import READ, SCHEMES, write_quantised
from tests.checkpoint.test_columnwise import SETTINGS as COLUMNWISE
from tests.checkpoint.test_columnwise import quantized as columnwise
from tests.engine.tiny import greedy
from tests.kernels.recurrence import relative
from tests.ranks import run_ranks
from tests.shared import made_once
from tests.toy_config import toy_config
from tests.training.parallel_ranks import work
from tests.training.toy import teach, toy_batch

CONFIG = toy_config(
    vocab_size=304,
    pattern="M*E-",
    mtp_pattern="",
    mtp_num_depths=0,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=16,
    init_std=0.3,
)
ROUNDED = ["fp8 blocks", "ModelOpt FP8", "ModelOpt rows", "compressed FP8"]
"""Schemes whose products round their inputs."""
LEFT = ("embed", "lm_head", "gate.weight", "conv1d", "norm", "mtp.")


@pytest.fixture(scope="session")
def plain_base(tmp_path_factory, tokenizer_dir, text_files):
    """A base in bfloat16 that knows the text, in the Hugging Face layout."""

    def make(directory):
        model = build_model(CONFIG, device="cpu", seed=2)
        teach(model, text_files[0], tokenizer_dir)
        save_hf_model(model, directory)
        edit(directory, lambda found: found.update({n: t.bfloat16() for n, t in found.items()}))
        shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)

    return made_once(tmp_path_factory, "plain_base", make)


def wanted(name):
    return not any(part in name for part in LEFT) and name.endswith("weight")


def write(scheme, source, directory):
    """A quantised copy of a base."""
    if scheme in READ:
        return write_quantised(scheme, source, directory, wanted)
    shutil.copytree(source, directory)

    def change(tensors):
        for name in filter(wanted, [*tensors]):
            if tensors[name].dim() == 2 and not any(size % 16 for size in tensors[name].shape):
                parts, _ = columnwise(tensors.pop(name), scheme)
                tensors.update({name.removesuffix("weight") + k: v for k, v in parts.items()})

    edit(directory, change)
    edit_config(directory, quantization_config=COLUMNWISE[scheme])
    return directory


@pytest.fixture(scope="session")
def make_base(tmp_path_factory, plain_base):
    """A function from a scheme to a base in it."""

    def base(scheme):
        place = f"base in {scheme}"
        return made_once(
            tmp_path_factory,
            place,
            lambda directory: (directory.rmdir(), write(scheme, plain_base, directory)),
        )

    return base


@pytest.fixture
def words(text_files, tmp_path):
    """A function from a base and further settings, by key, to the overrides of a short run."""

    def make(base, **values):
        both = {
            "model": base,
            "output": tmp_path / "run",
            "data.train": f"[{text_files[0]}]",
            "data.eval": f"[{text_files[1]}]",
            "data.sequence_length": 32,
            "data.global_batch_size": 4,
            "data.eval_sequences": 5,
            "heads.num_depths": 2,
            "heads.pattern": "'*E'",
            "heads.init": "fresh",
            "heads.fit_tokens": 256,
            "optimizer.warmup_steps": 1,
            "optimizer.lr": 5e-3,
            "steps": 4,
            "log_interval": 1,
            "save_interval": 2,
            "dtype": "float32",
            **values,
        }
        return [f"{key}={value}" for key, value in both.items()]

    return make


@pytest.fixture
def settings(words):
    return lambda base, **values: load_config(None, words(base, **values))


def built(config):
    return build_with_heads(*resolve(config), torch.device("cpu"))


def metrics(output, kind="train"):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(output):
    return [line["loss"] for line in metrics(output)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "layout"),
    [(scheme, ("hf", "megatron")[at % 2]) for at, scheme in enumerate([*READ, *COLUMNWISE])],
)
def test_hidden_states_and_logits_are_those_of_a_prefill(
    scheme, layout, make_base, settings, tmp_path, monkeypatch
):
    base = make_base(scheme)
    if layout == "megatron":
        base = tmp_path / "megatron"
        import_checkpoint(make_base(scheme), base, expand_scales=True)
    batch = toy_batch([[24]])

    steps = []
    forward = runner.base_forward

    def note(*args):
        steps.append(forward(*args))
        return steps[-1]

    monkeypatch.setattr(runner, "base_forward", note)
    llm = LLM(base, 0, num_blocks=60, device="cpu", dtype="float32")
    llm.generate(batch.token_ids.tolist(), greedy(1))
    served = steps[0][:24]

    model = built(settings(base))
    freeze_base(model)
    found = base_states(model, batch)
    assert quantized_as(model) == quantized_as(llm.model)
    assert relative(found, served.double()) < 1e-5
    logits = compute_logits(llm.model, normed_states(llm.model, served))
    assert relative(compute_logits(model, normed_states(model, found)), logits.double()) < 1e-5

    wide = build_model(model.mtpkit_config, device="cpu", init="none")
    weights = open_directory(base).weights(widen=torch.float32, expand_scales=True)
    fill_model(wide, weights, base, allow_missing_heads=True)
    apart = relative(base_states(wide, batch), served.double())
    assert apart > 1e-2 if scheme in ROUNDED else apart < 1e-5


@pytest.mark.parametrize("scheme", ["fp8 blocks", "compressed W4A16", "NVFP4"])
def test_no_matrix_of_the_base_is_ever_widened(scheme, make_base, settings, monkeypatch):
    read = StoredMatrices.read

    def checked(source, name):
        assert not source.of_tensor(name), f"{name} is widened"
        return read(source, name)

    monkeypatch.setattr(StoredMatrices, "read", checked)
    model = built(settings(make_base(scheme)))
    held = sum(each.nbytes for each in (*model.decoder.parameters(), *model.decoder.buffers()))
    plain = build_model(CONFIG, device="cpu").decoder
    assert held < sum(each.nbytes for each in plain.parameters()) / 2
    # Nor while it trains: lm_head is not quantised here.
    monkeypatch.setattr(QuantizedWeight, "widened", lambda *_: 1 / 0)
    train(settings(make_base(scheme), steps=1))


@pytest.mark.parametrize("scheme", ["fp8 blocks", "ModelOpt FP8", "compressed W4A16", "gptq"])
def test_a_run_keeps_its_base_as_it_is_stored(scheme, make_base, settings, tmp_path):
    base = make_base(scheme)
    run = train(settings(base, **{"heads.init": "base"}))
    stored = open_directory(run).weights()
    source = open_directory(base).weights(expand_scales=True)
    assert stored.formats == source.formats
    for name in source.formats:
        parts = stored.quantized(name).parts
        for part, tensor in source.quantized(name).parts.items():
            assert bits_equal(parts[part], tensor), (name, part)

    export_checkpoint(run, tmp_path / "back")
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert {name for name in after if not name.startswith("mtp.")} == before.keys()
    for name, tensor in before.items():
        assert bits_equal(after[name], tensor), name


@pytest.mark.parametrize("scheme", ["compressed FP8", "W4A16_NVFP4"])
def test_a_run_goes_on_as_if_it_had_not_stopped(scheme, make_base, settings, tmp_path, monkeypatch):
    whole = train(settings(make_base(scheme), output=tmp_path / "whole"))
    config = settings(make_base(scheme), output=tmp_path / "parts")
    save = Trainer._save

    def save_and_stop(trainer, *args):
        save(trainer, *args)
        if trainer.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_save", save_and_stop)
        train(config)
    # The base of a run that goes on is its own.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(make_base(scheme), elsewhere)
    edit(elsewhere, lambda tensors: [each.zero_() for each in tensors.values() if each.dim() == 1])
    parts = train(settings(elsewhere, output=tmp_path / "parts"))
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("scheme", ["compressed FP8", "ModelOpt FP8"])
def test_acceptance_is_that_of_the_exported_file(
    scheme, make_base, settings, text_files, tmp_path, monkeypatch
):
    """Losses, acceptance lengths and counts, to the last digit."""
    run = train(
        settings(make_base(scheme), **{"data.eval_sequences": 400, "heads.init": "base"}, steps=12)
    )
    export_checkpoint(run, tmp_path / "back")
    (*_, said) = metrics(run, "eval")

    def measured():
        return evaluate_directory(tmp_path / "back", [str(text_files[1])], Columns(), 32)

    found = measured()
    for key in {*found} & {*said}:
        assert found[key] == said[key], key
    assert found["acceptance_length"] > 1.3 and found["departures"] < 0.5

    def widened(directory, dtype, **_):
        model = build_model(directory.config, dtype=dtype, device="cpu", init="none")
        load_model_weights(model, directory)
        return model

    monkeypatch.setattr("mtpkit.training.evaluation.load_model", widened)
    assert measured()["loss"] != said["loss"]


def test_ranks_train_on_the_base_of_one_process(make_base, words, tmp_path):
    """A step with two stages, one with split matrices and one with split experts, then one in a
    single process; the rule for inputs is `static`, by which a part of an input is quantised as the
    whole one is."""
    base = make_base("ModelOpt FP8")
    constant = {"optimizer.lr": 2e-3, "optimizer.min_lr": 2e-3, "heads.init": "base"}

    def run(name, **values):
        return words(base, **constant, output=tmp_path / name, **values)

    jobs = [
        ("train", run("ranks", steps=step, **{f"parallel.{split}": 2}))
        for step, split in enumerate(("pipeline", "tensor", "expert"), start=1)
    ]
    run_ranks(work, tmp_path, jobs)
    ranks = train(load_config(None, run("ranks")))
    alone = train(load_config(None, run("alone")))
    assert losses(ranks) == pytest.approx(losses(alone), rel=1e-3)
    stored = open_directory(ranks).weights()
    assert stored.formats == open_directory(base).weights(expand_scales=True).formats


def test_cached_states_are_those_of_the_stored_base(make_base, settings, tmp_path):
    base = make_base("compressed FP8")
    without = train(settings(base, output=tmp_path / "without"))
    cached = train(settings(base, output=tmp_path / "with", cache=tmp_path / "cache"))
    assert losses(cached) == losses(without)
    assert open_directory(cached).weights().formats

    # Other scales of inputs alone make another base.
    other = tmp_path / "other"
    shutil.copytree(make_base("ModelOpt FP8"), other)
    train(settings(other, output=tmp_path / "first", cache=tmp_path / "static", steps=1))
    edit(other, lambda tensors: [t.mul_(2) for n, t in tensors.items() if "input_scale" in n])
    with pytest.raises(UserError, match="was written for other inputs: base "):
        train(settings(other, output=tmp_path / "second", cache=tmp_path / "static", steps=1))


def test_heads_that_copy_layers_widen_them_and_say_so(make_base, settings):
    config = settings(make_base("NVFP4"), **{"heads.init": "base"})
    model = built(config)
    (head,) = model.mtp.layers
    copied = head.mtp_model_layer.layers
    assert isinstance(model.decoder.layers[1].self_attention.linear_qkv.weight, QuantizedWeight)
    for place, number, name in (
        (0, 1, "self_attention.linear_qkv"),
        (0, 1, "self_attention.linear_proj"),
        (1, 2, "mlp.experts.local_experts.3.linear_fc1"),
        (1, 2, "mlp.shared_experts.linear_fc2"),
    ):
        source = model.decoder.layers[number].get_submodule(name).weight
        weight = copied[place].get_submodule(name).weight
        assert torch.equal(weight, source.widened()) and isinstance(weight, torch.nn.Parameter)
    text = " ".join(" ".join(describe_run(config)).split())
    assert "init base: copies of the base's last layers, widened from nvfp4" in text
    assert "4 layers, M*E-; stored in nvfp4, which it keeps" in text


def test_quantised_heads_are_widened_to_be_trained(make_base, settings, tmp_path):
    run = train(settings(make_base("compressed FP8"), steps=1))
    export_checkpoint(run, tmp_path / "heads", head_format="fp8")
    config = settings(tmp_path / "heads", output=tmp_path / "next", **{"heads.init": "checkpoint"})
    stored = open_directory(tmp_path / "heads").weights(widen=torch.float32)
    assert any(name.startswith("mtp.") for name in stored.formats)
    model = built(config)
    assert not any(isinstance(each, QuantizedWeight) for each in model.mtp.modules())
    name = "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.weight"
    assert name in stored.formats
    assert torch.equal(model.get_parameter(name), stored.read(name))
    text = " ".join(" ".join(describe_run(config)).split())
    assert "init checkpoint: the model's own heads, widened from fp8" in text
    trained = open_directory(train(config)).weights()
    assert trained.formats and not any(name.startswith("mtp.") for name in trained.formats)


def test_a_quantised_matrix_that_changes_is_noticed(make_base, settings):
    model = built(settings(make_base("compressed W4A16")))
    before = fingerprint(model)
    check_unchanged(model, before)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    model.get_submodule(name).segments[0].scales[0, 0] += 1
    with pytest.raises(Exception, match=name):
        check_unchanged(model, before)


def test_base_fp8_is_the_engines_own_quantisation(plain_base, settings):
    """Of experts too, and of a base that is stored in fp8 nothing is left to do."""
    model = built(settings(plain_base, base_fp8=True, dtype="bfloat16"))
    served = load_model(plain_base, torch.bfloat16, quantization="fp8")
    names = {name for name, each in served.named_modules() if isinstance(each, QuantizedWeight)}
    assert any("local_experts" in name for name in names)
    assert names == {
        name for name, each in model.named_modules() if isinstance(each, QuantizedWeight)
    }
    batch = toy_batch([[24]])
    assert torch.equal(base_states(model, batch), base_states(served, batch))

    # Heads copy what the files hold, which nothing has rounded.
    heads = built(settings(plain_base, base_fp8=True, dtype="bfloat16", **{"heads.init": "base"}))
    weight = heads.mtp.layers[0].mtp_model_layer.layers[0].self_attention.linear_qkv.weight
    stored = open_directory(plain_base).weights()
    assert torch.equal(weight, stored.read("decoder.layers.1.self_attention.linear_qkv.weight"))


def test_a_base_in_other_formats_cannot_be_in_fp8(make_base, settings):
    with pytest.raises(
        UserError, match=r"^base_fp8=true, but .* is stored in nvfp4 and stays so: set base_fp8=f"
    ):
        train(settings(make_base("NVFP4"), base_fp8=True, dtype="bfloat16"))
    stored = built(settings(make_base("compressed FP8"), dtype="bfloat16"))
    asked = built(settings(make_base("compressed FP8"), base_fp8=True, dtype="bfloat16"))
    batch = toy_batch([[24]])
    assert torch.equal(base_states(stored, batch), base_states(asked, batch))


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ("compressed W4A16", "stored in int4: set backend=local"),
        ("ModelOpt FP8", "in fp8, and so trains heads on other hidden states than decoding has: s"),
    ],
)
def test_transformer_engine_cannot_use_stored_matrices(
    scheme, told, make_base, settings, monkeypatch, caplog
):
    monkeypatch.setattr(heads_module, "resolve_backend", lambda name: "te")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # else a warning of precision comes too
    assert resolve(settings(make_base(scheme)))[0].backend == "local"
    assert not caplog.messages
    assert resolve(settings(make_base(scheme), backend="te"))[0].backend == "te"
    (message,) = caplog.messages
    assert told in message and message.startswith("backend=te widens the base, which is stored in ")


def test_matrices_that_a_run_could_not_keep_are_refused_at_once(make_base, settings, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(make_base("compressed FP8"), base)
    name = "backbone.layers.1.mixer.k_proj.weight"

    def widen(tensors):
        tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale")
        tensors[name] = tensors[name].bfloat16()

    edit(base, widen)
    with pytest.raises(UserError, match=r"k_proj.*joins them: widen them by --fp8-as"):
        train(settings(base))
    assert not (tmp_path / "run").exists()


def test_memory_counts_matrices_as_they_are_stored(make_base, settings):
    for scheme in ("compressed FP8", "NVFP4"):
        config = settings(make_base(scheme))
        plan = Plan(config)
        trainer = Trainer(plan)
        (told,) = held_bytes(plan.config, plan.model, 1, plan.stored)
        weights = sum(
            each.nbytes for each in (*trainer.model.parameters(), *trainer.model.buffers())
        )
        held = sum(
            tensor.nbytes
            for buffer in trainer.optimizer.buffers
            for tensor in (
                buffer.flat,
                *(each for region in buffer.regions for each in region.tensors.values()),
            )
        )
        assert told == pytest.approx(weights + held, rel=1e-2)


def test_the_output_layer_gives_the_logits_that_decoding_gives(plain_base, settings, tmp_path):
    """Quantised inputs in the loss too."""
    base = tmp_path / "base"

    def everywhere(name):
        return wanted(name) or name == "lm_head.weight"

    write_quantised("compressed FP8", plain_base, base, everywhere)
    config = SCHEMES["compressed FP8"].config
    edit_config(base, quantization_config={**config, "ignore": []})
    run = train(settings(base))
    assert isinstance(output_weight(load_model(run)), QuantizedWeight)
    export_checkpoint(run, tmp_path / "back")
    before = load_file(base / "model.safetensors")["lm_head.weight"]
    assert bits_equal(load_file(tmp_path / "back" / "model.safetensors")["lm_head.weight"], before)
