"""FLOPs from a config against counts from the model itself and by hand."""

import pytest

from mtpkit.bench.sizes import NEMOTRON_H_8B
from mtpkit.model.flops import step_flops
from mtpkit.model.kinds import KINDS
from tests.training.toy import CONFIG, toy_model

MOE = dict(num_moe_experts=4, moe_ffn_hidden_size=64, moe_router_topk=1, hidden_size=64)
LATENT = dict(moe_latent_size=32, moe_shared_expert_intermediate_size=48, moe_router_topk=3)
SHARED = dict(activation="swiglu", moe_shared_expert_intermediate_size=48)


@pytest.mark.parametrize(
    ("changes", "flops"),
    [
        ({}, 181_272),
        (dict(mtp_use_repeated_layer=False), 181_272),
        (dict(mtp_pattern="M*"), 208_560),
        (dict(mtp_pattern="", mtp_num_depths=0), 30_936),
        (dict(tie_word_embeddings=True), 181_272),
        (MOE | dict(pattern="*E"), 422_408),
        (MOE | dict(pattern="ME*-", mtp_pattern="*E", moe_router_topk=2), 657_960),
        (MOE | LATENT | dict(pattern="ME", mtp_pattern="E*"), 756_008),
        (MOE | SHARED | dict(pattern="M-*E", mtp_pattern="*-E"), 933_544),
    ],
)
def test_flops_are_those_that_were_counted_from_checkpoints(changes, flops):
    assert step_flops(CONFIG.replace(**changes), 3) == flops


@pytest.mark.parametrize(
    "changes",
    [{}, dict(mtp_use_repeated_layer=False), MOE | LATENT | dict(pattern="ME", mtp_pattern="E*")],
)
@pytest.mark.parametrize("base_layers", [True, False])
def test_every_weight_counts_as_often_as_a_token_uses_it(changes, base_layers):
    model = toy_model(**changes)
    config = model.mtpkit_config
    share = config.moe.router_topk / config.moe.num_experts if "E" in config.pattern else 1
    counts = {"decoder": 0.0, "mtp": 0.0}
    for name, tensor in model.state_dict().items():
        part = name.partition(".")[0]
        if part in counts and tensor is not None:
            counts[part] += tensor.numel() * (share if ".experts." in name else 1)
    applied = 3 if config.mtp.repeated else 1
    lm_head = config.vocab_size * config.hidden_size
    want = 2 * counts["decoder"] * base_layers + 6 * applied * counts["mtp"] + 4 * 3 * lm_head
    assert step_flops(config, 3, base_layers) == want


def test_the_8b_shape_takes_25_gflop_per_token():
    """Counted by matrices; norms and convolutions add a thousandth."""
    config = NEMOTRON_H_8B.replace(mtp_pattern="*-")
    base = sum(KINDS[letter].matrices(config).used for letter in config.pattern)
    head = sum(KINDS[letter].matrices(config).used for letter in "*-") + 2 * config.hidden_size**2
    total = 2 * base + 6 * 3 * head + 4 * 3 * config.vocab_size * config.hidden_size
    assert total == pytest.approx(25.0e9, rel=2e-3)
    assert total < step_flops(config, 3) < 1.001 * total
