"""Replicas that share out prompts; replicas that fail, die, or lose the process that started
them."""

import multiprocessing
import os
import signal
import time
from collections import deque

import pytest
import torch

from mtpkit.checkpoint import save_hf_model
from mtpkit.engine import LLM, LLMOptions, Replicas, SamplingParams
from mtpkit.engine.processes import gpus_of_replicas
from mtpkit.engine.replicas import _Encoded
from mtpkit.engine.requests.stats import AcceptanceStats, EngineStats, RequestStats
from mtpkit.engine.worker import Add, Answer, Ask, Progress
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import build_model
from tests.engine.rank_cases import config
from tests.engine.tiny import make_prompts
from tests.ranks import preload

PROMPTS = [{"prompt_token_ids": prompt} for prompt in make_prompts((5, 9, 1, 17, 3, 8, 2, 6))]
LIMIT = 10.0
"""Seconds in which the others must have ended."""


class Tokenizer:
    """Texts of digits; in replica 1 something happens when it decodes."""

    def __init__(self, what: str = "nothing") -> None:
        self.what = what

    def encode(self, text: str) -> list[int]:
        return [int(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if multiprocessing.current_process().name == "replica 1":
            if self.what == "fails":
                raise ZeroDivisionError("the paper ran out")
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    preload(__name__)
    path = tmp_path_factory.mktemp("model")
    save_hf_model(build_model(config("mamba2"), device="cpu", seed=1), path)
    return path


def settings(model_dir, **changes) -> LLMOptions:
    return LLMOptions(
        model_dir, 2, **{"num_blocks": 40, "max_num_seqs": 2, "warm_up": False, **changes}
    )


def test_tokens_are_those_of_one_engine(model_dir):
    """Greedy, with a seed, and with seeds that an engine draws; some prompts have two outputs; more
    prompts than the replicas have at once."""
    chosen = (dict(temperature=0), dict(seed=3, n=2), dict(n=2), dict(seed=3))
    params = [
        SamplingParams(max_tokens=4 + 5 * (i % 3), ignore_eos=True, **chosen[i % 4])
        for i in range(len(PROMPTS))
    ]
    options = settings(model_dir, seed=7, tokenizer=Tokenizer())
    llm = LLM(**vars(options))
    want = llm.generate([*PROMPTS, "314"], [*params, SamplingParams(seed=1)])
    with Replicas(options, 2) as replicas:
        assert replicas.has_tokenizer and replicas.memory_plan == llm.memory_plan
        stream = replicas.stream([*PROMPTS, "314"], [*params, SamplingParams(seed=1)])
        outputs = sorted(stream, key=lambda output: int(output.request_id))
        stats = replicas.stats()
        processes = replicas._processes._processes
        assert len(processes) == 2
    assert all(process.exitcode is not None for process in processes)
    assert [output.outputs for output in outputs] == [output.outputs for output in want]
    assert [(one.prompt, list(one.prompt_token_ids)) for one in outputs] == [
        (one.prompt, list(one.prompt_token_ids)) for one in want
    ]
    assert (
        stats.acceptance == llm.stats().acceptance
        and stats.generated_tokens == llm.stats().generated_tokens
    )
    assert stats.state_bytes_per_request == llm.stats().state_bytes_per_request


class Recorded:
    """Processes that end prompts in a given order, and what they are sent."""

    count = 2

    def __init__(self, ended: list[list[tuple[int, str]]]) -> None:
        self.ended = ended
        self.sent: list[tuple[int, object]] = []

    def send(self, replica: int, message) -> None:
        self.sent.append((replica, "stats" if isinstance(message, Ask) else message.request_id))

    def receive(self):
        for replica, name in self.ended.pop(0):
            yield replica, [Progress(name, [], True, 0, None, RequestStats(), None)]

    def one_of_each(self, kind):
        stats = EngineStats(AcceptanceStats.for_depths(2), 0, 0.0, 0, 0, 0, 0)
        return [Answer(0, stats)] * 2


def test_a_prompt_goes_to_the_replica_that_holds_fewest():
    """Each holds three at most, so that none is idle while prompts wait."""
    replicas = object.__new__(Replicas)
    replicas._most = 3
    ended = [[(1, "1")], [(1, "3")], [(0, "0"), (0, "2"), (0, "4"), (1, "5"), (1, "6"), (1, "7")]]
    replicas._processes = Recorded(ended)
    waiting = deque(_Encoded(None, Add(str(index), [1], SamplingParams())) for index in range(8))
    assert len(list(replicas._serve(waiting))) == 8
    sent = replicas._processes.sent
    assert sent[:6] == [(0, "0"), (1, "1"), (0, "2"), (1, "3"), (0, "4"), (1, "5")]
    assert sent[6:] == [(1, "6"), (1, "7"), (0, "stats"), (1, "stats")]


def test_prompts_that_cannot_be_served_have_outputs_with_their_errors(model_dir):
    """The others' are those of `LLM`, also without seeds."""
    with Replicas(settings(model_dir, max_model_len=40), 2) as replicas:
        prompts = [
            *PROMPTS[:3],
            {"prompt_token_ids": [1] * 60, "name": "file:4"},
            {"prompt_token_ids": [], "name": "x"},
        ]
        outputs = {int(one.request_id): one for one in replicas.stream(prompts)}
    assert outputs[3].error.startswith(
        "file:4: 60 prompt tokens leave no room for output in max_model_len 40"
    )
    assert outputs[4].error.startswith("x: the prompt is empty")
    want = LLM(**vars(settings(model_dir, max_model_len=40))).generate(prompts)
    assert [outputs[index].outputs for index in range(5)] == [one.outputs for one in want]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fails", "replica 1 failed: ZeroDivisionError: the paper ran out"),
        ("killed", r"replica 1 \(process \d+\) has died by signal 9; its own output"),
    ],
)
def test_a_replica_that_fails_ends_the_others(model_dir, what, said):
    long, short = (
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (300, 4)
    )
    options = settings(model_dir, tokenizer=Tokenizer(what), num_blocks=100, max_model_len=400)
    with pytest.raises(MtpkitError, match=said), Replicas(options, 2) as replicas:
        processes = replicas._processes._processes
        began = time.monotonic()
        list(replicas.stream(PROMPTS, [long, short] * 4))
    assert time.monotonic() - began < LIMIT
    codes = [process.exitcode for process in processes]
    assert None not in codes and codes[1] in ((1, -9) if what == "fails" else (-9,))


def test_a_model_that_cannot_be_loaded_is_told_as_it_is(tmp_path):
    with pytest.raises(UserError, match=r"replica \d failed: .*is no model directory"):
        Replicas(settings(tmp_path), 2)


def test_a_replica_ends_when_nobody_is_left_to_tell(model_dir):
    """As when the process that started it was killed."""
    with Replicas(settings(model_dir), 2) as replicas:
        first, second = replicas._processes._processes
        replicas._processes._connections[0].close()
        first.join(LIMIT)
        assert first.exitcode == 1 and second.is_alive()


@pytest.mark.parametrize(
    ("changes", "environment", "said"),
    [
        (
            {"tensor_parallel_size": 2},
            {},
            "each of the 2 replicas holds a whole model, but tensor_parallel_size 2 splits it",
        ),
        (
            {"pipeline_parallel_size": 2},
            {},
            "each of the 2 replicas holds a whole model, but pipeline_parallel_size 2 splits it",
        ),
        (
            {"device": "cuda:1"},
            {},
            "each of the 2 replicas gets its own device: leave out device 'cuda:1'",
        ),
        (
            {},
            {"WORLD_SIZE": "2"},
            "2 processes, but 2 replicas are started by one: start it without torchrun",
        ),
        (
            {},
            {"CUDA_VISIBLE_DEVICES": "GPU-a"},
            "2 replicas need 2 GPUs, but this machine has 1: start 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(monkeypatch, tmp_path, changes, environment, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        Replicas(settings(tmp_path, **changes), 2)


def test_each_replica_sees_a_gpu_of_its_own(monkeypatch, tmp_path):
    """Of those that the process which starts them may use."""
    seen = []

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)
        set_forkserver_preload = staticmethod(lambda modules: None)

        class Process(multiprocessing.Process):
            def start(self) -> None:
                seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
                raise MtpkitError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus_of_replicas(settings(tmp_path), 3) == ["0", "1", "2"]
    assert gpus_of_replicas(settings(tmp_path, device="cpu"), 3) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6")
    assert gpus_of_replicas(settings(tmp_path), 3) == ["4", "GPU-a", "6"]
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method: Context if method == "spawn" else None
    )
    with pytest.raises(MtpkitError, match="enough"):
        Replicas(settings(tmp_path), 2)
    assert seen == ["4"] and os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-a,6"
