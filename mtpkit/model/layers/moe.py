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
"""Most tokens for which a shared expert runs as one of the routed experts if it can, which saves
its own launches; for more tokens its separate products are faster."""

_ALIGNED_ROWS = 8
"""Multiple of rows that suits cuBLAS: for 64 tokens on an H200, 513 rows took 9 us and 512 rows
took 6 us."""


class DuplicatedLinear(NoExtraState, nn.Linear):
    """A linear held whole by every tensor-parallel rank; returns (output, bias) as megatron-core's
    linears do."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__(
            input_size,
            output_size,
            bias=False,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map x [..., input_size] to ([..., output_size], None)."""
        return super().forward(x), None


class Router(TopKRouter):
    """megatron-core's router, run on the device of its weights (the original moves CPU weights to
    the GPU). It routes with `mtpkit.kernels.moe.route`, which has options that megatron-core's
    routing lacks. Its bias is not updated."""

    config: TransformerConfig

    def gating(self, input: Tensor) -> Tensor:
        """Map input [..., hidden] to fp32 logits [..., experts]."""
        return router_gating_linear(input, self.weight, self.bias, torch.float32)

    def choose(
        self, x: Tensor, norm: RMSNorm | None, rows: Tensor | None = None, shared: Shared = "apart"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the norm of x [T, hidden], its experts [T, k] and their weights, without waiting
        for the host.

        Args:
            norm: applied to x; None: no norm.
            rows: weight to use instead of the router's own: [E + 1 or more, hidden] with a `gated`
                shared expert.
            shared: see `mtpkit.kernels.moe.route`.
        """
        weight = self.weight if rows is None else rows
        if norm is None:
            normed, logits = router_logits(x, None, 0.0, False, weight)
        else:
            normed, logits = router_logits(x, norm.weight, norm.eps, norm.zero_centered, weight)
        return normed, *self._route(logits[:, : self.num_experts + (shared == "gated")], shared)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map logits [s, b, experts] to weights [T, experts], 0 where not chosen, and a mask [T,
        experts] of the choice."""
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
    """megatron-core's routed and shared experts; the routed ones may work in `moe_latent_size`
    (Nemotron 3).

    Without gradients and after `stack_experts`, all routed experts run as two products between a
    sort and a sum. Otherwise megatron-core's own forward runs with `Experts`, which needs a
    host-device sync for the number of tokens of each expert.
    """

    config: TransformerConfig

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules, *args: object, **kwargs: object
    ) -> None:
        submodules = copy.copy(submodules)
        submodules.router = Router
        assert submodules.experts.func is SequentialMLP and not submodules.experts.args
        submodules.experts = partial(Experts, **submodules.experts.keywords)
        latent = config.moe_latent_size
        if not latent:
            super().__init__(config, submodules, *args, **kwargs)
            return
        # megatron-core builds latent projections from Transformer Engine only: build the rest
        # without them, but the experts at their latent width.
        plain = copy.copy(config)
        plain.moe_latent_size = None
        build_experts = submodules.experts
        submodules.experts = lambda num_experts, _config, **kw: build_experts(
            num_experts, config, **kw
        )
        super().__init__(plain, submodules, *args, **kwargs)
        self.config = config
        self.fc1_latent_proj = DuplicatedLinear(config.hidden_size, latent, config)
        self.fc2_latent_proj = DuplicatedLinear(latent, config.hidden_size, config)

    _stacks: list[Tensor] | None = None
    """fc1 of all experts and fc2 of all experts, each followed by that of a shared expert that
    joins them. If the shared expert has a gate, a third tensor has the weights of the router and of
    the gate, then zeros. The parameters are views of these tensors."""

    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden_states [s, b, hidden] to (the same shape, bias or None)."""
        if torch.is_grad_enabled() or not self.is_stacked:
            return super().forward(hidden_states, *args, **kwargs)
        return self.add_to(None, hidden_states), None

    def one_by_one(self, hidden_states: Tensor) -> Tensor:
        """Run megatron-core's own pass through the experts, one after the other, whether they are
        stacked or not."""
        self.experts.apart = True
        try:
            return super().forward(hidden_states)[0]
        finally:
            self.experts.apart = False

    def stack_experts(self) -> bool:
        """Lay the weights of all routed experts side by side; the parameters become views of them.

        Experts stay apart under sequence parallelism, and if ranks split the experts but not the
        other matrices: only megatron-core's own pass exchanges tokens. They also stay apart if
        their weights cannot be moved: weights in another owner's buffer, such as an optimizer's,
        and weights made in inference mode.

        Returns:
            Whether the weights lie side by side now.
        """
        together = self._together
        if self._stacks is not None and all(map(_are_parts_of, self._stacks, together)):
            return True
        # Stacks that the parameters are no longer views of would only take memory.
        self._stacks = None
        apart = self.config.sequence_parallel or not self._same_tokens
        if apart or not all(_can_move(weight) for weights in together for weight in weights):
            return False
        multiples = 1, 1, _ALIGNED_ROWS
        self._stacks = [
            _stack(weights, rows) for weights, rows in zip(together, multiples, strict=False)
        ]
        return True

    @property
    def _same_tokens(self) -> bool:
        """Whether the ranks that split the experts, or each expert, are the ranks that split the
        other matrices. Then they all have the same tokens, and the sum over them is complete."""
        return self.ep_group.size() * self.experts.tp_group.size() == self.attn_tp_group.size()

    @property
    def is_stacked(self) -> bool:
        """Whether the experts lie side by side; False after the model was moved or copied."""
        return self._stacks is not None and all(
            weights[0].data_ptr() == stack.data_ptr()
            for weights, stack in zip(self._together, self._stacks, strict=True)
        )

    @property
    def _joins(self) -> Shared:
        """Way in which the shared expert joins the routed ones: `apart` unless its width, its input
        and its dtype are the same as theirs, its gate (if any) has the router's dtype, and no other
        rank has a part of the layer."""
        sizes = self.config.mtpkit.moe
        if (
            not self.use_shared_expert
            or self.config.moe_latent_size
            or self.attn_tp_group.size() > 1
        ):
            return "apart"
        shared = self.shared_experts
        gate = self.shared_experts.gate_weight
        alike = (
            shared.linear_fc1.weight.dtype == self.experts.local_experts[0].linear_fc1.weight.dtype
        )
        if not alike or sizes.shared_expert_intermediate_size != sizes.ffn_hidden_size:
            return "apart"
        if gate is None:
            return "whole"
        # The gate's row lies behind the router's in one matrix, which has one dtype.
        return "gated" if gate.dtype == self.router.weight.dtype else "apart"

    @property
    def _together(self) -> list[list[Tensor]]:
        """The weights to lay side by side, see `_stacks`."""
        experts = list(self.experts.local_experts)
        joins = self._joins
        if joins != "apart":
            experts.append(self.shared_experts)
        pairs = [
            [expert.linear_fc1.weight for expert in experts],
            [expert.linear_fc2.weight for expert in experts],
        ]
        if joins == "gated":
            pairs.append([self.router.weight, self.shared_experts.gate_weight])
        return pairs

    def add_to(self, residual: Tensor | None, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Add the stacked experts of norm(x), x [..., hidden], to residual [..., hidden], which may
        be overwritten.

        Each rank adds up the outputs of its experts, or of its parts of them; one sum over ranks
        completes the result.
        """
        assert self._stacks is not None, "stack_experts comes first"
        flat = x.flatten(0, -2)
        activation = self.config.mtpkit.mlp.activation
        joins = self._joins
        first = self.attn_tp_group.rank() == 0  # only the first rank adds the residual
        total = residual.contiguous().flatten(0, -2) if residual is not None and first else None
        some = self.experts.local_experts[0]
        fc1 = self._stacks[0].unflatten(0, (-1, len(some.linear_fc1.weight)))
        fc2 = self._stacks[1].unflatten(0, (-1, len(some.linear_fc2.weight)))
        if joins != "apart" and len(flat) <= _JOINED_TOKENS:
            rows = self._stacks[2] if joins == "gated" else None
            flat, chosen, weights = self.router.choose(flat, norm, rows, joins)
            return expert_mlp(flat, fc1, fc2, chosen, weights, activation, total).view(x.shape)
        fc1 = fc1[: self.num_local_experts]
        fc2 = fc2[: self.num_local_experts]
        flat, chosen, weights = self.router.choose(flat, norm)
        spread = self.ep_group.size() > 1
        if spread:
            # Experts of other ranks get the number after the last one, which `expert_mlp` skips.
            own = chosen - self.ep_group.rank() * self.num_local_experts
            count = self.num_local_experts
            chosen = torch.where((own >= 0) & (own < count), own, count)
        if self.use_shared_expert:
            shared = self.shared_experts
            if activation == "relu2":
                inner = linear(flat, shared.linear_fc1.weight, activation="relu2")
            else:
                inner = ACTIVATIONS[activation](linear(flat, shared.linear_fc1.weight))
            if shared.gate_weight is not None:
                gate = linear(flat, shared.gate_weight)[:, :, None]
                # one gate per token
                inner = sigmoid_gate(inner, gate.expand(-1, inner.shape[1], 1))
            total = linear(inner, shared.linear_fc2.weight, residual=total)

        if self.config.moe_latent_size:
            small = linear(flat, self.fc1_latent_proj.weight)
            mixed = expert_mlp(small, fc1, fc2, chosen, weights, activation, some_elsewhere=spread)
            total = linear(mixed, self.fc2_latent_proj.weight, residual=total)
        else:
            total = expert_mlp(flat, fc1, fc2, chosen, weights, activation, total, spread)
        return all_reduce(total, self.attn_tp_group).view(x.shape)


def _can_move(weight: Tensor) -> bool:
    """Return whether a weight is alone in its storage and was not made in inference mode."""
    alone = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return alone and not weight.is_inference()


def _parts(stack: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    lens = [len(weight) for weight in weights]
    return stack[: sum(lens)].split(lens)


def _are_parts_of(stack: Tensor, weights: list[Tensor]) -> bool:
    places = [part.data_ptr() for part in _parts(stack, weights)]
    return places == [weight.data_ptr() for weight in weights]


def _stack(weights: list[Tensor], multiple: int) -> Tensor:
    """Copy all weights' rows into one tensor, with zeros up to a multiple of rows; the weights
    become its views."""
    padding = weights[0].new_zeros(-sum(map(len, weights)) % multiple, *weights[0].shape[1:])
    stack = torch.cat([*(weight.detach() for weight in weights), padding])
    for weight, part in zip(weights, _parts(stack, weights), strict=True):
        weight.data = part
    return stack


@torch.inference_mode(False)
def stack_experts(model: nn.Module) -> bool:
    """Stack the experts of each layer of `model` for decoding; needs memory for one layer's experts
    beside the model.

    Returns:
        Whether the experts of all layers are stacked, see `MoELayer.stack_experts`.
    """
    stacked = []
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        before = layer.is_stacked
        stacked.append(layer.stack_experts())
        if stacked[-1] and not before and torch.cuda.is_available():
            torch.cuda.empty_cache()  # other allocations cannot reuse the single experts' blocks
    return all(stacked)
