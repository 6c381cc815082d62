"""Initial values of new heads."""

import re
from dataclasses import replace

import pytest
import torch

from mtpkit.checkpoint import load_config, save_model
from mtpkit.engine.requests.options import EngineOptions
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import SequenceInput, base_forward
from mtpkit.model.layers.moe import MegatronMoELayer, MoELayer
from mtpkit.training import heads as heads_module
from mtpkit.training.config.settings import DataConfig, HeadsConfig, ParallelConfig, TrainConfig
from mtpkit.training.heads import (
    build_with_heads,
    check_unchanged,
    fingerprint,
    freeze_base,
    resolve,
)
from tests.kernels.recurrence import relative
from tests.training.toy import toy_model

SIZES = {
    "-": {"ffn_hidden_size": 0},
    "E": {"num_moe_experts": 0, "moe_ffn_hidden_size": 0},
    "*": {"num_attention_heads": 0},
}
"""What the config of a base without such layers does not have."""


@pytest.fixture
def make_base(tmp_path):
    """A base of a pattern, whose config has no sizes of other layers."""

    def make(pattern, **changes):
        changes = {
            "mtp_pattern": "",
            "mtp_num_depths": 0,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 16,
        } | changes
        absent = {
            field: size
            for letter in SIZES
            if letter not in pattern
            for field, size in SIZES[letter].items()
        }
        path = tmp_path / "base"
        if not path.exists():
            save_model(toy_model(pattern=pattern, **(changes | absent)), path)
        return path

    return make


def settle(toy_base, **heads):
    data = DataConfig(train=("unused",))
    return resolve(
        TrainConfig(str(toy_base), "unused", data, HeadsConfig(**heads), dtype="float32")
    )


def test_heads_from_the_base_start_as_its_last_layers(toy_base):
    model = build_with_heads(*settle(toy_base, init="base", pattern="-*"), torch.device("cpu"))
    (head,) = model.mtp.layers
    mlp, attention = head.mtp_model_layer.layers
    for copy, source in ((attention, model.decoder.layers[1]), (mlp, model.decoder.layers[2])):
        assert copy.state_dict().keys() == source.state_dict().keys()
        for name, value in source.named_parameters():
            assert torch.equal(copy.get_parameter(name), value)
    embedding, hidden = head.eh_proj.weight.detach().chunk(2, dim=1)
    for half in (embedding, hidden):
        assert (half.diagonal() - 1).abs().mean() < 0.3 < half.diagonal().mean()
    assert torch.equal(head.final_layernorm.weight, model.decoder.final_norm.weight)


def test_heads_of_a_mixture_may_have_an_mlp_of_any_width(make_base, tmp_path):
    """In the file, too, and beside a base whose config has no such width."""
    base = make_base("*EM")
    config, found = settle(base, init="fresh", pattern="*-", ffn_hidden_size=40)
    assert found.value("ffn_hidden_size") == 40 and found.mtp.pattern == "*-"
    model = build_with_heads(config, found, torch.device("cpu"))
    (head,) = model.mtp.layers
    assert head.mtp_model_layer.layers[1].mlp.linear_fc1.weight.shape[0] in (40, 80)
    save_model(model, tmp_path / "heads")
    again = load_config(tmp_path / "heads")
    assert again.value("ffn_hidden_size") == 40
    # Heads that exist keep their width.
    config, kept = settle(tmp_path / "heads", num_depths=again.mtp.num_depths)
    assert kept == again and config.heads.init == "checkpoint"


@pytest.mark.parametrize(
    ("pattern", "heads", "message"),
    [
        ("*EM", dict(pattern="*E"), "is for MLPs"),
        ("*E-", dict(pattern="*-", init="fresh"), "has MLPs of width"),
    ],
)
def test_widths_of_mlps_that_heads_cannot_have_are_refused(make_base, pattern, heads, message):
    with pytest.raises(UserError, match=rf"heads\.ffn_hidden_size=77.* {message}"):
        settle(make_base(pattern), ffn_hidden_size=77, **heads)


EXPERTS = dict(
    num_moe_experts=6,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    init_std=0.3,
)


def test_experts_of_a_frozen_base_run_together(device, monkeypatch):
    """To the same states as one by one; the heads' experts, which learn, do not."""
    model = toy_model(pattern="*EM-E", mtp_pattern="*E", **EXPERTS).to(device)
    ids = torch.randint(24, (2, 40), device=device)
    with torch.no_grad():
        want = base_forward(model, ids, SequenceInput())
    freeze_base(model)
    alone = []
    monkeypatch.setattr(
        MegatronMoELayer, "forward", lambda self, *args, **kwargs: alone.append(self)
    )
    with torch.no_grad():
        assert relative(base_forward(model, ids, SequenceInput()), want) < 1e-5
    assert not alone
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert [layer.is_stacked for layer in layers] == [True, True, False]


def test_every_split_reaches_the_model(toy_base, monkeypatch):
    found = {}
    config, model_config = settle(toy_base)
    parallel = ParallelConfig(tensor=2, pipeline=3, expert=5, balance="time")
    monkeypatch.setattr(heads_module, "build_model", lambda *_, **given: found.update(given))
    monkeypatch.setattr(heads_module.StoredModel, "fill", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_with_heads(replace(config, parallel=parallel), model_config, torch.device("cpu"))
    names = (
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "balance",
        "sequence_parallel",
    )
    assert [found[name] for name in names] == [2, 3, 5, "time", True]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, False),
        ({"matmul_precision": "high"}, False),
        ({"backend": "local"}, False),
    ],
)
def test_tf32_of_transformer_engine_is_told(toy_base, monkeypatch, caplog, settings, warns):
    monkeypatch.setattr(
        heads_module, "resolve_backend", lambda name: "te" if name == "auto" else name
    )
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    config = TrainConfig(
        str(toy_base), "unused", DataConfig(train=("unused",)), **{"dtype": "float32"} | settings
    )
    resolve(config)
    assert ("Transformer Engine multiplies fp32 in TF32" in caplog.text) == warns
    caplog.clear()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    resolve(config)
    assert not caplog.text


@pytest.mark.parametrize(
    ("asked", "device", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_the_dtype_is_by_default_that_of_the_device(toy_base, monkeypatch, asked, device, dtype):
    """As the engine has it."""
    monkeypatch.setattr(heads_module, "default_device", lambda: torch.device(device))
    config = TrainConfig(str(toy_base), "unused", DataConfig(train=("unused",)))
    assert config.dtype == "auto" == EngineOptions.dtype
    assert resolve(replace(config, dtype=asked))[0].dtype == dtype


def test_a_base_in_fp8_takes_the_default_dtype_where_that_is_bfloat16(toy_base, monkeypatch):
    config = TrainConfig(str(toy_base), "unused", DataConfig(train=("unused",)), base_fp8=True)
    monkeypatch.setattr(heads_module, "default_device", lambda: torch.device("cuda"))
    assert resolve(config)[0].dtype == "bfloat16"
    monkeypatch.setattr(heads_module, "default_device", lambda: torch.device("cpu"))
    with pytest.raises(UserError, match="base_fp8 needs dtype=bfloat16: set it, or base_fp8=false"):
        resolve(config)


def test_new_heads_leave_the_base_as_it_is(toy_base):
    models = [
        build_with_heads(*settle(toy_base, init=init), torch.device("cpu"))
        for init in ("fresh", "base")
    ]
    fresh, base = (dict(model.named_parameters()) for model in models)
    differ = {name for name in fresh if not torch.equal(fresh[name], base[name])}
    assert differ and all(name.startswith("mtp.") for name in differ)


def test_a_kind_that_the_base_lacks_is_refused(toy_base):
    with pytest.raises(
        UserError, match=r"has 'E' \(mixture of experts\), but .*; set heads\.pattern=auto$"
    ):
        settle(toy_base, init="base", pattern="*E")


@pytest.mark.parametrize(
    ("pattern", "default"),
    [
        ("M*-", "*"),
        ("ME*EME", "*E"),
        ("M*-E", "*E"),
        ("M-", "M-"),
        ("M*", "*"),
        ("MM", "M"),
        ("--", "-"),
        ("E", "E"),
    ],
)
def test_new_heads_follow_the_base(make_base, pattern, default):
    """Each can be built, be copied from the base and, where the base has attention, be served."""
    for init in ("auto", "base"):
        config, model_config = settle(
            make_base(pattern, moe_shared_expert_intermediate_size=16), init=init
        )
        assert config.heads.pattern == model_config.mtp.pattern == default
        build_with_heads(config, model_config, torch.device("cpu"))


@pytest.mark.parametrize("init", ["fresh", "base"])
@pytest.mark.parametrize(
    ("pattern", "heads"),
    [("ME*EME", "*-"), ("ME*EME", "-"), ("MM-", "*E"), ("M*", "*-"), ("M*-", "Q"), ("M*-", "")],
)
def test_the_advice_about_a_pattern_leads_to_heads(make_base, init, pattern, heads):
    """Messages name the settings' keys, and following them works."""
    base = make_base(pattern)
    with pytest.raises(UserError) as error:
        settle(base, init=init, pattern=heads)
    said = str(error.value)
    assert (
        said.startswith(("heads.pattern=", "heads.init="))
        and "hidden_size" not in said
        and len(said) < 400
    )
    build_with_heads(*settle(base, **{"init": init, **advised(said)}), torch.device("cpu"))


def advised(message):
    """Settings of the heads that a message says to set, the others being as they are by default."""
    found = dict(re.findall(r"heads\.(\w+)=(\w+)", message.rpartition("set ")[2]))
    return {
        key: {"true": True, "false": False, "3": 3}.get(value, value)
        for key, value in found.items()
    }


@pytest.mark.parametrize(
    "own", [{"mtp_pattern": "-*"}, {"mtp_pattern": "-", "mtp_use_repeated_layer": False}]
)
def test_heads_that_are_there_may_start_anew(make_base, own):
    base = make_base("M*-", mtp_num_depths=3, **own)
    assert settle(base)[0].heads.init == "checkpoint"
    with pytest.raises(
        UserError, match=r"can start from new weights but not change; set heads\.pattern=auto"
    ) as error:
        settle(base, init="fresh", pattern="*", num_depths=2)
    assert (
        settle(base, init="fresh", **advised(str(error.value)))[1].mtp.pattern == own["mtp_pattern"]
    )


def test_any_change_of_what_is_frozen_is_named():
    """The base, buffers included, and the biases of the heads' routers, which have no gradient."""
    experts = dict(num_moe_experts=4, moe_ffn_hidden_size=16)
    model = toy_model(pattern="M*-E", mtp_pattern="*E", **experts)
    before = fingerprint(model)
    frozen = {name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    frozen -= freeze_base(model).keys()
    assert before.keys() == frozen and any(
        name.startswith("mtp.") and "expert_bias" in name for name in frozen
    )
    with torch.no_grad():
        for parameter in freeze_base(model).values():
            parameter.add_(1)
        check_unchanged(model, before)
        for name in sorted(frozen):
            tensor = model.state_dict()[name]
            was = tensor.clone()
            tensor.flatten()[-1] += 0.5
            with pytest.raises(
                MtpkitError, match=f"changed tensors of the frozen base: {re.escape(name)}$"
            ):
                check_unchanged(model, before)
            tensor.copy_(was)
    check_unchanged(model, before)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_frozen_tensor_that_comes_or_goes_is_named(lost):
    model = toy_model()
    before = fingerprint(model)
    if lost == "before":
        before.pop("embedding.word_embeddings.weight")
    else:
        before["decoder.layers.9.weight"] = 1
    name = "embedding.word_embeddings.weight" if lost == "before" else "decoder.layers.9.weight"
    with pytest.raises(MtpkitError, match=re.escape(name)):
        check_unchanged(model, before)


def test_heads_copy_the_last_layer_of_a_kind(make_base):
    model = build_with_heads(
        *settle(make_base("*-M*-M"), init="base", pattern="*-"), torch.device("cpu")
    )
    (head,) = model.mtp.layers
    for place, number in enumerate((3, 4)):
        copy = head.mtp_model_layer.layers[place]
        source = model.decoder.layers[number]
        assert all(
            torch.equal(copy.get_parameter(name), value)
            for name, value in source.named_parameters()
        )


def test_distinct_heads_cannot_become_one_block(make_base):
    base = make_base("M*-", mtp_pattern="*", mtp_num_depths=2, mtp_use_repeated_layer=False)
    with pytest.raises(UserError, match=r"heads\.repeated=false and heads\.num_depths=2"):
        settle(base, init="fresh", pattern="*", num_depths=2)
    assert (
        settle(base, init="fresh", pattern="*", num_depths=2, repeated=False)[1].mtp.num_layers == 2
    )


def test_heads_that_a_checkpoint_lacks_are_not_made_up(make_base):
    config, model = settle(make_base("M*-"), init="fresh", pattern="*-")
    with pytest.raises(UserError, match="mtp"):
        build_with_heads(
            replace(config, heads=replace(config.heads, init="checkpoint")),
            model,
            torch.device("cpu"),
        )
