"""The requests of a load: their lengths, tokens and arrivals, all from one seed, and the least time
that they take."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from mtpkit.bench.roofline import Roofline
from mtpkit.bench.settings import LoadConfig
from mtpkit.files import write_file


@dataclass(frozen=True)
class LoadRequest:
    """One request, without its tokens."""

    prompt_len: int
    """Tokens of the prompt."""
    max_tokens: int
    """Tokens of the output, exactly."""
    arrival: float
    """Seconds after the first request, at a rate of one request per second; a rate of r divides it
    by r."""


def draw_requests(config: LoadConfig) -> list[LoadRequest]:
    """The requests of a run, in the order of their arrival, the first one at 0.

    Lengths are drawn request by request, first the prompt's and then the output's, rounded down and
    limited.
    """
    lengths = random.Random(config.seed)
    # A generator of its own, so that the lengths do not depend on the arrivals.
    gaps = random.Random(f"arrivals {config.seed}")

    def draw(median: int, sigma: float, least: int, most: int) -> int:
        return max(least, int(min(most, lengths.lognormvariate(math.log(median), sigma))))

    requests: list[LoadRequest] = []
    arrival = 0.0
    for _ in range(config.num_prompts):
        prompt_len = draw(
            config.prompt_median, config.prompt_sigma, config.prompt_min, config.prompt_max
        )
        max_tokens = draw(
            config.output_median, config.output_sigma, config.output_min, config.output_max
        )
        requests.append(LoadRequest(prompt_len, max_tokens, arrival))
        arrival += gaps.expovariate(1.0)
    return requests


def draw_prompts(requests: Sequence[LoadRequest], vocab_size: int, seed: int) -> list[list[int]]:
    """Random tokens of the prompts."""
    ends = [0]
    for request in requests:
        ends.append(ends[-1] + request.prompt_len)
    tokens = torch.randint(vocab_size, (ends[-1],), generator=torch.Generator().manual_seed(seed))
    return [tokens[start:end].tolist() for start, end in pairwise(ends)]


def save_requests(path: Path, config: LoadConfig, vocab_size: int) -> str:
    """Write the requests of the first run and their tokens as JSON, which the scripts in
    benchmarks/peers read.

    Returns:
        A line for people, with the sums of tokens.

    Raises:
        StorageError: writing failed.
    """
    requests = draw_requests(config)
    prompts = draw_prompts(requests, vocab_size, config.seed)
    sums = token_sums(requests)
    listed = [
        {"prompt_token_ids": prompt, "max_tokens": request.max_tokens, "arrival": request.arrival}
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    settings = {
        "seed": config.seed,
        "max_num_seqs": config.engine.max_num_seqs,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
        "acceptance": config.usual_acceptance,
    }
    write_file(
        path, json.dumps({**settings, "vocab_size": vocab_size, **sums, "requests": listed}) + "\n"
    )
    prompt, output = sums.values()
    return f"{path}: {len(requests)} requests, {prompt:,} prompt and {output:,} output tokens"


def token_sums(requests: Sequence[LoadRequest]) -> dict[str, int]:
    """Tokens of all prompts and of all outputs."""
    return {
        "prompt_tokens": sum(request.prompt_len for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
    }


def limit_seconds(
    roofline: Roofline,
    requests: Sequence[LoadRequest],
    max_num_seqs: int,
    acceptance: Sequence[float],
    bandwidth: float,
    matrix_rate: float,
    fp8_rate: float | None = None,
) -> float:
    """Least time of a load: the matrices of the prompts at the matrix rate, then decoding at the
    roofline.

    Decoding counts as if `max_num_seqs` requests decoded all the time, at the mean context of all
    tokens. A request's first token comes with its prompt. Attention and recurrence of the prompts
    are left out.

    Args:
        acceptance: [K] conditional acceptance of each depth.
        bandwidth: bytes per second.
        matrix_rate, fp8_rate: FLOPs per second, see `Work.seconds`.
    """
    count = len(requests)
    prefill = roofline.prefill(
        count, sum(one.prompt_len for one in requests) / count, len(acceptance)
    )
    # At an endless bandwidth, FLOPs alone take time.
    rates = math.inf, matrix_rate, fp8_rate
    seconds = sum(work.seconds(*rates) for work in prefill.works if work.name == "matrices")
    decoded = [one.max_tokens - 1 for one in requests]
    if total := sum(decoded):
        contexts = sum(
            (one.prompt_len + one.max_tokens / 2) * n
            for one, n in zip(requests, decoded, strict=True)
        )
        step = roofline.decode(min(max_num_seqs, count), acceptance, contexts / total)
        seconds += total / step.limit_tokens_per_s(bandwidth, matrix_rate, fp8_rate)
    return seconds
