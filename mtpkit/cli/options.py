"""Options shared by the commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtpkit.config import MOST_DRAFTS

if TYPE_CHECKING:
    from mtpkit.config import ModelConfig

_DRAFTS_OPTION = "--num-speculative-tokens"

Model = Annotated[Path, typer.Option(help="Model directory, in the Hugging Face or the Megatron layout.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"], typer.Option(help="Of weights; auto: bfloat16 on a GPU, float32 on a CPU.")
]
BlockSize = Annotated[int, typer.Option(help="Tokens whose keys and values share a block.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus output; by default what the model was made for.")
]
StateRollback = Annotated[
    Literal["replay", "snapshot"], typer.Option(help="How recurrent state is taken back after a rejection.")
]
StateDtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of recurrent state.")]
DraftVocab = Annotated[
    Path | None, typer.Option(help="File of `mtpkit data draft-vocab`: the tokens that drafts are chosen among.")
]
DraftSampling = Annotated[
    bool,
    typer.Option("--draft-sampling", help="Draw drafts from the heads' distribution; by default their best tokens."),
]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests that run at once.")]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens of a step; longer prompts are split. By default 2048, or what decoding needs."),
]
GpuMemoryUtilization = Annotated[
    float, typer.Option(help="Share of the GPU's memory that weights and caches may take.")
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks that split matrices, under torchrun.")]
PipelineParallel = Annotated[int, typer.Option(min=1, help="Stages of the base, under torchrun.")]
ExpertParallel = Annotated[int, typer.Option(min=1, help="Ranks that split experts, under torchrun.")]
Drafts = Annotated[
    str | None,
    typer.Option(
        metavar="INTEGER|auto", help="Drafts a step; auto: by measurement; by default what the heads were trained for."
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on to max-tokens.")]
Temperature = Annotated[float, typer.Option(help="0: the most likely token.")]
TopP = Annotated[float, typer.Option(help="Smallest set of tokens with this much probability; 1: all.")]
TopK = Annotated[int, typer.Option(help="So many most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Tokens at least this share as likely as the most likely one.")]
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
    from mtpkit.engine.drafting import default_depths

    config = load_config(model)
    (drafts,) = several_drafts(config, None if text is None else [parse_drafts(text)], [default_depths(config)])
    return drafts


def several_drafts[K: (int, int | Literal["auto"])](
    config: "ModelConfig", given: Sequence[K] | None, usual: Sequence[int]
) -> tuple[K | int, ...]:
    """All K that are `given`, or, of the `usual` ones, those that the heads of a model were trained for.

    Raises:
        UserError: the heads cannot make so many drafts.
    """
    from mtpkit.engine.drafting import check_depths, default_depths

    if given is None:
        most = default_depths(config)
        return tuple(dict.fromkeys(min(k, most) for k in usual))
    for k in given:
        check_depths(config, k, _DRAFTS_OPTION)
    return tuple(given)


def writable_directory(path: Path | None) -> Path | None:
    """Of an option that names the directory for results: what could not be written is refused before the work."""
    from mtpkit.checkpoint.atomic import check_writable

    if path is not None:
        check_writable(path)
    return path
