"""Feed-forward network."""

from typing import Any

from megatron.core.transformer.mlp import MLP as MegatronMLP
from torch import Tensor

from mtpkit.model.layers.norm import ACTIVATIONS
from mtpkit.model.layers.recompute import linear_of


class MLP(MegatronMLP):
    """megatron-core's parameters, with an activation that is not kept for the backward."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] to (the same shape, bias or None)."""
        inner, bias = self.linear_fc1(hidden_states)
        assert bias is None, "built without"
        return linear_of(self.linear_fc2, ACTIVATIONS[self.config.mtpkit.mlp.activation], inner)
