"""Acceptance of heads on held-out data: by source, during a run or for any checkpoint, and as in serving."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.checkpoint import find_companions, load_config, load_model
from mtpkit.data.build import build_dataset
from mtpkit.data.dataset import PackedDataset
from mtpkit.data.samples import Columns
from mtpkit.data.tokenizer import load_tokenizer
from mtpkit.errors import MtpkitError, UserError
from mtpkit.model import SequenceInput, base_forward, compute_logits, unroll_depths
from mtpkit.model.backends import BackendName, resolve_backend
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.mtp import DepthAttention
from mtpkit.platform import Dtype, default_device, device_name, ensure_distributed, resolve_dtype
from mtpkit.training.config.settings import HeadAttention, LossConfig, ParallelConfig
from mtpkit.training.depths import DECODINGS, DepthSums, measure_depths
from mtpkit.training.heads import resolve_attention
from mtpkit.training.parallel import check_layout, even_share, from_last_stage, stream_base


@dataclass(frozen=True)
class Evaluation:
    """Sums over the held-out tokens of each source."""

    sources: dict[str, DepthSums]
    depth_weights: tuple[float, ...]

    @property
    def overall(self) -> DepthSums:
        """The sums of all sources together, in which each token counts the same."""
        return functools.reduce(operator.add, self.sources.values())

    def __str__(self) -> str:
        overall = self.overall
        rates = ", ".join(f"{rate:.1%}" for rate in overall.conditional_acceptance())
        text = f"held-out AL {overall.acceptance_length():.3f}, conditional acceptance {rates}"
        text += f", AL sampling {overall.acceptance_length('sampling'):.3f}"
        if len(self.sources) > 1:
            each = (f"{name} {sums.acceptance_length():.3f}" for name, sums in self.sources.items())
            text += f"; AL by source: {', '.join(each)}"
        return text

    def to_dict(self) -> dict[str, object]:
        """The `summary` of all sources together, with the summary of each source under `sources`."""
        each = {name: summary(sums, self.depth_weights) for name, sums in self.sources.items()}
        return {**summary(self.overall, self.depth_weights), "sources": each}


def summary(sums: DepthSums, depth_weights: Sequence[float]) -> dict[str, object]:
    """The numbers that are logged and reported for a set of tokens.

    `loss` is the weighted sum of `depth_losses`. `acceptance_length` and `conditional_acceptance` (one rate per depth)
    are for greedy decoding; the same keys with the prefixes `sampling_` and `draft_sampling_` hold the expected values
    at temperature 1, see `Decoding`. `positions` counts the positions where a step could start.
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
        max_sequences: number of sequences to read from each source, evenly spread over it; None: all.

    Raises:
        MtpkitError: a loss or an acceptance rate is not finite; raised on all ranks.
    """
    device, group = next(model.parameters()).device, model.pg_collection.dp
    sources = {}
    for source in dataset.sources:
        rows = dataset.source_rows(source)
        if max_sequences is not None and max_sequences < len(rows):
            rows = rows[np.arange(max_sequences) * len(rows) // max_sequences]
        batches = (dataset.batch(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size))
        share = (batch.to(device) for batch in even_share(batches, group))
        sums = DepthSums.zero(num_depths, device, len(DECODINGS))
        for batch, hidden in stream_base(model, share):
            sums += measure_depths(model, batch, num_depths, attention, loss, hidden)
        sources[source] = sums = DepthSums(from_last_stage(model, sums.all_reduce(group).values)).on_host()
        sums.check_finite(f"held-out data {source}")
    return Evaluation(sources, loss.weights(num_depths))


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
) -> dict[str, object] | None:
    """Evaluate the heads of a model directory of either layout. Collective over all ranks, which share the work.

    Args:
        num_depths: K; None: the number that the heads were trained for, or 3 if that is unknown. A repeated head can be
            unrolled to more depths.
        dtype: `float32`, `bfloat16`, or `auto`: bfloat16 on a GPU, float32 on a CPU.
        backend: as `TrainConfig.backend`.
        parallel: how ranks split the model; None: each rank has the whole model.

    Returns:
        `model`, `num_depths`, `attention`, `sequence_length`, `dtype` and `device`, then `Evaluation.to_dict` for KL at
        temperature 1 with the default depth weights; None on all ranks but the first.

    Raises:
        UserError: the directory has no model, no heads or too few heads, or the data or the split over ranks does not
            fit.
        MtpkitError: a loss or an acceptance rate is not finite.
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
    dtype = resolve_dtype(dtype, device)
    model = load_model(
        directory,
        dtype=getattr(torch, dtype),
        device=device,
        backend=resolve_backend(backend),
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        expert_parallel=parallel.expert,
    )
    found = evaluate_sources(model, dataset, num_depths, attention, LossConfig(), batch_size, max_sequences)
    if dist.get_rank():
        return None
    about = {"model": str(directory), "num_depths": num_depths, "attention": attention}
    about |= {"sequence_length": sequence_length, "dtype": dtype, "device": device_name(device)}
    return about | found.to_dict()


@torch.no_grad()
def served_acceptance(
    model: HybridModel, token_ids: Tensor, prompt_length: int, num_depths: int, attention: DepthAttention = "serving"
) -> DepthSums:
    """Measure acceptance without an engine, at the positions where greedy speculative decoding would start a step.

    A step that starts at p drafts t_{p+2} .. t_{p+K+1}; after n accepted drafts the next one starts at p + n + 1.
    Example, K = 2, a prompt of 3 tokens: the first step starts at p = 2, where t_3 is known from the prompt's own
    forward pass; if the draft of t_4 is right and that of t_5 is wrong, the base supplies t_5 and the next step starts
    at p = 4.

    Args:
        token_ids: [s], a prompt and the base's greedy answer.

    Returns:
        Sums over the steps whose K drafts all lie in the text, with losses of 0.

    Raises:
        MtpkitError: logits where a step may start are not finite.
    """
    batch = token_ids[None]
    hidden = base_forward(model, batch, SequenceInput())
    starts = max(0, len(token_ids) - num_depths - 1)  # number of positions from 0 on whose K drafts lie in the text
    right = []
    for depth, states in enumerate(unroll_depths(model, hidden, batch, num_depths, attention), start=1):
        logits = compute_logits(model, states[:starts, 0])
        if not logits[prompt_length - 1 :].isfinite().all():
            raise MtpkitError(f"NaN or infinity in the logits of depth {depth}; look for it in the model's weights")
        drafts = logits.argmax(dim=-1)
        right.append((drafts == token_ids[depth + 1 : depth + 1 + starts]).tolist())
    sums = DepthSums.zero(num_depths, torch.device("cpu"))
    position = prompt_length - 1
    while position < starts:
        sums.values[1] += 1
        accepted = 0
        while accepted < num_depths:
            sums.values[2, accepted] += 1
            if not right[accepted][position]:
                break
            sums.values[3, accepted] += 1
            accepted += 1
        position += accepted + 1
    return sums
