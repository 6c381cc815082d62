"""Speedup of decoding with K drafts per step over decoding without drafts, and whether the tokens
are the same."""

import io
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from tqdm import tqdm

from mtpkit.bench.machine import commit, describe_device
from mtpkit.bench.report import Column, Report, tabulate
from mtpkit.bench.settings import (
    SPEEDUP_DRAFTS,
    SpeedupConfig,
    asked_drafts,
    engine_arguments,
    without_drafts,
)
from mtpkit.bench.shapes import choose_drafts, warn_of_raw_text
from mtpkit.bench.tables import WideTable
from mtpkit.config.parts import options_of
from mtpkit.engine import LLM, require_whole
from mtpkit.engine.loading import config_of
from mtpkit.engine.requests.prompts import Prompt, encode, list_prompts
from mtpkit.errors import MtpkitError, listed
from mtpkit.files import JsonObject
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.quantized import quantized_as
from mtpkit.training.bootstrap import (
    Interval,
    acceptance_interval,
    draw_weights,
    interval_around,
    show_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)
_FEW_STEPS = 100
_WIDE = 0.1
"""A warning is given below this number of decode steps, or if half of an interval is more than this
share of the speedup or of the acceptance length."""
_WARM_UP_TOKENS = 8
_ROUNDS_PER_TURN = 4
"""Prompts of a turn, as a multiple of the batch size: few, yet enough to keep the batch full for
most of the time."""
_LINES = ("#1f5fa8", "#d9822b", "#2e8b57", "#8e44ad", "#b03a48", "#555555")
_BEFORE = "#999999"


@dataclass(frozen=True)
class SpeedupRow:
    """One batch size and K."""

    batch_size: Annotated[int, Column("batch", key=True)]
    """Requests that run at once."""
    k: Annotated[int, Column("K", key=True)]
    """Drafts per step."""
    tokens_per_s: Annotated[float, Column("tokens/s", ".1f")]
    """Generated tokens over the wall time of `LLM.generate`, prefill and detokenization
    included."""
    speedup: Annotated[
        float,
        Column(
            "speedup (95%)", lambda row: f"{row.speedup:.2f}x{_in_brackets(row.speedup_interval)}"
        ),
    ]
    """`tokens_per_s` over that of K = 0 at the same batch size."""
    acceptance_length: Annotated[
        float, Column("acceptance length (95%)", lambda row: row.show_length() if row.k else "-")
    ]
    """1 + mean accepted drafts per decode step and request."""
    conditional_acceptance: Annotated[
        list[float],
        Column(
            "conditional acceptance",
            lambda row: " ".join(f"{rate:.0%}" for rate in row.conditional_acceptance) or "-",
        ),
    ]
    """Per depth, the rate at which a draft is accepted, given that all before it were."""
    identical: Annotated[float, Column("same tokens", ".0%")]
    """Share of the prompts whose tokens are those of K = 0 at the same batch size."""
    candidate_shares: list[list[float]] | None = None
    """With trees of drafts, per depth the share of steps in which the base chose the heads' best
    candidate, the second one, and so on; None: drafts are chains."""
    speedup_interval: Interval | None = None
    """95% interval of `speedup`, by the bootstrap over prompts and repeats; None: K = 0, or fewer
    than two prompts."""
    acceptance_length_interval: Interval | None = None
    """95% interval of `acceptance_length`, by the bootstrap over prompts; None as for
    `speedup_interval`."""

    def show_length(self) -> str:
        """The acceptance length with its interval."""
        return f"{self.acceptance_length:.2f}{_in_brackets(self.acceptance_length_interval)}"

    def to_dict(self) -> dict[str, object]:
        """The fields that are not None: intervals only where there are some, `candidate_shares`
        only for trees."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _in_brackets(interval: Interval | None) -> str:
    return f" ({show_interval(interval)})" if interval else ""


@dataclass(frozen=True)
class _Candidates:
    """Which of the heads' candidates the base chose at one depth."""

    batch_size: Annotated[int, Column("batch", key=True)]
    k: Annotated[int, Column("K", key=True)]
    depth: Annotated[int, Column("depth", key=True)]
    shares: Annotated[str, Column("base's choice among candidates")]
    none: Annotated[float, Column("none of them", ".0%")]

    @classmethod
    def of(cls, rows: Sequence[SpeedupRow]) -> "list[_Candidates]":
        return [
            cls(
                row.batch_size,
                row.k,
                depth,
                " ".join(f"{share:.0%}" for share in shares),
                1 - sum(shares),
            )
            for row in rows
            for depth, shares in enumerate(row.candidate_shares or (), 1)
        ]


@dataclass(frozen=True)
class SpeedupReport(Report):
    """All rows of a measurement, and what was measured."""

    rows: list[SpeedupRow]
    model: str
    device: str
    dtype: str
    commit: str | None
    before: list[SpeedupRow] | None = None
    """Rows of the same model with untrained heads."""
    settings: Mapping[str, object] | None = None
    """Settings of the measurement, which only the file holds."""

    name = "report"
    machine = None

    def to_dict(self, whole: bool = False) -> dict[str, object]:
        """The fields, `before` only if it was measured."""
        left_out = {*([] if whole else ["settings"]), *(["before"] if self.before is None else [])}
        rows = {
            name: [row.to_dict() for row in part]
            for name, part in {"rows": self.rows, "before": self.before}.items()
            if part is not None
        }
        return {
            key: rows.get(key, value) for key, value in asdict(self).items() if key not in left_out
        }

    def tables(self) -> list[WideTable]:
        """The rows, with those of untrained heads in a separate table."""
        if self.before is None:
            tables = [tabulate("speedup", SpeedupRow, self.rows)]
            candidates = _Candidates.of(self.rows)
            return tables + (
                [tabulate("trees of drafts", _Candidates, candidates)] if candidates else []
            )
        parts = {"untrained heads": self.before, "trained heads": self.rows}
        return [tabulate(title, SpeedupRow, rows) for title, rows in parts.items()]

    def picture(self) -> bytes:
        """Speedup and acceptance length over K, and conditional acceptance over depth, untrained
        heads in grey."""
        # a figure without pyplot needs no display and leaves no state
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 3.4), layout="constrained")
        panels = figure.subplots(1, 3)
        for color, size in zip(
            cycle(_LINES), sorted({row.batch_size for row in self.rows}), strict=False
        ):
            _plot(
                panels, [row for row in self.rows if row.batch_size == size], color, f"batch {size}"
            )
        if self.before:
            _plot(panels, self.before, _BEFORE, "untrained heads", "--")
        panels[0].axhline(1, color="black", linewidth=0.8)
        names = [
            ("speedup over K = 0", "K"),
            ("acceptance length", "K"),
            ("conditional acceptance", "depth"),
        ]
        for panel, (name, axis) in zip(panels, names, strict=True):
            panel.set(title=name, xlabel=axis, ylim=(0, None))
            panel.locator_params(axis="x", integer=True)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        panels[2].set_ylim(0, 1)
        panels[0].legend(frameon=False, loc="lower right")
        figure.suptitle(f"{self.model}, {self.dtype}, {self.device}", fontsize=9)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
        return file.getvalue()

    def require_identical(self) -> None:
        """Refuse drafts that changed the tokens of greedy fp32 decoding.

        Raises:
            MtpkitError: names every row whose tokens are not those of K = 0.
        """
        changed = [
            f"{1 - r.identical:.0%} at batch {r.batch_size}, K = {r.k}"
            for r in self.rows
            if r.identical < 1
        ]
        if changed:
            raise MtpkitError(
                f"drafts changed the tokens of greedy {self.dtype} decoding, in a share of the"
                f" prompts of {listed(changed, separator='; ')}: the speedups mean nothing until"
                " this is fixed"
            )


def _plot(
    panels: "Sequence[Axes]", rows: Sequence[SpeedupRow], color: str, label: str, style: str = "-"
) -> None:
    """Draw the rows of one batch size in each panel."""
    rows = sorted(rows, key=lambda row: row.k)
    rates = rows[-1].conditional_acceptance
    ks = [row.k for row in rows]
    curves: list[tuple[Sequence[int], list[float]]] = [
        (ks, [row.speedup for row in rows]),
        (ks, [row.acceptance_length for row in rows]),
        (range(1, len(rates) + 1), rates),
    ]
    for panel, (x, y) in zip(panels, curves, strict=True):
        panel.plot(x, y, color=color, label=label, linestyle=style, marker="o", markersize=4)


def measure_speedup(
    model: str | Path | HybridModel,
    prompts: Sequence[Prompt],
    config: SpeedupConfig,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> SpeedupReport:
    """Decode all prompts at every batch size and K.

    Every engine is warmed up first. All K take turns on a few prompts at a time, so that a machine
    that slows down for a while slows all of them.

    Args:
        model: directory of either layout, or a model from `mtpkit.model.build_model`.
        prompts: as `LLM.generate` takes them.

    Raises:
        UserError: the model lacks the heads, or a prompt cannot be served.
        RequestError: the logits of a prompt became NaN or infinite.
    """
    ks = choose_drafts(
        config_of(model), asked_drafts(config.num_speculative_tokens, config.engine), SPEEDUP_DRAFTS
    )
    # Loads the model for all engines, encodes the prompts and knows the model's longest sequence.
    # Its own caches are never used, so they are for one request.
    first = LLM(
        model,
        **engine_arguments(
            without_drafts(config.engine),
            max(ks),  # pipeline stages are balanced for this K and one request
            tokenizer=tokenizer,
            max_num_seqs=1,
            num_blocks=None,
            prefix_cache_bytes=None,
            warm_up=False,
        ),
    )
    warn_of_raw_text(prompts, first.has_chat_template)
    encoded = [
        {"prompt_token_ids": encode(prompt, first.tokenizer, name)[1], "name": name}
        for name, prompt in list_prompts(prompts)
    ]
    config = replace(_at_most(config, len(prompts)), num_speculative_tokens=ks)
    contenders = [
        _Contender(first, encoded, config, size, k) for size in config.batch_size for k in ks
    ]
    _run_all(contenders, config)
    baselines = {contender.batch_size: contender for contender in contenders if contender.k == 0}
    rows = [contender.row(baselines[contender.batch_size]) for contender in contenders]
    _warn_of_small_sample(rows, contenders)
    weight = next(first.model.parameters())
    return SpeedupReport(
        rows=rows,
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        device=describe_device(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        commit=commit(),
        settings={
            "prompts": len(prompts),
            **options_of(config),
            "weight_formats": sorted(quantized_as(first.model)),
        },
    )


def _at_most(config: SpeedupConfig, prompts: int) -> SpeedupConfig:
    """The settings, with batch sizes limited to the number of prompts."""
    # A batch that never fills would be reported under a size that it never had.
    larger = [size for size in config.batch_size if size > prompts]
    if not larger:
        return config
    _logger.warning(
        "there are %d prompts, too few for a batch of %s: measured at %d",
        prompts,
        listed(larger),
        prompts,
    )
    return replace(config, batch_size=tuple(min(size, prompts) for size in config.batch_size))


def _run_all(contenders: list["_Contender"], config: SpeedupConfig) -> None:
    # All K of a batch size are neighbours in time, since a speedup compares them.
    turns = [
        (contender, start)
        for size in config.batch_size
        for start in range(0, len(contenders[0].prompts), _ROUNDS_PER_TURN * size)
        for contender in contenders
        if contender.batch_size == size
    ]
    with tqdm(
        total=config.repeats * len(turns), desc="warming up", unit=" runs", disable=None
    ) as progress:
        # All warm-ups first: they also check the prompts, and a refusal must not end a long
        # measurement.
        for contender in contenders:
            contender.warm_up()
        progress.set_description("measuring")
        for contender, start in config.repeats * turns:
            progress.set_postfix_str(f"batch {contender.batch_size}, K = {contender.k}")
            contender.run(start, start + _ROUNDS_PER_TURN * contender.batch_size)
            progress.update()


def _warn_of_small_sample(rows: Sequence[SpeedupRow], contenders: Sequence["_Contender"]) -> None:
    """Warn if another sample of prompts, or another run, may well have another acceptance length or
    speedup."""
    drafting = [(row, contender) for row, contender in zip(rows, contenders, strict=True) if row.k]
    if not drafting:
        return
    row, contender = max(drafting, key=lambda pair: _spread(pair[0]))
    steps = min(other.steps.sum() for _, other in drafting)
    if steps >= _FEW_STEPS and _spread(row) <= _WIDE:
        return
    _logger.warning(
        "%d prompts with %d decode steps and %.1f s are a small sample: at batch %d and K = %d the"
        " speedup is %.2f%s, the acceptance length %s; for figures to rely on, take more prompts or"
        " a larger --max-tokens",
        *(
            len(contender.prompts),
            steps,
            contender.median_seconds,
            row.batch_size,
            row.k,
            row.speedup,
        ),
        *(_in_brackets(row.speedup_interval), row.show_length()),
    )


def _spread(row: SpeedupRow) -> float:
    """The larger half of the row's two intervals, as a share of the value; 0 without intervals."""
    pairs = (
        (row.speedup, row.speedup_interval),
        (row.acceptance_length, row.acceptance_length_interval),
    )
    return max(
        (interval[1] - interval[0]) / 2 / value if interval else 0.0 for value, interval in pairs
    )


class _Contender:
    """One batch size and K: its engine, and the results of its runs."""

    def __init__(
        self, first: LLM, prompts: list[JsonObject], config: SpeedupConfig, batch_size: int, k: int
    ) -> None:
        seed = config.sampling.seed or 0
        sampling = config.sampling
        self.batch_size = batch_size
        self.k = k
        self.prompts = prompts
        self.sampling = [replace(sampling, seed=seed + index) for index in range(len(prompts))]
        # All engines exist at the same time, so each has caches for its own requests and no more.
        longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
        room = first.engine.config.max_model_len
        settings = engine_arguments(
            config.engine,
            k,
            max_model_len=min(longest + (sampling.max_tokens or room), room),
            max_num_seqs=batch_size,
            tokenizer=first.tokenizer,
            warm_up=False,  # the first run, which is not timed, captures what the others need
        )
        self.llm = LLM(first.model, **settings)
        self.seconds: list[list[float]] = []
        """Wall time of each prompt, in each repeat: its share of the time of its turn, by steps."""
        self.outputs: list[list[list[int]]] = []
        """Tokens of each prompt, in each repeat."""
        self.steps = np.zeros(len(prompts), dtype=int)
        """Decode steps of each prompt, which are the same in each repeat."""
        self.accepted = np.zeros(len(prompts), dtype=int)
        """Accepted drafts of each prompt."""

    def warm_up(self) -> None:
        """Check that all prompts can be served, then run a few steps and a decode step of every
        batch size.

        A batch shrinks while its last requests end, and each size may need a CUDA graph of its own.
        """
        for prompt, sampling in zip(self.prompts, self.sampling, strict=True):
            self.llm.engine.intake.make(prompt["prompt_token_ids"], sampling, place=prompt["name"])
        most = _WARM_UP_TOKENS
        brief = [
            replace(one, max_tokens=min(one.max_tokens or most, most)) for one in self.sampling
        ]
        self.llm.generate(self.prompts[: self.batch_size], brief[: self.batch_size], use_tqdm=False)
        # One token comes with the prompt, the other from a decode step. Prompts of one token are
        # computed in one step.
        endless = replace(self.sampling[0], ignore_eos=True, stop=None, stop_token_ids=None)
        pair = replace(endless, max_tokens=min(endless.max_tokens or 2, 2))
        for size in range(self.batch_size, 0, -1):
            self.llm.generate(
                [prompt["prompt_token_ids"][:1] for prompt in self.prompts[:size]],
                [pair] * size,
                use_tqdm=False,
            )
        self.llm.reset_stats()

    def run(self, start: int, end: int) -> None:
        """Decode some of the prompts, timed as a user would; a repeat begins with the first one."""
        if start == 0:
            self.seconds.append([])
            self.outputs.append([])
        began = time.perf_counter()
        outputs = self.llm.generate(
            self.prompts[start:end], self.sampling[start:end], use_tqdm=False
        )
        seconds = time.perf_counter() - began
        require_whole(outputs)
        self.outputs[-1] += [output.outputs[0].token_ids for output in outputs]
        stats = [output.stats for output in outputs]
        self.steps[start:end] = [one.steps for one in stats]
        self.accepted[start:end] = [one.accepted for one in stats]
        # Only a turn as a whole has a time, but the bootstrap over prompts needs one per prompt.
        shares = 1 + self.steps[start:end]  # the prompt is a step too
        self.seconds[-1] += (seconds * shares / shares.sum()).tolist()

    def row(self, baseline: "_Contender") -> SpeedupRow:
        """Figures of this batch size and K, with the speedup over K = 0."""
        # Every repeat must have these tokens, so that a difference between two runs counts as a
        # change, too.
        reference = baseline.outputs[0]
        same = [
            all(run[index] == tokens for run in self.outputs)
            for index, tokens in enumerate(reference)
        ]
        stats = self.llm.stats()
        return SpeedupRow(
            batch_size=self.batch_size,
            k=self.k,
            tokens_per_s=self.rate,
            speedup=self.rate / baseline.rate,
            acceptance_length=stats.acceptance_length,
            conditional_acceptance=stats.conditional_acceptance,
            identical=sum(same) / len(same),
            candidate_shares=stats.acceptance.rank_shares or None,
            speedup_interval=self._speedup_interval(baseline) if self.k else None,
            acceptance_length_interval=(
                acceptance_interval(self.steps, self.accepted) if self.k else None
            ),
        )

    @property
    def rate(self) -> float:
        """Tokens per second of the median repeat."""
        return float(self.tokens.sum() / self.median_seconds)

    @property
    def median_seconds(self) -> float:
        """Wall time of the median repeat."""
        return statistics.median(map(sum, self.seconds))

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens of each prompt."""
        return np.array([len(tokens) for tokens in self.outputs[0]])

    def _speedup_interval(self, baseline: "_Contender") -> Interval | None:
        """Interval of the speedup, from resampled prompts, and for each resample as many repeats,
        drawn anew."""
        if len(self.prompts) < 2:
            return None
        weights = draw_weights(len(self.prompts))
        repeats = len(self.seconds)
        drawn = np.random.default_rng(0).integers(repeats, size=(len(weights), repeats))
        rates = []
        # Both decoded the same prompts, so that a resample takes the same prompts of both: their
        # spread then cancels in the ratio.
        for one in (self, baseline):
            seconds = np.take_along_axis(weights @ np.array(one.seconds).T, drawn, axis=1)
            rates.append(weights @ one.tokens / np.median(seconds, axis=1))
        logarithms = np.log(rates[0] / rates[1])  # a speedup is positive
        low, high = interval_around(
            math.log(self.rate / baseline.rate), logarithms, len(self.prompts)
        )
        return math.exp(low), math.exp(high)
