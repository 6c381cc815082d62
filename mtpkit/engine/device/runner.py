"""Runs the base model for the engine; also the interface that a stand-in for it must have."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from mtpkit.engine.ranks import Stage
from mtpkit.engine.steps.plan import Batch, StepOutput
from mtpkit.model import base_forward, fold_rings, local_logits, normed_states
from mtpkit.model.hybrid import HybridModel, one_layer_per_kind
from mtpkit.model.state import Committed, States


class StepRunner(Protocol):
    """Runs the base over batches: `Runner`, or a stand-in for a model in tests."""

    hidden_size: int
    """Size of the base's hidden states."""

    def run(self, batch: Batch) -> StepOutput:
        """Compute hidden states of all tokens and logits at `batch.logit_indices`; of resumed rows
        the hidden states are known, and only logits are computed."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, v] of hidden states [n, h] that `run` returned; called only for requests that
        ask for log-probabilities of their prompts, on the last pipeline stage."""
        ...

    def fold(
        self,
        states: States,
        slots: Tensor,
        context_lens: Tensor,
        committed: Committed,
        noise_keys: Tensor,
    ) -> None:
        """See `mtpkit.model.fold_rings`; called only with a prefix cache."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """Until the context ends, let `run` do less, if it still compiles and loads all kernels
        that it needs; called only with CUDA graphs."""
        ...

    def receive(self, tokens: int) -> None:
        """Receive a step's hidden states from the previous pipeline stage, if there is one; `run`
        reads them."""
        ...


class Runner(StepRunner):
    """Runs a base model, or the layers that belong to one pipeline stage.

    Args:
        most_tokens: most tokens per step; needed only with several stages.
    """

    def __init__(
        self, model: HybridModel, stage: Stage | None = None, most_tokens: int = 0
    ) -> None:
        self.model = model
        self.stage = stage or Stage()
        self.hidden_size: int = model.mtpkit_config.hidden_size
        # Graphs read and write these two at fixed addresses. They begin as zeros, since the capture
        # of a graph computes with what they hold.
        self._received = self._zeros(0 if self.stage.first else most_tokens)
        """Hidden states from the previous stage."""
        self._handed_on = self._zeros(0 if self.stage.last else most_tokens)
        """Hidden states for the next stage: one buffer, so that not every graph keeps its own."""

    def _zeros(self, tokens: int) -> Tensor:
        """[tokens, 1, h] in the model's dtype."""
        return torch.zeros(
            tokens,
            1,
            self.hidden_size,
            dtype=self.model.config.params_dtype,
            device=next(self.model.parameters()).device,
        )

    def receive(self, tokens: int) -> None:
        """See `StepRunner.receive`."""
        if not self.stage.first:
            self.stage.receive(self._received[:tokens])

    def run(self, batch: Batch) -> StepOutput:
        """Run one forward pass; it writes keys, values and states to the caches in `batch.inputs`.
        Only the last stage returns logits; the hidden states that any other stage returns are valid
        until the next run."""
        hidden = batch.resumed_hidden
        if hidden is None:
            if not self.stage.first:
                # A copy, since layers add to it in place: a graph may be captured after the
                # transfer and before its replay.
                self.model.set_input_tensor(self._received[: len(batch.token_ids)].clone())
            hidden = base_forward(self.model, batch.token_ids[None], batch.inputs)
        if not self.stage.last:
            return StepOutput(hidden.new_empty(0, 0), self._handed_on[: len(hidden)].copy_(hidden))

        # Decode rows need logits at all tokens.
        chosen = hidden[batch.logit_indices, 0] if batch.inputs.num_chunk_rows else hidden[:, 0]
        return StepOutput(self.logits(chosen), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `StepRunner.logits`."""
        return local_logits(self.model, normed_states(self.model, hidden))

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """See `StepRunner.shortened`: one layer of each kind runs instead of all."""
        whole = self.model
        # In fp8 Transformer Engine rounds a layer's weights when it first runs, which must not be
        # captured.
        if whole.base_context is nullcontext:
            self.model = one_layer_per_kind(whole)
        try:
            yield
        finally:
            self.model = whole

    def fold(
        self,
        states: States,
        slots: Tensor,
        context_lens: Tensor,
        committed: Committed,
        noise_keys: Tensor,
    ) -> None:
        """See `StepRunner.fold`."""
        fold_rings(self.model, states, slots, context_lens, committed, noise_keys)
