"""Acceptance on held-out data, by source: the same in the loop of a run and for any checkpoint."""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.data import PackedBatch, PackedDataset
from mtpkit.training.config import HeadAttention, TrainConfig
from mtpkit.training.depths import DECODINGS, DepthSums
from mtpkit.training.loss import LossOptions
from mtpkit.training.step import evaluate, loss_options


@dataclass(frozen=True)
class EvaluationSettings:
    """How heads are evaluated."""

    num_depths: int
    attention: HeadAttention
    """`serving` or `per_depth`."""
    options: LossOptions
    """Of the loss that is reported."""
    depth_weights: tuple[float, ...]
    """[K], of each depth in the loss."""
    batch_size: int = 1
    """Sequences of one forward pass on one rank."""
    max_sequences: int | None = None
    """Sequences of each source that are read, evenly spread over it; None: all."""

    @classmethod
    def of(cls, config: TrainConfig) -> "EvaluationSettings":
        """Those of a run."""
        size, limit = config.data.micro_batch_size, config.data.eval_sequences
        heads = config.heads
        return cls(heads.num_depths, heads.attention, loss_options(config), config.depth_weights(), size, limit)


@dataclass(frozen=True)
class Evaluation:
    """What was found on each source."""

    sources: dict[str, DepthSums]
    """By name."""
    depth_weights: tuple[float, ...]

    @property
    def overall(self) -> DepthSums:
        """Of all sources together, each token counting the same."""
        return functools.reduce(operator.add, self.sources.values())

    def __str__(self) -> str:
        """In one line, for people."""
        overall = self.overall
        rates = ", ".join(f"{rate:.1%}" for rate in overall.conditional_acceptance())
        text = f"held-out AL {overall.acceptance_length():.3f}, conditional acceptance {rates}"
        text += f", AL sampling {overall.acceptance_length('sampling'):.3f}"
        if len(self.sources) > 1:
            each = (f"{name} {sums.acceptance_length():.3f}" for name, sums in self.sources.items())
            text += f"; AL by source: {', '.join(each)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The `summary` of all, and under `sources` that of each."""
        each = {name: summary(sums, self.depth_weights) for name, sums in self.sources.items()}
        return {**summary(self.overall, self.depth_weights), "sources": each}


def summary(sums: DepthSums, depth_weights: Sequence[float]) -> dict[str, Any]:
    """What is reported of some tokens.

    `loss` is the depths' `depth_losses` by their weights. `acceptance_length` and `conditional_acceptance`, one rate a
    depth, are of greedy decoding; the same names after `sampling_` and `draft_sampling_` are the expected ones at
    temperature 1, see `Decoding`. `positions` are the places where a step could start.
    """
    values: dict[str, Any] = {
        "loss": sum(weight * loss for weight, loss in zip(depth_weights, sums.losses(), strict=True)),
        "depth_losses": sums.losses(),
        "positions": int(sums.values[2, 0]),
    }
    for decoding in DECODINGS[: sums.num_decodings]:
        prefix = "" if decoding == "greedy" else f"{decoding}_"
        values[f"{prefix}conditional_acceptance"] = sums.conditional_acceptance(decoding)
        values[f"{prefix}acceptance_length"] = sums.acceptance_length(decoding)
    return values


def evaluate_sources(
    model: HybridModel, dataset: PackedDataset, settings: EvaluationSettings, group: dist.ProcessGroup
) -> Evaluation:
    """Evaluate the heads on every source. Collective over the data-parallel `group`, whose ranks share the work."""
    device = next(model.parameters()).device
    sources = {}
    for source in dataset.sources:
        batches = _batches(dataset, source, settings.batch_size, settings.max_sequences)
        share = (batch.to(device) for batch in itertools.islice(batches, group.rank(), None, group.size()))
        sources[source] = evaluate(model, share, settings.num_depths, settings.attention, settings.options, group)
    return Evaluation(sources, settings.depth_weights)


def _batches(dataset: PackedDataset, source: str, size: int, limit: int | None) -> Iterator[PackedBatch]:
    rows = dataset.source_rows(source)
    if limit is not None and limit < len(rows):
        rows = rows[np.arange(limit) * len(rows) // limit]
    for start in range(0, len(rows), size):
        yield dataset.batch(rows[start : start + size])
