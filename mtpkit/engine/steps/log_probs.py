"""Log-probabilities of the tokens that a step chooses, computed on the device and packed into the
integers of its result.

They are computed in steps that have a request which asks for them, for all rows of the step.

Shape legend: S rows that sample, D decode rows, K drafts, N logits, V vocabulary, n =
`MOST_LOG_PROBS`.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtpkit.engine.requests.log_probs import MOST_LOG_PROBS, TokenLogProbs
from mtpkit.engine.steps import verifier
from mtpkit.engine.steps.plan import Batch, Verdict
from mtpkit.engine.steps.processor import LOG_PROBS, Use
from mtpkit.engine.steps.vocabulary import Vocabulary
from mtpkit.kernels import NO_TOKEN

COLUMNS = 2 + 2 * MOST_LOG_PROBS
"""Integers per position: value, rank, n tokens, and their n values. Values are the bits of
float32."""


_TOKENS_AT_ONCE = 256

Mode = Literal["raw_logprobs", "processed_logprobs"]
"""Whether probabilities are the model's own, or those that tokens are chosen by."""


def columns_of(use: Use, depths: int) -> int:
    """Integers at the end of each row of a step's result, for K = `depths`."""
    return (1 + depths) * COLUMNS if LOG_PROBS in use else 0


def pack_chosen(logits: Tensor, batch: Batch, verdict: Verdict, mode: Mode) -> Tensor | None:
    """[S, (1 + K) * COLUMNS] int64, the log-probabilities of `Verdict.token_ids`; without meaning
    after the accepted tokens. None: no row asks for them.

    Args:
        logits: [N, V], the model's, see `Batch.logit_indices`.
    """
    if LOG_PROBS not in batch.sampling.use:
        return None
    if mode == "processed_logprobs":
        logits = verifier.log_distributions(logits, batch)
    rows = batch.inputs.num_decode_rows
    count = batch.inputs.num_decode_tokens
    sampling = batch.shape.sampling_rows
    positions = verdict.token_ids.shape[1]
    vocabulary = batch.sampling.vocabulary

    parts = []
    for group in batch.inputs.decode_groups:
        decoded = logits[group.tokens]
        width = group.width
        if verdict.path is not None:
            # The logits along each row's accepted path.
            first = torch.arange(rows, device=logits.device)[:, None] * width
            decoded = decoded[(first + verdict.path).flatten()]
            width = positions
        packed = pack(decoded, verdict.token_ids[group.rows, :width].flatten(), vocabulary)
        own = packed.view(group.num_rows, width * COLUMNS)
        parts.append(F.pad(own, (0, (positions - width) * COLUMNS)))
    if sampling > rows:
        packed = pack(logits[count:], verdict.token_ids[rows:sampling, 0], vocabulary)
        parts.append(F.pad(packed, (0, (positions - 1) * COLUMNS)))
    return torch.cat(parts)


def pack_prompts(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """[M, COLUMNS] int64, the log-probabilities of prompts, see `Batch.reported`.

    Args:
        logits_of: returns logits [n, v] of hidden states [n, h].
        hidden: [T, 1, h], see `StepOutput.hidden`.
    """
    assert batch.reported is not None
    places, following = batch.reported
    # Logits of a whole chunk would take gigabytes.
    parts = zip(places.split(_TOKENS_AT_ONCE), following.split(_TOKENS_AT_ONCE), strict=True)
    packed = [
        pack(logits_of(hidden[place, 0]), token_ids, batch.sampling.vocabulary)
        for place, token_ids in parts
    ]
    return torch.cat(packed)


def pack(logits: Tensor, token_ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[M, COLUMNS] int64 for logits [M, v] and one token per row, `token_ids` [M]."""
    values, ranks = vocabulary.log_probs(logits, token_ids.clamp_min(0))
    count = min(MOST_LOG_PROBS, vocabulary.size)
    top_ids, top_values = vocabulary.top_tokens(logits, count)
    missing = (0, MOST_LOG_PROBS - count)
    top_ids = F.pad(top_ids, missing, value=NO_TOKEN)
    top_values = F.pad(top_values, missing, value=torch.nan)
    bits = [values[:, None], top_values]
    value, others = (one.contiguous().view(torch.int32).long() for one in bits)
    return torch.cat([value, ranks[:, None], top_ids, others], 1)


def unpack(packed: np.ndarray) -> list[TokenLogProbs]:
    """One entry per position, from [positions * COLUMNS] integers."""
    rows = packed.reshape(-1, COLUMNS)
    bits = np.concatenate([rows[:, :1], rows[:, 2 + MOST_LOG_PROBS :]], 1).astype(np.int32)
    values = bits.view(np.float32).tolist()
    ranks = rows[:, 1].tolist()
    top_ids = rows[:, 2 : 2 + MOST_LOG_PROBS].tolist()
    return [
        TokenLogProbs(value[0], rank, ids, value[1:])
        for value, rank, ids in zip(values, ranks, top_ids, strict=True)
    ]
