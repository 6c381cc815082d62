"""Check each kernel against its reference twin, then time it.

The same run times a copy and a matrix product, with which all times are compared.

    python -m benchmarks.kernels --rows 64                                  # the 8B shape, on a GPU
    python -m benchmarks.kernels --check-only --model qwen3-next-slice      # for a memory checker
    python -m benchmarks.kernels --device cpu                               # to try the command
"""

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measure import ON_CPU, KernelConfig, check_kernels, measure_kernels
from mtpkit.bench.shapes import get_config, require_gpu
from mtpkit.bench.sizes import SHAPES
from mtpkit.cli.errors import run
from mtpkit.files import check_writable
from mtpkit.platform import require_one_process


def at_least(least: int) -> Callable[[str], int]:
    """A type of options: whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(f"{text} is no whole number")
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parse


def parse_options() -> argparse.Namespace:
    """The options of the command line; settings that are not given are missing from it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        help=f"a model directory, or one of {', '.join(SHAPES)}; by default nemotron-h-8b,"
        " on a CPU nemotron-h-tiny",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--check-only", action="store_true", help="compare, but time nothing")
    parser.add_argument("--output", type=Path, help="directory for the result as .json and .md")
    parser.add_argument("--json", action="store_true", help="print the JSON line in a terminal too")
    settings = parser.add_argument_group("what is measured", argument_default=argparse.SUPPRESS)
    settings.add_argument(
        "--rows", type=at_least(1), nargs="+", help="numbers of requests in a step"
    )
    settings.add_argument(
        "--num-speculative-tokens",
        dest="k",
        type=at_least(0),
        help="drafts per step (K): each request brings 1 + K tokens; by default 3",
    )
    settings.add_argument(
        "--context-length",
        dest="context_len",
        type=at_least(1),
        help="tokens of context of each request, and of each prompt; training sequences are 8"
        " times as long",
    )
    settings.add_argument("--ops", nargs="+", help="ops to measure; by default all")
    settings.add_argument("--state-dtype", choices=("float32", "bfloat16"))
    settings.add_argument(
        "--draft-vocab-size", type=at_least(1), help="draft only among this many first tokens"
    )
    return parser.parse_args()


def main() -> None:
    """Measure what the command line asks for, and print it."""
    options = parse_options()
    require_one_process()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    model = options.model or ("nemotron-h-8b" if on_gpu else "nemotron-h-tiny")
    names = {field.name for field in fields(KernelConfig)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in names
    }
    config = replace(KernelConfig() if on_gpu else ON_CPU, **given)
    require_gpu(model, device)
    if options.output is not None:
        check_writable(options.output)
    if options.check_only:
        for line in check_kernels(get_config(model), config, options.device):
            print(line)
        return

    keep = None if options.output is None else lambda result: result.save(options.output)
    result = measure_kernels(get_config(model), config, options.device, model, keep)
    result.show(options.json)


if __name__ == "__main__":
    run(main)
