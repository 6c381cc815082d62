"""Turn samples into documents (token ids and a mask of the prediction targets), and documents into
packed sequences.

All sequences have the same length and are filled first-fit. They are kept in Arrow tables, in which
a row is one packed sequence: `input_ids` (list of int32) and `loss_mask` (list of bool) of its
concatenated documents, and `document_lengths` (list of int32). Padding is not stored.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, chain
from typing import TYPE_CHECKING

import numpy as np

from mtpkit.data.chat import Chat, NothingToLearn, SampleError, empty_turns, learnt_turns
from mtpkit.data.options import SKIPPING, DataOptions, LongConversations
from mtpkit.data.rows import RowError
from mtpkit.data.samples import Sample
from mtpkit.data.tokenizer import Tokenizer, fingerprint, without_second_bos
from mtpkit.errors import UserError, shown

if TYPE_CHECKING:
    import pyarrow

BATCH = 256
"""Samples per call of the tokenizer, which works on them in parallel."""

ROWS = 1000
"""Most sequences per record batch, limited since Arrow counts the tokens of a record batch with 32
bits."""


@dataclass(frozen=True)
class Document:
    """A tokenised sample: `token_ids` [n] int32, and `loss_mask` [n] bool, True where the token is
    a prediction target."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    name: str = ""
    """Name of its sample."""
    problem: str = ""
    """Reason why it has no prediction targets, if it is known."""
    bad: bool = False
    """True: its row cannot be used, and `problem` says why."""
    opens_row: bool = True
    """Whether it is the first document of its row."""
    has_prompt: bool = False
    """Whether it is a conversation, or a prompt with a response; a later part of it would lack its
    beginning."""
    num_empty_answers: int = 0
    """Answers and texts without any text, which are not learnt."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def is_long(self, length: int) -> bool:
        """Whether it has a prompt and more than `length` tokens."""
        return self.has_prompt and len(self) > length

    def usable_parts(
        self, length: int, long_conversations: LongConversations = "split"
    ) -> list["Document"]:
        """Split into parts of at most `length` tokens, and leave out those without prediction
        targets.

        The first token of a part is no prediction target, since no token precedes it.

        Args:
            long_conversations: see `DataOptions`.
        """
        starts = range(0, len(self), length)
        if self.is_long(length) and long_conversations != "split":
            starts = starts[: long_conversations == "cut"]
        parts = (
            Document(self.token_ids[i : i + length], self.loss_mask[i : i + length], self.name)
            for i in starts
        )
        return [part for part in parts if part.loss_mask[1:].any()]

    def why_unusable(self, length: int) -> str:
        """Reason why there are no `usable_parts`; "" if it is not known."""
        return self.problem or ("longer than a sequence" if self.is_long(length) else "")


def tokenize(
    samples: Iterable[Sample],
    tokenizer: Tokenizer,
    own: str | None = None,
    vocab_size: int | None = None,
    options: DataOptions | None = None,
) -> Iterator[Document]:
    """Yield the documents of the samples, in order: one per sample, or one per turn as the options
    say.

    A text becomes the tokens that the tokenizer puts first (BOS), the prompt (masked out), the text
    and an end-of-sequence token. A conversation becomes its rendering by the chat template, with
    the assistant's tokens as prediction targets, see `Chat.encode`. Token ids that a model
    generated are kept if its tokenizer was the same. A sample of which nothing is to be learnt, or
    which cannot be used, becomes a document that is masked out entirely.

    Example, a prompt of tokens A B and a text of tokens C D:
        token_ids [A, B, C, D, eos], loss_mask [False, False, True, True, True]

    Args:
        own: the tokenizer's fingerprint, if it is known already.
        vocab_size: vocabulary size of the model, which may be larger than the tokenizer's; None:
            the tokenizer's.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, or no chat template for
            conversations.
        RowError: by the options no row is to be skipped, and a token that a model generated is
            outside the vocabulary, or the chat template refuses a conversation.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {tokenizer.name_or_path} has no eos_token; set it in"
            " tokenizer_config.json"
        )
    conversations = _Conversations(tokenizer, options or DataOptions())
    for batch in batched(samples, BATCH):
        if any(sample.completion_token_ids is not None for sample in batch):
            # Only now, since it hashes the vocabulary, and most data has no generated tokens.
            own = fingerprint(tokenizer) if own is None else own
            vocab_size = (
                max(tokenizer.get_vocab().values()) + 1 if vocab_size is None else vocab_size
            )
        generated = [
            sample.completion_token_ids is not None and sample.tokenizer == own for sample in batch
        ]
        plain = [
            s
            for s, tokens in zip(batch, generated, strict=True)
            if not tokens and s.messages is None
        ]
        texts = _texts(plain, tokenizer)
        for sample, tokens in zip(batch, generated, strict=True):
            try:
                if tokens:
                    assert vocab_size is not None
                    yield _from_tokens(sample, vocab_size, tokenizer.eos_token_id)
                elif sample.messages is None:
                    yield next(texts)
                else:
                    yield from conversations.documents(sample)
            except RowError as error:
                if options is None or options.on_bad_row == "stop":
                    raise RowError(f"{error}; {SKIPPING}") from error
                yield _nothing(sample, str(error).removeprefix(f"data: {sample.name}: "), bad=True)


class _Conversations:
    """Turns conversations into documents, as the options say."""

    def __init__(self, tokenizer: Tokenizer, options: DataOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._chats: dict[str, Chat] = {}

    def documents(self, sample: Sample) -> list[Document]:
        """The documents of a sample with messages.

        Raises:
            RowError: the chat template refuses it.
            UserError: there is no chat template.
        """
        assert sample.messages is not None
        chat = self._chat(sample)
        messages = sample.messages
        loss = self._options.loss
        num_empty = len(empty_turns(messages, loss))
        try:
            if not self._options.sample_per_turn:
                found = [chat.encode(messages, sample.tools, loss, sample.complete)]
            else:
                found = [
                    chat.encode(
                        messages[: index + 1],
                        sample.tools,
                        "last_turn",
                        sample.complete or index + 1 < len(messages),
                    )
                    for index in learnt_turns(messages, loss)
                ]
        except NothingToLearn as reason:
            return [_nothing(sample, str(reason), num_empty=num_empty)]
        except SampleError as error:
            raise RowError(f"data: {sample.name}: {error}") from error
        return [
            Document(
                token_ids,
                mask,
                sample.name,
                opens_row=number == 0,
                has_prompt=True,
                num_empty_answers=0 if number else num_empty,
            )
            for number, (token_ids, mask) in enumerate(found)
        ]

    def _chat(self, sample: Sample) -> Chat:
        """The chat template with the variables of the options and of the row."""
        values = {**self._options.chat_template_kwargs, **sample.template_kwargs}
        key = json.dumps(values, sort_keys=True)
        # Most rows share their variables.
        if key not in self._chats:
            self._chats[key] = Chat(self._tokenizer, values)
        return self._chats[key]


def _nothing(sample: Sample, problem: str, bad: bool = False, num_empty: int = 0) -> Document:
    """A document without tokens."""
    none = np.empty(0, dtype=np.int32)
    return Document(none, none.astype(bool), sample.name, problem, bad, num_empty_answers=num_empty)


def describe(name: str, problem: str) -> str:
    """Describe a sample that is left out, with the reason."""
    return f"{name or 'unnamed'} ({problem or 'empty mask'})"


def _from_tokens(sample: Sample, vocab_size: int, eos_token_id: int) -> Document:
    prompt = sample.prompt_token_ids or []
    completion = sample.completion_token_ids or []
    for column, token_ids in (("prompt_token_ids", prompt), ("completion_token_ids", completion)):
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise RowError(
                f"data: {sample.name}: {column!r} holds {shown(largest)}, but the vocabulary has"
                f" the tokens 0 to {vocab_size - 1}"
            )
    # The end alone is an empty answer too.
    if set(completion) <= {eos_token_id}:
        return _nothing(sample, "empty answer", num_empty=1)
    whole = np.array([*prompt, *completion], dtype=np.int32)
    return Document(
        whole, np.arange(len(whole)) >= len(prompt), sample.name, has_prompt=bool(prompt)
    )


def _texts(samples: list[Sample], tokenizer: Tokenizer) -> Iterator[Document]:
    if not samples:
        return
    eos = tokenizer.eos_token_id
    heads = _encode(tokenizer, [sample.prompt or sample.text for sample in samples], special=True)
    tails = _encode(
        tokenizer, [sample.text if sample.prompt else "" for sample in samples], special=False
    )
    for sample, head, tail in zip(samples, heads, tails, strict=True):
        head = without_second_bos(head, sample.prompt or sample.text, tokenizer)
        # Some tokenizers end every text with EOS; the text goes on after the prompt.
        if head and head[-1] == eos:
            head = head[:-1]
        token_ids = np.array([*head, *tail, *([eos] if sample.complete else [])], dtype=np.int32)
        # An empty text would teach that the end follows the prompt at once.
        loss_mask = np.full(len(token_ids), bool(sample.text))
        if sample.prompt:
            loss_mask[: len(head)] = False
        empty = "" if sample.text else "empty answer" if sample.prompt else "empty text"
        yield Document(
            token_ids,
            loss_mask,
            sample.name,
            problem=sample.problem or empty,
            bad=sample.bad,
            has_prompt=bool(sample.prompt),
            num_empty_answers=int(not sample.text and not sample.bad),
        )


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    # verbose=False: no warning about texts longer than the model's context, which are split here.
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]


def first_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Put items into bins, in order, each into the first bin with room for it; return the indices
    of each bin's items.

    Lengths are 1 .. capacity. Takes O(n log n): each node of a tree over the bins holds the largest
    room of the bins below it.

    Example: first_fit([3, 3, 1, 2], capacity=4) == [[0, 2], [1], [3]]
    """
    size = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * size)
    bins: list[list[int]] = []
    for item, length in enumerate(map(int, lengths)):
        node = 1
        while node < size:
            node *= 2
            # The left child holds the earlier bins, so it comes first if anything in it has room.
            if room[node] < length:
                node += 1
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(item)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            # Nothing changes above a node that keeps its room.
            if room[node] == most:
                break
            room[node] = most
    return bins


def pack(documents: Sequence[Document], sequence_length: int) -> "pyarrow.Table":
    """Pack whole documents, none longer than `sequence_length`, into a table of sequences."""
    import pyarrow as pa

    bins = first_fit([len(document) for document in documents], sequence_length)
    tables = []
    for group in batched(bins, ROWS):
        members = [documents[index] for index in chain.from_iterable(group)]
        token_ids = np.concatenate([document.token_ids for document in members])
        loss_mask = np.concatenate([document.loss_mask for document in members])
        lengths = np.array([len(document) for document in members], dtype=np.int32)
        tables.append(join(token_ids, loss_mask, lengths, [len(sequence) for sequence in group]))
    return pa.concat_tables(tables)


def join(
    token_ids: np.ndarray, loss_mask: np.ndarray, lengths: np.ndarray, counts: Sequence[int]
) -> "pyarrow.Table":
    """Make a table of sequences from concatenated documents.

    Args:
        token_ids: [n] int32, tokens of all documents.
        loss_mask: [n] bool.
        lengths: number of tokens of each document.
        counts: number of documents of each sequence.

    Example: join([1, 2, 3, 4, 5, 6], ..., lengths=[3, 1, 2], counts=[2, 1]) has the sequences [1,
    2, 3, 4] and [5, 6]
    """
    import pyarrow as pa

    documents = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.concatenate([[0], np.cumsum(lengths)])[documents].astype(np.int32)
    columns = {
        "input_ids": pa.ListArray.from_arrays(tokens, pa.array(token_ids, pa.int32())),
        "loss_mask": pa.ListArray.from_arrays(tokens, pa.array(loss_mask, pa.bool_())),
        "document_lengths": pa.ListArray.from_arrays(documents, pa.array(lengths, pa.int32())),
    }
    return pa.table(columns)


def table_fingerprint(table: "pyarrow.Table") -> str:
    """32 hexadecimal digits that are equal for tables of equal sequences, however they are cut into
    record batches."""
    hashes = []
    for column in ("input_ids", "loss_mask", "document_lengths"):
        # The lengths count too: the same tokens may be cut into other sequences.
        for counted in (False, True):  # contents of the lists, then their lengths
            digest = hashlib.blake2b(digest_size=16)
            for chunk in table.column(column).chunks:
                values = chunk.value_lengths() if counted else chunk.flatten()
                digest.update(values.to_numpy(zero_copy_only=False).tobytes())
            hashes.append(digest.hexdigest())
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
