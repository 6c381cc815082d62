"""The values that the five calls of a step hand on. All are frozen; only a plan is kept until its
results are there.

Invalid logits (see `NO_TOKEN`) give `NO_TOKEN` in the verdict or among the drafts. It travels to the host with the
tokens, and the scheduler ends the request there; until then its rows go on from token 0 (`embeddable`).

Shape legend: T tokens of the step, R rows, S rows that sample (the first ones), N logits: 1 + K a decode row, one a
chunk that samples; K drafts, V vocabulary, h hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.engine.request import Request
from mtpkit.engine.sampler import SamplingTensors
from mtpkit.kernels import NO_TOKEN
from mtpkit.model.inputs import StepInput


@dataclass(frozen=True)
class Row:
    """One request's share of a step: `length` tokens from position `start` on.

    Of a decode row `start` is what is known of it: while a step of the request is under way, its true start lies up to
    1 + K positions beyond.
    """

    request: Request
    start: int
    length: int
    samples: bool
    """Whether the step chooses a token and drafts after it: decode rows and the chunk that ends a prompt do."""
    fresh_drafts: int = 0
    """Drafts that a decode row verifies and that the request's last step made; deeper ones are older, and right by
    chance alone."""
    emits: bool = True
    """Whether the chosen token is new. A preempted request's last chunk is followed by a token that is known."""

    @property
    def token_ids(self) -> list[int]:
        """A chunk's tokens."""
        return self.request.token_ids[self.start : self.start + self.length]

    def known_after(self, count: int) -> list[int]:
        """The `count` tokens that follow a chunk, -1 where they are not known."""
        end = self.start + self.length
        known = self.request.token_ids[end : end + count]
        return known + [-1] * (count - len(known))


@dataclass(frozen=True)
class Plan:
    """Rows that run together: either decode rows, or prefill chunks, those that sample first."""

    rows: tuple[Row, ...]
    num_decode_rows: int
    num_sampling_rows: int
    num_speculative_tokens: int
    """K: drafts that each decode row verifies, and that each row that samples gets."""


@dataclass(frozen=True)
class Batch:
    """A plan as tensors. A captured step has null rows, which belong to no request, and no rows in its plan."""

    plan: Plan
    token_ids: Tensor
    """[T] int64."""
    inputs: StepInput
    sampling: SamplingTensors
    """Of the S sampling rows."""
    logit_indices: Tensor
    """[N] int64, the tokens whose logits are needed: all of the decode rows, the last of the sampling chunks."""
    logit_rows: Tensor
    """[N] int64, the row of each."""
    drafts: Tensor
    """[D, K] int64, the drafts under verification; D decode rows."""
    draft_probs: Tensor | None
    """[D, K, V], the distributions they were drawn from; None: they are the best tokens."""
    lookahead: Tensor
    """[R, max(K, 1)] int64, the known tokens after each chunk, -1 where unknown."""

    def newest(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """[S] flat index and [S] position of each sampling row's newest accepted token, for [R] `accepted`."""
        count = self.plan.num_sampling_rows
        if self.plan.num_decode_rows:
            flat = self.inputs.query_start[:count] + accepted
        else:
            flat = self.inputs.query_start[1 : count + 1] - 1
        return flat, self.inputs.positions[flat]


@dataclass(frozen=True)
class StepOutput:
    """What the base computed."""

    logits: Tensor
    """[N, V]."""
    hidden: Tensor
    """[T, 1, h], after the final norm."""


@dataclass(frozen=True)
class Verdict:
    """What verification decided."""

    accepted: Tensor
    """[R] int64, accepted drafts; 0 for prefill rows."""
    token_ids: Tensor
    """[R, 1 + K] int64: the accepted drafts, the next token, then zeros. A chunk that does not sample has the known
    token after it in its first column, so that column `accepted` is the next token of every row. `NO_TOKEN` in one of
    the first 1 + `accepted` columns: the base's logits there are invalid."""


@dataclass(frozen=True)
class Drafts:
    """What the next step verifies."""

    token_ids: Tensor
    """[S, K] int64; `NO_TOKEN` where the heads' logits are invalid."""
    probs: Tensor | None = None
    """[S, K, V] when the drafts were drawn from a distribution."""


def embeddable(token_ids: Tensor) -> Tensor:
    """Tokens that can be embedded: `NO_TOKEN` becomes token 0."""
    return token_ids.clamp_min(0)


def pack_results(verdict: Verdict, drafts: Drafts) -> Tensor:
    """What the host is to know of a step, [S, 2 + 2K] int64, see `RowResult`."""
    count = len(drafts.token_ids)
    return torch.cat([verdict.accepted[:count, None], verdict.token_ids[:count], drafts.token_ids], 1)


@dataclass(frozen=True)
class RowResult:
    """What a step gave of a row that samples, as the host knows it."""

    accepted: int
    """Drafts."""
    token_ids: list[int]
    """What the verdict adds to the request: 1 + `accepted` tokens, or those before the first that is `NO_TOKEN`."""
    bad_draft: int | None
    """The first depth, from 1, at which the heads' logits are invalid."""

    @classmethod
    def unpack(cls, values: list[int], depths: int) -> "RowResult":
        """A row of `pack_results` with K = `depths`."""
        accepted, token_ids, drafts = values[0], values[1 : 2 + values[0]], values[2 + depths :]
        if NO_TOKEN in token_ids:
            token_ids = token_ids[: token_ids.index(NO_TOKEN)]
        return cls(accepted, token_ids, drafts.index(NO_TOKEN) + 1 if NO_TOKEN in drafts else None)

    @property
    def valid(self) -> bool:
        """Whether the base's logits are valid wherever the verdict used them."""
        return len(self.token_ids) == 1 + self.accepted
