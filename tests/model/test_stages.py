"""Which layers pipeline stages get, against all ways to deal them."""

import itertools
import random
from collections import Counter

import pytest

from mtpkit.bench.sizes import NEMOTRON_H_8B
from mtpkit.errors import UserError
from mtpkit.model import build_model
from mtpkit.model.stages import Decoding, stage_patterns
from tests.model.toy import CONFIG


def costs(config, patterns, balance):
    """Cost of each part, from the parameters of one model and the share of them that a token
    uses."""
    sizes = Counter()
    for name, parameter in build_model(config, device="cpu").named_parameters():
        if parameter.ndim == 2 and "conv1d" not in name:
            part, _, rest = name.partition(".layers.")
            number = int(rest.split(".")[0]) if part == "decoder" else 0
            share = (
                config.moe.router_topk / config.moe.num_experts if "local_experts" in name else 1
            )
            # experts that at least one token chooses
            if isinstance(balance, Decoding) and part == "decoder":
                share = 1 - (1 - share) ** (balance.requests * (1 + balance.drafts))
            elif balance != "time":
                share = 1
            sizes[part, number] += parameter.numel() * share
    ends = itertools.accumulate(map(len, patterns))
    found = [
        sum(2 * sizes["decoder", n] for n in range(end - len(part), end))
        for end, part in zip(ends, patterns, strict=True)
    ]
    embedding = config.vocab_size * config.hidden_size
    depths = config.mtp.num_depths
    if balance == "time":
        found[-1] += depths * (6 * sizes["mtp", 0] + 4 * embedding) + 2 * embedding
    elif isinstance(balance, Decoding):
        state = 4 * config.mamba2.inner * config.mamba2.state_dim * balance.requests
        found = [cost + part.count("M") * state for cost, part in zip(found, patterns, strict=True)]
        found[-1] += 2 * (balance.drafts * (sizes["mtp", 0] + embedding) + embedding)
    else:
        found[0] += 2 * embedding
        found[-1] += 18 * sizes["mtp", 0] + 2 * embedding * (1 if config.tie_word_embeddings else 2)
    return found


def all_ways(pattern, stages):
    for inner in itertools.combinations(range(1, len(pattern)), stages - 1):
        yield [pattern[a:b] for a, b in itertools.pairwise((0, *inner, len(pattern)))]


@pytest.mark.parametrize(
    "balance", ["time", "memory", Decoding(0, 1), Decoding(3, 2), Decoding(1, 40)], ids=str
)
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
        assert max(costs(config, found, balance)) == pytest.approx(least, rel=1e-9)


def test_the_stage_with_the_heads_has_fewer_layers():
    config = NEMOTRON_H_8B.replace(mtp_pattern="*-")
    assert [len(part) for part in stage_patterns(config, 2, "time")] == [49, 3]
    assert [len(part) for part in stage_patterns(config, 2)] == [37, 15]
    assert [
        len(stage_patterns(NEMOTRON_H_8B, 2, Decoding(drafts, 32))[0]) for drafts in (0, 3)
    ] == [28, 33]
    plain = config.replace(pattern="M" * 8, mtp_pattern="", mtp_num_depths=0, vocab_size=1)
    assert sorted(len(part) for part in stage_patterns(plain, 3)) == [2, 3, 3]


def test_recurrent_states_count_where_many_requests_decode():
    """They are read like weights: layers that have them are spread more evenly, the more requests
    there are."""
    config = CONFIG.replace(pattern="MMM******", vocab_size=1)
    first = [stage_patterns(config, 2, Decoding(0, requests))[0] for requests in (1, 100000)]
    assert first[1] in ("M", "MM") and len(first[0]) > 2


def test_requests_are_those_of_one_batch():
    assert Decoding.of(NEMOTRON_H_8B, 0, 64, 2) == Decoding(0, 32) and Decoding.of(
        CONFIG, 1, 5, 2
    ) == Decoding(1, 3)
    assert Decoding.of(NEMOTRON_H_8B, "auto", 1, 1) == Decoding(3, 1)


def test_what_cannot_be_dealt():
    with pytest.raises(UserError, match="balance is 'tiem', must be one of memory, time"):
        stage_patterns(CONFIG, 1, "tiem")
    with pytest.raises(
        UserError, match="2 layers, too few for 3 pipeline stages; use fewer stages"
    ):
        stage_patterns(CONFIG.replace(pattern="M*"), 3)
    assert build_model(CONFIG.replace(pattern="M*"), device="cpu").stage_patterns == ["M*"]
