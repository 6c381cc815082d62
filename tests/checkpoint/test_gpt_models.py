"""Models that megatron-core's `GPTModel` saved, with attention and MLP in one layer: base and heads
compute what theirs do, at whatever parallelism they were saved."""

import pytest
import torch

from mtpkit.checkpoint import load_config, load_model
from mtpkit.checkpoint.convert import export_checkpoint
from mtpkit.checkpoint.directory import open_directory
from mtpkit.checkpoint.layouts.megatron import FIXED, config_from_megatron, hybrid_names
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, normed_states, unroll_depths
from tests.checkpoint.builders import GOLDEN, write_megatron_copy
from tests.checkpoint.gpt_models import (
    CASES,
    EXPERTS,
    LENGTH,
    PLAIN,
    VOCAB,
    gpt_model,
    gpt_states,
    save_gpt,
)
from tests.kernels.recurrence import relative
from tests.ranks import run_ranks
from tests.shared import each

TOLERANCE = 1e-5


@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_megatron(case, tmp_path):
    settings, pattern = CASES[case]
    theirs = gpt_model(settings)
    save_gpt(theirs, settings, tmp_path / "gpt")
    config = load_config(tmp_path / "gpt")
    assert config.hybrid_layer_pattern == pattern + pattern[-3:] * (settings["mtp_num_layers"] - 1)
    model = load_model(tmp_path / "gpt")
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.no_grad():
        hidden = base_forward(model, ids, SequenceInput())
        states = [normed_states(model, hidden)]
        states += unroll_depths(model, hidden, ids, config.mtp.num_depths, attention="per_depth")
    wanted = gpt_states(theirs, ids)
    assert len(wanted) == len(states)
    for depth, (have, want) in enumerate(zip(states, wanted, strict=True)):
        assert relative(have[: LENGTH - depth], want[: LENGTH - depth]) < TOLERANCE, depth
    assert torch.equal(model.output_layer.weight, theirs.output_layer.weight)


def save_part(rank, settings, sizes, path) -> None:
    save_gpt(gpt_model(settings, *sizes), settings, path)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(
    "case", ["qkv bias", "experts everywhere", "some experts", "latent attention"]
)
def test_two_ranks_save_what_one_does(case, sizes, tmp_path):
    settings = CASES[case][0] | dict(num_layers=4)
    settings |= dict(moe_layer_freq=[0, 1, 1, 0]) if case == "latent attention" else {}
    save_gpt(gpt_model(settings), settings, tmp_path / "one")
    run_ranks(save_part, settings, sizes, tmp_path / "two")
    one, two = (open_directory(tmp_path / name).weights(fit_config=True) for name in ("one", "two"))
    assert one.tensors == two.tensors
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.tensors)


def test_a_model_of_a_family_is_exported(tmp_path):
    """To weights from which transformers computes Megatron's logits."""
    from transformers import AutoModelForCausalLM

    settings = (
        PLAIN | EXPERTS | dict(moe_layer_freq=[0, 1, 1], add_qkv_bias=True, rotary_percent=0.5)
    )
    settings |= dict(moe_shared_expert_intermediate_size=24, qk_layernorm=True)
    theirs = gpt_model(settings)
    save_gpt(theirs, settings, tmp_path / "gpt")
    export_checkpoint(tmp_path / "gpt", tmp_path / "hf", family="glm4_moe")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.no_grad():
        want = theirs.output_layer(gpt_states(theirs, ids)[0])[0].transpose(0, 1)
        assert relative(hf(ids).logits, want) < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        (dict(num_layers=4, linear_attention_freq=4), "G-G-G-*-"),
        (dict(num_layers=3, linear_attention_freq=[1, 0, 1]), "G-*-G-"),
        (
            dict(num_layers=4, linear_attention_freq=2, num_moe_experts=4, moe_layer_freq=3),
            "GE*-G-*E",
        ),
    ],
)
def test_patterns_with_gated_delta_nets(settings, pattern):
    sizes = {
        f"linear_{one}": 4
        for one in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    }
    variant = dict(experimental_attention_variant="gated_delta_net", linear_conv_kernel_dim=4)
    found = config_from_megatron(base_settings() | sizes | variant | settings)
    assert found.pattern == pattern and found.mtp.pattern == pattern[-2:]


def base_settings() -> dict:
    settings = dict(
        hidden_size=32, num_attention_heads=4, vocab_size=64, mtp_num_layers=1, swiglu=True
    )
    return settings | dict(max_position_embeddings=32, ffn_hidden_size=48, moe_ffn_hidden_size=16)


@each(
    ("settings", "said"),
    [
        (dict(), "hybrid_layer_pattern is missing, and num_layers"),
        (
            dict(num_layers=2, num_experts=4, moe_layer_freq=[1]),
            r"moe_layer_freq \[1\] is neither a number from 1",
        ),
        (dict(num_layers=2, num_experts=4, moe_layer_freq=0), "moe_layer_freq 0 is neither"),
        (
            dict(num_layers=2, num_experts=4, moe_layer_freq=[2, 0]),
            r"moe_layer_freq \[2, 0\] is neither",
        ),
        (
            dict(num_layers=2, experimental_attention_variant="dsa"),
            "experimental_attention_variant 'dsa' is not",
        ),
        (
            dict(num_layers=2, experimental_attention_variant="gated_delta_net"),
            "linear_attention_freq None is neither",
        ),
        (dict(num_layers=10**18), "num_layers 1000000000000000000 must be from 1 to 1024"),
    ],
)
def test_settings_that_make_no_pattern(settings, said):
    with pytest.raises(UserError, match=said):
        config_from_megatron(base_settings() | settings)


@each("key", FIXED)
def test_settings_that_change_what_is_computed_are_refused(key):
    """Of models whose other settings make a config."""
    config_from_megatron(base_settings() | dict(num_layers=2, **{key: FIXED[key]}))
    other = {bool: True, str: "other"}.get(type(FIXED[key]), 3)
    with pytest.raises(UserError, match=f"{key} .* is not supported"):
        config_from_megatron(
            base_settings()
            | dict(num_layers=2, **{key: not FIXED[key] if FIXED[key] is True else other})
        )


@pytest.mark.parametrize(
    "settings",
    [
        dict(is_hybrid_model=True),
        dict(hybrid_mlp_ratio=0.4),
        dict(mtp_hybrid_override_pattern="*-"),
    ],
)
def test_hybrid_models_need_their_pattern(settings):
    with pytest.raises(
        UserError, match=f"hybrid_layer_pattern is missing, though {next(iter(settings))} is set"
    ):
        config_from_megatron(base_settings() | dict(num_layers=2) | settings)


def test_names_of_several_layers_in_one_tensor():
    """And of their experts. A base of `HybridModel` keeps what its layers are called."""
    shapes = {
        "decoder.final_layernorm.weight": (4,),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 3, 8, 4),
        "decoder.layers.self_attention.linear_proj.weight": (2, 4, 4),
        "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight": (2, 8, 4),
    }
    experts, projections, mtp = list(shapes)[1:]
    assert sorted(hybrid_names(shapes)) == [
        ("decoder.final_norm.weight", "decoder.final_layernorm.weight", ()),
        ("decoder.layers.0.self_attention.linear_proj.weight", projections, (0,)),
        *(
            (f"decoder.layers.1.mlp.experts.experts.linear_fc1.weight[{n}]", experts, (0, n))
            for n in range(3)
        ),
        ("decoder.layers.2.self_attention.linear_proj.weight", projections, (1,)),
        *(
            (f"decoder.layers.3.mlp.experts.experts.linear_fc1.weight[{n}]", experts, (1, n))
            for n in range(3)
        ),
        *((f"{MTP_FC1}[{n}]", mtp, (n,)) for n in range(2)),
    ]
    hybrid = {"decoder.layers.3.mlp.linear_fc1.weight": (8, 4), "decoder.final_norm.weight": (4,)}
    assert list(hybrid_names(hybrid)) == [(key, key, ()) for key in hybrid]


def test_a_tensor_under_two_names_is_refused(tmp_path):
    def add(tensors) -> None:
        first = next(name for name in tensors if name.endswith("mlp.linear_fc1.weight"))
        tensors[first.replace("mlp.linear_fc1", "pre_mlp_layernorm")] = torch.ones(32)

    write_megatron_copy(GOLDEN / "tp1" / "mamba_attention_mlp", tmp_path / "megatron", add)
    with pytest.raises(
        UserError, match=r"pre_mlp_layernorm\..* are two names of one tensor; leave one out"
    ):
        open_directory(tmp_path / "megatron").weights()


MTP_FC1 = "mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.experts.linear_fc1.weight"
