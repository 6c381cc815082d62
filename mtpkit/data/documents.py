"""Samples to documents: token ids, and which of them are wanted as predictions."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING

import numpy as np

from mtpkit.data.sources import Sample
from mtpkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256
"""Samples that are handed to the tokenizer at once; it works on them in parallel."""


@dataclass(frozen=True)
class Document:
    """`token_ids` [n] int32; `loss_mask` [n] bool, True where the token is wanted as a prediction target."""

    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def has_targets(self) -> bool:
        """Whether there is anything to learn; nothing predicts a document's first token."""
        return bool(self.loss_mask[1:].any())

    def split(self, length: int) -> list["Document"]:
        """Parts of at most `length` tokens, each a document of its own."""
        starts = range(0, len(self), length)
        return [Document(self.token_ids[i : i + length], self.loss_mask[i : i + length]) for i in starts]


def tokenize(samples: Iterable[Sample], tokenizer: "PreTrainedTokenizerBase") -> Iterator[Document]:
    """One document a sample: prompt (masked out), text, end-of-sequence token.

    The tokenizer's own first tokens (BOS) are kept where it adds them. A sample without text gives a document that is
    masked out entirely. Example, a prompt of tokens A B and a text of tokens C D:
        token_ids [A, B, C, D, eos], loss_mask [False, False, True, True, True]

    Raises:
        UserError: the tokenizer has no end-of-sequence token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError(f"the tokenizer in {tokenizer.name_or_path} has no eos_token; set it in tokenizer_config.json")
    for batch in batched(samples, BATCH):
        heads = _encode(tokenizer, [sample.prompt or sample.text for sample in batch], special=True)
        tails = _encode(tokenizer, [sample.text if sample.prompt else "" for sample in batch], special=False)
        for sample, head, tail in zip(batch, heads, tails, strict=True):
            if head and head[-1] == eos:
                head = head[:-1]
            token_ids = np.array([*head, *tail, eos], dtype=np.int32)
            loss_mask = np.full(len(token_ids), bool(sample.text))
            if sample.prompt:
                loss_mask[: len(head)] = False
            yield Document(token_ids, loss_mask)


def _encode(tokenizer: "PreTrainedTokenizerBase", texts: list[str], special: bool) -> list[list[int]]:
    # verbose=False: a text longer than the model's context is split here, and no reason to warn.
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
