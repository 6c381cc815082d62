"""Functions that the scripts of this folder share: the file of requests, errors, percentiles and
printed results."""

import importlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import typer


@dataclass(frozen=True)
class Request:
    """One request of the load."""

    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float
    """Seconds after the first request at one request per second; at a rate of r, divide by r."""


def fail(message: str) -> NoReturn:
    """End the script with a one-line error."""
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)


def read_requests(path: Path) -> list[Request]:
    """Read the requests of a file that `mtpkit bench load --save-requests FILE` wrote."""
    try:
        return [Request(**one) for one in json.loads(path.read_text())["requests"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(
            f"{path} is no file of requests ({error}); write one: mtpkit bench load --save-requests"
            f" {path}"
        )


def require(package: str, wanted: str) -> ModuleType:
    """Import a peer, which is no dependency of mtpkit; `wanted` names the package and version to
    install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        fail(
            f"{package} cannot be imported ({error}): install {wanted} here, see"
            " benchmarks/peers/README.md"
        )


def vllm_arguments(
    model: Path,
    k: int,
    acceptance: Sequence[float],
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> dict[str, Any]:
    """Arguments for vLLM's engines: dummy weights in the shape of a config directory, fp32 state,
    synthetic acceptance.

    Args:
        acceptance: [K] conditional rate of each depth. vLLM takes unconditional ones, the product
            of those up to a depth.
    """
    if not (model / "config.json").is_file():
        fail(
            f"{model} has no config.json; write one: python benchmarks/peers/write_config.py"
            f" {model}"
        )
    arguments = dict(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        mamba_ssm_cache_dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=False,
        seed=0,
    )
    if k:
        arguments["speculative_config"] = dict(
            method="mtp",
            num_speculative_tokens=k,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=list(accumulate(acceptance, mul)),
        )
    return arguments


def percentiles_ms(seconds: Sequence[float]) -> list[float] | None:
    """The 50th and the 99th percentile in milliseconds, with linear interpolation; None if
    `seconds` is empty."""
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return (ordered[low] + (place - low) * (ordered[high] - ordered[low])) * 1e3

    return [at(0.5), at(0.99)] if ordered else None


def print_rows(
    benchmark: str, peer: ModuleType, rows: Sequence[Any], settings: dict[str, Any]
) -> None:
    """Print one line per row for people, and one JSON object as the last line."""
    import torch

    listed = [asdict(row) for row in rows]
    for row in listed:
        print(", ".join(f"{name} {_shown(value)}" for name, value in row.items()))
    result = {
        "benchmark": benchmark,
        "rows": listed,
        "peer": f"{peer.__name__} {getattr(peer, '__version__', 'unknown')}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "settings": settings,
    }
    print(json.dumps(result, default=str))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value}"
