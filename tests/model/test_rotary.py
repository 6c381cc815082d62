"""Frequencies and scales of rotary embedding against Megatron's and transformers' own."""

import pytest
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding

from mtpkit.model.layers.rotary import yarn_frequencies, yarn_scale

CASES = [
    (64, 10000.0, 40.0, 4096, 32.0, 1.0),
    (64, 50000.0, 4.0, 8192, 32.0, 1.0),
    (6, 10000.0, 8.0, 64, 8.0, 0.5),
    (10, 100.0, 2.5, 5, 2.0, 0.2),
    (2, 10.0, 3.0, 100, 4.0, 1.0),
]


@pytest.mark.parametrize(("width", "base", "factor", "context", "fast", "slow"), CASES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 0.0), (0.7, 0.4)])
def test_yarn_is_that_of_megatron(width, base, factor, context, fast, slow, scales, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    theirs = YarnRotaryEmbedding(
        width,
        rotary_base=base,
        use_cpu_initialization=True,
        scaling_factor=factor,
        original_max_position_embeddings=context,
        beta_fast=fast,
        beta_slow=slow,
        mscale=scales[0],
        mscale_all_dim=scales[1],
    )
    angles, concentration = theirs.get_emb(9)
    turns = yarn_frequencies(width, base, factor, context, fast, slow)
    want = torch.arange(9.0)[:, None] * turns
    torch.testing.assert_close(torch.cat([want, want], -1), angles[:, 0, 0], rtol=1e-6, atol=1e-6)
    assert yarn_scale(factor, scales[0]) / yarn_scale(factor, scales[1]) == pytest.approx(
        concentration
    )


@pytest.mark.parametrize(("width", "base", "factor", "context", "fast", "slow"), CASES[:4])
def test_yarn_is_that_of_transformers(width, base, factor, context, fast, slow):
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = dict(
        rope_type="yarn", factor=factor, original_max_position_embeddings=context, rope_theta=base
    )
    config = DeepseekV3Config(
        qk_rope_head_dim=width,
        rope_parameters=yarn | dict(beta_fast=fast, beta_slow=slow, mscale=0.7, mscale_all_dim=0.4),
    )
    theirs, concentration = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    torch.testing.assert_close(
        yarn_frequencies(width, base, factor, context, fast, slow), theirs, rtol=1e-6, atol=0
    )
    assert yarn_scale(factor, 0.7) / yarn_scale(factor, 0.4) == pytest.approx(concentration)
