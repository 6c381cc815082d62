"""Time decoding, prefill, training and each kernel, beside a copy and a matrix product in the same run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from mtpkit.cli import options
from mtpkit.cli.command import ListCommand, new_app
from mtpkit.config import MOST_DRAFTS
from mtpkit.engine import EngineOptions, SamplingParams
from mtpkit.errors import listed

if TYPE_CHECKING:
    from mtpkit.bench.decode import DecodeRow
    from mtpkit.bench.report import Result

app = new_app(no_args_is_help=True, help=__doc__)

Model = Annotated[
    str,
    typer.Option(
        help="A shape with random weights (nemotron-h-8b, nemotron-3-nano, or nemotron-h-tiny and nemotron-3-tiny, "
        "which a CPU runs), or a model directory."
    ),
]
Pattern = Annotated[str | None, typer.Option(help="Layers of a shape's head, such as '*-'; by default '*'.")]
BatchSizes = Annotated[list[int], typer.Option(min=1, help="Requests that run at once.")]
Acceptance = Annotated[
    list[float] | None,
    typer.Option(
        min=0,
        max=1,
        help="Synthetic: rate at which each depth is accepted where all before it were; the last one holds on.",
    ),
]
Dtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of weights, keys and values.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Most tokens of a prefill step.")]
DraftVocabSize = Annotated[int | None, typer.Option(min=1, help="Draft among the first so many tokens.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the random prompts.")]
Output = Annotated[
    Path | None,
    typer.Option(callback=options.writable_directory, help="Directory for the result as .json and .md."),
]
NVIDIA_8B = "nemotron-h-8b"
_DRAFTS = (0, 1, 3)


@app.command(cls=ListCommand)
def decode(
    model: Model = NVIDIA_8B,
    pattern: Pattern = None,
    distinct: Annotated[bool, typer.Option("--distinct", help="Give a shape a head for each depth.")] = False,
    batch_size: BatchSizes = [1, 4, 16, 32, 64, 128],  # noqa: B006
    num_speculative_tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INTEGER|auto",
            help="Drafts a step; auto: as the engine chooses. By default 0, 1 and 3, as far as the heads were trained.",
        ),
    ] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 512,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Real prompts, text or .jsonl, in turn until the batch is full; without --acceptance drafts are then "
            "verified."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.")] = 256,
    acceptance: Acceptance = None,
    draft_vocab_size: DraftVocabSize = None,
    draft_vocab: Annotated[Path | None, typer.Option(help="File of the tokens to draft among.")] = None,
    presence_penalty: options.PresencePenalty = SamplingParams.presence_penalty,
    frequency_penalty: options.FrequencyPenalty = SamplingParams.frequency_penalty,
    repetition_penalty: options.RepetitionPenalty = SamplingParams.repetition_penalty,
    repeats: Annotated[int, typer.Option(help="Measurements, added up.")] = 3,
    dtype: options.Dtype = "auto",
    state_dtype: options.StateDtype = EngineOptions.state_dtype,
    state_rollback: options.StateRollback = EngineOptions.state_rollback,
    block_size: options.BlockSize = EngineOptions.block_size,
    max_num_batched_tokens: MaxNumBatchedTokens = 8192,
    enforce_eager: options.EnforceEager = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Print which kernels a step consists of, too.")] = False,
    trace: Annotated[
        bool, typer.Option(help="On a GPU, trace kernels when all is timed; without it there are no host gaps.")
    ] = True,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Time decoding once all prompts are computed, beside what it takes at the copy bandwidth measured in the same run.

    Without prompts, acceptance is synthetic, by default 0.85 at each depth, and the report says so. Before anything is
    timed, outputs must have their length, synthetic acceptance must come out as asked for, and what the base chose must
    be what a plain forward pass of it chooses.
    """
    from mtpkit.bench.decode import DecodeConfig, kernel_shares, measure_decode
    from mtpkit.bench.shapes import get_config, read_token_ids
    from mtpkit.bench.trace import can_trace
    from mtpkit.platform import default_device

    if kernels and not trace:
        raise typer.BadParameter("they are known by tracing", param_hint="--kernels / --no-trace")
    if kernels and not can_trace(default_device()):
        raise typer.BadParameter("they are traced on a GPU, and there is none: leave it out", param_hint="--kernels")
    if draft_vocab is not None and draft_vocab_size is not None:
        raise typer.BadParameter("give a size or a file", param_hint="--draft-vocab-size / --draft-vocab")
    drafts = None
    if num_speculative_tokens is not None:
        drafts = [options.parse_drafts(one) for one in num_speculative_tokens]
    config = DecodeConfig(
        batch_sizes=tuple(batch_size),
        ks=options.several_drafts(get_config(model, pattern, distinct), drafts, _DRAFTS),
        prompt_len=prompt_length,
        max_tokens=max_tokens,
        acceptance=_synthetic(acceptance) if acceptance or prompts is None else None,
        draft_vocab=draft_vocab or draft_vocab_size,
        repeats=repeats,
        state_rollback=state_rollback,
        state_dtype=state_dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        enforce_eager=enforce_eager,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        trace=trace,
        seed=seed,
    )
    token_ids = None if prompts is None else read_token_ids(prompts, model)

    def keep(result: "Result[DecodeRow]") -> None:
        if output is not None:
            result.save(output)
            kernel_shares(result).save(output)

    result = measure_decode(_open(model, dtype, pattern, distinct), config, token_ids, model, keep)
    if kernels:
        kernel_shares(result).show_tables()
    result.show()


@app.command(cls=ListCommand)
def prefill(
    model: Model = NVIDIA_8B,
    batch_size: Annotated[int, typer.Option(help="Prompts.")] = 64,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens of a step.")] = 8192,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=MOST_DRAFTS, help="Drafts made after each prompt.")
    ] = 0,
    repeats: Annotated[int, typer.Option(help="Measurements; the median counts.")] = 5,
    dtype: options.Dtype = "auto",
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Time prompts up to their first token, as a share of the matrix rate measured in the same run."""
    from mtpkit.bench.prefill import PrefillConfig, measure_prefill
    from mtpkit.bench.shapes import get_config

    options.several_drafts(get_config(model), [num_speculative_tokens], ())
    config = PrefillConfig(batch_size, prompt_length, max_num_batched_tokens, num_speculative_tokens, repeats, seed)
    _finish(measure_prefill(_open(model, dtype), config, model), output)


@app.command(cls=ListCommand)
def train(
    model: Annotated[
        str, typer.Option(help="A shape (nemotron-h-8b, nemotron-h-tiny), or a model directory whose shape is taken.")
    ] = NVIDIA_8B,
    sequence_length: Annotated[list[int], typer.Option(min=2, help="Tokens of a packed sequence.")] = [4096],  # noqa: B006
    loss: Annotated[list[str], typer.Option(help="kl, tv, ce.")] = ["kl"],  # noqa: B006
    num_depths: Annotated[int, typer.Option(min=1, max=MOST_DRAFTS, help="Depths.")] = 3,
    pattern: Annotated[str, typer.Option(help="Layers of one depth.")] = "*-",
    distinct: Annotated[bool, typer.Option("--distinct", help="A block for each depth; needs per_depth.")] = False,
    attention: Annotated[Literal["serving", "per_depth"], typer.Option(help="What a depth attends to.")] = "serving",
    dtype: options.Dtype = "auto",
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one forward and backward.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of an optimizer step on each data-parallel rank.")] = 1,
    document_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a document; by default one a sequence.")
    ] = None,
    optimizer: Annotated[Literal["adamw", "muon"], typer.Option(help="What updates the heads.")] = "adamw",
    offload: Annotated[bool, typer.Option("--offload", help="AdamW's state is in the host's memory.")] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Run each depth again in the backward.")] = False,
    cached: Annotated[
        bool, typer.Option("--cached", help="Take the base's hidden states from the host's memory; no base.")
    ] = False,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    balance: Annotated[Literal["memory", "time"], typer.Option(help="What stages have equally much of.")] = "memory",
    expert_parallel: options.ExpertParallel = 1,
    backend: Annotated[str, typer.Option(help="What the layers are built from: local, te.")] = "local",
    base_fp8: Annotated[bool, typer.Option("--base-fp8", help="The base multiplies in fp8.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps; the median counts.")] = 5,
    warm_up: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Time the trainer's own step on random tokens and weights: base, heads and optimizer, tokens/s, memory, TFLOP/s.

    Counted are 2 FLOPs a base weight and token, 6 a head weight and depth, 4 a lm_head weight and depth. For several
    GPUs: torchrun --no-python --nproc-per-node N mtpkit bench train ...
    """
    import torch

    from mtpkit.bench.machine import require_gpu
    from mtpkit.bench.shapes import get_config
    from mtpkit.bench.train import TrainBenchConfig, measure_training
    from mtpkit.kernels.head_loss import LossKind
    from mtpkit.platform import default_device
    from mtpkit.training.config import ParallelConfig
    from mtpkit.training.parallel import has_results

    require_gpu(model, default_device())
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    unknown = sorted(set(loss) - set(get_args(LossKind)))
    if unknown:
        raise typer.BadParameter(f"{listed(unknown)}: not among {listed(get_args(LossKind))}", param_hint="--loss")
    config = TrainBenchConfig(
        sequence_lengths=tuple(sequence_length),
        losses=tuple(loss),  # type: ignore[arg-type]
        k=num_depths,
        pattern=pattern,
        repeated=not distinct,
        attention=attention,
        dtype=dtype,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        document_len=document_length,
        optimizer=optimizer,
        offload=offload,
        recompute=recompute,
        cached=cached,
        parallel=ParallelConfig(tensor_parallel, pipeline_parallel, expert_parallel, balance),
        backend=backend,
        base_fp8=base_fp8,
        steps=steps,
        warm_up=warm_up,
        seed=seed,
    )
    keep = None if output is None else lambda result: result.save(output)
    result = measure_training(get_config(model), config, model, keep)
    if has_results():
        result.show()


@app.command(cls=ListCommand)
def kernels(
    model: Model = NVIDIA_8B,
    rows: Annotated[list[int], typer.Option(help="Requests of a step.")] = [1, 4, 16, 64, 128],  # noqa: B006
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=MOST_DRAFTS, help="Drafts a step: each request brings 1 + K tokens.")
    ] = 3,
    context_length: Annotated[
        int,
        typer.Option(min=1, help="Tokens that each request has behind it; of prompts; training sequences have 8 x."),
    ] = 512,
    ops: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    state_dtype: options.StateDtype = EngineOptions.state_dtype,
    draft_vocab_size: DraftVocabSize = None,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="On a CPU the reference twins run, to try the command.")
    ] = "cuda",
    check_only: Annotated[
        bool,
        typer.Option("--check-only", help="Compare with the twins, time nothing (for a memory checker)."),
    ] = False,
    output: Output = None,
) -> None:
    """Check each kernel against its reference twin, then time it beside a copy and a matrix product in the same run."""
    import torch

    from mtpkit.bench.kernels import KernelConfig, check_kernels, measure_kernels
    from mtpkit.bench.machine import require_gpu
    from mtpkit.bench.shapes import get_config

    require_gpu(model, torch.device(device))
    config = KernelConfig(
        rows=tuple(rows),
        k=num_speculative_tokens,
        context_len=context_length,
        ops=tuple(ops or ()),
        state_dtype=state_dtype,
        draft_vocab_size=draft_vocab_size,
    )
    if check_only:
        for line in check_kernels(get_config(model), config, device):
            print(line)
        return
    keep = None if output is None else lambda result: result.save(output)
    measure_kernels(get_config(model), config, device, model, keep).show()


@app.command(cls=ListCommand)
def roofline(
    model: Model = NVIDIA_8B,
    pattern: Pattern = None,
    batch_size: BatchSizes = [1, 4, 16, 32, 64, 128],  # noqa: B006
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=0, max=MOST_DRAFTS, help="Drafts a step; by default 0, 1 and 3, as far as the heads were trained."
        ),
    ] = None,
    acceptance: Acceptance = None,
    context_length: Annotated[float, typer.Option(min=0, help="Mean tokens that a request attends to.")] = 512,
    dtype: Dtype = "bfloat16",
    state_dtype: options.StateDtype = EngineOptions.state_dtype,
    state_rollback: options.StateRollback = EngineOptions.state_rollback,
    ring_entries: Annotated[
        int | None,
        typer.Option(min=1, help="Committed entries that a replay ring holds; by default as the engine's for K."),
    ] = None,
    draft_vocab_size: DraftVocabSize = None,
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="TB/s; by default a copy's on an H200.")] = None,
    matrix_rate: Annotated[float | None, typer.Option(min=0.001, help="TFLOP/s; by default bf16 on an H200.")] = None,
    works: Annotated[bool, typer.Option("--works", help="Show what each step consists of, too.")] = False,
    output: Output = None,
) -> None:
    """The tokens/s at a bandwidth and a matrix rate: bytes over the one, FLOPs over the other. Measures nothing.

    The bandwidth is that of a copy, as `bench decode` has it. Reads alone may be faster: what comes out is a yardstick.
    """
    import torch

    from mtpkit.bench.limits import tabulate_limits
    from mtpkit.bench.roofline import H200_BANDWIDTH, H200_MATRIX_RATE, Roofline, depth_rates
    from mtpkit.bench.shapes import get_config

    config = get_config(model, pattern)
    line = Roofline(
        config,
        getattr(torch, dtype),
        getattr(torch, state_dtype),
        state_rollback,
        ring_entries,
        draft_vocab_size,
    )
    drafts = options.several_drafts(config, num_speculative_tokens, _DRAFTS)
    rates = [depth_rates(_synthetic(acceptance), depths) for depths in drafts]
    speeds = (
        bandwidth * 1e12 if bandwidth else H200_BANDWIDTH,
        matrix_rate * 1e12 if matrix_rate else H200_MATRIX_RATE,
    )
    steps, pieces = tabulate_limits(line, batch_size, rates, context_length, *speeds, model)
    if works:
        pieces.show_tables()
    _finish(steps, output)


def _synthetic(acceptance: list[float] | None) -> tuple[float, ...]:
    return tuple(acceptance or (0.85,))


def _open(model: str, dtype: str, pattern: str | None = None, distinct: bool = False) -> Any:
    import torch

    from mtpkit.bench.machine import require_gpu
    from mtpkit.bench.shapes import open_model
    from mtpkit.platform import default_device

    device = default_device()
    require_gpu(model, device)
    return open_model(model, device, None if dtype == "auto" else getattr(torch, dtype), pattern, distinct)


def _finish(result: "Result[Any]", out: Path | None) -> None:
    """Save and print: the table, and the JSON object as the last line."""
    if out is not None:
        result.save(out)
    result.show()
