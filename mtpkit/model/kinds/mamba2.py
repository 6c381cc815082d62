"""Mamba2 layers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mtpkit.config import ModelConfig
from mtpkit.config.sections import Mamba2Config
from mtpkit.model.kinds.base import Draw, GatedNorm, LayerKind, Linear, Memory, Shape, Slot
from mtpkit.model.kinds.settings import Settings
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.mamba import MambaMixer
from mtpkit.model.layers.residual import MambaLayer
from mtpkit.model.state import ConvWindowSpec, Part, RecurrentSpec, StateSpec

ROWS = ("z", "x", "B", "C", "dt")
CHANNELS = ("x", "B", "C")
"""Parts of `in_proj` and of the convolution; each part is a separate tensor in checkpoints."""

_DECAYS = (0.02, 0.2)
"""Range of -A for `depend_on_context`: with a step size of 0.01, a state forgets within a few
thousand tokens."""
_EXPAND = 2
"""Inner width of a layer over the hidden size, for Megatron settings without the number of
heads."""


class Mamba2(LayerKind):
    """Mamba2 (Dao and Gu 2024, arXiv:2405.21060)."""

    name = "mamba2"
    section = Mamba2Config
    mixer = "mixer"
    slot = Slot("M", "mamba_layer")
    narrows = True
    writes_residual = ("out_proj",)
    divided = ("num_heads", "num_groups")

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        linears = MambaMixerSubmodules(
            in_proj=backend.norm_column_linear, out_proj=backend.row_linear
        )
        mixer = ModuleSpec(module=MambaMixer, submodules=linears)
        return ModuleSpec(
            MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add)
        )

    def settings(self, config: ModelConfig) -> dict[str, object]:
        names = ("num_heads", "head_dim", "state_dim", "num_groups")
        return {f"mamba_{name}": getattr(config.mamba2, name) for name in names}

    def derived_settings(self, settings: Settings, hidden_size: int) -> Mapping[str, object]:
        """Derive the number of heads from the hidden size."""
        width = max(1, settings.typed("mamba_head_dim", Mamba2Config.head_dim))
        return {"mamba_num_heads": _EXPAND * hidden_size // width}

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        sizes = config.mamba2
        hidden = config.hidden_size
        rows = self._rows(config)
        return {
            "mixer.in_proj.layer_norm_weight": (hidden,),
            **{f"mixer.in_proj.weight.{part}": (rows[part], hidden) for part in ROWS},
            **{
                f"mixer.conv1d.weight.{part}": (rows[part], 1, sizes.conv_kernel)
                for part in CHANNELS
            },
            **{f"mixer.conv1d.bias.{part}": (rows[part],) for part in CHANNELS},
            **{f"mixer.{name}": (sizes.num_heads,) for name in ("A_log", "D", "dt_bias")},
            "mixer.norm.weight": (sizes.inner,),
            "mixer.out_proj.weight": (hidden, sizes.inner),
        }

    def _rows(self, config: ModelConfig) -> dict[str, int]:
        sizes = config.mamba2
        return dict(
            zip(
                ROWS,
                (sizes.inner, sizes.inner, sizes.bc_width, sizes.bc_width, sizes.num_heads),
                strict=True,
            )
        )

    def parts(self, name: str, size: int, config: ModelConfig) -> list[int]:
        rows = self._rows(config)
        named = ROWS if name.endswith("in_proj.weight") else CHANNELS if "conv1d_" in name else ()
        return [rows[part] for part in named] or [size]

    def linears(self, config: ModelConfig) -> Sequence[Linear]:
        """Return both projections; `out_proj` norms its input times silu(z)."""
        sizes = config.mamba2
        in_proj, out_proj = super().linears(config)
        norm = GatedNorm(sizes.inner // sizes.num_groups, sizes.projected)
        return in_proj, replace(out_proj, gated_norm=norm)

    def activations(self, config: ModelConfig) -> int:
        return 3 * config.mamba2.inner + 4 * config.mamba2.bc_width

    def states(self, config: ModelConfig, ranks: int = 1) -> tuple[StateSpec, ...]:
        sizes = config.mamba2
        heads = sizes.num_heads // ranks
        groups = sizes.num_groups // ranks
        inputs = {
            "x": Part((heads, sizes.head_dim)),
            "B": Part((groups, sizes.state_dim)),
            "dt": Part((heads,), torch.float32),  # after softplus
        }
        recurrent = RecurrentSpec((heads, sizes.head_dim, sizes.state_dim), inputs)
        return ConvWindowSpec(
            sizes.conv_kernel, (sizes.inner + 2 * sizes.bc_width) // ranks
        ), recurrent

    def memory(self, config: ModelConfig) -> Memory:
        """Count a state that x B^T is added to and that C reads."""
        state = config.mamba2.inner * config.mamba2.state_dim
        return Memory(state=state, state_flops=4 * state)

    def initial(
        self, name: str, shape: torch.Size, config: ModelConfig, draw: Draw
    ) -> Tensor | None:
        """Draw A, dt and the convolution as the reference code of the Mamba2 paper does."""
        if name.endswith("mixer.norm.weight"):
            return torch.ones(shape)  # also with `layernorm_zero_centered_gamma`
        match name.rpartition(".")[2]:
            case "A_log":
                return draw.uniform(shape, 1, 16).log()
            case "D":
                return torch.ones(shape)
            case "dt_bias":
                dt = draw.uniform(shape, math.log(1e-3), math.log(1e-1)).exp()
                return dt + torch.log(-torch.expm1(-dt))  # inverse of softplus
            case "conv1d_weight" | "conv1d_bias":
                bound = 1 / math.sqrt(config.mamba2.conv_kernel)
                return draw.uniform(shape, -bound, bound)
        return None

    def depend_on_context(self, layer: nn.Module, config: ModelConfig, draw: Draw) -> None:
        """Make the state forget slowly, and zero the skip connection D. With the usual initial
        weights, Mamba2 forgets within some ten tokens, and its input bypasses the state."""
        mixer = getattr(layer, self.mixer)
        mixer.D.zero_()
        mixer.A_log.copy_(
            torch.empty(mixer.A_log.shape).uniform_(*_DECAYS, generator=draw.generator).log()
        )
