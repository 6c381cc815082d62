"""Transformer Engine's linears, norms and attention, with the parameters, checkpoint keys and calls
of `local`.

Import this only where the `te` backend was chosen: Transformer Engine is optional, and builds its
modules on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from transformer_engine.common.recipe import Float8CurrentScaling

from mtpkit.errors import UserError, listed
from mtpkit.kernels.norm import rms_norm
from mtpkit.model.layers.base import NoExtraState
from mtpkit.model.layers.norm import ACTIVATIONS, GatedRMSNorm
from mtpkit.model.transformer_config import TransformerConfig


class RMSNorm(NoExtraState, te.RMSNorm):
    """Root mean square norm over the last dimension."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(
            hidden_size,
            eps=eps,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            sequence_parallel=config.sequence_parallel,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        self.zero_centered: bool = self.zero_centered_gamma


class ColumnParallelLinear(NoExtraState, megatron_te.TEColumnParallelLinear):
    """Linear whose output features are split over tensor-parallel ranks."""


class NormColumnParallelLinear(NoExtraState, megatron_te.TELayerNormColumnParallelLinear):
    """Column-parallel linear of the RMS norm of its input, in one module."""

    def normed(self, input_: Tensor) -> Tensor:
        """Return only the norm of input_ [..., input_size]."""
        return rms_norm(input_, self.layer_norm_weight, self.eps, self.zero_centered_gamma)

    def activated(self, input_: Tensor, activation: Literal["relu2", "swiglu"]) -> Tensor:
        """Return the activation of the output."""
        return ACTIVATIONS[activation](self(input_)[0])


class CopiedLinear(NoExtraState, megatron_te.TELinear):
    """Linear without bias that every tensor-parallel rank holds whole."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__(
            input_size,
            output_size,
            parallel_mode="duplicated",
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )

    def forward(self, input_: Tensor) -> Tensor:
        """Map input_ [..., in] to [..., out]."""
        return super().forward(input_)[0]


class RowParallelLinear(NoExtraState, megatron_te.TERowParallelLinear):
    """Linear whose input features are split over tensor-parallel ranks; can add its output to a
    residual stream."""

    def forward(
        self, input_: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map input_ [s, b, in / tp] to (residual + output [s, b, out], bias for the caller to
        add)."""
        output, bias = super().forward(input_)
        return (output if residual is None else residual + output), bias

    def gated(
        self, input_: Tensor, gate: Tensor, norm: GatedRMSNorm, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` on norm(input_, gate)."""
        return self(norm(input_, gate), residual)


class CoreAttention(megatron_te.TEDotProductAttention):
    """Causal attention over sequences by cuDNN or FlashAttention, as Transformer Engine chooses."""

    # The local module has no extra-state key, and megatron-core writes none into checkpoints.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """See `mtpkit.kernels.attention.sequence_attention`: q [b, s, heads, d], k [b, s, groups,
        d], v [b, s, groups, e], documents [b, s] or None; returns [b, s, heads, e]."""
        b, s = q.shape[:2]
        packed = None if documents is None else _packed(documents)
        if packed is None:
            self.hidden_size_per_attention_head_v = v.shape[-1]
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            out = super().forward(q, k, v, None, AttnMaskType.causal)  # [s, b, heads * d]
            return out.view(s, b, q.shape[2], -1).transpose(0, 1)
        width = v.shape[-1]
        if width < q.shape[-1]:  # packed sequences need values as wide as keys
            v = F.pad(v, (0, q.shape[-1] - width))
        self.hidden_size_per_attention_head_v = v.shape[-1]
        q, k, v = (t.flatten(0, 1).contiguous() for t in (q, k, v))
        out = super().forward(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed)
        return out.view(b, s, q.shape[1], -1)[..., :width]


def _packed(documents: Tensor) -> PackedSeqParams | None:
    """Return where each document of [b, s] begins in the concatenated rows; None if each row is one
    document. Waits for the device."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = starts.flatten().nonzero()[:, 0]
    if len(first) == len(documents):
        return None
    offsets = torch.cat([first, first.new_tensor([documents.numel()])]).to(torch.int32)
    longest = int(offsets.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class SpecProvider(TESpecProvider):
    """megatron-core's choice of modules for a mixture of experts, with the linears above."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> partial[SequentialMLP]:
        """One linear per expert, whose parameters have the local experts' names."""
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(SequentialMLP, submodules=submodules)


def check_fp8(model: HybridModel) -> None:
    """Raise UserError if the GPU has no fp8, or a matrix of the base `model.decoder` has a size not
    divisible by 16."""
    available, why = te.is_fp8_available(return_reason=True)
    if not available:
        raise UserError(f"base_fp8 is not possible here: {why}; set base_fp8=false")
    odd = [
        f"{name} {tuple(module.weight.shape)}"
        for name, module in model.decoder.named_modules()
        if isinstance(module, ColumnParallelLinear | NormColumnParallelLinear | RowParallelLinear)
        and any(size % 16 for size in module.weight.shape)
    ]
    if odd:
        raise UserError(
            f"fp8 needs matrix sizes that are multiples of 16, unlike those of {listed(odd)}; set"
            " base_fp8=false"
        )


@contextmanager
def fp8_forward() -> Iterator[None]:
    """Make linears inside multiply in fp8 (e4m3; Micikevicius et al. 2022, arXiv:2209.05433), with
    one scale per tensor from its own largest entry. The fp8 copies of frozen weights are made once
    and kept."""
    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
        yield
