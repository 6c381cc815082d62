"""Conversion between the Hugging Face and the Megatron layout: base and MTP heads, config, tokenizer."""

import json
import shutil
from pathlib import Path

from mtpkit.checkpoint.atomic import check_destination, staged_directory
from mtpkit.checkpoint.families import get_family
from mtpkit.checkpoint.hf import MAX_SHARD_BYTES, HFReader, copy_companions, write_hf
from mtpkit.checkpoint.layout import (
    OWN_CONFIG,
    RELEASE,
    TRACKER,
    Layout,
    detect_layout,
    find_companions,
    find_torch_dist,
    load_config,
    load_hf_config,
)
from mtpkit.checkpoint.megatron import CHECKPOINT_VERSION, MegatronReader, write_megatron
from mtpkit.errors import UserError


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
    family = get_family(config.family)
    weights = family.table(config).to_megatron(HFReader(source, family.canonical_hf_name), source)
    with staged_directory(destination, force) as staging:
        (staging / RELEASE).mkdir()
        write_megatron(staging / RELEASE, weights, CHECKPOINT_VERSION)
        copy_companions(source, staging)
        shutil.copyfile(source / "config.json", staging / "config.json")
        (staging / OWN_CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        (staging / TRACKER).write_text(RELEASE)


def export_checkpoint(
    source: Path | str, destination: Path | str, force: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Convert a Megatron directory, saved at any parallelism, to a Hugging Face one; raises as `import_checkpoint`."""
    source, destination = _check_paths(source, destination, "megatron", force)
    config = load_config(source)
    family = get_family(config.family)
    original = load_hf_config(source)
    hf_config = family.config_to_hf(config, original)
    weights = family.table(config).to_hf(MegatronReader(find_torch_dist(source)), source)
    dtype_key = "dtype" if original and "dtype" in original else "torch_dtype"
    hf_config[dtype_key] = str(next(iter(weights.tensors.values())).dtype).removeprefix("torch.")
    with staged_directory(destination, force) as staging:
        write_hf(staging, hf_config, weights, max_shard_bytes)
        copy_companions(find_companions(source), staging)


def _check_paths(source: Path | str, destination: Path | str, layout: Layout, force: bool) -> tuple[Path, Path]:
    """Both as paths, after every refusal that costs nothing to find out."""
    source, destination = Path(source), Path(destination)
    if detect_layout(source) != layout:
        other, command = ("Megatron", "export") if layout == "hf" else ("Hugging Face", "import")
        raise UserError(f"{source} has the {other} layout already; use `{command}` to convert it")
    inside = source.resolve() in (destination.resolve(), *destination.resolve().parents)
    if inside or destination.resolve() in source.resolve().parents:
        raise UserError(f"{destination} and {source} are the same or one holds the other; name another destination")
    check_destination(destination, force)
    return source, destination
