"""`mtpkit serve`: an HTTP server with the interface of OpenAI's and of vLLM's."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mtpkit.bench.settings import LARGE_SHAPES, SMALL_SHAPES
from mtpkit.cli import options
from mtpkit.cli.bench import WeightFormat, refuse_both
from mtpkit.cli.command import Command, new_app
from mtpkit.config import MOST_DRAFTS
from mtpkit.engine import LLMOptions
from mtpkit.server.settings import ServerOptions

app = new_app()

_KEY = "MTPKIT_API_KEY"
_NOT_OPTIONS = ("synthetic_acceptance", "device")
"""Settings of the engine that are no options."""


@app.command(cls=Command)
@options.takes_options
def serve(
    model: Annotated[
        Path,
        typer.Argument(
            help=(
                "Model directory, in the Hugging Face or the Megatron layout, the id of a model in"
                " the Hugging Face hub, such as org/name, or, for load tests, published sizes with"
                f" random weights and --tokenizer: {', '.join(LARGE_SHAPES)} on a GPU;"
                f" {', '.join(SMALL_SHAPES)} on a CPU."
            )
        ),
    ],
    *,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a tokenizer, to be used instead of the one beside the model."
        ),
    ] = None,
    weight_format: WeightFormat = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help=(
                "Rate at which each draft of published sizes is accepted, given that all before it"
                " were. By default drafts are verified, and random weights accept hardly any."
            ),
            show_default=False,
        ),
    ] = None,
    server: Annotated[ServerOptions, options.Fields()],
    engine: Annotated[LLMOptions, options.Fields(without=_NOT_OPTIONS)],
) -> None:
    """Serve a model over HTTP, with the interface of OpenAI's and of vLLM's server.

    SIGTERM and Ctrl-C let responses under way end. Exit code 1 when the engine has died. To split a
    model over processes: torchrun --standalone --nproc-per-node 2 infer/serve.py MODEL
    --tensor-parallel-size 2 ... --data-parallel-size starts processes that each hold the whole
    model, behind one port.
    """
    from mtpkit.bench.shapes import to_serve
    from mtpkit.server.run import serve

    refuse_both(weight_format, engine.quantization)
    chosen = to_serve(model, tokenizer, weight_format, acceptance)
    rates = None if acceptance is None else [acceptance] * MOST_DRAFTS
    engine = replace(engine, model=chosen, synthetic_acceptance=rates)
    if server.api_key is None and (key := os.environ.get(_KEY)):
        server = replace(server, api_key=key)
    serve(engine, server)
