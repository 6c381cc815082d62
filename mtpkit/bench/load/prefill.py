"""The speed at which the engine computes prompts, and its share of the matrix rate."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mtpkit.bench.load.serving import Clock, Stream, serve
from mtpkit.bench.load.workload import (
    Drafts,
    Workload,
    draft_vocab_size,
    most_drafts,
    start_engine,
)
from mtpkit.bench.plain import check_greedy, kv_as_cached
from mtpkit.bench.report import Column, significant
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import LoadConfig, PrefillConfig, too_many_tokens
from mtpkit.bench.shapes import random_prompts
from mtpkit.bench.timing import synchronize
from mtpkit.engine import LLM
from mtpkit.engine.loading import KV_DTYPES
from mtpkit.errors import UserError
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
    k: Annotated[Drafts, Column("K", key=True)]
    max_num_batched_tokens: Annotated[int, Column("tokens per step")]
    seconds: Annotated[float, Column("ms", lambda row: f"{row.seconds * 1e3:.1f}")]
    tokens_per_s: Annotated[float, Column("tokens/s", ".0f")]
    """Prompt tokens per second."""
    flops_per_s: Annotated[
        float, Column("TFLOP/s", lambda row: significant(row.flops_per_s / 1e12))
    ]
    """FLOPs that `Roofline` counts, over the time."""
    matrix_share: Annotated[float, Column("of the matrix rate", ".1%")]
    """Share of the matrix rates measured in the same run: that of fp8 for products with inputs in
    fp8."""
    limit_share: Annotated[float, Column("of the roofline", ".1%")]
    """Share of the tokens/s that `Roofline` gives for the copy bandwidth and the matrix rates."""
    sustained_share: Annotated[float | None, Column("of the sustained rate", ".1%")] = None
    """`matrix_share` with `Machine.sustained_rate` in place of the bf16 rate: prompts keep the
    matrix units busy for longer than a single product does."""


class Prefill(Workload[PrefillRow]):
    """Random prompts of one length, queued at once, up to their first tokens: new ones in each
    repeat, after an untimed run that compiles kernels and is checked.

    First tokens must be those of a plain forward pass.
    """

    name = "prefill"
    row = PrefillRow
    sustained = True

    def __init__(
        self, model: HybridModel, config: LoadConfig, rule: PrefillConfig, clock: Clock
    ) -> None:
        # The prompts of all runs are drawn at once, and only the load knows the number of runs.
        problems = too_many_tokens(rule.prompt_length, rule.batch_size, config.repeats)
        if problems:
            raise UserError(problems[0])
        super().__init__(model, config, rule, clock)

    def title(self, name: str) -> str:
        """See `Workload.title`."""
        return f"prefill: {name}"

    def measure(self, case: Drafts) -> PrefillRow:
        """Time the prompts, after each of which an engine drafts K tokens."""
        config = self.config
        size = self.rule.batch_size
        length = self.rule.prompt_length
        vocab_size = self.model.mtpkit_config.vocab_size
        count = size * (config.repeats + 1)
        prompts = random_prompts(count, length, vocab_size, config.seed)
        llm = start_engine(
            self.model,
            config,
            case,
            max_model_len=length + 1,
            max_num_seqs=size,
            synthetic_acceptance=None,  # no draft is verified
            warm_up=False,  # the first run, which is not timed, captures what the others need
        )
        first, *others = (prompts[at : at + size] for at in range(0, count, size))
        _, tokens = self._run(llm, first)
        with kv_as_cached(self.model, KV_DTYPES[self.config.engine.kv_cache_dtype]):
            for prompt, token in list(zip(first, tokens, strict=True))[-_CHECKED:]:
                check_greedy(self.model, prompt, [token], [0], self.dtype, near_tie=_NEAR_TIE)
        with self.draws:
            seconds = statistics.median(self._run(llm, run)[0] for run in others)
        return self._row(case, seconds, llm.engine.config.max_num_batched_tokens)

    def _run(self, llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[float, list[int]]:
        """Seconds until every prompt has its first token, and these tokens."""
        streams = [Stream(0.0, prompt, 1) for prompt in prompts]
        # No step of an earlier run, launched ahead, may still run.
        synchronize(self.device)
        seconds = serve(llm.engine, streams, self.clock)
        return seconds, [stream.tokens[0] for stream in streams]

    def _row(self, k: Drafts, seconds: float, most: int) -> PrefillRow:
        machine = self.machine
        roofline = Roofline.of(
            self.model,
            self.config.engine,
            draft_vocab_size=draft_vocab_size(self.model, self.config),
        )
        cost = roofline.prefill(
            self.rule.batch_size, self.rule.prompt_length, most_drafts(self.model, k), most
        )
        # At an endless bandwidth, FLOPs alone take time.
        alone = math.inf, *machine.rates()[1:]
        sustained = None
        if machine.sustained_rate is not None:
            lasting = math.inf, *machine.rates(sustained=True)[1:]
            sustained = cost.seconds(*lasting) / seconds
        return PrefillRow(
            batch_size=self.rule.batch_size,
            prompt_len=self.rule.prompt_length,
            k=k,
            max_num_batched_tokens=most,
            seconds=seconds,
            tokens_per_s=cost.tokens / seconds,
            flops_per_s=cost.flops / seconds,
            matrix_share=cost.seconds(*alone) / seconds,
            limit_share=cost.seconds(*machine.rates()) / seconds,
            sustained_share=sustained,
        )
