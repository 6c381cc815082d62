"""Build data sets from paths: memory-map prepared data; read, tokenise and pack files."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import batched
from pathlib import Path

from mtpkit.data.dataset import PackedDataset, PackedSource, SourceCounts
from mtpkit.data.documents import BATCH, Document, pack, tokenize
from mtpkit.data.options import DataOptions
from mtpkit.data.prepared import open_prepared, stored_length, warn_of_options
from mtpkit.data.samples import Columns, read_samples
from mtpkit.data.sources import find_sources, tell_apart
from mtpkit.data.tally import Tally, numbers_of
from mtpkit.data.tokenizer import Tokenizer
from mtpkit.errors import UserError


def pack_documents(
    name: str,
    documents: Iterable[Document],
    sequence_length: int,
    options: DataOptions | None = None,
) -> PackedSource:
    """Split or cut documents that are too long and pack all parts with prediction targets, in
    memory.

    Raises:
        UserError: too many rows cannot be used, or no document has a prediction target.
    """
    options = options or DataOptions()
    tally = Tally(name)
    parts = []
    for document in documents:
        tally.count(numbers_of(document, sequence_length))
        usable = document.usable_parts(sequence_length, options.long_conversations)
        if not usable:
            tally.leave_out(document.name, document.why_unusable(sequence_length), document.bad)
        parts += usable
    tally.check(options)
    require_usable(name, len(parts), tally.left_out)
    tally.warn(options, sequence_length)
    table = pack(parts, sequence_length)
    return PackedSource(SourceCounts.of(table, tally), table)


def check_sequence_length(sequence_length: int) -> None:
    """Refuse a length without a token to predict.

    Raises:
        UserError: it is below 2.
    """
    if sequence_length < 2:
        raise UserError(f"sequence length {sequence_length} is too short; it must be at least 2")


def require_usable(source: str, num_parts: int, left_out: Sequence[str]) -> None:
    """Refuse a source without prediction targets.

    Raises:
        UserError: `num_parts` is 0.
    """
    if not num_parts:
        first = f", the first is {left_out[0]}" if left_out else ""
        raise UserError(
            f"data: {source} has no usable documents: all {len(left_out)} have nothing to"
            f" learn{first}; check the columns"
        )


def build_dataset(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    sequence_length: int | None,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    options: DataOptions | None = None,
) -> PackedDataset:
    """Memory-map the prepared data of `paths`; read, tokenise and pack files, folders and globs,
    with a progress bar.

    Args:
        sequence_length: tokens per sequence; None: that of the prepared data, or 1024 without
            prepared data.
        vocab_size: vocabulary size of the model that reads the data; None: not known.

    Raises:
        UserError: any error of `find_sources`, `open_prepared`, `read_samples`, `tokenize` or
            `PackedDataset`, or a token outside the model's vocabulary, or too many rows that cannot
            be used.
    """
    options = options or DataOptions()
    found = find_sources(paths)
    if sequence_length is None:
        sequence_length = (
            stored_length([source.prepared for source in found if source.prepared]) or 1024
        )
    check_sequence_length(sequence_length)
    sources: list[PackedSource] = []
    origins: list[tuple[str, Path | None]] = []
    for source in found:
        if source.prepared is not None:
            opened = open_prepared(source.prepared, tokenizer, sequence_length, source.name)
            warn_of_options(source.prepared, options)
            place = None if source.name else source.prepared.absolute()
        else:
            samples = read_samples(source.files, columns, options.on_bad_row)
            documents = tokenize(samples, tokenizer, vocab_size=vocab_size, options=options)
            opened = [
                pack_documents(
                    source.name, _counted(documents, source.name), sequence_length, options
                )
            ]
            place = None
        sources += opened
        origins += [(one.counts.name, place and place / one.counts.name) for one in opened]
    sources = [
        replace(source, counts=replace(source.counts, name=name))
        for name, source in zip(tell_apart(origins), sources, strict=True)
    ]
    assert tokenizer.eos_token_id is not None
    if vocab_size is not None:
        require_known([source.counts for source in sources], tokenizer, vocab_size)
    return PackedDataset(sources, sequence_length, tokenizer.eos_token_id, vocab_size)


def _counted(documents: Iterable[Document], source: str) -> Iterator[Document]:
    """Yield the documents, with a progress bar that counts them as batches are tokenised."""
    from tqdm import tqdm

    # disable=None: silent where stderr is not a terminal.
    with tqdm(
        desc=f"tokenised documents of {source}",
        unit="",
        mininterval=0,
        miniters=1,
        disable=None,
        leave=False,
    ) as bar:
        for batch in batched(documents, BATCH):
            bar.update(len(batch))
            yield from batch


def require_known(sources: Sequence[SourceCounts], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse tokens that a model of `vocab_size` has no embedding for; padding is the
    end-of-sequence token.

    Raises:
        UserError: there is such a token; names the largest and its source.
    """
    largest = {tokenizer.eos_token_id: "padding"}
    largest |= {source.max_token or 0: source.name for source in sources}
    token = max(largest)
    if token >= vocab_size:
        text = tokenizer.convert_ids_to_tokens(token)
        raise UserError(
            f"data: {largest[token]} has token {token}{f', {text!r}' if text else ''}, but the"
            " model's vocabulary is of"
            f" {vocab_size}{': its tokenizer has tokens added since' if text else ''}; take it out"
            " of the data"
        )
