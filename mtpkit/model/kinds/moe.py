"""Mixtures of experts."""

from collections.abc import Collection, Sequence
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer import TransformerLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from mtpkit.config import ModelConfig
from mtpkit.config.sections import MoeConfig
from mtpkit.model.kinds.base import Experts, Linear, Shape, Slot
from mtpkit.model.kinds.mlp import FeedForward
from mtpkit.model.kinds.settings import LayerMarks, Settings, UnfusedNorm
from mtpkit.model.layers.backend import Backend
from mtpkit.model.layers.moe import MoELayer
from mtpkit.model.layers.residual import MixtureLayer

_COUNTS = ("num_moe_experts", "num_experts")
_EXPERTS = "mlp.experts.experts.linear_fc{}.weight"


class Moe(FeedForward):
    """Routed experts, with or without a shared expert."""

    name = "moe"
    section = MoeConfig
    slot = Slot("E", "moe_layer")
    fp8_products = False
    other_keys = (_COUNTS,)
    unfused_norms = (
        UnfusedNorm(
            "mlp.linear_fc1.layer_norm_weight", "mlp.router.weight", "pre_mlp_layernorm.weight"
        ),
    )
    divided = ("ffn_hidden_size", "shared_expert_intermediate_size")
    divided_experts = ("ffn_hidden_size",)

    def spec(self, backend: Backend, config: ModelConfig) -> ModuleSpec:
        theirs = get_moe_module_spec_for_backend(
            backend.moe_provider, num_experts=config.moe.num_experts
        )
        mlp = partial(MoELayer, *theirs.args, **theirs.keywords)
        parts = TransformerLayerSubmodules(
            pre_mlp_layernorm=backend.norm, mlp=mlp, mlp_bda=get_bias_dropout_add
        )
        return ModuleSpec(module=MixtureLayer, submodules=parts)

    def settings(self, config: ModelConfig) -> dict[str, object]:
        sizes = config.moe
        return dict(
            num_moe_experts=sizes.num_experts,
            moe_router_topk=sizes.router_topk,
            moe_ffn_hidden_size=sizes.ffn_hidden_size,
            moe_shared_expert_intermediate_size=sizes.shared_expert_intermediate_size or None,
            moe_latent_size=sizes.latent_size or None,
            moe_shared_expert_gate=sizes.shared_expert_gate,
            moe_router_score_function=sizes.router_score_function,
            # see layers.moe.Router, which routes
            moe_router_pre_softmax=sizes.router_score_function == "softmax",
            moe_router_enable_expert_bias=sizes.router_enable_expert_bias,
            moe_router_bias_update_rate=0.0,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_router_topk_scaling_factor=sizes.router_topk_scaling_factor,
            moe_token_dispatcher_type="allgather",
        )

    def ignored_settings(self, settings: Settings) -> Collection[str]:
        score = settings.get("moe_router_score_function", MoeConfig.router_score_function)
        return ("moe_router_pre_softmax",) if score == "sigmoid" else ()

    def gpt_layers(self, settings: Settings) -> LayerMarks | bool:
        count = settings.first(*_COUNTS)
        if count is None or not settings.typed(count, 0):
            return False
        return LayerMarks("moe_layer_freq", 1, lambda layer, every: layer % every == 0)

    def tensors(self, config: ModelConfig) -> dict[str, Shape]:
        hidden = config.hidden_size
        sizes = config.moe
        shapes: dict[str, Shape] = {
            "pre_mlp_layernorm.weight": (hidden,),
            "mlp.router.weight": (sizes.num_experts, hidden),
        }
        if sizes.router_enable_expert_bias:
            shapes["mlp.router.expert_bias"] = (sizes.num_experts,)
        experts = self.network(config, _EXPERTS, sizes.latent_size or hidden, sizes.ffn_hidden_size)
        shapes |= {name: (sizes.num_experts, *shape) for name, shape in experts.items()}
        if latent := sizes.latent_size:
            shapes |= {
                "mlp.fc1_latent_proj.weight": (latent, hidden),
                "mlp.fc2_latent_proj.weight": (hidden, latent),
            }
        if width := sizes.shared_expert_intermediate_size:
            shapes |= self.network(config, "mlp.shared_experts.linear_fc{}.weight", hidden, width)
        if sizes.shared_expert_gate:
            shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
        return shapes

    def linears(self, config: ModelConfig) -> Sequence[Linear]:
        """Return none: the router and the routed experts use their own kernels. The linears of
        latent projections, and of a shared expert that runs separately, are left out."""
        return ()

    def experts(self, config: ModelConfig) -> Experts:
        return Experts(
            config.moe.num_experts, config.moe.router_topk, (_EXPERTS.format(1), _EXPERTS.format(2))
        )

    def activations(self, config: ModelConfig) -> int:
        return config.moe.router_topk * (config.moe.ffn_hidden_size + config.hidden_size)
