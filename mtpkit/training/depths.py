"""Losses and acceptance of all depths on a packed batch, compared with the frozen base.

Tensors are laid out by *target position*: entry j of depth k is the prediction of token t_{j+1} by
depth k of the drafts that start at i = j - k. It is compared with the base's prediction from h_j.
Example, K = 2, tokens A B C D E: entry j = 2 holds depth 1 started at i = 1, which read (h_1, C),
and depth 2 started at i = 0, which read (g^1_0, C); both predict D.

Shape legend: K depths, s sequence, b batch, h hidden size, n selected target positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import MtpkitError, listed
from mtpkit.model import gather_sequence, normed_states, output_weight, unroll_depths
from mtpkit.model.formats.weight import Weight
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.mtp import depth_forward
from mtpkit.training.cache import base_states
from mtpkit.training.config.settings import HeadAttention, LossConfig, MixKind
from mtpkit.training.loss import head_agreement, head_losses
from mtpkit.training.main_grad import training_forward

Decoding = Literal["greedy", "sampling", "draft_sampling"]
"""A way to make and verify drafts. `greedy`: the heads' best tokens against the base's best.
`sampling`: the heads' best tokens against tokens that the base samples at temperature 1, the
engine's default. `draft_sampling`: tokens sampled from the heads at temperature 1, verified by
rejection sampling (Leviathan et al. 2023, arXiv:2211.17192), the engine's `draft_sampling=True`."""
DECODINGS: tuple[Decoding, ...] = get_args(Decoding)
_FIRST_COUNT = 3
"""Row of `DepthSums.values` with the first count of steps."""


@dataclass(frozen=True)
class DepthSums:
    """Sums over the selected tokens of one or several batches, and the rates that follow from them.

    `values` is [3 + 2 D, K] fp64. Its rows are the losses; the numbers of selected tokens; the
    numbers of those that are not the base's greedy choice (`departures`); then, for each of the
    first D `DECODINGS`, the number of steps that reach the k-th draft (`reached`), and the number
    of those that accept it too (`accepted`). Steps begin where a decoder's do, see `walk_steps`;
    with sampling both are expected numbers.
    """

    values: Tensor

    @classmethod
    def zero(cls, num_depths: int, device: torch.device, num_decodings: int = 1) -> "DepthSums":
        """Sums over no tokens."""
        return cls(
            torch.zeros(
                _FIRST_COUNT + 2 * num_decodings, num_depths, dtype=torch.float64, device=device
            )
        )

    @property
    def num_decodings(self) -> int:
        """D, the number of decodings that were measured."""
        return (len(self.values) - _FIRST_COUNT) // 2

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
        return _ratios(self.values[0], self.values[1]).tolist()

    def departures(self) -> float:
        """Share of the tokens of depth 1 at which the text departs from the base's greedy
        choice."""
        return float(_ratios(self.values[2], self.values[1])[0])

    def counts(self, decoding: Decoding = "greedy") -> Tensor:
        """[2, K], the numbers of steps that reach the draft of each depth, and that accept it."""
        first = _FIRST_COUNT + 2 * DECODINGS.index(decoding)
        return self.values[first : first + 2]

    def steps(self, decoding: Decoding = "greedy") -> float:
        """Number of steps, each of which reaches its first draft."""
        return float(self.counts(decoding)[0, 0])

    def conditional_acceptance(self, decoding: Decoding = "greedy") -> list[float]:
        """For each depth, the acceptance rate of its draft where all earlier drafts are
        accepted."""
        reached, accepted = self.counts(decoding)
        return _ratios(accepted, reached).tolist()

    def acceptance_length(self, decoding: Decoding = "greedy") -> float:
        """AL = 1 + the mean number of accepted drafts per step."""
        reached, accepted = self.counts(decoding)
        return 1 + float(_ratios(accepted.sum(), reached[0]))

    def check_finite(self, where: str) -> None:
        """Refuse sums that are NaN or infinite; the host waits for the device.

        Raises:
            MtpkitError: a sum is not finite; names `where` and the result of `not_finite`.
        """
        if found := self.not_finite():
            raise MtpkitError(
                f"{where}: NaN or infinity in {found}; look for it in the weights of base and"
                " heads, or in cached hidden states; if training led there, lower optimizer.lr or"
                " set dtype=float32"
            )

    def not_finite(self) -> str:
        """Names of the sums that are NaN or infinite, such as `the loss of depth 1, 3`; empty if
        all are finite."""
        names = ["loss", "number of tokens", "number of departures"]
        names += [f"{name} acceptance" for name in DECODINGS for _ in range(2)]
        found: dict[str, set[int]] = {}
        for row, depth in (~self.values.isfinite()).nonzero().tolist():
            found.setdefault(names[row], set()).add(depth + 1)
        return "; ".join(
            f"the {name} of depth {listed(sorted(depths))}" for name, depths in found.items()
        )


def _ratios(above: Tensor, below: Tensor) -> Tensor:
    """Quotients; 0 / 0 is 0, and NaN and infinity stay."""
    return torch.where((above == 0) & (below == 0), above, above / below)


@dataclass(frozen=True)
class HiddenMix:
    """Mixes the base's hidden states into those that a depth hands to the next depth; the `mix` of
    `unroll_depths`.

    In decoding, depth k + 1 at i reads g^k_i in place of the base's h_{i+k}. A share of 0 trains on
    the same input, as HASS does (Zhang et al. 2024, arXiv:2408.15766). With a share of 1 every
    depth reads the base's states, as in EAGLE (Li et al. 2024, arXiv:2401.15077). Shares in between
    are scheduled sampling (Bengio et al. 2015, arXiv:1506.03099). No gradient flows to earlier
    depths through the base's states.
    """

    share: float
    kind: MixKind
    """`sample`: each position reads h_{i+k} with probability `share`, else g^k_i. `blend`: every
    position reads share * h_{i+k} + (1 - share) * g^k_i."""
    generators: Sequence[torch.Generator] = ()
    """For `sample`, one generator for each of the b sequences, on the device of the states."""
    part: tuple[int, int] = (0, 1)
    """Index of this sequence-parallel part, and the number of equal parts; each takes its share of
    the same draws."""

    def __call__(self, own: Tensor, base: Tensor) -> Tensor:
        """The mixture [s, b, h] of own and base [s, b, h]."""
        if self.kind == "blend":
            return own.lerp(base, self.share)
        number, parts = self.part
        assert len(self.generators) == own.shape[1], "one generator per sequence"
        draws = torch.stack(
            [torch.rand(len(own) * parts, generator=g, device=own.device) for g in self.generators],
            1,
        )
        # All parts draw for the whole sequence, so that the split changes nothing.
        return torch.where(draws.chunk(parts)[number][..., None] < self.share, base, own)


@dataclass(frozen=True)
class Selection:
    """The tokens that the depths learn to predict. Making it waits for the device, so make it
    before the base runs."""

    selected: Tensor
    """[K, s, b] bool: entry (k - 1, j) says whether depth k learns to predict t_{j+1}.

    Depth k does where a decoder drafts t_{j+1}. An answer is a run of tokens of one document that
    `loss_mask` selects. Drafts start where a token of the answer has just been chosen: depth k
    reads t_{j-k+1}, the first token that it reads besides the base's states, from the same answer.
    Example, K = 3, a prompt A B and the answer C D E: depth 1 learns D and E, depth 2 learns E,
    depth 3 nothing. The first token of a document without prompt counts as one."""
    rows: Tensor
    """[n] flat indices (into s * b) of the positions that at least one depth selects."""
    mask: Tensor
    """[K, n] bool: which of these positions each depth selects."""
    mask_on_host: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, num_depths: int) -> "Selection":
        """The selection for depths 1 .. num_depths."""
        answers = batch.loss_mask.t()
        documents = batch.documents.t()
        # The last position has no next token to learn, so that it stays False.
        selected = torch.zeros(num_depths, *answers.shape, dtype=torch.bool, device=answers.device)
        drafted = answers
        for depth in range(1, num_depths + 1):
            drafted = drafted[1:] & answers[:-depth]  # entry i: t_i .. t_{i+depth} are of an answer
            selected[depth - 1, depth:-1] = drafted[1:] & (
                documents[: -depth - 1] == documents[depth + 1 :]
            )
        rows = selected.any(dim=0).flatten().nonzero().squeeze(-1)
        mask = selected.flatten(1)[:, rows]
        return cls(selected, rows, mask, mask.cpu())

    def spread(self, values: Tensor) -> Tensor:
        """[K, s, b] with values [K, n] at the n positions and 0 elsewhere."""
        whole = values.new_zeros(len(self.selected), self.selected[0].numel())
        return whole.index_copy(1, self.rows, values).view_as(self.selected)

    def sums(self, losses: Tensor, follows: Tensor, counts: Tensor) -> DepthSums:
        """The sums from losses [K], `follows` [K, n] (whether the text's token is the base's
        choice), and counts [2 D, K]."""
        tokens = self.mask.sum(dim=1)
        departures = tokens - follows.sum(dim=1, dtype=torch.float64)
        rows = torch.stack([losses.double(), tokens.double(), departures.double()])
        return DepthSums(torch.cat([rows, counts.double()]))


def walk_steps(go_on: Tensor, rates: Tensor, selected: Tensor) -> Tensor:
    """Count the drafts that decoding would verify and accept along a text, from tensors [K, s, b].

    The draft of depth k made at i stands at target position i + k. A decoder's first step starts at
    i = a - 1, where t_a is the answer's first token; a step at i that goes on along the text past
    drafts 1 .. n is followed by a step at i + n + 1. A step at i reaches its k-th draft if it goes
    on past drafts 1 .. k - 1 and the answer has a token there, so that the last steps of an answer
    may be short. Starts are probabilities where `go_on` is one, and nothing is drawn.

    Example, K = 2, an answer t_3 .. t_7, greedy: the first step starts at i = 2. If its draft of
    t_4 is right and that of t_5 is wrong, the base supplies t_5 and the next step starts at i = 4,
    with drafts of t_6 and t_7. If both are right, the step after it would start at i = 7, where
    nothing is left to draft.

    Args:
        go_on: bool, or the probability that decoding continues along the text past its token,
            having reached depth k: the draft is accepted and is the text's token.
        rates: the probability that the draft of depth k is accepted, whichever token it is. Where a
            draft is accepted and the text has another token, the step ends and the next one begins
            at the text's token.
        selected: see `Selection.selected`.

    Returns:
        [2, K, s, b] fp64: the expected numbers of reached and of accepted drafts, at the place
        where the step starts.
    """
    depths, length, _ = selected.shape
    offered = torch.zeros(selected.shape, dtype=torch.float64, device=selected.device)
    chances = torch.zeros_like(offered)
    passes = torch.zeros_like(offered)
    for depth in range(1, min(depths, length - 1) + 1):
        place = depth - 1, slice(depth, None)
        offered[depth - 1, :-depth] = selected[place]
        chances[depth - 1, :-depth] = rates[place]
        passes[depth - 1, :-depth] = selected[place] * go_on[place].double()
    # Entry n: the probability that a step goes on past n drafts. It is followed by a step n + 1
    # tokens later.
    onward = torch.cat([torch.ones_like(passes[:1]), passes.cumprod(dim=0)])
    stops = onward * (1 - torch.cat([passes, torch.zeros_like(passes[:1])]))
    reached = step_starts(stops) * onward[:-1] * offered
    return torch.stack([reached, reached * chances])


def step_starts(stops: Tensor) -> Tensor:
    """[s, b], the probability that a step starts at each position.

    Where nothing is drafted, steps of one token lead on to the next answer, at whose first token a
    step always starts.

    Args:
        stops: [1 + K, s, b], the probability that a step that starts at i accepts n = 0 .. K
            drafts.
    """
    steps, length, batch = stops.shape
    # The state is the distribution of the distance to the next start, 0 .. K. If that is 0, it
    # becomes the number of accepted drafts at the next position, and otherwise one less.
    moves = torch.diag(stops.new_ones(steps - 1), 1).repeat(length, batch, 1, 1)
    moves[..., 0] = stops.permute(1, 2, 0)
    state = stops.new_zeros(batch, steps, 1)
    state[:, 0] = 1
    return torch.cat([state[None], _run_chain(moves[:-1], state)])[..., 0, 0]


def _run_chain(moves: Tensor, state: Tensor) -> Tensor:
    """[n, b, m, 1], the states of a Markov chain after each of its moves [n, b, m, m], in O(log n)
    operations."""
    if not len(moves):
        return state[None][:0]
    # Two moves at a time give the states at odd places; one more move each gives the others.
    pairs = moves[1::2] @ moves[:-1:2]
    states = moves.new_empty(*moves.shape[:-1], 1)
    states[1::2] = _run_chain(pairs, state)
    states[0] = moves[0] @ state
    states[2::2] = moves[2::2] @ states[1:-1:2]
    return states


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
    """Sum of each depth's loss over its selected tokens, [K] with its gradient, and the batch's
    sums.

    Parameters that an optimizer manages get their gradient in `main_grad`. Tensor-parallel ranks
    return the same losses and sums. Positions that no depth selects do not go through lm_head.

    Args:
        hidden: [s, b, h] (s / tp under sequence parallelism), the states that the base hands on;
            None: the base runs here.
        recompute: as in `unroll_depths`.
        selection: the batch's selection; None: it is made here.
    """
    selection = selection or Selection.of(batch, num_depths)
    compared = _unroll(model, batch, selection, attention, options, mix, hidden, recompute)
    losses, matches, follows = head_losses(*compared)
    right = selection.spread(matches)
    counts = walk_steps(right & selection.spread(follows), right, selection.selected).sum(
        dim=(2, 3)
    )
    return losses, selection.sums(losses.detach(), follows, counts)


@torch.no_grad()
def measure_depths(
    model: HybridModel,
    batch: PackedBatch,
    num_depths: int,
    attention: HeadAttention,
    options: LossConfig,
    hidden: Tensor | None = None,
) -> tuple[DepthSums, Tensor]:
    """Measure acceptance under all `DECODINGS`, without gradients.

    The heads read the text's tokens, not their own drafts. Greedy acceptance equals that of
    decoding on text that the base wrote greedily; acceptance under sampling equals that of decoding
    on text that the base sampled at temperature 1.

    Under greedy decoding the draft is accepted if it is the base's best token, and the step
    continues along the text if that is the text's token t too. Under sampling, a step continues
    past t if t is the draft. For sampled drafts it does so with probability min(1, q(t) / p(t)), so
    that it meets t and continues past it with probability min(p(t), q(t)).

    Returns:
        The sums of the batch; and counts [documents, 2 D], the steps and the accepted drafts of
        each document in which a step starts.
    """
    selection = Selection.of(batch, num_depths)
    losses, found = head_agreement(
        *_unroll(model, batch, selection, attention, options, hidden=hidden)
    )
    chances = {
        "greedy": (found.match * found.base_is_token, found.match),
        "sampling": (found.draft_is_token, found.draft_prob),
        "draft_sampling": (found.token_accept, found.overlap),
    }
    pairs = [tuple(map(selection.spread, chances[name])) for name in DECODINGS]
    steps = [walk_steps(go_on, rates, selection.selected) for go_on, rates in pairs]
    counts = torch.cat([each.sum(dim=(2, 3)) for each in steps])
    by_place = torch.stack(
        [part for reached, accepted in steps for part in (reached[0], accepted.sum(dim=0))]
    )
    return selection.sums(losses, found.base_is_token, counts), _by_document(
        by_place, batch.documents
    )


def _by_document(values: Tensor, documents: Tensor) -> Tensor:
    """[n, c], the sums of values [c, s, b] over each document [b, s], of those whose first sum is
    not 0."""
    rows, length = documents.shape
    # Documents are numbered per sequence: shifted numbers differ between sequences.
    names = documents + torch.arange(rows, device=documents.device)[:, None] * (1 + length)
    known, index = names.unique(return_inverse=True)
    sums = values.new_zeros(len(known), len(values)).index_add_(
        0, index.t().flatten(), values.flatten(1).t()
    )
    return sums[sums[:, 0] > 0]


def _unroll(
    model: HybridModel,
    batch: PackedBatch,
    selection: Selection,
    attention: HeadAttention,
    options: LossConfig,
    mix: HiddenMix | None = None,
    hidden: Tensor | None = None,
    recompute: bool = False,
) -> tuple[list[Tensor], Tensor, Weight, Tensor, Tensor, LossConfig, dist.ProcessGroup, Tensor]:
    """Run all depths over a batch, and the base if `hidden` is None; returns the arguments of
    `head_losses`."""
    assert attention != "auto", "the settings are not resolved"
    hidden = base_states(model, batch) if hidden is None else hidden
    batch_size = batch.token_ids.shape[0]
    rows = selection.rows
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
    weight = output_weight(model)
    group = model.pg_collection.tp
    return (
        students,
        teacher,
        weight,
        targets,
        selection.mask,
        options,
        group,
        selection.mask_on_host,
    )
