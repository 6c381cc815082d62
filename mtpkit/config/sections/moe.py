"""Sizes and switches of mixtures of experts."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from mtpkit.config.checked import checked
from mtpkit.config.sections.base import Number, Section, Width, up_to

MOST_IN_A_LAYER, _MOST_EXPERTS = 2**14, 2**17
"""The most experts of one layer, and of all layers together."""


@checked("model config", prefix="moe_")
class MoeConfig(Section):
    """Routed experts, with or without a shared one; their activation is `MlpConfig.activation`."""

    letter, title, in_every_file = "E", "mixture of experts", True
    positive = ("num_experts", "ffn_hidden_size", "router_topk", "router_num_groups", "router_group_topk")
    multiples = (("num_experts", "router_num_groups"),)
    at_most = (("router_topk", "num_experts"), ("router_group_topk", "router_num_groups"))

    num_experts: int = Field(default=0, validation_alias="num_moe_experts", ge=0, le=MOST_IN_A_LAYER)
    router_topk: Annotated[int, up_to(2**14)] = 2
    ffn_hidden_size: Width = 0
    shared_expert_intermediate_size: Width = 0
    """0: no shared expert."""
    latent_size: Annotated[int, up_to(2**20)] = 0
    """Width the routed experts work in (Nemotron 3 Super); 0: the hidden size."""
    router_topk_scaling_factor: Annotated[Number, Field(ge=1e-6, le=1e6)] = 1.0
    router_num_groups: Annotated[int, up_to(2**14)] = 1
    router_group_topk: Annotated[int, up_to(2**14)] = 1

    def requirements(self, layers: int) -> Iterator[str]:
        yield from super().requirements(layers)
        if (experts := self.num_experts * layers) > _MOST_EXPERTS:
            yield f"num_moe_experts {self.num_experts} in all layers are {experts}, more than {_MOST_EXPERTS}"
