"""Linears as the layers call them, the kernels that run around them, and mixtures of experts.

A layer's one call holds the norm of its input, the activation and the residual too. The note says which of these are
fused and which run apart, as further kernels within the same call: that depends on the rows.

Shape legend: R rows (requests), T = 1 + K tokens per row, N = R * T tokens.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtpkit.bench.kernel_inputs import Args, Case, Shapes, size
from mtpkit.config import ModelConfig
from mtpkit.config.sections import AttentionConfig, GatedDeltaNetConfig, Mamba2Config, MlaConfig, MlpConfig
from mtpkit.kernels import activation as activations
from mtpkit.kernels import moe, norm, rotary
from mtpkit.kernels.linear import linear, reference


@dataclass(frozen=True)
class Call:
    """A layer's weight [outputs, width], and what the layer has `linear` do around it."""

    name: str
    outputs: int
    width: int
    norm: bool = False
    gated: bool = False
    """The norm is Mamba's, of the input times silu(gate)."""
    activation: str | None = None
    """`relu2` or none: others run apart."""
    residual: bool = False
    bias: bool = False

    def fused(self, shapes: Shapes) -> list[str]:
        """What is done around the product of N tokens by its kernel."""
        around = ["residual"] * self.residual
        if shapes.device.type != "cuda" or shapes.dtype != torch.bfloat16:
            return around
        from mtpkit.kernels.linear import triton as kernel  # there may be none without a GPU

        count = shapes.count
        if count > kernel.MAX_ROWS or kernel.choose_tile(self.outputs, self.width, count) is None:
            return around
        norm = ["norm"] * (self.norm and count <= kernel.NORMED_ROWS)
        return norm + ([self.activation] if self.activation else []) + around

    def note(self, shapes: Shapes) -> str:
        """Parts of the call that are fused into the kernel of the product, and parts that run apart."""
        around = [("norm", self.norm), (self.activation, self.activation), ("residual", self.residual)]
        fused = self.fused(shapes)
        apart = [name for name, there in around if there and name not in fused] + ["gated norm"] * self.gated
        return ", ".join(
            f"{' + '.join(map(str, part))} {how}" for part, how in ((fused, "fused"), (apart, "apart")) if part
        )


def calls(shapes: Shapes) -> Iterator[Call]:
    """The calls of each layer kind that the model has, of the heads' own and of the vocabulary; see
    `mtpkit.model.layers`."""
    config = shapes.config
    hidden, inner = config.hidden_size, config.mamba2.inner
    sizes, width = config.attention, config.mlp.ffn_hidden_size
    if config.has(Mamba2Config):
        yield Call("in_proj", config.mamba2.projected, hidden, norm=True)
        yield Call("out_proj", hidden, inner, gated=True, residual=True)
    if config.has(GatedDeltaNetConfig):
        delta = config.gated_delta_net
        yield Call("in_proj", delta.projected, hidden, norm=True)
        yield Call("out_proj", hidden, delta.value_width, residual=True)
    if config.has(AttentionConfig):
        yield Call("linear_qkv", sizes.projected, hidden, norm=True, bias=sizes.add_qkv_bias)
        yield Call("linear_proj", hidden, sizes.num_attention_heads * sizes.kv_channels, residual=True)
    if config.has(MlaConfig):
        yield from _latent(config)
    if config.has(MlpConfig):
        rows, relu2 = (2 * width, None) if config.mlp.gated else (width, "relu2")
        yield Call("linear_fc1", rows, hidden, norm=True, activation=relu2)
        yield Call("linear_fc2", hidden, width, residual=True)
    if config.mtp.num_depths:
        yield Call("eh_proj", hidden, 2 * hidden)
    yield Call("lm_head", config.vocab_size, hidden)


def _latent(config: ModelConfig) -> Iterator[Call]:
    """The calls of multi-head latent attention in decoding, where the up projection of latents is absorbed."""
    sizes, hidden, heads = config.mla, config.hidden_size, config.attention.num_attention_heads
    if rank := sizes.q_lora_rank:
        yield Call("linear_q_down_proj", rank, hidden)
        yield Call("linear_q_up_proj", heads * sizes.qk_width, rank, norm=config.attention.qk_layernorm)
    else:
        yield Call("linear_q_proj", heads * sizes.qk_width, hidden, norm=sizes.q_proj_layernorm)
    yield Call("linear_kv_down_proj", sizes.row, hidden)
    yield Call("linear_proj", hidden, heads * sizes.v_head_dim, residual=True)


def linear_case(shapes: Shapes, of: Call) -> Case:
    """The matrix product of a call, with what is done around it."""
    config, count = shapes.config, shapes.count
    group_size = of.width // config.mamba2.num_groups if of.gated else None

    def make() -> Args:
        return (
            shapes.normal(count, of.width),
            _matrix(shapes, of.outputs, of.width),
            shapes.normal(of.width) if of.norm or of.gated else None,
            _gate(shapes) if of.gated else None,
            shapes.normal(count, of.outputs) if of.residual else None,
            shapes.normal(of.outputs) if of.bias else None,
        )

    def run(op: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        x, weight, norm_weight, gate, residual, bias = args
        around = dict(eps=config.layernorm_epsilon, group_size=group_size, activation=of.activation)
        around["zero_centered"] = of.norm and config.layernorm_zero_centered_gamma
        return op(x, weight, norm_weight=norm_weight, gate=gate, bias=bias, residual=residual, **around)

    def in_float(*args: Tensor | None) -> Tensor:
        return run(reference.linear, *(None if arg is None else arg.float() for arg in args)).to(shapes.dtype)

    return Case(
        partial(run, linear),
        f"[{count}, {of.width}] x [{of.outputs}, {of.width}]",
        make,
        lambda args: size(*args) + count * of.outputs * shapes.dtype.itemsize,
        flops=2.0 * count * of.outputs * of.width,
        name=f"linear {of.name}",
        reference=in_float,
        note=lambda _: of.note(shapes),
        scratch=(4,),
    )


def _matrix(shapes: Shapes, *sizes: int) -> Tensor:
    return shapes.normal(*sizes, std=1 / math.sqrt(sizes[-1]))


def _gate(shapes: Shapes) -> Tensor:
    """[N, inner] z, a slice of Mamba's projection."""
    config = shapes.config
    return shapes.normal(shapes.count, config.mamba2.projected)[:, : config.mamba2.inner]


def _in_and_out(args: Args) -> float:
    """Bytes of an op that reads all tensors and whose result is as large as the first one."""
    return size(args[0], *args)


def rms_norm(shapes: Shapes) -> Case:
    """The norm as a kernel of its own: always after the last layer, before others where the linear does not fuse it."""
    config, count, hidden = shapes.config, shapes.count, shapes.config.hidden_size
    rest = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
    fusing = ["norm" in call.fused(shapes) for call in calls(shapes) if call.norm]
    return Case(
        norm.rms_norm,
        f"[{count}, {hidden}]",
        lambda: (shapes.normal(count, hidden), shapes.normal(hidden), *rest),
        _in_and_out,
        note=lambda _: "final norm, others fused" if fusing and all(fusing) else "",
    )


def gated_norm(shapes: Shapes) -> Case:
    """The norm before Mamba's output projection, which no linear fuses."""
    config, count = shapes.config, shapes.count
    inner = config.mamba2.inner

    def make() -> Args:
        group_size = inner // config.mamba2.num_groups
        return shapes.normal(count, inner), _gate(shapes), shapes.normal(inner), group_size, config.layernorm_epsilon

    return Case(norm.gated_rms_norm, f"[{count}, {inner}]", make, _in_and_out)


def activation(shapes: Shapes) -> Iterator[Case]:
    """The activation of feed-forward layers, unless fc1 fuses it."""
    count, width = shapes.count, shapes.config.mlp.ffn_hidden_size
    if shapes.config.mlp.activation == "swiglu":
        yield Case(
            activations.swiglu,
            f"[{count}, {2 * width}]",
            lambda: (shapes.normal(count, 2 * width),),
            lambda args: 1.5 * size(args[0]),
        )
    elif not any("relu2" in call.fused(shapes) for call in calls(shapes)):
        yield Case(activations.relu2, f"[{count}, {width}]", lambda: (shapes.normal(count, width),), _in_and_out)


def rotate(shapes: Shapes) -> Case:
    """Rotary embedding of a step's queries, views of the projection."""
    sizes, count = shapes.config.attention, shapes.count
    groups, width = sizes.num_query_groups, sizes.kv_channels
    per_group, half = sizes.num_attention_heads // groups, int(width * sizes.rotary_percent) // 2

    def make() -> Args:
        projected = shapes.normal(count, groups, per_group + 2, width)
        return projected[:, :, :-2], shapes.full(shapes.context_len, 1, count), shapes.normal(half).float()

    return Case(rotary.rotate, f"[{count}, {groups * per_group}, {width}]", make, lambda args: 2 * size(args[0]))


def sigmoid_gate(shapes: Shapes) -> Case:
    """The gate of attention's output, a slice of the projection."""
    sizes, count = shapes.config.attention, shapes.count
    groups, width = sizes.num_query_groups, sizes.num_attention_heads * sizes.kv_channels

    def make() -> Args:
        projected = shapes.normal(count, groups, sizes.projected // groups)
        return shapes.normal(count, width), projected[..., width // groups : 2 * width // groups]

    return Case(activations.sigmoid_gate, f"[{count}, {width}]", make, lambda args: 3 * size(args[0]))


def router_logits(shapes: Shapes) -> Case:
    """The norm before a mixture of experts and the router's product."""
    config, count = shapes.config, shapes.count
    width, experts = config.hidden_size, config.moe.num_experts

    def make() -> Args:
        zero_centered = config.layernorm_zero_centered_gamma
        norm = shapes.normal(width), config.layernorm_epsilon, zero_centered
        return shapes.normal(count, width), *norm, _matrix(shapes, experts, width)

    return Case(
        moe.router_logits,
        f"[{count}, {width}] x [{experts}, {width}]",
        make,
        lambda args: 2 * size(args[0]) + size(args[-1]) + 4 * count * experts,
        judge=lambda args, out: out[1],
    )


def route(shapes: Shapes, tokens: int) -> Case:
    """The experts of each token."""
    config, count = shapes.config, shapes.config.moe.num_experts
    rest = config.moe.routing

    def make() -> Args:
        bias = shapes.normal(count).float() if config.moe.router_enable_expert_bias else None
        return shapes.normal(tokens, count).float(), bias, *rest

    def chosen(args: Args, out: tuple[Tensor, Tensor]) -> Tensor:
        expert_ids, weights = out
        return args[0].new_zeros(args[0].shape).scatter(1, expert_ids, weights)

    return Case(
        moe.route,
        f"[{tokens}, {count}], {rest.top_k} each",
        make,
        lambda args: size(args[0], args[1]) + tokens * rest.top_k * 12,
        judge=chosen,
    )


def expert_mlp(shapes: Shapes, tokens: int) -> Case:
    """The routed experts, each token's drawn at random; bytes are of the experts that were drawn."""
    config = shapes.config
    count, inner, top_k = config.moe.num_experts, config.moe.ffn_hidden_size, config.moe.router_topk
    width, rows = config.moe.latent_size or config.hidden_size, inner * (2 if config.mlp.activation == "swiglu" else 1)

    def draw(weights: Args) -> Args:
        expert_ids = shapes.uniform(tokens, count).topk(top_k).indices
        mixing = shapes.uniform(tokens, top_k).float()
        return shapes.normal(tokens, width), *weights, expert_ids, mixing, config.mlp.activation

    def make() -> Args:
        return draw((_matrix(shapes, count, rows, width), _matrix(shapes, count, width, inner)))

    def moved(args: Args) -> float:
        x, fc1, fc2, expert_ids, *_ = args
        return len(expert_ids.unique()) / count * size(fc1, fc2) + 2 * size(x)

    return Case(
        moe.expert_mlp,
        f"[{tokens}, {width}], {top_k} of {count} x [{rows}, {width}]",
        make,
        moved,
        flops=2.0 * tokens * top_k * width * (rows + inner),
        more=lambda args: draw(args[1:3]),
    )
