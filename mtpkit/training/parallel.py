"""Parallel training: checks of the parallel sizes, shares of batches, and the pipeline of the
frozen base.

DP: every rank has all heads and its own sequences. TP with sequence parallelism: ranks split
matrices, attention heads and the vocabulary, and the sequence between layers. EP: data-parallel
ranks split the experts among themselves. All three are megatron-core's and can be combined.

PP: hidden states of the frozen base flow forward over its stages, and nothing flows back. A stage
receives the hidden states of a micro-batch, runs its layers without gradients, sends the result to
the next stage, and continues with the next micro-batch during the transfer. It keeps nothing of a
micro-batch, so that no schedule of forwards and backwards is needed: the slowest stage sets the
pace.
"""

import mtpkit.platform  # noqa: F401  (it prepares megatron-core's import, so it comes first)

# isort: split
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from mtpkit.config import ModelConfig
from mtpkit.data.dataset import PackedBatch
from mtpkit.errors import raise_problems
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import UnevenSize, kinds_in, uneven_sizes
from mtpkit.training.cache import base_states
from mtpkit.training.config.settings import ParallelConfig

IN_FLIGHT = 2
"""Number of micro-batches in transfer between two stages."""

StageForward = Callable[[PackedBatch, Tensor | None], Tensor]
"""Computes a stage's output from a micro-batch and the previous stage's output, which is None on
the first stage."""


def has_results() -> bool:
    """Whether this rank logs: the first of the ranks with heads."""
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank()
        == parallel_state.get_data_parallel_rank()
        == 0
    )


def check_layout(parallel: ParallelConfig, model: ModelConfig) -> None:
    """Check that a model can be split over ranks as the settings say.

    Raises:
        UserError: names every wrong setting, and its possible values.
    """
    raise_problems("parallel", list(_problems(parallel, model)))


def _problems(parallel: ParallelConfig, model: ModelConfig) -> Iterator[str]:
    whole = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    sizes = [UnevenSize(key, size, False) for key, size in whole.items() if size % parallel.tensor]
    for key, size, shared in (*sizes, *uneven_sizes(model, parallel.tensor)):
        if shared:
            yield (
                f"the model's {key} {size} and tensor={parallel.tensor} do not divide each other;"
                " set parallel.tensor to a divisor or a multiple of it"
            )
        else:
            yield (
                f"the model's {key} {size} cannot be split over tensor={parallel.tensor} ranks; "
                "set parallel.tensor to a divisor of it"
            )
    if parallel.pipeline > len(model.pattern):
        yield (
            f"the base has {len(model.pattern)} layers, too few for pipeline={parallel.pipeline}"
            f" stages; set parallel.pipeline to at most {len(model.pattern)}"
        )
    experts = [count for kind in kinds_in(model.letters) if (count := kind.experts(model).count)]
    if parallel.expert > 1 and not experts:
        yield (
            f"the model has no experts to split over expert={parallel.expert} ranks; set"
            " parallel.expert=1"
        )
    for count in experts:
        if count % parallel.expert:
            yield (
                f"the model's {count} experts cannot be split over expert={parallel.expert} ranks;"
                " set parallel.expert to a divisor of it"
            )


def even_share(batches: Iterable[PackedBatch], group: dist.ProcessGroup) -> Iterator[PackedBatch]:
    """Yield every n-th batch on each of n ranks; all ranks get the same number of batches with the
    same shapes.

    Equal shapes are needed because ranks that share experts run every layer together. Missing
    sequences are replaced by repeated ones that have nothing to learn and so do not count.
    """
    for turn in itertools.batched(batches, group.size()):
        spare = dataclasses.replace(turn[0], loss_mask=torch.zeros_like(turn[0].loss_mask))
        yield _filled(
            turn[group.rank()] if group.rank() < len(turn) else spare, len(turn[0].token_ids)
        )


def _filled(batch: PackedBatch, rows: int) -> PackedBatch:
    """Fill a batch up to `rows` sequences: its own are repeated, and the repeated ones have nothing
    to learn."""
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
    """This tensor-parallel rank's rows of a whole weight [m, n], as many as `local` has."""
    return weight.chunk(weight.shape[0] // local.shape[0])[model.pg_collection.tp.rank()]


def stream_base(
    model: HybridModel,
    batches: Iterable[PackedBatch],
    forward: StageForward | None = None,
    width: int = 1,
) -> Iterator[tuple[PackedBatch, Tensor]]:
    """Run micro-batches through all stages, and yield each with the base's hidden states on the
    last stage.

    Collective over pipeline stages, which must be given the same batches. Callers loop over it on
    every stage; all stages but the last do their work and yield nothing, so that the body of the
    loop runs only where the heads are.

    Args:
        forward: the work of a stage; None: its part of the base.
        width: number of hidden states [s, b, h] that `forward` takes and returns, stacked.

    Yields:
        (batch, result of the last stage's `forward`): [s, b, h] (s / tp under sequence
        parallelism).
    """
    forward = forward or partial(_run_base, model)
    last = model.post_process
    sends: deque[tuple[dist.Work, Tensor]] = deque()
    for batch, received in _receive(model, batches, width):
        with torch.no_grad():
            output = forward(batch, received)
        if last:
            yield batch, output
            continue
        # The tensor is kept with its send: freed memory could be written before it has left.
        output = output.contiguous()
        group = model.pg_collection.pp
        sends.append(
            (_started(dist.isend(output, group=group, group_dst=group.rank() + 1)), output)
        )
        # A stage that is faster than the next one would otherwise fill its memory with outputs.
        if len(sends) > IN_FLIGHT:
            sends.popleft()[0].wait()
    # The caller may reuse the communicator, or end, as soon as this returns.
    for work, _ in sends:
        work.wait()


def from_last_stage(model: HybridModel, values: Tensor) -> Tensor:
    """The `values` of the last stage, on every stage. Collective."""
    group = model.pg_collection.pp
    if group.size() > 1:
        # A broadcast writes in place, and the caller's tensor may be shared.
        values = values.clone()
        dist.broadcast(values, group=group, group_src=group.size() - 1)
    return values


def _run_base(model: HybridModel, batch: PackedBatch, received: Tensor | None) -> Tensor:
    if received is not None:
        model.set_input_tensor(received)
    return base_states(model, batch)


def _receive(
    model: HybridModel, batches: Iterable[PackedBatch], width: int
) -> Iterator[tuple[PackedBatch, Tensor | None]]:
    """Yield every batch with the previous stage's output, while outputs for the next batches are in
    transfer."""
    if model.pre_process:
        yield from ((batch, None) for batch in batches)
        return
    group = model.pg_collection.pp
    ahead: deque[tuple[PackedBatch, Tensor, dist.Work]] = deque()

    def arrived() -> tuple[PackedBatch, Tensor]:
        batch, buffer, work = ahead.popleft()
        work.wait()
        return batch, buffer

    for batch in batches:
        # The receive is posted early, so that the transfer overlaps the work on earlier batches.
        buffer = _buffer(model, batch, width)
        ahead.append(
            (batch, buffer, _started(dist.irecv(buffer, group=group, group_src=group.rank() - 1)))
        )
        if len(ahead) > IN_FLIGHT:
            yield arrived()
    while ahead:
        yield arrived()


def _buffer(model: HybridModel, batch: PackedBatch, width: int) -> Tensor:
    """An empty tensor for hidden states of a batch: [s, b, h], or [width, s, b, h] if `width` is
    more than 1."""
    config = model.config
    rows, length = batch.token_ids.shape
    length //= config.tensor_model_parallel_size if config.sequence_parallel else 1
    shape = (length, rows, config.hidden_size)
    leading = (width,) if width > 1 else ()
    return torch.empty(*leading, *shape, dtype=config.params_dtype, device=batch.token_ids.device)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in its own pipeline"
    return work
