"""The interface of logits processors, see `mtpkit.engine.steps.processors`.

Shape legend: S rows that sample, N logits rows, D decode rows, K drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.request import Request
from mtpkit.engine.steps.vocabulary import Vocabulary
from mtpkit.model.inputs import TreeInput

Columns = Mapping[str, Tensor]
"""Column name -> [slots, ...] tensor on the device; the entry at a request's slot belongs to that
request."""

Use = frozenset[str]
"""Names of the processors that at least one of a set of requests uses; a step may skip all other
processors. `LOG_PROBS` stands among them."""

GRAMMAR = "grammar"
"""Name of the processor that applies constraints."""

LOG_PROBS = "log_probs"
"""Name in `Use` of a step that reports log-probabilities, which change nothing."""


NO_DRAFTS = "no_drafts"
"""Name in `Use` of a step with decode rows whose drafts are rejected whatever they are, and of the
column that says which rows these are."""


class Column(NamedTuple):
    """Shape, dtype and initial value of one column."""

    shape: tuple[int, ...]
    """Without the leading dimension of slots."""
    dtype: torch.dtype
    fill: float
    """Initial value of all slots. Null rows of CUDA graphs are sampled with it."""


@dataclass(frozen=True)
class Seen:
    """What the logits of a step follow, besides the committed tokens."""

    drafts: Tensor
    """[D, K] int64, the drafts of the decode rows: each logit sees the drafts before its
    position."""
    vocabulary: Vocabulary
    positions: Callable[[], Tensor]
    """Returns [N] int64, the positions of the tokens that the logits choose. A function: only few
    processors need it."""
    tree: TreeInput | None = None
    """The shape of the drafts, for trees; see `TreeInput`."""

    @cached_property
    def placed(self) -> Tensor:
        """[D, K] int64, `drafts` by their columns in the logits; -1 for tokens that another rank
        holds."""
        return self.vocabulary.place(self.drafts)

    @property
    def ancestors(self) -> Tensor | None:
        """[D, 1 + K] int64, for trees: the drafts that each logit sees, see `apply_penalties`."""
        return None if self.tree is None else self.tree.ancestors


@dataclass(frozen=True)
class Chosen:
    """The tokens that a step adds to the outputs of S rows."""

    accepted: Tensor
    """[S] int64, see `Verdict`."""
    token_ids: Tensor
    """[S, 1 + K] int64, see `Verdict`."""
    placed: Tensor
    """[S, 1 + K] int64, their columns in the logits; -1 for tokens that another rank holds."""


class Processor:
    """A change of the logits, or of the distribution computed from them.

    A processor has no state of its own. `DeviceState` owns its columns and is the only caller of
    `admit` and `count`.

    Requests that use a processor share steps with requests that do not, in slots that others had:
    the columns of the latter must say that nothing changes. `numbers` is called for every request,
    so one number may switch large columns off, as it does in `Penalties`.
    """

    name: str

    def columns(self, vocabulary: Vocabulary, masks: int) -> dict[str, Column]:
        """The columns that the processor reads.

        Args:
            vocabulary: this rank's part of it.
            masks: most tokens of a decode row, after each of which a mask says what may follow,
                see `mtpkit.engine.steps.constrained`.
        """
        raise NotImplementedError

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        """Whether the processor changes anything for a request with these parameters."""
        raise NotImplementedError

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        """Values of the columns that hold one number per request, for these parameters; with values
        that change nothing if the request does not use the processor."""
        raise NotImplementedError

    def admit(
        self, columns: Columns, slots: Tensor, requests: Sequence[Request], vocabulary: Vocabulary
    ) -> None:
        """Write the columns that `numbers` does not give, for `requests` at `slots` [S]. Called
        again when a preempted request is resumed."""

    def count(self, columns: Columns, slots: Tensor, chosen: Chosen) -> None:
        """Count the tokens that a step adds to the outputs. Called in steps that use the processor.

        Args:
            slots: [S] int64; -1 for null rows.
        """

    def apply(self, logits: Tensor, columns: Columns, slots: Tensor, seen: Seen) -> Tensor:
        """[N, V] changed logits, at least one of them finite in each row. Called in steps that use
        the processor; `Shaping` leaves the change to the kernels.

        Args:
            logits: [N, V]; the first D * (1 + K) belong to the decode rows.
            slots: [N] int64; -1 for null rows.
        """
        return logits
