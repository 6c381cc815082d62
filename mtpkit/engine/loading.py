"""Opens what an engine runs: model, tokenizer, the tokens that end a sequence."""

from pathlib import Path
from typing import Any

import torch

from mtpkit.config import ModelConfig
from mtpkit.errors import UserError
from mtpkit.platform import default_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def config_of(model: Any) -> ModelConfig:
    """The config of a model directory, of which no weight is read, or of a model.

    Raises:
        UserError: no model directory, or its config cannot be represented.
    """
    from mtpkit.checkpoint import load_config

    return load_config(model) if isinstance(model, str | Path) else model.mtpkit_config


def open_model(
    model: Any, dtype: str, device: torch.device | str | int | None, tokenizer: Any
) -> tuple[Any, Any, list[int]]:
    """The model and its tokenizer, loaded where directories are given, and the tokens that end a sequence.

    Those are what config, generation settings and tokenizer call so: each may lack some.

    Args:
        model: a directory of either layout, or a model.
        dtype: a key of `DTYPES`, or "auto".
        tokenizer: one, its directory, or None: the one beside the model, if there is one.

    Raises:
        UserError: a directory that cannot be loaded, a model of another dtype, a device that is not there.
    """
    place = _device(device)
    if isinstance(tokenizer, str | Path):
        from mtpkit.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer)
    if not isinstance(model, str | Path):
        weight = next(model.parameters())
        own = weight.dtype
        if weight.is_meta:
            raise UserError(
                "the model given lies on device meta, without weights: load it, or build it on 'cuda' or 'cpu'"
            )
        if dtype != "auto" and DTYPES[dtype] != own:
            raise UserError(f"dtype is {dtype}, but the model given holds {own}: leave it 'auto', or convert the model")
        return (model if device is None else model.to(place)).eval(), tokenizer, sorted(_end_tokens(model, tokenizer))
    from mtpkit.checkpoint import end_token_ids, find_companions, load_model
    from mtpkit.data.tokenizer import TOKENIZER_FILES, load_tokenizer

    auto = torch.bfloat16 if place.type == "cuda" else torch.float32
    loaded = load_model(model, dtype=DTYPES.get(dtype, auto), device=place)
    beside = find_companions(model)
    if tokenizer is None and any((beside / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(beside)
    vocab_size = loaded.mtpkit_config.vocab_size
    return loaded, tokenizer, sorted(_end_tokens(loaded, tokenizer) | end_token_ids(beside, vocab_size))


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device that is asked for.

    Raises:
        UserError: there is none such.
    """
    try:
        place = default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {device!r} is unknown: use 'cuda' or 'cpu'") from error
    if place.type not in ("cuda", "cpu"):
        raise UserError(f"device is {place}, where nothing can be decoded: use 'cuda' or 'cpu'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {place}, but torch finds no GPU here: use 'cpu', or see to driver and torch build")
    return place


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(model.mtpkit_config.eos_token_ids) | ({own} if isinstance(own, int) else set())
