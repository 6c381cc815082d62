"""Conversations of several turns without and with the prefix cache: time to first token, and
recomputed tokens."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import torch

from mtpkit.bench.load import shown_rate
from mtpkit.bench.machine import measure_machine
from mtpkit.bench.report import Column, Result
from mtpkit.bench.serving import Clock, Stream, WallClock, percentiles_ms, take
from mtpkit.bench.settings import LOAD_DRAFTS, LoadConfig, TurnsConfig, engine_settings
from mtpkit.bench.shapes import choose_drafts, random_prompts
from mtpkit.bench.timing import release_memory
from mtpkit.engine import LLM
from mtpkit.errors import MtpkitError
from mtpkit.model.hybrid import HybridModel

Drafts = int | Literal["auto"]


@dataclass(frozen=True)
class TurnsRow:
    """All conversations with one engine, after an untimed run with other tokens."""

    k: Annotated[Drafts, Column("K", key=True)]
    cached: Annotated[bool, Column("cache", lambda row: "on" if row.cached else "off", key=True)]
    prompt_tokens: Annotated[int, Column("prompt tokens", ",")]
    prefilled_tokens: Annotated[int, Column("prefilled", ",")]
    """Prompt tokens that were computed."""
    hit_share: Annotated[float, Column("of the shareable hit", ".1%")]
    """Tokens that the cache had, as a share of those that earlier turns of the conversation had
    computed."""
    ttft_p50_ms: Annotated[float, Column("TTFT ms p50", ".1f")]
    """Time to first token of the turns after the first, from their arrival."""
    ttft_p99_ms: Annotated[float, Column("p99", ".1f")]
    seconds: Annotated[float, Column("s", ".2f")]
    """From the first arrival to the last output."""
    acceptance_length: Annotated[
        float,
        Column("acceptance length", lambda row: f"{row.acceptance_length:.2f}" if row.k else "-"),
    ]
    identical: Annotated[float | None, Column("same outputs", ".0%")] = None
    """Share of the conversations whose outputs equal those without the cache."""


def measure_turns(
    model: HybridModel,
    config: LoadConfig,
    turns: TurnsConfig,
    name: str = "model",
    keep: Callable[[Result[TurnsRow]], object] | None = None,
    clock: Clock | None = None,
) -> Result[TurnsRow]:
    """Hold the conversations with every K, without and with the cache, each time with a new engine.

    Args:
        model: from `mtpkit.bench.shapes.open_model`.
        config: settings of the engine, K, acceptance and seed; its load is not served.
        name: the model's name in the report.
        keep: see `Result.measure`.
        clock: source of all times; by default the machine's clock.

    Raises:
        UserError: the model lacks the heads, or the conversations do not fit.
        RequestError: the logits of a request are NaN or infinite.
        MtpkitError: in fp32, outputs differ with the cache.
    """
    weight = next(model.parameters())
    config = replace(config, ks=choose_drafts(model.mtpkit_config, config.ks, LOAD_DRAFTS))
    machine = measure_machine(weight.device)
    used = clock or WallClock()
    plain: dict[Drafts, list[list[int]]] = {}
    exact = (
        weight.dtype == torch.float32
        and config.state_dtype == "float32"
        and config.prefix_cache_dtype != "bfloat16"
    )

    def measure(pair: tuple[Drafts, bool]) -> TurnsRow:
        release_memory(weight.device)  # of the engine before
        row, histories = _hold(
            model, replace(config, enable_prefix_caching=pair[1]), turns, pair[0], used
        )
        if not pair[1]:
            plain[pair[0]] = histories
            return row
        same = sum(
            one == other for one, other in zip(histories, plain[pair[0]], strict=True)
        ) / len(histories)
        if exact and same < 1:
            raise MtpkitError(
                f"K = {pair[0]}: {1 - same:.0%} of the conversations differ with the prefix cache"
            )
        return replace(row, identical=same)

    title = (
        f"{turns.conversations} conversations of {turns.turns} turns, {turns.turn_length:,} new"
        f" tokens and {turns.output_len:,} output tokens each, {turns.shared:.0%} shared: {name},"
        f" {str(weight.dtype).removeprefix('torch.')}, {machine.device}"
    )
    rates = [shown_rate(rate) for rate in config.request_rates]
    about = {
        "model": name,
        **asdict(config),
        **asdict(turns),
        "output_len": turns.output_len,
        "request_rates": rates,
    }
    result = Result("load_turns", title, TurnsRow, [], machine, about)
    pairs = [(k, cached) for k in config.ks or () for cached in (False, True)]
    labels = {pair: f"K = {pair[0]}, cache {'on' if pair[1] else 'off'}" for pair in pairs}
    result = result.measure(pairs, measure, labels.__getitem__, keep)
    release_memory(weight.device)
    return result


def _hold(
    model: HybridModel, config: LoadConfig, turns: TurnsConfig, k: Drafts, clock: Clock
) -> tuple[TurnsRow, list[list[int]]]:
    """Hold all conversations twice, with different tokens, the first time untimed.

    Returns:
        The row, and the tokens of each conversation.
    """
    depths = model.mtpkit_config.mtp.most_adaptive_drafts if k == "auto" else k
    llm = LLM(
        model,
        **engine_settings(
            config,
            num_speculative_tokens=k,
            max_model_len=turns.longest,
            max_num_seqs=turns.conversations,
            synthetic_acceptance=config.rates(depths) if depths else None,
        ),
    )
    _converse(llm, turns, config.seed, clock)
    llm.reset_stats()
    began = clock.now()
    streams, histories = _converse(llm, turns, config.seed + 1, clock)
    seconds = clock.now() - began
    stats = llm.stats()
    first, last = percentiles_ms([one.first_seconds for stream in streams for one in stream[1:]])
    assert first is not None and last is not None
    # The last token of an output was never fed to the model.
    before = sum(len(one.prompt) + one.max_tokens - 1 for stream in streams for one in stream[:-1])
    return (
        TurnsRow(
            k=k,
            cached=config.enable_prefix_caching,
            prompt_tokens=stats.prompt_tokens,
            prefilled_tokens=stats.prefilled_tokens,
            hit_share=stats.cached_tokens / before,
            ttft_p50_ms=first,
            ttft_p99_ms=last,
            seconds=seconds,
            acceptance_length=stats.acceptance_length,
        ),
        histories,
    )


def _converse(
    llm: LLM, turns: TurnsConfig, seed: int, clock: Clock
) -> tuple[list[list[Stream]], list[list[int]]]:
    """Return the streams of each conversation's turns, and its tokens. A turn is added when the one
    before ends."""
    engine = llm.engine
    size = turns.turn_length
    drawn = random_prompts(
        turns.conversations, turns.turns * size, llm.model.mtpkit_config.vocab_size, seed
    )
    histories = [list(new[:size]) for new in drawn]
    streams: list[list[Stream]] = [[] for _ in drawn]
    running: dict[str, Stream] = {}
    owners: dict[str, int] = {}

    def add(index: int) -> None:
        stream = Stream(clock.now(), list(histories[index]), turns.output_len)
        streams[index].append(stream)
        request_id = engine.add_request(stream.prompt, stream.params)
        running[request_id], owners[request_id] = stream, index

    for index in range(len(drawn)):
        add(index)
    while engine.has_unfinished:
        outputs = engine.step()
        take(outputs, running, clock.now())
        for index in (owners[output.request_id] for output in outputs if output.finished):
            turn = len(streams[index])
            histories[index] += streams[index][-1].tokens
            if turn < turns.turns:
                histories[index] += drawn[index][turn * size : (turn + 1) * size]
                add(index)
    return streams, histories
