"""Sampling in plain PyTorch: penalties, temperature and filters, counter-based randomness, inverse
CDF.

Shape legend: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from mtpkit.kernels import NO_TOKEN
from mtpkit.kernels.ancestors import seen_tokens
from mtpkit.kernels.draft_head.reference import argmax

SMALLEST = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max
"""Bounds of repetition penalties (both) and of penalised logits (LARGEST), so that finite logits
stay finite."""
_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


def philox(
    key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., 2011): four 32-bit words that are a pure function of key and
    counter.

    Args:
        key: [N] int64, 64 bits.
        counter: four [N] int64 tensors with values below 2^32.

    Returns:
        Four [N] int64 tensors with values below 2^32.
    """
    key0 = key & _WORD
    key1 = (key >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(_PHILOX_ROUNDS):
        # The 64-bit products wrap to negative int64; shift and mask still find their unsigned
        # halves.
        left = c0 * _PHILOX_MULTIPLIERS[0]
        right = c2 * _PHILOX_MULTIPLIERS[1]
        c0 = ((right >> 32) & _WORD) ^ c1 ^ key0
        c1 = right & _WORD
        c2 = ((left >> 32) & _WORD) ^ c3 ^ key1
        c3 = left & _WORD
        key0 = (key0 + _PHILOX_WEYL[0]) & _WORD
        key1 = (key1 + _PHILOX_WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(
    seeds: Tensor, positions: Tensor, stream: int, branches: Tensor | None = None
) -> Tensor:
    """Uniform random numbers that depend on seed, token position, stream and branch, not on the
    rest of the batch.

    Args:
        seeds: [N] int64.
        positions: [N] int64, position of the token that the number decides.
        stream: index among the independent numbers of that position.
        branches: [N] int64 below 2^32, index among several tokens at one position; None: branch 0
            for all.

    Returns:
        [N] float64 in [0, 1), multiples of 2^-48, so that the product with any total stays below
        that total.
    """
    zeros = torch.zeros_like(positions)
    counter = (
        positions & _WORD,
        (positions >> 32) & _WORD,
        zeros + stream,
        zeros if branches is None else branches,
    )
    high, low, _, _ = philox(seeds, counter)
    return ((high << 16) + (low >> 16)).double() / 2.0**48


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    slots: Tensor,
    drafts: Tensor,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Penalise tokens that occurred: repetition counts prompt and output, frequency and presence
    the output only.

    Args:
        logits: [N, V]; the first D * (1 + K) belong to D rows with K drafts each.
        prompt_mask: [slots, V] bool, tokens that are in the prompt of the request at a slot.
        output_counts: [slots, V] int, how often each token is in the output of the request at a
            slot.
        repetition, frequency, presence: [slots] float; 1, 0 and 0 leave the request's logits as
            they are.
        slots: [N] int64, the slot of each row of logits; a negative slot counts from the last one.
        drafts: [D, K] int64; of a row's 1 + K rows of logits, the one at index j counts drafts 0 ..
            j - 1 as output. -1: a token that is not among these V.
        ancestors: [D, 1 + K] int64 masks of rows whose drafts are trees, see `kernels.ancestors`;
            token 1 + j of a tree is draft j, and each row of logits counts the drafts in its mask.
            None: chains.

    Returns:
        [N, V] float32. Finite logits stay finite whatever the penalties; other logits are
        unchanged, so that an invalid row stays invalid.
    """
    logits = logits.float()
    counts = output_counts[slots].float()
    rows, depths = drafts.shape
    seen = counts.new_zeros(rows, 1 + depths, counts.shape[-1])
    seen[:, 1:].scatter_(-1, drafts[..., None].clamp_min(0), (drafts >= 0)[..., None].float())
    earlier = (
        seen.cumsum(1) if ancestors is None else seen_tokens(ancestors, 1 + depths).float() @ seen
    )
    counts[: rows * (1 + depths)] += earlier.flatten(0, 1)
    repetition, frequency, presence = (
        values[slots, None] for values in (repetition, frequency, presence)
    )
    factor = torch.where(
        prompt_mask[slots] | (counts > 0), repetition.clamp(SMALLEST, LARGEST), 1.0
    )
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = penalised - frequency * counts - presence * (counts > 0)
    return torch.where(logits.isfinite(), penalised.clamp(-LARGEST, LARGEST), logits)


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Compute the distribution to sample from: temperature, then min-p, top-k and top-p, then
    softmax.

    Args:
        logits: [N, V].
        temperature: [N] float; 0 puts all mass on the first token with the largest logit.
        top_k: [N] int64 in 1..V (V: off), or None if no row uses it; ties with the k-th are kept.
        top_p: [N] float in (0, 1] (1: off), or None.
        min_p: [N] float in [0, 1] (0: off), or None.

    Returns:
        [N, V] float32; NaN in an invalid row, which has NaN or +inf, or nothing but -inf.
    """
    greedy = temperature == 0
    best = argmax(logits)
    valid = (best != NO_TOKEN)[:, None]
    # Logits relative to the largest one cannot overflow to +inf, however small the temperature is.
    scaled = logits.float() - logits.float().amax(-1, keepdim=True)
    scaled = scaled / torch.where(greedy, 1.0, temperature)[:, None]
    if min_p is not None:
        distribution = scaled.softmax(-1)
        scaled = scaled.masked_fill(
            distribution < min_p[:, None] * distribution.amax(-1, keepdim=True), -torch.inf
        )
    if top_k is not None or top_p is not None:
        scaled = _keep_top(scaled, top_k, top_p)
    certain = torch.zeros_like(scaled).scatter_(-1, best.clamp_min(0)[:, None], 1.0)
    return torch.where(valid, torch.where(greedy[:, None], certain, scaled.softmax(-1)), torch.nan)


def _keep_top(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Mask the tokens that top-k and top-p leave out; top-p applies to the mass that top-k
    keeps."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered = ordered.masked_fill(ordered < ordered.gather(-1, top_k[:, None] - 1), -torch.inf)
    if top_p is not None:
        mass = ordered.softmax(-1)
        mass_before = mass.cumsum(-1) - mass
        # Skip rows without top-p: their rounded cumulative mass may reach 1 before the last token.
        ordered = ordered.masked_fill(
            (mass_before >= top_p[:, None]) & (top_p < 1)[:, None], -torch.inf
        )
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverse CDF.

    Args:
        weights: [N, V], non-negative; need not be normalised.
        uniforms: [N] float64 from `uniform`.

    Returns:
        [N] int64; a token of weight 0 is never drawn. `NO_TOKEN` in a row whose sum is not positive
        or is NaN.
    """
    cumulative = weights.double().cumsum(-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return torch.where(cumulative[:, -1] > 0, tokens, NO_TOKEN)


def sample_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Draw one token per row from `probabilities`; rows of temperature 0 take the first best token.

    Args:
        logits, temperature, top_k, top_p, min_p: as for `probabilities`.
        uniforms: [N] float64 from `uniform`.

    Returns:
        [N] int64, the token that `sample` draws, unless rounding of the sums moves a token's
        boundary past the uniform number; `NO_TOKEN` in the rows where `argmax` gives it.
    """
    return sample(probabilities(logits, temperature, top_k, top_p, min_p), uniforms)
