"""Feed-forward layers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerLayerSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from mtpkit.config import ModelConfig
from mtpkit.config.sections import MlpConfig
from mtpkit.model.kinds.base import LayerKind, Linear, Shape, Slot
from mtpkit.model.kinds.settings import Settings, UnfusedNorm
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.residual import MLP, MLPLayer


class FeedForward(LayerKind):
    """Base of kinds whose layers consist of feed-forward networks."""

    writes_residual = ("linear_fc2",)
    feed_forward = ("mlp.", "pre_mlp_layernorm.")

    def network(self, config: ModelConfig, name: str, outer: int, inner: int) -> dict[str, Shape]:
        """Return the shapes of a network's two matrices, named by `name` with 1 or 2 filled in. In
        a gated network, the rows of the gate come before those of the values."""
        return {
            name.format(1): ((2 if config.mlp.gated else 1) * inner, outer),
            name.format(2): (outer, inner),
        }

    def parts(self, name: str, size: int, config: ModelConfig) -> list[int]:
        return (
            [size // 2] * 2 if config.mlp.gated and name.endswith("linear_fc1.weight") else [size]
        )


class Mlp(FeedForward):
    """A feed-forward network."""

    name = "mlp"
    section = MlpConfig
    slot = Slot("-", "mlp_layer")
    divided = ("ffn_hidden_size",)
    unfused_norms = (
        UnfusedNorm(
            "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight"
        ),
    )

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        linears = MLPSubmodules(
            linear_fc1=backend.norm_column_linear, linear_fc2=backend.row_linear
        )
        mlp = partial(MLP.as_mlp_submodule, submodules=linears)
        return ModuleSpec(
            MLPLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add)
        )

    def gpt_layers(self, settings: Settings) -> bool:
        return True

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        hidden = config.hidden_size
        matrices = self.network(
            config, "mlp.linear_fc{}.weight", hidden, config.mlp.ffn_hidden_size
        )
        return {"mlp.linear_fc1.layer_norm_weight": (hidden,), **matrices}

    def linears(self, config: ModelConfig) -> Sequence[Linear]:
        """Return both matrices; squared ReLU may be fused into the first one."""
        fc1, fc2 = super().linears(config)
        return (fc1 if config.mlp.gated else replace(fc1, activation="relu2")), fc2

    def activations(self, config: ModelConfig) -> int:
        return 2 * config.mlp.ffn_hidden_size
