"""Losses and acceptance of all depths on a packed batch, compared with the frozen base.

Tensors are laid out by *target position*: entry j of depth k is the prediction of token t_{j+1} by depth k of the
drafts that start at i = j - k. It is compared with the base's prediction from h_j. Example, K = 2, tokens A B C D E:
entry j = 2 holds depth 1 started at i = 1, which read (h_1, C), and depth 2 started at i = 0, which read (g^1_0, C);
both predict D.

Shape legend: K depths, s sequence, b batch, h hidden size, n selected target positions.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError, listed
from mtpkit.model import gather_sequence, normed_states, output_weight, unroll_depths
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.mtp import depth_forward
from mtpkit.training.cache import base_states
from mtpkit.training.config.settings import HeadAttention, LossConfig, MixKind
from mtpkit.training.loss import head_agreement, head_losses
from mtpkit.training.main_grad import training_forward

Decoding = Literal["greedy", "sampling", "draft_sampling"]
"""A way to make and verify drafts. `greedy`: the heads' best tokens against the base's best. `sampling`: the heads'
best tokens against tokens that the base samples at temperature 1, the engine's default. `draft_sampling`: tokens
sampled from the heads at temperature 1, verified by rejection sampling (Leviathan et al. 2023, arXiv:2211.17192), the
engine's `draft_sampling=True`."""
DECODINGS: tuple[Decoding, ...] = get_args(Decoding)


@dataclass(frozen=True)
class DepthSums:
    """Sums over the selected tokens of one or several batches, and the rates that follow from them.

    `values` is [2 + 2 D, K] fp64. Its rows are the losses; the numbers of selected tokens; then, for each of the first
    D `DECODINGS`, the number of positions whose drafts 1 .. k - 1 are accepted (`offered`), and the number of those
    whose k-th draft is accepted too (`accepted`). With sampling both are expected numbers.
    """

    values: Tensor

    @classmethod
    def zero(cls, num_depths: int, device: torch.device, num_decodings: int = 1) -> "DepthSums":
        """Sums over no tokens."""
        return cls(torch.zeros(2 + 2 * num_decodings, num_depths, dtype=torch.float64, device=device))

    @property
    def num_decodings(self) -> int:
        """D, the number of decodings that were measured."""
        return len(self.values) // 2 - 1

    def __add__(self, other: "DepthSums") -> "DepthSums":
        return DepthSums(self.values + other.values)

    def on_host(self) -> "DepthSums":
        """The sums in host memory; the host waits for the device once."""
        return DepthSums(self.values.cpu())

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> "DepthSums":
        """The sums over all ranks of `group`."""
        values = self.values.clone()
        dist.all_reduce(values, group=group)
        return DepthSums(values)

    def losses(self) -> list[float]:
        """Mean loss of each depth over its selected tokens."""
        return self._ratios(0, 1)

    def conditional_acceptance(self, decoding: Decoding = "greedy") -> list[float]:
        """For each depth, the acceptance rate of its draft where all earlier drafts are accepted."""
        offered = 2 + 2 * DECODINGS.index(decoding)
        return self._ratios(offered + 1, offered)

    def acceptance_length(self, decoding: Decoding = "greedy") -> float:
        """AL = 1 + the mean number of accepted drafts per step, with steps starting at every position."""
        return 1 + sum(itertools.accumulate(self.conditional_acceptance(decoding), operator.mul))

    def check_finite(self, where: str) -> None:
        """Refuse sums that are NaN or infinite; the host waits for the device.

        Raises:
            MtpkitError: a sum is not finite; names `where` and the result of `not_finite`.
        """
        if found := self.not_finite():
            raise MtpkitError(
                f"{where}: NaN or infinity in {found}; look for it in the weights of base and heads, or in cached "
                "hidden states; if training led there, lower optimizer.lr or set dtype=float32"
            )

    def not_finite(self) -> str:
        """Names of the sums that are NaN or infinite, such as `the loss of depth 1, 3`; empty if all are finite."""
        names = ["loss", "number of tokens", *(f"{name} acceptance" for name in DECODINGS for _ in range(2))]
        found: dict[str, set[int]] = {}
        for row, depth in (~self.values.isfinite()).nonzero().tolist():
            found.setdefault(names[row], set()).add(depth + 1)
        return "; ".join(f"the {name} of depth {listed(sorted(depths))}" for name, depths in found.items())

    def _ratios(self, numerator: int, denominator: int) -> list[float]:
        """Quotients of two rows; 0 / 0 is 0, and NaN and infinity stay."""
        above, below = self.values[numerator], self.values[denominator]
        return torch.where((above == 0) & (below == 0), above, above / below).tolist()


@dataclass(frozen=True)
class HiddenMix:
    """Mixes the base's hidden states into those that a depth hands to the next depth; the `mix` of `unroll_depths`.

    In decoding, depth k + 1 at i reads g^k_i in place of the base's h_{i+k}. A share of 0 trains on the same input, as
    HASS does (Zhang et al. 2024, arXiv:2408.15766). With a share of 1 every depth reads the base's states, as in EAGLE
    (Li et al. 2024, arXiv:2401.15077). Shares in between are scheduled sampling (Bengio et al. 2015, arXiv:1506.03099).
    No gradient flows to earlier depths through the base's states.
    """

    share: float
    kind: MixKind
    """`sample`: each position reads h_{i+k} with probability `share`, else g^k_i. `blend`: every position reads
    share * h_{i+k} + (1 - share) * g^k_i."""
    generators: Sequence[torch.Generator] = ()
    """For `sample`, one generator for each of the b sequences, on the device of the states."""
    part: tuple[int, int] = (0, 1)
    """Index of this sequence-parallel part, and the number of equal parts; each takes its share of the same draws."""

    def __call__(self, own: Tensor, base: Tensor) -> Tensor:
        """The mixture [s, b, h] of own and base [s, b, h]."""
        if self.kind == "blend":
            return own.lerp(base, self.share)
        number, parts = self.part
        assert len(self.generators) == own.shape[1], "one generator per sequence"
        draws = torch.stack([torch.rand(len(own) * parts, generator=g, device=own.device) for g in self.generators], 1)
        return torch.where(draws.chunk(parts)[number][..., None] < self.share, base, own)


@dataclass(frozen=True)
class Selection:
    """The tokens that the depths learn to predict. Making it waits for the device, so make it before the base runs."""

    selected: Tensor
    """[K, s, b] bool: entry (k - 1, j) says whether depth k learns to predict t_{j+1}.

    Depth k does if the batch's `loss_mask` selects that token, and all tokens that the depth has read, from t_{j-k} on,
    belong to the token's document."""
    rows: Tensor
    """[n] flat indices (into s * b) of the positions that at least one depth selects."""
    mask: Tensor
    """[K, n] bool: which of these positions each depth selects."""
    mask_on_host: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, num_depths: int) -> "Selection":
        """The selection for depths 1 .. num_depths."""
        loss_mask, documents = batch.loss_mask.t(), batch.documents.t()
        selected = torch.zeros(num_depths, *loss_mask.shape, dtype=torch.bool, device=loss_mask.device)
        for depth in range(1, num_depths + 1):
            selected[depth - 1, depth:-1] = loss_mask[depth + 1 :] & (documents[: -depth - 1] == documents[depth + 1 :])
        rows = selected.any(dim=0).flatten().nonzero().squeeze(-1)
        mask = selected.flatten(1)[:, rows]
        return cls(selected, rows, mask, mask.cpu())

    def spread(self, values: Tensor) -> Tensor:
        """[K, s, b] with values [K, n] at the n positions and 0 elsewhere."""
        whole = values.new_zeros(len(self.selected), self.selected[0].numel())
        return whole.index_copy(1, self.rows, values).view_as(self.selected)

    def sums(self, losses: Tensor, counts: Tensor) -> DepthSums:
        """The sums from losses [K] and counts [2 D, K]."""
        tokens = self.mask.sum(dim=1)
        return DepthSums(torch.cat([losses[None].double(), tokens[None].double(), counts.double()]))


def count_accepted(matches: Tensor, selected: Tensor, rates: Tensor | None = None) -> Tensor:
    """Offered and accepted drafts [2, K], as in `DepthSums`, from tensors [K, s, b].

    The draft of depth k made at i stands at target position i + k. It counts as offered if it is selected, and drafts 1
    .. k - 1 made at the same i are selected and accepted.

    If the text is sampled from p and `matches` are probabilities, these are the expected numbers under sampling: if a
    step continues past the text's token t with probability r(t), then it meets a token v and continues past it with
    probability p(v) r(v).

    Args:
        matches: bool, or the probability that the text's token, if the base samples it, is accepted from depth k.
        rates: the probability that the draft of depth k is accepted, whichever token it is; None: `matches`.
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
    options: LossConfig,
    mix: HiddenMix | None = None,
    hidden: Tensor | None = None,
    recompute: bool = False,
    selection: Selection | None = None,
) -> tuple[Tensor, DepthSums]:
    """Sum of each depth's loss over its selected tokens, [K] with its gradient, and the batch's sums.

    Parameters that an optimizer manages get their gradient in `main_grad`. Tensor-parallel ranks return the same losses
    and sums. Positions that no depth selects do not go through lm_head.

    Args:
        hidden: [s, b, h] (s / tp under sequence parallelism), the states that the base hands on; None: the base runs
            here.
        recompute: as in `unroll_depths`.
        selection: the batch's selection; None: it is made here.
    """
    selection = selection or Selection.of(batch, num_depths)
    compared = _unroll(model, batch, selection, attention, options, mix, hidden, recompute)
    losses, matches = head_losses(*compared)
    return losses, selection.sums(losses.detach(), count_accepted(selection.spread(matches), selection.selected))


@torch.no_grad()
def measure_depths(
    model: HybridModel,
    batch: PackedBatch,
    num_depths: int,
    attention: HeadAttention,
    options: LossConfig,
    hidden: Tensor | None = None,
) -> DepthSums:
    """The sums of a batch with acceptance under all `DECODINGS`, without gradients.

    The heads read the text's tokens (teacher forcing). Greedy acceptance equals that of decoding on text that the base
    wrote greedily; acceptance under sampling equals that of decoding on text that the base sampled at temperature 1. A
    step continues past the text's token t if t is the draft. For sampled drafts it does so with probability
    min(1, q(t) / p(t)), so that it meets t and continues past it with probability min(p(t), q(t)).

    All positions count the same. A decoder skips positions whose drafts are accepted, so that its acceptance is lower
    if acceptance comes in runs; `served_acceptance` counts only the positions where greedy decoding starts a step.
    """
    selection = Selection.of(batch, num_depths)
    losses, found = head_agreement(*_unroll(model, batch, selection, attention, options, hidden=hidden))
    chances = {
        "greedy": (found.match, found.match),
        "sampling": (found.draft_is_token, found.draft_prob),
        "draft_sampling": (found.token_accept, found.overlap),
    }
    pairs = [(selection.spread(go_on), selection.spread(rate)) for go_on, rate in map(chances.__getitem__, DECODINGS)]
    counts = [count_accepted(go_on, selection.selected, rate) for go_on, rate in pairs]
    return selection.sums(losses, torch.cat(counts))


def _unroll(
    model: HybridModel,
    batch: PackedBatch,
    selection: Selection,
    attention: HeadAttention,
    options: LossConfig,
    mix: HiddenMix | None = None,
    hidden: Tensor | None = None,
    recompute: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, LossConfig, dist.ProcessGroup, Tensor]:
    """Run all depths over a batch, and the base if `hidden` is None; returns the arguments of `head_losses`."""
    assert attention != "auto", "the settings are not resolved"
    hidden = base_states(model, batch) if hidden is None else hidden
    batch_size, rows = batch.token_ids.shape[0], selection.rows
    drafted = unroll_depths(
        model,
        hidden,
        batch.token_ids,
        len(selection.mask),
        attention,
        batch.documents,
        batch.positions,
        mix,
        recompute,
        training_forward if torch.is_grad_enabled() else depth_forward,
        document_lens=batch.document_lens,
    )
    students = [
        gather_sequence(model, states).flatten(0, 1)[(rows - depth * batch_size).clamp(min=0)]
        for depth, states in enumerate(drafted, start=1)
    ]
    teacher = normed_states(model, gather_sequence(model, hidden).flatten(0, 1)[rows])
    targets = batch.token_ids.t().flatten()[rows + batch_size]
    weight, group = output_weight(model), model.pg_collection.tp
    return students, teacher, weight, targets, selection.mask, options, group, selection.mask_on_host
