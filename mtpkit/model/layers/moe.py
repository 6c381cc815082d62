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
from mtpkit.kernels.moe import route, router_logits
from mtpkit.kernels.moe.reference import Shared
from mtpkit.model.collectives import all_reduce
from mtpkit.model.formats.weight import (
    QuantizedStack,
    QuantizedWeight,
    Stack,
    Weight,
    input_rule,
    layout_of,
    multiply,
    product,
    quantizes_inputs,
    run_experts,
)
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

    quantizable = True

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
        return product(x, self.weight), None


class Router(TopKRouter):
    """megatron-core's router, run on the device of its weights (the original moves CPU weights to
    the GPU). It routes with `mtpkit.kernels.moe.route`, which has options that megatron-core's
    routing lacks. Its bias is not updated."""

    config: TransformerConfig
    draw: Tensor | None = None
    """See `draw_experts`."""

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
        return route(logits, bias, *settings, shared, self.draw)


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

    _stacks: list[Stack] | None = None
    """fc1 of all experts and fc2 of all experts, each followed by that of a shared expert that
    joins them. If the shared expert has a gate, a third tensor has the weights of the router and of
    the gate, then zeros. The weights are views of these tensors."""

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
        """Lay the weights of all routed experts side by side; the weights become views of them.

        Experts stay apart under sequence parallelism, and if ranks split the experts but not the
        other matrices: only megatron-core's own pass exchanges tokens. They also stay apart if
        their weights cannot be moved: weights in another owner's buffer, such as an optimizer's,
        and weights made in inference mode. Quantised weights stay apart unless all have one
        `QuantizedWeight.layout`, and both products one rule for their inputs.

        Returns:
            Whether the weights lie side by side now.
        """
        together = self._together
        if self._stacks is not None and all(map(_are_parts_of, self._stacks, together)):
            return True
        # Stacks that the parameters are no longer views of would only take memory.
        self._stacks = None
        apart = self.config.sequence_parallel or not self._same_tokens
        if apart or not _fit(together):
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
        and its dtype or format are the same as theirs, its gate (if any) has the router's dtype,
        and no other rank has a part of the layer."""
        sizes = self.config.mtpkit.moe
        if (
            not self.use_shared_expert
            or self.config.moe_latent_size
            or self.attn_tp_group.size() > 1
        ):
            return "apart"
        shared = self.shared_experts
        some = self.experts.local_experts[0]
        gate = self.shared_experts.gate_weight
        alike = all(
            layout_of(getattr(shared, name).weight) == layout_of(getattr(some, name).weight)
            for name in ("linear_fc1", "linear_fc2")
        )
        if not alike or sizes.shared_expert_intermediate_size != sizes.ffn_hidden_size:
            return "apart"
        if gate is None:
            return "whole"
        # The gate's row lies behind the router's in one matrix, which has one dtype.
        return "gated" if gate.dtype == self.router.weight.dtype else "apart"

    @property
    def _together(self) -> list[list[Weight]]:
        """The weights to lay side by side, see `_stacks`."""
        experts = list(self.experts.local_experts)
        joins = self._joins
        if joins != "apart":
            experts.append(self.shared_experts)
        pairs: list[list[Weight]] = [
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
        completes the result. A latent mixture whose last projection quantises its inputs needs a
        sum before that projection, too.
        """
        assert self._stacks is not None, "stack_experts comes first"
        flat = x.flatten(0, -2)
        activation = self.config.mtpkit.mlp.activation
        joins = self._joins
        first = self.attn_tp_group.rank() == 0  # only the first rank adds the residual
        total = residual.contiguous().flatten(0, -2) if residual is not None and first else None
        if joins != "apart" and len(flat) <= _JOINED_TOKENS:
            rows = self._stacks[2] if joins == "gated" else None
            assert not isinstance(rows, QuantizedStack)
            flat, chosen, weights = self.router.choose(flat, norm, rows, joins)
            both = self._first(self.num_local_experts + 1)
            return run_experts(flat, *both, chosen, weights, activation, total).view(x.shape)
        fc1, fc2 = self._first(self.num_local_experts)
        flat, chosen, weights = self.router.choose(flat, norm)
        spread = self.ep_group.size() > 1
        if spread:
            # Experts of other ranks get the number after the last one, which `expert_mlp` skips.
            own = chosen - self.ep_group.rank() * self.num_local_experts
            count = self.num_local_experts
            chosen = torch.where((own >= 0) & (own < count), own, count)
        if self.use_shared_expert:
            shared = self.shared_experts
            quantized = isinstance(shared.linear_fc2.weight, QuantizedWeight)
            # Quantised inputs of the second product take swiglu in the launch that makes them.
            last = quantized and activation == "swiglu"
            if activation == "relu2":
                inner = multiply(flat, shared.linear_fc1.weight, activation="relu2")
            else:
                inner = multiply(flat, shared.linear_fc1.weight)
                inner = inner if last else ACTIVATIONS[activation](inner)
            gate = None
            if shared.gate_weight is not None:
                gate = multiply(flat, shared.gate_weight)[:, :, None]
            if gate is not None and quantized:
                # After the product, as in training: it may quantise its input.
                outer = _gated(multiply(inner, shared.linear_fc2.weight, swiglu=last), gate)
                total = outer if total is None else total + outer
            else:
                inner = inner if gate is None else _gated(inner, gate)
                weight = shared.linear_fc2.weight
                total = multiply(inner, weight, swiglu=last, residual=total)

        if self.config.moe_latent_size:
            small = multiply(flat, self.fc1_latent_proj.weight)
            mixed = run_experts(small, fc1, fc2, chosen, weights, activation, None, spread)
            if quantizes_inputs(self.fc2_latent_proj.weight):
                # Quantised parts do not add up to the quantised sum. So the sum over ranks comes
                # first, and the first rank alone contributes its product to the sum below.
                mixed = all_reduce(mixed, self.attn_tp_group)
                mixed = mixed if first else torch.zeros_like(mixed)
            total = multiply(mixed, self.fc2_latent_proj.weight, residual=total)
        else:
            total = run_experts(flat, fc1, fc2, chosen, weights, activation, total, spread)
        return all_reduce(total, self.attn_tp_group).view(x.shape)

    def _first(self, count: int) -> tuple[Stack, Stack]:
        """fc1 and fc2 of the first experts of the stacks."""
        assert self._stacks is not None
        some = self.experts.local_experts[0]
        found = []
        for stack, linear in zip(self._stacks, (some.linear_fc1, some.linear_fc2), strict=False):
            if isinstance(stack, QuantizedStack):
                found.append(stack.first(count))
            else:
                found.append(stack.unflatten(0, (-1, len(linear.weight)))[:count])
        return found[0], found[1]


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [T, n] by the sigmoid of one gate per token [T, 1, 1]."""
    return sigmoid_gate(x, gate.expand(-1, x.shape[1], 1))


def _fit(together: list[list[Weight]]) -> bool:
    """Return whether weights can be stacked, see `MoELayer.stack_experts`."""
    for weights in together:
        layout = layout_of(weights[0])
        if layout is None or any(layout_of(weight) != layout for weight in weights):
            return False
        if not all(_can_move(weight) for weight in weights if isinstance(weight, Tensor)):
            return False
    return input_rule(together[0][0]) == input_rule(together[1][0])


def _can_move(weight: Tensor) -> bool:
    """Return whether a weight is alone in its storage and was not made in inference mode."""
    alone = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return alone and not weight.is_inference()


def _parts(stack: Tensor, weights: list[Weight]) -> tuple[Tensor, ...]:
    lens = [len(weight) for weight in weights]
    return stack[: sum(lens)].split(lens)


def _are_parts_of(stack: Stack, weights: list[Weight]) -> bool:
    if isinstance(stack, QuantizedStack):
        return stack.holds(weights)
    places = [part.data_ptr() for part in _parts(stack, weights)]
    return places == [weight.data_ptr() for weight in weights]


def _stack(weights: list[Weight], multiple: int) -> Stack:
    """Copy all weights' rows into one tensor, with zeros up to a multiple of rows, or quantised
    ones into a stack; the weights become its views."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if not plain:
        return QuantizedStack([each for each in weights if isinstance(each, QuantizedWeight)])
    padding = plain[0].new_zeros(-sum(map(len, plain)) % multiple, *plain[0].shape[1:])
    stack = torch.cat([*(weight.detach() for weight in plain), padding])
    for weight, part in zip(plain, _parts(stack, weights), strict=True):
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


def draw_experts(model: nn.Module) -> Tensor | None:
    """Give all routers of `model` one switch, [1] int32, with which they draw each token's experts
    at random while it is not 0: uniformly, distinct, anew in each layer and step.

    It is read on the device, also by CUDA graphs that are captured afterwards, so that a graph
    serves both ways. At first it is 0.

    Returns:
        The switch; None if the model has no routers.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        return None
    switch = torch.zeros(1, dtype=torch.int32, device=routers[0].weight.device)
    for router in routers:
        router.draw = switch
    return switch
