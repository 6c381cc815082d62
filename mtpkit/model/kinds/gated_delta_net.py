"""Gated delta nets."""

import math

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mtpkit.config import ModelConfig
from mtpkit.config.sections import GatedDeltaNetConfig
from mtpkit.model.kinds.base import Draw, LayerKind, Memory, Shape, Slot
from mtpkit.model.kinds.settings import LayerMarks, Settings
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.delta import GatedDeltaNet as Mixer
from mtpkit.model.layers.residual import AttentionLayer
from mtpkit.model.state import ConvWindowSpec, Part, RecurrentSpec, StateSpec

ROWS = ("query", "key", "value", "z", "beta", "alpha")
CHANNELS = ("query", "key", "value")
"""Parts of `in_proj` and of the convolution; each part is a separate tensor in checkpoints."""

_DECAYS = (0.02, 0.2)
"""Range of exp(A_log) for `depend_on_context`: with step size 0.01, a state forgets within a few
thousand tokens."""
_STEP = 0.01
"""Step size for `depend_on_context` where alpha is zero."""


class GatedDeltaNet(LayerKind):
    """Gated delta net (Yang et al. 2024, arXiv:2412.06464)."""

    name = "gated_delta_net"
    section = GatedDeltaNetConfig
    mixer = "self_attention"
    slot = Slot("G", "gdn_layer")
    narrows = True
    attention_variant = "gated_delta_net"
    writes_residual = ("out_proj",)
    divided = ("num_key_heads", "num_value_heads")

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        linears = GatedDeltaNetSubmodules(
            in_proj=backend.norm_column_linear, out_proj=backend.row_linear
        )
        mixer = ModuleSpec(Mixer, submodules=linears)
        parts = TransformerLayerSubmodules(self_attention=mixer, self_attn_bda=get_bias_dropout_add)
        return ModuleSpec(AttentionLayer, submodules=parts)

    def settings(self, config: ModelConfig) -> dict[str, object]:
        names = (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_dim",
        )
        sizes = {f"linear_{name}": getattr(config.gated_delta_net, name) for name in names}
        return dict(
            experimental_attention_variant=self.attention_variant, linear_attention_freq=1, **sizes
        )

    def gpt_layers(self, settings: Settings) -> LayerMarks | bool:
        if settings.get("experimental_attention_variant") != self.attention_variant:
            return False
        # Megatron counts the layers from 1, and every n-th one is full attention.
        return LayerMarks(
            "linear_attention_freq", None, lambda layer, every: (layer + 1) % every != 0
        )

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        sizes = config.gated_delta_net
        hidden = config.hidden_size
        rows = self._rows(config)
        shapes: dict[str, Shape] = {
            "in_proj.layer_norm_weight": (hidden,),
            **{f"in_proj.weight.{part}": (rows[part], hidden) for part in ROWS},
            **{
                f"conv1d.weight.{part}": (rows[part], 1, sizes.conv_kernel_dim) for part in CHANNELS
            },
            **dict.fromkeys(("A_log", "dt_bias"), (sizes.num_value_heads,)),
            "out_norm.weight": (sizes.value_head_dim,),
            "out_proj.weight": (hidden, sizes.value_width),
        }
        return {f"self_attention.{name}": shape for name, shape in shapes.items()}

    def _rows(self, config: ModelConfig) -> dict[str, int]:
        sizes = config.gated_delta_net
        keys = sizes.key_width
        values = sizes.value_width
        heads = sizes.num_value_heads
        return dict(zip(ROWS, (keys, keys, values, values, heads, heads), strict=True))

    def parts(self, name: str, size: int, config: ModelConfig) -> list[int]:
        rows = self._rows(config)
        named = ROWS if name.endswith("in_proj.weight") else CHANNELS if "conv1d_" in name else ()
        return [rows[part] for part in named] or [size]

    def activations(self, config: ModelConfig) -> int:
        return 2 * config.gated_delta_net.projected

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        sizes = config.gated_delta_net
        heads = sizes.num_value_heads // ranks
        keys = sizes.num_key_heads // ranks
        inputs = {
            "k": Part((keys, sizes.key_head_dim)),  # of unit length
            # corrections, see `kernels.gated_delta_rule`
            "u": Part((heads, sizes.value_head_dim), torch.float32),
            "g": Part((heads,), torch.float32),  # log decays
        }
        recurrent = RecurrentSpec((heads, sizes.value_head_dim, sizes.key_head_dim), inputs)
        return ConvWindowSpec(sizes.conv_kernel_dim, sizes.convolved // ranks), recurrent

    def memory(self, config: ModelConfig) -> Memory:
        """Count a state that a key reads, that u k^T is added to, and that a query reads."""
        sizes = config.gated_delta_net
        state = sizes.value_width * sizes.key_head_dim
        return Memory(state=state, state_flops=6 * state)

    def initial(
        self, name: str, shape: torch.Size, config: ModelConfig, draw: Draw
    ) -> Tensor | None:
        """Draw A and the convolution, and set the bias of dt, as Megatron does."""
        match name.rpartition(".")[2]:
            case "A_log":
                return draw.uniform(shape, 1, 16).log()
            case "dt_bias":
                return torch.ones(shape)
            case "conv1d_weight":
                bound = 1 / math.sqrt(config.gated_delta_net.conv_kernel_dim)
                return draw.uniform(shape, -bound, bound)
        return None

    def depend_on_context(self, layer: nn.Module, config: ModelConfig, draw: Draw) -> None:
        """Make the state forget slowly. With the usual initial weights, it forgets within a few
        tokens."""
        mixer = getattr(layer, self.mixer)
        mixer.A_log.copy_(
            torch.empty(mixer.A_log.shape).uniform_(*_DECAYS, generator=draw.generator).log()
        )
        mixer.dt_bias.fill_(math.log(math.expm1(_STEP)))
