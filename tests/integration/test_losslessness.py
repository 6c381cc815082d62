"""On the tiny base, greedy output in fp32 does not depend on K, on the heads or on the batch."""

import pytest

from mtpkit.checkpoint import load_config, load_model, load_model_weights
from mtpkit.engine import LLM
from mtpkit.model import build_model
from tests.integration.front_doors import TINY_BASE, greedy

LENGTHS = [3, 40, 17, 64, 1, 33]


@pytest.fixture(scope="module")
def mixed(prompts) -> list[list[int]]:
    return [
        prompt[:length] for prompt, length in zip(prompts[-len(LENGTHS) :], LENGTHS, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(mixed) -> list[list[int]]:
    """One after another, without drafts."""
    return decode(load_model(TINY_BASE), mixed, 0, max_num_seqs=1)


WAYS = {
    "alone": dict(max_num_seqs=1, block_size=16),  # K = 0 is `plain` itself
    # Prompts are split over steps, and as requests end others join those that are decoding.
    "chunks": dict(max_num_seqs=4, max_num_batched_tokens=24),
    "preempted": dict(max_num_seqs=4, block_size=4, num_blocks=36, state_rollback="snapshot"),
    "preempted_replay": dict(max_num_seqs=4, block_size=7, num_blocks=20),
}


def decode(model, prompts, k, **settings) -> list[list[int]]:
    llm = LLM(model, k, **{"max_model_len": 128, "block_size": 1 + k, **settings})
    outputs = llm.generate(prompts, greedy(40))
    assert (llm.stats().preemptions > 0) == ("num_blocks" in settings)
    return [output.outputs[0].token_ids for output in outputs]


def untrained():
    config = load_config(TINY_BASE).replace(
        mtp_pattern="*-", mtp_num_depths=3, mtp_use_repeated_layer=True
    )
    model = build_model(config)
    load_model_weights(model, TINY_BASE, allow_missing_heads=True)
    return model


# Each K with each way of keeping states, alone or in chunks and where requests lose theirs; tests
# of the engine have every K with every way, of smaller models.
@pytest.mark.parametrize(
    ("heads", "way", "ks"),
    [
        ("trained", "alone", (1, 3)),
        ("trained", "chunks", (0, 2, 5)),
        ("trained", "preempted", (0, 1, 2, 5)),
        ("trained", "preempted_replay", (0, 1, 3)),
        ("untrained", "chunks", (3, 5)),
    ],
)
def test_drafts_change_nothing(heads, way, ks, request, mixed, plain):
    model = (
        untrained() if heads == "untrained" else load_model(request.getfixturevalue("trained").hf)
    )
    if way == "alone":
        mixed = mixed[2:5]
        plain = plain[2:5]
    for k in ks:
        assert decode(model, mixed, k, **WAYS[way]) == plain, f"K = {k}"
