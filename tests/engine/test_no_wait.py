"""Decode steps ask nothing of the device: what a CUDA graph cannot hold is found without a GPU.

Every PyTorch op of a decode step is watched. Ops whose result the host would have to wait for, and
values that the host would have to send, are told apart from those inside the plain twins of
kernels, which do not run on a GPU.
"""

import traceback
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mtpkit
from mtpkit.engine import SamplingParams
from mtpkit.engine.steps import verifier
from tests.engine.tiny import greedy, make_llm, make_prompts, penalised, tiny_model

PACKAGE = str(Path(mtpkit.__file__).parent)
WAITING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::is_nonzero",
}
INDEXING = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
STORING = INDEXING - {"aten::index.Tensor"}


class Watch(TorchDispatchMode):
    """Notes ops that wait for the device or read the host's values."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.numbers: list[torch.Tensor] = []
        """Single numbers of the host."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        masks = name in {known.split(".")[0] for known in INDEXING} and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        unsized = name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size")
        # `torch.tensor` of the host's values. `tensor[..] = 0` makes a single number: a slice is
        # filled with it, but for rows that a tensor names PyTorch copies it and waits.
        number = name == "aten::lift_fresh" and args[0].dim() == 0
        sent = name == "aten::lift_fresh" and not number
        sent |= name in STORING and any(args[2] is one for one in self.numbers)
        if name in WAITING or masks or unsized or sent:
            frames = [
                frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)
            ]
            if not any(frame.filename.startswith(f"{PACKAGE}/kernels/") for frame in frames):
                self.found.append(
                    f"{name} in"
                    f" {frames[-1].filename.removeprefix(PACKAGE + '/')}:{frames[-1].lineno}"
                )
        result = op(*args, **(kwargs or {}))
        if number:
            self.numbers.append(result)
        return result


def watched_decode_steps(model, k: int, params: list[SamplingParams], **settings) -> list[str]:
    """What `Watch` found in the decode steps of requests."""
    llm = make_llm(model, k, async_scheduling=True, **settings)
    engine = llm.engine
    watch = Watch()
    steps = 0
    execute = engine.executor.execute

    def execute_watched(batch):
        nonlocal steps
        steps += 1
        with watch:
            return execute(batch)

    engine.executor.execute = execute_watched
    llm.generate(make_prompts(), params)
    assert steps > 5
    return watch.found


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(
    ("heads", "mtp_pattern", "k"),
    [
        ("repeated", "*-", 0),
        ("repeated", "*E", 3),
        ("repeated", "M*", 3),
        ("distinct", "*-", 3),
        ("distinct", "M*", 3),
    ],
)
def test_a_decode_step_asks_nothing_of_the_device(heads, mtp_pattern, k, rollback):
    model = tiny_model(heads, "ME*-", mtp_pattern)
    sampled = SamplingParams(
        temperature=0.8, seed=1, top_k=5, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True
    )
    params = [greedy(12), sampled, penalised(12), penalised(12, temperature=0.7, seed=2), sampled]
    for draft_sampling in (False, True) if k else (False,):
        assert not watched_decode_steps(
            model, k, params, state_rollback=rollback, draft_sampling=draft_sampling
        ), "a GPU's decode step would wait"


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(("heads", "pattern"), [("repeated", "M*"), ("distinct", "*-")])
def test_nor_does_one_of_trees(heads, pattern, rollback):
    model = tiny_model(heads, "ME*G", pattern)
    params = [greedy(9), penalised(9, temperature=0.7, seed=2)] + [greedy(9)] * 3
    fixed = dict(speculative_token_tree=[2, 2, 1])
    grown = dict(speculative_eagle_topk=2)
    for k, tree in ((None, fixed), (3, grown), (None, fixed | dict(draft_sampling=True))):
        assert not watched_decode_steps(model, k, params, state_rollback=rollback, **tree)


@pytest.mark.parametrize(("heads", "k"), [("repeated", 0), ("distinct", 3)])
def test_nor_does_one_with_a_prefix_cache(heads, k):
    assert not watched_decode_steps(
        tiny_model(heads), k, [greedy(12)] * 5, enable_prefix_caching=True
    )


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_nor_does_the_admission_of_a_request(monkeypatch, k, cached):
    """Except for the numbers of requests, which the host sends from pinned memory."""
    tree = dict(speculative_eagle_topk=2) if k else {}
    llm = make_llm(tiny_model(), k, enable_prefix_caching=cached, **tree)
    watch = Watch()
    admitted = 0
    admit = llm.engine.executor.state.admit

    def admit_watched(requests):
        nonlocal admitted
        admitted += len(requests)
        with watch:
            admit(requests)

    monkeypatch.setattr(
        type(llm.engine.executor.state), "admit", lambda self, requests: admit_watched(requests)
    )
    llm.generate(make_prompts(), [greedy(3), penalised(3), *[greedy(3)] * 3])
    assert admitted == 5
    assert not [
        found for found in watch.found if not found.startswith("aten::lift_fresh in platform.py")
    ]


def stored(tokens: torch.Tensor, number: int) -> torch.Tensor:
    tokens[torch.zeros_like(tokens)] = number
    return tokens


FAULTS = {
    "a number": lambda tokens: tokens + 0 * int(tokens.sum()),
    "a mask": lambda tokens: tokens[tokens > -2],
    "values of the host": lambda tokens: tokens + torch.tensor([0] * len(tokens)),
    "a number of the host": lambda tokens: stored(tokens.clone(), 0),
    "lengths": lambda tokens: tokens.repeat_interleave(torch.ones_like(tokens)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_waits_is_found(monkeypatch, fault):
    decide = verifier.own_tokens
    monkeypatch.setattr(verifier, "own_tokens", lambda *given: FAULTS[fault](decide(*given)))
    assert watched_decode_steps(tiny_model(), 2, [greedy(8)] * 5)
