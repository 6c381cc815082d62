"""Choice of the drafter for a model, and the check of how many drafts its heads can make."""

from typing import Literal

from torch import Tensor

from mtpkit.config import ModelConfig
from mtpkit.engine.drafting.distinct import DistinctDrafter
from mtpkit.engine.drafting.protocol import Drafter, NoDrafter
from mtpkit.engine.drafting.repeated import RepeatedDrafter
from mtpkit.engine.drafting.trees import DistinctTreeDrafter, RepeatedTreeDrafter
from mtpkit.engine.requests.tree import Tree
from mtpkit.errors import UserError
from mtpkit.model import AttentionWindow
from mtpkit.model.hybrid import HybridModel


def make_drafter(
    model: HybridModel,
    num_speculative_tokens: int,
    block_size: int,
    sample: bool,
    draft_token_ids: Tensor | None = None,
    tree: Tree | None = None,
    head_dtype: str | None = None,
    window: AttentionWindow | None = None,
) -> Drafter:
    """Make the drafter that fits the heads of `model`.

    Args:
        num_speculative_tokens: the largest K, already checked by `check_depths`.
        sample: draw drafts from the heads' distribution.
        draft_token_ids: [D] int64, the tokens that drafts are chosen from; None: all tokens.
        tree: shape of the drafts; None: chains.
        head_dtype: type of a copy of the lm_head that drafts are chosen by, see
            `mtpkit.model.quantized.for_drafts`; None: they are chosen by itself.
        window: what the heads' attention layers see.
    """
    config = model.mtpkit_config
    depths = num_speculative_tokens
    if depths == 0:
        return NoDrafter()
    repeated = config.mtp.repeated or depths == 1
    settings = (model, depths, block_size, sample, draft_token_ids, head_dtype, window)
    if tree is not None:
        return (RepeatedTreeDrafter if repeated else DistinctTreeDrafter)(*settings, tree)
    return (RepeatedDrafter if repeated else DistinctDrafter)(*settings)


def check_depths(config: ModelConfig, depths: int | Literal["auto"]) -> None:
    """Refuse to make more drafts than the heads of a model can.

    Raises:
        UserError: the model has no heads, or too few.
    """
    if depths == 0:
        return
    given = f"num_speculative_tokens is {depths!r}, but"
    if not config.mtp.num_depths:
        raise UserError(f"{given} the model has no MTP heads: train some, or set it to 0")
    if not config.mtp.repeated and depths != "auto" and depths > config.mtp.num_depths:
        raise UserError(
            f"{given} the model has {config.mtp.num_depths} distinct MTP heads: set it to"
            f" {config.mtp.num_depths} or less"
        )
    window = config.mtp.attention_window
    if depths != "auto" and 0 < window < depths:
        raise UserError(
            f"{given} the heads attend to the last {window} positions, and a draft to all drafts"
            f" before it: set it to {window} or less"
        )
