"""`mtpkit speedup`: how much faster a model decodes with its MTP heads."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mtpkit.cli import options
from mtpkit.cli.command import ListCommand, new_app
from mtpkit.config import MOST_DRAFTS
from mtpkit.engine import COMMAND_DEFAULTS, EngineOptions

app = new_app()


@app.command(cls=ListCommand)
def speedup(
    model: options.Model,
    prompts: Annotated[
        Path, typer.Option(help='Text, one prompt a line, or .jsonl with {"prompt": ..} or {"prompt_token_ids": [..]}.')
    ],
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            max=MOST_DRAFTS,
            help="Drafts a step; 0 is always measured. By default 0 to 3, as far as the heads were trained.",
        ),
    ] = None,
    batch_size: Annotated[list[int], typer.Option(help="Requests at once, at most the prompts.")] = [1, 8],  # noqa: B006
    max_tokens: options.MaxTokens = COMMAND_DEFAULTS.max_tokens,
    output: Annotated[
        Path,
        typer.Option(callback=options.writable_directory, help="Directory for report.json, report.md, report.png."),
    ] = Path("outputs/speedup"),
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Only so many, evenly spread over the file.")] = None,
    repeats: Annotated[int, typer.Option(help="Times that everything is measured; the median counts.")] = 3,
    dtype: options.Dtype = "auto",
    temperature: options.Temperature = COMMAND_DEFAULTS.temperature,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    ignore_eos: options.IgnoreEos = False,
    block_size: options.BlockSize = EngineOptions.block_size,
    max_model_len: options.MaxModelLen = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = EngineOptions.gpu_memory_utilization,
    state_rollback: options.StateRollback = EngineOptions.state_rollback,
    state_dtype: options.StateDtype = EngineOptions.state_dtype,
    draft_sampling: options.DraftSampling = False,
    draft_vocab: options.DraftVocab = None,
    enforce_eager: options.EnforceEager = False,
) -> None:
    """Decode prompts at several batch sizes and K, and report tokens/s, speedup and acceptance.

    Tokens/s are generated tokens over the wall time of a whole run, prefill included. The last line printed is one JSON
    object. Exit code 1 when drafts changed the tokens of greedy fp32 decoding.
    """
    from mtpkit.bench import SpeedupConfig, measure_speedup, read_named_prompts
    from mtpkit.checkpoint import load_config
    from mtpkit.engine import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    ks = options.several_drafts(load_config(model), num_speculative_tokens, (0, 1, 2, 3))
    config = SpeedupConfig(
        ks=ks,
        batch_sizes=tuple(batch_size),
        repeats=repeats,
        sampling=sampling,
        block_size=block_size,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        state_rollback=state_rollback,
        state_dtype=state_dtype,
        draft_sampling=draft_sampling,
        draft_vocab=None if draft_vocab is None else str(draft_vocab),
        enforce_eager=enforce_eager,
    )
    listed = read_named_prompts(prompts, num_prompts)
    report = measure_speedup(model, listed, config, dtype)
    report.save(output)
    if num_speculative_tokens is None and ks == (0,):
        print(f"{model} has no MTP heads: K = 0 was measured alone", file=sys.stderr)
    print(f"the report is in {output}", file=sys.stderr)
    report.show()
    if sampling.greedy and report.dtype == "float32":
        report.require_identical()
