"""Biased, allowed and forbidden tokens, against rules in plain Python."""

import itertools
import math
import random

import pytest
import torch

from mtpkit import SamplingParams
from mtpkit.engine.requests.token_limits import MOST_BIASED
from mtpkit.engine.requests.tree import DynamicTree, parse_tree
from mtpkit.engine.steps.processor import Seen
from mtpkit.engine.steps.token_rules import _before
from mtpkit.engine.steps.vocabulary import Vocabulary
from mtpkit.errors import UserError
from mtpkit.model.inputs import TreeInput
from tests.engine.fakes import HashModel, fake_engine, run
from tests.engine.tiny import VOCAB_SIZE, decode, guide, make_llm, make_prompts, tiny_model

MODEL = HashModel(vocab_size=40, seed=3)
EOS = (7,)
PROMPTS = [[1, 2, 3], [9], [4, 7, 7, 1, 12, 30], [5, 5], [38, 2, 39, 0, 11]]


class Numbers:
    """Texts of numbers; a text that begins with a space begins with another token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = [int(word) for word in text.split()]
        return [tokens[0] + 1, *tokens[1:]] if text.startswith(" ") else tokens

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


def sequences(words: list[str]) -> list[list[int]]:
    return [Numbers().encode(prefix + word) for word in words for prefix in ("", " ")]


def plain_rules(params: SamplingParams, ends: set[int]):
    """The rules of `params` as vLLM defines them."""

    def rules(logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        logits = logits.clone()
        for token, value in (params.logit_bias or {}).items():
            logits[token] += value
        forbidden = set()
        if params.allowed_token_ids is not None:
            forbidden |= set(range(len(logits))) - set(params.allowed_token_ids)
        if len(output) < params.min_tokens:
            forbidden |= ends
        for word in sequences(params.bad_words or []):
            start = word[:-1]
            if len(start) <= len(output) and output[len(output) - len(start) :] == start:
                forbidden.add(word[-1])
        logits[sorted(forbidden)] = -math.inf
        return logits

    return rules


def words_in(outputs: list[list[int]], lengths: tuple[int, ...], seed: int = 1) -> list[str]:
    """A part of each output as a word, for each number of tokens."""
    rng = random.Random(seed)
    found = []
    for output, length in itertools.product(outputs, lengths):
        start = rng.randrange(len(output) - length)
        found.append(" ".join(map(str, output[start : start + length])))
    return found


def cases() -> list[SamplingParams]:
    """Every rule alone, all at once, and none; greedy and drawn, with and without penalties."""
    rng = random.Random(1)
    plain = [
        MODEL.decode(prompt, SamplingParams(temperature=0, max_tokens=24)) for prompt in PROMPTS
    ]
    one_by_one = [
        {},
        {"logit_bias": {3: 4.5, 11: -100.0, 20: 2.0, 39: 300.0}},
        {"allowed_token_ids": [*sorted(rng.sample(range(40), 9)), 7]},
        {"allowed_token_ids": [17]},
        {"min_tokens": 12, "logit_bias": {7: 100.0}},
        {"min_tokens": 6, "stop_token_ids": [3, 30], "logit_bias": {3: 100.0}},
        {"bad_words": words_in(plain, (1, 2, 3))},
        {"bad_words": words_in(plain, (2, 3)) + words_in(plain, (2, 4), seed=2)},
        {
            "bad_words": words_in(plain, (2,)),
            "min_tokens": 9,
            "logit_bias": {7: 30.0, 8: 1.5},
            "allowed_token_ids": [*range(0, 40, 2), 7, 9],
        },
    ]
    drawn = [dict(temperature=0), dict(temperature=0.9), dict(temperature=0, presence_penalty=1.5)]
    return [
        SamplingParams(max_tokens=24, seed=index, **rule, **how)
        for index, (rule, how) in enumerate(itertools.product(one_by_one, drawn))
    ]


@pytest.mark.parametrize(
    ("k", "settings"),
    [
        (0, {}),
        (3, {}),
        (3, {"drafts": "always", "async_scheduling": True}),
        (2, {"num_blocks": 24, "async_scheduling": True}),
        (4, {"drafts": "always", "block_size": 2, "max_num_batched_tokens": 11}),
        (3, {"drafts": "always", "tree": parse_tree([2, 2, 1])}),
        (3, {"tree": parse_tree([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]])}),
        (3, {"drafts": "always", "tree": DynamicTree(3, 2, 6)}),
    ],
)
def test_outputs_follow_the_rules(k, settings):
    """All kinds of requests at once, in slots that others had."""
    engine = fake_engine(MODEL, num_speculative_tokens=k, eos=EOS, tokenizer=Numbers(), **settings)
    asked = [
        (prompt, params)
        for index, params in enumerate(cases())
        for prompt in (PROMPTS[index % len(PROMPTS)], PROMPTS[(index + 2) % len(PROMPTS)])
    ]
    random.Random(5).shuffle(asked)
    names = [engine.add_request(prompt, params) for prompt, params in asked]
    outputs = run(engine)
    changed = 0
    for name, (prompt, params) in zip(names, asked, strict=True):
        ends = {*EOS, *params.stop_token_ids}
        want = MODEL.decode(prompt, params, EOS, plain_rules(params, ends))
        assert outputs[name].outputs[0].token_ids == want, params
        changed += want != MODEL.decode(prompt, params, EOS)
    assert changed > len(asked) / 2, "the rules must matter"
    if "num_blocks" in settings:
        assert sum(output.stats.preemptions for output in outputs.values())
    assert not k or sum(output.stats.accepted for output in outputs.values())


SMALL_PROMPTS = make_prompts((3, 5, 2, 9, 4, 1, 7, 6))
PLAIN = [decode(tiny_model(), prompt, 16) for prompt in SMALL_PROMPTS]


def small(index: int) -> SamplingParams:
    """Parameters for the tiny model, whose output is its own: some rules, or none."""
    rules = [
        {},
        {"logit_bias": {3: 1.0, 9: -2.0}, "min_tokens": 5, "stop_token_ids": [1, 2, 3, 4, 5]},
        {"bad_words": words_in(PLAIN, (2, 3)) + words_in(PLAIN, (2, 3), seed=2)},
        {"allowed_token_ids": list(range(index, VOCAB_SIZE, 3)), "temperature": 1.0, "seed": index},
    ]
    known = dict(temperature=0, max_tokens=16, ignore_eos=True)
    return SamplingParams(**known | rules[index % 4])


def decoded(k, **settings) -> list[list[int]]:
    llm = make_llm(tiny_model(), k, tokenizer=Numbers(), **settings)
    params = [small(index) for index in range(len(SMALL_PROMPTS))]
    if not llm.engine.config.tree:
        guide(llm, SMALL_PROMPTS, 16)
    outputs = llm.generate(SMALL_PROMPTS, params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "tree",
    [
        dict(speculative_token_tree=[2, 2, 1]),
        dict(speculative_token_tree=[1, 3]),
        dict(num_speculative_tokens=3, speculative_eagle_topk=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_trees_follow_the_rules(tree, rollback):
    """The tokens on a logit's own path count, not those of its siblings."""
    drafts = dict(tree)
    k = drafts.pop("num_speculative_tokens", None)
    assert decoded(k, state_rollback=rollback, **drafts) == decoded(0)


@pytest.mark.parametrize("trees", [False, True])
def test_what_comes_before_a_logit_is_its_own_path(trees):
    """Rows in any slots, trees that differ between rows, and chunks after them."""
    rng = random.Random(4)
    rows, width, chunks = 5, 9, 2
    newest = torch.tensor([[rng.randrange(9) for _ in range(15)] for _ in range(8)])
    newest[3, :11] = -1
    slots = torch.tensor([3, 0, 7, 2, 5, 6, 1])
    tokens = [[rng.randrange(9) for _ in range(width)] for _ in range(rows)]
    parents = [[-1, *(rng.randrange(at) for at in range(1, width))] for _ in range(rows)]
    if not trees:
        parents = [list(range(-1, width - 1))] * rows
    # A row's first token is the newest output token.
    for row, slot in zip(tokens, slots.tolist(), strict=False):
        row[0] = int(newest[slot, -1])

    want = []
    for row in range(rows):
        for at in range(width):
            path = []
            while at > 0:
                path.append(tokens[row][at])
                at = parents[row][at]
            want.append([*newest[slots[row]].tolist(), *path[::-1]][-15:])
    want += newest[slots[rows:]].tolist()

    tree = TreeInput(torch.zeros(rows, width), torch.zeros(rows), torch.tensor(parents))
    seen = Seen(torch.tensor(tokens)[:, 1:], Vocabulary(9), slots.clone, tree if trees else None)
    of_logits = torch.cat([slots[:rows].repeat_interleave(width), slots[rows : rows + chunks]])
    assert _before(newest, of_logits, seen).tolist() == want


def test_drawn_drafts_follow_the_rules():
    """The draws differ from those without drafts; what is forbidden never occurs."""
    for tokens, params in zip(decoded(2, draft_sampling=True), map(small, range(8)), strict=True):
        if params.allowed_token_ids:
            assert set(tokens) <= set(params.allowed_token_ids)
        for word in params.bad_words or ():
            for forbidden in sequences([word]):
                places = range(len(tokens) - len(forbidden) + 1)
                assert all(tokens[at : at + len(forbidden)] != forbidden for at in places)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, must be at most max_tokens 8"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(MOST_BIASED + 1), 1.0)}, "must have at most 512"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-3]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words .* must not have an empty text"),
        ({"bad_words": "word"}, "bad_words"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, said):
    with pytest.raises(UserError, match=said):
        SamplingParams(**rules)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"logit_bias": {40: 1.0}}, r"logit_bias has tokens \[40\], which are outside"),
        ({"allowed_token_ids": [1, 99]}, r"allowed_token_ids has tokens \[99\]"),
        (
            {"allowed_token_ids": [7], "min_tokens": 1},
            "min_tokens and bad_words forbid all of allowed_token_ids",
        ),
        (
            {"allowed_token_ids": [3, 4], "bad_words": ["3"]},
            "min_tokens and bad_words forbid all of allowed_token_ids",
        ),
        ({"bad_words": [" ".join("1" * 17)]}, "bad_words are 2 sequences of up to 17 tokens"),
        ({"bad_words": [str(i) for i in range(33)]}, "bad_words are 66 sequences"),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(33))},
            "min_tokens works with up to 32 tokens that end the output, but there are 33",
        ),
    ],
)
def test_rules_that_the_model_cannot_follow_are_refused(rules, said):
    engine = fake_engine(MODEL, num_speculative_tokens=2, eos=EOS, tokenizer=Numbers())
    with pytest.raises(UserError, match=f"request 0: {said}"):
        engine.add_request([1], SamplingParams(**rules))
    assert not engine.has_unfinished


def test_bad_words_need_a_tokenizer():
    engine = fake_engine(MODEL, eos=EOS)
    with pytest.raises(UserError, match="request 0: bad_words need a tokenizer"):
        engine.add_request([1], SamplingParams(bad_words=["3"]))


def test_a_bias_is_clamped_as_in_vllm():
    assert SamplingParams(logit_bias={3: 300, 4: -1000.0}).logit_bias == {3: 100, 4: -100}
