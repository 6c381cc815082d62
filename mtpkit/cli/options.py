"""Options shared by the commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from mtpkit.config import MOST_DRAFTS
from mtpkit.engine import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from mtpkit.config import ModelConfig

_DRAFTS_OPTION = "--num-speculative-tokens"

TEMPERATURE, MAX_TOKENS = 0.0, 128
"""What `generate` and `speedup` take by default: greedy, so that outputs can be compared. Python's `SamplingParams` has
vLLM's defaults."""

Model = Annotated[Path, typer.Option(help="Model directory, in the Hugging Face or the Megatron layout.")]


def field(settings: type, name: str, **more: Any) -> Any:
    """The option of a field of checked settings: its docstring is the help, and the class checks its range."""
    info = cast(Any, settings).__pydantic_fields__[name]
    return typer.Option(
        *([f"--{name.replace('_', '-')}"] if info.annotation is bool else []), help=info.description, **more
    )


Dtype = Annotated[Literal["auto", "float32", "bfloat16"], field(EngineOptions, "dtype")]
BlockSize = Annotated[int, field(EngineOptions, "block_size")]
MaxModelLen = Annotated[int | None, field(EngineOptions, "max_model_len")]
StateRollback = Annotated[Literal["replay", "snapshot"], field(EngineOptions, "state_rollback")]
StateDtype = Annotated[Literal["float32", "bfloat16"], field(EngineOptions, "state_dtype")]
DraftVocab = Annotated[Path | None, field(EngineOptions, "draft_vocab")]
DraftSampling = Annotated[bool, field(EngineOptions, "draft_sampling")]
MaxNumSeqs = Annotated[int, field(EngineOptions, "max_num_seqs")]
MaxNumBatchedTokens = Annotated[int | None, field(EngineOptions, "max_num_batched_tokens")]
GpuMemoryUtilization = Annotated[float, field(EngineOptions, "gpu_memory_utilization")]
EnforceEager = Annotated[bool, field(EngineOptions, "enforce_eager")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks that split matrices, under torchrun.")]
PipelineParallel = Annotated[int, typer.Option(min=1, help="Stages of the base, under torchrun.")]
ExpertParallel = Annotated[int, typer.Option(min=1, help="Ranks that split experts, under torchrun.")]
Drafts = Annotated[
    str | None,
    typer.Option(
        metavar="INTEGER|auto", help="Drafts a step; auto: by measurement; by default what the heads were trained for."
    ),
]
MaxTokens = Annotated[int, field(SamplingParams, "max_tokens")]
IgnoreEos = Annotated[bool, field(SamplingParams, "ignore_eos")]
Temperature = Annotated[float, field(SamplingParams, "temperature")]
TopP = Annotated[float, field(SamplingParams, "top_p")]
TopK = Annotated[int, field(SamplingParams, "top_k")]
MinP = Annotated[float, field(SamplingParams, "min_p")]
PresencePenalty = Annotated[float, field(SamplingParams, "presence_penalty")]
FrequencyPenalty = Annotated[float, field(SamplingParams, "frequency_penalty")]
RepetitionPenalty = Annotated[float, field(SamplingParams, "repetition_penalty")]
Seed = Annotated[int, typer.Option(min=0, help="Of the random numbers.")]


def parse_drafts(text: str) -> int | Literal["auto"]:
    """K of an option that takes a number or `auto`."""
    if text == "auto":
        return "auto"
    try:
        drafts = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'auto'", param_hint=_DRAFTS_OPTION) from None
    if drafts < 0:
        raise typer.BadParameter(f"{drafts} drafts are too few: give 0 or more, or 'auto'", param_hint=_DRAFTS_OPTION)
    if drafts > MOST_DRAFTS:
        raise typer.BadParameter(
            f"they are too many: give at most {MOST_DRAFTS} drafts, or 'auto'", param_hint=_DRAFTS_OPTION
        )
    return drafts


def drafts_of(model: Path, text: str | None) -> int | Literal["auto"]:
    """K as `Drafts` has it, or what the heads in a model directory were trained for, 3 where that is unknown.

    Raises:
        UserError: the heads cannot make so many drafts.
    """
    from mtpkit.checkpoint import load_config

    config = load_config(model)
    (drafts,) = several_drafts(config, None if text is None else [parse_drafts(text)], [config.mtp.default_drafts])
    return drafts


def several_drafts[K: (int, int | Literal["auto"])](
    config: "ModelConfig", given: Sequence[K] | None, usual: Sequence[int]
) -> tuple[K | int, ...]:
    """All K that are `given`, or, of the `usual` ones, those that the heads of a model were trained for.

    Raises:
        UserError: the heads cannot make so many drafts.
    """
    from mtpkit.engine.drafting import check_depths

    if given is None:
        most = config.mtp.default_drafts
        return tuple(dict.fromkeys(min(k, most) for k in usual))
    for k in given:
        check_depths(config, k, _DRAFTS_OPTION)
    return tuple(given)


def writable_directory(path: Path | None) -> Path | None:
    """Of an option that names the directory for results: what could not be written is refused before the work."""
    from mtpkit.files import check_writable

    if path is not None:
        check_writable(path)
    return path
