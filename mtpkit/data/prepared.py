"""Directories of prepared data: a data set of `datasets` (`load_from_disk` reads it), and what it was made of.

DIR/data-00000-of-00001.arrow ...        packed sequences, a row each, source after source; see `packing`
DIR/dataset_info.json  state.json        of `datasets`
DIR/mtpkit_data.json                     the manifest
DIR/left_out.txt                         samples without anything to learn, if there are any
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpkit.data.dataset import PackedSource, SourceCounts
from mtpkit.data.sources import MANIFEST
from mtpkit.data.tokenizer import fingerprint
from mtpkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Version of the layout; one that is not known is refused."""


@dataclass(frozen=True)
class Manifest:
    """What prepared data is, and what it was made of."""

    format: int
    sequence_length: int
    tokenizer: str
    """Fingerprint."""
    tokenizer_name: str
    """Where it lay."""
    sources: list[SourceCounts]
    """In the order of their sequences."""
    source_files: dict[str, list[str]]
    """Of each source."""
    files: dict[str, int]
    """Bytes of each data file."""

    def write(self, directory: Path) -> None:
        """Write it into a directory that holds everything else already."""
        (directory / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of prepared data.

    Raises:
        UserError: there is none, it is damaged, or of a version that is not known.
    """
    path = directory / MANIFEST
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = values["format"]
        if version == FORMAT:
            sources = [SourceCounts(**source) for source in values.pop("sources")]
            return Manifest(sources=sources, **values)
    except OSError as error:
        raise UserError(f"data: {path}: {error.strerror}; make it with mtpkit data prepare") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"data: {path} is damaged: {error}; prepare the data again") from error
    raise UserError(f"data: {directory} has format {version}, this mtpkit reads {FORMAT}; prepare the data again")


def open_prepared(
    directory: Path, tokenizer: "PreTrainedTokenizerBase", sequence_length: int, name: str = ""
) -> list[PackedSource]:
    """The sources of prepared data, mapped from its files.

    Args:
        name: for all of its sources, in place of their own names.

    Raises:
        UserError: it was made by another tokenizer or for another sequence length, or it is damaged.
    """
    manifest = read_manifest(directory)
    own = fingerprint(tokenizer)
    if manifest.tokenizer != own:
        raise UserError(
            f"data: {directory} was prepared with the tokenizer in {manifest.tokenizer_name}, {manifest.tokenizer[:8]},"
            f" which is not that in {tokenizer.name_or_path}, {own[:8]}; prepare it again with --model of the latter"
        )
    if (length := manifest.sequence_length) != sequence_length:
        raise UserError(
            f"data: {directory} was prepared for sequences of {length} tokens, not"
            f" {sequence_length}; set data.sequence_length={length} in training, --sequence-length {length}"
            " elsewhere, or prepare it again"
        )
    table = _map_table(directory, manifest)
    sources, first = [], 0
    for counts in manifest.sources:
        rows = table.slice(first, counts.num_sequences)
        sources.append(PackedSource(replace(counts, name=name or counts.name), rows))
        first += counts.num_sequences
    return sources


def _map_table(directory: Path, manifest: Manifest) -> Any:
    """All sequences, still on the disk.

    Raises:
        UserError: files are missing, cut off, or something else.
    """
    for file, size in manifest.files.items():
        path = directory / file
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            what = "is missing" if there is None else f"has {there} bytes, not {size}"
            raise UserError(f"data: {directory} is damaged: {file} {what}; prepare the data again")
    import datasets

    try:
        table = datasets.load_from_disk(str(directory), keep_in_memory=False).data.table
    except Exception as error:  # each of its readers raises its own kinds
        raise UserError(f"data: {directory} cannot be read: {error}; prepare the data again") from error
    wanted = sum(counts.num_sequences for counts in manifest.sources)
    if len(table) != wanted:
        raise UserError(f"data: {directory} is damaged: {len(table)} sequences, not {wanted}; prepare the data again")
    return table
