"""What is made of the arguments of `LLM` once the model is there."""

import functools
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from mtpkit.config import ModelConfig
from mtpkit.engine.drafting import check_depths
from mtpkit.errors import UserError
from mtpkit.kernels.dispatch import CHOICE, on_kernels

_logger = logging.getLogger(__name__)


def resolve_drafts(config: ModelConfig, k: int | Literal["auto"] | None) -> int:
    """The most drafts per step: what is asked for, or by default what the heads were trained for.

    Raises:
        UserError: the heads cannot make so many.
    """
    if k is None:
        return config.mtp.default_drafts
    check_depths(config, k)
    return config.mtp.most_adaptive_drafts if k == "auto" else k


@functools.cache
def warn_untrained(model: str, k: int, depths: int) -> None:
    """Say, once per process, that a repeated head is unrolled further than it was trained."""
    _logger.warning(
        "num_speculative_tokens is %d, but the head of %s is of %d depths: later drafts were not trained",
        k,
        model,
        depths,
    )


def report_unused(depths: int, model: ModelConfig, **settings: object) -> None:
    """Say which settings, and whether heads, have no effect because nothing is drafted."""
    if depths:
        return
    for name in (name for name, value in settings.items() if value is not None):
        _logger.warning("%s has no effect: num_speculative_tokens is 0", name)
    if model.mtp.num_depths:
        _logger.info("the model's MTP heads are not used: num_speculative_tokens is 0")


def execution(
    weight: torch.Tensor, stacked: bool, async_scheduling: bool | None, enforce_eager: bool
) -> tuple[bool, bool]:
    """Whether steps run ahead of their results, and whether they are CUDA graphs; `stacked`: experts are, if any.

    Raises:
        UserError: the GPU is not the current one, on which streams and kernels run.
    """
    device, on_gpu = weight.device, weight.is_cuda
    if on_gpu and device.index not in (None, torch.cuda.current_device()):
        raise UserError(
            f"device is {device}, but cuda:{torch.cuda.current_device()} is current: call "
            f"torch.cuda.set_device({device.index}) first, or choose the GPU by CUDA_VISIBLE_DEVICES"
        )
    reason = ""
    if not stacked:
        reason = "the experts' weights cannot be laid side by side, and going through them one by one asks the device"
    if on_gpu and not on_kernels(weight):
        reason = f"{CHOICE} chooses the plain twins of kernels, which ask the device"
    if on_gpu and (enforce_eager or reason):
        _logger.info("decoding without CUDA graphs: %s", reason or "enforce_eager is set")
    ahead = on_gpu if async_scheduling is None else async_scheduling
    return ahead, on_gpu and not enforce_eager and not reason


def draft_token_ids(draft_vocab: str | Path | Collection[int] | None, vocab_size: int) -> torch.Tensor | None:
    """The tokens that drafts are chosen among, [D] int64 and ascending; None: all.

    Raises:
        UserError: a file that cannot be read, or ids that are none of the vocabulary's.
    """
    if draft_vocab is None:
        return None
    from mtpkit.data.draft_vocab import check_draft_vocab, load_draft_vocab

    if isinstance(draft_vocab, str | Path):
        ids = load_draft_vocab(draft_vocab, vocab_size)
    else:
        ids = list(draft_vocab)
        check_draft_vocab(ids, vocab_size, "draft_vocab")
    return torch.tensor(sorted(ids), dtype=torch.int64)
