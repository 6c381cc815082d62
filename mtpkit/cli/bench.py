"""Time decoding, serving and training; the same run times a copy and a matrix product."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtpkit.bench.settings import (
    LARGE_SHAPES,
    LOAD_DRAFTS,
    OF_MIXED,
    ON_CPU,
    SMALL_SHAPES,
    USUAL_DRAFTS,
    AgentConfig,
    DecodeConfig,
    HeadFormat,
    HeadsConfig,
    LoadConfig,
    PrefillConfig,
    PublishedFormat,
    RooflineConfig,
    StallConfig,
    TrainBenchConfig,
    TurnsConfig,
    asked_drafts,
)
from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.config.checked import keys_of
from mtpkit.engine import EngineOptions
from mtpkit.engine.requests.options import HubOptions
from mtpkit.errors import listed

if TYPE_CHECKING:
    import torch

    from mtpkit.bench.report import Result
    from mtpkit.model.hybrid import HybridModel
    from mtpkit.model.stages import StageBalance

app = new_app(no_args_is_help=True, help=__doc__)

_SHAPES = (
    "A model directory, the id of a model in the Hugging Face hub, or published sizes with random"
    f" weights: {', '.join(LARGE_SHAPES)} on a GPU; {', '.join(SMALL_SHAPES)}, small ones of their"
    " kinds, on a CPU."
)
NVIDIA_8B = "nemotron-h-8b"
TINY = "nemotron-h-tiny"
Model = Annotated[str, typer.Option(help=_SHAPES)]
FittingModel = Annotated[
    str | None,
    typer.Option(
        help=f"{_SHAPES} By default {NVIDIA_8B}, without a GPU {TINY}.", show_default=False
    ),
]
Pattern = Annotated[
    str | None, typer.Option(help="Layers of a shape's head, such as '*-'; by default '*'.")
]
WeightFormat = Annotated[
    PublishedFormat | None,
    typer.Option(
        help=(
            "Format of a shape's matrices, as checkpoints in this format are published: fp8-blocks"
            " (DeepSeek-V3, Qwen) of base and heads, int4 or nvfp4 of the base. --quantization fp8"
            " is a scale per row of the base."
        ),
        show_default=False,
    ),
]
Heads = Annotated[
    HeadFormat | None,
    typer.Option(
        help=(
            "Format of the layers of a shape's heads, such as nvfp4; by default as --weight-format"
            " says."
        ),
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        callback=options.writable_directory, help="Directory for the result as .json and .md."
    ),
]


@app.command(cls=Command)
@options.takes_options
def decode(
    context: typer.Context,
    model: FittingModel = None,
    pattern: Pattern = None,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="Give a shape one head per depth.")
    ] = False,
    weight_format: WeightFormat = None,
    head_format: Heads = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Real prompts (text or .jsonl), repeated until the batch is full. Without"
                " --acceptance, drafts are "
                "verified."
            )
        ),
    ] = None,
    *,
    hub: options.Hub,
    config: Annotated[DecodeConfig, options.Fields()],
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Print which kernels a step consists of, too.")
    ] = False,
    output: Output = None,
    as_json: options.PrintJson = False,
) -> None:
    """Time decoding after prefill, next to the time it would take at the copy bandwidth measured in
    the same run.

    Without prompts, acceptance is synthetic, by default 0.85 at each depth, and the report says so.
    Three checks must pass before anything is timed: outputs have the requested length, the
    synthetic acceptance rate is the requested one, and the base's choices are those of its plain
    forward pass. To split a model over processes: torchrun --standalone --no-python
    --nproc-per-node 2 mtpkit bench decode --tensor-parallel-size 2 ... Layers are distributed over
    pipeline stages for the largest K and batch size given. To time each K with its own balance,
    give one K at a time.
    """
    from mtpkit.bench.decode import draft_parts, kernel_shares, measure_decode
    from mtpkit.bench.shapes import choose_drafts, get_config, read_token_ids
    from mtpkit.bench.timing import can_trace
    from mtpkit.engine.ranks import reports
    from mtpkit.model.stages import Decoding
    from mtpkit.platform import default_device

    model = _located(model, hub)
    model, (config,), small = _fitting(context, model, default_device(), config)
    engine = config.engine
    stages = engine.pipeline_parallel_size
    first = reports(engine.tensor_parallel_size, stages)
    if kernels and not config.trace:
        raise typer.BadParameter(
            "kernels are timed by tracing: leave one out", param_hint="--kernels / --no-trace"
        )
    if kernels and not can_trace(default_device()):
        raise typer.BadParameter(
            "tracing needs a GPU, and there is none: leave it out", param_hint="--kernels"
        )
    if engine.draft_vocab is not None and config.draft_vocab_size is not None:
        raise typer.BadParameter(
            "give a size or a file", param_hint="--draft-vocab-size / --draft-vocab"
        )
    # The default rates are for random prompts. On real ones the heads' own acceptance is measured.
    if prompts is not None and "acceptance" not in _given(context, config).values():
        config = replace(config, acceptance=None)
    shape = get_config(model, pattern, distinct)
    ks = choose_drafts(
        shape, asked_drafts(config.num_speculative_tokens, config.engine), USUAL_DRAFTS
    )
    config = replace(config, num_speculative_tokens=ks)
    balance = max(
        (Decoding.of(shape, k, max(config.batch_size), stages) for k in ks),
        key=lambda one: one.drafts,
    )
    # A file that cannot be read is refused before the model is loaded, which takes minutes.
    token_ids = None if prompts is None else read_token_ids(prompts, model)

    def keep(result: "Result[Any]") -> None:
        # Of the ranks of a split model, one writes.
        if output is not None and first:
            result.save(output)
            kernel_shares(result).save(output)
            draft_parts(result).save(output)

    opened = _open(model, engine, pattern, distinct, balance, weight_format, head_format)
    result = measure_decode(opened, config, token_ids, model, keep)
    _say(small)
    if kernels:
        kernel_shares(result).show_tables()
    if config.draft_cost and (parts := draft_parts(result)).rows:
        parts.show_tables()
    result.show(as_json)


@app.command(cls=Command)
@options.takes_options
def load(
    context: typer.Context,
    model: FittingModel = None,
    pattern: Pattern = None,
    weight_format: WeightFormat = None,
    head_format: Heads = None,
    workload: Annotated[
        Literal["mixed", "stall", "turns", "prefill", "long-agent"],
        typer.Option(
            help=(
                "Rule by which requests arrive. mixed: requests of many lengths, queued at once or"
                " arriving one by one. stall: prompts that arrive while other requests decode, and"
                " lone prompts. turns: conversations, without and with the prefix cache. prefill:"
                " prompts of one length, up to their first tokens. long-agent: sessions that each"
                " go on from a long prefix in the cache."
            )
        ),
    ] = "mixed",
    *,
    hub: options.Hub,
    config: Annotated[LoadConfig, options.Fields()],
    stall_rule: Annotated[StallConfig, options.Fields()],
    turns_rule: Annotated[TurnsConfig, options.Fields()],
    prefill_rule: Annotated[PrefillConfig, options.Fields()],
    agent_rule: Annotated[AgentConfig, options.Fields()],
    save_requests: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File for the requests of the workload mixed as JSON, for the scripts in"
                " benchmarks/peers; nothing is measured then."
            ),
        ),
    ] = None,
    output: Output = None,
    as_json: options.PrintJson = False,
) -> None:
    """Serve requests by one of five rules of arrival: tokens/s and latencies, next to a limit.

    Each K gets its own engine. Acceptance is synthetic. Mixed requests: the first run after a start
    is reported separately from the later runs, and three checks must pass before anything is
    reported: outputs have the requested length, the synthetic acceptance rate is the requested one,
    and the base's choices are those of its plain forward pass. Prompts alone (prefill) are compared
    with a plain forward pass, too, and conversations (turns) in fp32 with those without the cache.
    """
    from mtpkit.bench.load import measure_load
    from mtpkit.bench.load.requests import save_requests as save
    from mtpkit.bench.shapes import choose_drafts, get_config
    from mtpkit.files import check_writable
    from mtpkit.platform import default_device, require_one_process

    require_one_process()
    model = _located(model, hub)
    rules = {
        "stall": stall_rule,
        "turns": turns_rule,
        "prefill": prefill_rule,
        "long-agent": agent_rule,
    }
    of_workloads = {name: sorted(_given(context, rule)) for name, rule in rules.items()}
    of_load = _given(context, config) | _given(context, config.engine)
    of_workloads["mixed"] = sorted(name for name, field in of_load.items() if field in OF_MIXED)
    for name, given in of_workloads.items():
        if given and name != workload:
            raise typer.BadParameter(
                f"this is for --workload {name}, but the workload is {workload}",
                param_hint=listed(given, separator=" / "),
            )
    if save_requests is not None:
        if workload != "mixed":
            raise typer.BadParameter(
                f"the workload {workload} has no requests to save", param_hint="--save-requests"
            )
        check_writable(save_requests, file=True)
        # Not made small for a CPU: other engines serve these requests, perhaps on another machine.
        print(save(save_requests, config, get_config(model or NVIDIA_8B, pattern).vocab_size))
        return

    chosen = [rule for name, rule in rules.items() if name == workload]
    model, (config, *fitted), small = _fitting(
        context, model, default_device(), config, *chosen, unsaid=OF_MIXED if chosen else ()
    )
    drafts = choose_drafts(get_config(model, pattern), config.num_speculative_tokens, LOAD_DRAFTS)
    config = replace(config, num_speculative_tokens=drafts)
    opened = _open(
        model, config.engine, pattern, weight_format=weight_format, head_format=head_format
    )
    rule = fitted[0] if fitted else None
    result = measure_load(opened, config, rule, model, _keep(output))
    _say(small)
    result.show(as_json)


@app.command(cls=Command)
@options.takes_options
def train(
    context: typer.Context,
    model: FittingModel = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help=(
                "Settings of training, as for mtpkit train: heads.num_depths=2."
                " Sequence length and loss may have several values:"
                " data.sequence_length=4096,8192 loss.kind=ce,kl times four cases. With"
                " cache=memory, or any other name, random hidden states in the host's memory"
                " replace the base."
            ),
        ),
    ] = None,
    *,
    config: Annotated[TrainBenchConfig, options.Fields()],
    output: Output = None,
    as_json: options.PrintJson = False,
) -> None:
    """Time the trainer's steps on random weights and tokens: base, heads and optimizer, tokens/s,
    memory, TFLOP/s.

    The settings and their defaults are those of mtpkit train, whose --settings lists them; only
    heads.init is fresh. The keys model, output, data.train, data.eval and steps are not set here.

    FLOPs per token: 2 per base weight, 6 per head weight and depth, 4 per lm_head weight and depth.
    For several GPUs: torchrun --standalone --no-python --nproc-per-node N mtpkit bench train ...
    """
    from mtpkit.bench.train_cases import small_settings, training_cases

    given = overrides or []
    training_cases(given)  # wrong settings are refused before torch is imported
    from mtpkit.bench.shapes import get_base, require_gpu
    from mtpkit.bench.train import measure_training
    from mtpkit.platform import default_device
    from mtpkit.training.parallel import has_results

    small = small_settings(given) if default_device().type == "cpu" else []
    model, (config,), said = _fitting(context, model, default_device(), config, settings=small)
    require_gpu(model, default_device())
    cases = training_cases([*small, *given])
    result = measure_training(get_base(model), cases, config, model, _keep(output))
    if has_results():
        _say(said)
        result.show(as_json)


@app.command(cls=Command)
@options.takes_options
def roofline(
    model: Model = NVIDIA_8B,
    pattern: Pattern = None,
    weight_format: WeightFormat = None,
    head_format: Heads = None,
    *,
    config: Annotated[RooflineConfig, options.Fields()],
    works: Annotated[
        bool, typer.Option("--works", help="Show what each step consists of, too.")
    ] = False,
    output: Output = None,
    as_json: options.PrintJson = False,
) -> None:
    """Compute tokens/s from a bandwidth (for bytes) and a matrix rate (for FLOPs), without
    measuring anything.

    The bandwidth is that of a copy, as in `bench decode`. Reads alone may be faster, so the result
    is only a yardstick.
    """
    import torch

    from mtpkit.bench.roofline import tabulate_limits
    from mtpkit.bench.shapes import get_config, held_weights

    quantization = config.engine.quantization
    refuse_both(weight_format, quantization)
    dtype = getattr(torch, config.dtype)
    weights = held_weights(model, dtype, pattern, quantization, weight_format, head_format)
    steps, pieces = tabulate_limits(get_config(model, pattern), config, model, weights)
    if works:
        pieces.show_tables()
    _finish(steps, output, as_json)


@app.command(cls=Command)
@options.takes_options
def heads(
    model: Model = NVIDIA_8B,
    weight_format: WeightFormat = None,
    *,
    config: Annotated[HeadsConfig, options.Fields()],
    output: Output = None,
    as_json: options.PrintJson = False,
) -> None:
    """Compare what heads for a base would cost, without measuring anything: bytes and time of a
    draft by layers, format and vocabulary, and the K that pays at a given acceptance.

    Every head is listed in every format with every number of draft tokens. Acceptance is the same
    for all: what a cheaper head loses of it must be measured.
    """
    from mtpkit.bench.heads import compare_heads

    refuse_both(weight_format, config.engine.quantization)
    _finish(compare_heads(model, config, weight_format), output, as_json)


def _given(context: typer.Context, config: object) -> dict[str, str]:
    """Options of the settings that the command line has, each with the name of its field."""
    return {
        f"--{key.replace('_', '-')}": name
        for name, key in keys_of(type(config)).items()
        if getattr(context.get_parameter_source(key), "name", "DEFAULT") != "DEFAULT"
    }


def _fitting(
    context: typer.Context,
    model: str | None,
    device: "torch.device",
    *configs: Any,
    settings: Sequence[str] = (),
    unsaid: Collection[str] = (),
) -> tuple[str, list[Any], str]:
    """Fit the model and the settings to a device: without a GPU, settings that were not given
    become small ones.

    Args:
        settings: `key=value` settings that were made small before.
        unsaid: names of settings that this run does not have.

    Returns:
        The model, the settings, and a sentence that says which small numbers stand in, empty on a
        GPU. It is for `_say` when the run has ended, since an error is to be the only line.
    """
    if device.type == "cuda":
        return model or NVIDIA_8B, [*configs], ""

    chosen = model or TINY
    fitted = []
    said = [f"--model {chosen}"]
    for config in configs:
        keys = keys_of(type(config))
        given = _given(context, config).values()
        small = {name: value for name, value in ON_CPU[type(config)].items() if name not in given}
        fitted.append(replace(config, **small))
        for name, value in small.items():
            if name in unsaid:
                continue
            texts = map(str, value) if isinstance(value, tuple) else [str(value)]
            said.append(f"--{keys[name].replace('_', '-')} {' '.join(texts)}")
    said += settings
    sentence = f"mtpkit: no GPU, so this was a small run: {' '.join(said)}; options make it larger"
    return chosen, fitted, sentence


def _located(model: str | None, hub: HubOptions) -> str | None:
    """The directory of a model in the hub; shapes and directories stay as they are."""
    from mtpkit.checkpoint.hub import find_model

    return None if model is None else str(find_model(model, hub.revision, hub.download_dir))


def _say(sentence: str) -> None:
    """Print a sentence on standard error, if there is one."""
    if sentence:
        print(sentence, file=sys.stderr)


def _open(
    model: str,
    engine: EngineOptions,
    pattern: str | None = None,
    distinct: bool = False,
    balance: "StageBalance" = "memory",
    weight_format: PublishedFormat | None = None,
    head_format: HeadFormat | None = None,
) -> "HybridModel":
    from mtpkit.bench.shapes import open_model, require_gpu
    from mtpkit.platform import default_device

    refuse_both(weight_format, engine.quantization)
    device = default_device()
    require_gpu(model, device)
    return open_model(
        model,
        device,
        engine.dtype,
        pattern,
        distinct,
        engine.tensor_parallel_size,
        engine.enable_expert_parallel,
        engine.pipeline_parallel_size,
        balance,
        engine.quantization,
        weight_format,
        head_format,
    )


def refuse_both(weight_format: PublishedFormat | None, quantization: str | None) -> None:
    """Refuse two formats of the same matrices."""
    if weight_format is not None and quantization is not None:
        raise typer.BadParameter("give one of them", param_hint="--weight-format / --quantization")


def _keep(output: Path | None) -> "Callable[[Result[Any]], object] | None":
    return None if output is None else lambda result: result.save(output)


def _finish(result: "Result[Any]", output: Path | None, as_json: bool) -> None:
    """Save the result and print it."""
    if output is not None:
        result.save(output)
    result.show(as_json)
