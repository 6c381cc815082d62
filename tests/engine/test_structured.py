"""Outputs that follow JSON schemas, regular expressions, choices and grammars, with drafts of every
kind."""

import functools
import json
import random
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import jsonschema_rs
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from mtpkit import LLM, SamplingParams
from mtpkit.checkpoint import save_hf_model
from mtpkit.engine import StructuredOutputsParams
from mtpkit.engine.drafting.protocol import MtpDrafter
from mtpkit.engine.requests import grammar, walk
from mtpkit.engine.requests.grammar import Constraint, Grammars
from mtpkit.engine.requests.tree import DynamicTree, parse_tree
from mtpkit.engine.requests.walk import masks_along
from mtpkit.engine.steps import runners_up
from mtpkit.engine.steps.plan import Drafts
from mtpkit.engine.steps.processor import GRAMMAR
from mtpkit.errors import UserError
from mtpkit.kernels import NO_TOKEN
from mtpkit.kernels.draft_head.reference import to_token_ids
from mtpkit.model import build_model, normed_states
from tests.engine.fakes import HashModel, RuleDrafter, extend_hash, fake_engine, run
from tests.engine.rank_cases import config
from tests.engine.replayed import replay_on_cpu
from tests.engine.tiny import tiny_config
from tests.engine.tokenizers import byte_level
from tests.ranks import run_ranks

TOKENIZER = byte_level()
SIZE = 300
"""More than the tokenizer has, as of most models."""
END = TOKENIZER.eos_token_id
PROMPTS = [[72, 105], [40], [65, 66, 67, 68, 69]]


class Chatty(HashModel):
    """Prefers letters, digits and marks of JSON, so that drafts are often legal; ends are rare."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(vocab_size=SIZE, seed=seed)
        self.table = self.table.clone()
        for letter in b'{}[]":,0123456789abcdefghijklmnopqrstuvwxyz. -':
            self.table[:, letter] += 4.0


MODEL = Chatty()


def schemas(count: int) -> list[dict]:
    """Random JSON schemas whose texts are short."""
    rng = random.Random(7)

    def any_of(depth: int) -> dict:
        kinds = ["enum", "integer", "boolean", "string", "null", "const", "number"]
        kinds += ["object", "array", "anyOf", "object"] * (depth > 0)
        match rng.choice(kinds):
            case "enum":
                return {"enum": rng.sample(["red", "rot", "blue", "grün", 3, None, True], 3)}
            case "integer":
                low = rng.randrange(-9, 90)
                return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
            case "boolean":
                return {"type": "boolean"}
            case "string":
                return {"type": "string", "minLength": 1, "maxLength": rng.randrange(2, 9)}
            case "null":
                return {"type": "null"}
            case "const":
                return {"const": rng.choice(["a b", 1, {"k": [1]}])}
            case "number":
                return {"type": "number", "minimum": 0, "maximum": 5}
            case "array":
                return {"type": "array", "items": any_of(depth - 1), "minItems": 1, "maxItems": 3}
            case "anyOf":
                return {"anyOf": [any_of(depth - 1), any_of(depth - 1)]}
        names = rng.sample(["id", "name", "tags", "x", "größe"], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: any_of(depth - 1) for name in names},
            "required": names[: rng.randrange(len(names)) + 1],
            "additionalProperties": False,
        }

    return [any_of(2) for _ in range(count)]


def regexes(count: int) -> list[str]:
    """Random regular expressions, each with an end."""
    rng = random.Random(8)

    def part(depth: int) -> str:
        atoms = ["[0-9]", "[a-f]", "(?:abc)", "x", r"\.", "é", "(yes|no)", "[^a-z]"]
        if depth and rng.random() < 0.5:
            inner = "".join(part(depth - 1) for _ in range(2))
            return f"({inner}|{part(depth - 1)})"
        return rng.choice(atoms) + rng.choice(["", "", "?", "{1,3}", "+" if depth == 2 else ""])

    return ["".join(part(2) for _ in range(rng.randrange(1, 4))) for _ in range(count)]


@functools.cache
def cases() -> list[StructuredOutputsParams]:
    return [
        *(
            StructuredOutputsParams(json=schema, disable_any_whitespace=True)
            for schema in schemas(200)
        ),
        *(StructuredOutputsParams(regex=regex) for regex in regexes(100)),
        StructuredOutputsParams(choice=["positive", "negative", 'a "quoted" one', "größer"]),
        StructuredOutputsParams(grammar='start: "<" NAME ">"\nNAME: /[a-z]{1,5}/'),
    ]


def check(text: str, params: StructuredOutputsParams) -> None:
    """Compare a whole text with its constraint, by other libraries."""
    if params.json is not None:
        jsonschema_rs.validate(json.loads(params.json), json.loads(text))
    elif params.regex is not None:
        assert re.fullmatch(params.regex, text), (params.regex, text)
    elif params.choice is not None:
        assert text in params.choice
    else:
        assert re.fullmatch("<[a-z]{1,5}>", text)


def asked(index: int, params: StructuredOutputsParams, **settings) -> SamplingParams:
    """Two of three are greedy."""
    drawn = dict(temperature=0.9, seed=index) if index % 3 == 2 else dict(temperature=0)
    known = dict(max_tokens=150, structured_outputs=params)
    return SamplingParams(**known | drawn | settings)


def decoded(k: int, **settings) -> tuple[list, int]:
    """Outputs of all cases, and of free requests among them; and the drafts that were accepted."""
    engine = fake_engine(
        MODEL,
        num_speculative_tokens=k,
        eos=(END,),
        tokenizer=TOKENIZER,
        **{"num_blocks": 400, "max_num_seqs": 8, **settings},
    )
    free = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    names = []
    for index, params in enumerate(cases()):
        prompt = PROMPTS[index % len(PROMPTS)]
        names.append(engine.add_request(prompt, asked(index, params)))
        if index % 10 == 0:
            names.append(engine.add_request(prompt, free))
    outputs = run(engine)
    engine.scheduler.check_integrity()
    accepted = sum(output.stats.accepted for output in outputs.values())
    return [outputs[name].outputs[0] for name in names], accepted


@functools.cache
def plain() -> list:
    outputs, _ = decoded(0)
    return outputs


def test_every_output_follows_its_constraint():
    constrained = [one for index, one in enumerate(plain()) if index % 11 != 1]
    whole = 0
    for params, completion in zip(cases(), constrained, strict=True):
        assert completion.finish_reason in ("stop", "length"), completion.error
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == END
            check(completion.text, params)
            whole += 1
    assert whole > 0.9 * len(cases())


@pytest.mark.parametrize(
    ("k", "settings"),
    [
        (1, {}),
        (3, {"drafts": "always", "async_scheduling": True}),
        (2, {"num_blocks": 60, "async_scheduling": True}),
        (4, {"max_num_batched_tokens": 11}),
        (3, {"enable_prefix_caching": True, "num_checkpoints": 4, "num_blocks": 400}),
        (3, {"tree": parse_tree([2, 2, 1]), "async_scheduling": True}),
        (3, {"tree": DynamicTree(3, 2, 6)}),
        (3, {"tree": DynamicTree(3, 2, 6), "drafts": "never", "num_blocks": 60}),
    ],
    ids=str,
)
def test_drafts_change_no_output(k, settings):
    outputs, accepted = decoded(k, **settings)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain()]
    assert [one.text for one in outputs] == [one.text for one in plain()]
    assert accepted


@pytest.mark.parametrize("tree", [parse_tree([2, 2, 1]), DynamicTree(3, 2, 6)], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_shapes_of_drafts_change_from_step_to_step(tree, ahead):
    """A step verifies what lies where the step before left drafts of another shape."""
    settings = dict(num_blocks=400, max_num_seqs=5, eos=(END,), tokenizer=TOKENIZER)
    shapes = random.Random(1)
    found = []
    for k in (0, 3):
        shape = {"tree": tree, "async_scheduling": ahead} if k else {}
        engine = fake_engine(MODEL, "always", num_speculative_tokens=k, **settings, **shape)
        if k:
            engine.speculation.choose = lambda _: shapes.choice([0, 1, 3, tree])
        chosen = range(0, 300, 10)
        names = [engine.add_request([7], asked(index, cases()[index])) for index in chosen]
        outputs = run(engine)
        found.append([outputs[name].outputs[0].token_ids for name in names])
    assert found[0] == found[1]
    assert sum(output.stats.accepted for output in outputs.values()) > 50


@pytest.mark.parametrize(
    "shape",
    [{}, {"tree": parse_tree([2, 1, 1, 1])}, {"tree": DynamicTree(4, 3, 8)}],
    ids=["chain", "tree", "growing tree"],
)
def test_forced_text_is_drafted(shape):
    """The heads never guess it, and the model would not say it by itself."""
    long = "a long text that nobody would guess, again and again and again"
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=[long]), max_tokens=99
    )
    settings = dict(eos=(END,), tokenizer=TOKENIZER, num_blocks=99)
    engine = fake_engine(MODEL, "never", num_speculative_tokens=4, **settings, **shape)
    engine.add_request([1], params)
    (output,) = run(engine).values()
    assert output.outputs[0].text == long
    assert output.stats.acceptance_length > 4


def test_forced_text_follows_legal_drafts():
    """Inside the drafts, after those of the heads that are legal."""
    grammars = Grammars(TOKENIZER, SIZE, [END])
    (constraint,) = grammars.constraints(StructuredOutputsParams(regex="[ab]xyz[ab]q"), None)
    constraint.wait()
    # In a chain, the heads know the first draft and the fifth one.
    found = constraint.walk([0, *b"b??.a?"], range(-1, 6), 6)
    assert bytes(found.token_ids[1:]) == b"bxyzaq" and found.written == [2, 3, 4, 6]
    assert found.places == [*range(7)]
    # In a tree, what is legal is kept where a sibling has it: a -> [y, x -> [k, y]], c -> [x].
    found = constraint.walk([0, *b"acyxxky"], [-1, 0, 0, 1, 1, 2, 4, 4], 3)
    assert bytes(found.token_ids[1:]) == b"acyxxky" and found.written == [4, 7]
    assert sorted(found.places) == [0, 1, 4, 7]
    # Where no sibling has it, the first one gets it.
    found = constraint.walk([0, *b"acyjxky"], [-1, 0, 0, 1, 1, 2, 3, 3], 3)
    assert bytes(found.token_ids[1:]) == b"acxjxky" and found.written == [3, 7]


def test_legal_runners_up_replace_illegal_drafts():
    """The first that is legal. What replaces the end of a chain may be an end."""
    grammars = Grammars(TOKENIZER, SIZE, [END])
    (constraint,) = grammars.constraints(StructuredOutputsParams(regex="[ab][xy]z?[cd]"), None)
    constraint.wait()

    def walked(drafts: bytes, *runners_up) -> tuple[list[int], list[int], list[int]]:
        found = constraint.walk([0, *drafts], range(-1, len(drafts)), 9, runners_up=runners_up)
        return found.token_ids[1:], found.written, found.places

    assert walked(b"?yz?", b"zab", b"xyz", b"c", b"?d") == ([*b"ayzd"], [1, 4], [*range(5)])
    assert walked(b"?yz", b"z?", b"x", b"c") == ([*b"?yz"], [], [0])
    assert walked(b"ax??", b"b", b"y", b"dc", [*b"y", END]) == ([*b"axd", END], [3, 4], [*range(5)])
    # Those of later drafts may be missing.
    assert walked(b"?yz?", b"b") == ([*b"byz?"], [1], [*range(4)])
    # Forced text has the first word.
    (constraint,) = grammars.constraints(StructuredOutputsParams(regex="[ab]xyz"), None)
    constraint.wait()
    assert walked(b"?q?", b"b", b"x", b"z") == ([*b"bxy"], [1, 2, 3], [*range(4)])


class SecondBest(RuleDrafter):
    """Drafts a letter, and knows of the digit that the base says where letters are forbidden."""

    def draft(self, hidden, batch, verdict) -> Drafts:
        drafted = super().draft(hidden, batch, verdict)
        others = drafted.token_ids[..., None].repeat(1, 1, runners_up.COUNT)
        others[..., 0] = NO_TOKEN
        others[..., 2] = ord("b")
        letters = torch.full_like(drafted.token_ids, ord("a"))
        return Drafts(letters, runners_up=others)


@pytest.mark.parametrize("ahead", [False, True])
def test_legal_runners_up_are_accepted(ahead):
    """Also beside requests without a constraint, whose drafts they do not change."""
    params = SamplingParams(
        temperature=0, structured_outputs=StructuredOutputsParams(regex="[0-9]{60}")
    )
    free = SamplingParams(temperature=0, max_tokens=30)
    settings = dict(eos=(END,), tokenizer=TOKENIZER, num_blocks=99, async_scheduling=ahead)
    digits = range(*b"0:")

    def rule(tokens: list[int]) -> int:
        value = functools.reduce(extend_hash, tokens, 0)
        return max(digits, key=MODEL.logits([value])[0].tolist().__getitem__)

    found = []
    for k in (0, 3):
        engine = fake_engine(MODEL, num_speculative_tokens=k, **settings)
        if k:
            engine.executor.drafter = SecondBest(rule, k, SIZE, None)
        names = [engine.add_request(prompt, one) for prompt in PROMPTS for one in (params, free)]
        outputs = run(engine)
        found.append([outputs[name].outputs[0].token_ids for name in names])
    assert found[0] == found[1]
    for name in names[::2]:
        assert outputs[name].stats.acceptance_length > 3.5
    for name in names[1::2]:
        assert outputs[name].stats.acceptance_length < 1.5


@pytest.mark.parametrize(
    "some", [None, list(range(40, 190)), [97, 98]], ids=["all", "draft vocabulary", "two tokens"]
)
@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_heads_report_their_next_best_tokens(heads, some, monkeypatch):
    """And draft what they do in steps without constrained rows."""
    model = build_model(tiny_config(heads).replace(vocab_size=SIZE), device="cpu", seed=1)
    compared = 0
    choose = MtpDrafter.choose

    def checked(self, state, depth, batch, newest):
        nonlocal compared
        found = choose(self, state, depth, batch, newest)
        if GRAMMAR in batch.sampling.use:
            logits = self.logits(normed_states(self.model, state, depth))
            order = logits.float().argsort(-1, descending=True)[:, : 1 + runners_up.COUNT]
            want = to_token_ids(order.flatten(), self.draft_token_ids).view_as(order)
            # Two tokens have one runner-up.
            missing = 1 + runners_up.COUNT - order.shape[1]
            want = torch.nn.functional.pad(want, (0, missing), value=NO_TOKEN)
            assert (torch.cat([found.token_ids[:, None], found.runners_up], 1) == want).all()
            plain = replace(batch, sampling=replace(batch.sampling, use=frozenset()))
            alone = choose(self, state, depth, plain, newest)
            assert (alone.token_ids == found.token_ids).all() and alone.runners_up is None
            compared += len(want)
        return found

    monkeypatch.setattr(MtpDrafter, "choose", checked)
    tokens_of(model, 2, draft_vocab=some)
    assert compared > 20


def test_a_constraint_begins_after_its_token():
    """Inside accepted drafts, too: whatever follows the token is constrained at once."""
    start = TOKENIZER.bos_token_id
    assert start not in (END, None)

    class Starts(Chatty):
        """Says the token now and then."""

        def __init__(self) -> None:
            super().__init__()
            for place in range(0, len(self.table), 9):
                self.table[place, start] += 20.0

    model = Starts()
    params = StructuredOutputsParams(regex="[0-9]{4}", start_after=TOKENIZER.bos_token)
    found = []
    for k, settings in ((0, {}), (3, {"drafts": "always"}), (3, {"tree": parse_tree([2, 1, 1])})):
        engine = fake_engine(
            model,
            num_speculative_tokens=k,
            eos=(END,),
            tokenizer=TOKENIZER,
            num_blocks=200,
            **settings,
        )
        names = [
            engine.add_request([seed, seed + 1], asked(0, params, max_tokens=120))
            for seed in range(40)
        ]
        outputs = run(engine)
        found.append([outputs[name].outputs[0].token_ids for name in names])
        if settings.get("drafts"):
            assert sum(one.stats.accepted for one in outputs.values())
    assert found[0] == found[1] == found[2]
    begun = 0
    for tokens in found[0]:
        if start in tokens:
            after = tokens[tokens.index(start) + 1 :]
            assert re.fullmatch("[0-9]{4}", TOKENIZER.decode(after[:-1])) and after[-1] == END
            assert tokens.index(start) > 0 or len(tokens) == 6
            begun += 1
    assert begun > 10


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_along_drafts_are_those_of_one_token_after_another(threads, monkeypatch):
    """Of chains and trees of drafts that are legal, illegal, and ends; the constraints themselves
    stay where they are. With several threads, many walks share each call."""
    monkeypatch.setattr(walk, "_THREADS", threads)
    monkeypatch.setattr(walk, "_executor", functools.cache(walk._executor.__wrapped__))
    rng = random.Random(2)
    params = StructuredOutputsParams(regex="[a-c]{2,4}(x|yz)?")
    # An end follows an end, for requests that ignore them.
    chains = [[*b"abx", END], [*b"ab", END, END], [*b"x", END, END, END], [*b"abcx"]]
    trees = [(drafts, [*range(-1, len(drafts))]) for drafts in chains]
    for _ in range(150):
        drafts = [rng.choice([*b"abcxyz", END]) for _ in range(rng.randrange(9))]
        parents = [-1, *sorted(rng.randrange(1 + place) for place in range(len(drafts)))]
        trees.append((drafts, parents))
    compared = checked_walks(params, trees, None, 4)
    assert compared > 300


def test_masks_before_a_grammar_begins_allow_every_token():
    rng = random.Random(3)
    start = TOKENIZER.bos_token_id
    trees = []
    for _ in range(100):
        drafts = [rng.choice([97, start, 57, END]) for _ in range(6)]
        parents = [-1, *sorted(rng.randrange(1 + place) for place in range(6))]
        trees.append((drafts, parents))
    assert checked_walks(StructuredOutputsParams(regex="a[0-9]"), trees, start, 3) > 200


def checked_walks(params, trees, start: int | None, depth: int) -> int:
    """Compare the masks of walks along trees with those after one token after another; returns how
    many there were.

    Args:
        trees: drafts and parents of each.
        start: the token after which the grammar begins.
    """
    grammars = Grammars(TOKENIZER, SIZE, [END])
    constraints = grammars.constraints(params, start, len(trees))
    for one in constraints:
        one.wait()
    walks = [
        one.walk([0, *drafts], parents, depth, writes=False)
        for one, (drafts, parents) in zip(constraints, trees, strict=True)
    ]
    masks = list(masks_along(walks, -(-SIZE // 32)))
    compared = 0
    for found, (drafts, parents) in zip(walks, trees, strict=True):
        own = {place: masks.pop(0) for place in found.places}
        assert len(own) == len(found.places) and found.token_ids[1:] == drafts
        for place, path in paths_of(drafts, parents, depth):
            (walked,) = grammars.constraints(params, start)
            legal = True
            for token in path:
                legal &= _allows(one_mask(walked), token)
                walked.advance([token])
            assert (place in own) == legal
            if legal:
                assert (own[place] == one_mask(walked)).all(), (drafts, parents, place)
                compared += 1
    for one in constraints:
        assert (one_mask(one) == one_mask(*grammars.constraints(params, start))).all()
    assert not masks
    return compared


def paths_of(drafts, parents, depth):
    """Each token of a tree down to a depth, and the drafts that lead to it."""
    paths = [[]]
    for token, parent in zip(drafts, parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return [(place, path) for place, path in enumerate(paths) if len(path) <= depth]


def one_mask(constraint):
    """The mask of what may come next."""
    return masks_along([constraint.walk([0], [-1], 0)], -(-SIZE // 32))[0]


def _allows(mask, token: int) -> bool:
    return bool((int(mask[token // 32]) >> (token % 32)) & 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "nothing is given, must be exactly one of json, json_object, regex, choice, grammar"),
        ({"regex": "a", "json_object": True}, "json_object and regex is given"),
        ({"json": "{"}, "json is '{', must be a JSON schema"),
        ({"choice": []}, "choice .* must have at least one text"),
        ({"choice": ["a", ""]}, "choice .* must not have an empty text"),
    ],
)
def test_what_is_no_constraint_is_refused(values, said):
    with pytest.raises(UserError, match=said):
        StructuredOutputsParams(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"regex": "[0-9"}, "structured_outputs cannot be compiled: .*unclosed character class"),
        ({"json": {"type": "foo"}}, "structured_outputs cannot be compiled: Invalid type: foo"),
        ({"grammar": "x: y"}, "structured_outputs cannot be compiled: "),
        ({"regex": "\ud800"}, "structured_outputs cannot be compiled: .*surrogates not allowed"),
        ({"json": {"enum": ["\ud800"]}}, "structured_outputs cannot be compiled: "),
        ({"regex": "a", "start_after": "the"}, "start_after is 'the', which is no special token"),
    ],
)
def test_what_cannot_be_compiled_is_refused(values, said):
    engine = fake_engine(MODEL, eos=(END,), tokenizer=TOKENIZER)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**values))
    with pytest.raises(UserError, match=f"request 0: {said}") as caught:
        engine.add_request([1], params)
    assert "\n" not in str(caught.value) and not engine.has_unfinished


def test_engines_that_cannot_constrain_say_so():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(UserError, match="structured_outputs need a tokenizer"):
        fake_engine(MODEL, eos=(END,)).add_request([1], params)


@pytest.mark.parametrize("n", [1, 4])
def test_a_request_waits_for_its_grammar_and_lets_others_pass(n, monkeypatch):
    """A grammar is read, checked and compiled once for all outputs, while other requests go on."""
    slow = []
    written = grammar._written

    def slowly(params: StructuredOutputsParams) -> str:
        slow.append(params)
        assert slow_gate.wait(20)
        return written(params)

    def forbidden(*_) -> None:
        raise AssertionError("whoever sends requests to an engine has checked them")

    slow_gate = threading.Event()
    monkeypatch.setattr(grammar, "_written", slowly)
    monkeypatch.setattr(grammar, "grammar_of", forbidden)
    engine = fake_engine(
        MODEL, eos=(END,), tokenizer=TOKENIZER, num_speculative_tokens=2, num_blocks=99
    )
    engine.intake.in_background = True
    params = StructuredOutputsParams(regex="[a-z]{9}")
    constrained = engine.add_request([1], asked(0, params, n=n, temperature=2, seed=1))
    free = engine.add_request([2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    ended, texts = [], set()
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id == constrained:
                texts |= {one.text for one in output.outputs if one.finish_reason == "stop"}
            ended += [output.request_id] if output.finished else []
        if free in ended:
            slow_gate.set()
    assert ended == [free, constrained] and len(slow) == 1
    assert len(texts) == n
    for text in texts:
        check(text, params)


def one_ahead(max_num_batched_tokens: int, **settings):
    """An engine a step ahead of the host, with eight slots."""
    return fake_engine(
        MODEL,
        num_blocks=400,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        eos=(END,),
        tokenizer=TOKENIZER,
        async_scheduling=True,
        **settings,
    )


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    ("free", "constrained", "num_batches", "rows"),
    [
        (0, 4, 1, [4]),
        (1, 3, 1, [4]),
        (2, 2, 1, [4]),
        (3, 1, 1, [3, 4]),
        (0, 4, 2, [2]),
        (4, 4, 2, [4]),
    ],
)
def test_rows_that_wait_for_results_do_not_halve_the_steps(k, free, constrained, num_batches, rows):
    """Prompts end in different steps, so that constrained requests would decode in two groups in
    turn. Where most rows are free, they go on in every step."""
    engine = one_ahead(40, num_speculative_tokens=k, num_batches=num_batches)
    text = StructuredOutputsParams(regex="[a-z]{400}")
    lasting = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    for index in range(free + constrained):
        params = lasting if index < free else asked(0, text, max_tokens=120)
        engine.add_request([65] * 25, params)
    while engine.scheduler.num_prefilled < 25 * (free + constrained):
        engine.step()
    launched = [rows for rows, _ in launches(engine)]
    repeated = rows * 12
    assert launched[-10:] in (repeated[:10], repeated[1:11])
    assert len(run(engine)) == free + constrained


def launches(engine) -> list[tuple[int, int]]:
    """How many decode rows each of the next launched steps has, and how many steps are under way
    then."""
    launched = []
    launch = engine.executor.launch

    def launching(plan):
        launched.append((plan.num_decode_rows, len(engine._under_way)))
        return launch(plan)

    engine.executor.launch = launching
    for _ in range(20):
        engine.step()
    engine.executor.launch = launch
    return launched


def test_a_batch_without_requests_is_not_waited_for_in_place_of_another():
    """Of two batches, all requests of one are aborted: the other's decode in one step."""
    engine = one_ahead(40, num_batches=2)
    text = StructuredOutputsParams(regex="[a-z]{400}")
    lasting = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    names = [
        engine.add_request([65] * 25, asked(0, text, max_tokens=120) if index % 2 else lasting)
        for index in range(4)
    ]
    while engine.scheduler.num_prefilled < 100:
        engine.step()
    others = {one.request_id for one in engine.scheduler.admission.running_in(0)}
    for name in others:
        engine.abort(name)
    assert len(others) == 2 and others < {*names}
    assert [rows for rows, _ in launches(engine)][-10:] == [2] * 10


@pytest.mark.parametrize("k", [1, 3])
def test_a_step_that_is_full_does_not_wait(k):
    """Rows that take turns fill every step: results are read while the next step runs."""
    engine = one_ahead(4 * (1 + k), num_speculative_tokens=k)
    text = StructuredOutputsParams(regex="[a-z]{400}")
    for _ in range(8):
        engine.add_request([65], asked(0, text, max_tokens=120))
    engine.step()
    assert len(engine.scheduler.running) == 8
    assert launches(engine)[-8:] == [(4, 1)] * 8


@pytest.mark.parametrize("siblings", [True, False])
def test_a_constraint_is_an_output_s_own(siblings):
    """One does not walk along another's tokens."""
    grammars = Grammars(TOKENIZER, SIZE, [END])
    params = StructuredOutputsParams(choice=["ab"])
    if siblings:
        first, second = grammars.constraints(params, None, 2)
    else:
        first, second = (grammars.constraints(params, None)[0] for _ in range(2))
    first.advance(list(b"ab"))
    assert isinstance(second, Constraint) and second.forced(5)[0] in (*b"a", *range(256, SIZE))
    assert first.forced(5) == []


SIZES = [
    ({"tensor_parallel_size": 2}, 2),
    ({"pipeline_parallel_size": 2, "async_scheduling": True}, 2),
    ({"pipeline_parallel_size": 2, "speculative_token_tree": [2, 2]}, None),
]


def rank_decodes(rank: int, model_dir: str, path: str, sizes: dict, k: int | None) -> None:
    found = decoded_by(model_dir, k, **sizes)
    if rank == 0:
        Path(path).write_text(json.dumps(found))


@pytest.mark.parametrize(("sizes", "k"), SIZES, ids=str)
def test_ranks_constrain_as_one_does(sizes, k, tmp_path):
    wide = config("mamba2").replace(vocab_size=SIZE)
    save_hf_model(build_model(wide, device="cpu", seed=1), tmp_path / "model")
    path = tmp_path / "tokens.json"
    run_ranks(rank_decodes, str(tmp_path / "model"), str(path), sizes, k)
    tokens, counts = json.loads(path.read_text())
    want, accepted = decoded_by(str(tmp_path / "model"), 2)
    assert tokens == want and len(set(map(len, want))) > 3
    # What replaces drafts gets to all ranks. A step ahead may launch a few drafts more.
    assert sum(accepted) > 5 and (k is None or counts == accepted)


def tokens_of(model, k: int | None, **settings) -> list[list[int]]:
    """See `decoded_by`."""
    return decoded_by(model, k, **settings)[0]


def decoded_by(model, k: int | None, **settings) -> tuple[list[list[int]], list[int]]:
    """Tokens of constrained and free requests of a real model, and the drafts that each
    accepted."""
    small = dict(num_blocks=99, block_size=8, max_num_seqs=3, warm_up=False)
    llm = LLM(model, k, tokenizer=byte_level(), **small | settings)
    params = [
        asked(index, one, max_tokens=30) if index % 3 else SamplingParams(max_tokens=9, seed=1)
        for index, one in enumerate(cases()[196:208])
    ]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    outputs = llm.generate(prompts, params)
    return (
        [output.outputs[0].token_ids for output in outputs],
        [output.stats.accepted for output in outputs],
    )


@pytest.mark.parametrize(
    ("k", "settings"), [(2, {}), (None, {"speculative_token_tree": [2, 2]})], ids=["chain", "tree"]
)
def test_graphs_constrain_as_eager_steps_do(device, k, settings, monkeypatch):
    if device == "cpu":
        replay_on_cpu(monkeypatch)
    model = build_model(tiny_config().replace(vocab_size=SIZE), device=device, seed=1)
    want = tokens_of(model, 0, enforce_eager=True)
    assert tokens_of(model, k, **settings) == want and len(set(map(len, want))) > 3


@pytest.mark.parametrize("threads", [1, 2])
def test_of_constraints_in_one_call_each_fails_alone(threads, monkeypatch):
    """While the masks of all rows are computed together."""
    monkeypatch.setattr(walk, "_THREADS", threads)
    monkeypatch.setattr(walk, "_executor", functools.cache(walk._executor.__wrapped__))
    compile_ = Grammars._compile

    def compiled(self, grammar: str) -> LLMatcher:
        if "x+y*z" not in grammar:
            return compile_(self, grammar)
        return LLMatcher(self._wrapped, grammar, log_level=0, limits=few)

    few = LLParserLimits(max_lexer_states=6)
    monkeypatch.setattr(Grammars, "_compile", compiled)
    settings = dict(eos=(END,), tokenizer=TOKENIZER, num_blocks=99)
    for shape in ({}, {"tree": parse_tree([2, 2])}):
        engine = fake_engine(MODEL, "always", num_speculative_tokens=2, **settings, **shape)
        regexes = ["([0-9a-f]{3}|x+y*z)+", "[a-f]{9}", "[0-9]{4}"]
        params = [asked(0, StructuredOutputsParams(regex=regex)) for regex in regexes]
        names = [engine.add_request([1], one) for one in params]
        outputs = run(engine)
        failed, *others = (outputs[name] for name in names)
        assert re.match("request 0: structured_outputs are too complex", failed.error)
        for output, one in zip(others, params[1:], strict=True):
            assert output.error is None and output.outputs[0].finish_reason == "stop"
            check(output.outputs[0].text, one.structured_outputs)


def test_invalid_drafts_of_the_heads_are_walked_along_as_token_0(monkeypatch):
    """As on the device; whether they end the request depends on the base."""
    draft = RuleDrafter.draft

    def broken(self, hidden, batch, verdict) -> Drafts:
        token_ids = draft(self, hidden, batch, verdict).token_ids.clone()
        token_ids[:, 1:] = NO_TOKEN
        return Drafts(token_ids)

    monkeypatch.setattr(RuleDrafter, "draft", broken)
    engine = fake_engine(
        MODEL, "never", num_speculative_tokens=3, eos=(END,), tokenizer=TOKENIZER, num_blocks=99
    )
    params = StructuredOutputsParams(regex="[0-9]{9}")
    name = engine.add_request([1], asked(0, params))
    output = run(engine)[name].outputs[0]
    assert output.finish_reason == "stop"
    check(output.text, params)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=str)
@pytest.mark.parametrize("when", ["compiled", "walked"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_grammar_that_fails_ends_its_own_request_alone(monkeypatch, beside, when, settings):
    """While it is compiled in the background, or while masks are computed: the library then allows
    an end, with which an output would look whole."""

    def compiled(self, grammar: str) -> LLMatcher:
        time.sleep(0.2)  # so that an engine with nothing else to do waits for it
        if when == "compiled":
            raise UserError("structured_outputs need a fast tokenizer: another one")
        limits = LLParserLimits(max_lexer_states=3)
        return LLMatcher(self._wrapped, grammar, log_level=0, limits=limits)

    monkeypatch.setattr(Grammars, "_compile", compiled)
    engine = fake_engine(
        MODEL, eos=(END,), tokenizer=TOKENIZER, num_speculative_tokens=2, **settings
    )
    engine.intake.in_background = True
    params = StructuredOutputsParams(regex="([0-9a-f]{3}|x+y*z)+")
    name = engine.add_request([1], asked(0, params))
    if beside:
        plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        free = engine.add_request([2], plain)
    outputs = run(engine)
    engine.scheduler.check_integrity()
    said = {"compiled": "need a fast tokenizer", "walked": "are too complex: .*too many states"}
    assert outputs[name].outputs[0].finish_reason == "error"
    assert re.match(f"request {name}: structured_outputs {said[when]}", outputs[name].error)
    assert outputs[name].outputs[0].token_ids == []
    assert not beside or len(outputs[free].outputs[0].token_ids) == 9
