"""The effect of constraints on logits.

Shape legend: N logits rows, D decode rows, K drafts, V vocabulary, v the part of it that this rank
holds, T masks per slot, W integers per mask.
"""

import torch
from torch import Tensor

from mtpkit.engine.requests.params import SamplingParams
from mtpkit.engine.steps.processor import GRAMMAR, Column, Columns, Processor, Seen
from mtpkit.engine.steps.token_rules import BITS, unpacked
from mtpkit.engine.steps.vocabulary import Vocabulary


class Grammar(Processor):
    """`structured_outputs`: tokens that a grammar does not allow get -inf. The masks of a slot are
    written before each step, see `mtpkit.engine.steps.constrained`; tokens after a draft that is
    not legal keep masks of earlier steps, which have no effect."""

    name = GRAMMAR

    def columns(self, vocabulary: Vocabulary, masks: int) -> dict[str, Column]:
        words = -(-vocabulary.size // BITS) if vocabulary.width else 0
        return {
            "constrained": Column((), torch.bool, 0),
            "allowed_next": Column((masks, words), torch.int32, -1),
        }

    def used(self, params: SamplingParams, vocab_size: int) -> bool:
        return params.structured_outputs is not None

    def numbers(self, params: SamplingParams, vocab_size: int) -> dict[str, float]:
        return {"constrained": float(params.structured_outputs is not None)}

    def apply(self, logits: Tensor, columns: Columns, slots: Tensor, seen: Seen) -> Tensor:
        """See `Processor.apply`; the result is float32."""
        rows, depths = seen.drafts.shape
        index = torch.arange(1 + depths, device=logits.device).repeat(rows)
        # Chunks have one logit each.
        place = torch.cat([index, index.new_zeros(len(logits) - len(index))])
        words = columns["allowed_next"][slots, place]

        first = seen.vocabulary.first
        allowed = unpacked(words, seen.vocabulary.size)[:, first : first + logits.shape[1]]
        constrained = columns["constrained"][slots]
        return logits.float().masked_fill(constrained[:, None] & ~allowed, -torch.inf)
