"""Decode steps ask nothing of the device: what a CUDA graph cannot hold is found without a GPU.

Every PyTorch op of a decode step is watched. Ops whose result the host would have to wait for, and values that the host
would have to send, are told apart from those inside the plain twins of kernels, which do not run on a GPU.
"""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtpkit.engine import SamplingParams, verifier
from tests.engine.tiny import greedy, make_llm, make_prompts, penalised, tiny_model

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


class Watch(TorchDispatchMode):
    """Notes ops that wait for the device or read the host's values."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        masks = name in {known.split(".")[0] for known in INDEXING} and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        unsized = name == "aten::repeat_interleave" and not (kwargs or {}).get("output_size")
        # `torch.tensor` of the host's values; a single number is what `tensor[..] = 0` makes, and is no copy.
        sent = name == "aten::lift_fresh" and args[0].dim() > 0
        if name in WAITING or masks or unsized or sent:
            frames = [frame for frame in traceback.extract_stack() if "/mtpkit/" in frame.filename]
            if not any("/mtpkit/kernels/" in frame.filename for frame in frames):
                self.found.append(f"{name} in {frames[-1].filename.split('/mtpkit/')[-1]}:{frames[-1].lineno}")
        return op(*args, **(kwargs or {}))


def watched_decode_steps(model, k: int, params: list[SamplingParams], **settings) -> list[str]:
    """What `Watch` found in the decode steps of requests."""
    llm = make_llm(model, k, async_scheduling=True, **settings)
    engine, watch, steps = llm.engine, Watch(), 0
    execute = engine.executor._execute

    def execute_watched(batch):
        nonlocal steps
        steps += 1
        with watch:
            return execute(batch)

    engine.executor._execute = execute_watched
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
    sampled = SamplingParams(temperature=0.8, seed=1, top_k=5, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True)
    params = [greedy(12), sampled, penalised(12), penalised(12, temperature=0.7, seed=2), sampled]
    for draft_sampling in (False, True) if k else (False,):
        assert not watched_decode_steps(model, k, params, state_rollback=rollback, draft_sampling=draft_sampling), (
            "a GPU's decode step would wait"
        )


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
@pytest.mark.parametrize(("heads", "pattern"), [("repeated", "M*"), ("distinct", "*-")])
def test_nor_does_one_of_trees(heads, pattern, rollback):
    model, params = (
        tiny_model(heads, "ME*G", pattern),
        [greedy(9), penalised(9, temperature=0.7, seed=2)] + [greedy(9)] * 3,
    )
    fixed, grown = dict(speculative_token_tree=[2, 2, 1]), dict(speculative_eagle_topk=2)
    for k, tree in ((None, fixed), (3, grown), (None, fixed | dict(draft_sampling=True))):
        assert not watched_decode_steps(model, k, params, state_rollback=rollback, **tree)


@pytest.mark.parametrize(("heads", "k"), [("repeated", 0), ("distinct", 3)])
def test_nor_does_one_with_a_prefix_cache(heads, k):
    assert not watched_decode_steps(tiny_model(heads), k, [greedy(12)] * 5, enable_prefix_caching=True)


FAULTS = {
    "a number": lambda tokens: tokens + 0 * int(tokens.sum()),
    "a mask": lambda tokens: tokens[tokens > -2],
    "values of the host": lambda tokens: tokens + torch.tensor([0] * len(tokens)),
    "lengths": lambda tokens: tokens.repeat_interleave(torch.ones_like(tokens)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_waits_is_found(monkeypatch, fault):
    decide = verifier.own_tokens
    monkeypatch.setattr(verifier, "own_tokens", lambda *given: FAULTS[fault](decide(*given)))
    assert watched_decode_steps(tiny_model(), 2, [greedy(8)] * 5)
