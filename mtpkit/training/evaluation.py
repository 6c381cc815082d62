"""Acceptance of heads on held-out data, as a server would count it: by source, during a run or for
any checkpoint."""

import functools
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from mtpkit.checkpoint import load_model, open_directory
from mtpkit.data.build import build_dataset
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.options import DataOptions
from mtpkit.data.samples import Columns, read_samples
from mtpkit.data.sources import find_sources
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import UserError, listed
from mtpkit.model.backends import BackendName, resolve_backend
from mtpkit.model.fp8 import require_fp8
from mtpkit.model.hybrid import HybridModel
from mtpkit.platform import Dtype, default_device, device_name, ensure_distributed, resolve_dtype
from mtpkit.training.batches import nothing_drafted
from mtpkit.training.bootstrap import Interval, acceptance_interval, show_interval
from mtpkit.training.config.settings import HeadAttention, LossConfig, ParallelConfig
from mtpkit.training.depths import DECODINGS, Decoding, DepthSums, measure_depths
from mtpkit.training.heads import resolve_attention
from mtpkit.training.parallel import check_layout, even_share, from_last_stage, stream_base

_logger = logging.getLogger(__name__)
ALL = ""
"""Name of all sources together in `Evaluation.intervals`."""


@dataclass(frozen=True)
class Evaluation:
    """Sums over the held-out tokens of each source."""

    sources: dict[str, DepthSums]
    depth_weights: tuple[float, ...]
    intervals: Mapping[str, Sequence[Interval | None]]
    """95% intervals of the acceptance lengths, one per decoding, for each source and for `ALL`."""

    @property
    def overall(self) -> DepthSums:
        """The sums of all sources together, in which each token counts the same."""
        return functools.reduce(operator.add, self.sources.values())

    def __str__(self) -> str:
        overall = self.overall
        rates = ", ".join(f"{rate:.1%}" for rate in overall.conditional_acceptance())
        text = f"held-out acceptance length {overall.acceptance_length():.3f}"
        if interval := show_interval(self.intervals[ALL][0]):
            text += f" (95%: {interval})"
        text += f", conditional acceptance {rates}, departures {overall.departures():.1%}"
        sampled = overall.acceptance_length("sampling")
        text += f", acceptance length at temperature 1 {sampled:.3f}"
        if len(self.sources) > 1:
            each = (f"{name} {sums.acceptance_length():.3f}" for name, sums in self.sources.items())
            text += f"; by source: {', '.join(each)}"
        return text

    def to_dict(self) -> dict[str, object]:
        """The summary of all sources together, with the summary of each source under `sources`.

        A summary is that of `summary`; `acceptance_length_interval`, and the same key with the
        prefixes `sampling_` and `draft_sampling_`, is the 95% interval [low, high] of the
        acceptance length, None with fewer than two documents.
        """
        each = {name: self._summary(name, sums) for name, sums in self.sources.items()}
        return {**self._summary(ALL, self.overall), "sources": each}

    def counts(self) -> dict[str, object]:
        """Steps, and reached and accepted drafts per depth, of all sources together, under the
        names of the engine's `AcceptanceStats`, with the prefixes of `summary`; expected numbers
        under sampling."""
        overall = self.overall
        values: dict[str, object] = {}
        for decoding in DECODINGS:
            prefix = _prefix(decoding)
            counts = overall.counts(decoding)
            reached, accepted = (counts.long() if decoding == "greedy" else counts).tolist()
            values[f"{prefix}steps"] = reached[0]
            values[f"{prefix}reached_per_depth"] = reached
            values[f"{prefix}accepted_per_depth"] = accepted
        return values

    def _summary(self, name: str, sums: DepthSums) -> dict[str, object]:
        values = summary(sums, self.depth_weights)
        for decoding, interval in zip(DECODINGS, self.intervals[name], strict=True):
            values[f"{_prefix(decoding)}acceptance_length_interval"] = interval and list(interval)
        return values


def summary(sums: DepthSums, depth_weights: Sequence[float]) -> dict[str, object]:
    """The numbers that are logged and reported for a set of tokens.

    `loss` is the weighted sum of `depth_losses`. `steps` counts the steps of greedy decoding along
    the text, and `departures` is the share of the tokens at which the text departs from the base's
    greedy choice. `acceptance_length` and `conditional_acceptance` (one rate per depth) are for
    greedy decoding; the same keys with the prefixes `sampling_` and `draft_sampling_` hold the
    expected values at temperature 1, see `Decoding`.
    """
    values: dict[str, object] = {
        "loss": sum(
            weight * loss for weight, loss in zip(depth_weights, sums.losses(), strict=True)
        ),
        "depth_losses": sums.losses(),
        "steps": round(sums.steps()),
        "departures": sums.departures(),
    }
    for decoding in DECODINGS[: sums.num_decodings]:
        prefix = _prefix(decoding)
        values[f"{prefix}conditional_acceptance"] = sums.conditional_acceptance(decoding)
        values[f"{prefix}acceptance_length"] = sums.acceptance_length(decoding)
    return values


def _prefix(decoding: Decoding) -> str:
    return "" if decoding == "greedy" else f"{decoding}_"


@torch.no_grad()
def evaluate_sources(
    model: HybridModel,
    dataset: PackedDataset,
    num_depths: int,
    attention: HeadAttention,
    loss: LossConfig,
    batch_size: int = 1,
    max_sequences: int | None = None,
) -> Evaluation:
    """Evaluate the heads on every source, see `measure_depths`. Collective over all ranks.

    Data-parallel ranks share the sequences; every pipeline stage gets the result.

    Args:
        loss: the reported loss, with the weights of the depths.
        batch_size: sequences per forward pass on one rank.
        max_sequences: number of sequences to read from each source, evenly spread over it; None:
            all.

    Raises:
        MtpkitError: a loss or an acceptance rate is not finite; raised on all ranks.
    """
    device = next(model.parameters()).device
    group = model.pg_collection.dp
    sources = {}
    documents = {}
    for source in dataset.sources:
        rows = dataset.source_rows(source)
        if max_sequences is not None and max_sequences < len(rows):
            rows = rows[np.arange(max_sequences) * len(rows) // max_sequences]
        batches = (
            dataset.batch(rows[start : start + batch_size])
            for start in range(0, len(rows), batch_size)
        )
        share = (batch.to(device) for batch in even_share(batches, group))
        sums = DepthSums.zero(num_depths, device, len(DECODINGS))
        counts = [np.empty((0, 2 * len(DECODINGS)))]
        for batch, hidden in stream_base(model, share):
            batch_sums, by_document = measure_depths(
                model, batch, num_depths, attention, loss, hidden
            )
            sums += batch_sums
            counts.append(by_document.cpu().numpy())
        documents[source] = _gather(np.concatenate(counts), group)
        sources[source] = sums = DepthSums(
            from_last_stage(model, sums.all_reduce(group).values)
        ).on_host()
        sums.check_finite(f"held-out data {source}")
    documents[ALL] = np.concatenate([*documents.values()])
    intervals = {name: _intervals(model, counts, device) for name, counts in documents.items()}
    return Evaluation(sources, loss.weights(num_depths), intervals)


def _gather(counts: np.ndarray, group: dist.ProcessGroup) -> np.ndarray:
    """The counts [n, c] of the documents of all ranks of a group."""
    every: list[np.ndarray] = [counts] * group.size()
    dist.all_gather_object(every, counts, group=group)
    return np.concatenate(every)


def _intervals(
    model: HybridModel, counts: np.ndarray, device: torch.device
) -> list[Interval | None]:
    """Intervals of the acceptance lengths, one per decoding, from the counts [n, 2 D] of
    `measure_depths` on the last stage. Collective over pipeline stages."""
    unknown = (math.nan, math.nan)
    pairs = [(counts[:, 2 * place], counts[:, 2 * place + 1]) for place in range(len(DECODINGS))]
    found = torch.tensor(
        [acceptance_interval(*pair) or unknown for pair in pairs],
        dtype=torch.float64,
        device=device,
    )
    whole = from_last_stage(model, found).tolist()
    return [None if math.isnan(low) else (low, high) for low, high in whole]


def evaluate_directory(
    directory: Path,
    data: Sequence[str],
    columns: Columns,
    sequence_length: int,
    num_depths: int | None = None,
    attention: HeadAttention = "auto",
    batch_size: int = 1,
    max_sequences: int | None = None,
    dtype: Dtype | Literal["auto"] = "auto",
    backend: BackendName | Literal["auto"] = "local",
    parallel: ParallelConfig | None = None,
    options: DataOptions | None = None,
    quantization: Literal["fp8"] | None = None,
) -> dict[str, object] | None:
    """Evaluate the heads of a model directory of either layout. Collective over all ranks, which
    share the work.

    Args:
        num_depths: K; None: the number that the heads were trained for, or 3 if that is unknown. A
            repeated head can be unrolled to more depths.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        backend: as `TrainConfig.backend`.
        parallel: how ranks split the model; None: each rank has the whole model.
        options: what is learnt of the data.
        quantization: quantise the base while it is loaded, as the engine's option does.

    Returns:
        `model`, `num_depths`, `attention`, `sequence_length`, `dtype`, `quantization` and `device`,
        then
        `Evaluation.to_dict` for KL at temperature 1 with the default depth weights, and
        `Evaluation.counts`; None on all ranks but the first.

    Raises:
        UserError: the directory has no model, no heads or too few heads, or the data, the split
            over ranks or the quantisation does not fit.
        MtpkitError: a loss or an acceptance rate is not finite.
    """
    opened = open_directory(directory)
    config = opened.config
    if not config.mtp.num_depths:
        raise UserError(f"{directory} has no MTP heads; train some")
    num_depths = num_depths or config.mtp.default_drafts
    if num_depths > config.mtp.num_depths and not config.mtp.repeated:
        raise UserError(
            f"{directory} has {config.mtp.num_depths} distinct heads, too few for K = {num_depths};"
            f" ask for {config.mtp.num_depths} or less"
        )
    attention = resolve_attention(attention, config)
    parallel = parallel or ParallelConfig()
    check_layout(parallel, config)
    if sequence_length % parallel.tensor:
        raise UserError(
            f"{sequence_length} tokens cannot be split over {parallel.tensor} ranks: make it a"
            " multiple"
        )
    backend = resolve_backend(backend)
    if quantization is not None and backend != "local":
        raise UserError(
            f"quantization is {quantization}, but backend {backend} cannot multiply with such"
            " matrices: take backend local"
        )
    tokenizer = load_tokenizer(opened.companions)
    if tokenizer.chat_template:
        _warn_of_raw_text(data, columns, options)
    dataset = build_dataset(data, tokenizer, sequence_length, columns, config.vocab_size, options)
    ensure_distributed(parallel.tensor, parallel.pipeline, parallel.expert)
    device = default_device()
    if quantization is not None:
        require_fp8(device, f"quantization is {quantization}", "leave it out")
    dtype = resolve_dtype(dtype, device)
    model = load_model(
        opened,
        dtype=getattr(torch, dtype),
        device=device,
        backend=backend,
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        expert_parallel=parallel.expert,
        quantization=quantization,
    )
    found = evaluate_sources(
        model, dataset, num_depths, attention, LossConfig(), batch_size, max_sequences
    )
    if not found.overall.steps():
        raise nothing_drafted(dataset)
    if dist.get_rank():
        return None
    about = {"model": str(directory), "num_depths": num_depths, "attention": attention}
    about |= {"sequence_length": sequence_length, "dtype": dtype}
    about |= {"quantization": quantization, "device": device_name(device)}
    return about | found.to_dict() | found.counts()


def _warn_of_raw_text(data: Sequence[str], columns: Columns, options: DataOptions | None) -> None:
    """Warn of sources without messages, by their first rows. Of prepared data it is not known."""
    raw = []
    for source in find_sources(data):
        if source.prepared is None:
            samples = read_samples(source.files, columns, (options or DataOptions()).on_bad_row)
            first = next(iter(samples), None)
            # Tokens that the base chose are an answer, whatever they were made from.
            if first and first.messages is None and first.prompt_token_ids is None:
                raw.append(source.name)
    if raw:
        _logger.warning(
            "data: %s: raw text, but the tokenizer has a chat template, without which the base and"
            " its heads may predict badly: give rows with messages, such as those of mtpkit data"
            " regenerate",
            listed(raw),
        )
