"""The ops of a decode, a prefill or a training step, with inputs as a model's layers give them.

A step feeds T tokens of each row to the base, and again to the first depth of the heads, whose
layers have the base's sizes, so one case stands for both. The deeper depths take one token per row,
as a step with K = 0 does.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens, h hidden size, V
vocabulary.
"""

from collections.abc import Iterable, Iterator
from typing import get_args

from benchmarks.kernels.case import Case, Shapes
from benchmarks.kernels.cases import linears, quantized, ranks, tokens, training
from benchmarks.kernels.cases.kinds import CASES, KindCases
from mtpkit.kernels.head_loss import LossKind
from mtpkit.model.kinds.base import LayerKind

_PREFILL_ROWS = 16
_TRAINING_LENGTH = 8
"""Length of a training sequence, as a multiple of a prompt's length."""


def _of(kinds: Iterable[LayerKind]) -> list[KindCases]:
    return [CASES[kind.letter] for kind in kinds if kind.letter in CASES]


def decode_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step of `rows` decoding requests."""
    kinds = shapes.step_kinds
    for cases in _of(kind for kind in kinds if kind.keeps_past):
        yield from cases.decode(shapes)
    yield from (tokens.decode_rows(shapes), tokens.store_rows(shapes))
    if shapes.recurrent_kinds:
        yield tokens.ring_lens_after(shapes)
    yield linears.rms_norm(shapes)
    for cases in _of(kind for kind in kinds if not kind.keeps_past):
        yield from cases.decode(shapes)
    if shapes.config.mtp.num_depths:
        yield from (
            tokens.mtp_input(shapes),
            tokens.linear_argmax(shapes),
            tokens.linear_best(shapes),
        )
    yield from tokens.sampling_cases(shapes)
    if shapes.k:
        yield from (
            tokens.accept_matching(shapes),
            tokens.accept_tree(shapes),
            tokens.accept_rejection(shapes),
        )
    yield from (linears.linear_case(shapes, call) for call in linears.calls(shapes))
    yield from quantized.linears(shapes, linears.calls(shapes))
    yield from (ranks.embedding(shapes), *ranks.exchanges(shapes))


def prefill_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of a step of 16 prompts of `context_len` tokens, whatever `rows` is."""
    lens = (shapes.context_len,) * _PREFILL_ROWS
    for cases in _of(shapes.kinds):
        yield from cases.prefill(shapes, lens)


def training_cases(shapes: Shapes) -> Iterator[Case]:
    """The ops of training heads of K depths on one sequence of 8 x `context_len` tokens, whatever
    `rows` is."""
    length = _TRAINING_LENGTH * shapes.context_len
    for cases in _of(shapes.kinds):
        yield from cases.base(shapes, length)
    if shapes.k:
        for cases in _of(shapes.kinds):
            yield from cases.heads(shapes, length)
        yield from (training.losses(shapes, length, kind) for kind in get_args(LossKind))
        yield training.update(shapes)
    if shapes.config.hidden_size % 16 == 0:  # matrices of other sizes stay in bf16
        yield training.quantize_rows(shapes, length)
