"""megatron-core's layers with few kernels per layer in decoding.

For a `StepInput`, a layer computes x + mixer(norm(x)). The norm runs where Megatron's parameters
put it: in the linear that follows it, or by itself, or, before a mixture of experts, with the
router's product. The addition runs inside the last matrix product, and its sum may overwrite x. For
every other input, megatron-core's own forward runs.
"""

import torch
from megatron.core.ssm.mamba_layer import MambaLayer as MegatronMambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer as MegatronMLPLayer
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.mlp import MLP as MegatronMLP
from torch import Tensor

from mtpkit.model.formats.weight import QuantizedWeight
from mtpkit.model.inputs import LayerInput, StepInput
from mtpkit.model.layers.base import linear_of
from mtpkit.model.layers.norm import ACTIVATIONS
from mtpkit.model.transformer_config import TransformerConfig


class MambaLayer(MegatronMambaLayer):
    """A Mamba2 mixer and its residual connection."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: object,
        inference_context: LayerInput | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Map hidden_states [s, b, h] to the same shape."""
        if not isinstance(inference_context, StepInput):
            return super().forward(
                hidden_states, *args, inference_context=inference_context, **kwargs
            )
        return self.mixer(
            hidden_states, inference_context=inference_context, residual=hidden_states
        )[0]


class _StepTransformerLayer(TransformerLayer):
    def forward(
        self,
        hidden_states: Tensor,
        *args: object,
        inference_context: LayerInput | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden_states [s, b, h] to (the same shape, megatron-core's unused context)."""
        if not isinstance(inference_context, StepInput):
            return super().forward(
                hidden_states, *args, inference_context=inference_context, **kwargs
            )
        return self._step(hidden_states, inference_context), None

    def _step(self, x: Tensor, step: StepInput) -> Tensor:
        """Return x [T, 1, h] plus the output of the layer for x."""
        raise NotImplementedError


class AttentionLayer(_StepTransformerLayer):
    """Self-attention and its residual connection."""

    def _step(self, x: Tensor, step: StepInput) -> Tensor:
        # input_layernorm is a separate norm, or the identity if the mixer's first linear norms.
        return self.self_attention(self.input_layernorm(x), inference_context=step, residual=x)[0]


class MLP(MegatronMLP):
    """megatron-core's MLP, with an activation that the backward recomputes instead of keeping
    it."""

    config: TransformerConfig

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, Tensor | None]:
        """Map hidden_states [s, b, h] to (the same shape, bias or None)."""
        inner, bias = self.linear_fc1(hidden_states)
        assert bias is None, "built without"
        return linear_of(self.linear_fc2, ACTIVATIONS[self.config.mtpkit.mlp.activation], inner)


class MLPLayer(_StepTransformerLayer, MegatronMLPLayer):
    """A feed-forward network and its residual connection."""

    config: TransformerConfig

    def _step(self, x: Tensor, step: StepInput) -> Tensor:
        fc1 = self.mlp.linear_fc1
        fc2 = self.mlp.linear_fc2
        activation = self.config.mtpkit.mlp.activation
        if activation == "swiglu" and isinstance(fc2.weight, QuantizedWeight):
            return fc2.of_swiglu(fc1(x)[0], residual=x)[0]
        return fc2(fc1.activated(x, activation), residual=x)[0]


class MixtureLayer(_StepTransformerLayer):
    """A mixture of experts and its residual connection."""

    def _step(self, x: Tensor, step: StepInput) -> Tensor:
        if torch.is_grad_enabled() or not self.mlp.is_stacked:
            return x + self.mlp(self.pre_mlp_layernorm(x))[0]
        return self.mlp.add_to(x, x, self.pre_mlp_layernorm)
