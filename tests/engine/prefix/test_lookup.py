"""What a waiting request costs: it is looked up again only when what it would find may have
changed."""

import pytest

from mtpkit.engine import SamplingParams
from mtpkit.engine.scheduling.prefix_cache import PrefixCache
from tests.engine.fakes import HashModel, fake_engine

MODEL = HashModel()
SHARED = [1, 2, 3, 4, 5, 6, 7, 8]


def looked_up(engine, monkeypatch) -> list[str]:
    """The requests that are looked up from now on."""
    prefix = engine.scheduler.prefix
    found = []
    look_up = prefix._look_up
    monkeypatch.setattr(
        prefix, "_look_up", lambda request: found.append(request.request_id) or look_up(request)
    )
    return found


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def cached_engine(num_blocks: int, **settings):
    defaults = dict(block_size=2, max_num_seqs=3, num_checkpoints=8, enable_prefix_caching=True)
    return fake_engine(MODEL, "always", num_blocks, **defaults | settings)


def end(engine) -> dict:
    finished = {}
    while engine.has_unfinished:
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


def test_a_waiting_request_is_looked_up_once(monkeypatch):
    """Though a running one publishes blocks meanwhile."""
    engine = cached_engine(24)
    prompt = [*SHARED, *[5] * 30]
    engine.add_request(SHARED, params(1), "first")
    end(engine)
    engine.add_request([9, 9, 9], params(30), "long")
    for _ in range(10):
        engine.step()
    found = looked_up(engine, monkeypatch)
    finds = []
    engine.add_request(prompt, params(4), "waiting")
    engine.step()
    find = engine.scheduler.blocks.find
    monkeypatch.setattr(engine.scheduler.blocks, "find", lambda key: finds.append(key) or find(key))
    published = engine.scheduler.running[0].num_published
    for _ in range(12):
        engine.step()
    assert engine.scheduler.waiting and engine.scheduler.running[0].num_published > published + 3
    assert found == ["waiting"] and not finds
    output = end(engine)["waiting"]
    assert output.num_cached_tokens == len(SHARED) and found == ["waiting"]
    assert output.outputs[0].token_ids == MODEL.decode(prompt, params(4))


def test_a_waiting_request_finds_what_comes_while_it_waits(monkeypatch):
    """The blocks and the end of the running one, whose tokens it begins with."""
    engine = cached_engine(13)
    output = MODEL.decode(SHARED, params(12))
    found = looked_up(engine, monkeypatch)
    engine.add_request(SHARED, params(12), "running")
    engine.step()
    engine.add_request([*SHARED, *output, 3, 3, 3, 3], params(2), "waiting")
    engine.step()
    assert engine.scheduler.waiting
    finished = end(engine)
    assert finished["waiting"].num_cached_tokens == len(SHARED) + len(output) - 1
    assert found[0] == "running" and 2 < len(found) <= 10


def test_that_test_finds_a_lookup_that_is_kept_too_long(monkeypatch):
    """Random histories seldom do: a checkpoint must come while a request waits for blocks."""
    monkeypatch.setattr(PrefixCache, "_note", lambda self, entry: None)
    with pytest.raises(AssertionError):
        test_a_waiting_request_finds_what_comes_while_it_waits(monkeypatch)


def test_what_a_waiting_request_would_find_is_evicted_last():
    """Blocks that were left after its own go first."""
    engine = cached_engine(20)
    for prompt, name in ((SHARED, "first"), ([9, 8, 9, 7], "second")):
        engine.add_request(prompt, params(1), name)
        end(engine)
    engine.add_request([6, 6, 6], params(28), "running")
    for _ in range(11):
        engine.step()
    engine.add_request([*SHARED, *[5] * 28], params(2), "waiting")
    engine.step()
    assert engine.scheduler.waiting and not engine.scheduler.blocks.num_evicted
    output = end(engine)["waiting"]
    assert engine.scheduler.blocks.num_evicted and output.num_cached_tokens == len(SHARED)


def left(engine, prompt):
    """A request of the prompt, whose blocks are idle and whose checkpoint is kept."""
    scheduler = engine.scheduler
    request = engine.intake.make(prompt, params(1))
    request.prefill_end = request.num_computed = len(prompt)
    request.block_table.extend(scheduler.blocks.allocate(-(-len(prompt) // 2)))
    (request.slot,) = scheduler.slots.allocate(1)
    scheduler.running.append(request)
    scheduler.prefix.keep(request, len(prompt))
    scheduler.admission.release(request)
    return request


def found(engine, prompt) -> int:
    """Number of tokens that are found of a prompt."""
    request = engine.intake.make([*prompt, 1], params(1))
    request.prefill_end = len(request.token_ids)
    hit = engine.scheduler.prefix.match(request)
    return hit.length if hit else 0


@pytest.mark.parametrize("waits", [False, True])
def test_of_an_idle_prompt_the_last_blocks_are_evicted_first(waits):
    """Also where a request that waits has just found them."""
    engine = cached_engine(8)
    request = left(engine, SHARED)
    if waits:
        assert found(engine, SHARED) == len(SHARED)
    blocks = engine.scheduler.blocks
    blocks.allocate(blocks.num_free - 2)
    assert blocks.num_evicted == 2 and len(engine.scheduler.prefix._present(request)) == 2


def test_a_request_without_room_leaves_what_it_found_in_order():
    """Its blocks were shared with it for a moment."""
    engine = cached_engine(8)
    request = left(engine, SHARED)
    scheduler = engine.scheduler
    waiting = engine.intake.make([*SHARED, 5, 5], params(1))
    waiting.prefill_end = len(waiting.token_ids)
    assert not scheduler.admission.reserve(waiting, 18, scheduler.prefix.match(waiting))
    scheduler.blocks.allocate(scheduler.blocks.num_free - 2)
    assert len(scheduler.prefix._present(request)) == 2


@pytest.mark.parametrize("again", ["kept", "resumed"])
def test_a_checkpoint_that_is_used_again_is_evicted_later(again):
    engine = cached_engine(60, num_checkpoints=2)
    first = SHARED
    second = [9, *SHARED]
    third = [8, *SHARED]
    request = left(engine, first)
    left(engine, second)
    if again == "kept":
        left(engine, first)
    else:
        prefix = engine.scheduler.prefix
        request = engine.intake.make([*first, 1], params(1))
        request.prefill_end = len(request.token_ids)
        request.slot = 0
        prefix.resume(prefix.match(request), request)
    left(engine, third)
    assert [found(engine, one) for one in (first, second, third)] == [8, 0, 9]


def test_blocks_of_the_newest_lookup_are_evicted_last():
    """Though another request was looked up just before."""
    engine = cached_engine(8)
    first = SHARED
    second = [9, *SHARED[1:]]
    left(engine, first)
    left(engine, second)
    assert [found(engine, one) for one in (second, first)] == [8, 8]
    blocks = engine.scheduler.blocks
    blocks.allocate(4)
    assert blocks.num_evicted == 4 and [found(engine, one) for one in (first, second)] == [8, 0]
