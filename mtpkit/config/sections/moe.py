"""Sizes and switches of mixtures of experts."""

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Number, Section, Width, up_to

MOST_IN_A_LAYER = 2**14
MOST_EXPERTS = 2**17
"""The most experts of one layer, and of all layers together."""


ScoreFunction = Literal["sigmoid", "softmax"]


class Routing(NamedTuple):
    """Settings of a router's choice of experts: the arguments of `mtpkit.kernels.moe.route` after
    logits and bias."""

    top_k: int
    scale: float
    num_groups: int
    top_groups: int
    group_best: int
    score: ScoreFunction
    normalize: bool


@checked("model config", prefix="moe_")
class MoeConfig(Section):
    """Routed experts, with or without a shared one; their activation is `MlpConfig.activation`."""

    letter = "E"
    also = ("-",)
    title = "mixture of experts"
    positive = (
        "num_experts",
        "ffn_hidden_size",
        "router_topk",
        "router_num_groups",
        "router_group_topk",
    )
    multiples = (("num_experts", "router_num_groups"),)
    at_most = (("router_topk", "num_experts"), ("router_group_topk", "router_num_groups"))

    num_experts: int = Field(
        default=0, validation_alias="num_moe_experts", ge=0, le=MOST_IN_A_LAYER
    )
    router_topk: Annotated[int, up_to(2**14)] = 2
    ffn_hidden_size: Width = 0
    shared_expert_intermediate_size: Width = 0
    """Inner width of the shared expert; 0: no shared expert."""
    latent_size: Annotated[int, up_to(2**20)] = 0
    """Width in which the routed experts work (Nemotron 3 Super); 0: the hidden size."""
    router_topk_scaling_factor: Annotated[Number, Field(ge=1e-6, le=1e6)] = 1.0
    router_num_groups: Annotated[int, up_to(2**14)] = 1
    router_group_topk: Annotated[int, up_to(2**14)] = 1
    router_group_best: Annotated[int, up_to(2**14)] = 0
    """Number of best experts whose scores add up to the score of their group: 2 in Hugging Face's
    models. 0: Megatron's number, moe_router_topk // moe_router_group_topk."""
    router_score_function: ScoreFunction = "sigmoid"
    router_enable_expert_bias: bool = True
    """Whether a bias is added to sigmoid scores for the choice of experts, not for their weights
    (DeepSeek-V3)."""
    router_pre_softmax: bool = False
    """Whether softmax scores over all experts are used as weights as they are; otherwise, the
    chosen experts' weights are scaled to add up to 1."""
    router_normalize: bool | None = None
    """Whether the chosen sigmoid scores are divided by their sum; None: if several are chosen, as
    in Megatron."""
    shared_expert_gate: bool = False
    """Whether the shared expert's output is multiplied by the sigmoid of a gate, one number per
    token (Qwen3-Next)."""

    @property
    def routing(self) -> Routing:
        """Settings by which the router chooses and weighs experts."""
        top_k = self.router_topk
        groups = self.router_group_topk
        normalize = top_k > 1 if self.router_normalize is None else self.router_normalize
        if self.router_score_function == "softmax":
            normalize = not self.router_pre_softmax
        best = self.router_group_best or top_k // max(1, groups)
        scale = self.router_topk_scaling_factor
        return Routing(
            top_k,
            scale,
            self.router_num_groups,
            groups,
            best,
            self.router_score_function,
            normalize,
        )

    def requirements(self, layers: int) -> Iterator[str]:
        yield from super().requirements(layers)
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            yield "moe_shared_expert_gate true without moe_shared_expert_intermediate_size"
        yield from self._routing_problems()
        if (experts := self.num_experts * layers) > MOST_EXPERTS:
            yield (
                f"num_moe_experts {self.num_experts} in all layers are {experts}, more than"
                f" {MOST_EXPERTS}"
            )

    def _routing_problems(self) -> Iterator[str]:
        grouped = self.router_num_groups > 1
        # A number of groups of 0 is reported by `positive`, which does not end these checks.
        size = self.num_experts // max(1, self.router_num_groups)
        if self.router_score_function == "softmax":
            if self.router_enable_expert_bias:
                yield (
                    "moe_router_enable_expert_bias true needs moe_router_score_function 'sigmoid',"
                    " not 'softmax'"
                )
            if self.router_normalize is not None:
                yield (
                    "moe_router_normalize is for 'sigmoid' scores; for 'softmax' scores set"
                    " moe_router_pre_softmax"
                )
            if grouped:
                grouping = f"moe_router_num_groups {self.router_num_groups}"
                yield f"{grouping} needs moe_router_score_function 'sigmoid', not 'softmax'"
        elif self.router_pre_softmax:
            yield "moe_router_pre_softmax true without moe_router_score_function 'softmax'"
        if grouped and not 1 <= (best := self.routing.group_best) <= size:
            yield (
                f"the best {best} experts of a group of {size} cannot be its score: set"
                " moe_router_group_best"
            )
        if grouped and self.router_topk > self.router_group_topk * size:
            yield (
                f"moe_router_topk {self.router_topk} exceeds the experts of moe_router_group_topk"
                f" groups of {size}"
            )
