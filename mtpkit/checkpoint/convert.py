"""Conversion between the Hugging Face and the Megatron layout: base and MTP heads, config,
tokenizer."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from mtpkit.checkpoint.directory import (
    MODELOPT,
    OWN_CONFIG,
    RELEASE,
    TRACKER,
    HFDirectory,
    MegatronDirectory,
    open_directory,
    quantization_of,
)
from mtpkit.checkpoint.families import Family, find_family
from mtpkit.checkpoint.families.keys import Settings
from mtpkit.checkpoint.families.table import MappedTensors, Stored
from mtpkit.checkpoint.head_formats import HeadFormat, tensor_of, written_heads
from mtpkit.checkpoint.ignored import Stitching, linears, module_of
from mtpkit.checkpoint.kv_scales import RenamedScales
from mtpkit.checkpoint.layouts.huggingface import (
    INDEX,
    copy_companions,
    write_hf,
)
from mtpkit.checkpoint.layouts.megatron import WithoutPadding
from mtpkit.checkpoint.layouts.torch_dist_write import CHECKPOINT_VERSION, write_megatron
from mtpkit.checkpoint.load import ModelTensors
from mtpkit.checkpoint.matrices import Weights
from mtpkit.checkpoint.original import ORIGINAL, carried_names, keep_original
from mtpkit.checkpoint.parts import FileParts, scale_shapes_of, stored_parts
from mtpkit.checkpoint.quantized import CONFIG
from mtpkit.checkpoint.stitch_quantized import check_heads, list_heads
from mtpkit.checkpoint.tensors import CheckedTensors, SeveralSources, TensorSource, bits_equal
from mtpkit.config import MAX_SHARD_BYTES, ModelConfig
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import check_destination, refuse_broken_links, staged_directory


def import_checkpoint(
    source: Path | str,
    destination: Path | str,
    force: bool = False,
    fp8_as: torch.dtype | None = None,
    expand_scales: bool = False,
) -> list[str]:
    """Convert a Hugging Face directory to a Megatron one, holding few tensors at a time in memory.

    Weights keep their dtypes, and quantised ones their codes and scales. The config, the files
    beside the weights (see `copy_companions`) and the tensors outside the text model are copied,
    too, so that `export_checkpoint` restores the directory.

    Args:
        fp8_as: dtype to widen quantised weights to; None: keep them as they are stored.
        expand_scales: give each row the scales of its block where rows of one block come apart in
            Megatron's layout, instead of refusing the checkpoint.

    Returns:
        The names of the tensors outside the text model.

    Raises:
        UserError: the source does not fit its config, or a quantised matrix cannot be kept in
            Megatron's layout (every offending tensor is listed), or the destination is in use.
        StorageError: writing failed; nothing is left behind.
    """
    opened = open_hf(source)
    destination = check_destination_of(opened.path, destination, force)
    config = opened.config
    # Opened before the destination is touched: misfits are reported with nothing written.
    weights = opened.weights(widen=fp8_as or torch.bfloat16, expand_scales=expand_scales)
    scale_shapes: dict[str, str] = {}
    written: TensorSource = weights
    if fp8_as is None and opened.matrices:
        scale_shapes = scale_shapes_of(opened.matrices, opened.reader.tensors)
        written = stored_parts(weights, opened.recipe, opened.path)
    _require_equal_copies(opened)
    with staged_directory(destination) as staging:
        (staging / RELEASE).mkdir()
        write_megatron(
            staging / RELEASE, SeveralSources(written, opened.kv_scales), CHECKPOINT_VERSION
        )
        keep_original(opened.reader, opened.table, opened.stored, scale_shapes, staging)
        copy_companions(opened.companions, staging)
        if written is weights and not (opened.recipe and opened.recipe.only_kv):
            (staging / MODELOPT).unlink(missing_ok=True)  # It tells of quantised weights.
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
    # An import drops the copies: what is different in one would be lost without a word.
    odd = [
        f"{copy} and {name}"
        for copy, name in source.table.copies.items()
        if not all(starmap(bits_equal, _stored_pairs(source, copy, name)))
    ]
    if odd:
        raise UserError(
            f"{source.path}: {listed(odd)} differ, but the heads share these tensors with the base"
        )


def _stored_pairs(source: HFDirectory, copy: str, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors that hold a copy, if there is one, each with that of what it is a copy of."""
    nothing = torch.empty(0)
    copies, names = (
        source.matrices[each].parts if each in source.matrices else {"": each}
        for each in (copy, name)
    )
    for part, stored in copies.items():
        if stored in source.reader.tensors:
            other = source.reader.read(names[part]) if part in names else nothing
            yield source.reader.read(stored), other


def export_checkpoint(
    source: Path | str,
    destination: Path | str,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    family: str | None = None,
    vocab_size: int | None = None,
    head_format: HeadFormat = "auto",
) -> list[str]:
    """Convert a Megatron directory, saved at any parallelism, to a Hugging Face one.

    Returns and raises as `import_checkpoint`.

    Args:
        family: `model_type` to write; None: that of the checkpoint, or the only one that fits it.
        vocab_size: number of tokens to keep, without the rows of Megatron's vocabulary padding;
            None: keep all rows.
        head_format: how to write the matrices of heads that servers would quantise. The lists of
            unquantised modules follow.
    """
    opened = _open_megatron(source)
    destination = check_destination_of(opened.path, destination, force)
    weights: Weights = opened.weights()
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
    quantized = _Quantized(opened, chosen, config, mapped, head_format)
    hf_config = quantized.config(hf_config)
    scales = RenamedScales(
        opened.kv_scales, chosen.table(config).attentions, opened.original_settings
    )
    carried = opened.carried
    with staged_directory(destination) as staging:
        write_hf(
            staging,
            hf_config,
            SeveralSources(quantized.tensors, scales, *([carried] if carried else [])),
            max_shard_bytes,
        )
        copy_companions(opened.companions, staging)
        # It tells of quantised weights.
        if not quantized.is_told:
            (staging / MODELOPT).unlink(missing_ok=True)
        elif quantized.own is not None:
            (staging / MODELOPT).write_text(json.dumps(quantized.own, indent=2) + "\n")
    return list(carried.tensors) if carried else []


class _Quantized:
    """The tensors of an export, of which some may be quantised, and the settings that say so.

    Args:
        weights: under Hugging Face names.

    Raises:
        UserError: heads cannot be written in this format, or quantised weights not as this family.
    """

    def __init__(
        self,
        source: MegatronDirectory,
        family: Family,
        config: ModelConfig,
        weights: MappedTensors,
        head_format: HeadFormat,
    ) -> None:
        matrices = weights.matrices
        recipe = source.recipe
        # Settings about keys and values alone are as true of the export.
        self.is_told = bool(matrices) or (recipe is not None and recipe.only_kv)
        self._settings = _quantization_of(source, family) if self.is_told else {}
        self.own: Mapping[str, object] | None = None
        """ModelOpt's file, if it changes."""
        own = source.modelopt if self.is_told else None
        heads = family.table(config).mtp_names(source.stored)
        letters = len(config.pattern)
        formatted = written_heads(
            weights,
            heads,
            head_format,
            quantization_of(self._settings, own),
            family.serving,
            letters,
            source.path,
        )
        shapes = {**source.stored.scale_shapes, **formatted.scale_shapes}
        written = formatted.weights
        self.tensors: TensorSource = written
        if written.matrices:
            self.tensors = FileParts(written, recipe, shapes)
        if not matrices or not heads:
            return
        base = {module_of(tensor_of(name)) for name in matrices if tensor_of(name) not in heads}
        others = {n: i.shape for n, i in weights.tensors.items() if n not in heads}
        modules = Stitching(
            formatted.plain(family.serving),
            [*base],
            [module for module in linears(others, family.serving) if module not in base],
            family.serving,
            letters,
            formatted.algorithms,
        )
        files = list_heads(self._settings, own, modules, only_incomplete=True)
        check_heads(files, self.tensors.tensors, modules, source.path)
        self._settings = files["config.json"]
        self.own = files.get(MODELOPT) if files.get(MODELOPT) != own else None

    def config(self, settings: Settings) -> Settings:
        """A `config.json` with what says how weights are quantised."""
        return {**settings, **self._settings}


def _quantization_of(source: MegatronDirectory, family: Family) -> Settings:
    """The part of the original's `config.json` that says how quantised matrices are stored.

    Raises:
        UserError: the original is of another family, by whose names modules are told apart.
    """
    original = source.original_settings or {}
    if original.get("model_type") != family.model_type:
        raise UserError(
            f"{source.path}: quantised weights can only be exported as the family that they came"
            f" in, {shown(original.get('model_type'))}, not {shown(family.model_type)}"
        )
    # ModelOpt's settings may lie beside the config alone, and are copied with the other files.
    return {key: original[key] for key in (CONFIG,) if key in original}


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
