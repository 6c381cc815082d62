"""Mixture of experts with latent projections that need no Transformer Engine."""

import copy
from functools import partial

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer as MegatronMoELayer
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mtpkit.kernels.activation import sigmoid_gate
from mtpkit.kernels.linear import linear
from mtpkit.kernels.moe import expert_mlp, route, router_logits
from mtpkit.kernels.moe.reference import Shared
from mtpkit.model.collectives import all_reduce
from mtpkit.model.layers.base import NoExtraState
from mtpkit.model.layers.experts import Experts
from mtpkit.model.layers.norm import ACTIVATIONS, RMSNorm
from mtpkit.model.transformer_config import TransformerConfig

_JOINED_TOKENS = 256
"""Up to so many tokens a shared expert that can be is one of the routed ones, which saves the launches of its own; of
more its products are faster by themselves."""

_ALIGNED_ROWS = 8
"""A multiple of rows that suits cuBLAS: of 64 tokens on an H200 513 rows took 9 us, 512 rows 6."""


class DuplicatedLinear(NoExtraState, nn.Linear):
    """A linear held whole by every tensor-parallel rank; returns (output, bias) as megatron-core's linears do."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__(
            input_size, output_size, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """x [..., input_size] to ([..., output_size], None)."""
        return super().forward(x), None


class Router(TopKRouter):
    """megatron-core's router on the device where its weights are (the original moves CPU weights to the GPU), with
    `mtpkit.kernels.moe.route`, which knows what megatron-core's routing does not. Its bias stays as it is."""

    config: TransformerConfig

    def gating(self, input: Tensor) -> Tensor:
        """input [..., hidden] to fp32 logits [..., experts]."""
        return router_gating_linear(input, self.weight, self.bias, torch.float32)

    def choose(
        self, x: Tensor, norm: RMSNorm | None, rows: Tensor | None = None, shared: Shared = "apart"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] to its norm, its experts [T, k] and their weights, without waiting for the host.

        Args:
            norm: None: there is none.
            rows: the weight in place of the router's own: [E + 1 or more, hidden] with a `gated` shared expert.
            shared: see `mtpkit.kernels.moe.route`.
        """
        weight = self.weight if rows is None else rows
        if norm is None:
            normed, logits = router_logits(x, None, 0.0, False, weight)
        else:
            normed, logits = router_logits(x, norm.weight, norm.eps, norm.zero_centered, weight)
        return normed, *self._route(logits[:, : self.num_experts + (shared == "gated")], shared)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [s, b, experts] to weights [T, experts], 0 where an expert is not chosen, and whether it is."""
        assert padding_mask is None, "nothing pads sequences"
        flat = logits.flatten(0, -2)
        chosen, weights = self._route(flat)
        nowhere = torch.zeros_like(flat, dtype=torch.bool)
        return torch.zeros_like(flat).scatter(1, chosen, weights), nowhere.scatter(1, chosen, True)

    def _route(self, logits: Tensor, shared: Shared = "apart") -> tuple[Tensor, Tensor]:
        bias = None if self.expert_bias is None else self.expert_bias.float()
        settings = self.config.mtpkit.moe.routing
        return route(logits, bias, *settings, shared)


class MoELayer(MegatronMoELayer):
    """megatron-core's routed and shared experts; the routed ones may work in `moe_latent_size` (Nemotron 3).

    Where nothing is differentiated and `stack_experts` has been called, all routed experts are two products between a
    sort and a sum. Otherwise it is megatron-core's own forward with `Experts`, which needs a host-device sync for the
    number of tokens of each expert.
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, *args: object, **kwargs: object) -> None:
        submodules = copy.copy(submodules)
        submodules.router = Router
        assert submodules.experts.func is SequentialMLP and not submodules.experts.args
        submodules.experts = partial(Experts, **submodules.experts.keywords)
        latent = config.moe_latent_size
        if not latent:
            super().__init__(config, submodules, *args, **kwargs)
            return
        # megatron-core builds latent projections from Transformer Engine only: build the rest without them, but the
        # experts at their latent width.
        plain = copy.copy(config)
        plain.moe_latent_size = None
        build_experts = submodules.experts
        submodules.experts = lambda num_experts, _config, **kw: build_experts(num_experts, config, **kw)
        super().__init__(plain, submodules, *args, **kwargs)
        self.config = config
        self.fc1_latent_proj = DuplicatedLinear(config.hidden_size, latent, config)
        self.fc2_latent_proj = DuplicatedLinear(latent, config.hidden_size, config)

    _stacks: list[Tensor] | None = None
    """fc1 and fc2 of all experts, behind them those of a shared expert of the same size; then, if that has a gate, the
    weights of the router and of the gate, and zeros. The parameters are views of them."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, hidden] to (the same shape, bias or None)."""
        if torch.is_grad_enabled() or not self.is_stacked:
            return super().forward(hidden_states, *args, **kwargs)
        return self.add_to(None, hidden_states), None

    def one_by_one(self, hidden_states: Tensor) -> Tensor:
        """Run megatron-core's own pass through the experts, one after the other, whether they are stacked or not."""
        self.experts.apart = True
        try:
            return super().forward(hidden_states)[0]
        finally:
            self.experts.apart = False

    def stack_experts(self) -> bool:
        """Lay the weights of all routed experts side by side; the parameters become views of them.

        Where ranks share a sequence, or experts without sharing the other matrices, experts stay apart: only
        megatron-core's own pass exchanges tokens. So do weights that lie in a buffer of somebody else's, such as an
        optimizer's, and those made in inference mode, which cannot be moved.

        Returns:
            Whether they lie side by side now.
        """
        together = self._together
        if self._stacks is not None and all(map(_are_parts_of, self._stacks, together)):
            return True
        self._stacks = None
        apart = self.config.sequence_parallel or not self._same_tokens
        if apart or not all(_can_move(weight) for weights in together for weight in weights):
            return False
        multiples = 1, 1, _ALIGNED_ROWS
        self._stacks = [_stack(weights, rows) for weights, rows in zip(together, multiples, strict=False)]
        return True

    @property
    def _same_tokens(self) -> bool:
        """Whether the ranks that share the experts, or split each, are those that share the other matrices: they all
        have the same tokens, and the sum over them is complete."""
        return self.ep_group.size() * self.experts.tp_group.size() == self.attn_tp_group.size()

    @property
    def is_stacked(self) -> bool:
        """Whether the experts lie side by side; of a model that was moved since, or copied, they do not."""
        return self._stacks is not None and all(
            weights[0].data_ptr() == stack.data_ptr()
            for weights, stack in zip(self._together, self._stacks, strict=True)
        )

    @property
    def _joins(self) -> Shared:
        """Whether the shared expert can be one of the routed ones: if it is as wide, and what it reads, too, and no
        other rank has some of them."""
        sizes = self.config.mtpkit.moe
        if not self.use_shared_expert or self.config.moe_latent_size or self.attn_tp_group.size() > 1:
            return "apart"
        shared, gate = self.shared_experts, self.shared_experts.gate_weight
        alike = shared.linear_fc1.weight.dtype == self.experts.local_experts[0].linear_fc1.weight.dtype
        if not alike or sizes.shared_expert_intermediate_size != sizes.ffn_hidden_size:
            return "apart"
        return "whole" if gate is None else "gated" if gate.dtype == self.router.weight.dtype else "apart"

    @property
    def _together(self) -> list[list[Tensor]]:
        """The weights that lie side by side, see `_stacks`."""
        experts, joins = list(self.experts.local_experts), self._joins
        if joins != "apart":
            experts.append(self.shared_experts)
        pairs = [[expert.linear_fc1.weight for expert in experts], [expert.linear_fc2.weight for expert in experts]]
        return [*pairs, [self.router.weight, self.shared_experts.gate_weight]] if joins == "gated" else pairs

    def add_to(self, residual: Tensor | None, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """residual [..., hidden], which may be overwritten, plus the stacked experts of norm(x), x [..., hidden].

        Each rank adds up what its experts, or its parts of them, give; one sum over ranks completes it.
        """
        assert self._stacks is not None, "stack_experts comes first"
        flat, activation, joins = x.flatten(0, -2), self.config.mtpkit.mlp.activation, self._joins
        first = self.attn_tp_group.rank() == 0  # the first rank adds the residual, once
        total = residual.contiguous().flatten(0, -2) if residual is not None and first else None
        some = self.experts.local_experts[0]
        fc1 = self._stacks[0].unflatten(0, (-1, len(some.linear_fc1.weight)))
        fc2 = self._stacks[1].unflatten(0, (-1, len(some.linear_fc2.weight)))
        if joins != "apart" and len(flat) <= _JOINED_TOKENS:
            rows = self._stacks[2] if joins == "gated" else None
            flat, chosen, weights = self.router.choose(flat, norm, rows, joins)
            return expert_mlp(flat, fc1, fc2, chosen, weights, activation, total).view(x.shape)
        fc1, fc2 = fc1[: self.num_local_experts], fc2[: self.num_local_experts]
        flat, chosen, weights = self.router.choose(flat, norm)
        spread = self.ep_group.size() > 1
        if spread:
            own, count = chosen - self.ep_group.rank() * self.num_local_experts, self.num_local_experts
            chosen = torch.where((own >= 0) & (own < count), own, count)
        if self.use_shared_expert:
            shared = self.shared_experts
            if activation == "relu2":
                inner = linear(flat, shared.linear_fc1.weight, activation="relu2")
            else:
                inner = ACTIVATIONS[activation](linear(flat, shared.linear_fc1.weight))
            if shared.gate_weight is not None:
                gate = linear(flat, shared.gate_weight)[:, :, None]
                inner = sigmoid_gate(inner, gate.expand(-1, inner.shape[1], 1))  # one number scales a token
            total = linear(inner, shared.linear_fc2.weight, residual=total)
        if self.config.moe_latent_size:
            small = linear(flat, self.fc1_latent_proj.weight)
            mixed = expert_mlp(small, fc1, fc2, chosen, weights, activation, some_elsewhere=spread)
            total = linear(mixed, self.fc2_latent_proj.weight, residual=total)
        else:
            total = expert_mlp(flat, fc1, fc2, chosen, weights, activation, total, spread)
        return all_reduce(total, self.attn_tp_group).view(x.shape)


def _can_move(weight: Tensor) -> bool:
    """Whether nobody else holds the memory of a weight."""
    alone = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return alone and not weight.is_inference()


def _parts(stack: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    lens = [len(weight) for weight in weights]
    return stack[: sum(lens)].split(lens)


def _are_parts_of(stack: Tensor, weights: list[Tensor]) -> bool:
    places = [part.data_ptr() for part in _parts(stack, weights)]
    return places == [weight.data_ptr() for weight in weights]


def _stack(weights: list[Tensor], multiple: int) -> Tensor:
    """The rows of all weights in one tensor, which they become views of; then zeros, up to a multiple of rows."""
    padding = weights[0].new_zeros(-sum(map(len, weights)) % multiple, *weights[0].shape[1:])
    stack = torch.cat([*(weight.detach() for weight in weights), padding])
    for weight, part in zip(weights, _parts(stack, weights), strict=True):
        weight.data = part
    return stack


@torch.inference_mode(False)
def stack_experts(model: nn.Module) -> bool:
    """Make the experts of `model` one tensor per layer, for decoding; needs the memory of one layer's beside the model.

    Returns:
        Whether all are, see `MoELayer.stack_experts`.
    """
    stacked = []
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        before = layer.is_stacked
        stacked.append(layer.stack_experts())
        if stacked[-1] and not before and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the single experts lay in is of no size that others need
    return all(stacked)
