"""`mtpkit speedup`: how much faster a model decodes with its MTP heads."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mtpkit.bench.settings import SPEEDUP_DRAFTS, SpeedupConfig, asked_drafts
from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app

app = new_app()


@app.command(cls=Command)
@options.takes_options
def speedup(
    model: options.Model,
    prompts: Annotated[
        Path,
        typer.Option(
            help=(
                'Text, one prompt per line, or .jsonl with {"messages": [..]}, {"prompt": ..} or'
                ' {"prompt_token_ids": [..]}.'
            )
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            callback=options.writable_directory,
            help="Directory for report.json, report.md, report.png.",
        ),
    ] = Path("outputs/speedup"),
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Only this many, evenly spread over the file.")
    ] = None,
    *,
    chat: options.Chat = False,
    template: options.Template,
    hub: options.Hub,
    config: Annotated[SpeedupConfig, options.Fields()],
    as_json: options.PrintJson = False,
) -> None:
    """Decode prompts at several batch sizes and K, and report tokens/s, speedup and acceptance.

    Tokens/s are generated tokens over the wall time of a whole run, prefill included. Where the
    output is no terminal, or with --json, the last line printed is one JSON object. Exit code 1
    when drafts changed the tokens of greedy fp32 decoding. To split a model over processes:
    torchrun --standalone --nproc-per-node 2 infer/eval_speedup.py --tensor-parallel-size 2 ...
    """
    from mtpkit.bench.shapes import as_conversations, choose_drafts, read_prompts
    from mtpkit.bench.speedup import measure_speedup
    from mtpkit.checkpoint import load_config
    from mtpkit.checkpoint.hub import find_model
    from mtpkit.engine.ranks import reports

    first = reports(config.engine.tensor_parallel_size, config.engine.pipeline_parallel_size)
    model = find_model(model, hub.revision, hub.download_dir)
    ks = choose_drafts(
        load_config(model),
        asked_drafts(config.num_speculative_tokens, config.engine),
        SPEEDUP_DRAFTS,
    )
    chosen = replace(config, num_speculative_tokens=ks)
    given = as_conversations(
        read_prompts(prompts, num_prompts), chat, template.chat_template_kwargs
    )
    report = measure_speedup(model, given, chosen)
    if first:
        report.save(output)
    if config.num_speculative_tokens is None and ks == (0,):
        print(f"{model} has no MTP heads: K = 0 was measured alone", file=sys.stderr)
    print(f"the report is in {output}", file=sys.stderr)
    report.show(as_json)
    # After the report, which shows the rows whose tokens changed. In bf16, near ties may change.
    if config.sampling.greedy and report.dtype == "float32":
        report.require_identical()
