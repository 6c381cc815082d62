"""Cases of each layer kind, one file per kind, and the table from letters of patterns to cases."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.kernels.case import Case, Shapes
from benchmarks.kernels.cases.kinds import attention, gated_delta_net, mamba2, mla, mlp, moe
from mtpkit.config import Section
from mtpkit.config.sections import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Mamba2Config,
    MlaConfig,
    MlpConfig,
    MoeConfig,
)


def _none(shapes: Shapes, size: object = None) -> Iterable[Case]:
    return ()


@dataclass(frozen=True)
class KindCases:
    """Functions that make the cases of a layer kind, except those of its linears, which
    `LayerKind.linears` lists."""

    decode: Callable[[Shapes], Iterable[Case]] = _none
    """The ops of a step of decoding requests."""
    prefill: Callable[[Shapes, tuple[int, ...]], Iterable[Case]] = _none
    """The ops of a step of prompts of the given lengths."""
    base: Callable[[Shapes, int], Iterable[Case]] = _none
    """The ops of the base on a training sequence of the given length."""
    heads: Callable[[Shapes, int], Iterable[Case]] = _none
    """The ops of the MTP heads on such a sequence, with their backward passes."""


CASES: dict[str, KindCases] = {}
"""Letter -> cases of the layer kind."""


def register(section: type[Section], cases: KindCases) -> None:
    """Make the ops of a layer kind known to the benchmark."""
    CASES[section.letter] = cases


register(
    AttentionConfig, KindCases(attention.decode, attention.prefill, attention.base, attention.heads)
)
register(MlaConfig, KindCases(mla.decode, mla.prefill, mla.base, mla.heads))
register(Mamba2Config, KindCases(mamba2.decode, mamba2.prefill, heads=mamba2.heads))
register(
    GatedDeltaNetConfig,
    KindCases(gated_delta_net.decode, gated_delta_net.prefill, base=gated_delta_net.base),
)
register(MlpConfig, KindCases(mlp.decode, heads=mlp.heads))
register(MoeConfig, KindCases(moe.decode, moe.prefill))
