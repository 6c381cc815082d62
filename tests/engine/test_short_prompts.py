"""Trees of distinct heads after prompts shorter than K - 1 tokens, where windows and levels begin
before position 0."""

import math

import pytest

from mtpkit.engine import SamplingParams
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    make_llm,
    make_prompts,
    record_drafts,
    tiny_model,
)

LONG = make_prompts((20,))[0]
SHORT = [[5], [6]]
WINDOWS = [
    (3, dict(speculative_token_tree="[3,2,1]"), 1, [5]),
    (3, dict(num_speculative_tokens=3, speculative_eagle_topk=2), 8, [5]),
    (3, dict(num_speculative_tokens=3, speculative_eagle_topk=10), 16, [5]),
    (7, dict(num_speculative_tokens=7, speculative_eagle_topk=2), 16, [5]),
    (
        7,
        dict(num_speculative_tokens=7, speculative_eagle_topk=9, speculative_num_draft_tokens=60),
        16,
        [5, 6, 7, 8],
    ),
]


def heads(depths: int):
    return tiny_model("distinct", distinct=depths)


def tree_llm(depths: int, **settings):
    return make_llm(heads(depths), settings.pop("num_speculative_tokens", None), **settings)


@pytest.mark.parametrize(("depths", "tree", "block_size", "prompt"), WINDOWS)
def test_windows_stay_within_the_blocks_of_their_request(depths, tree, block_size, prompt):
    """Windows of K - 1 + T tokens from position 0 on, which end in the block after the one that T
    tokens need."""
    llm = tree_llm(depths, **tree, block_size=block_size, max_model_len=100)
    assert generate(llm, [prompt], greedy(6)) == [decode(llm.model, prompt, 6)]
    config = llm.engine.config
    assert config.reach(0) >= config.num_speculative_tokens - 1 + config.decode_width
    assert llm.memory_plan.blocks_for(1) * block_size >= config.reach(1)


BESIDE = dict(speculative_token_tree="[3,2,1]", block_size=1, max_model_len=100)


def test_drafts_beside_short_prompts_are_those_without_them():
    alone, beside = (
        record_drafts(tree_llm(3, **BESIDE), [LONG, *more], 8, guided=False) for more in ([], SHORT)
    )
    own = {known for known in alone if list(known[: len(LONG)]) == LONG}
    assert len(own) > 4 and {known: beside[known] for known in own} == {
        known: alone[known] for known in own
    }


def test_output_for_a_seed_beside_short_prompts_is_the_one_without_them():
    """Drawn drafts decide which of the base's random numbers are used."""
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    outputs = [
        generate(tree_llm(3, **BESIDE, draft_sampling=True), [LONG, *more], params)
        for more in ([], SHORT)
    ]
    assert outputs[0][0] == outputs[1][0]


@pytest.mark.parametrize(
    ("depths", "tree", "prompt"),
    [
        (3, dict(speculative_token_tree="[7,1,1]"), [5]),
        (3, dict(num_speculative_tokens=3, speculative_eagle_topk=8), [5]),
        (4, dict(num_speculative_tokens=4, speculative_eagle_topk=5), [5]),
        (5, dict(num_speculative_tokens=5, speculative_eagle_topk=6), [5, 6]),
    ],
)
def test_levels_before_position_0_are_not_read(depths, tree, prompt):
    """Their entries lie beyond those of the window, so that nothing has written them."""
    llm = tree_llm(depths, **tree, block_size=64, max_model_len=100)
    for state in llm.engine.executor.states.all():
        for tensor in state.tensors.values():
            tensor.fill_(math.nan)
    assert generate(llm, [prompt], greedy(6)) == [decode(llm.model, prompt, 6)]
