"""Decode rows that the token budget has no room for take turns: nothing waits longer than the
others take."""

import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mtpkit.engine import SamplingParams
from mtpkit.engine.requests.tree import DraftShape, DynamicTree, TokenTree, parse_tree
from tests.engine.fakes import HashModel, fake_engine, run
from tests.engine.tiny import decode, greedy, make_llm, make_prompts, tiny_model
from tests.shared import examples

MODEL = HashModel()


def lasting(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Queues:
    """A plain model of who decodes next: one queue per batch, whose first requests run and join its
    end again.

    It watches the plans of a scheduler and compares the decode rows of each with the front of the
    queue. `waits` has, for each request, the number of plans of its batch in which it could have
    decoded since its last step.
    """

    def __init__(self, scheduler, budget: int) -> None:
        self.scheduler = scheduler
        self.budget = budget
        self.queues = [list[str]() for _ in range(scheduler.config.num_batches)]
        self.waits: dict[str, int] = {}
        self.longest = 0
        self.crowded = 0
        """Plans in which some rows had to wait."""
        self._plan = scheduler.plan
        self._plan_decode = scheduler.turns.plan
        scheduler.plan = self.plan
        scheduler.turns.plan = self.plan_decode

    def plan_decode(self, batch: int, drafts: DraftShape, budget: int):
        admission = self.scheduler.admission
        most = budget // (1 + drafts if isinstance(drafts, int) else drafts.tokens)
        running = admission.running_in(batch)
        ready = [r.request_id for r in running if r.decoding and not r.ends_in_flight]
        preemptions = admission.num_preemptions
        rows = self._plan_decode(batch, drafts, budget)
        if rows is None:
            return None
        chosen = [row.request.request_id for row in rows]
        queue = self.queues[batch]
        if preemptions == admission.num_preemptions:
            assert sorted(chosen) == sorted([one for one in queue if one in ready][:most])
        assert rows or not ready or preemptions < admission.num_preemptions
        self.crowded += len(chosen) < len(ready)
        for one in ready:
            self.waits[one] = self.waits.get(one, 0) + 1
            self.longest = max(self.longest, self.waits[one] - (one in chosen))
        return rows

    def plan(self, decision):
        plans = self._plan(decision)
        sampling = [row.request for plan in plans for row in plan.rows if row.samples]
        live = {request.request_id for request in self.scheduler.running}
        for request in sorted(sampling, key=lambda request: request.arrival):
            queue = self.queues[plans[0].batch]
            queue[:] = [one for one in queue if one != request.request_id] + [request.request_id]
            self.waits.pop(request.request_id, None)
        for queue in self.queues:
            queue[:] = [one for one in queue if one in live]
        for one in [one for one in self.waits if one not in live]:
            del self.waits[one]
        return plans


shapes = st.sampled_from([0, 1, 2, 3, parse_tree([2, 1]), DynamicTree(2, 2, 4)])


@hypothesis_settings(max_examples=examples(30))
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 25)), min_size=2, max_size=9
    ),
    shape=shapes,
    rows=st.integers(1, 3),
    rest=st.integers(0, 3),
    num_batches=st.integers(1, 2),
    ahead=st.booleans(),
    spare_blocks=st.sampled_from([0, 3, 200]),
    depths=st.lists(st.integers(0, 3), max_size=4),
)
def test_rows_take_turns(arrivals, shape, rows, rest, num_batches, ahead, spare_blocks, depths):
    """The plain model chooses the same rows, no row waits for more than the others' turns, and
    outputs are those of plain decoding; with steps ahead, several batches, trees, changing K and
    preemptions."""
    tree = shape if isinstance(shape, TokenTree | DynamicTree) else None
    k, width = (tree.depth, tree.tokens) if tree else (shape, 1 + shape)
    longest = max(prompt + output for _, prompt, output in arrivals)
    engine = fake_engine(
        MODEL,
        num_speculative_tokens=k,
        tree=tree,
        max_num_batched_tokens=rows * width + min(rest, width - 1),
        max_num_seqs=8,
        num_batches=num_batches,
        async_scheduling=ahead,
        num_blocks=-(-(longest + 40) // 4) + spare_blocks,
    )
    queues = Queues(engine.scheduler, engine.config.max_num_batched_tokens)
    if depths and not tree:
        turns = itertools.cycle(min(one, k) for one in depths)
        engine.speculation.choose = lambda rows: next(turns)
    finished = {}
    for step in itertools.count():
        for index, (arrival, prompt, output) in enumerate(arrivals):
            if arrival == step:
                engine.add_request([index] * prompt, lasting(output), str(index))
        if engine.has_unfinished:
            finished |= {one.request_id: one for one in engine.step() if one.finished}
            engine.scheduler.check_integrity()
        elif step > 12:
            break
    slots = -(-8 // num_batches)
    assert queues.longest <= (slots - 1) // rows
    for index, (_, prompt, output) in enumerate(arrivals):
        assert finished[str(index)].outputs[0].token_ids == MODEL.decode(
            [index] * prompt, lasting(output)
        )


@pytest.mark.parametrize("ahead", [False, True])
def test_eight_requests_through_room_for_two(ahead):
    """Each decodes in every fourth step, the youngest as the oldest."""
    engine = fake_engine(
        MODEL,
        "always",
        num_blocks=200,
        num_speculative_tokens=3,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        async_scheduling=ahead,
    )
    for index in range(8):
        engine.add_request([index], lasting(401), str(index))
    launch = engine.executor.launch
    seen = []

    def launching(plan):
        seen.append([int(row.request.request_id) for row in plan.decode_rows])
        return launch(plan)

    engine.executor.launch = launching
    for _ in range(90):
        engine.step()
    rows = [one for one in seen if one][:80]
    for index in range(8):
        steps = [step for step, chosen in enumerate(rows) if index in chosen]
        assert len(steps) >= 19
        assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {4}


@pytest.mark.parametrize(("num_blocks", "budget"), [(7, 3), (8, 4)], ids=["one row", "two rows"])
def test_with_blocks_for_few_the_last_in_turn_gives_way_to_the_others(num_blocks, budget):
    """A budget of one row, whose turn is the youngest request's, which finds no block: another one
    decodes. A budget of two, in which the one that has waited longest is the younger: it is not
    preempted once it has a row."""
    engine = fake_engine(
        MODEL,
        "always",
        num_blocks=num_blocks,
        block_size=2,
        num_speculative_tokens=1,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
    )
    for index in range(4):
        engine.add_request([index], lasting(12), str(index))
    finished = run(engine)
    assert engine.stats().preemptions
    for index in range(4):
        assert finished[str(index)].outputs[0].token_ids == MODEL.decode([index], lasting(12))


@pytest.mark.parametrize("settings", [{}, {"tree": "[2, 1]"}, {"state_rollback": "snapshot"}])
def test_a_model_decodes_the_same_in_turns(settings):
    """Real states and heads, some of whose rows stand still in each step."""
    model = tiny_model()
    prompts = make_prompts((1, 4, 8, 9, 3))
    settings = {
        ("speculative_token_tree" if key == "tree" else key): value
        for key, value in settings.items()
    }
    llm = make_llm(
        model,
        None if "speculative_token_tree" in settings else 2,
        max_num_batched_tokens=10,
        **settings,
    )
    outputs = llm.generate(prompts, greedy(14))
    assert [one.outputs[0].token_ids for one in outputs] == [
        decode(model, prompt, 14) for prompt in prompts
    ]


@pytest.mark.parametrize("k", [0, 1])
def test_resumed_rows_count_in_the_budget(k):
    """Prompts that are known in full cost a row each, and there is room for three of them."""
    engine = fake_engine(
        MODEL,
        num_blocks=300,
        num_speculative_tokens=k,
        max_num_seqs=8,
        max_num_batched_tokens=3,
        enable_prefix_caching=True,
        num_checkpoints=20,
    )
    prompt = [1, 2, 3, 4, 5, 6, 7]
    engine.add_request(prompt, lasting(1), "first")
    run(engine)
    plan = engine.scheduler.plan
    sizes = []
    resumed = []

    def watch(decision):
        plans = plan(decision)
        sizes.append(sum(row.length for one in plans for row in one.rows))
        resumed.append(sum(len(one.rows) for one in plans if one.restores))
        return plans

    engine.scheduler.plan = watch
    longer = [*prompt, 8, 9]
    for index in range(8):
        engine.add_request(longer if index % 2 else prompt, lasting(3), str(index))
    finished = run(engine)
    assert max(sizes) == 3 and sum(resumed) == 8
    for index in range(8):
        assert finished[str(index)].num_cached_tokens >= 7
        want = MODEL.decode(longer if index % 2 else prompt, lasting(3))
        assert finished[str(index)].outputs[0].token_ids == want


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            dict(num_speculative_tokens=3, max_num_batched_tokens=31),
            "room for 7 of 8 requests of 4 tokens",
        ),
        (dict(num_speculative_tokens=3, max_num_batched_tokens=32), None),
        (
            dict(num_speculative_tokens=0, max_num_batched_tokens=7),
            "room for 7 of 8 requests of 1 tokens",
        ),
        (
            dict(speculative_token_tree="[3, 2]", max_num_batched_tokens=79),
            "room for 7 of 8 requests of 10 tokens",
        ),
        (dict(speculative_token_tree="[3, 2]", max_num_batched_tokens=80), None),
        (dict(num_speculative_tokens=3), None),
        (
            dict(num_speculative_tokens=3, max_model_len=129),
            "max_model_len 129 is above the model's 128 positions",
        ),
        (dict(num_speculative_tokens=3, max_model_len=128), None),
    ],
)
def test_limits_that_a_user_should_know_of_are_said_at_the_start(settings, said, caplog):
    with caplog.at_level(logging.WARNING):
        make_llm(tiny_model(), settings.pop("num_speculative_tokens", None), **settings)
    messages = [record.getMessage() for record in caplog.records]
    warnings = [one for one in messages if "take turns" in one or "max_position_embeddings" in one]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]


def test_k_is_chosen_from_the_time_of_all_turns(monkeypatch):
    """A budget of 8 tokens: at K = 3 four requests take two steps of two rows, at K = 0 and 1 one
    step."""
    engine = fake_engine(MODEL, num_speculative_tokens=3, max_num_batched_tokens=8)
    timed = []
    monkeypatch.setattr(engine.executor, "time_step", lambda *what: timed.append(what) or 1.0)
    engine.adapt([1, 4], repeats=1)
    times = engine.speculation.step_times
    assert {shape: times[4, shape] for shape in range(4)} == {0: 1, 1: 1, 2: 2, 3: 2}
    assert {shape: times[1, shape] for shape in range(4)} == dict.fromkeys(range(4), 1)
    shapes = {(shape.decode_rows, shape.drafts) for shape, _ in timed}
    assert (2, 3) in shapes and (4, 1) in shapes and (4, 3) not in shapes
