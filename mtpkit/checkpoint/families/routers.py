"""Lines of `config.json` about the routing of tokens to experts."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtpkit.checkpoint.families.keys import Line, Settings
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig

_GROUP_BEST = 2
"""Number of top experts whose scores add up to the score of their group, however many experts are
chosen."""


@dataclass(frozen=True)
class SigmoidRouter(Line):
    """DeepSeek-V3's router: sigmoid scores, a bias for choosing experts, groups scored by their two
    best experts."""

    kind: str = "moe"

    def names(self) -> Mapping[str, str]:
        return {
            "moe_router_num_groups": "n_group",
            "moe_router_group_topk": "topk_group",
            "moe_router_topk_scaling_factor": "routed_scaling_factor",
        }

    def fields(self) -> Collection[str]:
        return (*self.names(), "moe_router_group_best", "moe_router_normalize")

    def read(self, file: Values) -> Settings:
        file.require("scoring_func", "sigmoid")
        file.require("topk_method", "noaux_tc")
        topk, groups, best = (
            file.typed(key, 1) for key in ("num_experts_per_tok", "n_group", "topk_group")
        )
        scale = file.get("routed_scaling_factor", 1.0)
        normalize = file.typed("norm_topk_prob", True)
        found: dict[str, object] = dict(zip(self.names(), (groups, best, scale), strict=True))
        if normalize != (topk > 1):
            found["moe_router_normalize"] = normalize
        if groups > 1 and topk // max(1, best) != _GROUP_BEST:
            found["moe_router_group_best"] = _GROUP_BEST
        return found

    def write(self, config: ModelConfig, original: Settings | None) -> Settings:
        written: dict[str, object] = {
            key: config.value(field) for field, key in self.names().items()
        }
        return written | {"norm_topk_prob": config.moe.routing.normalize}

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        routing = config.moe.routing
        if routing.num_groups > 1 and routing.group_best != _GROUP_BEST:
            yield (
                f"groups of experts scored by their best {routing.group_best}, only by their best"
                f" {_GROUP_BEST}"
            )
