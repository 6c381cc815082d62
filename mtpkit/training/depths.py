"""One packed batch through the frozen base and all depths: which tokens count, the losses, the accepted drafts.

Everything here is laid out by *target position*: entry j of depth k is what depth k, started at i = j - k, says about
token t_{j+1}, beside what the base says about it from h_j. Example, K = 2, tokens A B C D E: entry j = 2 holds depth 1
started at i = 1, which read (h_1, C), and depth 2 started at i = 0, which read (g^1_0, C); both predict D, as h_2 does.

Shape legend: K depths, s sequence, b batch, h hidden size, n selected target positions.
"""

import itertools
import operator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from mtpkit.data import PackedBatch
from mtpkit.model import SequenceInput, base_forward, output_weight, unroll_depths
from mtpkit.training.config import HeadAttention
from mtpkit.training.loss import LossOptions, head_losses
from mtpkit.training.mixing import HiddenMix


@dataclass(frozen=True)
class DepthSums:
    """Sums over the selected tokens of one batch or of many, and what follows from them.

    `values` [4, K] fp64, rows: the losses; the selected tokens; the positions whose drafts 1 .. k - 1 the base accepts
    (`offered`); those of them whose k-th draft it accepts too (`accepted`).
    """

    values: Tensor

    @classmethod
    def zero(cls, num_depths: int, device: torch.device) -> "DepthSums":
        """Of nothing."""
        return cls(torch.zeros(4, num_depths, dtype=torch.float64, device=device))

    def __add__(self, other: "DepthSums") -> "DepthSums":
        return DepthSums(self.values + other.values)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> "DepthSums":
        """The sum over ranks."""
        values = self.values.clone()
        dist.all_reduce(values, group=group)
        return DepthSums(values)

    def losses(self) -> list[float]:
        """Mean loss of each depth over its selected tokens."""
        return self._ratios(0, 1)

    def conditional_acceptance(self) -> list[float]:
        """For each depth, the rate at which its draft is accepted where all earlier ones are."""
        return self._ratios(3, 2)

    def acceptance_length(self) -> float:
        """AL = 1 + the mean number of accepted drafts of a step that could start at any position."""
        return 1 + sum(itertools.accumulate(self.conditional_acceptance(), operator.mul))

    def _ratios(self, numerator: int, denominator: int) -> list[float]:
        return (self.values[numerator] / self.values[denominator].clamp(min=1)).tolist()


def select_targets(loss_mask: Tensor, documents: Tensor, num_depths: int) -> Tensor:
    """[K, s, b] bool: entry (k - 1, j) says whether depth k learns to predict t_{j+1}.

    It does when that token is selected by `loss_mask` [b, s] and everything the depth has read, from t_{j-k} on, is of
    the token's own document (`documents` [b, s]).
    """
    loss_mask, documents = loss_mask.t(), documents.t()
    selected = torch.zeros(num_depths, *loss_mask.shape, dtype=torch.bool, device=loss_mask.device)
    for depth in range(1, num_depths + 1):
        selected[depth - 1, depth:-1] = loss_mask[depth + 1 :] & (documents[: -depth - 1] == documents[depth + 1 :])
    return selected


def count_accepted(matches: Tensor, selected: Tensor) -> Tensor:
    """Offered and accepted drafts [2, K], as `DepthSums` has them, from matches and selected [K, s, b].

    Depth k's draft made at i stands at target position i + k. It counts when the drafts 1..k - 1 made at the same i are
    selected and accepted, and it is selected itself.
    """
    alive = torch.ones_like(selected[0])
    offered, accepted = [], []
    for depth in range(1, len(selected) + 1):
        alive = alive[:-1] & selected[depth - 1, depth:]
        offered.append(alive.sum())
        alive = alive & matches[depth - 1, depth:]
        accepted.append(alive.sum())
    return torch.stack([torch.stack(offered), torch.stack(accepted)])


def run_depths(
    model: HybridModel,
    batch: PackedBatch,
    num_depths: int,
    attention: HeadAttention,
    options: LossOptions,
    mix: HiddenMix | None = None,
) -> tuple[Tensor, DepthSums]:
    """Sum of each depth's loss over its selected tokens, [K] with its gradient, and the batch's sums.

    The base runs without gradients. Positions that no depth selects cost no lm_head; a depth that does not select
    a position that another does reads some finite row there, which its mask drops.
    """
    assert attention != "auto", "the settings are not resolved"
    inputs = SequenceInput(batch.documents, batch.positions)
    with torch.no_grad():
        hidden = base_forward(model, batch.token_ids, inputs)
    batch_size = batch.token_ids.shape[0]
    selected = select_targets(batch.loss_mask, batch.documents, num_depths)
    rows = selected.any(dim=0).flatten().nonzero().squeeze(-1)
    drafted = unroll_depths(
        model, hidden, batch.token_ids, num_depths, attention, batch.documents, batch.positions, mix
    )
    students = [
        states.flatten(0, 1)[(rows - depth * batch_size).clamp(min=0)] for depth, states in enumerate(drafted, start=1)
    ]
    losses, row_matches = head_losses(
        students,
        teacher=hidden.flatten(0, 1)[rows],
        weight=output_weight(model),
        targets=batch.token_ids.t().flatten()[rows + batch_size],
        mask=selected.flatten(1)[:, rows],
        options=options,
        group=model.pg_collection.tp,
    )
    matches = torch.zeros_like(selected.flatten(1)).index_copy(1, rows, row_matches).view_as(selected)
    tokens = selected.flatten(1).sum(dim=1)
    values = [losses.detach()[None], tokens[None], count_accepted(matches, selected)]
    return losses, DepthSums(torch.cat([value.double() for value in values]))
