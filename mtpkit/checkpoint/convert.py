"""Conversion between the Hugging Face and the Megatron layout: base and MTP heads, config,
tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.checkpoint.directory import (
    OWN_CONFIG,
    RELEASE,
    TRACKER,
    Layout,
    beside,
    detect_layout,
    find_companions,
    load_config,
    load_hf_config,
    open_weights,
)
from mtpkit.checkpoint.families import Family, find_family, get_family
from mtpkit.checkpoint.families.keys import Settings
from mtpkit.checkpoint.families.table import MappedTensors, Stored
from mtpkit.checkpoint.layouts.huggingface import (
    INDEX,
    MAX_SHARD_BYTES,
    HFReader,
    copy_companions,
    write_hf,
)
from mtpkit.checkpoint.layouts.megatron import WithoutPadding
from mtpkit.checkpoint.layouts.torch_dist_write import CHECKPOINT_VERSION, write_megatron
from mtpkit.checkpoint.load import ModelTensors
from mtpkit.checkpoint.original import (
    ORIGINAL,
    carried_names,
    keep_original,
    open_carried,
    read_stored,
)
from mtpkit.checkpoint.tensors import CheckedTensors, SeveralSources, TensorSource, bits_equal
from mtpkit.config import ModelConfig
from mtpkit.errors import UserError, listed
from mtpkit.files import check_destination, refuse_broken_links, staged_directory


def import_checkpoint(
    source: Path | str,
    destination: Path | str,
    force: bool = False,
    fp8_as: torch.dtype = torch.bfloat16,
) -> list[str]:
    """Convert a Hugging Face directory to a Megatron one, holding few tensors at a time in memory.

    Weights keep their dtypes, except those in fp8. The config, the files beside the weights (see
    `copy_companions`) and the tensors outside the text model are copied, too, so that
    `export_checkpoint` restores the directory.

    Args:
        fp8_as: dtype of weights that are stored in fp8.

    Returns:
        The names of the tensors outside the text model.

    Raises:
        UserError: the source does not fit its config (every offending tensor is listed), or the
            destination is in use.
        StorageError: writing failed; nothing is left behind.
    """
    source, destination = check_paths(source, destination, "hf", force)
    config = load_config(source)
    family = get_family(config.family)
    weights = open_weights(source, fp8_as=fp8_as)
    _require_equal_copies(source, family, config)
    with staged_directory(destination) as staging:
        (staging / RELEASE).mkdir()
        write_megatron(staging / RELEASE, weights, CHECKPOINT_VERSION)
        keep_original(source, staging, family, config)
        copy_companions(source, staging)
        shutil.copyfile(source / "config.json", staging / "config.json")
        (staging / OWN_CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        (staging / TRACKER).write_text(RELEASE)
    return carried_names(destination)


def _require_equal_copies(source: Path, family: Family, config: ModelConfig) -> None:
    """Check that the heads' copies of the base's tensors, which an import drops, are equal to these
    tensors.

    Raises:
        UserError: some differ; the message names them.
    """
    reader = HFReader(source, family.published_name, family.carried)
    pairs = [pair for pair in family.table(config).copies.items() if pair[0] in reader.tensors]
    odd = [
        f"{copy} and {name}"
        for copy, name in pairs
        if not bits_equal(reader.read(copy), reader.read(name))
    ]
    if odd:
        raise UserError(
            f"{source}: {listed(odd)} differ, but the heads share these tensors with the base"
        )


def export_checkpoint(
    source: Path | str,
    destination: Path | str,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    family: str | None = None,
    vocab_size: int | None = None,
) -> list[str]:
    """Convert a Megatron directory, saved at any parallelism, to a Hugging Face one.

    Returns and raises as `import_checkpoint`.

    Args:
        family: `model_type` to write; None: that of the checkpoint, or the only one that fits it.
        vocab_size: number of tokens to keep, without the rows of Megatron's vocabulary padding;
            None: keep all rows.
    """
    source, destination = check_paths(source, destination, "megatron", force)
    weights: TensorSource = open_weights(source)
    config = load_config(source)
    if vocab_size is not None:
        if not 0 < vocab_size <= config.vocab_size:
            raise UserError(
                f"vocab_size {vocab_size}: {source} has {config.vocab_size} rows; give at most as"
                " many"
            )
        weights = WithoutPadding(weights, vocab_size)
        config = config.replace(vocab_size=vocab_size)
    chosen = find_family(config, family, source)
    places = list(beside(source))
    stored = read_stored(places)
    hf_config, mapped = _hf_view(weights, config, chosen, load_hf_config(source), source, stored)
    carried = open_carried(places)
    with staged_directory(destination) as staging:
        write_hf(
            staging,
            hf_config,
            SeveralSources(mapped, carried) if carried else mapped,
            max_shard_bytes,
        )
        copy_companions(find_companions(source), staging)
    return list(carried.tensors) if carried else []


def save_hf_model(
    model: HybridModel, directory: Path | str, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model of one process in the Hugging Face layout.

    Weights and config that are in the directory are replaced; its other files, such as a tokenizer,
    stay.

    Raises:
        UserError: the family's config cannot express the model, or the model is spread over
            processes.
        StorageError: writing failed; the directory is as before.
    """
    directory = Path(directory)
    config = model.mtpkit_config
    name = f"the model for {directory}"
    tensors = CheckedTensors(ModelTensors(model), name)
    hf_config, weights = _hf_view(tensors, config, find_family(config, None, name), None, directory)
    with staged_directory(directory) as staging:
        write_hf(staging, hf_config, weights, max_shard_bytes)
        for file in directory.iterdir() if directory.exists() else ():
            if (
                file.is_file()
                and file.suffix != ".safetensors"
                and file.name not in (INDEX, "config.json")
            ):
                shutil.copy2(file, staging)


def _hf_view(
    source: TensorSource,
    config: ModelConfig,
    family: Family,
    original: Settings | None,
    where: Path,
    stored: Stored | None = None,
) -> tuple[Settings, MappedTensors]:
    """(`config.json`, weights) in the Hugging Face layout, from weights under Megatron's names."""
    if original and original["model_type"] != family.model_type:
        original = None
    hf_config = family.config_to_hf(config, original)
    table = family.table(config)
    if stored is not None:
        table.check(stored, f"{ORIGINAL} of {where}")
    weights = table.to_hf(source, where, stored)
    dtype_key = "dtype" if original and "dtype" in original else "torch_dtype"
    hf_config[dtype_key] = str(next(iter(weights.tensors.values())).dtype).removeprefix("torch.")
    return hf_config, weights


def check_paths(
    source: Path | str, destination: Path | str, layout: Layout | None, force: bool
) -> tuple[Path, Path]:
    """Both as paths, after all checks that need no reading of weights.

    Args:
        layout: required layout of the source; None: either.

    Raises:
        UserError: the source has another layout, the destination is in use, or one of them is or
            contains the other.
    """
    source = Path(source)
    destination = Path(destination)
    if detect_layout(source) != layout is not None:
        other, command = ("Megatron", "export") if layout == "hf" else ("Hugging Face", "import")
        raise UserError(f"{source} has the {other} layout already; use `{command}` to convert it")
    refuse_broken_links(destination)
    inside = source.resolve() in (destination.resolve(), *destination.resolve().parents)
    if inside or destination.resolve() in source.resolve().parents:
        raise UserError(
            f"{destination} and {source} are the same or one holds the other; name another"
            " destination"
        )
    check_destination(
        destination,
        force,
        "a checkpoint",
        ("config.json", OWN_CONFIG, "metadata.json", ".metadata"),
    )
    return source, destination
