"""Directories of prepared data: a data set of `datasets` (`load_from_disk` reads it), and a
manifest of its origin.

DIR/data-00000-of-00001.arrow ...        packed sequences, one per row, source after source; see
                                         `documents`
DIR/dataset_info.json  state.json        files of `datasets`
DIR/mtpkit_data.json                     the manifest
DIR/left_out.txt                         samples without prediction targets, if there are any
"""

import json
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mtpkit.config.checked import checked, from_json
from mtpkit.data.dataset import PackedSource, SourceCounts
from mtpkit.data.options import DataOptions
from mtpkit.data.sources import MANIFEST
from mtpkit.data.tokenizer import Tokenizer, fingerprint
from mtpkit.errors import UserError, listed, shown

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the layout; other versions are refused."""
COLUMNS = {"input_ids": "int32", "loss_mask": "bool", "document_lengths": "int32"}
"""Columns of the data files, with the types of the entries in their lists."""


@checked("manifest of prepared data")
class Manifest:
    """Contents and origin of prepared data."""

    format: int
    sequence_length: Annotated[int, Field(ge=2, lt=2**31)]
    tokenizer: Annotated[str, Field(pattern="^[0-9a-f]{32}$", title="a fingerprint")]
    """Fingerprint of the tokenizer."""
    tokenizer_name: str
    """Directory of the tokenizer."""
    sources: Annotated[
        list[SourceCounts], Field(min_length=1, title="a list of at least one source")
    ]
    """Counts of each source, in the order of the sequences."""
    source_files: dict[str, list[str]]
    """Files of each source."""
    files: Annotated[
        dict[str, int], Field(min_length=1, title="the sizes of one or more data files")
    ]
    """Size of each data file in bytes, in the order of the sequences."""
    options: DataOptions = Field(default_factory=DataOptions, title="a group of values")
    """What was learnt, and what happened to rows that cannot be used."""

    def problems(self) -> Iterator[str]:
        """Yield one clause for each wrong file name, and for each source whose counts contradict
        each other."""
        for name in self.files:
            if not re.fullmatch(r"[\w-]+\.arrow", name):
                yield f"files has {shown(name)}, not a data file"
        for one in self.sources:
            full = one.num_sequences * self.sequence_length
            if (
                one.num_left_out > one.num_documents
                or not one.num_target_tokens <= one.num_tokens <= full
            ):
                yield f"the numbers of source {shown(one.name)} do not fit together"

    def write(self, directory: Path) -> None:
        """Write the manifest into a directory that already holds everything else."""
        (directory / MANIFEST).write_text(
            json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8"
        )


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of prepared data.

    Raises:
        UserError: there is no manifest, it is damaged, or its version is not known.
    """
    return from_json(Manifest, directory / MANIFEST, "prepare the data again", "data: ", FORMAT)


def warn_of_options(directory: Path, options: DataOptions) -> None:
    """Warn of options that were set, and that differ from those with which data was prepared."""
    used = read_manifest(directory).options
    without = {
        name: value
        for name, value in vars(DataOptions()).items()
        if value != getattr(options, name)
    }
    if ignored := [name for name in without if getattr(options, name) != getattr(used, name)]:
        was = listed(f"{name} {getattr(used, name)!r}" for name in ignored)
        logger.warning(
            "data: %s was prepared with %s, which stays: prepare it again to change it",
            directory,
            was,
        )


def stored_length(directories: Sequence[Path]) -> int | None:
    """The sequence length of prepared data; None if there are no directories.

    Raises:
        UserError: any error of `read_manifest`; or the directories have different sequence lengths.
    """
    lengths = {directory: read_manifest(directory).sequence_length for directory in directories}
    if len(set(lengths.values())) > 1:
        each = listed(f"{directory} {length}" for directory, length in lengths.items())
        raise UserError(
            f"data: prepared for sequences of different lengths, {each}; name one of them at a time"
        )
    return next(iter(lengths.values()), None)


def open_prepared(
    directory: Path, tokenizer: Tokenizer, sequence_length: int | None = None, name: str = ""
) -> list[PackedSource]:
    """Memory-map the sources of prepared data.

    Args:
        sequence_length: sequence length that the data must have been prepared for; None: any
            length.
        name: a name for all sources in the data, in place of their own names.

    Raises:
        UserError: the data was prepared with another tokenizer or for another sequence length, or
            it is damaged.
    """
    manifest = read_manifest(directory)
    own = fingerprint(tokenizer)
    if manifest.tokenizer != own:
        raise UserError(
            f"data: {directory} was prepared with the tokenizer in {manifest.tokenizer_name},"
            f" {manifest.tokenizer[:8]}, which is not that in {tokenizer.name_or_path}, {own[:8]};"
            " prepare it again with --model of the latter"
        )
    if sequence_length is not None and (length := manifest.sequence_length) != sequence_length:
        raise UserError(
            f"data: {directory} was prepared for sequences of {length} tokens, not"
            f" {sequence_length}; set data.sequence_length={length} in training, --sequence-length"
            f" {length} elsewhere, or prepare it again"
        )
    table = _map_table(directory, manifest)
    sources = []
    first = 0
    for counts in manifest.sources:
        rows = table.slice(first, counts.num_sequences)
        sources.append(
            PackedSource(replace(counts, name=name or counts.name), rows, str(directory))
        )
        first += counts.num_sequences
    return sources


def _map_table(directory: Path, manifest: Manifest) -> "pyarrow.Table":
    """Memory-map all sequences; refuse files that are missing, truncated or damaged."""
    for file, size in manifest.files.items():
        path = directory / file
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            what = "is missing" if there is None else f"has {there} bytes, not {shown(size)}"
            raise UserError(f"data: {directory} is damaged: {file} {what}; prepare the data again")
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        files = [
            pa.ipc.open_stream(pa.memory_map(str(directory / file))) for file in manifest.files
        ]
        table = pa.concat_tables(reader.read_all() for reader in files)
        table.validate(full=True)  # reads the offsets of lists, not the tokens
        tokens = pc.sum(pc.list_value_length(table["input_ids"])).as_py()
    except Exception as error:  # pyarrow has exceptions of its own
        text = textwrap.shorten(str(error), 200)
        raise UserError(
            f"data: {directory} cannot be read: {text}; prepare the data again"
        ) from error
    for what, found, wanted in (
        ("columns", _columns(table), COLUMNS),
        ("sequences", len(table), sum(counts.num_sequences for counts in manifest.sources)),
        ("tokens", tokens, sum(counts.num_tokens for counts in manifest.sources)),
    ):
        if found != wanted:
            raise UserError(
                f"data: {directory} is damaged: {found} {what}, not {wanted}; prepare the data"
                " again"
            )
    return table


def _columns(table: "pyarrow.Table") -> dict[str, str]:
    """The type of the entries of each list column; columns with nulls are left out."""
    import pyarrow as pa

    return {
        field.name: str(field.type.value_type)
        for field, column in zip(table.schema, table.columns, strict=True)
        if pa.types.is_list(field.type)
        and not column.null_count
        and not any(chunk.values.null_count for chunk in column.chunks)
    }
