"""The speed at which the engine computes prompts, and its share of the matrix rate."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from tqdm import tqdm

from mtpkit.bench.machine import measure_machine
from mtpkit.bench.plain import check_greedy
from mtpkit.bench.report import Column, Result, significant
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import PrefillConfig
from mtpkit.bench.shapes import random_prompts
from mtpkit.bench.timing import synchronize
from mtpkit.engine import LLM, SamplingParams, require_whole
from mtpkit.model.hybrid import HybridModel

_CHECKED = 2
"""Prompts whose first token is compared with that of a plain forward pass: the last ones, whose
chunks follow the chunks of others."""
_NEAR_TIE = 0.1
"""Near tie, in standard deviations of the logits: rounding may exchange such tokens even without a
decode step."""


@dataclass(frozen=True)
class PrefillRow:
    """All prompts, from the time when they are queued until each has its first token."""

    batch_size: Annotated[
        int, Column("prompts", lambda row: f"{row.batch_size} x {row.prompt_len}", key=True)
    ]
    prompt_len: int
    k: Annotated[int, Column("K", key=True)]
    max_num_batched_tokens: Annotated[int, Column("tokens per step")]
    seconds: Annotated[float, Column("ms", lambda row: f"{row.seconds * 1e3:.1f}")]
    tokens_per_s: Annotated[float, Column("tokens/s", ".0f")]
    """Prompt tokens per second."""
    flops_per_s: Annotated[
        float, Column("TFLOP/s", lambda row: significant(row.flops_per_s / 1e12))
    ]
    """FLOPs that `Roofline` counts, over the time."""
    matrix_share: Annotated[float, Column("of the matrix rate", ".1%")]
    """Share of the matrix rate measured in the same run."""
    limit_share: Annotated[float, Column("of the roofline", ".1%")]
    """Share of the tokens/s that `Roofline` gives for the copy bandwidth and the matrix rate."""
    sustained_share: Annotated[float | None, Column("of the sustained rate", ".1%")] = None
    """Share of `Machine.sustained_rate`: prompts keep the matrix units busy for longer than a
    single product does."""


def measure_prefill(
    model: HybridModel, config: PrefillConfig, name: str = "model"
) -> Result[PrefillRow]:
    """Compute random prompts, new ones in each repeat, after an untimed run that compiles kernels
    and is checked.

    Args:
        model: from `mtpkit.bench.shapes.open_model`.
        name: the model's name in the report.

    Raises:
        UserError: the model lacks the heads, or the prompts do not fit.
        RequestError: the logits of a prompt are NaN or infinite.
        MtpkitError: a first token is not that of a plain forward pass.
    """
    weight = next(model.parameters())
    machine = measure_machine(weight.device, sustained=True)
    vocab_size = model.mtpkit_config.vocab_size
    count = config.batch_size * (config.repeats + 1)
    prompts = random_prompts(count, config.prompt_len, vocab_size, config.seed)
    llm = LLM(
        model,
        num_speculative_tokens=config.k,
        max_model_len=config.prompt_len + 1,
        max_num_seqs=config.batch_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=False,
        warm_up=False,  # the first run, which is not timed, captures what the others need
    )
    first, *others = (
        prompts[at : at + config.batch_size] for at in range(0, count, config.batch_size)
    )
    tokens = _run(llm, first)[1]
    for prompt, token in list(zip(first, tokens, strict=True))[-_CHECKED:]:
        check_greedy(model, prompt, [token], [0], weight.dtype, near_tie=_NEAR_TIE)
    seconds = statistics.median(
        _run(llm, prompts)[0] for prompts in tqdm(others, desc="prefill", disable=None)
    )
    roofline = Roofline(model.mtpkit_config, weight.dtype)
    cost = roofline.prefill(
        config.batch_size, config.prompt_len, config.k, config.max_num_batched_tokens
    )
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
        sustained_share=machine.sustained_rate and cost.flops / seconds / machine.sustained_rate,
    )
    title = f"prefill: {name}, {str(weight.dtype).removeprefix('torch.')}, {machine.device}"
    return Result("prefill", title, PrefillRow, [row], machine, {"model": name, **asdict(config)})


def _run(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[float, list[int]]:
    """Seconds until every prompt has its first token, and these tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    device = next(llm.model.parameters()).device
    synchronize(device)
    began = time.perf_counter()
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    synchronize(device)
    seconds = time.perf_counter() - began
    require_whole(outputs)
    return seconds, [output.outputs[0].token_ids[0] for output in outputs]
