"""The config that megatron-core copies and hands on keeps the model's own."""

import copy
import dataclasses
import pickle

import pytest
import torch
from megatron.core.transformer import TransformerConfig as MegatronTransformerConfig

from mtpkit.model.hybrid import transformer_config
from mtpkit.model.transformer_config import TransformerConfig
from tests.model.toy import CONFIG as TOY
from tests.model.toy import toy_model

CONFIG = TOY.replace(activation="swiglu")
"""The function of relu2, which chooses a kernel, cannot be pickled."""

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda config: dataclasses.replace(config, hidden_size=2 * config.hidden_size),
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_config_of_the_model(name):
    made = COPIES[name](transformer_config(CONFIG, torch.float32))
    assert type(made) is TransformerConfig and made.mtpkit == CONFIG
    assert made.hidden_size == CONFIG.hidden_size * (2 if name == "replace" else 1)


def test_it_is_megatrons_config_with_one_more_field():
    """Whose `__post_init__` has run."""
    made = transformer_config(CONFIG, torch.float32)
    own = {field.name for field in dataclasses.fields(made)}
    assert own - {field.name for field in dataclasses.fields(MegatronTransformerConfig)} == {
        "mtpkit"
    }
    values = {name: getattr(made, name) for name in own - {"mtpkit"}}
    assert callable(made.init_method) and values == vars(MegatronTransformerConfig(**values))


def test_a_config_without_that_of_the_model_is_refused():
    with pytest.raises(TypeError, match="mtpkit"):
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)


def test_all_modules_of_a_model_have_it():
    configs = [module.config for module in toy_model().modules() if hasattr(module, "config")]
    assert configs and all(isinstance(config, TransformerConfig) for config in configs)
