"""Rules about single tokens: biased, allowed, forbidden until the output is long enough, or at the
end of a sequence.

What a request may have of each is bounded, as its slot has columns of fixed size.

Shape legend: S rows that sample, N logits rows, D decode rows, K drafts, V vocabulary, v the part
of it that this rank holds, W forbidden sequences, L tokens of each.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.requests.request import Request
from mtpkit.engine.requests.token_limits import (
    MOST_BAD_WORDS,
    MOST_BIASED,
    MOST_END_TOKENS_OF_MIN,
    MOST_TOKENS_OF_BAD_WORD,
)
from mtpkit.engine.steps.processor import Chosen, Column, Columns, Processor, Seen
from mtpkit.engine.steps.vocabulary import Vocabulary
from mtpkit.model.inputs import TreeInput
from mtpkit.platform import to_device

BITS = 32
"""Tokens per integer of a bit mask."""
_EARLIER = MOST_TOKENS_OF_BAD_WORD - 1
_NONE = -1
"""Padding of lists of tokens."""
_ANY = -2
"""Padding before a short sequence: matches any token, and none."""


class TokenRules(Processor):
    """`logit_bias`, `allowed_token_ids`, `min_tokens` and `bad_words`, as vLLM defines them.

    They change logits before penalties and temperature. One processor has all four, so that few
    graphs are captured. Slots of requests without rules may hold any values but in `ruled`.
    """

    name = "token_rules"

    def columns(self, vocabulary: Vocabulary, masks: int) -> dict[str, Column]:
        allowed = Column((-(-vocabulary.width // BITS),), torch.int32, -1)
        biased = Column((MOST_BIASED,), torch.int64, _NONE)
        bad_words = Column((MOST_BAD_WORDS, MOST_TOKENS_OF_BAD_WORD), torch.int64, _NONE)
        return {
            "ruled": Column((), torch.bool, 0),
            "allowed_bits": allowed,
            "biased_ids": biased,
            "bias": Column((MOST_BIASED,), torch.float32, 0.0),
            "end_from": Column((), torch.int64, 0),
            "end_ids": Column((MOST_END_TOKENS_OF_MIN,), torch.int64, _NONE),
            "bad_words": bad_words,
            "newest_output": Column((_EARLIER,), torch.int64, _NONE),
        }

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        return params.has_token_rules

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        return {"ruled": float(params.has_token_rules)}

    def admit(
        self, columns: Columns, slots: Tensor, requests: Sequence[Request], vocabulary: Vocabulary
    ) -> None:
        """Write the rules. The newest output token is left out: `count` adds it."""
        ruled = [request for request in requests if request.params.has_token_rules]
        if not ruled:
            return
        places = to_device([request.slot for request in ruled], torch.int64, slots.device)
        rows = [_row(request, vocabulary) for request in ruled]
        for name in rows[0]:
            column = columns[name]
            values = np.stack([row[name] for row in rows])
            column[places] = to_device(values, column.dtype, slots.device)

    def count(self, columns: Columns, slots: Tensor, chosen: Chosen) -> None:
        """Append the chosen tokens to the newest output."""
        newest = columns["newest_output"]
        known = torch.cat([newest[slots], chosen.token_ids], 1)
        index = torch.arange(1, 1 + _EARLIER, device=slots.device)
        newest[slots] = known.gather(1, chosen.accepted[:, None] + index)

    def apply(self, logits: Tensor, columns: Columns, slots: Tensor, seen: Seen) -> Tensor:
        """See `Processor.apply`; the result is float32."""
        ruled = columns["ruled"][slots][:, None]
        logits = _add(logits.float(), columns["biased_ids"][slots], columns["bias"][slots], ruled)

        allowed = unpacked(columns["allowed_bits"][slots], logits.shape[1])
        logits = logits.masked_fill(ruled & ~allowed, -torch.inf)

        early = seen.positions() < columns["end_from"][slots]
        logits = _forbid(logits, columns["end_ids"][slots], ruled & early[:, None])

        bad_words = columns["bad_words"][slots]
        starts = bad_words[..., :-1]
        before = _before(columns["newest_output"], slots, seen)[:, None]
        begun = ((starts == before) | (starts == _ANY)).all(-1)
        return _forbid(logits, seen.vocabulary.place(bad_words[..., -1]), ruled & begun)


def _row(request: Request, vocabulary: Vocabulary) -> dict[str, np.ndarray]:
    """A request's values of the columns."""
    params = request.params
    allowed = np.full(-(-vocabulary.width // BITS), -1, np.int32)
    if params.allowed_token_ids is not None:
        allowed = _packed(_own(params.allowed_token_ids, vocabulary), vocabulary.width)

    bias = params.logit_bias or {}
    biased = _own(tuple(bias), vocabulary)

    end_from = 0
    end_ids: list[int] = []
    if params.min_tokens:
        end_from = len(request.prompt_token_ids) + params.min_tokens
        end_ids = _own(sorted(request.end_token_ids), vocabulary)

    bad_words = np.full((MOST_BAD_WORDS, MOST_TOKENS_OF_BAD_WORD), _NONE)
    for row, word in zip(bad_words, request.bad_words, strict=False):
        row[:] = _ANY
        row[-len(word) :] = word

    newest = request.token_ids[len(request.prompt_token_ids) : request.prefill_end][-_EARLIER:]
    return {
        "allowed_bits": allowed,
        "biased_ids": _padded(biased, MOST_BIASED),
        "bias": _padded([bias[column + vocabulary.first] for column in biased], MOST_BIASED),
        "end_from": np.array(end_from),
        "end_ids": _padded(end_ids, MOST_END_TOKENS_OF_MIN),
        "bad_words": bad_words,
        "newest_output": _padded(newest[::-1], _EARLIER)[::-1],
    }


def _own(token_ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """The columns of the tokens that this rank holds."""
    columns = (token_id - vocabulary.first for token_id in token_ids)
    return [column for column in columns if 0 <= column < vocabulary.width]


def _padded(values: Sequence[float], length: int) -> np.ndarray:
    """[length] the values, then `_NONE`."""
    return np.array([*values, *[_NONE] * (length - len(values))])


def _packed(columns: Sequence[int], width: int) -> np.ndarray:
    """[ceil(width / 32)] int32, the bit mask of some columns; the first is the lowest bit."""
    bits = np.zeros(-(-width // BITS) * BITS, np.bool_)
    bits[list(columns)] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def unpacked(words: Tensor, width: int) -> Tensor:
    """[N, width] bool, the bits of masks [N, ceil(width / 32)] int32."""
    places = torch.arange(BITS, dtype=torch.int32, device=words.device)
    bits = (words[..., None] >> places) & 1
    return bits.flatten(1)[:, :width].bool()


def _add(logits: Tensor, columns: Tensor, bias: Tensor, where: Tensor) -> Tensor:
    """Add `bias` [N, B] at columns [N, B] where a mask [N, 1] is set; negative columns are left
    out."""
    added = torch.where(where & (columns >= 0), bias, 0.0)
    return logits.scatter_add(1, columns.clamp_min(0), added)


def _forbid(logits: Tensor, columns: Tensor, where: Tensor) -> Tensor:
    """Set logits at columns [N, C] to -inf where a mask [N, C] is set; negative columns are left
    out."""
    # The least of several: a column may occur twice, forbidden by one entry and not by the other.
    least = torch.where(where & (columns >= 0), -torch.inf, torch.inf)
    return logits.scatter_reduce(1, columns.clamp_min(0), least.to(logits.dtype), "amin")


def _before(newest_output: Tensor, slots: Tensor, seen: Seen) -> Tensor:
    """[N, L - 1] int64, the newest output tokens before each logit, drafts included."""
    rows, depths = seen.drafts.shape
    count = rows * (1 + depths)
    before = newest_output[slots]
    if not rows:
        return before
    # The newest output token is the row's first token, before all drafts.
    committed = before[:count].view(rows, 1 + depths, -1)[:, 0]
    known = torch.cat([committed, seen.drafts], 1)
    width = 1 + depths
    if seen.tree is None:
        drafted = known.unfold(1, _EARLIER, 1)
    else:
        drafted = _along_trees(known, width, seen.tree)
    return torch.cat([drafted.reshape(count, -1), before[count:]])


def _along_trees(known: Tensor, width: int, tree: TreeInput) -> Tensor:
    """[D, T, L - 1] the newest tokens up to each token of a tree, on the path from its root.

    Args:
        known: [D, L - 1 + T - 1]: the newest output tokens, the last of which is the root, then the
            drafts.
        width: T.
    """
    assert tree.parents is not None
    parents = tree.parents
    # Place of each token in `known`, and that of the token before it on its path.
    root = _EARLIER - 1
    place = torch.arange(width, device=known.device).expand_as(parents) + root
    found = []
    for _ in range(_EARLIER):
        found.append(known.gather(1, place.clamp_min(0)))
        inside = place > root
        parent = parents.gather(1, (place - root).clamp_min(0)) + root
        place = torch.where(inside, parent, place - 1)
    return torch.stack(found[::-1], -1)
