"""Prepare data from files: read, tokenise and pack once, with several processes, through
`datasets`.

The tokens are never all in memory at once: samples, documents and sequences go from one
memory-mapped Arrow file to the next. The result does not depend on the number of processes.
"""

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtpkit.data.build import check_sequence_length, require_known, require_usable
from mtpkit.data.dataset import SourceCounts
from mtpkit.data.documents import BATCH, ROWS, first_fit, join, tokenize
from mtpkit.data.options import DataOptions, OnBadRow
from mtpkit.data.prepared import FORMAT, Manifest
from mtpkit.data.samples import Columns, Sample, read_samples
from mtpkit.data.sources import Source, find_sources
from mtpkit.data.tally import NUMBERS, Tally, numbers_of
from mtpkit.data.tokenizer import Tokenizer, fingerprint
from mtpkit.errors import UserError, listed

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

LEFT_OUT = "left_out.txt"
SAMPLES_PER_PROCESS = 1000
"""Smallest number of samples, or of sequences to pack, per process, unless the number of processes
is given."""
_TOKENS_AT_ONCE = 2**24
"""Tokens of sequences that are built at a time."""


def prepare(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    sequence_length: int,
    directory: Path,
    columns: Columns | None = None,
    num_proc: int | None = None,
    vocab_size: int | None = None,
    options: DataOptions | None = None,
) -> Manifest:
    """Tokenise and pack files, folders and globs into an empty directory, with progress bars.

    Args:
        paths: as for `find_sources`; each becomes a source.
        num_proc: processes; None: one per core, fewer for little data.
        vocab_size: vocabulary size of the model; None: not known.

    Returns:
        The manifest, which is written last.

    Raises:
        UserError: any error of `find_sources`, `read_samples` or `tokenize`, or too many rows that
            cannot be used.
    """
    import datasets

    options = options or DataOptions()
    check_sequence_length(sequence_length)
    sources = find_sources(paths)
    if prepared := [str(source.prepared) for source in sources if source.prepared]:
        raise UserError(f"data: {listed(prepared)} is prepared already; name the files it is from")
    # Taken once, since it hashes the whole vocabulary.
    own = fingerprint(tokenizer)
    work = directory / ".work"
    packed: list[datasets.Dataset] = []
    counts: list[SourceCounts] = []
    tallies: list[Tally] = []
    try:
        with _quiet_datasets():
            for number, source in enumerate(sources):
                folder = work / str(number)
                folder.mkdir(parents=True)
                documents, tally = _tokenize_source(
                    folder,
                    num_proc,
                    source,
                    tokenizer,
                    own,
                    sequence_length,
                    columns,
                    vocab_size,
                    options,
                )
                packed.append(_pack_source(folder, num_proc, documents, sequence_length))
                counts.append(SourceCounts.of(packed[-1].data.table, tally))
                tallies.append(tally)
            # Before anything of the result is written.
            if vocab_size is not None:
                require_known(counts, tokenizer, vocab_size)
            whole = datasets.concatenate_datasets(packed)
            whole.save_to_disk(str(directory))
    finally:
        # Also after an error: intermediate files are as large as the data.
        shutil.rmtree(work, ignore_errors=True)
    for tally in tallies:
        tally.warn(options, sequence_length, f"; {LEFT_OUT} lists all")
    if left_out := [line for tally in tallies for line in tally.left_out]:
        (directory / LEFT_OUT).write_text("\n".join([*left_out, ""]), encoding="utf-8")
    manifest = Manifest(
        format=FORMAT,
        sequence_length=sequence_length,
        tokenizer=own,
        tokenizer_name=str(tokenizer.name_or_path),
        sources=counts,
        source_files=_files_by_name(sources),
        files={path.name: path.stat().st_size for path in sorted(directory.glob("*.arrow"))},
        options=options,
    )
    manifest.write(directory)
    return manifest


def _files_by_name(sources: Iterable[Source]) -> dict[str, list[str]]:
    """The files of the sources by name; several sources may share a name."""
    files: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        files[source.name] += map(str, source.files)
    return files


def _processes(num_proc: int | None, items: int, least: int = 1) -> int | None:
    """Number of processes for `items`, by default with at least `least` items each; None: this
    process alone."""
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    wanted = num_proc or min(available, items // least)
    return n if (n := min(wanted, items)) > 1 else None


def _tokenize_source(
    folder: Path,
    num_proc: int | None,
    source: Source,
    tokenizer: Tokenizer,
    own: str,
    sequence_length: int,
    columns: Columns | None,
    vocab_size: int | None,
    options: DataOptions,
) -> tuple["Dataset", Tally]:
    """Return documents of at most `sequence_length` tokens, and their counts.

    Args:
        folder: directory for intermediate files.
    """
    import pyarrow.compute as pc
    from datasets import Dataset, Features, List, Value

    samples = Dataset.from_generator(
        _read,
        features=Features({"sample": Value("large_string"), "error": Value("string")}),
        cache_dir=str(folder),
        gen_kwargs={
            "files": list(source.files),
            "columns": columns,
            "on_bad_row": options.on_bad_row,
        },
        num_proc=_processes(num_proc, len(source.files), least=8),
    )
    for error in pc.unique(samples.data.table["error"]).to_pylist():
        if error:
            raise UserError(error)
    features: dict = {"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))}
    features |= {"name": Value("string"), "problem": Value("string")}
    features |= {name: Value("int32") for name in NUMBERS}
    arguments = dict(
        tokenizer=tokenizer,
        own=own,
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        options=options,
    )
    documents = samples.map(
        _tokenize,
        batched=True,
        batch_size=BATCH,
        remove_columns=["sample", "error"],
        features=Features(features),
        fn_kwargs=arguments,
        cache_file_name=str(folder / "documents.arrow"),
        # Any name will do: the cache is in a directory that is removed. By default `datasets`
        # would hash the tokenizer by pickling it.
        new_fingerprint="documents",
        num_proc=_processes(num_proc, len(samples), SAMPLES_PER_PROCESS),
        desc=f"tokenising {source.name}",
    )
    tally = Tally(source.name)
    table = documents.data.table
    tally.count({name: pc.sum(table[name]).as_py() or 0 for name in NUMBERS})
    # An empty document stands for each one that is left out, and carries its reason.
    missing = documents.select(np.flatnonzero(_lengths(documents) == 0))
    for name, problem, bad in zip(
        missing["name"], missing["problem"], missing["num_bad_rows"], strict=True
    ):
        tally.leave_out(name, problem, bool(bad))
    # As soon as a source is read: packing it, or reading the next one, may take hours.
    tally.check(options)
    require_usable(source.name, len(documents) - len(missing), tally.left_out)
    return documents, tally


def _pack_source(
    folder: Path, num_proc: int | None, documents: "Dataset", sequence_length: int
) -> "Dataset":
    """Pack the documents into a data set of sequences."""
    import pyarrow as pa
    from datasets import Dataset

    lengths = _lengths(documents)
    usable = np.flatnonzero(lengths)
    bins = first_fit(lengths[usable], sequence_length)
    ends = np.cumsum([0, *map(len, bins)])
    members = usable[
        np.fromiter((item for one in bins for item in one), dtype=np.int64, count=int(ends[-1]))
    ]
    # Large: the offsets of a source may need more than 32 bits.
    index = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(members, pa.int64()))
    return (
        Dataset(pa.table({"members": index}))
        .with_format("arrow")
        .map(
            _join,
            batched=True,
            batch_size=max(1, min(ROWS, _TOKENS_AT_ONCE // sequence_length)),
            remove_columns=["members"],
            fn_kwargs={
                "documents": documents.select_columns(["input_ids", "loss_mask"]).with_format(
                    "arrow"
                )
            },
            cache_file_name=str(folder / "sequences.arrow"),
            new_fingerprint="sequences",
            num_proc=_processes(num_proc, len(bins), SAMPLES_PER_PROCESS),
            desc="packing",
        )
        .with_format(None)
    )


def _read(
    files: list[Path], columns: Columns | None, on_bad_row: OnBadRow
) -> Iterator[dict[str, str]]:
    """Yield samples as JSON, and an error last if there is one: exceptions of another process
    arrive incomplete."""
    try:
        for sample in read_samples(files, columns, on_bad_row):
            yield {"sample": json.dumps(asdict(sample)), "error": ""}
    except UserError as error:
        yield {"sample": "", "error": str(error)}


def _tokenize(
    batch: dict[str, list[str]],
    tokenizer: Tokenizer,
    own: str,
    sequence_length: int,
    vocab_size: int | None,
    options: DataOptions,
) -> dict[str, list]:
    """Tokenise samples into parts with prediction targets; a document without any target gives one
    empty part. The first part of each document has its numbers, the others have zeros."""
    samples = (Sample(**json.loads(text)) for text in batch["sample"])
    rows: dict[str, list] = {
        name: [] for name in ("input_ids", "loss_mask", "name", "problem", *NUMBERS)
    }
    for document in tokenize(samples, tokenizer, own, vocab_size, options):
        usable = document.usable_parts(sequence_length, options.long_conversations)
        parts = [(part.token_ids, part.loss_mask, "", "") for part in usable]
        problem = document.why_unusable(sequence_length)
        none = (document.token_ids[:0], document.loss_mask[:0], document.name, problem)
        numbers = numbers_of(document, sequence_length)
        for part in parts or [none]:
            for column, value in zip(rows, (*part, *numbers.values()), strict=True):
                rows[column].append(value)
            # A document counts once, however many parts it has.
            numbers = dict.fromkeys(numbers, 0)
    return rows


def _join(batch: "pyarrow.Table", documents: "Dataset") -> "pyarrow.Table":
    """Build sequences from the indices of their documents."""
    members = batch["members"].combine_chunks()
    rows = documents[members.flatten().to_numpy()]
    ids, mask = (rows[name].combine_chunks() for name in ("input_ids", "loss_mask"))
    return join(
        ids.flatten().to_numpy(),
        mask.flatten().to_numpy(zero_copy_only=False),
        ids.value_lengths().to_numpy(),
        members.value_lengths().to_numpy(),
    )


def _lengths(documents: "Dataset") -> np.ndarray:
    """Number of tokens of each document, without reading the tokens."""
    import pyarrow.compute as pc

    return pc.list_value_length(documents.data.table["input_ids"]).to_numpy()


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Let `datasets` show progress bars only on a terminal, log no errors (it also raises them),
    and use one thread per process; leave `os.environ` as it was."""
    import datasets

    environ = os.environ
    bars = datasets.is_progress_bar_enabled()
    before = environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        # With several processes `datasets` replaces `os.environ`; code that holds the original
        # would miss later changes.
        os.environ = environ  # noqa: B003
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
        if bars:
            datasets.enable_progress_bars()
