"""Models from directories of either layout compute what their makers compute."""

import json
import re
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mtpkit import LLM
from mtpkit.checkpoint import (
    load_checkpoint,
    load_config,
    load_model,
    load_model_weights,
    save_checkpoint,
    save_hf_model,
    save_model,
)
from mtpkit.checkpoint.convert import export_checkpoint, import_checkpoint
from mtpkit.checkpoint.directory import latest_iteration, open_directory
from mtpkit.checkpoint.families.nemotron_h import NEMOTRON_H
from mtpkit.checkpoint.layouts.megatron import parameters
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.load import ModelTensors
from mtpkit.checkpoint.shards import global_shape, targets_of
from mtpkit.checkpoint.tensors import bits_equal, is_finite
from mtpkit.checkpoint.verify import compare_weights
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import SequenceInput, base_forward, build_model, compute_logits, unroll_depths
from mtpkit.model.layers.norm import GatedRMSNorm
from mtpkit.training.config.settings import DataConfig, TrainConfig
from mtpkit.training.heads import build_with_heads
from tests.checkpoint.builders import (
    GOLDEN,
    differing_after_round_trip,
    edit,
    edit_config,
    write_base,
    write_megatron_copy,
)
from tests.shared import each
from tests.toy_config import toy_config

CASES = ["tp1/mamba_attention_mlp", "tp1/moe", "tp1/distinct_heads", "tp2/mamba_attention_mlp"]


@pytest.mark.parametrize("case", CASES)
def test_golden_logits_and_depths(case):
    golden = load_file(GOLDEN / case / "golden.safetensors")
    model = load_model(GOLDEN / case)
    with torch.no_grad():
        hidden = base_forward(model, golden["ids"], SequenceInput())
        logits = compute_logits(model, hidden).transpose(0, 1)
        depths = list(unroll_depths(model, hidden, golden["ids"], 2, attention="per_depth"))
    assert relative(logits, golden["logits"]) < 1e-5
    for k, want in enumerate(golden["mtp_chain_sbh"].chunk(3)):
        have = [hidden, *depths][k]
        assert relative(have[: 24 - k], want[: 24 - k]) < 1e-5, k


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    return ((have - want).abs().max() / want.abs().max()).item()


ODD = dict(
    hidden_size=40,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=6,
    intermediate_size=52,
    ssm_state_size=5,
    mamba_num_heads=6,
    mamba_head_dim=10,
    n_groups=3,
    conv_kernel=3,
    chunk_size=16,
    n_routed_experts=7,
    num_experts_per_tok=3,
    layer_norm_epsilon=1e-3,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"time_step_limit": [0.5, 1e9]},
        {"moe_latent_size": 16},
        {"n_group": 2, "topk_group": 1},
        {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
        ODD,
        ODD | {"moe_latent_size": 11, "moe_intermediate_size": 9, "norm_topk_prob": False},
        {
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 5,
            "routed_scaling_factor": 0.7,
        },
        {"n_routed_experts": 12, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 3},
        {"n_routed_experts": 16, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3},
        {"num_experts_per_tok": 1, "norm_topk_prob": True},
        {
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
            "n_groups": 1,
        },
    ],
)
def test_logits_equal_transformers(tmp_path, changes):
    from transformers import NemotronHForCausalLM

    write_base(tmp_path / "hf", "ME*-M", **changes)
    # what transformers clamps at
    edit_config(tmp_path / "hf", time_step_min=changes.get("time_step_limit", [0.0])[0])
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model = NemotronHForCausalLM.from_pretrained(
            tmp_path / "hf", experts_implementation="eager"
        )
        want = model(tokens).logits
        for layout in ("hf", "megatron"):
            model = load_model(tmp_path / layout)
            have = compute_logits(model, base_forward(model, tokens, SequenceInput())).transpose(
                0, 1
            )
            assert relative(have, want) < 1e-4, layout
    assert differing_after_round_trip(tmp_path / "hf") == []


def test_several_shared_experts_are_one_network(tmp_path):
    """As vLLM and SGLang read the two keys; transformers takes the width for that of all."""
    write_base(tmp_path / "hf", "E*")
    want = load_file(tmp_path / "hf" / "model.safetensors")
    edit_config(tmp_path / "hf", n_shared_experts=2, moe_shared_expert_intermediate_size=12)
    config = load_config(tmp_path / "hf")
    assert config.moe.shared_expert_intermediate_size == 24
    import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    for name, family in (("kept", None), ("again", "nemotron_h")):
        export_checkpoint(tmp_path / "megatron", tmp_path / name, family=family)
        values = json.loads((tmp_path / name / "config.json").read_text())
        assert (values["n_shared_experts"], values["moe_shared_expert_intermediate_size"]) == (
            2,
            12,
        )
        assert load_file(tmp_path / name / "model.safetensors").keys() == want.keys()
    (tmp_path / "megatron" / "config.json").unlink()
    export_checkpoint(tmp_path / "megatron", tmp_path / "new")
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (values["n_shared_experts"], values["moe_shared_expert_intermediate_size"]) == (1, 24)


def test_loading_casts(hf_dir):
    model = load_model(hf_dir, dtype=torch.bfloat16)
    assert model.embedding.word_embeddings.weight.dtype == torch.bfloat16
    assert model.decoder.layers[0].mixer.A_log.dtype == torch.float32


def test_heads_may_be_missing_only_when_allowed(tmp_path):
    write_base(tmp_path / "base")
    config = load_config(tmp_path / "base").replace(mtp_pattern="*-", mtp_num_depths=2)
    model = build_model(config)
    head = model.mtp.layers[0].eh_proj.weight.clone()
    with pytest.raises(UserError, match=r"missing: mtp\.layers\.0"):
        load_model_weights(model, tmp_path / "base")
    load_model_weights(model, tmp_path / "base", allow_missing_heads=True)
    assert torch.equal(head, model.mtp.layers[0].eh_proj.weight)
    want = load_file(tmp_path / "base" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.output_layer.weight, want)


def test_other_heads_are_left_alone_when_allowed(hf_dir):
    model = build_model(load_config(hf_dir).replace(mtp_pattern="*-"))
    head = model.mtp.layers[0].eh_proj.weight.clone()
    load_model_weights(model, hf_dir, allow_missing_heads=True)
    assert torch.equal(head, model.mtp.layers[0].eh_proj.weight)


def test_save_hf_model(hf_dir, tmp_path):
    model = load_model(hf_dir)
    (tmp_path / "out").mkdir()
    for name in ("tokenizer.json", "README.md", "model-00001-of-00009.safetensors", "config.json"):
        (tmp_path / "out" / name).write_text("{}")
    save_hf_model(model, tmp_path / "out")
    assert compare_weights(hf_dir, tmp_path / "out").identical
    assert load_config(tmp_path / "out") == model.mtpkit_config
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


def test_every_misfit_is_listed_before_anything_changes(hf_dir, tmp_path):
    import_checkpoint(hf_dir, tmp_path / "megatron")
    config = load_config(hf_dir).replace(hidden_size=64, mtp_pattern="*E*")
    model = build_model(config)
    before = model.output_layer.weight.clone()
    with pytest.raises(UserError) as error:
        load_model_weights(model, tmp_path / "megatron")
    message = str(error.value)
    assert "\n" not in message
    assert "mtp.layers.0.mtp_model_layer.layers.2.self_attention.linear_proj.weight" in message
    have, want = (parameters(c) for c in (load_config(hf_dir), config))
    misfits = sum(name in have and have[name] != shape for name, shape in want.items())
    assert (
        f" {misfits} of another shape: decoder.final_norm.weight [32] instead of [64], " in message
    )
    assert f" {len(want.keys() - have.keys())} missing: " in message
    assert torch.equal(before, model.output_layer.weight)


def test_unexpected_tensors_are_an_error_when_strict(hf_dir):
    model = build_model(load_config(hf_dir).replace(mtp_pattern="", mtp_num_depths=0))
    with pytest.raises(UserError, match=r"unexpected: mtp\."):
        load_model_weights(model, hf_dir)
    load_model_weights(model, hf_dir, strict=False)


def test_save_model_is_an_import(hf_dir, tmp_path):
    save_model(load_model(hf_dir), tmp_path / "saved", companions=hf_dir)
    import_checkpoint(hf_dir, tmp_path / "imported")
    assert compare_weights(tmp_path / "saved", tmp_path / "imported").identical
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "nemotron_h"
    )


def test_run_saves_iterations_and_resumes_the_latest(hf_dir, tmp_path):
    model = load_model(hf_dir)
    for iteration in (5, 10):
        with torch.no_grad():
            model.mtp.layers[0].eh_proj.weight.add_(1)
        state = {"model": model.sharded_state_dict()}
        save_checkpoint(
            tmp_path / "run",
            iteration,
            state,
            {"iteration": iteration},
            model.mtpkit_config,
            hf_dir,
        )
    assert latest_iteration(tmp_path / "run") == 10
    fresh = build_model(load_config(tmp_path / "run"), seed=7)
    loaded = load_checkpoint(tmp_path / "run", {"model": fresh.sharded_state_dict()})
    fresh.load_state_dict(loaded["model"])
    assert loaded["iteration"] == 10
    saved = dict(model.named_parameters())
    assert all(torch.equal(p, saved[name]) for name, p in fresh.named_parameters())


def test_resuming_lists_every_misfit(hf_dir, tmp_path):
    model = load_model(hf_dir)
    save_checkpoint(
        tmp_path / "run", 1, {"model": model.sharded_state_dict()}, {}, model.mtpkit_config
    )
    other = build_model(model.mtpkit_config.replace(mtp_pattern="*", hidden_size=64))
    with pytest.raises(
        UserError, match=r"unexpected.*layers\.1\..*of another shape: decoder\.final_norm"
    ):
        load_checkpoint(tmp_path / "run", {"model": other.sharded_state_dict()})


def test_imported_checkpoint_loads_through_megatron_itself(hf_dir, tmp_path):
    import_checkpoint(hf_dir, tmp_path / "megatron")
    model = load_model(hf_dir)
    fresh = build_model(load_config(hf_dir), seed=9)
    fresh.load_state_dict(
        load_checkpoint(tmp_path / "megatron", {"model": fresh.sharded_state_dict()})["model"]
    )
    saved = dict(model.named_parameters())
    assert all(torch.equal(p, saved[name]) for name, p in fresh.named_parameters())


@pytest.mark.parametrize("case", ["moe", "distinct_heads", "gated_rope"])
@pytest.mark.parametrize("style", ["transformer_layer", "mtp_model_layer"])
def test_heads_with_the_names_of_gpt_models(tmp_path, case, style):
    """GPTModel's heads are one transformer layer per depth; attention and MLP lie side by side in
    it."""

    def rename(tensors):
        for name in [name for name in tensors if ".mtp_model_layer." in name]:
            tensors[re.sub(r"mtp_model_layer\.layers\.[01]", style, name)] = tensors.pop(name)

    write_megatron_copy(GOLDEN / "tp1" / case, tmp_path / "megatron", rename)
    stored = MegatronReader(tmp_path / "megatron").keys
    assert f"mtp.layers.0.{style}.self_attention.linear_qkv.weight" in stored
    assert compare_weights(GOLDEN / "tp1" / case, tmp_path / "megatron").identical
    have, want = (
        load_model(directory).state_dict()
        for directory in (tmp_path / "megatron", GOLDEN / "tp1" / case)
    )
    assert all(torch.equal(have[name], value) for name, value in want.items() if value is not None)


@pytest.mark.parametrize("case", ["gated_rope", "moe"])
def test_tensors_of_a_model_in_memory(case):
    """Whole, also those that megatron-core saves in several parts: the first matrix of a gated
    MLP."""
    have = ModelTensors(load_model(GOLDEN / "tp1" / case))
    want = open_directory(GOLDEN / "tp1" / case).weights()
    assert have.tensors == want.tensors
    assert all(bits_equal(have.read(name), want.read(name)) for name in want.tensors)


def test_swapped_queries_and_keys_would_show(hf_dir, tmp_path):
    """The comparison of logits can fail: k and v exchanged."""
    from transformers import NemotronHForCausalLM

    tokens = torch.randint(96, (1, 17))
    want = NemotronHForCausalLM.from_pretrained(hf_dir)(tokens).logits.detach()

    def swap(tensors):
        k = "backbone.layers.1.mixer.k_proj.weight"
        v = "backbone.layers.1.mixer.v_proj.weight"
        tensors[k], tensors[v] = tensors[v].clone(), tensors[k].clone()

    edit(hf_dir, swap)
    model = load_model(hf_dir)
    with torch.no_grad():
        have = compute_logits(model, base_forward(model, tokens, SequenceInput())).transpose(0, 1)
    assert relative(have, want) > 1e-3


def test_a_gate_after_the_norm_of_mamba_would_show(hf_dir, monkeypatch):
    """Mamba2 gates before it norms; gated delta nets the other way round."""
    from transformers import NemotronHForCausalLM

    tokens = torch.randint(96, (1, 17))
    plain = GatedRMSNorm.forward
    want = NemotronHForCausalLM.from_pretrained(hf_dir)(tokens).logits.detach()

    def gate_last(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        # the norm undoes a factor
        return plain(self, y, torch.full_like(z, 30.0)) * torch.nn.functional.silu(z)

    errors = []
    for forward in (plain, gate_last):
        monkeypatch.setattr(GatedRMSNorm, "forward", forward)
        model = load_model(hf_dir)
        with torch.no_grad():
            have = compute_logits(model, base_forward(model, tokens, SequenceInput())).transpose(
                0, 1
            )
        errors.append(relative(have, want))
    assert errors[0] < 1e-4 and errors[1] > 1e-3


def test_saving_starts_no_process(hf_dir, tmp_path):
    """One that a killed run would leave behind."""
    before = set(psutil.Process().children(recursive=True))
    import_checkpoint(hf_dir, tmp_path / "imported")
    save_model(load_model(tmp_path / "imported"), tmp_path / "saved")
    assert set(psutil.Process().children(recursive=True)) <= before


@each(
    "changes",
    [
        {},
        dict(pattern="M*-E", mtp_pattern="*E"),
        dict(pattern="ME", mtp_pattern="ME", activation="swiglu", moe_latent_size=16),
        dict(pattern="*-", activation="swiglu", qk_layernorm=True, position_embedding_type="rope"),
        dict(
            pattern="*-",
            attention_output_gate=True,
            layernorm_zero_centered_gamma=True,
            num_query_groups=4,
        ),
        dict(pattern="*-", add_qkv_bias=True),
        dict(
            pattern="E",
            moe_router_enable_expert_bias=False,
            moe_router_score_function="softmax",
            moe_shared_expert_gate=True,
        ),
        dict(pattern="*-", tie_word_embeddings=True),
        dict(pattern="E", mtp_pattern="", mtp_num_depths=0, moe_shared_expert_intermediate_size=0),
        dict(mtp_use_repeated_layer=False, mtp_pattern="M-"),
    ],
)
def test_the_table_has_the_names_and_shapes_of_the_model(changes):
    experts = dict(
        num_moe_experts=4, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=24
    )
    config = toy_config(**experts | changes)
    targets = targets_of(build_model(config, init="none"))
    built = {name: global_shape(shards[0]) for name, shards in targets.items()}
    assert parameters(config) == built


def test_loading_draws_no_weights(hf_dir, monkeypatch):
    """torch.empty is NaN under test: what no tensor of the checkpoint filled would show."""

    def draw(*_, **__):
        raise AssertionError("weights were drawn")

    monkeypatch.setattr("mtpkit.model.build.init_weights", draw)
    model = load_model(hf_dir)
    assert all(
        is_finite(p) for p in (*model.parameters(), *model.buffers()) if p.is_floating_point()
    )
    assert all(is_finite(p) for p in load_model(GOLDEN / "tp1/gated_rope").parameters())


def test_a_parameter_without_a_tensor_is_an_error(hf_dir):
    model = build_model(load_config(hf_dir), init="none")
    whole = model.sharded_state_dict()
    model.sharded_state_dict = lambda: {
        name: part for name, part in whole.items() if "final_norm" not in name
    }
    with pytest.raises(
        MtpkitError, match=r"no tensor of a checkpoint fills decoder\.final_norm\.weight"
    ):
        load_model_weights(model, hf_dir, strict=False)


@pytest.mark.parametrize("layout", ["hf", "megatron"])
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2**20},
        {"vocab_size": 2**24},
        {"pattern": "M*-E" * 512},
        {"mtp_num_depths": 64, "mtp_use_repeated_layer": False},
        {"num_moe_experts": 2**14},
        {"kv_channels": 2**16},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_sizes_are_compared_with_the_files_before_a_model_is_built(
    hf_dir, tmp_path, monkeypatch, layout, changes
):
    """Sizes are the largest that a config may have; each refusal is quick."""
    config = load_config(hf_dir).replace(**changes)
    directory = hf_dir
    if layout == "hf":
        (hf_dir / "config.json").write_text(json.dumps(NEMOTRON_H.config_to_hf(config)))
    else:
        directory = tmp_path / "megatron"
        import_checkpoint(hf_dir, directory)
        (directory / "mtpkit.json").write_text(json.dumps(config.to_dict()))

    def build(*_, **__):
        raise AssertionError("a model was built")

    monkeypatch.setattr("mtpkit.checkpoint.load.build_model", build)
    monkeypatch.setattr("mtpkit.training.heads.build_model", build)
    settings = TrainConfig(
        model=str(directory), output=str(tmp_path / "run"), data=DataConfig(train=["x"])
    )
    actions = [
        lambda: load_model(directory),
        lambda: LLM(directory, device="cpu"),
        lambda: build_with_heads(settings, config, torch.device("cpu")),
        lambda: (import_checkpoint if layout == "hf" else export_checkpoint)(
            directory, tmp_path / "out"
        ),
    ]
    for action in actions:
        start = time.monotonic()
        with pytest.raises(UserError, match=r"tensors do not fit the model config|of one dtype"):
            action()
        assert time.monotonic() - start < 10
    assert not (tmp_path / "out").exists()
