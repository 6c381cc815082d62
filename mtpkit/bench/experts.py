"""Experts drawn at random while a benchmark times its steps.

Routers, even of random weights, prefer some experts to others. A step then reads fewer experts than
its limit counts, and its share of the limit is too large.
"""

from mtpkit.bench.timing import synchronize
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError
from mtpkit.model import draw_experts
from mtpkit.model.hybrid import HybridModel
from mtpkit.model.kinds import kinds_in


def check_has_experts(wanted: bool, config: ModelConfig) -> None:
    """Refuse to draw experts of a model that has none.

    Raises:
        UserError: experts are `wanted`, but neither the base nor a head has any.
    """
    kinds = kinds_in(config.pattern + config.mtp.pattern)
    if wanted and not any(kind.experts(config).count for kind in kinds):
        raise UserError(
            "random_experts is for mixtures of experts, and this model has none: leave it out"
        )


class ExpertDraws:
    """Context in which a model draws its experts at random, if `wanted`; elsewhere its routers
    choose, so that tokens can be checked. Made before the engines, whose graphs read the switch."""

    def __init__(self, model: HybridModel, wanted: bool) -> None:
        self.device = next(model.parameters()).device
        self._switch = draw_experts(model) if wanted else None

    def __enter__(self) -> None:
        self._set(1)

    def __exit__(self, *_: object) -> None:
        self._set(0)

    def _set(self, value: int) -> None:
        if self._switch is not None:
            # Steps that were launched before, perhaps on another stream, are not to see it.
            synchronize(self.device)
            self._switch.fill_(value)
            synchronize(self.device)
