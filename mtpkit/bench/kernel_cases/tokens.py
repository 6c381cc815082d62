"""From tokens to a head's input, and from logits to tokens.

Shape legend: R rows (requests), T = 1 + K tokens a row, N = R * T tokens, h hidden size, V vocabulary.
"""

import torch
from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.kernels import acceptance, draft_head, norm, sampling


def mtp_input(shapes: Shapes) -> Case:
    """The input of a head's first linear."""
    config, count = shapes.config, shapes.rows * shapes.tokens
    hidden, vocab_size = config.hidden_size, config.vocab_size

    def more(args: Args) -> Args:
        # The embedding is one, of which a step reads few rows.
        weights = (args[2], shapes.normal(hidden), shapes.normal(hidden))
        return shapes.ints(vocab_size, count), shapes.normal(count, hidden), *weights, config.layernorm_epsilon

    return Case(
        norm.mtp_input,
        f"[{count}, {2 * hidden}]",
        lambda: more((None, None, shapes.normal(vocab_size, hidden))),
        lambda args: 4 * size(args[1]) + size(args[0], args[3], args[4]),
        more=more,
    )


def linear_argmax(shapes: Shapes) -> Case:
    """A draft of each row."""
    rows, hidden = shapes.rows, shapes.config.hidden_size
    vocab_size = shapes.draft_vocab_size or shapes.config.vocab_size

    def make() -> Args:
        token_ids = None if shapes.draft_vocab_size is None else torch.arange(vocab_size, device=shapes.device)
        return shapes.normal(rows, hidden), shapes.normal(vocab_size, hidden, std=hidden**-0.5), token_ids

    return Case(
        draft_head.linear_argmax,
        f"[{rows}, {hidden}] x [{vocab_size}, {hidden}]",
        make,
        lambda args: size(args[0], args[1]),
        flops=2.0 * rows * hidden * vocab_size,
        judge=lambda args, tokens: (args[0].float() * args[1][tokens].float()).sum(-1),
        tolerance=1e-2,
    )


def _logits(shapes: Shapes) -> Tensor:
    return shapes.normal(shapes.rows * shapes.tokens, shapes.config.vocab_size, std=3)


def _vocabulary(shapes: Shapes) -> str:
    return f"[{shapes.rows * shapes.tokens}, {shapes.config.vocab_size}]"


def argmax(shapes: Shapes) -> Case:
    """The base's greedy choices."""
    return Case(
        draft_head.argmax,
        _vocabulary(shapes),
        lambda: (_logits(shapes),),
        lambda args: size(args[0]),
        judge=lambda args, tokens: args[0].gather(-1, tokens[:, None]),
    )


def _filters(shapes: Shapes) -> tuple[Tensor, Tensor, Tensor, None]:
    """temperature, top_k, top_p and min_p of each logits row."""
    count = shapes.rows * shapes.tokens
    ones = torch.ones(count, device=shapes.device)
    return 0.8 * ones, shapes.full(min(50, shapes.config.vocab_size), count), 0.95 * ones, None


def penalties(shapes: Shapes) -> Case:
    """What penalties make of the logits, of rows that all have some."""
    rows, vocab_size = shapes.rows, shapes.config.vocab_size

    def make() -> Args:
        counts = (shapes.ints(64, rows, vocab_size) - 60).clamp_min(0).int()
        ones = torch.ones(rows, device=shapes.device)
        penalties = (shapes.ints(8, rows, vocab_size) == 0, counts, 1.2 * ones, 0.5 * ones, 0.3 * ones)
        slots = torch.arange(rows, device=shapes.device).repeat_interleave(shapes.tokens)
        return _logits(shapes), *penalties, slots, shapes.ints(vocab_size, rows, shapes.tokens - 1)

    return Case(sampling.apply_penalties, _vocabulary(shapes), make, lambda args: size(*args[:3]) + 4 * args[0].numel())


def uniform(shapes: Shapes) -> Case:
    """The random numbers of a step."""
    count = shapes.rows * shapes.tokens

    def make() -> Args:
        return shapes.ints(1 << 62, count), shapes.ints(1 << 20, count), 1

    return Case(sampling.uniform, f"[{count}]", make, lambda args: 1.5 * size(*args[:2]))


def sample(shapes: Shapes) -> Case:
    """Draws from distributions that are there, as a head's drafts are drawn."""
    rows, vocab_size = shapes.rows, shapes.config.vocab_size

    def make() -> Args:
        return shapes.normal(rows, vocab_size, std=3, dtype=torch.float32).softmax(-1), shapes.uniform(rows)

    # As with `sample_logits`.
    return Case(sampling.sample, f"[{rows}, {vocab_size}]", make, lambda args: size(args[0]), tolerance=0.02)


def probabilities(shapes: Shapes) -> Case:
    """The distributions that sampling draws from, where drafts were drawn too."""

    def count(args: Args) -> float:
        return size(args[0]) + 4 * args[0].numel()

    shape = f"{_vocabulary(shapes)}, top-k, top-p"
    return Case(sampling.probabilities, shape, lambda: (_logits(shapes), *_filters(shapes)), count)


def sample_logits(shapes: Shapes) -> Case:
    """The base's draws."""

    def make() -> Args:
        return _logits(shapes), *_filters(shapes), shapes.uniform(shapes.rows * shapes.tokens)

    # A number that falls on the edge between two tokens may fall on either side.
    shape = f"{_vocabulary(shapes)}, top-k, top-p"
    return Case(sampling.sample_logits, shape, make, lambda args: size(args[0]), tolerance=0.02)


def accept_matching(shapes: Shapes) -> Case:
    """Acceptance of drafts that are the base's own choice."""

    def make() -> Args:
        chosen = shapes.ints(3, shapes.rows, shapes.tokens)
        return shapes.ints(3, shapes.rows, shapes.k), chosen

    return Case(acceptance.accept_matching, shapes.step, make, lambda args: size(*args, args[1], args[1][:, 0]))


def accept_rejection(shapes: Shapes) -> Case:
    """Acceptance of drafts that were drawn."""
    rows, k, vocab_size = shapes.rows, shapes.k, shapes.config.vocab_size

    def make() -> Args:
        target = shapes.normal(rows, 1 + k, vocab_size, std=3, dtype=torch.float32).softmax(-1)
        drafted = (target[:, :-1].log() + shapes.normal(rows, k, vocab_size, dtype=torch.float32)).softmax(-1)
        tokens = torch.multinomial(drafted.flatten(0, 1), 1, generator=shapes.generator).view(rows, k)
        return tokens, drafted, target, shapes.uniform(rows, k), shapes.uniform(rows, 1 + k)

    def count(args: Args) -> float:
        # What must be read whole is p where a row stops, and q there, unless it stops behind its last draft.
        rejected = int((acceptance.accept_rejection(*args)[0] < k).sum())
        return size(args[2][:, 0]) + rejected * size(args[1][0, 0])

    return Case(acceptance.accept_rejection, f"{shapes.step}, V = {vocab_size}", make, count, tolerance=0.02)
