"""Conversion between the Hugging Face and the Megatron layout: base and MTP heads, config, tokenizer."""

import json
import shutil
from pathlib import Path

from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.checkpoint.directory import (
    OWN_CONFIG,
    RELEASE,
    TRACKER,
    Layout,
    detect_layout,
    find_companions,
    load_config,
    load_hf_config,
    open_weights,
)
from mtpkit.checkpoint.families import Family, find_family
from mtpkit.checkpoint.families.keys import Settings
from mtpkit.checkpoint.families.table import MappedTensors
from mtpkit.checkpoint.layouts.huggingface import INDEX, MAX_SHARD_BYTES, copy_companions, write_hf
from mtpkit.checkpoint.layouts.torch_dist import CHECKPOINT_VERSION, write_megatron
from mtpkit.checkpoint.load import ModelTensors
from mtpkit.checkpoint.tensors import CheckedTensors, TensorSource
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError
from mtpkit.files import check_destination, refuse_broken_links, staged_directory


def import_checkpoint(source: Path | str, destination: Path | str, force: bool = False) -> None:
    """Convert a Hugging Face directory to a Megatron one, holding one tensor at a time in memory.

    Weights keep their dtypes. The config and every file beside the weights go along, so `export_checkpoint` gives the
    same directory back.

    Raises:
        UserError: the source does not fit its config (every offending tensor is listed), or the destination is in use.
        StorageError: writing failed; nothing is left behind.
    """
    source, destination = _check_paths(source, destination, "hf", force)
    config = load_config(source)
    weights = open_weights(source)
    with staged_directory(destination) as staging:
        (staging / RELEASE).mkdir()
        write_megatron(staging / RELEASE, weights, CHECKPOINT_VERSION)
        copy_companions(source, staging)
        shutil.copyfile(source / "config.json", staging / "config.json")
        (staging / OWN_CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        (staging / TRACKER).write_text(RELEASE)


def export_checkpoint(
    source: Path | str,
    destination: Path | str,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    family: str | None = None,
) -> None:
    """Convert a Megatron directory, saved at any parallelism, to a Hugging Face one; raises as `import_checkpoint`.

    Args:
        family: `model_type` to write; None: that of the checkpoint, or the only one that fits it.
    """
    source, destination = _check_paths(source, destination, "megatron", force)
    weights, config = open_weights(source), load_config(source)
    hf_config, weights = _hf_view(weights, config, find_family(config, family, source), load_hf_config(source), source)
    with staged_directory(destination) as staging:
        write_hf(staging, hf_config, weights, max_shard_bytes)
        copy_companions(find_companions(source), staging)


def save_hf_model(model: HybridModel, directory: Path | str, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a model of one process in the Hugging Face layout.

    Weights and config that are in the directory are replaced; its other files, such as a tokenizer, stay.

    Raises:
        UserError: the family's config cannot express the model, or it is spread over processes.
        StorageError: writing failed; what was there still is.
    """
    directory = Path(directory)
    config, name = model.mtpkit_config, f"the model for {directory}"
    tensors = CheckedTensors(ModelTensors(model), name)
    hf_config, weights = _hf_view(tensors, config, find_family(config, None, name), None, directory)
    with staged_directory(directory) as staging:
        write_hf(staging, hf_config, weights, max_shard_bytes)
        for file in directory.iterdir() if directory.exists() else ():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json"):
                shutil.copy2(file, staging)


def _hf_view(
    source: TensorSource, config: ModelConfig, family: Family, original: Settings | None, where: Path
) -> tuple[Settings, MappedTensors]:
    """(`config.json`, weights) of the Hugging Face layout for weights under Megatron's names."""
    if original and original["model_type"] != family.model_type:
        original = None
    hf_config = family.config_to_hf(config, original)
    weights = family.table(config).to_hf(source, where)
    dtype_key = "dtype" if original and "dtype" in original else "torch_dtype"
    hf_config[dtype_key] = str(next(iter(weights.tensors.values())).dtype).removeprefix("torch.")
    return hf_config, weights


def _check_paths(source: Path | str, destination: Path | str, layout: Layout, force: bool) -> tuple[Path, Path]:
    """Both as paths, after every refusal that costs nothing to find out."""
    source, destination = Path(source), Path(destination)
    if detect_layout(source) != layout:
        other, command = ("Megatron", "export") if layout == "hf" else ("Hugging Face", "import")
        raise UserError(f"{source} has the {other} layout already; use `{command}` to convert it")
    refuse_broken_links(destination)
    inside = source.resolve() in (destination.resolve(), *destination.resolve().parents)
    if inside or destination.resolve() in source.resolve().parents:
        raise UserError(f"{destination} and {source} are the same or one holds the other; name another destination")
    check_destination(destination, force, "a checkpoint", ("config.json", OWN_CONFIG, "metadata.json", ".metadata"))
    return source, destination
