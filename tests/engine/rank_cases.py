"""What two ranks decode and one rank decodes, for tests that compare them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core import parallel_state

from mtpkit.engine import SamplingParams
from mtpkit.model import build_model
from tests.engine.tiny import guide, make_llm, make_prompts, penalised, tiny_config

VOCAB = 64
MAX_TOKENS = 8
BASES = {
    "mamba2": ("M-*M-", "*-"),
    "delta": ("G-*G-", "G-"),
    "latent": ("+E+-", "+E"),
    "attention": ("*-*-", "*-"),
    "recurrent experts": ("ME*E", "*E"),
    "distinct heads": ("M-*-", "M-"),
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(seed=4, temperature=0.7, top_k=5, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(seed=5, temperature=1.5, top_p=0.7, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(
        seed=6,
        top_k=9,
        top_p=0.8,
        min_p=0.05,
        presence_penalty=0.9,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ),
]
PENALISED = penalised(MAX_TOKENS)
PROMPTS = make_prompts()
MIXED = dict(max_num_batched_tokens=10)
PREEMPTED = dict(block_size=2, num_blocks=26)
CACHED = dict(enable_prefix_caching=True)
HEAD = dict(draft_lm_head_dtype="fp8_e4m3")


@dataclass(frozen=True)
class Case:
    """One engine and what it is asked for."""

    base: str
    k: int
    whole_experts: bool = False
    penalised: bool = False
    guided: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> list[SamplingParams]:
        if self.filtered:
            return PARAMS
        plain = [PENALISED] * 2 if self.penalised else PARAMS[:2]
        return [plain[index % 2] for index in range(len(PROMPTS))]

    @property
    def filtered(self) -> bool:
        """Whether requests have filters, each of which takes several exchanges a step."""
        return self.k == 2 and not self.penalised


FOR_FOUR = {
    "M": dict(mamba_num_groups=4),
    "G": dict(linear_num_key_heads=4),
    "E": dict(num_moe_experts=8),
}
"""Sizes that four tensor-parallel ranks can divide, by layer."""


def config(base: str, ranks: int = 2):
    """Of a model that `ranks` tensor-parallel ranks, 1, 2 or 4, can divide."""
    pattern, heads = BASES[base]
    groups = 1 if base == "attention" else 2  # fewer than ranks
    kind = "distinct" if base == "distinct heads" else "repeated"
    tiny = tiny_config(kind, pattern, heads).replace(vocab_size=VOCAB, num_query_groups=groups)
    divided = [sizes for letter, sizes in FOR_FOUR.items() if ranks == 4 and letter in pattern]
    return tiny.replace(**{key: size for sizes in divided for key, size in sizes.items()})


def cases() -> list[Case]:
    """K = 0 .. 3 and the ways of running of each base, a few to a kind: machines that run tests
    have few cores."""
    every = [Case(base, k, settings=MIXED if k == 2 else {}) for base in BASES for k in range(4)]
    once = ("recurrent experts", "distinct heads")
    every = [case for case in every if case.base not in once or case.k == 2]
    every += [
        Case(base, 3, settings=PREEMPTED) for base in ("mamba2", "delta", "latent", "attention")
    ]
    every += [
        Case("mamba2", 2, penalised=True, settings=dict(state_rollback="snapshot")),
        Case("mamba2", 3, settings=dict(async_scheduling=True, **MIXED)),
        Case("mamba2", 3, settings=dict(async_scheduling=True, enable_prefix_caching=True)),
        *(Case(base, k, settings=CACHED) for base in ("delta", "attention") for k in (0, 3)),
        Case("attention", 2, settings=dict(async_scheduling=True, **PREEMPTED)),
        Case("mamba2", 3, guided=False, settings=dict(draft_sampling=True)),
        Case("delta", 2, guided=False, settings=dict(draft_vocab=[1, 5, 31, 32, 60])),
        Case(
            "attention", 2, guided=False, settings=dict(draft_vocab=[33, 40], draft_sampling=True)
        ),
        Case("mamba2", 3, guided=False, settings=HEAD),
        Case("delta", 2, guided=False, settings=HEAD | dict(draft_vocab=[33, 40])),
        Case("attention", 2, guided=False, settings=HEAD | dict(draft_sampling=True)),
    ]
    every += [Case("latent", k, True) for k in (0, 3)] + [
        Case("recurrent experts", 2, True, settings=MIXED)
    ]
    return [
        *every,
        Case("latent", 3, True, settings=PREEMPTED),
        Case("latent", 1, True, settings=CACHED),
    ]


def names(case: Case) -> str:
    return (
        f"{case.base} K={case.k}"
        f" {'EP ' if case.whole_experts else ''}{case.settings or ''}{case.penalised or ''}"
    )


def one_rank(tested: Sequence[Case], ranks: int = 2, **settings) -> list[list[list[int]]]:
    """Outputs of each case; those of a seed are the same for every K, unless drafts are drawn.

    Args:
        ranks: see `config`.
        settings: others of all engines, such as the device.
    """
    found: list[list[list[int]]] = []
    known: dict[tuple, list[list[int]]] = {}
    for case in tested:
        drawn = case.settings.get("draft_sampling", False)
        key = (case.base, case.penalised, case.filtered, repr(case) if drawn else "")
        if key not in known:
            plain = case if drawn else replace(case, guided=False, settings={})
            plain = replace(plain, settings=plain.settings | settings)
            known[key] = decode(build_model(config(case.base, ranks), device="cpu", seed=1), plain)[
                0
            ]
        found.append(known[key])
    return found


def decode(model, case: Case, truth: list[list[int]] | None = None) -> tuple[list[list[int]], Any]:
    """Output tokens of each prompt, and the engine. With a prefix cache, those of the second time;
    heads that keep recurrent state find something the third time, at the checkpoint that the second
    one left within a prompt.

    Args:
        truth: what follows each prompt, of which the drafts have some; None: drafts are the heads'
            own.
    """
    llm = make_llm(model, case.k, **case.settings)
    if case.guided and case.k and truth:
        guide(
            llm,
            PROMPTS,
            truth=[prompt + tokens for prompt, tokens in zip(PROMPTS, truth, strict=True)],
        )
    engine = llm.engine
    recurrent_heads = case.k and set(BASES[case.base][1]) & set("MG")
    for _ in range(2 + bool(recurrent_heads) if engine.executor.checkpoints else 1):
        ids = [
            engine.add_request(prompt, params)
            for prompt, params in zip(PROMPTS, case.params, strict=True)
        ]
        finished = {}
        while engine.has_unfinished:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            engine.scheduler.check_integrity()
    prompts = sum(map(len, PROMPTS))
    cached = llm.stats().cached_tokens
    assert not engine.executor.checkpoints or (
        0 < cached < prompts if recurrent_heads else cached == prompts
    )
    return [finished[name].outputs[0].token_ids for name in ids], llm


def split_model(case_config, whole_experts: bool = False, ranks: int = 2, stages: int = 1):
    """This rank's part of a model of which `ranks` share each stage."""
    parallel_state.destroy_model_parallel()
    sizes = dict(expert_parallel=ranks, expert_tensor_parallel=1) if whole_experts else {}
    sizes |= dict(tensor_parallel=ranks, pipeline_parallel=stages, sequence_parallel=False)
    return build_model(case_config, device="cpu", seed=1, **sizes)
