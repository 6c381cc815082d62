"""Drafters that draft trees with repeated or distinct heads; in steps with chains, they draft
chains.

Each draft that gets children is a separate row when a depth runs: recurrent layers continue from a
copy of its parent's state. Keys and values of the drafts lie one after another in the request's
blocks, and masks say which of them a draft sees.

Shape legend: T tokens of the step, R rows, S rows that sample, f drafts of a level that get
children, b children of each, v tokens of the vocabulary that this rank holds, h hidden size. p is a
row's newest accepted position: h_p is known and t_{p+1} was just chosen.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mtpkit.engine.drafting.distinct import DistinctDrafter, Window
from mtpkit.engine.drafting.growth import Growth, Level, Shape
from mtpkit.engine.drafting.protocol import MtpDrafter
from mtpkit.engine.drafting.repeated import RepeatedDrafter, shifted_token_ids
from mtpkit.engine.requests.tree import DynamicTree, Tree
from mtpkit.engine.steps import sampler
from mtpkit.engine.steps.plan import Batch, Drafts, Verdict, embeddable
from mtpkit.kernels.step_rows import kv_slots
from mtpkit.model import AttentionWindow, mtp_forward, normed_states
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.inputs import StepInput, TreeInput


class _Trees(MtpDrafter):
    """Base class: the drafting of trees that both kinds of heads share."""

    def __init__(
        self,
        model: HybridModel,
        num_speculative_tokens: int,
        block_size: int,
        sample: bool,
        draft_token_ids: Tensor | None,
        head_dtype: str | None,
        window: AttentionWindow | None,
        tree: Tree,
    ) -> None:
        super().__init__(
            model, num_speculative_tokens, block_size, sample, draft_token_ids, head_dtype, window
        )
        self.shape = Shape(tree, next(model.parameters()).device)

    def grow(
        self, growth: Growth, state: Tensor, batch: Batch, newest: Tensor, probs: list[Tensor]
    ) -> None:
        """Add the children of each draft of the newest level, or of the newest tokens, given the
        output of their depth.

        Args:
            state: [S f, 1, h].
            newest: [S] positions p.
            probs: list to which the [S, f, v] distributions are appended, if drafts are drawn.
        """
        count = len(newest)
        depth = growth.depth
        normed = normed_states(self.model, state[:, 0], depth)
        width = self.shape.widths[depth - 1]
        if self.sample:
            rows = torch.arange(len(state), device=newest.device) // (len(state) // count)
            weights = self.distributions(normed, batch, rows)
            probs.append(weights.unflatten(0, (count, -1)))
            nodes = self.shape.nodes[depth - 1].repeat(count, 1)  # [S f, b]
            tokens = self._draw(weights, batch, rows, newest[rows] + 1 + depth, nodes)
            log_probs = torch.zeros_like(tokens, dtype=torch.float32)
        else:
            top_tokens = batch.sampling.vocabulary.top_tokens
            tokens, log_probs = top_tokens(self.logits(normed), width, self.draft_token_ids)
        growth.add(*(part.unflatten(0, (count, -1)) for part in (tokens, log_probs)))

    @staticmethod
    def _draw(
        weights: Tensor, batch: Batch, rows: Tensor, positions: Tensor, nodes: Tensor
    ) -> Tensor:
        """[n, b] children of n tokens, drawn from weights [n, v] without replacement; each token of
        the tree has its own random number."""
        vocabulary = batch.sampling.vocabulary
        drawn = list[Tensor]()
        for place in range(nodes.shape[1]):
            # Keyed by the place in the tree, so that siblings and cousins at one position are drawn
            # independently.
            numbers = sampler.uniforms(
                batch.sampling, rows, positions, sampler.DRAFT_STREAM, nodes[:, place]
            )
            token = vocabulary.sample(weights, numbers)
            # Where nothing is left to draw from, token 0 stands for none: its weight is 0, so that
            # it is not accepted.
            drawn.append(token if place == 0 else embeddable(token))
            weights = vocabulary.without(weights, embeddable(token))
        return torch.stack(drawn, 1)

    def feed(
        self, depth: int, hidden: Tensor, level: Level, before: StepInput, starts: Tensor
    ) -> tuple[Tensor, StepInput]:
        """Run a depth on the drafts of a level.

        Args:
            hidden: [S f', 1, h] output of the depth before for the parents, which are the level
                before or the newest tokens.
            before: inputs of the parents' rows.
            starts: [S] position of the drafts of level 1 in the depth's cache. Drafts at negative
                positions, before the request begins, are left out.

        Returns:
            The output of the depth [S f, 1, h], and the inputs of the drafts' rows after it.
        """
        count, width = level.tokens.shape
        rows = (
            torch.arange(count, device=starts.device)[:, None] * (len(hidden) // count)
            + level.above
        )
        inputs = before.branched(rows.flatten())

        # Siblings share a position but not an entry of the cache: entries lie one after another.
        each = torch.arange(count * width, device=starts.device)
        owner = each // width
        first = starts[owner].clamp_min(0)
        positions = starts[owner] + level.depth - 1
        entries = first + level.offset + each % width
        slots = kv_slots(inputs.block_tables, each, entries, self.block_size)
        # Windows of distinct heads may begin before position 0; such rows touch no cache.
        exists = positions >= 0
        positions = positions.clamp_min(0)
        fed = replace(
            inputs,
            positions=positions,
            context_lens=positions,
            kv_slots=torch.where(exists, slots, -1),
            state_slots=torch.where(exists, inputs.state_slots, -1),
            tree=TreeInput(
                level.masks_from(starts).flatten()[:, None], first, None, level.offset + width - 1
            ),
        )
        out = mtp_forward(
            self.model, depth, hidden[rows.flatten()], embeddable(level.tokens).flatten()[None], fed
        )
        return out, replace(
            inputs, context_lens=positions, committed=inputs.committed.fed(1, exists.long())
        )

    def finished(self, growth: Growth, probs: list[Tensor], batch: Batch) -> Drafts:
        """Return the drafts of a tree that has grown; none in a step in which no row samples."""
        if not batch.shape.sampling_rows:
            none = batch.token_ids.new_zeros(0, self.shape.tree.tokens)
            parents = none if isinstance(self.shape.tree, DynamicTree) else None
            return Drafts(none[:, 1:], None, parents, none[:, : self.num_speculative_tokens])
        token_ids, parents = growth.drafts()
        return Drafts(token_ids, torch.cat(probs, 1) if probs else None, parents, growth.best())


class RepeatedTreeDrafter(_Trees, RepeatedDrafter):
    """`RepeatedDrafter` with trees. The cache entries of drafts begin at position p + 1."""

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        if not batch.shape.trees:
            return super().draft(hidden, batch, verdict)
        batch = self.windowed(batch)
        flat, newest = batch.newest(verdict.accepted)
        growth = self.shape.start()
        probs = list[Tensor]()
        state = mtp_forward(
            self.model, 1, hidden, shifted_token_ids(batch, verdict)[None], batch.inputs, keep=flat
        )
        if len(flat):
            self.grow(growth, state, batch, newest, probs)
            inputs = batch.inputs.continued(verdict.accepted[: len(flat)])
            for depth in range(2, self.num_speculative_tokens + 1):
                state, inputs = self.feed(depth, state, growth.levels[-1], inputs, newest + 1)
                self.grow(growth, state, batch, newest, probs)
        return self.finished(growth, probs, batch)


class DistinctTreeDrafter(_Trees, DistinctDrafter):
    """`DistinctDrafter` with trees.

    Depth k runs over the window as for a chain, and its entries up to position p - k + 1 are made
    from known tokens. Later entries depend on drafts: the entry of a draft at level m is at
    position p - k + 1 + m, and is made from the output of depth k - 1 for the draft's parent. Depth
    k therefore also runs on the levels 1 .. k - 1.
    """

    def draft(self, hidden: Tensor, batch: Batch, verdict: Verdict) -> Drafts:
        if not batch.shape.trees:
            return super().draft(hidden, batch, verdict)
        batch = self.windowed(batch)
        window = Window(batch, verdict, hidden, self.num_speculative_tokens, self.block_size)
        count = batch.shape.sampling_rows
        state = window.hidden
        newest = window.newest[:count]
        flat = window.flat_newest[:count]
        growth = self.shape.start()
        probs = list[Tensor]()
        handed_on: list[Tensor] = []
        for depth in range(1, self.num_speculative_tokens + 1):
            known = state
            last = depth == self.num_speculative_tokens
            # The last depth drafts from the levels that are fed below, not from the window.
            keep = flat[:0] if last and depth > 1 else None
            state = mtp_forward(
                self.model, depth, state, window.token_ids(depth)[None], window.inputs, keep=keep
            )
            if depth == 1 and count:
                self.grow(growth, state[flat], batch, newest, probs)
            if depth == 1 or not count:
                continue

            starts = newest - depth + 2
            inputs = self._known(window, count, starts)
            # Level m reads what the depth before made of level m - 1; level 1 follows the window.
            sources = [known[(flat - depth + 2).clamp_min(0)], *handed_on]
            handed_on = []
            for source, level in zip(sources, growth.levels, strict=True):
                out, inputs = self.feed(depth, source, level, inputs, starts)
                handed_on.append(out)
            self.grow(growth, handed_on[-1], batch, newest, probs)
        return self.finished(growth, probs, batch)

    def _known(self, window: Window, count: int, starts: Tensor) -> StepInput:
        """The window's first rows, with states that end before the positions `starts` [S]."""
        inputs = window.inputs
        rows = torch.arange(count, device=starts.device)
        new = (starts - inputs.context_lens[:count]).clamp_min(0)
        committed = inputs.committed.at(slice(count)).fed(inputs.decode_width, new)
        return inputs.branched(rows, committed)
