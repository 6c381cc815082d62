"""How much faster a model decodes with K drafts a step than with none, and whether it says the same."""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from mtpkit.bench.machine import commit, describe_device
from mtpkit.bench.speedup_report import SpeedupReport, SpeedupRow
from mtpkit.config.checked import field_clauses, keys_of
from mtpkit.engine import LLM, EngineOptions, SamplingParams, require_whole
from mtpkit.engine.prompts import Prompt, encode, list_prompts
from mtpkit.errors import listed, raise_problems
from mtpkit.model.hybrid import HybridModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)
_WARM_UP_TOKENS = 8
_ROUNDS_A_TURN = 4
"""Prompts of a turn, over the batch size: few, and yet the batch is full for most of the time."""


@dataclass(frozen=True)
class SpeedupConfig:
    """What is measured.

    Raises:
        UserError: values that cannot be measured, all of them named.
    """

    ks: tuple[int, ...] = (0, 1, 2, 3)
    """Drafts a step; 0, against which the others are measured, is added."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Requests that run at once, but no more than prompts; when one ends the next prompt takes its place."""
    repeats: int = 3
    """Times that everything is measured; the median time counts."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0, max_tokens=128))
    """Its seed, 0 if None, is the first prompt's; each further prompt has the next one."""
    block_size: int = 16
    """This and what follows are `LLM`'s."""
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    state_rollback: Literal["replay", "snapshot"] = "replay"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    draft_sampling: bool = False
    draft_vocab: str | None = None
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        checks = [
            *((k >= 0, f"k is {k}, must be 0 (no drafts) or more") for k in self.ks),
            *((size >= 1, f"batch size is {size}, must be at least 1") for size in self.batch_sizes),
            (bool(self.batch_sizes), "no batch size is given"),
            (self.repeats >= 1, f"repeats is {self.repeats}, must be at least 1"),
        ]
        found = [problem for good, problem in checks if not good]
        shared = vars(self).keys() & keys_of(EngineOptions).keys()
        found += field_clauses(EngineOptions, {"model": "", **{name: getattr(self, name) for name in sorted(shared)}})
        raise_problems("speedup", found)
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))


def measure_speedup(
    model: str | Path | HybridModel,
    prompts: Sequence[Prompt],
    config: SpeedupConfig,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> SpeedupReport:
    """Decode all prompts at every batch size and K.

    Every engine is warmed up first. All K take turns on a few prompts at a time, so that a machine that slows down for
    a while slows all of them.

    Args:
        model: directory of either layout, or a model from `mtpkit.model.build_model`.
        prompts: as `LLM.generate` takes them.

    Raises:
        UserError: the model lacks the heads, or a prompt cannot be served.
        RequestError: the logits of a prompt became NaN or infinite.
    """
    first = LLM(
        model,
        num_speculative_tokens=0,
        dtype=dtype,
        tokenizer=tokenizer,
        max_num_seqs=1,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
    encoded = [
        {"prompt_token_ids": encode(prompt, first.tokenizer, name)[1], "name": name}
        for name, prompt in list_prompts(prompts)
    ]
    config = _at_most(config, len(prompts))
    contenders = [_Contender(first, encoded, config, size, k) for size in config.batch_sizes for k in config.ks]
    _run_all(contenders, config)
    baselines = {contender.batch_size: contender for contender in contenders if contender.k == 0}
    weight = next(first.model.parameters())
    return SpeedupReport(
        rows=[contender.row(baselines[contender.batch_size]) for contender in contenders],
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        device=describe_device(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        commit=commit(),
        settings={"prompts": len(prompts), **asdict(config)},
    )


def _at_most(config: SpeedupConfig, prompts: int) -> SpeedupConfig:
    """With batch sizes that so many prompts can fill."""
    larger = [size for size in config.batch_sizes if size > prompts]
    if not larger:
        return config
    _logger.warning("there are %d prompts, too few for a batch of %s: measured at %d", prompts, listed(larger), prompts)
    return replace(config, batch_sizes=tuple(min(size, prompts) for size in config.batch_sizes))


def _run_all(contenders: list["_Contender"], config: SpeedupConfig) -> None:
    turns = [
        (contender, start)
        for size in config.batch_sizes
        for start in range(0, len(contenders[0].prompts), _ROUNDS_A_TURN * size)
        for contender in contenders
        if contender.batch_size == size
    ]
    with tqdm(total=config.repeats * len(turns), desc="warming up", unit=" runs", disable=None) as progress:
        for contender in contenders:
            contender.warm_up()
        progress.set_description("measuring")
        for contender, start in config.repeats * turns:
            progress.set_postfix_str(f"batch {contender.batch_size}, K = {contender.k}")
            contender.run(start, start + _ROUNDS_A_TURN * contender.batch_size)
            progress.update()


class _Contender:
    """One batch size and K: its engine, and what its runs gave."""

    def __init__(
        self, first: LLM, prompts: list[dict[str, Any]], config: SpeedupConfig, batch_size: int, k: int
    ) -> None:
        seed, sampling = config.sampling.seed or 0, config.sampling
        self.batch_size, self.k = batch_size, k
        self.prompts = prompts
        self.sampling = [replace(sampling, seed=seed + index) for index in range(len(prompts))]
        # All engines live side by side, so each has caches for what it will see and no more.
        longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts) + sampling.max_tokens
        self.llm = LLM(
            first.model,
            num_speculative_tokens=k,
            block_size=config.block_size,
            max_model_len=min(longest, first.engine.config.max_model_len),
            max_num_seqs=batch_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            state_rollback=config.state_rollback,
            state_dtype=config.state_dtype,
            draft_sampling=config.draft_sampling,
            draft_vocab=config.draft_vocab if k else None,
            enforce_eager=config.enforce_eager,
            tokenizer=first.tokenizer,
        )
        self.seconds: list[float] = []
        """Of each repeat."""
        self.outputs: list[list[list[int]]] = []
        """Tokens of each prompt, in each repeat."""

    def warm_up(self) -> None:
        """Run a few steps, once it is clear that all prompts can be served; then a decode step of every batch size.

        A batch shrinks while its last requests end, and each size may need a CUDA graph of its own.
        """
        for prompt, sampling in zip(self.prompts, self.sampling, strict=True):
            self.llm.engine.make_request(prompt["prompt_token_ids"], sampling, place=prompt["name"])
        brief = [replace(one, max_tokens=min(one.max_tokens, _WARM_UP_TOKENS)) for one in self.sampling]
        self.llm.generate(self.prompts[: self.batch_size], brief[: self.batch_size])
        # One token comes with the prompt, the other from a decode step. Prompts of a token are computed in one step.
        endless = replace(self.sampling[0], ignore_eos=True, stop=None, stop_token_ids=None)
        pair = replace(endless, max_tokens=min(endless.max_tokens, 2))
        for size in range(self.batch_size, 0, -1):
            self.llm.generate([prompt["prompt_token_ids"][:1] for prompt in self.prompts[:size]], [pair] * size)
        self.llm.reset_stats()

    def run(self, start: int, end: int) -> None:
        """Decode some of the prompts, timed as a user would; a repeat begins with the first one."""
        if start == 0:
            self.seconds.append(0.0)
            self.outputs.append([])
        began = time.perf_counter()
        outputs = self.llm.generate(self.prompts[start:end], self.sampling[start:end])
        self.seconds[-1] += time.perf_counter() - began
        require_whole(outputs)
        self.outputs[-1] += [output.outputs[0].token_ids for output in outputs]

    def row(self, baseline: "_Contender") -> SpeedupRow:
        """Its numbers beside those of K = 0."""
        reference = baseline.outputs[0]
        same = [all(run[index] == tokens for run in self.outputs) for index, tokens in enumerate(reference)]
        stats = self.llm.stats()
        return SpeedupRow(
            batch_size=self.batch_size,
            k=self.k,
            tokens_per_s=self.rate,
            speedup=self.rate / baseline.rate,
            acceptance_length=stats.acceptance_length,
            conditional_acceptance=stats.conditional_acceptance,
            identical=sum(same) / len(same),
        )

    @property
    def rate(self) -> float:
        """Tokens a second of the median repeat."""
        return sum(map(len, self.outputs[0])) / statistics.median(self.seconds)
