"""Which drafter fits a model, and how many drafts its heads can make."""

import logging
from typing import Any, Literal

from torch import Tensor

from mtpkit.config import ModelConfig
from mtpkit.engine.drafting.distinct import DistinctDrafter
from mtpkit.engine.drafting.protocol import Drafter, NoDrafter
from mtpkit.engine.drafting.repeated import RepeatedDrafter
from mtpkit.errors import UserError
from mtpkit.model.kinds import kinds_in

_logger = logging.getLogger(__name__)


def make_drafter(
    model: Any,
    num_speculative_tokens: int,
    block_size: int,
    sample: bool,
    draft_token_ids: Tensor | None = None,
) -> Drafter:
    """The drafter that fits the heads of `model`.

    Args:
        num_speculative_tokens: the largest K.
        sample: draw drafts from the heads' distribution.
        draft_token_ids: [D] int64, the tokens that drafts are chosen among; None: all.

    Raises:
        UserError: the model has no heads, too few, or of a kind that cannot be unrolled.
    """
    config, depths = model.mtpkit_config, num_speculative_tokens
    if depths == 0:
        return NoDrafter()
    check_depths(config, depths)
    if not config.mtp.repeated:
        return DistinctDrafter(model, depths, block_size, sample, draft_token_ids)
    if config.mtp.depths_known and depths > config.mtp.num_depths:
        _logger.warning(
            "num_speculative_tokens is %d, but the head is of %d depths: later drafts were not trained",
            depths,
            config.mtp.num_depths,
        )
    return RepeatedDrafter(model, depths, block_size, sample, draft_token_ids)


def default_depths(config: ModelConfig) -> int:
    """K where a user names none: as many drafts as the heads of a model were trained for and can make."""
    return 1 if _draft_one(config) else config.mtp.default_drafts


def adaptive_depths(config: ModelConfig) -> int:
    """The largest K that "auto" tries: distinct heads make a draft each, a repeated one those it was trained for."""
    if _draft_one(config):
        return 1
    return config.mtp.most_adaptive_drafts if config.mtp.repeated else config.mtp.num_depths


def check_depths(config: ModelConfig, depths: int | Literal["auto"], name: str = "num_speculative_tokens") -> None:
    """Refuse to make more drafts than the heads of a model can.

    Args:
        name: of the setting, in the error.

    Raises:
        UserError: there are no heads, too few, or they are of a kind that cannot be unrolled.
    """
    if depths == 0:
        return
    given = f"{name} is {depths!r}, but"
    if not config.mtp.num_depths:
        raise UserError(f"{given} the model has no MTP heads: train some, or set it to 0")
    if config.mtp.repeated or depths == "auto":
        return
    if _draft_one(config) and depths > 1:
        raise UserError(
            f"{given} distinct heads with Mamba layers (MTP pattern {config.mtp.pattern!r}) draft one token: "
            "set it to 1"
        )
    if depths > config.mtp.num_depths:
        raise UserError(
            f"{given} the model has {config.mtp.num_depths} distinct MTP heads: set it to {config.mtp.num_depths} "
            "or less"
        )


def _draft_one(config: ModelConfig) -> bool:
    """Whether heads draft one token alone: the recurrent states of distinct ones are not taken back."""
    recurrent = any(kind.memory(config).state for kind in kinds_in(config.mtp.pattern))
    return bool(config.mtp.num_depths) and not config.mtp.repeated and recurrent
