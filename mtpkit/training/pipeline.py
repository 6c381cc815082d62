"""The frozen base over pipeline stages: hidden states flow forward, and nothing flows back.

A stage receives the hidden states of a micro-batch, runs its layers without gradients, sends the result on and goes on
with the next micro-batch while the transfer is under way. Nothing of a micro-batch is kept, so there is no schedule of
forwards and backwards to follow: the slowest stage sets the pace, and each runs ahead of the next one by as many
micro-batches as are on the way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mtpkit.data import PackedBatch
from mtpkit.model.hybrid import HybridModel
from mtpkit.training.cache import base_states

IN_FLIGHT = 2
"""Micro-batches that are on the way between two stages."""

StageForward = Callable[[PackedBatch, Tensor | None], Tensor]
"""What a stage makes of a micro-batch and of what the stage before sent, None on the first stage."""


def stream_base(
    model: HybridModel, batches: Iterable[PackedBatch], forward: StageForward | None = None, width: int = 1
) -> Iterator[tuple[PackedBatch, Tensor]]:
    """Run micro-batches through all stages and yield each with the base's hidden states, on the last stage alone.

    Collective over a pipeline, whose stages are given the same batches: elsewhere the iteration works and yields
    nothing. Callers loop over it on every stage, and the body of their loop runs where the heads are.

    Args:
        forward: what a stage does; None: its part of the base.
        width: hidden states [s, b, h] that stages hand on, stacked, as `forward` takes and gives them.

    Yields:
        (batch, what the last stage's `forward` returned): [s, b, h] (s / tp under sequence parallelism).
    """
    forward = forward or _base(model)
    last = model.post_process
    sends: deque[tuple[dist.Work, Tensor]] = deque()
    for batch, received in _receive(model, batches, width):
        with torch.no_grad():
            output = forward(batch, received)
        if last:
            yield batch, output
            continue
        output = output.contiguous()
        group = model.pg_collection.pp
        sends.append((_started(dist.isend(output, group=group, group_dst=group.rank() + 1)), output))
        if len(sends) > IN_FLIGHT:
            sends.popleft()[0].wait()
    for work, _ in sends:
        work.wait()


def from_last_stage(model: HybridModel, values: Tensor) -> Tensor:
    """The last stage's `values`, on every stage. Collective."""
    group = model.pg_collection.pp
    if group.size() > 1:
        values = values.clone()
        dist.broadcast(values, group=group, group_src=group.size() - 1)
    return values


def _base(model: HybridModel) -> StageForward:
    def forward(batch: PackedBatch, received: Tensor | None) -> Tensor:
        if received is not None:
            model.set_input_tensor(received)
        return base_states(model, batch)

    return forward


def _receive(
    model: HybridModel, batches: Iterable[PackedBatch], width: int
) -> Iterator[tuple[PackedBatch, Tensor | None]]:
    """Every batch with what the stage before sends for it; transfers of the next ones are under way already."""
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
        buffer = _buffer(model, batch, width)
        ahead.append((batch, buffer, _started(dist.irecv(buffer, group=group, group_src=group.rank() - 1))))
        if len(ahead) > IN_FLIGHT:
            yield arrived()
    while ahead:
        yield arrived()


def _buffer(model: HybridModel, batch: PackedBatch, width: int) -> Tensor:
    """Room for `width` hidden states of a batch: [s, b, h] of one, [width, s, b, h] of several."""
    config = model.config
    rows, length = batch.token_ids.shape
    length //= config.tensor_model_parallel_size if config.sequence_parallel else 1
    shape = (length, rows, config.hidden_size)
    leading = (width,) if width > 1 else ()
    return torch.empty(*leading, *shape, dtype=config.params_dtype, device=batch.token_ids.device)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in its own pipeline"
    return work
