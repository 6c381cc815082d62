"""Published heads of Nemotron 3: their hidden states at every depth against a reference, and traps
that it sees."""

import pytest
import torch
from torch import Tensor

from mtpkit.checkpoint import load_model
from mtpkit.checkpoint.convert import import_checkpoint
from mtpkit.model import unroll_depths
from tests.checkpoint.builders import add_heads, write_base
from tests.checkpoint.nemotron_oracle import Heads
from tests.kernels.recurrence import relative

DEPTHS = 3
IDS = torch.randint(96, (1, 11), generator=torch.Generator().manual_seed(4))
HIDDEN = torch.randn(11, 32, generator=torch.Generator().manual_seed(5))
CASES = {
    "super": ("*E", dict(moe_latent_size=11, n_routed_experts=7, num_experts_per_tok=3), 1),
    "nano": (
        "*E",
        dict(num_attention_heads=6, num_key_value_heads=3, head_dim=6, layer_norm_epsilon=1e-3),
        1,
    ),
    "groups": ("*E", dict(n_routed_experts=9, n_group=3, topk_group=2, num_experts_per_tok=5), 1),
    "raw": ("E*", dict(moe_latent_size=40, norm_topk_prob=False, routed_scaling_factor=0.7), 1),
    "dense": ("*-", dict(intermediate_size=35, num_key_value_heads=1), 1),
    "distinct": ("*E", dict(moe_latent_size=16), DEPTHS),
}


def write(directory, pattern, changes, physical=1):
    write_base(directory, "M", **changes)
    add_heads(directory, pattern, physical, depths=DEPTHS, repeated=physical == 1)


@torch.no_grad()
def error_of_depths(model, heads: Heads) -> float:
    """Worst relative error of g^1, g^2, .. from any hidden states of a base."""
    states = unroll_depths(model, HIDDEN[:, None], IDS, DEPTHS, attention="per_depth")
    want = HIDDEN.double()
    errors = []
    for k, state in enumerate(states, 1):
        count = IDS.shape[1] - k
        want = heads.depth(k, want[:count], IDS[0, k:])
        errors.append(relative(state[:count, 0], want))
    return max(errors)


@pytest.mark.parametrize("case", CASES)
def test_heads_are_those_of_the_reference(tmp_path, case):
    hf = tmp_path / "hf"
    write(hf, *CASES[case])
    import_checkpoint(hf, tmp_path / "megatron")
    for directory in (hf, tmp_path / "megatron"):
        assert error_of_depths(load_model(directory), Heads(hf)) < 1e-5


class Swapped(Heads):
    """The hidden state comes first."""

    def joined(self, first: int, embedding: Tensor, previous: Tensor) -> Tensor:
        return super().joined(first, embedding, previous).roll(previous.shape[-1], -1)


class Biased(Heads):
    """The bias that chooses counts in the weights, too."""

    def weighed(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias


class FirstDepth(Heads):
    """Every depth runs the first one's layers."""

    def depth(self, k: int, previous: Tensor, tokens: Tensor) -> Tensor:
        return super().depth(1, previous, tokens)


class NarrowShared(Heads):
    """The shared expert's output goes through the latent width, as those of the routed experts
    do."""

    def network(self, name: str, x: Tensor) -> Tensor:
        out = super().network(name, x)
        if not name.endswith("shared_experts"):
            return out
        return self.linear(name.replace("shared_experts", "fc2_latent_proj"), out[:, :16])


@pytest.fixture(scope="module")
def distinct(tmp_path_factory):
    """Directory and model."""
    directory = tmp_path_factory.mktemp("nemotron")
    write(directory, *CASES["distinct"])
    return directory, load_model(directory)


@pytest.mark.parametrize("trap", [Swapped, Biased, FirstDepth, NarrowShared])
def test_traps_would_be_seen(distinct, trap):
    directory, model = distinct
    assert error_of_depths(model, Heads(directory)) < 1e-5
    assert error_of_depths(model, trap(directory)) > 1e-3
