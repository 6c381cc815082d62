"""How a run is spread over processes, and what has to fit for that.

DP: every rank has all heads and its own sequences. TP with sequence parallelism: ranks split matrices, heads of
attention and the vocabulary, and between them the sequence. PP: see `pipeline`. EP: data-parallel ranks split the
experts among themselves. All are megatron-core's, and products of them are allowed.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from mtpkit.config import ModelConfig
from mtpkit.config.checked import keys_of
from mtpkit.data import PackedBatch
from mtpkit.errors import raise_problems
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in
from mtpkit.training.config import ParallelConfig


def has_results() -> bool:
    """Whether this is the one rank that logs: the first of those with heads."""
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
    )


def check_layout(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Whether a model can be spread so.

    Raises:
        UserError: it cannot; names every setting and what it may be.
    """
    raise_problems("parallel", list(_problems(parallel, model)))


def _problems(parallel: ParallelConfig, model: ModelConfig) -> Iterator[str]:
    kinds = kinds_in(model.letters)
    divided = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    shared: dict[str, int] = {}
    for kind in kinds:
        section, keys = model.section(kind.section), keys_of(kind.section)
        divided |= {keys[name]: getattr(section, name) for name in kind.divided}
        shared |= {keys[name]: getattr(section, name) for name in kind.divided_or_shared}
    for key, size in divided.items():
        if size % parallel.tensor:
            yield (
                f"the model's {key} {size} cannot be split over tensor={parallel.tensor} ranks; "
                "set parallel.tensor to a divisor of it"
            )
    for key, size in shared.items():
        if size % parallel.tensor and parallel.tensor % size:
            yield (
                f"the model's {key} {size} and tensor={parallel.tensor} do not divide each other; set "
                "parallel.tensor to a divisor or a multiple of it"
            )
    if parallel.pipeline > len(model.pattern):
        yield (
            f"the base has {len(model.pattern)} layers, too few for pipeline={parallel.pipeline} stages; set "
            f"parallel.pipeline to at most {len(model.pattern)}"
        )
    experts = [count for kind in kinds if (count := kind.experts(model).count)]
    if parallel.expert > 1 and not experts:
        yield f"the model has no experts to split over expert={parallel.expert} ranks; set parallel.expert=1"
    for count in experts:
        if count % parallel.expert:
            yield (
                f"the model's {count} experts cannot be split over expert={parallel.expert} ranks; set "
                "parallel.expert to a divisor of it"
            )


def even_share(batches: Iterable[PackedBatch], group: dist.ProcessGroup) -> Iterator[PackedBatch]:
    """This rank's share of batches, every n-th of n ranks, as many on all ranks and of one shape at a time.

    Ranks that share experts run every layer together. What is short is filled up with sequences that have nothing to
    learn and so count for nothing.
    """
    for turn in itertools.batched(batches, group.size()):
        spare = dataclasses.replace(turn[0], loss_mask=torch.zeros_like(turn[0].loss_mask))
        yield _filled(turn[group.rank()] if group.rank() < len(turn) else spare, len(turn[0].token_ids))


def _filled(batch: PackedBatch, rows: int) -> PackedBatch:
    """A batch with its first sequence repeated, unwanted, until there are so many."""
    short = rows - len(batch.token_ids)
    if not short:
        return batch
    repeat = torch.arange(rows, device=batch.token_ids.device) % len(batch.token_ids)
    cached = batch.hidden
    return PackedBatch(
        token_ids=batch.token_ids[repeat],
        loss_mask=F.pad(batch.loss_mask, (0, 0, 0, short)),
        documents=batch.documents[repeat],
        positions=batch.positions[repeat],
        hidden=cached and (lambda: cached().map(lambda states: states[repeat.cpu()])),
    )


def own_rows(weight: Tensor, local: Tensor, model: HybridModel) -> Tensor:
    """This tensor-parallel rank's rows of a whole weight [m, n], of which `local` is its part."""
    return weight.chunk(weight.shape[0] // local.shape[0])[model.pg_collection.tp.rank()]
