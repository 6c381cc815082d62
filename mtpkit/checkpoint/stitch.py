"""Put trained heads into an existing Hugging Face checkpoint; everything else in it stays as it
is."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtpkit.checkpoint.convert import check_destination_of, open_hf
from mtpkit.checkpoint.directory import HFDirectory, ModelDirectory, open_directory
from mtpkit.checkpoint.families import Family, get_family
from mtpkit.checkpoint.head_formats import (
    HeadFormat,
    holds_quantized_heads,
    scale_shapes_in,
    written_heads,
)
from mtpkit.checkpoint.ignored import Stitching, linears, module_of
from mtpkit.checkpoint.kv_scales import RenamedScales, scales_of_heads
from mtpkit.checkpoint.layouts.huggingface import (
    INDEX,
    SINGLE,
    HFReader,
    copy_companions,
    progress,
    read_total_metadata,
    write_shard,
)
from mtpkit.checkpoint.layouts.parallel import Budget
from mtpkit.checkpoint.matrices import CheckedWeights, SomeWeights, StoredMatrices
from mtpkit.checkpoint.parts import FileParts
from mtpkit.checkpoint.stitch_quantized import check_base, check_heads, list_heads
from mtpkit.checkpoint.tensors import SeveralSources, TensorInfo, TensorSource
from mtpkit.config import ModelConfig
from mtpkit.config.checked import keys_of
from mtpkit.errors import MtpkitError, StorageError, UserError, listed, shown
from mtpkit.files import staged_directory
from mtpkit.model.kinds import kinds_in

HEADS_FILE = "model-heads.safetensors"
"""File for the heads if the checkpoint had none before."""
BASE_FILE = "model-base.safetensors"
"""New name of a checkpoint's only file if heads get their own: transformers would read
`model.safetensors` alone."""

_THREADS = 4

_WITHOUT_EFFECT = {
    "family",
    "vocab_size",
    "pattern",
    "max_position_embeddings",
    "tie_word_embeddings",
    "init_std",
    "bos_token_id",
    "eos_token_ids",
    "pad_token_id",
}
"""Settings that may differ between a base and the model whose heads it gets: heads do not depend on
them."""


@dataclass(frozen=True)
class Stitched:
    """Result of `stitch`."""

    heads: tuple[str, ...]
    """Names of the tensors that were written."""
    head_bytes: int
    files: tuple[str, ...]
    """The rewritten files, without the index."""
    kept_files: tuple[str, ...]
    """The files that were linked or copied."""
    kept: int
    """Number of tensors that are not heads."""
    hashed: int
    """Number of kept tensors that were read again and have the same hash as in the source. The
    remaining ones are in linked files, which are the source's own."""


def stitch(
    source: Path | str,
    trained: Path | str,
    destination: Path | str,
    link: bool = False,
    force: bool = False,
    head_format: HeadFormat = "auto",
) -> Stitched:
    """Write a Hugging Face checkpoint with the heads of another model directory.

    Only the index and the files that hold heads are rewritten. In `config.json`, and in ModelOpt's
    file beside it, only the keys about heads and the lists of unquantised modules change. Every
    other tensor is proved unchanged: by its SHA-256 after writing, or because it is in the same
    file as before.

    Args:
        source: the checkpoint in the Hugging Face layout; it is not changed.
        trained: model directory of either layout, such as a training run, whose base has the same
            sizes.
        link: hard-link the other files instead of copying them, which needs no disk space. They are
            then the source's own files: a program that changes one in place changes both
            checkpoints.
        force: replace a checkpoint at the destination.
        head_format: how to write the matrices of heads that servers would quantise.

    Raises:
        UserError: a directory is damaged or does not fit its config (every offending tensor is
            named), the two differ in sizes, `trained` has no heads, the base cannot say that heads
            have this format, or the destination is in use; nothing is left behind.
        StorageError: writing failed, or files cannot be linked; nothing is left behind.
    """
    base = open_hf(source, any_quantization=True)
    destination = check_destination_of(base.path, destination, force)
    heads = open_directory(trained)
    # The trained directory must not be inside the destination either, which is replaced.
    check_destination_of(heads.path, destination, force)
    plan = _Plan(base, heads, head_format)
    with staged_directory(destination) as staging:
        for file in plan.kept_files:
            _keep(base.path / file, staging / plan.names.get(file, file), link)
        copy_companions(base.companions, staging)
        plan.write(staging)
        hashed = _prove_unchanged(
            plan.reader, HFReader(staging, plan.family.published_name, plan.family.carried), plan
        )
    return Stitched(
        heads=tuple(plan.heads),
        head_bytes=sum(plan.mapped.tensors[name].nbytes for name in plan.heads),
        files=tuple(plan.written),
        kept_files=tuple(plan.names.get(file, file) for file in plan.kept_files),
        kept=len(plan.others),
        hashed=hashed,
    )


class _Plan:
    """The assignment of tensors to files.

    Raises:
        UserError: as `stitch` does.
    """

    def __init__(
        self, source: HFDirectory, trained: ModelDirectory, head_format: HeadFormat
    ) -> None:
        self.config = _with_heads(source, trained)
        self.family: Family = get_family(self.config.family)
        # The base's family must have names for the heads, which may be of another model's kinds.
        if misfits := list(self.family.misfits(self.config)):
            raise UserError(
                f"{trained.path}: a {self.family.model_type} checkpoint cannot have"
                f" {listed(misfits)}"
            )
        self.source = source
        self.reader = source.reader
        self.quantized = check_base(source)
        old_heads = source.table.mtp_names(source.stored)
        # drops their scales, too
        old_heads |= {name for head in old_heads for name in self.quantized.get(head, ())}
        old_heads |= scales_of_heads(self.reader.kv_scales, source.table.attentions)

        table = self.family.table(self.config)
        # Some families store copies of the base's embedding or output layer with each head; these
        # are taken from this base, not from the one that the heads were trained on.
        copied = _copied(source, {*table.copies.values()} & self.quantized.keys())
        copied = _Part(copied, {*table.copies.values()})
        mapped = table.heads_to_hf(
            _heads_of(trained, head_format), copied, trained.path, source.stored
        )
        self.formatted = written_heads(
            mapped,
            mapped.tensors.keys(),
            head_format,
            source.quantization,
            self.family.serving,
            len(self.config.pattern),
            source.path,
        )
        parts = self._parts(trained)
        scales = RenamedScales(_heads_in(trained.kv_scales), table.attentions, source.settings)
        self.mapped = SeveralSources(parts, scales)
        self.heads = [*self.mapped.tensors]
        self.others = [name for name in self.reader.places if name not in old_heads]
        self._assign(old_heads)
        self.settings = self._settings()

    def _parts(self, trained: ModelDirectory) -> TensorSource:
        """The heads as they are written."""
        weights = self.formatted.weights
        if not weights.matrices:
            return weights
        shapes = {**scale_shapes_in(trained), **self.formatted.scale_shapes}
        return FileParts(weights, self.source.recipe, shapes)

    def _assign(self, old_heads: set[str]) -> None:
        """Heads under old names stay in their files; new names go into the last of these, or into
        `HEADS_FILE`."""
        places = self.reader.places
        files = sorted({place.file for place in places.values()})
        touched = {places[name].file for name in old_heads if name in places}
        self.kept_files = [file for file in files if file not in touched]
        self.names = {SINGLE: BASE_FILE} if self.kept_files == [SINGLE] else {}
        # Any touched file would do; the last one keeps heads at the end, where exports have them.
        new = max(touched, default=HEADS_FILE)
        self.written: dict[str, list[str]] = {file: [] for file in sorted({*touched, new})}
        for name in self.others:
            if places[name].file in touched:
                self.written[places[name].file].append(name)
        for name in self.heads:
            self.written[places[name].file if name in old_heads & places.keys() else new].append(
                name
            )
        self.written = {file: names for file, names in self.written.items() if names}

    def write(self, staging: Path) -> None:
        """Write the files with heads, the index and `config.json`."""
        heads = set(self.heads)
        weight_map: dict[str, str] = {}
        total = 0
        contents = {file: _Content(self, names, heads) for file, names in self.written.items()}
        written = sum(
            info.nbytes for content in contents.values() for info in content.tensors.values()
        )
        with progress("writing heads", written) as bar:
            for file, content in contents.items():
                write_shard(staging / file, list(content.tensors), content, bar)
                weight_map |= dict.fromkeys(content.tensors, file)
        # Only now: the values of the heads are known after they were read for writing.
        self.mapped.require_finite()
        for name, place in self.reader.places.items():
            if place.file in self.kept_files:
                weight_map[place.stored] = self.names.get(place.file, place.file)
                total += self.reader.info(name).nbytes
        # One file of the usual name needs no index.
        if [*weight_map.values()].count(SINGLE) < len(weight_map):
            metadata = read_total_metadata(self.source.path) | {"total_size": total + written}
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for file, settings in self.settings.items():
            (staging / file).write_text(json.dumps(settings, indent=2) + "\n")

    def _settings(self) -> dict[str, Mapping[str, object]]:
        """The files with settings that change, by name.

        Raises:
            UserError: they cannot say how the heads are stored.
        """
        config = self.family.count_heads(self.config, self.source.settings)
        modules = self._modules()
        files = list_heads(config, self.source.modelopt, modules)
        check_heads(files, self.mapped.tensors, modules, self.source.path)
        return files

    def _modules(self) -> Stitching:
        """What lists of unquantised modules must say."""
        facts = self.family.serving
        replaced = self.source.table.mtp_names(self.source.stored)
        quantized = [module_of(name) for name in self.quantized.keys() - replaced]
        base = linears(
            {
                name: self.reader.info(name).shape
                for name in self.others
                if name.endswith(".weight")
            },
            facts,
        )
        plain = [module for module in base if module not in quantized]
        return Stitching(
            self.formatted.plain(facts),
            quantized,
            plain,
            facts,
            len(self.config.pattern),
            self.formatted.algorithms,
        )


class _Content:
    """The tensors of one file under their names on disk: heads converted by the table, others
    copied byte for byte."""

    def __init__(self, plan: _Plan, names: list[str], heads: set[str]) -> None:
        self._plan = plan
        self._heads = heads
        self._names = {n if n in heads else plan.reader.places[n].stored: n for n in names}
        infos = {stored: self._info(name) for stored, name in self._names.items()}
        # keeps every tensor aligned
        order = sorted(infos, key=lambda stored: -infos[stored].dtype.itemsize)
        self.tensors = {stored: infos[stored] for stored in order}

    def _info(self, name: str) -> TensorInfo:
        return (
            self._plan.mapped.tensors[name] if name in self._heads else self._plan.reader.info(name)
        )

    def read(self, stored: str) -> Tensor:
        name = self._names[stored]
        return self._plan.mapped.read(name) if name in self._heads else self._plan.reader.read(name)

    def require_finite(self) -> None:
        self._plan.mapped.require_finite()


class _Part:
    """A subset of the tensors of a source."""

    def __init__(self, source: TensorSource, names: Set[str]) -> None:
        self._source = source
        self.tensors = {name: info for name, info in source.tensors.items() if name in names}

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def require_finite(self) -> None:
        self._source.require_finite()


def _names_of_heads(source: TensorSource) -> set[str]:
    return {name for name in source.tensors if name.startswith("mtp.")}


def _heads_in(source: TensorSource) -> _Part:
    """The tensors of heads among those of a model, under Megatron's names."""
    return _Part(source, _names_of_heads(source))


def _heads_of(trained: ModelDirectory, head_format: HeadFormat) -> TensorSource:
    """The heads of a model directory, quantised ones as they are stored if they are to stay so."""
    if head_format != "auto" or not holds_quantized_heads(trained):
        return _heads_in(trained.weights())
    # Rows are put back in order, where those of a block are together again.
    weights = trained.weights(expand_scales=isinstance(trained, HFDirectory))
    return SomeWeights(weights, _names_of_heads(weights))


def _copied(base: HFDirectory, quantized: Set[str]) -> TensorSource:
    """The tensors of a base, of which some are widened."""
    found = {name: base.matrices[name] for name in quantized}
    return CheckedWeights(StoredMatrices(base.reader, found, torch.bfloat16), base.path)


def _with_heads(source: HFDirectory, where: ModelDirectory) -> ModelConfig:
    """The config of a base with the heads of another model.

    Raises:
        UserError: the other model has no heads, or settings that heads depend on differ; the
            message names them.
    """
    base = source.config
    trained = where.config
    if not trained.mtp.num_layers:
        raise UserError(
            f"{where.path} has no heads to put into {source.path}; train some, or name another"
            " directory"
        )
    mine = base.values()
    theirs = trained.values()
    own = {key for kind in kinds_in(base.pattern) for key in keys_of(kind.section).values()}
    sizes = {
        key for kind in kinds_in(trained.mtp.pattern) for key in keys_of(kind.section).values()
    }
    # Heads work on the base's hidden states, so that settings of the whole model count, and those
    # of layer kinds that base and heads both have.
    everywhere = {key for key in keys_of(type(base)).values() if key in mine} - _WITHOUT_EFFECT
    values = {key: (mine.get(key), theirs.get(key)) for key in sorted(everywhere | (sizes & own))}
    if odd := [f"{key} {shown(a)} and {shown(b)}" for key, (a, b) in values.items() if a != b]:
        raise UserError(
            f"{source.path} and {where.path} differ, so that the heads of one do not fit the other:"
            f" {listed(odd)}"
        )
    changed = {
        key: value for key, value in theirs.items() if key.startswith("mtp_") or key in sizes - own
    }
    return base.replace(**changed)


def _keep(source: Path, target: Path, link: bool) -> None:
    """Link or copy a file of the source into the destination."""
    # A hard link to a symbolic link would be another symbolic link.
    source = source.resolve()  # files in a download cache are symbolic links
    if link:
        try:
            os.link(source, target)
        except OSError as error:
            raise StorageError(
                f"{source} cannot be linked: {error.strerror}; leave --link out to copy it"
            ) from error
    else:
        shutil.copyfile(source, target)


def _prove_unchanged(before: HFReader, after: HFReader, plan: _Plan) -> int:
    """Compare every tensor but the heads with the source's; return how many were hashed.

    Raises:
        MtpkitError: some differ; the message names them.
    """
    missing = [
        name
        for name in plan.others
        if name not in after.places or before.info(name) != after.info(name)
    ]
    # A linked file is the same file, so there is nothing to compare, and no reason to read it.
    same = {
        file
        for file in plan.kept_files
        if (before.directory / file).samefile(after.directory / plan.names.get(file, file))
    }
    hashed = [
        name for name in plan.others if name not in missing and before.places[name].file not in same
    ]
    budget = Budget()
    with (
        progress("hashing", sum(before.info(name).nbytes for name in hashed)) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):

        def differs(name: str) -> bool:
            nbytes = before.info(name).nbytes
            bar.update(nbytes)
            with budget.hold(nbytes):
                first = _sha256(before.read(name))
                # Mapped pages would add up to the size of both checkpoints.
                before.give_back()
                second = _sha256(after.read(name))
                after.give_back()
            return first != second

        odd = [name for name, wrong in zip(hashed, pool.map(differs, hashed), strict=True) if wrong]
    if missing or odd:
        raise MtpkitError(
            f"{after.directory}: not as in {before.directory}: {listed(missing + odd)}; is the disk"
            " sound?"
        )
    return len(hashed)


def _sha256(tensor: Tensor) -> bytes:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(content)).digest()
