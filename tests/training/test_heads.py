"""How new heads start."""

from dataclasses import replace

import pytest
import torch

from mtpkit.errors import UserError
from mtpkit.training import heads as heads_module
from mtpkit.training.config import DataConfig, HeadsConfig, ParallelConfig, TrainConfig
from mtpkit.training.heads import build_with_heads, resolve


def settle(toy_base, **heads):
    return resolve(TrainConfig(str(toy_base), "unused", DataConfig(train=("unused",)), HeadsConfig(**heads)))


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


def test_every_split_reaches_the_model(toy_base, monkeypatch):
    found = {}
    config, model_config = settle(toy_base)
    parallel = ParallelConfig(tensor=2, pipeline=3, expert=5, balance="time")
    monkeypatch.setattr(heads_module, "build_model", lambda *_, **given: found.update(given))
    monkeypatch.setattr(heads_module, "load_model_weights", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build_with_heads(replace(config, parallel=parallel), model_config, torch.device("cpu"))
    names = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "balance", "sequence_parallel")
    assert [found[name] for name in names] == [2, 3, 5, "time", True]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [({}, True), ({"dtype": "bfloat16"}, False), ({"matmul_precision": "high"}, False), ({"backend": "local"}, False)],
)
def test_tf32_of_transformer_engine_is_told(toy_base, monkeypatch, caplog, settings, warns):
    monkeypatch.setattr(heads_module, "resolve_backend", lambda name: "te" if name == "auto" else name)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    config = TrainConfig(str(toy_base), "unused", DataConfig(train=("unused",)), **settings)
    resolve(config)
    assert ("Transformer Engine multiplies fp32 in TF32" in caplog.text) == warns
    caplog.clear()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    resolve(config)
    assert not caplog.text


def test_new_heads_leave_the_base_as_it_is(toy_base):
    models = [build_with_heads(*settle(toy_base, init=init), torch.device("cpu")) for init in ("fresh", "base")]
    fresh, base = (dict(model.named_parameters()) for model in models)
    differ = {name for name in fresh if not torch.equal(fresh[name], base[name])}
    assert differ and all(name.startswith("mtp.") for name in differ)


def test_a_kind_that_the_base_lacks_is_refused(toy_base):
    with pytest.raises(UserError, match=r"no 'E'; set heads\.init=fresh"):
        settle(toy_base, init="base", pattern="*E")
