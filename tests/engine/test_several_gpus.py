"""Two and four GPUs decode what one decodes, token for token, in fp32: split matrices, whole
experts, pipeline stages. Where there are fewer GPUs, processes share them, see
`tests.ranks.as_rank`.

What two processes on CPUs cannot show: NCCL's sums in CUDA graphs, sums in the memory of the other
GPU, and transfers between stages whose hosts launch ahead.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpkit.model import build, collectives
from tests.engine.rank_cases import (
    MIXED,
    PREEMPTED,
    PROMPTS,
    Case,
    config,
    names,
    one_rank,
    split_model,
)
from tests.engine.replayed import TruthOnDevice
from tests.engine.test_stages import halves
from tests.engine.test_trees import FIXED, GROWN, watched
from tests.engine.tiny import make_llm
from tests.ranks import need_gpus, run_ranks
from tests.shared import look_at_new_objects, made_once

pytestmark = pytest.mark.gpu

GROWN_SHAPE = {key: value for key, value in GROWN.items() if key != "num_speculative_tokens"}
CACHED = dict(enable_prefix_caching=True)
EAGER = dict(enforce_eager=True)
TREES = [
    Case("mamba2", 3, settings=FIXED),
    Case("attention", 3, settings=GROWN_SHAPE | EAGER | PREEMPTED),
]
CASES = [
    Case("mamba2", 0),
    Case("mamba2", 3, settings=CACHED),
    Case("delta", 2, settings=dict(state_rollback="snapshot")),
    Case("delta", 3, settings=PREEMPTED),
    Case("attention", 3, penalised=True),
    Case("latent", 3, settings=MIXED),
    Case("distinct heads", 3, settings=MIXED),
    *TREES,
]
EXPERTS = [
    Case("latent", 3, True, settings=MIXED),
    Case("recurrent experts", 2, True),
    Case("recurrent experts", 2),
]
IN_MEMORY = [
    Case("mamba2", 3, settings=MIXED),
    Case("attention", 0, settings=CACHED),
    *TREES,
    *EXPERTS,
]
SPLITS = {
    "tensor": (2, 1),
    "peers": (2, 1),
    "stages": (1, 2),
    "tensor of four": (4, 1),
    "peers of four": (4, 1),
    "peers and stages": (2, 2),
    "four stages": (1, 4),
}
"""Tensor-parallel ranks and stages; with `peers` ranks exchange in each other's memory."""
FEWER = {"num_blocks": 19}
"""In place of those of `PREEMPTED` for stages: requests that wait for a step of the other batch
give blocks back."""
FEW = [
    replace(case, settings=case.settings | (FEWER if "num_blocks" in case.settings else {}))
    for case in CASES
]
TESTED = {
    "tensor": CASES + EXPERTS,
    "peers": IN_MEMORY,
    "stages": FEW,
    "tensor of four": CASES + EXPERTS,
    "peers of four": IN_MEMORY,
    "peers and stages": FEW + EXPERTS,
    "four stages": FEW,
}


def sums_in_memory() -> int:
    """Exchanges so far in the memory of other GPUs, in all groups: a model that was split earlier
    has its own group."""
    return sum(int(memory.windows.epochs[0]) for memory in collectives._chosen.values())


def decode(model, case: Case, truth: list[list[int]], **settings) -> dict[str, Any]:
    """Output tokens of each prompt, with a prefix cache those of the second time, and how they came
    about."""
    llm = make_llm(model, case.k, device="cuda", **case.settings, **settings)
    before = sums_in_memory()
    executor = llm.engine.executor
    following = [prompt + tokens for prompt, tokens in zip(PROMPTS, truth, strict=True)]
    if llm.engine.config.tree is None and case.k:
        executor.drafter = TruthOnDevice(executor.drafter, following, "cuda")
    elif executor.graphs is None and case.k:
        watched(llm, following)
    for _ in range(2 if executor.checkpoints else 1):
        outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in PROMPTS], case.params)
        llm.engine.scheduler.check_integrity()
    stats = llm.stats()
    return dict(
        tokens=[output.outputs[0].token_ids for output in outputs],
        accepted=sum(stats.acceptance.accepted_per_depth),
        preemptions=stats.preemptions,
        graphs=len(executor.graphs._graphs) if executor.graphs else 0,
        sums=sums_in_memory() - before,
    )


def decode_all(rank: int, split: str, wanted: list[list[list[int]]], out: Path) -> None:
    look_at_new_objects()
    models: dict[tuple, Any] = {}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "stage_patterns", halves)
        for case, truth in zip(TESTED[split], wanted, strict=True):
            key = case.whole_experts, case.base
            if key not in models:
                models[key] = split_model(
                    config(case.base, SPLITS[split][0]), case.whole_experts, *SPLITS[split]
                )
            found.append(
                decode(models[key], case, truth, disable_custom_all_reduce="peers" not in split)
            )
    (out / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module", params=SPLITS)
def decoded(request, tmp_path_factory):
    """A way to split a model, what one GPU decoded, and what each of several did."""
    split = request.param
    tensor, stages = SPLITS[split]
    # A kernel that waits for ranks on its own GPU runs in turns with them, which is slow: no more
    # than two of a group.
    need_gpus(tensor * stages // 2 if "peers" in split else 1)

    def make(path: Path) -> None:
        plain = [replace(case, settings={}) for case in TESTED[split]]
        wanted = one_rank(plain, tensor, device="cuda", enforce_eager=True)
        (path / "wanted.json").write_text(json.dumps(wanted))
        run_ranks(decode_all, split, wanted, path, ranks=tensor * stages, device="cuda")

    path = made_once(tmp_path_factory, f"gpus_{split}".replace(" ", "_"), make)
    return split, *(
        json.loads((path / f"{name}.json").read_text())
        for name in ("wanted", *range(tensor * stages))
    )


def test_several_gpus_decode_what_one_does(decoded):
    split, wanted, *ranks = decoded
    assert [[one["tokens"] for one in rank] for rank in ranks] == [wanted] * len(ranks), split
    for found in zip(TESTED[split], *ranks, strict=True):
        case = found[0]
        trees = not found[0].settings.keys().isdisjoint(FIXED.keys() | GROWN_SHAPE.keys())
        for one in found[1:]:
            assert (one["preemptions"] > 0) == ("num_blocks" in case.settings), names(case)
            assert (one["graphs"] > 0) == ("enforce_eager" not in case.settings), names(case)
            assert (one["sums"] > 0) == ("peers" in split), names(case)
            assert one["accepted"] > 0 or not case.k or trees, names(case)
