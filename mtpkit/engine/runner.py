"""Runs the base model over a batch."""

from typing import Any

from mtpkit.engine.step import Batch, StepOutput
from mtpkit.model import base_forward, compute_logits


class Runner:
    """Computes hidden states of all tokens and logits of those that need them."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, batch: Batch) -> StepOutput:
        """One forward pass; the caches in `batch.inputs` take up its keys, values and states."""
        hidden = base_forward(self.model, batch.token_ids[None], batch.inputs)
        return StepOutput(compute_logits(self.model, hidden[batch.logit_indices, 0]), hidden)
