"""The values that the five calls of a step hand on. All are frozen; only a plan is kept until its
results are there.

Invalid logits (see `NO_TOKEN`) give `NO_TOKEN` in the verdict or among the drafts. It travels to the host with the
tokens, and the scheduler ends the request there; until then its rows go on from token 0 (`embeddable`).

Shape legend: T tokens of the step, R rows, S rows that sample (the first ones), N logits: 1 + K a decode row, one a
chunk that samples; K drafts, V vocabulary, h hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.request import Request
from mtpkit.engine.sampler import Sampling
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

    @property
    def sampling_requests(self) -> list[Request]:
        """The requests of the rows that sample."""
        return [row.request for row in self.rows[: self.num_sampling_rows]]

    @property
    def processors(self) -> frozenset[str]:
        """What any of these requests uses, see `Request.processors`."""
        return frozenset().union(*(request.processors for request in self.sampling_requests))


@dataclass(frozen=True)
class Earlier:
    """The last E committed positions before a step, the newest last. Those before position 0 may hold anything."""

    token_ids: Tensor
    """[R, E] int64."""
    hidden: Tensor
    """[R, E, h], the base's hidden states."""


@dataclass(frozen=True)
class Batch:
    """A plan as tensors. A captured step has null rows, which belong to no request, and no rows in its plan."""

    plan: Plan
    token_ids: Tensor
    """[T] int64."""
    inputs: StepInput
    sampling: Sampling
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
    """[R, K or 1] int64, the known tokens after each chunk, -1 where unknown; for the largest K of any step."""
    earlier: Earlier | None
    """What is before the step, for drafters that read it."""

    def last_index(self, accepted: Tensor) -> Tensor:
        """[R] index of each row's newest accepted token among its tokens, for [R] `accepted`."""
        return accepted if self.plan.num_decode_rows else self.inputs.query_start.diff() - 1

    def newest(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """[S] flat index and [S] position of each sampling row's newest accepted token, for [R] `accepted`."""
        flat = (self.inputs.query_start[:-1] + self.last_index(accepted))[: self.plan.num_sampling_rows]
        return flat, self.inputs.positions[flat]

    def token_ids_at(self, rows: Tensor, index: Tensor) -> Tensor:
        """[...] tokens of `rows` at `index` among a row's tokens, both [...].

        A negative index is before the step, -1 the position before its first.
        """
        return self._at(rows, index, self.token_ids, None if self.earlier is None else self.earlier.token_ids)

    def hidden_at(self, rows: Tensor, index: Tensor, hidden: Tensor) -> Tensor:
        """[..., h], the base's hidden states there, given those of the step [T, 1, h]."""
        return self._at(rows, index, hidden[:, 0], None if self.earlier is None else self.earlier.hidden)

    def _at(self, rows: Tensor, index: Tensor, values: Tensor, before: Tensor | None) -> Tensor:
        """Of `values` [T, ...] in the step and those `before` it [R, E, ...]."""
        flat = self.inputs.query_start[rows] + index
        if before is None:
            return values[flat]
        count, positions = before.shape[:2]
        flat = torch.where(index < 0, (rows + 1) * positions + index, count * positions + flat)
        return torch.cat([before.flatten(0, 1), values])[flat]


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


def pack_result(verdict: Verdict, drafts: Drafts) -> Tensor:
    """What the host is to know of a step, [S, 2 + 2K] int64: one tensor, so that one copy takes it there."""
    count = len(drafts.token_ids)
    return torch.cat([verdict.accepted[:count, None], verdict.token_ids[:count], drafts.token_ids], 1)


@dataclass(frozen=True)
class StepResult:
    """What a step gave the S rows that sample, as the host knows it.

    Example, K = 3, a row that accepted one draft: path [0, 1, -1, -1], token_ids [draft 1, next token, 0, 0].
    """

    path: np.ndarray
    """[S, 1 + K] int64, the row's logits that were followed, by their index among the row's, then -1. A chain that
    accepted n drafts has the path 0, 1, .., n."""
    token_ids: np.ndarray
    """[S, 1 + K] int64, the token chosen at each entry of the path, or `NO_TOKEN`."""
    drafts: np.ndarray
    """[S, K] int64, what the next step verifies; `NO_TOKEN` where the heads' logits are invalid."""
    log_probs: np.ndarray | None = None
    """[S, 1 + K] float32 of `token_ids`; None: not computed."""

    @classmethod
    def unpack(cls, packed: np.ndarray, depths: int) -> "StepResult":
        """The result that `pack_result` packed, of a step with K = `depths`."""
        accepted, token_ids, drafts = np.split(packed, [1, 2 + depths], axis=1)
        place = np.arange(1 + depths)
        return cls(np.where(place <= accepted, place, -1), token_ids, drafts)

    @property
    def accepted(self) -> np.ndarray:
        """[S] accepted drafts."""
        return (self.path >= 0).sum(1) - 1

    @property
    def num_tokens(self) -> np.ndarray:
        """[S] tokens that each row adds to its request: 1 + `accepted`, or those before the first `NO_TOKEN`."""
        return ((self.path >= 0) & (self.token_ids != NO_TOKEN)).cumprod(1).sum(1)

    @property
    def bad_draft(self) -> np.ndarray:
        """[S] the first depth, from 1, at which the heads' logits are invalid; 0: none."""
        good = (self.drafts != NO_TOKEN).cumprod(1).sum(1)
        return np.where(good < self.drafts.shape[1], good + 1, 0)
