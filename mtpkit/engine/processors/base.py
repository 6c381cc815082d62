"""What a processor of logits is: who uses it, and what it keeps on the device of each request.

Shape legend: S rows that sample, N logits rows, D decode rows, K drafts, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtpkit.engine.params import SamplingParams
from mtpkit.engine.request import Request

Columns = Mapping[str, Tensor]
"""What processors keep on the device, by name, each [slots, ...]: a request's own at its slot."""


class Column(NamedTuple):
    """The form of one column."""

    shape: tuple[int, ...]
    """Behind the slots."""
    dtype: torch.dtype
    fill: float
    """What slots hold before any request has them. Null rows of CUDA graphs are sampled with it."""


class Processor:
    """One change of logits, or of the distribution that is made of them. `PROCESSORS` lists them in their order.

    A processor has no state of its own. Its columns belong to `DeviceState`, which alone calls `admit` and `count`.
    """

    name: str

    def columns(self, vocab_size: int) -> dict[str, Column]:
        """The columns that it reads."""
        raise NotImplementedError

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        """Whether it changes anything for a request with these parameters."""
        raise NotImplementedError

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        """What the columns of one number per request hold for these parameters."""
        raise NotImplementedError

    def admit(self, columns: Columns, slots: Tensor, requests: Sequence[Request]) -> None:
        """Write the other columns for `requests`, which have the `slots` [S]. A request that was preempted comes here
        again."""

    def count(self, columns: Columns, slots: Tensor, accepted: Tensor, token_ids: Tensor) -> None:
        """Take note of the tokens that a step adds to outputs, if it uses the processor.

        Args:
            slots: [S] int64; -1 of null rows.
            accepted, token_ids: [S] and [S, 1 + K] int64, see `Verdict`.
        """

    def apply(self, logits: Tensor, columns: Columns, slots: Tensor, drafts: Tensor) -> Tensor:
        """[N, V] changed logits, in steps that use the processor. Those that shape a distribution leave it to the
        sampling kernels.

        Args:
            logits: [N, V]; the first D * (1 + K) belong to the decode rows.
            slots: [N] int64; -1 of null rows.
            drafts: [D, K] int64, the drafts of the decode rows: each logit sees those before its position.
        """
        return logits
