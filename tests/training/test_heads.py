"""How new heads start."""

import pytest
import torch

from mtpkit.errors import UserError
from mtpkit.training.config import DataConfig, HeadsConfig, TrainConfig
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


def test_new_heads_leave_the_base_as_it_is(toy_base):
    models = [build_with_heads(*settle(toy_base, init=init), torch.device("cpu")) for init in ("fresh", "base")]
    fresh, base = (dict(model.named_parameters()) for model in models)
    differ = {name for name in fresh if not torch.equal(fresh[name], base[name])}
    assert differ and all(name.startswith("mtp.") for name in differ)


def test_a_kind_that_the_base_lacks_is_refused(toy_base):
    with pytest.raises(UserError, match=r"no 'E'; set heads\.init=fresh"):
        settle(toy_base, init="base", pattern="*E")
