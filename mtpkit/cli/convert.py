"""Convert checkpoints between the Hugging Face and the Megatron layout, and compare them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpkit.checkpoint.layouts.huggingface import MAX_SHARD_BYTES
from mtpkit.cli.command import Command, new_app
from mtpkit.errors import counted, listed

app = new_app(no_args_is_help=True, help=__doc__)

Source = Annotated[Path, typer.Argument(help="Model directory to read.")]
Destination = Annotated[Path, typer.Argument(help="Model directory to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is already there.")]


@app.command("import", cls=Command)
def import_(
    source: Source,
    destination: Destination,
    force: Force = False,
    fp8_as: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Dtype of weights that are stored in fp8.")
    ] = "bfloat16",
) -> None:
    """Hugging Face -> Megatron: weights, config, tokenizer."""
    import torch

    from mtpkit.checkpoint.convert import import_checkpoint
    from mtpkit.data.tokenizer import lacks_vocabulary

    _list_carried(import_checkpoint(source, destination, force, getattr(torch, fp8_as)))
    if problem := lacks_vocabulary(destination):
        print(f"mtpkit: warning: the tokenizer is incomplete: {problem}", file=sys.stderr)
    print(f"wrote {destination}")


@app.command("export", cls=Command)
def export(
    source: Source,
    destination: Destination,
    force: Force = False,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Largest safetensors file.")] = MAX_SHARD_BYTES / 1e9,
    family: Annotated[
        str | None, typer.Option(help="Family to write, by its model_type; default: the one that fits.")
    ] = None,
) -> None:
    """Megatron -> Hugging Face: weights, config, tokenizer."""
    from mtpkit.checkpoint.convert import export_checkpoint

    _list_carried(export_checkpoint(source, destination, force, int(max_shard_gb * 1e9), family))
    print(f"wrote {destination}")


def _list_carried(names: Sequence[str]) -> None:
    if names:
        print(f"carried {counted(len(names), 'tensor')} that are not the text model's: {listed(names, most=40)}")


@app.command(cls=Command)
def verify(
    first: Annotated[Path, typer.Argument(help="Model directory of either layout.")],
    second: Annotated[Path, typer.Argument(help="Model directory to compare with it.")],
    logits: Annotated[bool, typer.Option("--logits", help="Compare what both compute in fp32, too.")] = False,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest relative difference of logits.")] = 1e-5,
) -> None:
    """Compare two checkpoints bitwise; exit code 1 if they differ, or hold NaN or infinity."""
    from mtpkit.checkpoint.verify import compare_logits, compare_weights

    result = compare_weights(first, second)
    print(f"{len(result.equal)} tensors are equal bit for bit")
    for title, names in (
        ("differ", result.different),
        (f"only in {first}", result.only_first),
        (f"only in {second}", result.only_second),
        ("hold NaN or infinity", result.not_finite),
    ):
        if names:
            print(f"{len(names)} {title}: {', '.join(names)}")
    same = result.identical
    if logits:
        for name, difference in compare_logits(first, second).items():
            print(f"logits of {name}: largest relative difference {difference:.3g}")
            same = same and difference <= tolerance
    raise typer.Exit(0 if same else 1)
