"""Values passed between the five calls of a step. All are frozen; only a plan is kept until its
results arrive.

The scheduler decides a `Plan`, with the copies that it needs (`Restore`, `Save`). A `StepShape` has
the sizes of a step, of a plan or of a captured step that plans are padded to. A `Batch` has the
tensors of a step of some shape.

Where logits are invalid (see `NO_TOKEN`), the verdict or the drafts contain `NO_TOKEN`. It goes to
the host with the tokens, and the scheduler then ends the request; until then its rows continue from
token 0 (`embeddable`).

Shape legend: T tokens of the step, R rows, S rows that sample (the first ones), N logits (1 + K per
decode row, one per chunk that samples), K drafts, V vocabulary, h hidden size.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.tree import DraftShape, depth_of, width_of
from mtpkit.engine.steps.processor import NO_DRAFTS
from mtpkit.engine.steps.sampler import Sampling
from mtpkit.kernels import NO_TOKEN
from mtpkit.model.inputs import DecodeGroup, StepInput, decode_groups


@dataclass(frozen=True)
class Row:
    """One request's part of a step: `length` tokens from position `start` on.

    For a decode row, `start` is what the host knows: while an earlier step of the request is
    uncommitted, the true start is up to 1 + K positions later.
    """

    request: Request
    start: int
    length: int
    samples: bool
    """Whether the step chooses a token for the row and makes drafts after that token: true for
    decode rows and for the last chunk of a prompt."""
    fresh_drafts: int = 0
    """Number of drafts, per path under verification, that the request's previous step made. Deeper
    drafts are stale and right only by chance."""
    emits: bool = True
    """Whether the chosen token is new; the token after the last chunk of a preempted request is
    already known."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens of a chunk."""
        return self.request.token_ids[self.start : self.start + self.length]

    @property
    def reported(self) -> int:
        """Number of the row's first tokens after which the log-probability of the prompt's next
        token is reported."""
        if not self.request.reports_prompt:
            return 0
        return max(0, min(self.length, len(self.request.prompt_token_ids) - 1 - self.start))

    def known_after(self, count: int) -> list[int]:
        """The `count` tokens after a chunk, -1 where unknown."""
        end = self.start + self.length
        known = self.request.token_ids[end : end + count]
        return known + [-1] * (count - len(known))


@dataclass(frozen=True)
class Restore:
    """Copies from a checkpoint of the prefix cache to a request, made before the steps that
    continue from there."""

    checkpoint: int
    slot: int
    length: int
    """Number of tokens before the checkpoint."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Blocks to copy: (from, to)."""


@dataclass(frozen=True)
class Save:
    """A checkpoint that a request leaves: what its slot holds once the launched steps have run."""

    checkpoint: int
    slot: int
    length: int
    """Number of tokens before the checkpoint."""
    decoded: bool = False
    """Whether the slot's newest step was a decode step, not a chunk. If so, nothing uses the slot's
    states later."""
    noise_key: int = 0
    """See `Request.noise_key`."""


@dataclass(frozen=True)
class Plan:
    """Rows that run together: decode rows, then chunks of prompts, of which those that sample come
    first. Either kind may be missing.

    With `restores`, the rows belong to the requests that begin at these checkpoints: each row is a
    chunk of one token, the last one before the checkpoint. The base is not run for these rows,
    since the checkpoint holds its hidden state; only the heads are run. A row samples, and gets its
    next token, if the checkpoint covers all that its request's prefill computes. If the heads keep
    recurrent state, there are no rows.
    """

    rows: tuple[Row, ...]
    num_decode_rows: int
    num_sampling_rows: int
    drafts: DraftShape
    """The drafts that each decode row verifies, and that each row that samples gets."""
    short: tuple[int, int] = (0, 0)
    """Number of the last decode rows, which verify fewer drafts, and how many drafts each
    verifies."""
    restores: tuple[Restore, ...] = ()
    """Checkpoints to copy to slots before the step."""
    saves: tuple[Save, ...] = ()
    """Checkpoints to leave after the step."""
    batch: int = 0
    """The batch of the requests, see `EngineConfig.num_batches`."""

    @property
    def num_speculative_tokens(self) -> int:
        """K of `drafts`."""
        return depth_of(self.drafts)

    @property
    def trees(self) -> bool:
        """Whether `drafts` are trees."""
        return not isinstance(self.drafts, int)

    @property
    def decode_rows(self) -> tuple[Row, ...]:
        """The rows that decode."""
        return self.rows[: self.num_decode_rows]

    @property
    def chunks(self) -> tuple[Row, ...]:
        """The rows that are chunks of prompts."""
        return self.rows[self.num_decode_rows :]

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(row.length for row in self.chunks)

    @property
    def sampling_requests(self) -> list[Request]:
        """The requests of the rows that sample."""
        return [row.request for row in self.rows[: self.num_sampling_rows]]

    @property
    def constrained_requests(self) -> list[Request]:
        """Those of `sampling_requests` that have a constraint."""
        return [request for request in self.sampling_requests if request.constraint]

    @property
    def num_reported(self) -> int:
        """Tokens of all chunks after which log-probabilities of prompts are reported. Such a plan
        is not run as a graph: how many there are differs from step to step."""
        return sum(row.reported for row in self.chunks)

    @property
    def processors(self) -> frozenset[str]:
        """Names of the processors that at least one of these requests uses."""
        used = frozenset[str]().union(*(one.processors for one in self.sampling_requests))
        # Only decode rows have drafts: other steps share the graphs of those without the name.
        if NO_DRAFTS in used and not self._rejects_drafts:
            return used - {NO_DRAFTS}
        return used

    @property
    def _rejects_drafts(self) -> bool:
        """Whether a decode row has drafts although its request does not speculate."""
        speculating = all(row.request.params.speculate for row in self.decode_rows)
        return self.num_speculative_tokens > 0 and not speculating


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step's tensors, at least those of its plan: null rows, which belong to no request,
    and their tokens pad the plan. All rows of a captured step sample, whether their results are
    used or not."""

    decode_rows: int
    chunk_rows: int
    """If this exceeds the number of chunks in the plan, the last row is a null row that has all
    padding tokens."""
    chunk_tokens: int
    sampling_rows: int
    drafts: DraftShape
    """See `Plan.drafts`."""
    short: tuple[int, int] = (0, 0)
    """See `Plan.short`."""
    resumed: bool = False
    """Whether the rows begin at checkpoints, so that only the heads run, see `Plan`."""

    @classmethod
    def of(cls, plan: Plan) -> "StepShape":
        """The sizes of a plan without padding."""
        return cls(
            plan.num_decode_rows,
            len(plan.chunks),
            plan.num_chunk_tokens,
            plan.num_sampling_rows,
            plan.drafts,
            plan.short,
            resumed=bool(plan.restores),
        )

    @classmethod
    def decoding(
        cls, rows: int, drafts: DraftShape, short: tuple[int, int] = (0, 0)
    ) -> "StepShape":
        """The sizes of a step of decode rows."""
        return cls(rows, 0, 0, rows, drafts, short)

    @property
    def rows(self) -> int:
        """All rows."""
        return self.decode_rows + self.chunk_rows

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.decode_tokens + self.chunk_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rows."""
        return sum(group.num_rows * group.width for group in self.decode_groups)

    @property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decode rows by their number of tokens."""
        rows, drafts = self.short
        return decode_groups(self.decode_rows, width_of(self.drafts), (rows, 1 + drafts))

    @property
    def num_speculative_tokens(self) -> int:
        """K of `drafts`."""
        return depth_of(self.drafts)

    @property
    def trees(self) -> bool:
        """Whether `drafts` are trees."""
        return not isinstance(self.drafts, int)


@dataclass(frozen=True)
class HeadSpan:
    """The positions around a position j whose tokens and hidden states the heads' cache entries for
    j are computed from, see `DistinctDrafter`."""

    before: int = 0
    """E: committed positions before a step that the drafter runs over again. The recurrent states
    of the heads stay E positions behind the committed ones."""
    after: int = 0
    """Tokens after j that the entries depend on: 1 for a repeated head, K for distinct heads; 0:
    there are no heads."""
    hidden_size: int = 0
    """Size of the hidden states that are kept of the E positions."""


NO_HEADS = HeadSpan()


@dataclass(frozen=True)
class Earlier:
    """The last E committed positions before a step, the newest last. Values before position 0 are
    undefined."""

    token_ids: Tensor
    """[R, E] int64."""
    hidden: Tensor
    """[R, E, h], the base's hidden states."""


@dataclass(frozen=True)
class Batch:
    """The tensors of a step."""

    shape: StepShape
    token_ids: Tensor
    """[T] int64."""
    rows: Tensor
    """[T] int64, the row of each token."""
    inputs: StepInput
    sampling: Sampling
    """Sampling parameters of the S sampling rows."""
    logit_indices: Tensor
    """[N] int64, the tokens whose logits are computed: all of each decode row, the last of each
    sampling chunk."""
    logit_rows: Tensor
    """[N] int64, the row of each logit."""
    drafts: Tensor
    """[D, K] int64, the drafts under verification; D decode rows. Trees have one column for each
    draft of the tree."""
    draft_probs: Tensor | None
    """[D, K, V], the distributions that the drafts were drawn from; None: drafts are the heads'
    best tokens. Trees have one distribution for each token with children, [D, E, V]."""
    lookahead: Tensor
    """[R, max(K, 1)] int64, the known tokens after each row, -1 where unknown; K is the largest K
    of any step."""
    earlier: Earlier | None
    """The positions before the step, for drafters that read them."""
    reported: tuple[Tensor, Tensor] | None = None
    """[M] int64 each: the tokens of the step after which log-probabilities of prompts are reported,
    and the prompts' next tokens. None: no request asks for them."""
    resumed_hidden: Tensor | None = None
    """[T, 1, h] the base's hidden states of resumed rows, for which the base does not run; None:
    the rows are not resumed, or this rank keeps no hidden states."""

    def last_index(self, accepted: Tensor) -> Tensor:
        """[R] index of each row's newest accepted token within the row, for [R] `accepted`; -1 for
        an empty row."""
        decoding = self.inputs.num_decode_rows
        if not self.inputs.num_chunk_rows:
            return accepted
        return torch.cat([accepted[:decoding], self.inputs.query_start[decoding:].diff() - 1])

    def newest(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """[S] flat index and [S] position of each sampling row's newest accepted token, for [R]
        `accepted`."""
        flat = self.inputs.query_start[:-1] + self.last_index(accepted)
        count = self.shape.sampling_rows
        if self.inputs.num_chunk_rows:  # if there is a null row, the last token belongs to one
            flat = torch.where(self.inputs.context_lens < 0, len(self.rows) - 1, flat)
        return flat[:count], self.newest_positions(accepted)[:count]

    def newest_positions(self, accepted: Tensor) -> Tensor:
        """[R] position of each row's newest accepted token; 0 for null rows among the chunks."""
        contexts = self.inputs.context_lens
        newest = contexts + self.last_index(accepted)
        return torch.where(contexts < 0, 0, newest) if self.inputs.num_chunk_rows else newest

    def along(self, verdict: "Verdict") -> tuple["Batch", Tensor | None]:
        """Turn decode rows that are trees into chains: each row's accepted path is moved to the
        front of the row, also in the states. The tokens after the path are never read.

        Returns:
            The batch, and the new order [T] int64 of its tokens; None: the order is unchanged.
        """
        inputs = self.inputs
        width = self.inputs.decode_width
        if inputs.tree is None:
            return self, None
        assert verdict.path is not None
        rows = inputs.num_decode_rows
        inputs.keep_path(verdict.path, verdict.accepted[:rows])
        index = torch.arange(len(self.rows), device=self.rows.device)
        path = F.pad(verdict.path, (0, width - verdict.path.shape[1]))
        order = (index[: rows * width : width, None] + path).flatten()
        # Tokens lie at their depth in a tree, and one after another in a chain.
        positions = (inputs.context_lens[:rows, None] + index[:width]).flatten()
        count = rows * width
        if count < len(index):
            order = torch.cat([order, index[count:]])
            positions = torch.cat([positions, inputs.positions[count:]])
        chains = replace(inputs, positions=positions, tree=None)
        return replace(self, token_ids=self.token_ids[order], inputs=chains), order

    def token_ids_at(self, rows: Tensor, index: Tensor) -> Tensor:
        """[...] tokens of `rows` at `index` within the row, both [...].

        A negative index is before the step; -1 is the position before the row's first.
        """
        before = None if self.earlier is None else self.earlier.token_ids
        return self._at(rows, index, self.token_ids, before)

    def hidden_at(self, rows: Tensor, index: Tensor, hidden: Tensor) -> Tensor:
        """[..., h] the base's hidden states at the same places as `token_ids_at`; `hidden` [T, 1,
        h] are the step's."""
        before = None if self.earlier is None else self.earlier.hidden
        return self._at(rows, index, hidden[:, 0], before)

    def _at(self, rows: Tensor, index: Tensor, values: Tensor, before: Tensor | None) -> Tensor:
        """Gather from the `values` of the step [T, ...] and the values `before` it [R, E, ...]."""
        flat = self.inputs.query_start[rows] + index
        if before is None:
            return values[flat]
        count, positions = before.shape[:2]
        # One gather from both: where a token comes from is known on the device alone.
        flat = torch.where(index < 0, (rows + 1) * positions + index, count * positions + flat)
        return torch.cat([before.flatten(0, 1), values])[flat]


@dataclass(frozen=True)
class StepOutput:
    """Results of the base model."""

    logits: Tensor
    """[N, V]."""
    hidden: Tensor
    """[T, 1, h], the base's hidden states that the heads read, see `base_forward`."""


@dataclass(frozen=True)
class Verdict:
    """Result of verification."""

    accepted: Tensor
    """[R] int64, accepted drafts; 0 for prefill rows."""
    token_ids: Tensor
    """[R, 1 + K] int64: the accepted drafts, the next token, then zeros. The first column of a
    chunk is the known token after it, if there is one, so that column `accepted` is the next token
    of every row. `NO_TOKEN` in one of the first 1 + `accepted` columns means that the base's logits
    there are invalid."""
    path: Tensor | None = None
    """[D, 1 + K] int64, for trees: the indices within the row of its accepted tokens, token 0
    first, then zeros."""
    ranks: Tensor | None = None
    """[R, K] int64, for trees: at each depth the rank of the base's choice among the candidates,
    see `accept_tree`."""


@dataclass(frozen=True)
class Drafts:
    """Drafts that the next step verifies."""

    token_ids: Tensor
    """[S, K] int64; `NO_TOKEN` where the heads' logits are invalid."""
    probs: Tensor | None = None
    """[S, K, V], the distributions that the drafts were drawn from; None: drafts are the heads'
    best tokens."""
    parents: Tensor | None = None
    """[S, tokens of a tree] int64, the parent of each token, for trees that differ between rows."""
    best: Tensor | None = None
    """[S, K] int64, for trees: one draft per depth, `NO_TOKEN` where logits are invalid."""
    runners_up: Tensor | None = None
    """[S, K, n] int64, see `steps.runners_up`; None: not computed."""


def embeddable(token_ids: Tensor) -> Tensor:
    """Replace `NO_TOKEN` by token 0, so that the tokens can be embedded."""
    return token_ids.clamp_min(0)


def pack_result(verdict: Verdict, drafts: Drafts) -> Tensor:
    """Pack the results for the host into one tensor, [S, 2 + 2K] int64 (trees: 2 + 3K), which needs
    one copy."""
    count = len(drafts.token_ids)
    tokens = drafts.token_ids if drafts.best is None else drafts.best
    ranks = [] if verdict.ranks is None else [verdict.ranks[:count]]
    return torch.cat([verdict.accepted[:count, None], verdict.token_ids[:count], tokens, *ranks], 1)


@dataclass(frozen=True)
class StepResult:
    """Results of a step on the host, for the S rows that sample.

    Example, K = 3, a row that accepted one draft: path [0, 1, -1, -1], token_ids [draft 1, next
    token, 0, 0].
    """

    path: np.ndarray
    """[S, 1 + K] int64, the indices within the row of the logits that chose its tokens, then -1. A
    row that accepted n drafts has the path 0, 1, .., n. This holds for trees too: their accepted
    paths have become chains."""
    token_ids: np.ndarray
    """[S, 1 + K] int64, the token chosen at each entry of the path, or `NO_TOKEN`."""
    drafts: np.ndarray
    """[S, K] int64, the drafts for the next step, for trees one per depth; `NO_TOKEN` where the
    heads' logits are invalid."""
    ranks: np.ndarray | None = None
    """[S, K] int64, see `Verdict.ranks`."""
    log_probs: np.ndarray | None = None
    """[S, columns] int64, see `steps.log_probs.unpack`; None: not computed."""
    trees: np.ndarray | None = None
    """[C, T - 1 or 2T - 1] int64, for `Plan.constrained_requests` of an engine with trees: what
    `DeviceState.drafts_at` returns; None: there are no such requests."""
    runners_up: np.ndarray | None = None
    """[S, K * n] int64, see `steps.runners_up.pack`; None: not computed."""
    of_prompts: np.ndarray | None = None
    """[M, columns] int64, log-probabilities after `Row.reported` tokens of each chunk, see
    `steps.log_probs.unpack`; None: not computed."""

    @classmethod
    def unpack(
        cls,
        packed: np.ndarray,
        depths: int,
        ranked: bool = False,
        runners_up: int = 0,
        reported: int = 0,
    ) -> "StepResult":
        """Unpack the tensor of `pack_result`, for a step with K = `depths`; further columns are
        ignored.

        Args:
            ranked: whether the tensor has ranks, as in steps of trees with decode rows.
            runners_up: number of columns with runners-up of drafts, before those of `reported`.
            reported: number of columns with log-probabilities, the last ones.
        """
        end = packed.shape[1] - reported
        log_probs = packed[:, end:] if reported else None
        others = packed[:, end - runners_up : end] if runners_up else None
        ends = [1, 2 + depths, 2 + 2 * depths, 2 + (3 if ranked else 2) * depths]
        accepted, token_ids, drafts, ranks, _ = np.split(packed, ends, axis=1)
        place = np.arange(1 + depths)
        path = np.where(place <= accepted, place, -1)
        return cls(
            path,
            token_ids,
            drafts,
            ranks if ranks.shape[1] else None,
            log_probs,
            runners_up=others,
        )

    @property
    def accepted(self) -> np.ndarray:
        """[S] number of accepted drafts."""
        return (self.path >= 0).sum(1) - 1

    @property
    def num_tokens(self) -> np.ndarray:
        """[S] number of tokens that each row adds to its request: 1 + `accepted`, or fewer before a
        `NO_TOKEN`."""
        return ((self.path >= 0) & (self.token_ids != NO_TOKEN)).cumprod(1).sum(1)

    @property
    def bad_draft(self) -> np.ndarray:
        """[S] the first depth, from 1, at which the heads' logits are invalid; 0: none."""
        good = (self.drafts != NO_TOKEN).cumprod(1).sum(1)
        return np.where(good < self.drafts.shape[1], good + 1, 0)
