"""The tokens that drafts are chosen among: the most frequent ones of a data set, in a small file.

Drafting scores fewer tokens then, and what the engine puts out stays the base's own: a token that is never drafted
costs an acceptance, nothing else.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtpkit.data.documents import tokenize
from mtpkit.data.prepared import open_prepared, read_manifest
from mtpkit.data.samples import Columns, read_samples
from mtpkit.data.sources import Source, find_sources
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COUNTED_AT_ONCE = 2**20
"""Tokens whose counts are added up together; each time costs a pass over the counts of the vocabulary."""


@dataclass(frozen=True)
class DraftVocab:
    """Tokens that drafts are chosen among."""

    token_ids: list[int]
    """Ascending."""
    vocab_size: int
    """Of the model."""
    coverage: float
    """Share of the tokens counted that are among them; what can be drafted at best."""
    files: list[str]
    """Where they were counted: files, and directories of prepared data."""

    def to_json(self) -> str:
        """The text of the file that `load_draft_vocab` reads."""
        return json.dumps(asdict(self)) + "\n"


def build_draft_vocab(
    paths: Iterable[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    size: int,
    eos_token_ids: Iterable[int] = (),
    columns: Columns | None = None,
) -> DraftVocab:
    """The `size` most frequent tokens of files, folders, globs and prepared data, with a progress bar.

    Tokens count where they are wanted as predictions: a prompt's do not. End-of-sequence and other special tokens are
    always among them. Of equally frequent tokens those with smaller ids are taken, also of those that do not occur.

    Args:
        vocab_size: of the model; its tokenizer may know fewer tokens.
        eos_token_ids: that the model has beside its tokenizer's.

    Raises:
        UserError: a size that does not fit, nothing to count, a tokenizer that is not the model's; and as
            `find_sources`, `read_samples`, `tokenize` and `open_prepared`.
    """
    always = {*eos_token_ids, *tokenizer.all_special_ids}
    if outside := sorted(token for token in always if not 0 <= token < vocab_size):
        raise UserError(f"special token {outside[0]} lies outside of the model's vocabulary of {vocab_size}")
    if not 0 < size <= vocab_size:
        raise UserError(f"size is {size}, must be 1 to {vocab_size}, the size of the vocabulary")
    if size < len(always):
        raise UserError(f"size is {size}, but there are {len(always)} special tokens, which are always included")
    sources = find_sources(paths)
    counts = _count(_wanted_tokens(sources, tokenizer, columns, vocab_size), vocab_size)
    total = int(counts.sum())
    if not total:
        raise UserError("data: no tokens to count: every text or response is empty; check the columns")
    rank = counts.copy()
    rank[list(always)] = total + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size])
    files = [str(file) for source in sources for file in (source.files or (source.prepared,))]
    return DraftVocab(chosen.tolist(), vocab_size, int(counts[chosen].sum()) / total, files)


def load_draft_vocab(path: str | Path, vocab_size: int | None = None) -> list[int]:
    """The token ids in a file of `DraftVocab.to_json`.

    Args:
        vocab_size: of the model that they are for; None: whatever the file says.

    Raises:
        UserError: a file that cannot be read, is of another kind or for another vocabulary, or holds ids that are
            outside of it or repeated.
    """
    try:
        content = read_json(path)
    except UserError as error:
        raise UserError(f"draft vocabulary {error}; write one with mtpkit data draft-vocab") from error
    ids, own_size = content.get("token_ids"), content.get("vocab_size")
    if not isinstance(ids, list) or type(own_size) is not int:
        raise UserError(f"draft vocabulary {path} lacks token_ids, a list, or vocab_size; write it with draft-vocab")
    if vocab_size is not None and own_size != vocab_size:
        raise UserError(
            f"draft vocabulary {path} is for a vocabulary of {shown(own_size)}, but the model's is {vocab_size}"
        )
    check_draft_vocab(ids, own_size, f"draft vocabulary {path}")
    return ids


def check_draft_vocab(token_ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Check ids that may have been written by hand.

    Raises:
        UserError: there are none, or some are no integers, outside of the vocabulary or repeated; `name` comes first.
    """
    if not token_ids:
        raise UserError(f"{name} is empty; it needs at least one token id")
    if wrong := [token for token in token_ids if type(token) is not int or not 0 <= token < vocab_size]:
        raise UserError(f"{name}: {listed(map(shown, wrong))} must be integers from 0 to {shown(vocab_size - 1)}")
    if twice := [token for token, times in Counter(token_ids).items() if times > 1]:
        raise UserError(f"{name}: {listed(twice)} repeated; name each token id once")


def _wanted_tokens(
    sources: Iterable[Source], tokenizer: "PreTrainedTokenizerBase", columns: Columns | None, vocab_size: int
) -> Iterator[np.ndarray]:
    """Tokens [n] int32 that are wanted as predictions, of a document or of many at a time."""
    for source in sources:
        if source.prepared is None:
            for document in tokenize(read_samples(source.files, columns), tokenizer, vocab_size=vocab_size):
                yield document.token_ids[document.loss_mask]
            continue
        length = read_manifest(source.prepared).sequence_length
        for part in open_prepared(source.prepared, tokenizer, length):
            for rows in part.table.to_batches():
                ids, mask = (rows.column(name).flatten() for name in ("input_ids", "loss_mask"))
                yield ids.to_numpy()[mask.to_numpy(zero_copy_only=False)]


def _count(parts: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """[V] int64, how often each token is wanted as a prediction."""
    from tqdm import tqdm

    counts = np.zeros(vocab_size, dtype=np.int64)
    # disable=None: silent where stderr is not a terminal.
    with tqdm(desc="counting", unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
        for tokens in _batches(parts):
            if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocab_size):
                wrong = tokens.max() if tokens.min() >= 0 else tokens.min()
                raise UserError(f"the tokenizer gives token {wrong}, but the model's vocabulary has {vocab_size}")
            counts += np.bincount(tokens, minlength=vocab_size)
            bar.update(len(tokens))
    return counts


def _batches(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same tokens, about `_COUNTED_AT_ONCE` together."""
    held: list[np.ndarray] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= _COUNTED_AT_ONCE:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)
