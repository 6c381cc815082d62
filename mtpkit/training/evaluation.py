"""Acceptance on held-out data, by source: the same in the loop of a run and for any checkpoint."""

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mtpkit.checkpoint import find_companions, load_config, load_model
from mtpkit.data import Columns, PackedBatch, PackedDataset, build_dataset, load_tokenizer
from mtpkit.errors import UserError
from mtpkit.model.backends import resolve_backend
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import default_device, device_name, ensure_distributed
from mtpkit.training.config import HeadAttention, LossConfig, ParallelConfig, TrainConfig
from mtpkit.training.depths import DECODINGS, DepthSums
from mtpkit.training.heads import resolve_attention
from mtpkit.training.loss import LossOptions
from mtpkit.training.parallel import check_layout, even_share
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

    def to_dict(self) -> dict[str, object]:
        """The `summary` of all, and under `sources` that of each."""
        each = {name: summary(sums, self.depth_weights) for name, sums in self.sources.items()}
        return {**summary(self.overall, self.depth_weights), "sources": each}


def summary(sums: DepthSums, depth_weights: Sequence[float]) -> dict[str, object]:
    """What is reported of some tokens.

    `loss` is the depths' `depth_losses` by their weights. `acceptance_length` and `conditional_acceptance`, one rate a
    depth, are of greedy decoding; the same names after `sampling_` and `draft_sampling_` are the expected ones at
    temperature 1, see `Decoding`. `positions` are the places where a step could start.
    """
    values: dict[str, object] = {
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
    """Evaluate the heads on every source. Collective over the data-parallel `group`, whose ranks share the work.

    Raises:
        MtpkitError: what was found is not finite; on all ranks.
    """
    device = next(model.parameters()).device
    sources = {}
    for source in dataset.sources:
        batches = _batches(dataset, source, settings.batch_size, settings.max_sequences)
        share = (batch.to(device) for batch in even_share(batches, group))
        sums = evaluate(model, share, settings.num_depths, settings.attention, settings.options, group)
        sources[source] = sums = sums.on_host()
        sums.check_finite(f"held-out data {source}")
    return Evaluation(sources, settings.depth_weights)


def evaluate_directory(
    directory: Path,
    data: Sequence[str],
    columns: Columns,
    sequence_length: int,
    num_depths: int | None = None,
    attention: HeadAttention = "auto",
    batch_size: int = 1,
    max_sequences: int | None = None,
    dtype: str = "auto",
    backend: str = "local",
    parallel: ParallelConfig | None = None,
) -> dict[str, object] | None:
    """Evaluate the heads of a model directory of either layout. Collective over all ranks, which share the work.

    Args:
        num_depths: K; None: what the heads were trained for, 3 where that is unknown. A repeated head can be unrolled
            further.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        backend: as `TrainConfig.backend`.
        parallel: how ranks split the model; None: each has the whole.

    Returns:
        `Evaluation.to_dict`, of KL at temperature 1 with the default depth weights, after `model`, `num_depths`,
        `attention`, `dtype` and `device`; None on ranks but the first.

    Raises:
        UserError: no model, no heads, too few of them, or data or a split that does not fit.
        MtpkitError: what was found is not finite.
    """
    config = load_config(directory)
    if not config.mtp.num_depths:
        raise UserError(f"{directory} has no MTP heads; train some")
    num_depths = num_depths or config.mtp.default_drafts
    if num_depths > config.mtp.num_depths and not config.mtp.repeated:
        raise UserError(
            f"{directory} has {config.mtp.num_depths} distinct heads, too few for K = {num_depths}; ask for "
            f"{config.mtp.num_depths} or less"
        )
    attention = resolve_attention(attention, config)
    parallel = parallel or ParallelConfig()
    check_layout(parallel, config)
    if sequence_length % parallel.tensor:
        raise UserError(f"{sequence_length} tokens cannot be split over {parallel.tensor} ranks: make it a multiple")
    tokenizer = load_tokenizer(find_companions(directory))
    dataset = build_dataset(data, tokenizer, sequence_length, columns, config.vocab_size)
    ensure_distributed(parallel.tensor, parallel.pipeline, parallel.expert)
    device = default_device()
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    model = load_model(
        directory,
        dtype=getattr(torch, dtype),
        device=device,
        backend=resolve_backend(backend),
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        expert_parallel=parallel.expert,
    )
    weights = LossConfig().weights(num_depths)
    settings = EvaluationSettings(num_depths, attention, LossOptions(), weights, batch_size, max_sequences)
    found = evaluate_sources(model, dataset, settings, parallel_state.get_data_parallel_group())
    if dist.get_rank():
        return None
    about = {"model": str(directory), "num_depths": num_depths, "attention": attention}
    about |= {"sequence_length": sequence_length, "dtype": dtype, "device": device_name(device)}
    return {**about, **found.to_dict()}


def _batches(dataset: PackedDataset, source: str, size: int, limit: int | None) -> Iterator[PackedBatch]:
    rows = dataset.source_rows(source)
    if limit is not None and limit < len(rows):
        rows = rows[np.arange(limit) * len(rows) // limit]
    for start in range(0, len(rows), size):
        yield dataset.batch(rows[start : start + size])
