"""Ops from tokens to a head's input, and from logits to tokens.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens, h hidden size, V
vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.kernels.case import BLOCK_SIZE, Args, Case, Shapes, size
from mtpkit.kernels import acceptance, draft_head, norm, sampling, step_rows
from mtpkit.kernels.ring import ring_capacity, ring_length
from tests.kernels.inputs import block_tables, matrix


def decode_rows(shapes: Shapes) -> Case:
    """Tokens and places of a step's decode rows."""
    rows = shapes.rows
    width = shapes.tokens
    blocks = shapes.context_len // BLOCK_SIZE + 1 + shapes.tokens

    def make() -> Args:
        slots = shapes.permutation(rows)
        tables = block_tables(shapes.permutation(rows * blocks), [blocks] * rows)
        lens = shapes.full(shapes.context_len, rows)
        fed = shapes.ints(100, rows, width)
        return slots, None, lens, fed, (shapes.ints(100, rows),), tables, width, BLOCK_SIZE

    return Case(
        step_rows.decode_rows,
        shapes.step,
        make,
        lambda args: 8 * rows * (7 * width + 3),
        judge=_joined,
    )


def store_rows(shapes: Shapes) -> Case:
    """Storing what the next step needs of a step's rows."""
    rows = shapes.rows
    k = shapes.k

    def make() -> Args:
        counts = shapes.full(0, rows), shapes.ints(100, rows, 1 + k)
        lens = (
            shapes.full(shapes.context_len, rows),
            shapes.ints(1 + k, rows),
            shapes.ints(1 + k, rows),
        )
        return (
            shapes.permutation(rows),
            *counts,
            *lens,
            shapes.ints(100, rows, 1 + k),
            shapes.ints(100, rows, k),
        )

    def written(args: Args, _: None) -> Tensor:
        return torch.cat([args[1], args[2].flatten()])

    return Case(
        step_rows.store_rows, shapes.step, make, lambda args: 8 * rows * (2 * k + 8), judge=written
    )


def ring_lens_after(shapes: Shapes) -> Case:
    """Number of inputs that rings hold after a step."""
    rows = shapes.rows
    length = ring_length(shapes.tokens)

    def make() -> Args:
        new = shapes.ints(shapes.tokens, rows) + 1
        return shapes.ints(ring_capacity(length) + 1, rows), new, shapes.tokens, length

    return Case(step_rows.ring_lens_after, shapes.step, make, lambda args: 24 * rows)


def _joined(_: Args, found: step_rows.DecodeRows) -> Tensor:
    *parts, counts = found
    return torch.cat([*parts, *counts])


def mtp_input(shapes: Shapes) -> Case:
    """The input of a head's first linear."""
    config = shapes.config
    count = shapes.count
    hidden = config.hidden_size
    vocab_size = config.vocab_size

    def more(args: Args) -> Args:
        # All inputs share one embedding, of which a step reads few rows.
        weights = (args[2], shapes.normal(hidden), shapes.normal(hidden))
        rest = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        return shapes.ints(vocab_size, count), shapes.normal(count, hidden), *weights, *rest

    return Case(
        norm.mtp_input,
        f"[{count}, {2 * hidden}]",
        lambda: more((None, None, shapes.normal(vocab_size, hidden))),
        lambda args: 4 * size(args[1]) + size(args[0], args[3], args[4]),
        more=more,
    )


def linear_argmax(shapes: Shapes) -> Case:
    """Drafting one token per row."""
    rows = shapes.rows
    hidden = shapes.config.hidden_size
    vocab_size = shapes.draft_vocab_size or shapes.config.vocab_size

    def make() -> Args:
        token_ids = (
            None
            if shapes.draft_vocab_size is None
            else torch.arange(vocab_size, device=shapes.device)
        )
        return (
            shapes.normal(rows, hidden),
            matrix(shapes.normal, vocab_size, hidden),
            token_ids,
        )

    return Case(
        draft_head.linear_argmax,
        f"[{rows}, {hidden}] x [{vocab_size}, {hidden}]",
        make,
        lambda args: size(args[0], args[1]),
        flops=2.0 * rows * hidden * vocab_size,
        judge=lambda args, tokens: (args[0].float() * args[1][tokens].float()).sum(-1),
        tolerance=1e-2,
    )


def linear_best(shapes: Shapes) -> Case:
    """The best token and logit of a rank's part of the vocabulary, for exchange; here the part is
    the whole."""
    case = linear_argmax(shapes)
    return replace(case, call=draft_head.linear_best, judge=lambda _, found: found[0])


def sampling_cases(shapes: Shapes) -> Iterator[Case]:
    """Ops from the logits of a step to tokens: greedy choices, distributions and draws, and
    penalties."""
    rows = shapes.rows
    count = shapes.count
    vocab_size = shapes.config.vocab_size
    device = shapes.device
    shape = f"[{count}, {vocab_size}]"

    def logits() -> Tensor:
        return shapes.normal(count, vocab_size, std=3)

    def filtered() -> Args:
        """Logits, and temperature, top_k, top_p and min_p of each row."""
        ones = torch.ones(count, device=device)
        return logits(), 0.8 * ones, shapes.full(min(50, vocab_size), count), 0.95 * ones, None

    def penalised() -> Args:
        """Logits of rows that all have penalties."""
        counts = (shapes.ints(64, rows, vocab_size) - 60).clamp_min(0).int()
        ones = torch.ones(rows, device=device)
        penalties = (
            shapes.ints(8, rows, vocab_size) == 0,
            counts,
            1.2 * ones,
            0.5 * ones,
            0.3 * ones,
        )
        slots = torch.arange(rows, device=device).repeat_interleave(shapes.tokens)
        return logits(), *penalties, slots, shapes.ints(vocab_size, rows, shapes.tokens - 1)

    def drawn() -> Args:
        """Distributions to draw drafts from, and random numbers."""
        return shapes.normal(rows, vocab_size, std=3, dtype=torch.float32).softmax(
            -1
        ), shapes.uniform(rows)

    yield Case(
        draft_head.argmax,
        shape,
        lambda: (logits(),),
        lambda args: size(args[0]),
        judge=lambda args, tokens: args[0].gather(-1, tokens[:, None]),
    )
    yield Case(
        draft_head.best,
        shape,
        lambda: (logits(),),
        lambda args: size(args[0]),
        judge=lambda _, found: found[0],
    )
    yield Case(
        draft_head.top_tokens,
        f"{shape}, 4 best",
        lambda: (logits(), min(4, vocab_size)),
        lambda args: size(args[0]),
        judge=lambda _, found: found[1],
        tolerance=1e-3,
    )
    filters = f"{shape}, top-k, top-p"
    yield Case(
        sampling.probabilities, filters, filtered, lambda args: size(args[0]) + 4 * args[0].numel()
    )
    # A random number on the boundary between two tokens may fall on either side, hence the
    # tolerance of draws.
    yield Case(
        sampling.sample_logits,
        filters,
        lambda: (*filtered(), shapes.uniform(count)),
        lambda args: size(args[0]),
        tolerance=0.02,
    )
    yield Case(
        sampling.apply_penalties,
        shape,
        penalised,
        lambda args: size(*args[:3]) + 4 * args[0].numel(),
    )
    yield Case(
        sampling.uniform,
        f"[{count}]",
        lambda: (shapes.ints(1 << 62, count), shapes.ints(1 << 20, count), 1),
        lambda args: 1.5 * size(*args[:2]),
    )
    yield Case(
        sampling.sample,
        f"[{rows}, {vocab_size}]",
        drawn,
        lambda args: size(args[0]),
        tolerance=0.02,
    )


def accept_matching(shapes: Shapes) -> Case:
    """Acceptance of drafts that are the base's own choice."""

    def make() -> Args:
        chosen = shapes.ints(3, shapes.rows, shapes.tokens)
        return shapes.ints(3, shapes.rows, shapes.k), chosen

    return Case(
        acceptance.accept_matching,
        shapes.step,
        make,
        lambda args: size(*args, args[1], args[1][:, 0]),
    )


def accept_tree(shapes: Shapes) -> Case:
    """The same for drafts that form a tree: here two first tokens, with one chain after each."""

    def make() -> Args:
        parents = (
            (torch.arange(shapes.tokens, device=shapes.device) - 2)
            .clamp_min(0)
            .expand(shapes.rows, -1)
        )
        tokens, chosen = (shapes.ints(3, shapes.rows, shapes.tokens) for _ in range(2))
        return tokens, parents.contiguous(), chosen, shapes.k

    return Case(
        acceptance.accept_tree, shapes.step, make, lambda args: size(*args[:3], args[0], args[1])
    )


def accept_rejection(shapes: Shapes) -> Case:
    """Acceptance of drafts that were sampled."""
    rows = shapes.rows
    k = shapes.k
    vocab_size = shapes.config.vocab_size

    def make() -> Args:
        target = shapes.normal(rows, 1 + k, vocab_size, std=3, dtype=torch.float32).softmax(-1)
        drafted = (
            target[:, :-1].log() + shapes.normal(rows, k, vocab_size, dtype=torch.float32)
        ).softmax(-1)
        tokens = torch.multinomial(drafted.flatten(0, 1), 1, generator=shapes.generator).view(
            rows, k
        )
        return tokens, drafted, target, shapes.uniform(rows, k), shapes.uniform(rows, 1 + k)

    def count(args: Args) -> float:
        # Only where a row stops must p be read whole, and q too, unless the row stops after its
        # last draft.
        rejected = int((acceptance.accept_rejection(*args)[0] < k).sum())
        return size(args[2][:, 0]) + rejected * size(args[1][0, 0])

    return Case(
        acceptance.accept_rejection, f"{shapes.step}, V = {vocab_size}", make, count, tolerance=0.02
    )
