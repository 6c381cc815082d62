"""Logits processors: rules about tokens, penalties, temperature and filters, in the order in which
they are applied.

`PROCESSORS` lists them; a new one that changes logits is a class and an entry in that list. A
filter of the distribution, a `Shaping`, is also computed in `kernels.sampling` and, where ranks
share a vocabulary, in `SplitVocabulary`.

Shape legend: S rows that sample, N logits rows, D decode rows, K drafts, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.request import Request
from mtpkit.engine.steps.grammar import Grammar
from mtpkit.engine.steps.processor import (
    LOG_PROBS,
    NO_DRAFTS,
    Chosen,
    Column,
    Columns,
    Processor,
    Seen,
    Use,
)
from mtpkit.engine.steps.token_rules import TokenRules
from mtpkit.engine.steps.vocabulary import Vocabulary
from mtpkit.kernels import sampling as ops
from mtpkit.platform import to_device

_NO_PENALTY = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0}


class Penalties(Processor):
    """Presence, frequency and repetition penalties, as vLLM defines them.

    Presence and frequency penalties look at the output, the repetition penalty at prompt and
    output. The drafts before a position count as output.

    For each slot the device stores which tokens the prompt contains and how often the output
    contains each token: 5 bytes per token of the vocabulary. These columns are allocated with the
    engine and are part of the memory plan, because CUDA graphs need them at a fixed address. The
    slots of requests without penalties may hold any values.
    """

    name = "penalties"

    def columns(self, vocabulary: Vocabulary, masks: int) -> dict[str, Column]:
        width = vocabulary.width
        numbers = {name: Column((), torch.float32, off) for name, off in _NO_PENALTY.items()}
        prompt = Column((width,), torch.bool, 0)
        output = Column((width,), torch.int32, 0)
        return numbers | {"in_prompt": prompt, "output_counts": output}

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        return params.has_penalties

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        return {name: getattr(params, f"{name}_penalty") for name in _NO_PENALTY}

    def admit(
        self, columns: Columns, slots: Tensor, requests: Sequence[Request], vocabulary: Vocabulary
    ) -> None:
        """Write the tokens of prompt and output, without the newest output token, which `count`
        adds."""
        counted = [request for request in requests if request.params.has_penalties]
        if not counted:
            return
        prompt = columns["in_prompt"]
        output = columns["output_counts"]
        # A method: `prompt[slots] = False` would copy a number to the device and wait for it.
        prompt.index_fill_(0, slots, False)
        output.index_fill_(0, slots, 0)
        place = partial(_entries, counted, device=slots.device, vocabulary=vocabulary)
        asked = place([r.prompt_token_ids for r in counted])
        prompt.index_put_(asked, prompt.new_ones(len(asked[0])))
        known = place([r.token_ids[len(r.prompt_token_ids) : r.prefill_end] for r in counted])
        output.index_put_(known, output.new_ones(len(known[0])), accumulate=True)

    def count(self, columns: Columns, slots: Tensor, chosen: Chosen) -> None:
        """Count the chosen tokens, without rejected drafts and `NO_TOKEN`."""
        output = columns["output_counts"]
        token_ids = chosen.placed
        # Counts of tokens that are not new grow by 0: choosing the new ones with a mask would need
        # their number on the host. Null rows, at slot -1, count in the last entry.
        index = torch.arange(token_ids.shape[1], device=slots.device)
        new = (index <= chosen.accepted[:, None]) & (token_ids >= 0)
        places = (slots % len(output))[:, None] * output.shape[1] + token_ids.clamp_min(0)
        output.view(-1).scatter_add_(0, places.flatten(), new.flatten().to(output.dtype))

    def apply(self, logits: Tensor, columns: Columns, slots: Tensor, seen: Seen) -> Tensor:
        return ops.apply_penalties(
            logits,
            columns["in_prompt"],
            columns["output_counts"],
            columns["repetition"],
            columns["frequency"],
            columns["presence"],
            slots,
            seen.placed,
            seen.ancestors,
        )


def _entries(
    requests: Sequence[Request],
    token_ids: Sequence[Sequence[int]],
    device: torch.device,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """[n] slots and [n] columns, one pair per token in `token_ids`, which has one list per request.
    Tokens that another rank holds are left out."""
    slots = np.repeat([request.slot for request in requests], [len(tokens) for tokens in token_ids])
    columns = np.fromiter(chain(*token_ids), np.int64) - vocabulary.first
    own = (columns >= 0) & (columns < vocabulary.width)
    return to_device(slots[own], torch.int64, device), to_device(columns[own], torch.int64, device)


@dataclass(frozen=True)
class Shaping(Processor):
    """Temperature or a filter of the distribution: one number per request, which the sampling
    kernels read."""

    name: str
    """Name of the processor and of its column."""
    dtype: torch.dtype
    fill: float
    value: Callable[[SamplingParams, int], float]
    """The column's number, from a request's parameters and the vocabulary's size."""
    off: Callable[[int], float] = lambda vocab_size: 0.0
    """The number with which the processor changes nothing, from the vocabulary's size."""

    def columns(self, vocabulary: Vocabulary, masks: int) -> dict[str, Column]:
        return {self.name: Column((), self.dtype, self.fill)}

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        return self.value(params, vocab_size) != self.off(vocab_size)

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        return {self.name: self.value(params, vocab_size)}


class NoDrafts(Processor):
    """`speculate`: changes no logits; `mtpkit.engine.steps.verifier` rejects the drafts."""

    name = NO_DRAFTS

    def columns(self, vocabulary: Vocabulary, masks: int) -> dict[str, Column]:
        return {NO_DRAFTS: Column((), torch.bool, 0)}

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        return not params.speculate

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        return {NO_DRAFTS: float(not params.speculate)}


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


TEMPERATURE = Shaping(
    "temperature", torch.float32, 0.0, lambda p, _: 0.0 if p.greedy else p.temperature
)
"""0: greedy."""
MIN_P = Shaping("min_p", torch.float32, 0.0, lambda p, _: p.min_p)
TOP_K = Shaping("top_k", torch.int64, 1, _top_k, lambda vocab_size: vocab_size)
TOP_P = Shaping("top_p", torch.float32, 1.0, lambda p, _: p.top_p, lambda _: 1.0)

PROCESSORS: tuple[Processor, ...] = (
    Grammar(),
    TokenRules(),
    Penalties(),
    TEMPERATURE,
    MIN_P,
    TOP_K,
    TOP_P,
    NoDrafts(),
)
GREEDY: Use = frozenset()
"""No processor: the base's best token is chosen."""
_SHAPING: Use = frozenset(
    processor.name for processor in PROCESSORS if isinstance(processor, Shaping)
)


def processors_of(params: SamplingParams, vocab_size: int) -> Use:
    """Names of the processors that a request with these parameters uses."""
    used = frozenset(
        processor.name for processor in PROCESSORS if processor.used(params, vocab_size)
    )
    return used if params.logprobs is None else used | {LOG_PROBS}


def for_graph(use: Use) -> Use:
    """Names of the processors that a CUDA graph computes for `use`.

    A graph computes temperature and all filters, or none of them if every row is greedy. This keeps
    the number of captured graphs small.
    """
    return use | _SHAPING if TEMPERATURE.name in use else use - _SHAPING
