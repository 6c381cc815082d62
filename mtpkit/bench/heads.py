"""What heads of different layers, formats and vocabularies cost a base, computed from bytes and
FLOPs: nothing is measured, and no head is trained."""

import itertools
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from mtpkit.bench.report import Column, Result, significant
from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import HeadsConfig, PublishedFormat, depth_rates
from mtpkit.bench.shapes import drawn_weights, get_config, held_weights, with_pattern
from mtpkit.config import ModelConfig
from mtpkit.config.parts import options_of
from mtpkit.engine.loading import KV_DTYPES
from mtpkit.errors import UserError
from mtpkit.model.flops import eh_proj_matrix
from mtpkit.model.kinds import KINDS
from mtpkit.model.kinds.base import Matrices

_WIDTH = "ffn_hidden_size"
"""Setting of the width of dense FFNs."""


@dataclass(frozen=True)
class HeadRow:
    """One head at one batch size."""

    pattern: Annotated[str, Column("head", key=True)]
    format: Annotated[str, Column("format", key=True)]
    """Format of its layers; their dtype if they are not quantised."""
    draft_vocab_size: Annotated[int, Column("draft tokens", ",", key=True)]
    """Tokens that drafts are chosen among."""
    attention_window: Annotated[int, Column("window", ",", key=True)]
    """Positions that its attention sees; 0: the whole context."""
    batch_size: Annotated[int, Column("batch", key=True)]
    parameters: Annotated[
        float, Column("M parameters", lambda row: significant(row.parameters / 1e6))
    ]
    """Elements of its matrices, without the lm_head."""
    draft_bytes: Annotated[
        float, Column("MB a draft", lambda row: significant(row.draft_bytes / 1e6))
    ]
    """Bytes of the last draft of a step; the first one makes entries of accepted tokens, too."""
    draft_seconds: Annotated[
        float, Column("ms a draft", lambda row: significant(row.draft_seconds * 1e3, 3))
    ]
    """Time of those bytes and their FLOPs."""
    draft_share: Annotated[float, Column("most drafts / verification", ".0%")]
    """Bytes of a step's drafts over those of their verification, with the most drafts."""
    best_drafts: Annotated[int, Column("K that pays")]
    """The number of drafts with the most tokens per second."""
    tokens_per_s: Annotated[float, Column("tokens/s", ",.0f")]
    """With that number of drafts."""
    gain: Annotated[float, Column("over K = 0", ".2f")]
    """The same over the tokens per second without drafts."""


def compare_heads(
    model: str,
    config: HeadsConfig,
    weight_format: PublishedFormat | None = None,
) -> Result[HeadRow]:
    """Tabulate heads for a base: every pattern in every format with every number of draft tokens
    and every window.

    Args:
        model: a shape or a directory; its own heads matter only if `config.head` is None.
        weight_format: format of a shape's base.

    Raises:
        UserError: the model cannot have such a head, or has fewer tokens; see `held_weights`.
    """
    dtype = getattr(torch, config.dtype)
    base = held_weights(
        model, dtype, quantization=config.engine.quantization, weight_format=weight_format
    )
    own = get_config(model)
    if config.head is None and not own.mtp.pattern:
        raise UserError(f"{model} has no heads: name some with --head, such as '*'")
    rows = []
    for head in config.head or (own.mtp.pattern,):
        shape = _config_with(own, head, config.most_drafts)
        for format_ in (None, *(config.head_format or ())):
            drawn = drawn_weights(shape, dtype, head_format=format_)
            held = replace(base, heads=drawn.heads)
            for size, window in itertools.product(
                config.draft_vocab_sizes, config.attention_windows
            ):
                roofline = Roofline(
                    shape.replace(mtp_attention_window=window),
                    dtype,
                    getattr(torch, config.engine.state_dtype),
                    config.engine.state_rollback,
                    config.ring_entries,
                    size or None,
                    KV_DTYPES[config.engine.kv_cache_dtype],
                    held=held,
                )
                named = head, format_ or config.dtype, size or shape.vocab_size, window
                rows += [_row(roofline, config, *named, batch) for batch in config.batch_size]
    bandwidth, matrix_rate, _ = config.rates
    title = (
        f"heads for {model}, {base.said(dtype)}, up to {config.most_drafts} drafts, acceptance"
        f" {' '.join(map(str, config.acceptance))}, {config.context_length:,.0f} tokens of context,"
        f" {significant(bandwidth / 1e12, 3)} TB/s, {significant(matrix_rate / 1e12, 3)} TFLOP/s"
    )
    settings = {"model": model, "weight_format": weight_format, **options_of(config)}
    return Result("heads", title, HeadRow, rows, settings=settings)


def _config_with(config: ModelConfig, head: str, depths: int) -> ModelConfig:
    """The config with this head, repeated."""
    pattern, colon, width = head.partition(":")
    if not pattern:
        raise UserError(f"head {head!r} has no layers: give some by --head, such as '*'")
    if colon and not width.isdecimal():
        raise UserError(f"head {head!r}: {width!r} is no width of a dense FFN, give a number")
    changes: dict[str, int | bool] = {"mtp_num_depths": depths, "mtp_use_repeated_layer": True}
    if not colon:
        try:
            return with_pattern(config, pattern, **changes)
        except UserError as error:
            hint = f"; a width may follow it, as in '{pattern}:4096'"
            raise UserError(f"{error}{hint if _WIDTH in str(error) else ''}") from error

    found = with_pattern(config, pattern, **changes, **{_WIDTH: int(width)})
    wider = found.replace(**{_WIDTH: int(width) + 1})
    if _sizes(found.mtp.pattern, found) == _sizes(found.mtp.pattern, wider):
        raise UserError(f"head {head!r} has no dense FFN: leave the width out")
    if _sizes(config.pattern, config) != _sizes(config.pattern, found):
        raise UserError(
            f"head {head!r}: the base has dense FFNs of its own, and heads have the same width:"
            " leave the width out"
        )
    return found


def _sizes(pattern: str, config: ModelConfig) -> set[Matrices]:
    """The sizes of all kinds of layers in a pattern."""
    return {KINDS[letter].matrices(config) for letter in pattern}


def _row(
    roofline: Roofline,
    config: HeadsConfig,
    head: str,
    format_: str,
    tokens: int,
    window: int,
    batch: int,
) -> HeadRow:
    shape = roofline.config
    most = config.most_drafts
    rates = config.rates
    steps = [
        roofline.decode(batch, depth_rates(config.acceptance, k), config.context_length)
        for k in range(most + 1)
    ]
    speeds = [step.limit_tokens_per_s(*rates) for step in steps]
    best = max(range(most + 1), key=speeds.__getitem__)
    # The first draft of a step also makes entries of the tokens that were accepted.
    draft = steps[-1].phases[f"draft {most}"]
    layers = (KINDS[letter].matrices(shape) for letter in shape.mtp.pattern)
    return HeadRow(
        pattern=head,
        format=format_,
        draft_vocab_size=tokens,
        attention_window=window,
        batch_size=batch,
        parameters=eh_proj_matrix(shape) + sum(layer.held for layer in layers),
        draft_bytes=sum(work.bytes for work in draft),
        draft_seconds=sum(work.seconds(*rates) for work in draft),
        draft_share=sum(steps[-1].parts(drafts=True).values())
        / sum(steps[-1].parts(drafts=False).values()),
        best_drafts=best,
        tokens_per_s=speeds[best],
        gain=speeds[best] / speeds[0],
    )
