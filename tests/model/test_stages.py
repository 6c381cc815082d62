"""Which layers pipeline stages get, against all ways to deal them."""

import itertools
import random

import pytest

from mtpkit.bench.shapes import NEMOTRON_H_8B
from mtpkit.errors import UserError
from mtpkit.model import build_model
from mtpkit.model.matrices import used_matrices
from mtpkit.model.stages import stage_patterns
from tests.model.toy import CONFIG


def costs(config, patterns, balance):
    """Of each stage, as one would write them down for one config with a repeated head of an attention and an MLP."""
    embedding, hidden = config.vocab_size * config.hidden_size, config.hidden_size
    head = 2 * hidden**2 + used_matrices(config, "*") + used_matrices(config, "-")
    experts = config.num_moe_experts if balance == "memory" else config.moe_router_topk
    found = [2 * sum(used_matrices(config, letter, experts) for letter in part) for part in patterns]
    if balance == "time":
        found[-1] += config.mtp_num_depths * (6 * head + 4 * embedding) + 2 * embedding
    else:
        found[0] += 2 * embedding
        found[-1] += 18 * head + 4 * embedding
    return found


def all_ways(pattern, stages):
    for inner in itertools.combinations(range(1, len(pattern)), stages - 1):
        yield [pattern[a:b] for a, b in itertools.pairwise((0, *inner, len(pattern)))]


@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_way_has_a_cheaper_costliest_stage(stages, balance):
    dice = random.Random(stages)
    for length in (stages, 7, 10):
        pattern = "".join(dice.choice("M*-E") for _ in range(length))
        config = CONFIG.replace(pattern=pattern, mtp_pattern="*-", mtp_num_depths=3, vocab_size=dice.choice((64, 4096)))
        found = stage_patterns(config, stages, balance)
        assert "".join(found) == pattern and all(found)
        least = min(max(costs(config, way, balance)) for way in all_ways(pattern, stages))
        assert max(costs(config, found, balance)) == least


def test_the_stage_with_the_heads_has_fewer_layers():
    config = NEMOTRON_H_8B.replace(mtp_pattern="*-")
    assert [len(part) for part in stage_patterns(config, 2)] == [49, 3]
    assert [len(part) for part in stage_patterns(config, 2, "memory")] == [37, 15]
    plain = config.replace(pattern="M" * 8, mtp_pattern="", mtp_num_depths=0, vocab_size=1)
    assert [len(part) for part in stage_patterns(plain, 3)] == [3, 3, 2]


def test_too_many_stages():
    with pytest.raises(UserError, match="2 layers, too few for 3 pipeline stages; use fewer stages"):
        stage_patterns(CONFIG.replace(pattern="M*"), 3)
    assert build_model(CONFIG.replace(pattern="M*"), device="cpu").stage_patterns == ["M*"]
