"""Interface of drafters, the drafter of plain decoding, and the base class of drafters with heads.

Shape legend: T tokens of the step, R rows, S rows that sample, K drafts, V vocabulary, h hidden
size. p is a row's newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtpkit.engine.steps import runners_up, sampler
from mtpkit.engine.steps.plan import NO_HEADS, Batch, Drafts, HeadSpan, Verdict
from mtpkit.engine.steps.processor import GRAMMAR
from mtpkit.model import (
    AttentionWindow,
    draft_output_weight,
    greedy_tokens,
    local_logits,
    normed_states,
)
from mtpkit.model.formats.weight import QuantizedWeight, Weight, multiply, weight_bytes
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.quantized import widened_bytes


class Drafter(Protocol):
    """Proposes drafts. It reads no state of the host, since a step may run before the host has the
    results of the previous one, and may be captured in a CUDA graph."""

    @property
    def span(self) -> HeadSpan:
        """The positions that the heads' cache entries depend on."""
        ...

    @property
    def head_bytes(self) -> int:
        """Bytes of the copy of the lm_head's rows that drafts alone read; 0 without one."""
        ...

    @property
    def widened_bytes(self) -> int:
        """As `mtpkit.model.quantized.widened_bytes`, of that copy."""
        ...

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """Propose [S, K] drafts for the rows that sample, given the base's hidden states [T, 1,
        h]."""
        ...


class NoDrafter:
    """Proposes no drafts, for plain decoding."""

    span = NO_HEADS
    head_bytes = 0
    widened_bytes = 0

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        """[S, 0] drafts."""
        return Drafts(verdict.token_ids.new_zeros(batch.shape.sampling_rows, 0))


class Choice(NamedTuple):
    """The drafts of one depth."""

    token_ids: Tensor
    """[S] int64, or `NO_TOKEN`."""
    probs: Tensor | None = None
    """[S, v] the distributions that they were drawn from; None: they are the heads' best tokens."""
    runners_up: Tensor | None = None
    """[S, n] int64, see `mtpkit.engine.steps.runners_up`; None: no row needs them."""


class MtpDrafter:
    """Base class of drafters with heads: chooses a draft from the hidden state of a depth."""

    @property
    def span(self) -> HeadSpan:
        """See `Drafter.span`."""
        return HeadSpan(after=1)

    def __init__(
        self,
        model: HybridModel,
        num_speculative_tokens: int,
        block_size: int,
        sample: bool,
        draft_token_ids: Tensor | None,
        head_dtype: str | None = None,
        window: AttentionWindow | None = None,
    ) -> None:
        self.model = model
        self.window = window
        self.num_speculative_tokens = num_speculative_tokens
        self.block_size = block_size
        self.sample = sample
        self.draft_token_ids = draft_token_ids
        self._draft_weight: Weight | None = None
        if draft_token_ids is not None or head_dtype is not None:
            copied = draft_output_weight(model, draft_token_ids, head_dtype)
            self._draft_weight, self.draft_token_ids = copied

    def windowed(self, batch: Batch) -> Batch:
        """The batch as the heads' attention layers see it."""
        return replace(batch, inputs=replace(batch.inputs, window=self.window))

    @property
    def head_bytes(self) -> int:
        """See `Drafter.head_bytes`."""
        return 0 if self._draft_weight is None else weight_bytes(self._draft_weight)

    @property
    def widened_bytes(self) -> int:
        """See `Drafter.widened_bytes`."""
        weight = self._draft_weight
        return widened_bytes(weight) if isinstance(weight, QuantizedWeight) else 0

    def choose(self, state: Tensor, depth: int, batch: Batch, newest: Tensor) -> Choice:
        """Choose draft `depth` of each row from `state` [S, h], the output of that depth."""
        state = normed_states(self.model, state, depth)
        if not self.sample and GRAMMAR in batch.sampling.use:
            top_tokens = batch.sampling.vocabulary.top_tokens
            tokens, _ = top_tokens(self.logits(state), 1 + runners_up.COUNT, self.draft_token_ids)
            return Choice(tokens[:, 0], runners_up=tokens[:, 1:])
        if not self.sample:
            best = greedy_tokens(self.model, state, self._draft_weight, self.draft_token_ids)
            return Choice(best)
        rows = torch.arange(len(state), device=state.device)
        probs = self.distributions(state, batch, rows)
        numbers = sampler.uniforms(batch.sampling, rows, newest + 1 + depth, sampler.DRAFT_STREAM)
        return Choice(batch.sampling.vocabulary.sample(probs, numbers), probs)

    def logits(self, state: Tensor) -> Tensor:
        """[M, d] logits, given normed states [M, h], of `draft_token_ids` or of all tokens, as far
        as this rank holds them."""
        if self._draft_weight is None:
            return local_logits(self.model, state)
        return multiply(state, self._draft_weight)

    def distributions(self, state: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """[M, v] float32, the distributions that drafts are drawn from, given normed states [M, h]
        of `rows` [M]."""
        vocabulary = batch.sampling.vocabulary
        logits = self.logits(state)
        # Verification compares them with the base's distribution, which is over all tokens.
        if self.draft_token_ids is not None:
            drafted = logits
            logits = logits.new_full((len(state), vocabulary.width), -torch.inf)
            logits[:, self.draft_token_ids - vocabulary.first] = drafted
        return sampler.probabilities(logits, batch.sampling, rows)

    def drafts(self, chosen: list[Choice], batch: Batch) -> Drafts:
        """Stack the results of `choose` for each depth; without any, the result is an empty [S,
        K]."""
        if not chosen:
            return Drafts(
                batch.token_ids.new_zeros(
                    batch.shape.sampling_rows, batch.shape.num_speculative_tokens
                )
            )
        token_ids, *optional = zip(*chosen, strict=True)
        probs, others = (None if None in parts else torch.stack(parts, 1) for parts in optional)
        return Drafts(torch.stack(token_ids, 1), probs, runners_up=others)
