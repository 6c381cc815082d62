"""Trees of drafts: no token changes, drafts are those of whole sequences along every path, and more
are accepted."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch

from mtpkit.engine import SamplingParams
from mtpkit.engine.device.executor import Executor
from mtpkit.engine.drafting.growth import DynamicGrowth, Shape, StaticGrowth
from mtpkit.engine.requests.tree import DynamicTree, TokenTree, parse_tree
from mtpkit.errors import UserError
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from tests.engine.fakes import KnownTokens
from tests.engine.planned import planned_rows
from tests.engine.tiny import (
    decode,
    generate,
    greedy,
    make_llm,
    make_prompts,
    penalised,
    ruled_model,
    tiny_model,
)
from tests.shared import each

PROMPTS = make_prompts()
FIXED = dict(speculative_token_tree=[2, 2, 1])
GROWN = dict(num_speculative_tokens=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
ODD = dict(
    speculative_token_tree="[[0], [1], [2], [0, 0], [0, 0, 0], [1, 0], [1, 0, 0], [1, 0, 1]]"
)
TREES = {"fixed": FIXED, "grown": GROWN, "odd": ODD}
BASES = {
    "mamba": ("M-*M-", "*-"),
    "delta": ("G-*G-", "*-"),
    "latent": ("+-M+", "+-"),
    "attention": ("*-*-", "*-"),
    "recurrent heads": ("M*M-", "M*"),
    "delta heads": ("G*G-", "G*"),
}


class Trees:
    """A drafter around another: keeps the trees that it makes after each sequence of known tokens;
    with `truth`, some path of each tree is made right, so that paths of all lengths and ranks are
    accepted."""

    def __init__(self, inner, tree, truth=()) -> None:
        self.inner = inner
        self.tree = tree
        self.truth = truth
        self.known = KnownTokens()
        self.made = {}

    def choose(self, known: list[int], depth: int, count: int) -> int:
        """Which of `count` siblings is made right; `count`: none."""
        return (13 * len(known) + sum(known) * (depth + 1) + depth) % (1 + count)

    def draft(self, hidden, batch, verdict):
        drafts = self.inner.draft(hidden, batch, verdict)
        token_ids = drafts.token_ids.clone()
        for row, known in enumerate(self.known.after(batch, verdict)):
            parents = list(range(-1, token_ids.shape[1]))
            if batch.shape.trees:
                parents = (
                    list(self.tree.parents)
                    if drafts.parents is None
                    else drafts.parents[row].tolist()
                )
            self.made[tuple(known)] = parents, [-1, *drafts.token_ids[row].tolist()]
            following = [one[len(known) :] for one in self.truth if one[: len(known)] == known]
            at = 0
            for depth, token in enumerate(following[0] if following else []):
                children = [child for child, parent in enumerate(parents) if parent == at]
                choice = self.choose(known, depth, len(children))
                if choice >= len(children):
                    break
                for child in children:  # what chance made right must not come first
                    if token_ids[row, child - 1] == token:
                        token_ids[row, child - 1] = (token + 1) % 61
                at = children[choice]
                token_ids[row, at - 1] = token
        return dataclasses.replace(drafts, token_ids=token_ids)


def tree_llm(model, tree: dict, **settings):
    settings = {**tree, **settings}
    return make_llm(model, settings.pop("num_speculative_tokens", None), **settings)


def watched(llm, truth=()) -> Trees:
    """The drafter that watches the one of an LLM from now on."""
    trees = llm.engine.executor.drafter = Trees(
        llm.engine.executor.drafter, llm.engine.config.tree, truth
    )
    return trees


def guided(llm, prompts=PROMPTS):
    watched(llm, [prompt + decode(llm.model, prompt, 26) for prompt in prompts])
    return llm


def check_lossless(llm, prompts=PROMPTS, max_tokens: int = 20) -> None:
    """Tokens are those without drafts; paths of several lengths and ranks were accepted, most trees
    being shallow."""
    assert generate(llm, prompts, greedy(max_tokens)) == [
        decode(llm.model, prompt, max_tokens) for prompt in prompts
    ]
    stats = llm.stats().acceptance
    assert all(0 < rate < 1 for rate in stats.conditional_acceptance[:2])
    assert [sum(ranks) for ranks in stats.ranks_per_depth] == stats.accepted_per_depth
    assert stats.ranks_per_depth[0][1] > 0 and stats.drafted == stats.steps * (
        llm.engine.config.decode_width - 1
    )


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("base", BASES)
def test_no_token_changes(base, tree, rollback):
    """Chunks beside decode rows, and results that are a step late."""
    model = tiny_model("repeated", *BASES[base])
    settings = dict(
        state_rollback=rollback, async_scheduling=rollback == "replay", max_num_batched_tokens=19
    )
    check_lossless(guided(tree_llm(model, TREES[tree], **settings)))


def test_drafts_after_the_end_of_an_output_are_not_counted():
    """Where all drafts are right, each step but the last brings a token more than it has depths."""
    model = tiny_model()
    prompt = PROMPTS[3]
    truth = [*prompt, *decode(model, prompt, 26)]
    for max_tokens, accepted in (
        (2, [1, 0, 0]),
        (3, [1, 1, 0]),
        (5, [1, 1, 1]),
        (6, [2, 1, 1]),
        (8, [2, 2, 2]),
    ):
        llm = tree_llm(model, FIXED, async_scheduling=False)
        watched(llm, [truth]).choose = lambda known, depth, count: 0
        generate(llm, [prompt], greedy(max_tokens))
        assert llm.stats().acceptance.accepted_per_depth == accepted
        assert llm.stats().acceptance.reached_per_depth == accepted


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("tree", [FIXED, GROWN], ids=["fixed", "grown"])
@pytest.mark.parametrize("heads", ["repeated", "distinct"])
def test_a_prefix_cache(heads, tree, rollback):
    """Checkpoints lie behind paths that were kept; what follows them is the same with the cache and
    without."""
    model = tiny_model(heads, "M*G-", "*-")
    llm = tree_llm(
        model, tree, state_rollback=rollback, enable_prefix_caching=True, async_scheduling=True
    )
    history = PROMPTS[3]
    for _ in range(3):
        guided(llm, [history])
        (output,) = generate(llm, [history], greedy(9), poison=False)
        assert output == decode(model, history, 9)
        history = [*history, *output, 5]
    stats = llm.stats()
    assert stats.cached_tokens > 0.5 * stats.prompt_tokens


@pytest.mark.parametrize("settings", [{}, dict(block_size=2, num_blocks=40, async_scheduling=True)])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("pattern", ["*-", "M*"])
def test_distinct_heads_and_preemption(pattern, tree, settings):
    """Prompts shorter than the tree is deep among them."""
    prompts = make_prompts((1, 2, 3, 9, 21))
    llm = guided(
        tree_llm(tiny_model("distinct", "M*M-", pattern), TREES[tree], **settings), prompts
    )
    check_lossless(llm, prompts)
    assert (llm.stats().preemptions > 0) == bool(settings)


@functools.cache
@torch.inference_mode()
def best_after(model, known: tuple[int, ...], path: tuple[int, ...], count: int) -> list[int]:
    """The best tokens of the depth after a path of drafts, from whole sequences without caches."""
    attention = "serving" if model.mtpkit_config.mtp.repeated else "per_depth"
    ids = torch.tensor([[*known, *path]])
    *_, state = unroll_depths(
        model, base_forward(model, ids, SequenceInput()), ids, 1 + len(path), attention
    )
    return compute_logits(model, state[len(known) - 2, 0]).topk(count).indices.tolist()


@pytest.mark.parametrize("tree", [FIXED, GROWN], ids=["fixed", "grown"])
@pytest.mark.parametrize(
    ("heads", "pattern", "rules"),
    [
        ("repeated", "*-", {}),
        ("repeated", "*M", {}),
        ("repeated", "*-", {"attention_window": 4, "attention_sinks": 1}),
        ("distinct", "*-", {}),
        ("distinct", "M*", {}),
        ("distinct", "*-", {"attention_window": 4, "attention_sinks": 1}),
    ],
)
def test_drafts_are_those_of_whole_sequences(heads, pattern, rules, tree):
    model = ruled_model(heads, pattern, **rules) if rules else tiny_model(heads, "M*M-", pattern)
    prompts = make_prompts((1, 2, 9))
    llm = tree_llm(model, tree, max_num_batched_tokens=12)
    trees = watched(llm, [prompt + decode(model, prompt, 26) for prompt in prompts])
    generate(llm, prompts, greedy(8))
    assert len(trees.made) > 10
    check_drafts(model, trees)
    if tree is GROWN:
        assert len({tuple(parents) for parents, _ in trees.made.values()}) > 1, (
            "trees of several shapes grow"
        )


def check_drafts(model, trees) -> None:
    """Every draft is a best token after its path."""
    for known, (parents, tokens) in trees.made.items():
        paths = [()]
        for node in range(1, len(parents)):
            paths.append((*paths[parents[node]], tokens[node]))
        for node in {parent for parent in parents if parent >= 0}:
            children = [tokens[child] for child, parent in enumerate(parents) if parent == node]
            assert children == best_after(model, known, paths[node], len(children)), (
                len(known),
                node,
            )


def changing(llm, order=("tree", "tree", "tree", 0, "tree", "tree", 2, 1, "tree", 0, 0, 2, 2, 3)):
    """The steps of an LLM take these drafts in turn."""
    tree = llm.engine.config.tree
    most = llm.engine.config.num_speculative_tokens
    turns = itertools.cycle(tree if one == "tree" else min(one, most) for one in order)
    llm.engine.speculation.choose = lambda rows: next(turns)
    return llm


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("tree", [FIXED, GROWN], ids=["fixed", "grown"])
@pytest.mark.parametrize(("heads", "pattern"), [("repeated", "*M"), ("distinct", "*-")])
def test_steps_of_trees_and_of_chains(heads, pattern, tree, rollback):
    """In any order: tokens are those without drafts, and drafts those of whole sequences."""
    model = tiny_model(heads, "M*G-", pattern)
    prompts = make_prompts((1, 2, 9, 21))
    llm = tree_llm(
        model,
        tree,
        state_rollback=rollback,
        async_scheduling=rollback == "replay",
        max_mixed_tokens=0,
    )
    trees = watched(changing(llm), [prompt + decode(model, prompt, 26) for prompt in prompts])
    assert generate(llm, prompts, greedy(20)) == [decode(model, prompt, 20) for prompt in prompts]
    check_drafts(model, trees)
    stats = llm.stats().acceptance
    assert any(sum(others) for _, *others in stats.ranks_per_depth) and {
        len(tokens) for _, tokens in trees.made.values()
    } > {1, 2, 3}
    assert [sum(ranks) for ranks in stats.ranks_per_depth] == stats.accepted_per_depth


@pytest.mark.parametrize("ahead", [False, True])
def test_auto_learns_of_drafts_that_were_made_for_the_step(ahead, monkeypatch):
    """What stands in the places of a tree after a step of chains says nothing; a tree's first draft
    is a chain's."""
    monkeypatch.setattr(Executor, "time_step", lambda *args: 1.0)
    llm = tree_llm(tiny_model(), FIXED, num_speculative_tokens="auto", async_scheduling=ahead)
    tree = llm.engine.config.tree
    made = []
    told = []
    launch = llm.engine.executor.launch
    speculation = changing(llm).engine.speculation
    assert {drafts for _, drafts in speculation.step_times} == {0, 1, 2, 3, tree}
    monkeypatch.setattr(
        llm.engine.executor, "launch", lambda plan: made.append(plan) or launch(plan)
    )
    monkeypatch.setattr(speculation, "observe", lambda accepted, fresh, rates: told.append(fresh))
    monkeypatch.setattr(
        speculation, "observe_trees", lambda ranks: told.append([len(one) for one in ranks])
    )
    generate(llm, PROMPTS[1:2], greedy(30))
    want = []
    for before, plan in itertools.pairwise(made):
        fresh = min(before.num_speculative_tokens, plan.num_speculative_tokens)
        if plan.trees:
            want.append([fresh] if before.trees else [])
        else:
            want.append([min(1, fresh) if before.trees else fresh])
    assert told == want and [] in told and [3] in told
    stats = llm.stats().acceptance
    assert stats.drafted == sum(
        plan.trees * before.trees * 10 + (0 if plan.trees else fresh[0])
        for (before, plan), fresh in zip(itertools.pairwise(made), want, strict=True)
    )


def test_a_grown_tree_keeps_the_most_probable_paths():
    """The worked example of two depths with two children each, whose second child of token 0 has
    none."""
    growth = DynamicGrowth(DynamicTree(2, 2, 4))
    growth.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.6, 0.2]]]).log())
    growth.add(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[[0.5, 0.4], [0.9, 0.1]]]).log())
    tokens, parents = growth.drafts()
    assert tokens.tolist() == [[7, 1, 2]] and parents.tolist() == [[-1, 0, 1, 1]]
    certain = DynamicGrowth(DynamicTree(3, 2, 4))
    for width in (1, 2, 2):
        certain.add(
            torch.ones(1, width, 2, dtype=torch.int64),
            torch.tensor([0.0, -torch.inf]).expand(1, width, 2),
        )
    assert certain.drafts()[1].tolist() == [[-1, 0, 1, 2]], (
        "where scores are equal, parents come first"
    )


@pytest.mark.parametrize("rounding", [1e-7, 0.5])
def test_a_child_that_rounding_makes_likelier_than_its_parent_comes_after_it(rounding):
    """A probability above 1 by rounding: the parent 8 has the score of its child, and both are
    taken, parent first."""
    growth = DynamicGrowth(DynamicTree(2, 2, 4))
    growth.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.0, -1.0]]]))
    growth.add(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[[-2.0, -3.0], [rounding, -3.0]]]))
    tokens, parents = growth.drafts()
    assert tokens.tolist() == [[7, 8, 3]] and parents.tolist() == [[-1, 0, 0, 2]]
    two = DynamicGrowth(DynamicTree(2, 2, 3))
    two.add(torch.tensor([[[7, 8]]]), torch.tensor([[[0.0, -1.0]]]))
    two.add(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[[-2.0, -3.0], [rounding, -3.0]]]))
    tokens, parents = two.drafts()
    assert tokens.tolist() == [[7, 8]] and parents.tolist() == [[-1, 0, 0]], (
        "a child without its parent"
    )


def test_candidates_without_a_valid_score_are_taken_last():
    growth = DynamicGrowth(DynamicTree(2, 2, 4))
    growth.add(torch.tensor([[[7, 8]]]), torch.tensor([[[math.nan, -1.0]]]))
    growth.add(torch.tensor([[[1, 2], [3, 4]]]), torch.tensor([[[-0.1, -0.2], [-1.0, math.nan]]]))
    tokens, parents = growth.drafts()
    assert tokens.tolist() == [[8, 1, 2]] and parents.tolist() == [[-1, 0, 1, 1]]


def test_levels_at_negative_positions_are_hidden_and_the_first_position_is_not():
    growth = StaticGrowth(Shape(parse_tree([2, 2, 1, 1]), torch.device("cpu")))
    for families, width in ((1, 2), (2, 2), (4, 1), (4, 1)):
        growth.add(
            torch.zeros(1, families, width, dtype=torch.int64), torch.zeros(1, families, width)
        )
    deepest = growth.levels[-1]
    whole = deepest.masks.tolist()[0]
    first = 0b11
    second = 0b111100
    assert all(mask & first and mask & second and mask >> 6 for mask in whole)
    for start, hidden in ((1, 0), (0, 0), (-1, first), (-2, first | second)):
        assert deepest.masks_from(torch.tensor([start])).tolist() == [
            [mask & ~hidden for mask in whole]
        ]


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize("base", BASES)
def test_a_chain_that_is_given_as_a_tree_is_the_chain(base, rollback, monkeypatch):
    """It runs as the chain; run as a tree all the same, it leaves the very bits of tokens, drafts
    and states of the base."""
    model = tiny_model("repeated", *BASES[base])
    settings = dict(state_rollback=rollback, max_num_seqs=len(PROMPTS))
    chain = make_llm(model, 3, **settings)
    assert (
        make_llm(model, None, speculative_token_tree=[1, 1, 1], **settings).engine.config
        == chain.engine.config
    )
    monkeypatch.setattr(TokenTree, "is_chain", False)
    tree = make_llm(model, None, speculative_token_tree=[1, 1, 1], **settings)
    assert tree.engine.config.tree is not None
    for llm in (chain, tree):
        for state in llm.engine.executor.states.all():
            for tensor in state.tensors.values():
                tensor.zero_()
    assert generate(chain, PROMPTS, poison=False) == generate(tree, PROMPTS, poison=False)
    assert chain.engine.executor.state.tokens.equal(tree.engine.executor.state.tokens)
    for name, states in tree.engine.executor.states.layers.items():
        for have, want in zip(states, chain.engine.executor.states.layers[name], strict=True):
            # Behind what is committed, heads leave other entries that nothing reads.
            same = (tensor.equal(want.tensors[part]) for part, tensor in have.tensors.items())
            assert name.startswith("mtp.") or all(same), name


@pytest.mark.parametrize("tree", TREES)
def test_penalties_and_seeds(tree):
    """Sampled with a seed, the tokens are those of decoding without drafts; penalties see the
    drafts of a path."""
    model = tiny_model()
    for params in (
        penalised(),
        SamplingParams(temperature=1.3, seed=5, max_tokens=20, ignore_eos=True),
        penalised(temperature=0.8, seed=3),
    ):
        want = generate(make_llm(model, 0), PROMPTS, params)
        llm = tree_llm(model, TREES[tree])
        watched(llm, [prompt + tokens for prompt, tokens in zip(PROMPTS, want, strict=True)])
        assert generate(llm, PROMPTS, params) == want
        assert llm.stats().acceptance.ranks_per_depth[0][1] > 0


def test_more_is_accepted_than_of_the_chain_inside():
    model = tiny_model("repeated", "M*")
    lengths = {}
    for name, settings in {
        "chain": dict(num_speculative_tokens=2),
        "tree": dict(speculative_token_tree=[12, 3]),
    }.items():
        llm = tree_llm(model, settings)
        generate(llm, PROMPTS, greedy(40))
        lengths[name] = llm.stats().acceptance_length
    assert lengths["tree"] > lengths["chain"]


@each(
    ("given", "parents"),
    [
        ([2, 1], (-1, 0, 0, 1, 2)),
        ("[3]", (-1, 0, 0, 0)),
        ([1, 1], (-1, 0, 1)),
        ([1, 2], (-1, 0, 1, 1)),
        ([[0], [1], [0, 0], [0, 1], [0, 0, 0]], (-1, 0, 0, 1, 1, 3)),
        ("[(1,), (0,), (1, 0)]", (-1, 0, 0, 2)),
    ],
)
def test_trees_are_read(given, parents):
    tree = parse_tree(given)
    assert tree == TokenTree(parents) and tree.depth == max(tree.depths)
    assert tree.is_chain == (given == [1, 1])


def test_the_drafts_of_a_grown_tree_are_counted():
    """3 at depth 1, and 3 of each of 3 at both of the others; the heads run on 3 at two depths."""
    grown = DynamicTree(depth=3, topk=3, tokens=12)
    assert (grown.candidates, grown.entries, grown.most_children) == (3 + 9 + 9, 6, 3)


@each(
    ("given", "why"),
    [
        ([], "at least one entry"),
        ("two", "must be a list"),
        ([2, 0], "from 1 on"),
        ([True], "from 1 on"),
        ([2, [0]], "and not both"),
        ([[0, 0]], r"has the path \[0, 0\] but not \[0\]"),
        ([[1]], r"has the path \[1\] but not \[0\]"),
        ([8, 8], "more than 62 drafts"),
        ([[rank] for rank in range(63)], "more than 62 drafts"),
    ],
)
def test_what_is_no_tree_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        parse_tree(given)


@each(
    ("settings", "why"),
    [
        (dict(speculative_token_tree="[2"), "speculative_token_tree is '\\[2', must be a list"),
        (dict(speculative_token_tree=[2], speculative_eagle_topk=2), "exclude each other"),
        (
            dict(speculative_token_tree=[2, 2], num_speculative_tokens=3),
            "has depth 2: leave it out",
        ),
        (dict(speculative_num_draft_tokens=4), "needs speculative_eagle_topk"),
        (
            dict(num_speculative_tokens=2, speculative_eagle_topk=2, draft_sampling=True),
            "leave draft_sampling out",
        ),
        (
            dict(
                num_speculative_tokens=2, speculative_eagle_topk=2, speculative_num_draft_tokens=9
            ),
            "7 tokens to choose",
        ),
        (
            dict(speculative_token_tree=[5], draft_vocab=[1, 2, 3]),
            "5 children, but there are 3 tokens",
        ),
        (dict(speculative_token_tree=[2, 2], max_num_batched_tokens=6), "at least 7"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, why):
    with pytest.raises(UserError, match=why):
        tree_llm(tiny_model(), settings)


def test_a_step_may_have_just_the_tokens_of_one_tree():
    llm = tree_llm(tiny_model(), dict(speculative_token_tree=[2, 2], max_num_batched_tokens=7))
    assert llm.engine.config.max_num_batched_tokens == llm.engine.config.decode_width == 7


@pytest.mark.parametrize("tree", [FIXED, GROWN], ids=["fixed", "grown"])
def test_a_tree_after_a_chain_holds_nothing_of_the_former_request_of_its_slot(tree):
    """The step of a prompt that makes a chain of drafts leaves the other places of the tree
    unwritten."""
    fed = []
    for former in PROMPTS[1:3]:
        llm = changing(tree_llm(tiny_model(), tree, max_num_seqs=2), ("tree",))
        run = llm.engine.executor.runner.run
        trees = []
        for prompt, tokens in ((PROMPTS[4], 40), (former, 6)):
            llm.engine.add_request(prompt, greedy(tokens))
        while len(llm.engine.scheduler.running) != 1:
            llm.engine.step()
        llm.engine.add_request([3, 1, 4], greedy(6), "next")
        changing(llm, (1, "tree", "tree"))
        llm.engine.executor.runner.run = lambda batch, run=run, trees=trees: (
            trees.append(batch) or run(batch)
        )
        llm.engine.step()
        llm.engine.step()
        batch = trees[-1]
        assert batch.shape.trees and planned_rows()[1].request.request_id == "next"
        fed.append([batch.token_ids.view(2, -1)[1].tolist(), batch.inputs.tree.parents[1].tolist()])
    assert fed[0] == fed[1]
