"""Draft vocabularies: small files of the most frequent tokens of a data set, from which drafts are
chosen.

Drafting then scores fewer tokens. The engine's output is still the base's own: a token outside the
draft vocabulary is never drafted, which only lowers acceptance.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from mtpkit.config.checked import checked, from_json
from mtpkit.data.documents import tokenize
from mtpkit.data.options import DataOptions
from mtpkit.data.prepared import open_prepared
from mtpkit.data.samples import Columns, read_samples
from mtpkit.data.sources import Source, find_sources
from mtpkit.data.tally import Tally, numbers_of
from mtpkit.data.tokenizer import Tokenizer
from mtpkit.errors import UserError, listed, shown


@checked("draft vocabulary")
class DraftVocab:
    """The tokens that may be drafted."""

    token_ids: list[int]
    """The tokens' ids, in ascending order."""
    vocab_size: Annotated[int, Field(ge=1)]
    """Vocabulary size of the model."""
    coverage: float = 0.0
    """Share of the counted tokens that are in `token_ids`, an upper bound of acceptance."""
    files: list[str] = Field(default_factory=list)
    """The files, and directories of prepared data, whose tokens were counted."""

    def to_json(self) -> str:
        """The text of the file that `load_draft_vocab` reads."""
        return json.dumps(asdict(self)) + "\n"


def build_draft_vocab(
    paths: Iterable[str | Path],
    tokenizer: Tokenizer,
    vocab_size: int,
    size: int,
    eos_token_ids: Iterable[int] = (),
    columns: Columns | None = None,
    options: DataOptions | None = None,
) -> DraftVocab:
    """Find the `size` most frequent tokens of files, folders, globs and prepared data, with a
    progress bar.

    Only prediction targets are counted, not prompts. End-of-sequence and other special tokens are
    always included. Among equally frequent tokens (even those that never occur), smaller ids come
    first.

    Args:
        vocab_size: vocabulary size of the model, which may be larger than the tokenizer's.
        eos_token_ids: end-of-sequence tokens of the model besides the tokenizer's.

    Raises:
        UserError: `size` does not fit, no token was counted, or the tokenizer is not the model's;
            also any error of `find_sources`, `read_samples`, `tokenize` and `open_prepared`.
    """
    always = {*eos_token_ids, *tokenizer.all_special_ids}
    if outside := sorted(token for token in always if not 0 <= token < vocab_size):
        raise UserError(
            f"special token {outside[0]} lies outside of the model's vocabulary of {vocab_size}"
        )
    if not 0 < size <= vocab_size:
        raise UserError(f"size is {size}, must be 1 to {vocab_size}, the size of the vocabulary")
    if size < len(always):
        raise UserError(
            f"size is {size}, but there are {len(always)} special tokens, which are always included"
        )
    sources = find_sources(paths)
    counts = _count(
        _wanted_tokens(sources, tokenizer, columns, vocab_size, options or DataOptions()),
        vocab_size,
    )
    total = int(counts.sum())
    if not total:
        raise UserError(
            "data: no tokens to count: every text or response is empty; check the columns"
        )
    rank = counts.copy()
    rank[list(always)] = total + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size])
    files = [str(file) for source in sources for file in source.files or (source.prepared,)]
    return DraftVocab(chosen.tolist(), vocab_size, int(counts[chosen].sum()) / total, files)


def load_draft_vocab(path: str | Path, vocab_size: int | None = None) -> list[int]:
    """Read the token ids of a file that `DraftVocab.to_json` made.

    Args:
        vocab_size: vocabulary size of the model; None: not checked.

    Raises:
        UserError: the file cannot be read, is no draft vocabulary, is for another vocabulary size,
            or holds ids that are repeated or outside the vocabulary.
    """
    found = from_json(
        DraftVocab, path, "write one with mtpkit data draft-vocab", "draft vocabulary "
    )
    name = f"draft vocabulary {path}"
    own_size = found.vocab_size
    if vocab_size not in (None, own_size):
        raise UserError(
            f"{name} is for a vocabulary of {shown(own_size)}, but the model's is {vocab_size}"
        )
    check_draft_vocab(found.token_ids, own_size, name)
    return found.token_ids


def check_draft_vocab(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Check the ids of a draft vocabulary against its size.

    Raises:
        UserError: there are no ids, or some are no integers, outside the vocabulary or repeated;
            the message begins with `name`.
    """
    if not token_ids:
        raise UserError(f"{name} is empty; it needs at least one token id")
    if wrong := [
        token for token in token_ids if type(token) is not int or not 0 <= token < vocab_size
    ]:
        raise UserError(
            f"{name}: {listed(map(shown, wrong))} must be integers from 0 to"
            f" {shown(vocab_size - 1)}"
        )
    if twice := [token for token, times in Counter(token_ids).items() if times > 1]:
        raise UserError(f"{name}: {listed(twice)} repeated; name each token id once")


def _wanted_tokens(
    sources: Iterable[Source],
    tokenizer: Tokenizer,
    columns: Columns | None,
    vocab_size: int,
    options: DataOptions,
) -> Iterator[np.ndarray]:
    """Yield prediction targets [n] int32 of one or many documents at a time."""
    for source in sources:
        if source.prepared is None:
            samples = read_samples(source.files, columns, options.on_bad_row)
            tally = Tally(source.name)
            for document in tokenize(samples, tokenizer, vocab_size=vocab_size, options=options):
                tally.count(numbers_of(document, 0))
                if document.bad:
                    tally.leave_out(document.name, document.problem, bad=True)
                yield document.token_ids[document.loss_mask]
            tally.check(options)
            continue
        for part in open_prepared(source.prepared, tokenizer):
            for rows in part.table.to_batches():
                ids, mask = (rows.column(name).flatten() for name in ("input_ids", "loss_mask"))
                yield ids.to_numpy()[mask.to_numpy(zero_copy_only=False)]


def _count(parts: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """[V] int64, how often each token occurs."""
    from tqdm import tqdm

    counts = np.zeros(vocab_size, dtype=np.int64)
    # disable=None: silent where stderr is not a terminal.
    with tqdm(desc="counting", unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
        for tokens in parts:
            if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
                wrong = tokens.max() if tokens.min() >= 0 else tokens.min()
                raise UserError(
                    f"the tokenizer gives token {wrong}, but the model's vocabulary has"
                    f" {vocab_size}"
                )
            np.add.at(counts, tokens, 1)
            bar.update(len(tokens))
    return counts
