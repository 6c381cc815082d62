"""How fast the engine computes prompts, and what share of the matrix rate that is."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from mtpkit.bench.machine import measure_machine, synchronize
from mtpkit.bench.plain import check_greedy
from mtpkit.bench.prompts import too_many_tokens
from mtpkit.bench.report import Result, significant
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.shapes import random_prompts
from mtpkit.engine import LLM, SamplingParams, require_whole
from mtpkit.errors import raise_problems
from mtpkit.model.hybrid import HybridModel

_CHECKED = 2
"""Prompts whose first token is compared with that of a plain forward pass."""
_NEAR_TIE = 0.1
"""Of the logits' standard deviation: tokens that rounding may exchange where no decode step was taken."""


@dataclass(frozen=True)
class PrefillConfig:
    """What is measured.

    Raises:
        UserError: values that cannot be measured, all of them named.
    """

    batch_size: int = 64
    """Prompts."""
    prompt_len: int = 512
    max_num_batched_tokens: int = 8192
    """Most tokens of a step."""
    k: int = 0
    """Drafts made after each prompt; with K > 0 the heads' caches are filled, too."""
    repeats: int = 5
    """The median counts."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive = ("batch_size", "prompt_len", "max_num_batched_tokens", "repeats")
        wrong = [f"{name} is {getattr(self, name)}, must be at least 1" for name in positive if getattr(self, name) < 1]
        if self.k < 0:
            wrong.append(f"k is {self.k}, must be 0 (no drafts) or more")
        wrong += too_many_tokens(self.prompt_len, self.batch_size, self.repeats)
        raise_problems("prefill benchmark", wrong)


@dataclass(frozen=True)
class PrefillRow:
    """All prompts, from their queueing to the last first token."""

    batch_size: int
    prompt_len: int
    k: int
    max_num_batched_tokens: int
    seconds: float
    tokens_per_s: float
    """Prompt tokens."""
    flops_per_s: float
    """What `Roofline` counts, over the time."""
    matrix_share: float
    """Of the matrix rate measured in the same run."""
    limit_share: float
    """Of the tokens a second that `Roofline` gives for the copy bandwidth and the matrix rate."""


COLUMNS: dict[str, Callable[[PrefillRow], str]] = {
    "prompts": lambda row: f"{row.batch_size} x {row.prompt_len}",
    "K": lambda row: str(row.k),
    "tokens a step": lambda row: str(row.max_num_batched_tokens),
    "ms": lambda row: f"{row.seconds * 1e3:.1f}",
    "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
    "TFLOP/s": lambda row: significant(row.flops_per_s / 1e12),
    "of the matrix rate": lambda row: f"{row.matrix_share:.1%}",
    "of the roofline": lambda row: f"{row.limit_share:.1%}",
}


def measure_prefill(model: HybridModel, config: PrefillConfig, name: str = "model") -> Result[PrefillRow]:
    """Compute random prompts, other ones in each repeat, after a run that compiles kernels and is checked.

    Args:
        model: from `mtpkit.bench.shapes.open_model`.
        name: of the model, for the report.

    Raises:
        UserError: the model lacks the heads, or the prompts do not fit.
        MtpkitError: a first token is not that of a plain forward pass.
    """
    weight = next(model.parameters())
    machine = measure_machine(weight.device)
    vocab_size, count = model.mtpkit_config.vocab_size, config.batch_size * (config.repeats + 1)
    prompts = random_prompts(count, config.prompt_len, vocab_size, config.seed)
    llm = LLM(
        model,
        num_speculative_tokens=config.k,
        max_model_len=config.prompt_len + 1,
        max_num_seqs=config.batch_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    first, *others = (prompts[at : at + config.batch_size] for at in range(0, count, config.batch_size))
    _check(model, first, _run(llm, first)[1])
    seconds = statistics.median(_run(llm, prompts)[0] for prompts in tqdm(others, desc="prefill", disable=None))
    roofline = Roofline(model.mtpkit_config, weight.dtype)
    cost = roofline.prefill(config.batch_size, config.prompt_len, config.k, config.max_num_batched_tokens)
    row = PrefillRow(
        batch_size=config.batch_size,
        prompt_len=config.prompt_len,
        k=config.k,
        max_num_batched_tokens=config.max_num_batched_tokens,
        seconds=seconds,
        tokens_per_s=cost.tokens / seconds,
        flops_per_s=cost.flops / seconds,
        matrix_share=cost.flops / seconds / machine.matrix_rate,
        limit_share=cost.seconds(machine.copy_bandwidth, machine.matrix_rate) / seconds,
    )
    title = f"prefill: {name}, {str(weight.dtype).removeprefix('torch.')}, {machine.device}"
    return Result("prefill", title, COLUMNS, [row], machine, {"model": name, **asdict(config)})


def _run(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[float, list[int]]:
    """Seconds to the last first token, and the first tokens.

    Raises:
        RequestError: the logits of a prompt are NaN or infinite.
    """
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    device = next(llm.model.parameters()).device
    synchronize(device)
    began = time.perf_counter()
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    synchronize(device)
    seconds = time.perf_counter() - began
    require_whole(outputs)
    return seconds, [output.outputs[0].token_ids[0] for output in outputs]


def _check(model: HybridModel, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
    """Compare the first tokens of the last prompts, whose chunks follow those of others, with a plain forward pass."""
    for prompt, token in list(zip(prompts, tokens, strict=True))[-_CHECKED:]:
        check_greedy(model, prompt, [token], [0], next(model.parameters()).dtype, near_tie=_NEAR_TIE)
