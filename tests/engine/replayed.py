"""A stand-in for CUDA graphs: engines on a CPU run the steps that a GPU replays, filled up and from
fixed tensors."""

from contextlib import nullcontext

import torch

from mtpkit.engine import loading
from mtpkit.engine.device.capture import Capture
from mtpkit.engine.steps.plan import Drafts


class Replayed:
    """Runs a function again where a graph would replay it, and leaves the result where the first
    run left it."""

    def __init__(self, function) -> None:
        self.function = function
        self.result = function()

    def replay(self) -> None:
        result = self.function()
        if self.result is not None:
            self.result.copy_(result)


def _graph(self, function, warming=nullcontext):
    with warming():
        function()
    graph = Replayed(function)
    return graph, graph.result


def _execution(weight, stacked, async_scheduling, enforce_eager, stages=1):
    return True if async_scheduling is None else async_scheduling, stacked and not enforce_eager


def replay_on_cpu(monkeypatch) -> None:
    """Let engines launch steps as they do on a GPU."""
    monkeypatch.setattr(loading, "execution", _execution)
    monkeypatch.setattr(Capture, "graph", _graph)


class TruthOnDevice:
    """Makes some of the heads' drafts right, by slot and position, in tensor code alone: it can be
    captured."""

    def __init__(self, inner, truth: list[list[int]], device: str) -> None:
        self.inner = inner
        # The null rows' entry, the last, is never right.
        self.truth = torch.full(
            (len(truth) + 9, max(map(len, truth)) + 1), -1, dtype=torch.int64, device=device
        )
        for slot, tokens in enumerate(truth):
            self.truth[slot, : len(tokens)] = torch.tensor(tokens)

    def draft(self, hidden, batch, verdict) -> Drafts:
        drafts = self.inner.draft(hidden, batch, verdict)
        count = batch.shape.sampling_rows
        depths = batch.shape.num_speculative_tokens
        slots, (_, newest) = batch.inputs.state_slots[:count], batch.newest(verdict.accepted)
        places = newest[:, None] + 2 + torch.arange(depths, device=slots.device)
        right = self.truth[slots[:, None], places.clamp(max=self.truth.shape[1] - 1)]
        # a hash: any number may follow any other
        count_right = ((newest * 2654435761 + slots) >> 7) % (depths + 1)
        use = (torch.arange(depths, device=slots.device) < count_right[:, None]) & (right >= 0)
        return Drafts(torch.where(use, right, drafts.token_ids), drafts.probs)
