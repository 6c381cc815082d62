"""Model directories of either layout: detect the layout, find config, weights, and the files beside
them.

A Megatron directory is a `torch_dist` checkpoint itself, a run with
`latest_checkpointed_iteration.txt` and `iter_0000123/` or `release/`, or a folder with
`checkpoint/` in it. Config and tokenizer lie in or beside it.
"""

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch

from mtpkit.checkpoint.families import get_family, only_fit
from mtpkit.checkpoint.families.keys import as_token_ids
from mtpkit.checkpoint.layouts import megatron
from mtpkit.checkpoint.layouts.huggingface import INDEX, SINGLE, HFReader, stored_names
from mtpkit.checkpoint.layouts.megatron import config_from_megatron
from mtpkit.checkpoint.layouts.torch_dist import MegatronReader
from mtpkit.checkpoint.quantized import CONFIG, Dequantized, read_block_fp8
from mtpkit.checkpoint.tensors import CheckedTensors, Tensors, TensorSource, require_same_names
from mtpkit.checkpoint.values import Values
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed, raise_problems, shown
from mtpkit.files import is_there, read_json, read_text

Layout = Literal["hf", "megatron"]

_logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
OWN_CONFIG = "mtpkit.json"
MODELOPT = "hf_quant_config.json"
"""File with ModelOpt's settings, used if `config.json` has none."""
RELEASE = "release"
"""Megatron-LM's name for a checkpoint that does not belong to a step of a run."""


def iteration_name(iteration: int | None) -> str:
    """Directory of an iteration inside a run; None: the release."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def detect_layout(directory: Path | str) -> Layout:
    """Detect the layout of a directory.

    Raises:
        UserError: the directory does not exist or has neither layout; the message lists the files
            looked for.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such model directory; name one that holds config.json or a Megatron"
            " checkpoint"
        )
    if _find_torch_dist(directory) is not None:
        return "megatron"
    if is_there(directory / "config.json"):
        return "hf"
    raise UserError(
        f"{directory} is no model directory: looked for config.json with {SINGLE} or {INDEX}"
        f" (Hugging Face), and for metadata.json with .metadata, {TRACKER}, or checkpoint/"
        " (Megatron)"
    )


def find_torch_dist(directory: Path | str) -> Path:
    """The `torch_dist` directory inside a Megatron directory: the latest iteration of a run.

    Raises:
        UserError: there is no checkpoint, or the one that the tracker file names is missing.
    """
    directory = Path(directory)
    found = _find_torch_dist(directory)
    if found is None or not is_there(found / ".metadata"):
        raise UserError(f"{found or directory} holds no Megatron checkpoint: .metadata is missing")
    return found


def _find_torch_dist(directory: Path) -> Path | None:
    tracker = directory / TRACKER
    if is_there(directory / "metadata.json") or is_there(directory / ".metadata"):
        return directory
    if is_there(tracker):
        return directory / iteration_name(latest_iteration(directory))
    if (directory / "checkpoint").is_dir():
        return directory / "checkpoint"
    return None


def latest_iteration(directory: Path | str) -> int | None:
    """The iteration that a run's tracker file names; None for a release, or if no iteration was
    saved yet.

    Raises:
        UserError: the tracker file holds something else.
    """
    tracker = Path(directory) / TRACKER
    text = read_text(tracker).strip() if is_there(tracker) else RELEASE
    if text != RELEASE and not re.fullmatch("[0-9]{1,18}", text):
        raise UserError(
            f"{tracker} holds {shown(text)}; write the number of an existing iteration into it"
        )
    return None if text == RELEASE else int(text)


def beside(directory: Path) -> Iterator[Path]:
    """Directories that may hold the files that go with a Megatron checkpoint, nearest first."""
    checkpoint = find_torch_dist(directory)
    yield from dict.fromkeys((directory, checkpoint, checkpoint.parent))


def find_companions(directory: Path | str) -> Path:
    """The directory that holds the tokenizer and the other files beside the weights of a model
    directory."""
    directory = Path(directory)
    if detect_layout(directory) == "hf":
        return directory
    marks = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", OWN_CONFIG)
    return next(
        (place for place in beside(directory) if any(is_there(place / mark) for mark in marks)),
        directory,
    )


def end_token_ids(directory: Path | str, vocab_size: int) -> frozenset[int]:
    """Tokens that end a sequence according to the `generation_config.json` of a directory; none
    without that file.

    Raises:
        UserError: the settings cannot be read, or hold values other than ids of a vocabulary of
            that size.
    """
    settings = Path(directory) / "generation_config.json"
    found = as_token_ids(read_json(settings).get("eos_token_id")) if is_there(settings) else ()
    odd = [shown(token) for token in found if type(token) is not int or not 0 <= token < vocab_size]
    if odd:
        raise UserError(
            f"{settings}: eos_token_id {listed(odd, width=120)} is none of the {vocab_size}"
            " token ids"
        )
    return frozenset(token for token in found if isinstance(token, int))


def load_config(directory: Path | str, any_quantization: bool = False) -> ModelConfig:
    """The `ModelConfig` of a model directory of either layout.

    A Megatron config names no family, so the family is the one that fits, if exactly one does. A
    Hugging Face model whose files contain no tensor of its heads is read without heads, whatever
    its config.json says.

    Args:
        any_quantization: accept a directory whose weights are quantised in a way that mtpkit cannot
            read.

    Raises:
        UserError: there is no config, or it has unsupported settings.
    """
    directory = Path(directory)
    if detect_layout(directory) == "hf":
        return _with_stored_heads(
            directory, _config_from_hf(directory / "config.json", any_quantization)
        )
    for place in beside(directory):
        own = place / OWN_CONFIG
        other = place / "config.json"
        if is_there(own):
            config = ModelConfig.from_dict(read_json(own), own)
            if config.family:
                get_family(config.family, own)
            return config
        if is_there(other):
            values = read_json(other)
            return (
                _config_from_megatron(values["config"], other)
                if "config" in values
                else _config_from_hf(other)
            )
    checkpoint = find_torch_dist(directory)
    args = MegatronReader(checkpoint).read_common_state().get("args")
    if args is None:
        raise UserError(
            f"{directory}: no config; looked for {OWN_CONFIG} and config.json there, and for args"
            " inside"
        )
    return _config_from_megatron(getattr(args, "__dict__", args), f"args in {checkpoint}")


def _with_stored_heads(directory: Path, config: ModelConfig) -> ModelConfig:
    """The config, without heads if none of their tensors is stored: transformers drops heads but
    keeps their number.

    That is worth a warning if `config.json` gives the number. Without it, some families count one
    head.
    """
    names = stored_names(directory) if config.mtp.num_depths else set()
    family = get_family(config.family)
    heads = tuple(
        {
            prefix
            for depth in range(config.mtp.num_layers)
            for prefix in family.mtp_prefixes(config, depth)
        }
    )
    if not names or any(family.published_name(name).startswith(heads) for name in names):
        return config
    *places, key = family.serving.count_key.split(".")
    settings: object = hf_settings(directory)
    for place in places:
        settings = settings.get(place) if isinstance(settings, Mapping) else None
    if isinstance(settings, Mapping) and settings.get(key) is not None:
        _warn_of_lost_heads(directory / "config.json", config.mtp.num_layers)
    return config.replace(mtp_pattern="", mtp_num_depths=0)


@functools.cache
def _warn_of_lost_heads(path: Path, count: int) -> None:
    """Warn once per process."""
    _logger.warning(
        "%s: no tensor of the %d MTP layer(s) of this model is stored, so it is read without heads",
        path,
        count,
    )


def hf_settings(directory: Path) -> dict[str, object]:
    """The `config.json` of a Hugging Face directory; raises as `read_json` does."""
    return read_json(directory / "config.json")


def quantization_settings(directory: Path) -> object:
    """`quantization_config` of a Hugging Face directory, or ModelOpt's settings beside
    `config.json`; None without either. As in vLLM 0.33 and SGLang 0.5.23, the file beside it also
    counts where layers have different algorithms and `config.json` does not say which. Raises as
    `read_json` does."""
    found = hf_settings(directory).get(CONFIG)
    if (found is None or _lacks_algorithms(found)) and (
        own := modelopt_settings(directory)
    ) is not None:
        return {"quant_method": "modelopt", **own}
    return found


def _lacks_algorithms(settings: object) -> bool:
    if (
        not isinstance(settings, Mapping)
        or str(settings.get("quant_algo")).upper() != "MIXED_PRECISION"
    ):
        return False
    return "quantized_layers" not in settings


def modelopt_settings(directory: Path) -> dict[str, object] | None:
    """The settings that ModelOpt wrote beside `config.json`, if any. Raises as `read_json` does."""
    return read_json(directory / MODELOPT) if is_there(directory / MODELOPT) else None


def _config_from_hf(path: Path, any_quantization: bool = False) -> ModelConfig:
    values = read_json(path)
    if any_quantization:
        values.pop(CONFIG, None)
    return get_family(values.get("model_type"), path, "model_type").config_from_hf(values, path)


def _config_from_megatron(values: object, where: object) -> ModelConfig:
    config = config_from_megatron(values, where)
    return config.replace(family=only_fit(config))


def load_hf_config(directory: Path | str) -> dict[str, object] | None:
    """The Hugging Face config that a Megatron checkpoint was imported with, if it came with one."""
    for place in beside(Path(directory)):
        if is_there(place / "config.json"):
            values = read_json(place / "config.json")
            return values if "model_type" in values else None
    return None


def open_weights(
    directory: Path | str,
    fit_config: bool = False,
    device: torch.device | str = "cpu",
    fp8_as: torch.dtype = torch.bfloat16,
) -> TensorSource:
    """The weights of a model directory under Megatron's names.

    Args:
        fit_config: also check the names and shapes of a Megatron checkpoint's tensors against its
            own config, before a model is built in the sizes that the config claims. Hugging Face
            checkpoints are always checked.
        device: device that tensors are read to: a GPU; any other device means the CPU.
        fp8_as: dtype that weights stored in fp8 are read as.

    Raises:
        UserError: files are missing or damaged, or do not fit the config.
    """
    directory = Path(directory)
    if detect_layout(directory) == "megatron":
        reader = MegatronReader(find_torch_dist(directory))
        if fit_config:
            require_same_names(
                directory, reader.tensors, megatron.parameters(load_config(directory))
            )
        return CheckedTensors(reader, directory, torch.device(device))
    config = load_config(directory)
    family = get_family(config.family)
    weights: Tensors = HFReader(directory, family.published_name, family.carried)
    settings = Values(hf_settings(directory), directory / "config.json")
    block = read_block_fp8(settings)
    raise_problems(settings.where, settings.problems)
    if block is not None:
        weights = Dequantized(weights, block, directory, fp8_as)
    checked = CheckedTensors(weights, directory, torch.device(device))
    return family.table(config).to_megatron(checked, directory)
