"""`mtpkit acceptance`: how often the base accepts the drafts of its heads on held-out data."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.cli.data import ColumnNames, Options, Sources
from mtpkit.training.config.settings import HeadAttention, ParallelConfig

app = new_app()

COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "steps": lambda found: f"{found['steps']:,}",
    "departures": lambda found: f"{found['departures']:.1%}",
    "loss": lambda found: f"{found['loss']:.4f}",
    "conditional acceptance": lambda found: " ".join(
        f"{rate:.1%}" for rate in found["conditional_acceptance"]
    ),
    "acceptance length": lambda found: _length(found, "acceptance_length"),
    "acceptance length at temperature 1": lambda found: _length(
        found, "sampling_acceptance_length"
    ),
    "acceptance length at temperature 1, sampled drafts": lambda found: _length(
        found, "draft_sampling_acceptance_length"
    ),
}
"""Columns of the table, each with a function that formats its cell from the numbers of a source."""


@app.command(cls=Command)
@options.takes_options
def acceptance(
    model: options.Model,
    data: Sources,
    num_depths: Annotated[
        int | None,
        typer.Option(min=1, help="K, drafts per step; by default what the heads were trained for."),
    ] = None,
    attention: Annotated[
        HeadAttention,
        typer.Option(help="Tokens that each depth attends to; auto: as when this model decodes."),
    ] = "auto",
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a packed sequence; by default the run's, if the model is from a run."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one forward pass.")] = 1,
    num_sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Only this many sequences of each source, spread over it."),
    ] = None,
    backend: Annotated[
        Literal["auto", "local", "te"],
        typer.Option(
            help=(
                "Implementation of the layers, as in training. local by default, where training has"
                " auto, since the "
                "engine decodes with those layers."
            )
        ),
    ] = "local",
    *,
    weights: options.Weights,
    hub: options.Hub,
    parallel: Annotated[
        ParallelConfig,
        options.Fields(only=("tensor", "pipeline", "expert"), suffix="_parallel_size"),
    ],
    output: Annotated[Path | None, typer.Option(help="File for the JSON object.")] = None,
    as_json: options.PrintJson = False,
    columns: ColumnNames,
    data_options: Options,
) -> None:
    """Print how often a base accepts its heads' drafts on held-out data, one row per source.

    Heads read the text's own tokens, and steps are those of a decoder along the text: the first one
    begins at an answer's first token, the next ones after the drafts that are accepted. The
    acceptance length is 1 + accepted drafts per step, with its 95% interval over prompts
    (bootstrap). Three are given: that of greedy decoding; the expected one at temperature 1 with
    the heads' best tokens as drafts, as in the engine by default; and the expected one at
    temperature 1 with drafts sampled from the heads (draft_sampling). On text that the base wrote
    itself in the same manner (`mtpkit data regenerate`) these are the engine's own numbers; greedy
    counts are equal. Departures are the tokens that are not the base's greedy choice: a step ends
    there, and the greedy acceptance length is too low where they are many. The loss is the KL
    divergence from the base; depth k has the weight 0.6^(k-1). Where the output is no terminal, or
    with --json, the last line printed is one JSON object. Under torchrun the processes share the
    work: torchrun --standalone --no-python --nproc-per-node N mtpkit acceptance ...
    """
    from mtpkit.bench.tables import print_object
    from mtpkit.checkpoint.hub import find_model
    from mtpkit.files import check_writable, write_file
    from mtpkit.training.evaluation import evaluate_directory

    # Refused now, not when the base has run over all data.
    if output is not None:
        check_writable(output, file=True)
    model = find_model(model, hub.revision, hub.download_dir)
    found = evaluate_directory(
        model,
        data,
        columns,
        _trained_length(model) if sequence_length is None else sequence_length,
        num_depths=num_depths,
        attention=attention,
        batch_size=batch_size,
        max_sequences=num_sequences,
        dtype=weights.dtype,
        quantization=weights.quantization,
        options=data_options,
        backend=backend,
        parallel=parallel,
    )
    if found is None:  # another process prints it
        return
    if output is not None:
        write_file(output, json.dumps(found) + "\n")
    _show(found)
    print_object(found, as_json)


def _trained_length(model: Path) -> int:
    """Sequence length of the training run that a directory is or belongs to; 1024 if it is no
    run's."""
    from mtpkit.checkpoint.directory import TRACKER
    from mtpkit.training.config.reading import load_config

    for place in (model, model.parent):
        if (place / TRACKER).exists() and (place / "config.yaml").exists():
            return load_config(place / "config.yaml").data.sequence_length
    return 1024


def _length(found: Mapping[str, Any], name: str) -> str:
    """An acceptance length, with its interval in a second line."""
    from mtpkit.training.bootstrap import show_interval

    interval = show_interval(found[f"{name}_interval"])
    return f"{found[name]:.3f}\n{interval}".rstrip()


def _show(found: dict[str, Any]) -> None:
    from rich.table import Column

    from mtpkit.bench.tables import WideTable, print_tables

    about = (
        f"K = {found['num_depths']}, {found['attention']}, sequences of {found['sequence_length']}"
        " tokens"
    )
    columns = [Column(name, justify="right") for name in COLUMNS]
    table = WideTable(Column("source"), *columns, keys=1, title=f"{found['model']}, {about}")
    sources = dict(found["sources"])
    if len(sources) > 1:
        sources["all"] = found
    for name, numbers in sources.items():
        table.add_row(name, *(show(numbers) for show in COLUMNS.values()))
    print_tables([table])
