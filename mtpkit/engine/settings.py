"""What the arguments of `LLM` may be, and what is made of them once the model is there."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtpkit.config import ModelConfig
from mtpkit.engine.checks import (
    FLAG,
    Rule,
    at_least,
    choice,
    either,
    is_list,
    is_list_of,
    is_number,
    is_path,
    is_whole,
    number,
    plain,
    problems,
)
from mtpkit.engine.loading import DTYPES
from mtpkit.engine.params import ENGINE_RULES
from mtpkit.errors import UserError, raise_problems
from mtpkit.kernels.dispatch import CHOICE, on_kernels

_logger = logging.getLogger(__name__)


def _is_model(value: Any) -> bool:
    return is_path(value) or (isinstance(value, torch.nn.Module) and hasattr(value, "mtpkit_config"))


def _is_tokenizer(value: Any) -> bool:
    return is_path(value) or all(callable(getattr(value, name, None)) for name in ("encode", "decode"))


LLM_RULES = {
    "model": Rule("the directory of a checkpoint, or a model from mtpkit.model.build_model", _is_model),
    "num_speculative_tokens": either("auto", ENGINE_RULES["num_speculative_tokens"]),
    "dtype": choice("auto", *DTYPES),
    "seed": ENGINE_RULES["seed"],
    "block_size": ENGINE_RULES["block_size"],
    "max_model_len": either(None, ENGINE_RULES["max_model_len"]),
    "max_num_seqs": ENGINE_RULES["max_num_seqs"],
    "max_num_batched_tokens": either(None, at_least(1)),
    "gpu_memory_utilization": number("must be in (0, 1]", lambda value: 0 < value <= 1),
    "num_blocks": either(None, at_least(1)),
    "state_rollback": ENGINE_RULES["state_rollback"],
    "state_dtype": choice(*DTYPES),
    "draft_sampling": ENGINE_RULES["draft_sampling"],
    "draft_vocab": either(
        None, Rule("a list of token ids, a file of mtpkit data draft-vocab,", lambda v: is_path(v) or is_list(v))
    ),
    "async_scheduling": either(None, FLAG),
    "enforce_eager": FLAG,
    "synthetic_acceptance": either(
        None, Rule("a list of rates, one a draft,", lambda v: isinstance(v, Sequence) and is_list_of(is_number)(v))
    ),
    "device": either(
        None, Rule("'cuda', 'cpu' or a GPU's number,", lambda v: isinstance(v, str | torch.device) or is_whole(v))
    ),
    "tokenizer": either(None, Rule("a directory, something with encode and decode,", _is_tokenizer)),
}
"""Arguments of `LLM`."""


def check_settings(values: Mapping[str, Any]) -> None:
    """Check the arguments of `LLM`, by name.

    Raises:
        UserError: some break their rules, or do not go together.
    """
    raise_problems("engine", problems(LLM_RULES, values))
    if values["num_speculative_tokens"] == "auto" and values["draft_sampling"]:
        raise UserError("num_speculative_tokens 'auto' needs the heads' best tokens: draft_sampling must be False")


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


def draft_token_ids(draft_vocab: str | Path | Sequence[int] | None, vocab_size: int) -> torch.Tensor | None:
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
        ids = [plain(token) if is_whole(token) else token for token in draft_vocab]
        check_draft_vocab(ids, vocab_size, "draft_vocab")
    return torch.tensor(sorted(ids), dtype=torch.int64)
