"""Megatron's own checkpoints at one process: the independent oracle, pipeline-parallel files,
rotary attention."""

import pytest
import torch
from safetensors.torch import load_file

from mtpkit.checkpoint import load_model
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from tests.checkpoint.builders import GOLDEN
from tests.kernels.recurrence import relative
from tests.model.oracle import Oracle

LENGTH = 24
TOLERANCE = 1e-5
IDS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def run(case: str, ids: torch.Tensor, device: str = "cpu"):
    """Logits [b, s, v] and h, g^1, g^2, .. each [s, b, h]."""
    model = load_model(GOLDEN / case, device=device)
    ids = ids.to(device)
    hidden = base_forward(model, ids, SequenceInput())
    depths = unroll_depths(
        model, hidden, ids, model.mtpkit_config.mtp.num_depths, attention="per_depth"
    )
    return compute_logits(model, hidden).transpose(0, 1).cpu(), [x.cpu() for x in (hidden, *depths)]


@pytest.mark.parametrize(
    "case", ["tp1/gated_rope", "tp1/mamba_attention_mlp", "tp2/moe", "tp1/mla", "tp1/gdn"]
)
def test_golden_logits_and_depths(case, device):
    golden = load_file(GOLDEN / case / "golden.safetensors")
    logits, states = run(case, golden["ids"], device)
    assert relative(logits, golden["logits"]) < TOLERANCE
    # Sequence-parallel ranks hold a part of the sequence each: then this is the first rank's.
    for k, want in enumerate(golden["mtp_chain_sbh"].chunk(len(states))):
        count = min(len(want), LENGTH - k)
        assert relative(states[k][:count], want[:count]) < TOLERANCE, k


@pytest.mark.parametrize(
    "case", ["tp1/mamba_attention_mlp", "tp1/distinct_heads", "tp1/gated_rope"]
)
def test_the_oracle_agrees_with_golden(case):
    golden = load_file(GOLDEN / case / "golden.safetensors")
    oracle = Oracle.of(GOLDEN / case)
    ids = golden["ids"]
    state = oracle.hidden(ids)
    assert relative(oracle.logits(state), golden["logits"]) < TOLERANCE
    for k, want in enumerate(golden["mtp_chain_sbh"].chunk(1 + len(oracle.heads))):
        state = oracle.depth(k, state, ids) if k else state
        assert relative(state.transpose(0, 1), want[: LENGTH - k]) < TOLERANCE, k


@pytest.mark.parametrize(
    "case", ["pp2/mamba_attention_mlp", "tp1/mamba_attention_mlp", "tp1/distinct_heads"]
)
def test_the_model_agrees_with_the_oracle(case):
    logits, states = run(case, IDS)
    oracle = Oracle.of(GOLDEN / case)
    state = oracle.hidden(IDS)
    assert relative(logits, oracle.logits(state)) < TOLERANCE
    for k, have in enumerate(states):
        state = oracle.depth(k, state, IDS) if k else state
        assert relative(have[: LENGTH - k], state.transpose(0, 1)) < TOLERANCE, k


def test_the_oracle_sees_a_token_read_too_early():
    oracle = Oracle.of(GOLDEN / "pp2/mamba_attention_mlp")
    hidden = oracle.hidden(IDS)
    right = oracle.depth(1, hidden, IDS)
    shifted = oracle.depth(1, hidden, IDS.roll(1, 1))
    assert relative(shifted, right) > 1e-2
