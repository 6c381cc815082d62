"""From logits to tokens, with the parameters and the randomness of each request.

Shape legend: S rows that sample, N logits rows (a row of the step has 1 or 1 + K of them), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpkit.engine.request import Request
from mtpkit.kernels import sampling as ops
from mtpkit.kernels.draft_head import argmax
from mtpkit.platform import to_device

TOKEN_STREAM, ACCEPT_STREAM, DRAFT_STREAM = range(3)
"""Independent random numbers of a token: the token itself, the acceptance of its draft, the draft."""


@dataclass(frozen=True)
class Penalties:
    """Penalties and the tokens that they look at."""

    prompt_mask: Tensor
    """[S, V] bool."""
    output_counts: Tensor
    """[S, V] int32."""
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    """[S] float32 each."""


@dataclass(frozen=True)
class SamplingUse:
    """What any of a set of requests asks for; the rest need not be computed."""

    all_greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int) -> "SamplingUse":
        """What `requests` ask for."""
        params = [request.params for request in requests]
        return cls(
            all_greedy=all(p.greedy for p in params),
            top_k=any(0 < p.top_k < vocab_size for p in params),
            top_p=any(p.top_p < 1 for p in params),
            min_p=any(p.min_p > 0 for p in params),
        )


GREEDY = SamplingUse(all_greedy=True, top_k=False, top_p=False, min_p=False)
ANY_SAMPLING = SamplingUse(all_greedy=False, top_k=True, top_p=True, min_p=True)


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of S rows. A filter or penalty that no row uses is None."""

    all_greedy: bool
    temperature: Tensor
    """[S] float32."""
    top_k: Tensor | None
    """[S] int64."""
    top_p: Tensor | None
    min_p: Tensor | None
    """[S] float32."""
    seeds: Tensor
    """[S] int64."""
    penalties: Penalties | None


def sampling_tensors(requests: Sequence[Request], vocab_size: int, device: torch.device) -> SamplingTensors:
    """The parameters of `requests`, in their order."""
    params = [request.params for request in requests]

    def floats(name: str) -> Tensor:
        return to_device([getattr(p, name) for p in params], torch.float32, device)

    use = SamplingUse.of(requests, vocab_size)
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    temperature = [0.0 if p.greedy else p.temperature for p in params]
    return SamplingTensors(
        all_greedy=use.all_greedy,
        temperature=to_device(temperature, torch.float32, device),
        top_k=to_device(top_k, torch.int64, device) if use.top_k else None,
        top_p=floats("top_p") if use.top_p else None,
        min_p=floats("min_p") if use.min_p else None,
        seeds=to_device([request.seed for request in requests], torch.int64, device),
        penalties=_penalties(requests, vocab_size, device) if any(p.has_penalties for p in params) else None,
    )


def _penalties(requests: Sequence[Request], vocab_size: int, device: torch.device) -> Penalties:
    params = [request.params for request in requests]
    prompt_mask = torch.zeros(len(requests), vocab_size, dtype=torch.bool)
    output_counts = torch.zeros(len(requests), vocab_size, dtype=torch.int32)
    for row, request in enumerate(requests):
        if request.params.has_penalties:
            prompt_mask[row, request.prompt_token_ids] = True
            output_counts[row] = torch.bincount(
                torch.tensor(request.output_token_ids, dtype=torch.int64), minlength=vocab_size
            )
    repetition, frequency, presence = (
        to_device([getattr(p, f"{name}_penalty") for p in params], torch.float32, device)
        for name in ("repetition", "frequency", "presence")
    )
    return Penalties(prompt_mask.to(device), output_counts.to(device), repetition, frequency, presence)


def penalise(logits: Tensor, sampling: SamplingTensors, rows: Tensor, drafts: Tensor) -> Tensor:
    """[N, V] logits with penalties, which see the output and the drafts before each position.

    Args:
        logits: [N, V]; the first D * (1 + K) belong to the decode rows.
        sampling: of S rows, the decode rows first.
        rows: [N] int64, row of each.
        drafts: [D, K] int64.
    """
    if sampling.penalties is None:
        return logits
    penalties = sampling.penalties
    counts = penalties.output_counts[rows]
    num_rows, depths = drafts.shape
    seen = torch.zeros(num_rows, 1 + depths, counts.shape[-1], dtype=counts.dtype, device=counts.device)
    seen[:, 1:].scatter_(-1, drafts[..., None], 1)
    counts[: num_rows * (1 + depths)] += seen.cumsum(1, dtype=seen.dtype).flatten(0, 1)
    return ops.apply_penalties(
        logits,
        penalties.prompt_mask[rows],
        counts,
        penalties.repetition[rows],
        penalties.frequency[rows],
        penalties.presence[rows],
    )


def probabilities(logits: Tensor, sampling: SamplingTensors, rows: Tensor) -> Tensor:
    """[N, V] float32 distributions that the rows sample from."""
    return ops.probabilities(logits, sampling.temperature[rows], *_filters(sampling, rows))


def _filters(sampling: SamplingTensors, rows: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    top_k, top_p, min_p = (None if v is None else v[rows] for v in (sampling.top_k, sampling.top_p, sampling.min_p))
    return top_k, top_p, min_p


def uniforms(
    sampling: SamplingTensors, rows: Tensor, positions: Tensor, stream: int, branches: Tensor | None = None
) -> Tensor:
    """[N] float64 random numbers for the tokens at `positions` [N], and `branches` [N] where rows are no chains."""
    return ops.uniform(sampling.seeds[rows], positions, stream, branches)


def sample(logits: Tensor, sampling: SamplingTensors, rows: Tensor, positions: Tensor) -> Tensor:
    """[N] int64 tokens for `positions` [N] int64: the best ones of greedy rows, draws for the others."""
    if sampling.all_greedy:
        return argmax(logits)
    filters = _filters(sampling, rows)
    numbers = uniforms(sampling, rows, positions, TOKEN_STREAM)
    return ops.sample_logits(logits, sampling.temperature[rows], *filters, numbers)
