"""Constrained outputs where grammars end, where drafts are all wrong, and beside others."""

import pytest

from mtpkit import SamplingParams
from mtpkit.engine import StructuredOutputsParams
from mtpkit.engine.requests.tree import DynamicTree, parse_tree
from tests.engine.fakes import fake_engine, run
from tests.engine.test_structured import END, MODEL, TOKENIZER, Chatty

SHAPES = [{}, {"tree": parse_tree([2, 2, 1])}, {"tree": DynamicTree(3, 2, 6)}]
IDS = ["chain", "tree", "growing tree"]


class Ends(Chatty):
    """Would rather end than go on."""

    def __init__(self) -> None:
        super().__init__()
        self.table[:, END] += 30.0


def outputs_of(
    params: list[SamplingParams], k: int = 3, model=MODEL, rule=None, **settings
) -> list:
    """The outputs of requests that run side by side."""
    known = {"drafts": "always", "num_blocks": 200, "max_num_seqs": 8}
    engine = fake_engine(
        model,
        **known | settings,
        num_speculative_tokens=k,
        eos=(END,),
        tokenizer=TOKENIZER,
    )
    if rule is not None:
        engine.executor.drafter.rule = rule
    names = [engine.add_request([7, index], one) for index, one in enumerate(params)]
    outputs = run(engine)
    engine.scheduler.check_integrity()
    return [outputs[name] for name in names]


def regex(text: str, **settings) -> SamplingParams:
    known = dict(temperature=0, max_tokens=30)
    return SamplingParams(
        **known | settings, structured_outputs=StructuredOutputsParams(regex=text)
    )


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_an_output_ends_at_any_draft(shape, ahead):
    """At the first, the second, .. and before the first, of grammars that leave one token."""
    whole = "abcdefghij"
    lengths = range(1, len(whole) + 1)
    ways = [{}, {"temperature": 1.5, "seed": 3}, {"ignore_eos": True}]
    for way in ways:
        asked = [regex(whole[:length], **way) for length in lengths]
        found = outputs_of(asked, **shape, async_scheduling=ahead)
        for output, length in zip(found, lengths, strict=True):
            one = output.outputs[0]
            # After the end of a grammar, only an end may follow.
            ends = 30 - length if "ignore_eos" in way else 1
            assert one.token_ids == [*whole[:length].encode(), *[END] * ends]
            assert one.text == whole[:length]
            assert one.finish_reason == ("length" if "ignore_eos" in way else "stop")


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_an_end_is_allowed_at_the_end_alone(shape):
    """Of a model and of drafts that say nothing else."""
    asked = [regex(f"[a-z]{{{count}}}") for count in range(1, 8)]
    found = outputs_of(asked, model=Ends(), **shape)
    assert [len(text) for text in texts(found)] == list(range(1, 8))
    assert all(output.outputs[0].token_ids[-1] == END for output in found)
    free = outputs_of([SamplingParams(temperature=0, max_tokens=9)], model=Ends(), **shape)
    assert free[0].outputs[0].token_ids == [END]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_drafts_that_are_all_illegal_cost_nothing_else(shape):
    asked = [regex("[a-z]{6,12}", temperature=index % 2, seed=index) for index in range(6)]
    want = texts(outputs_of(asked, k=0))

    def digits(tokens: list[int]) -> int:
        return 48 + len(tokens) % 8

    found = outputs_of(asked, rule=digits, **shape)
    assert texts(found) == want
    # But for the end, which is forced.
    assert all(output.stats.accepted <= 1 and output.stats.drafted for output in found)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_others_beside_constrained_ones_are_as_alone(shape):
    free = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=20, ignore_eos=True)
        for index in range(3)
    ]
    # Two slots: others take those of constrained ones, which have left their masks there.
    short = [regex("[a-f]{3}")] * 2
    mixed = [one for pair in zip(free, [regex("[a-f]{25}")] * 3, strict=True) for one in pair]
    found = outputs_of([*short, *mixed], **shape, max_num_seqs=2)
    for index, one in enumerate(free):
        place = 2 + 2 * index
        tokens = found[place].outputs[0].token_ids
        assert tokens == MODEL.decode([7, place], one)
        assert found[place].stats.accepted


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_constraints_hold_without_drafts(shape):
    """Alone, and beside constrained requests with drafts, whose forced text is drafted."""
    asked = ["[a-f]{5,9}", "a long text that is forced", "[0-9]+x"]
    off = [regex(text, speculate=False) for text in asked]
    want = texts(outputs_of(off, k=0))
    assert texts(outputs_of(off, **shape)) == want
    both = outputs_of([*off, *map(regex, asked)], **shape)
    assert texts(both[:3]) == want
    assert [output.stats.drafted for output in both[:3]] == [0, 0, 0]
    assert all(output.stats.accepted for output in both[3:5])
