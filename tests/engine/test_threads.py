"""Calls from several threads, and streams that are half read."""

import threading
import time

import pytest

from mtpkit import SamplingParams
from mtpkit.engine import Engine
from mtpkit.engine.intake import Intake
from mtpkit.errors import UserError
from tests.engine.tiny import decode, greedy, make_llm, make_prompts, tiny_model


def in_threads(count: int, call) -> list:
    """Results or exceptions of `call(index)` in threads that start together."""
    results = [None] * count
    gate = threading.Barrier(count)

    def work(index: int) -> None:
        gate.wait()
        try:
            results[index] = call(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("k", [0, 2])
def test_calls_from_threads_each_get_their_own_outputs(k):
    """Lists and streams, greedy and drawn, and one call that is refused."""
    model = tiny_model()
    prompts = make_prompts((1, 4, 8, 9, 3, 5))
    llm = make_llm(model, k, max_num_seqs=3)
    drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    want = [o.outputs[0].token_ids for o in make_llm(model, 0).generate(prompts, drawn)]

    def call(index: int):
        mine = prompts[index : index + 2]
        if index == 4:
            return llm.generate([], greedy()) + llm.generate([[1], []], greedy())
        if index % 2:
            return [o.outputs[0].token_ids for o in llm.generate(mine, drawn)]
        last = {o.request_id: o for o in llm.stream(mine, greedy())}
        return [last[name].outputs[0].token_ids for name in sorted(last, key=int)]

    results = in_threads(5, call)
    assert [one.outputs[0].finish_reason for one in results[4]] == ["length", "error"]
    assert results[4][1].error.startswith("prompts[1]: the prompt is empty")
    for index in (0, 2):
        assert results[index] == [
            decode(model, prompt, 20) for prompt in prompts[index : index + 2]
        ]
    assert [results[1], results[3]] == [want[1:3], want[3:5]]
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.has_unfinished


def test_requests_of_threads_have_ids_of_their_own(monkeypatch):
    llm = make_llm(tiny_model(), 0)
    count = 8
    id_of = Intake._id_of

    def slowly(self, request_id):
        name = str(self._next_number)
        time.sleep(0.005)
        return id_of(self, name)

    monkeypatch.setattr(Intake, "_id_of", slowly)
    outputs = in_threads(count, lambda index: llm.generate([[1], [2]], greedy(1)))
    assert len({output.request_id for two in outputs for output in two}) == 2 * count


def test_a_stream_of_another_thread_is_waited_for_and_one_of_this_thread_refused():
    llm = make_llm(tiny_model(), 2)
    stream = llm.stream([[1]], greedy())
    next(stream)
    with pytest.raises(
        UserError,
        match="an earlier stream of this thread is still open: read it to its end or close",
    ):
        llm.generate([[3]], greedy())
    results = []
    other = threading.Thread(
        target=lambda: results.append(llm.generate([[3]], greedy())), daemon=True
    )
    other.start()
    other.join(timeout=0.3)
    assert other.is_alive() and not results
    stream.close()
    other.join(timeout=120)
    assert results[0][0].outputs[0].token_ids == decode(tiny_model(), [3], 20)
    assert llm.generate([[3]], greedy())[0].finished


def test_the_thread_that_reads_a_stream_is_refused_not_the_one_that_began_it():
    """The call would wait for itself forever."""
    llm = make_llm(tiny_model(), 0)
    stream = llm.stream([[1]], greedy())
    begun = threading.Event()
    over = threading.Event()

    def begin() -> None:
        next(stream)
        begun.set()
        over.wait()

    threading.Thread(target=begin, daemon=True).start()
    begun.wait(timeout=60)
    results = []

    def read_on_and_call() -> None:
        next(stream)
        try:
            llm.generate([[3]], greedy())
        except UserError as error:
            results.append(str(error))

    reader = threading.Thread(target=read_on_and_call, daemon=True)
    reader.start()
    reader.join(timeout=20)
    over.set()
    assert not reader.is_alive() and "still open" in results[0]
    assert list(stream)[-1].finished and llm.generate([[3]], greedy())[0].finished


def test_a_call_that_fails_lets_the_next_one_run(monkeypatch):
    llm = make_llm(tiny_model(), 0)
    step = Engine.step

    def fail(self, finished_only=False):
        monkeypatch.setattr(Engine, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]], greedy())
    assert llm.generate([[3]], greedy())[0].outputs[0].token_ids == decode(tiny_model(), [3], 20)


def test_requests_of_the_engine_itself_are_not_stepped_by_a_call():
    llm = make_llm(tiny_model(), 0)
    llm.engine.add_request([1, 2], greedy())
    with pytest.raises(UserError, match=r"requests added to llm\.engine directly are not finished"):
        llm.generate([[3]], greedy())
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert llm.generate([[3]], greedy())[0].finished
