"""One packed batch through the frozen base and all depths: which tokens count, the losses, the accepted drafts.

Everything here is laid out by *target position*: entry j of depth k is what depth k, started at i = j - k, says about
token t_{j+1}, beside what the base says about it from h_j. Example, K = 2, tokens A B C D E: entry j = 2 holds depth 1
started at i = 1, which read (h_1, C), and depth 2 started at i = 0, which read (g^1_0, C); both predict D, as h_2 does.

Shape legend: K depths, s sequence, b batch, h hidden size, n selected target positions.
"""

import itertools
import operator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.data import PackedBatch
from mtpkit.errors import MtpkitError, listed
from mtpkit.model import gather_sequence, mtp_forward, output_weight, unroll_depths
from mtpkit.model.hybrid import HybridModel
from mtpkit.training.cache import base_states
from mtpkit.training.config import HeadAttention
from mtpkit.training.loss import LossOptions, head_agreement, head_losses
from mtpkit.training.main_grad import training_forward
from mtpkit.training.mixing import HiddenMix

Decoding = Literal["greedy", "sampling", "draft_sampling"]
"""How drafts are made and verified. `greedy`: the heads' best tokens, against the base's. `sampling`: the heads' best
tokens, against tokens that the base samples at temperature 1; the engine's default, `draft_sampling=False`.
`draft_sampling`: tokens drawn from the heads at temperature 1, by rejection sampling (Leviathan et al. 2023,
arXiv:2211.17192); the engine's `draft_sampling=True`."""
DECODINGS: tuple[Decoding, ...] = get_args(Decoding)


@dataclass(frozen=True)
class DepthSums:
    """Sums over the selected tokens of one batch or of many, and what follows from them.

    `values` [2 + 2 D, K] fp64, rows: the losses; the selected tokens; then for each of the first D `DECODINGS` the
    positions whose drafts 1 .. k - 1 are accepted (`offered`), and those of them whose k-th draft is too (`accepted`).
    Of sampling both are expected numbers.
    """

    values: Tensor

    @classmethod
    def zero(cls, num_depths: int, device: torch.device, num_decodings: int = 1) -> "DepthSums":
        """Of nothing."""
        return cls(torch.zeros(2 + 2 * num_decodings, num_depths, dtype=torch.float64, device=device))

    @property
    def num_decodings(self) -> int:
        """D."""
        return len(self.values) // 2 - 1

    def __add__(self, other: "DepthSums") -> "DepthSums":
        return DepthSums(self.values + other.values)

    def on_host(self) -> "DepthSums":
        """The same; the host waits for them once."""
        return DepthSums(self.values.cpu())

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> "DepthSums":
        """The sum over ranks."""
        values = self.values.clone()
        dist.all_reduce(values, group=group)
        return DepthSums(values)

    def losses(self) -> list[float]:
        """Mean loss of each depth over its selected tokens."""
        return self._ratios(0, 1)

    def conditional_acceptance(self, decoding: Decoding = "greedy") -> list[float]:
        """For each depth, the rate at which its draft is accepted where all earlier ones are."""
        offered = 2 + 2 * DECODINGS.index(decoding)
        return self._ratios(offered + 1, offered)

    def acceptance_length(self, decoding: Decoding = "greedy") -> float:
        """AL = 1 + the mean number of accepted drafts of a step that could start at any position."""
        return 1 + sum(itertools.accumulate(self.conditional_acceptance(decoding), operator.mul))

    def check_finite(self, where: str) -> None:
        """Refuse sums that are not numbers; the host waits for them.

        Raises:
            MtpkitError: it names `where` and what `not_finite` finds.
        """
        if found := self.not_finite():
            raise MtpkitError(
                f"{where}: NaN or infinity in {found}; look for it in the weights of base and heads, or in cached "
                "hidden states; if training led there, lower optimizer.lr or set dtype=float32"
            )

    def not_finite(self) -> str:
        """Which sums are NaN or infinity, such as `the loss of depth 1, 3`; nothing where all are numbers."""
        names = ["loss", "number of tokens", *(f"{name} acceptance" for name in DECODINGS for _ in range(2))]
        found: dict[str, set[int]] = {}
        for row, depth in (~self.values.isfinite()).nonzero().tolist():
            found.setdefault(names[row], set()).add(depth + 1)
        return "; ".join(f"the {name} of depth {listed(sorted(depths))}" for name, depths in found.items())

    def _ratios(self, numerator: int, denominator: int) -> list[float]:
        """Quotients of two rows, where 0 of 0 is 0, and NaN and infinity stay what they are."""
        above, below = self.values[numerator], self.values[denominator]
        return torch.where((above == 0) & (below == 0), above, above / below).tolist()


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


@dataclass(frozen=True)
class Selection:
    """What the depths learn from a batch. To make it the host waits for the device: best before the base runs."""

    selected: Tensor
    """[K, s, b], see `select_targets`."""
    rows: Tensor
    """[n] indices, among s * b, of the positions that some depth selects."""
    mask: Tensor
    """[K, n] bool: which of them each depth does."""
    mask_on_host: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, num_depths: int) -> "Selection":
        """Of depths 1 .. num_depths."""
        selected = select_targets(batch.loss_mask, batch.documents, num_depths)
        rows = selected.any(dim=0).flatten().nonzero().squeeze(-1)
        mask = selected.flatten(1)[:, rows]
        return cls(selected, rows, mask, mask.cpu())


def count_accepted(matches: Tensor, selected: Tensor, rates: Tensor | None = None) -> Tensor:
    """Offered and accepted drafts [2, K], as `DepthSums` has them, all [K, s, b].

    Depth k's draft made at i stands at target position i + k. It counts when the drafts 1..k - 1 made at the same i are
    selected and accepted, and it is selected itself.

    Of a text that was drawn from p, the expected numbers under sampling come from probabilities: a step that goes on
    past the text's token t with probability r(t) is past any token v with p(v) r(v).

    Args:
        matches: bool, or the probability that a step whose base says the text's token accepts it as depth k's draft.
        rates: the probability that depth k's draft is accepted, whichever token it is; None: `matches`.
    """
    rates = matches if rates is None else rates
    alive = torch.ones_like(selected[0])
    offered, accepted = [], []
    for depth in range(1, len(selected) + 1):
        alive = alive[:-1] * selected[depth - 1, depth:]
        offered.append(alive.sum())
        accepted.append((alive * rates[depth - 1, depth:]).sum())
        alive = alive * matches[depth - 1, depth:]
    return torch.stack([torch.stack(offered), torch.stack(accepted)])


def run_depths(
    model: HybridModel,
    batch: PackedBatch,
    num_depths: int,
    attention: HeadAttention,
    options: LossOptions,
    mix: HiddenMix | None = None,
    hidden: Tensor | None = None,
    recompute: bool = False,
    selection: Selection | None = None,
) -> tuple[Tensor, DepthSums]:
    """Sum of each depth's loss over its selected tokens, [K] with its gradient, and the batch's sums.

    The gradient of parameters that an optimizer took over goes to their `main_grad`.

    `hidden` [s, b, h] (s / tp under sequence parallelism) are the base's hidden states; None: the base runs, without
    gradients. Tensor-parallel ranks come to the same losses and sums. Positions that no depth selects cost no lm_head;
    a depth that does not select a position that another does reads some finite row there, which its mask drops.
    `recompute` as in `unroll_depths`. `selection` is the batch's, None: made here.
    """
    compared = _unroll(model, batch, num_depths, attention, mix, hidden, recompute, selection)
    losses, matches = head_losses(*compared.inputs, options, *compared.more)
    counts = count_accepted(compared.spread(matches), compared.selection.selected)
    return losses, compared.sums(losses.detach(), counts)


@torch.no_grad()
def measure_depths(
    model: HybridModel,
    batch: PackedBatch,
    num_depths: int,
    attention: HeadAttention,
    options: LossOptions,
    hidden: Tensor | None = None,
) -> DepthSums:
    """The sums of a batch with acceptance under all `DECODINGS`, and no gradient.

    The heads read the text's tokens (teacher forcing). Greedy acceptance is that of decoding on text that the base
    wrote greedily, the others on text that it sampled at temperature 1. There a step goes on past the text's token t
    where it is the draft, or for drawn drafts with probability min(1, q(t) / p(t)), which makes min(p, q) in all. On
    other text they are about the places where the text goes on as the heads would.

    All positions count alike. A decoder starts fewer steps where drafts are accepted, having jumped ahead: its own
    count is lower where acceptance comes in runs. `served_acceptance` counts where greedy decoding starts.
    """
    compared = _unroll(model, batch, num_depths, attention, hidden=hidden)
    losses, found = head_agreement(*compared.inputs, options, *compared.more)
    chances = {
        "greedy": (found.match, found.match),
        "sampling": (found.draft_is_token, found.draft_prob),
        "draft_sampling": (found.token_accept, found.overlap),
    }
    pairs = [(compared.spread(go_on), compared.spread(rate)) for go_on, rate in map(chances.__getitem__, DECODINGS)]
    counts = [count_accepted(go_on, compared.selection.selected, rate) for go_on, rate in pairs]
    return compared.sums(losses, torch.cat(counts))


@dataclass(frozen=True)
class _Compared:
    """What base and depths make of the positions that some depth selects."""

    selection: Selection
    inputs: tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]
    """Students, teacher, weight, targets and mask of n tokens for `head_losses`."""
    more: tuple[dist.ProcessGroup, Tensor]
    """Its group and the mask on the host."""

    def spread(self, values: Tensor) -> Tensor:
        """[K, s, b] from what the n positions have, [K, n]; 0 elsewhere."""
        selected = self.selection.selected
        whole = values.new_zeros(len(selected), selected[0].numel())
        return whole.index_copy(1, self.selection.rows, values).view_as(selected)

    def sums(self, losses: Tensor, counts: Tensor) -> DepthSums:
        """Of losses [K] and counts [2 D, K]."""
        tokens = self.selection.selected.flatten(1).sum(dim=1)
        return DepthSums(torch.cat([losses[None].double(), tokens[None].double(), counts.double()]))


def _unroll(
    model: HybridModel,
    batch: PackedBatch,
    num_depths: int,
    attention: HeadAttention,
    mix: HiddenMix | None = None,
    hidden: Tensor | None = None,
    recompute: bool = False,
    selection: Selection | None = None,
) -> _Compared:
    """Run all depths over a batch, and the base if that was not done."""
    assert attention != "auto", "the settings are not resolved"
    selection = selection or Selection.of(batch, num_depths)
    hidden = base_states(model, batch) if hidden is None else hidden
    batch_size, rows = batch.token_ids.shape[0], selection.rows
    drafted = unroll_depths(
        model,
        hidden,
        batch.token_ids,
        num_depths,
        attention,
        batch.documents,
        batch.positions,
        mix,
        recompute,
        training_forward if torch.is_grad_enabled() else mtp_forward,
    )
    students = [
        gather_sequence(model, states).flatten(0, 1)[(rows - depth * batch_size).clamp(min=0)]
        for depth, states in enumerate(drafted, start=1)
    ]
    teacher = gather_sequence(model, hidden).flatten(0, 1)[rows]
    targets = batch.token_ids.t().flatten()[rows + batch_size]
    inputs = (students, teacher, output_weight(model), targets, selection.mask)
    return _Compared(selection, inputs, (model.pg_collection.tp, selection.mask_on_host))
