"""Options shared by the commands."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from mtpkit.config import LARGEST_COUNT, MOST_DRAFTS

if TYPE_CHECKING:
    from mtpkit.config import ModelConfig

_LARGEST_SEED = 2**62 - 1
"""Leaves room for the seeds of further prompts, each one larger, in 63 bits."""

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
        raise typer.BadParameter(f"{text!r} is neither a number nor 'auto'", param_hint="--k") from None
    if drafts < 0:
        raise typer.BadParameter(f"{drafts} drafts are too few: give 0 or more, or 'auto'", param_hint="--k")
    if drafts > MOST_DRAFTS:
        raise typer.BadParameter(f"they are too many: give at most {MOST_DRAFTS} drafts, or 'auto'", param_hint="--k")
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
        check_depths(config, k, "--k")
    return tuple(given)


def writable_directory(path: Path | None) -> Path | None:
    """Of an option that names the directory for results: what could not be written is refused before the work."""
    from mtpkit.checkpoint.atomic import check_writable

    if path is not None:
        check_writable(path)
    return path


class Command(TyperCommand):
    """A command that refuses what none of its options takes: empty texts, huge and infinite numbers, paths in circles.

    Use it as `@app.command(cls=Command)`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, then look at all values."""
        texts, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        params: list[Any] = self.params
        for param in params:
            text, value = texts.get(param.name), ctx.params.get(param.name)
            limit = _LARGEST_SEED if param.name == "seed" else LARGEST_COUNT
            problems = [_problem(one, limit) for one in (value if isinstance(value, list | tuple) else [value])]
            if "" in (text if isinstance(text, list) else [text]) and (param.opts[0][0] == "-" or value == Path()):
                problems.append("it is empty: name one, or leave it out")
            for problem in filter(None, problems):
                raise typer.BadParameter(problem, ctx=ctx, param=param)
        return rest


def _problem(value: object, limit: int) -> str | None:
    """What is wrong with a value, whatever its option is for; `limit`: of whole numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > limit:
        return f"it is beyond {limit}"
    if isinstance(value, Path):
        try:
            value.stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None  # what is to be written need not be there; and what is read is missed with a better message
        except OSError as error:
            return f"{value}: {error.strerror}"
    return None


class ListCommand(Command):
    """A command whose list options take several values at once: `--k 0 1 2 3` means `--k 0 --k 1 --k 2 --k 3`.

    Use it as `@app.command(cls=ListCommand)`. A list ends at the next option, so such a command has no positional
    arguments after one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each further value, then parse as usual."""
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        return super().parse_args(ctx, _repeat_names(args, lists))


def _repeat_names(args: list[str], lists: set[str]) -> list[str]:
    spread: list[str] = []
    current = None
    for arg in args:
        if arg.startswith("-") and not _is_number(arg):
            name = arg.partition("=")[0]
            current = name if name in lists else None
            spread.append(arg)
        elif current is not None and spread[-1] != current:
            spread += [current, arg]
        else:
            spread.append(arg)
    return spread


def _is_number(arg: str) -> bool:
    try:
        float(arg)
    except ValueError:
        return False
    return True
