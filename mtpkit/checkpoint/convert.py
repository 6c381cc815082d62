"""Conversion between the Hugging Face and the Megatron layout: base and MTP heads, config,
tokenizer."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from mtpkit.checkpoint.directory import (
    OWN_CONFIG,
    RELEASE,
    TRACKER,
    HFDirectory,
    MegatronDirectory,
    open_directory,
)
from mtpkit.checkpoint.families import Family, find_family
from mtpkit.checkpoint.families.keys import Settings
from mtpkit.checkpoint.families.table import MappedTensors, Stored
from mtpkit.checkpoint.layouts.huggingface import (
    INDEX,
    copy_companions,
    write_hf,
)
from mtpkit.checkpoint.layouts.megatron import WithoutPadding
from mtpkit.checkpoint.layouts.torch_dist_write import CHECKPOINT_VERSION, write_megatron
from mtpkit.checkpoint.load import ModelTensors
from mtpkit.checkpoint.original import ORIGINAL, carried_names, keep_original
from mtpkit.checkpoint.tensors import CheckedTensors, SeveralSources, TensorSource, bits_equal
from mtpkit.config import MAX_SHARD_BYTES, ModelConfig
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
    opened = open_hf(source)
    destination = check_destination_of(opened.path, destination, force)
    config = opened.config
    # Opened before the destination is touched: misfits are reported with nothing written.
    weights = opened.weights(fp8_as=fp8_as)
    _require_equal_copies(opened)
    with staged_directory(destination) as staging:
        (staging / RELEASE).mkdir()
        write_megatron(staging / RELEASE, weights, CHECKPOINT_VERSION)
        keep_original(opened.reader, opened.table, staging)
        copy_companions(opened.companions, staging)
        shutil.copyfile(opened.path / "config.json", staging / "config.json")
        (staging / OWN_CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        # Without the tracker, Megatron-LM would not find the release in its directory.
        (staging / TRACKER).write_text(RELEASE)
    return carried_names(destination)


def _require_equal_copies(source: HFDirectory) -> None:
    """Check that the heads' copies of the base's tensors, which an import drops, are equal to these
    tensors.

    Raises:
        UserError: some differ; the message names them.
    """
    reader = source.reader
    pairs = [pair for pair in source.table.copies.items() if pair[0] in reader.tensors]
    # An import drops the copies: what is different in one would be lost without a word.
    odd = [
        f"{copy} and {name}"
        for copy, name in pairs
        if not bits_equal(reader.read(copy), reader.read(name))
    ]
    if odd:
        raise UserError(
            f"{source.path}: {listed(odd)} differ, but the heads share these tensors with the base"
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
    opened = _open_megatron(source)
    destination = check_destination_of(opened.path, destination, force)
    weights: TensorSource = opened.weights()
    config = opened.config
    # Megatron pads the vocabulary to a multiple of the ranks; its config does not say by how much.
    if vocab_size is not None:
        if not 0 < vocab_size <= config.vocab_size:
            raise UserError(
                f"vocab_size {vocab_size}: {source} has {config.vocab_size} rows; give at most as"
                " many"
            )
        weights = WithoutPadding(weights, vocab_size)
        config = config.replace(vocab_size=vocab_size)
    chosen = find_family(config, family, opened.path)
    written = _Written(
        weights, config, chosen, opened.path, opened.original_settings, opened.stored
    )
    hf_config, mapped = written.hf_view()
    carried = opened.carried
    with staged_directory(destination) as staging:
        write_hf(
            staging,
            hf_config,
            SeveralSources(mapped, carried) if carried else mapped,
            max_shard_bytes,
        )
        copy_companions(opened.companions, staging)
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
    written = _Written(tensors, config, find_family(config, None, name), directory)
    hf_config, weights = written.hf_view()
    with staged_directory(directory) as staging:
        write_hf(staging, hf_config, weights, max_shard_bytes)
        # The staging directory replaces this one as a whole, so what stays is copied into it.
        for file in directory.iterdir() if directory.exists() else ():
            if (
                file.is_file()
                and file.suffix != ".safetensors"
                and file.name not in (INDEX, "config.json")
            ):
                shutil.copy2(file, staging)


@dataclass(frozen=True)
class _Written:
    """A model to be written in the Hugging Face layout."""

    weights: TensorSource
    """The weights under Megatron's names."""
    config: ModelConfig
    family: Family
    """The family to write it as."""
    where: Path
    """The directory of the model, for messages."""
    original: Settings | None = None
    """The `config.json` that it came with. Its keys are kept, unless it is of another family."""
    stored: Stored | None = None
    """How the original stored its tensors."""

    def hf_view(self) -> tuple[Settings, MappedTensors]:
        """(`config.json`, weights) in the Hugging Face layout.

        Raises:
            UserError: the family cannot express the model, or the record of the original is
                damaged.
        """
        original = self.original
        # Keys of another family would be kept with meanings that they do not have here.
        if original and original["model_type"] != self.family.model_type:
            original = None
        hf_config = self.family.config_to_hf(self.config, original)

        table = self.family.table(self.config)
        if self.stored is not None:
            table.check(self.stored, f"{ORIGINAL} of {self.where}")
        weights = table.to_hf(self.weights, self.where, self.stored)

        # transformers renamed the key: the original's name is kept, and otherwise the older one,
        # which every version reads
        dtype_key = "dtype" if original and "dtype" in original else "torch_dtype"
        dtype = next(iter(weights.tensors.values())).dtype
        hf_config[dtype_key] = str(dtype).removeprefix("torch.")
        return hf_config, weights


def open_hf(source: Path | str, any_quantization: bool = False) -> HFDirectory:
    """Open a directory that must have the Hugging Face layout.

    Raises:
        UserError: it has the other layout, or none.
    """
    opened = open_directory(source, any_quantization)
    if isinstance(opened, HFDirectory):
        return opened
    raise UserError(f"{opened.path} has the Megatron layout already; use `export` to convert it")


def _open_megatron(source: Path | str) -> MegatronDirectory:
    """Open a directory that must have the Megatron layout. Raises as `open_hf` does."""
    opened = open_directory(source)
    if isinstance(opened, MegatronDirectory):
        return opened
    raise UserError(
        f"{opened.path} has the Hugging Face layout already; use `import` to convert it"
    )


def check_destination_of(source: Path, destination: Path | str, force: bool) -> Path:
    """The destination of a conversion as a path, after all checks that need no reading of weights.

    Raises:
        UserError: the destination is in use, or it contains the source, or the other way round.
    """
    destination = Path(destination)
    refuse_broken_links(destination)
    # Replacing a directory that holds the source would delete it before it is read.
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
    return destination
