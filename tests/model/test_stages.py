"""Which layers pipeline stages get, against all ways to deal them."""

import itertools
import random
from collections import Counter

import pytest

from mtpkit.bench.sizes import NEMOTRON_H_8B
from mtpkit.errors import UserError
from mtpkit.model import build_model
from mtpkit.model.stages import stage_patterns
from tests.model.toy import CONFIG


def costs(config, patterns, balance):
    """Cost of each part, from the parameters of one model and the share of them that a token uses."""
    sizes = Counter()
    for name, parameter in build_model(config, device="cpu").named_parameters():
        if parameter.ndim == 2 and "conv1d" not in name:
            part, _, rest = name.partition(".layers.")
            number = int(rest.split(".")[0]) if part == "decoder" else 0
            unused = config.moe.router_topk / config.moe.num_experts if "local_experts" in name else 1
            sizes[part, number] += parameter.numel() * (unused if balance == "time" else 1)
    ends = itertools.accumulate(map(len, patterns))
    found = [
        sum(2 * sizes["decoder", n] for n in range(end - len(part), end))
        for end, part in zip(ends, patterns, strict=True)
    ]
    embedding, depths = config.vocab_size * config.hidden_size, config.mtp.num_depths
    if balance == "time":
        found[-1] += depths * (6 * sizes["mtp", 0] + 4 * embedding) + 2 * embedding
    elif balance == "decoding":
        drafts = config.mtp.default_drafts
        found[-1] += 2 * (drafts * (sizes["mtp", 0] + embedding) + embedding)
    else:
        found[0] += 2 * embedding
        found[-1] += 18 * sizes["mtp", 0] + 2 * embedding * (1 if config.tie_word_embeddings else 2)
    return found


def all_ways(pattern, stages):
    for inner in itertools.combinations(range(1, len(pattern)), stages - 1):
        yield [pattern[a:b] for a, b in itertools.pairwise((0, *inner, len(pattern)))]


@pytest.mark.parametrize("balance", ["time", "memory", "decoding"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_way_has_a_cheaper_costliest_stage(stages, balance):
    dice = random.Random(stages)
    for length in (stages, 7, 10):
        pattern = "".join(dice.choice("M*-E") for _ in range(length))
        config = CONFIG.replace(
            pattern=pattern,
            mtp_pattern=dice.choice(("*-", "*E", "M")),
            mtp_num_depths=3,
            vocab_size=dice.choice((64, 4096)),
            tie_word_embeddings=dice.choice((True, False)),
        )
        found = stage_patterns(config, stages, balance)
        assert "".join(found) == pattern and all(found)
        least = min(max(costs(config, way, balance)) for way in all_ways(pattern, stages))
        assert max(costs(config, found, balance)) == least


def test_the_stage_with_the_heads_has_fewer_layers():
    config = NEMOTRON_H_8B.replace(mtp_pattern="*-")
    assert [len(part) for part in stage_patterns(config, 2, "time")] == [49, 3]
    assert [len(part) for part in stage_patterns(config, 2)] == [37, 15]
    plain = config.replace(pattern="M" * 8, mtp_pattern="", mtp_num_depths=0, vocab_size=1)
    assert sorted(len(part) for part in stage_patterns(plain, 3)) == [2, 3, 3]


def test_what_cannot_be_dealt():
    with pytest.raises(UserError, match="balance is 'tiem', must be one of memory, time, decoding"):
        stage_patterns(CONFIG, 1, "tiem")
    with pytest.raises(UserError, match="2 layers, too few for 3 pipeline stages; use fewer stages"):
        stage_patterns(CONFIG.replace(pattern="M*"), 3)
    assert build_model(CONFIG.replace(pattern="M*"), device="cpu").stage_patterns == ["M*"]
