"""Convert checkpoints between the Hugging Face and the Megatron layout, and compare them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.config import MAX_SHARD_BYTES
from mtpkit.errors import UserError, counted, listed

app = new_app(no_args_is_help=True, help=__doc__)

Source = Annotated[Path, typer.Argument(help="Model directory to read.")]
Destination = Annotated[Path, typer.Argument(help="Model directory to write.")]
HeadFormat = Annotated[
    Literal["auto", "bf16", "fp8", "nvfp4", "int4"],
    typer.Option(
        help=(
            "Format of the heads' matrices, as far as the quantisation of the base can say it;"
            " auto: as they are stored, which is bf16 after training."
        )
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is already there.")]


@app.command("import", cls=Command)
@options.takes_options
def import_(
    source: Annotated[
        Path, typer.Argument(help="Model directory to read, or the id of one in the hub.")
    ],
    destination: Destination,
    force: Force = False,
    fp8_as: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(
            help="Dtype to widen quantised weights to; default: keep them as they are stored."
        ),
    ] = None,
    expand_scales: Annotated[
        bool,
        typer.Option(
            "--expand-scales",
            help=(
                "Give each row the scales of its block where Megatron's layout takes a block apart."
            ),
        ),
    ] = False,
    *,
    hub: options.Hub,
) -> None:
    """Hugging Face -> Megatron: weights, config, tokenizer."""
    import torch

    from mtpkit.checkpoint.convert import import_checkpoint
    from mtpkit.checkpoint.hub import find_model
    from mtpkit.data.tokenizer import lacks_vocabulary

    dtype = None if fp8_as is None else getattr(torch, fp8_as)
    source = find_model(source, hub.revision, hub.download_dir)
    _list_carried(import_checkpoint(source, destination, force, dtype, expand_scales))
    if problem := lacks_vocabulary(destination):
        print(f"mtpkit: warning: the tokenizer is incomplete: {problem}", file=sys.stderr)
    print(f"wrote {destination}")


@app.command("export", cls=Command)
def export(
    source: Source,
    destination: Destination,
    force: Force = False,
    max_shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Largest safetensors file.")
    ] = MAX_SHARD_BYTES / 1e9,
    family: Annotated[
        str | None,
        typer.Option(help="Family to write, by its model_type; default: the one that fits."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number of tokens, without the rows that Megatron added to fill up the vocabulary."
            ),
        ),
    ] = None,
    head_format: HeadFormat = "auto",
) -> None:
    """Megatron -> Hugging Face: weights, config, tokenizer."""
    from mtpkit.checkpoint.convert import export_checkpoint

    size = int(max_shard_gb * 1e9)
    _list_carried(
        export_checkpoint(source, destination, force, size, family, vocab_size, head_format)
    )
    print(f"wrote {destination}")


def _list_carried(names: Sequence[str]) -> None:
    if names:
        print(
            f"carried {counted(len(names), 'tensor')} outside the text model:"
            f" {listed(names, most=40)}"
        )


@app.command("stitch", cls=Command)
def stitch_(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face directory to put heads into; it is not changed.")
    ],
    trained: Annotated[
        Path,
        typer.Argument(help="Model directory of either layout, such as a run, with the heads."),
    ],
    destination: Destination,
    force: Force = False,
    link: Annotated[
        bool,
        typer.Option(
            "--link/--copy",
            help=(
                "Link the files without heads instead of copying them: this takes no space, but the"
                " output then "
                "shares the source's files."
            ),
        ),
    ] = False,
    head_format: HeadFormat = "auto",
) -> None:
    """Put trained heads into a Hugging Face checkpoint; only files with heads, and the index, are
    rewritten."""
    from mtpkit.checkpoint.stitch import stitch

    done = stitch(source, trained, destination, link, force, head_format)
    print(
        f"wrote {counted(len(done.heads), 'tensor')} of heads, {done.head_bytes / 1e9:.3g} GB:"
        f" {listed(done.heads)}"
    )
    print(f"files rewritten: {listed(done.files, most=40)}")
    linked = done.kept - done.hashed
    print(
        f"{counted(done.kept, 'tensor')} unchanged: {done.hashed} by their SHA-256, {linked} in"
        " files that are the source's own"
    )
    print(f"wrote {destination}")


@app.command(cls=Command)
def verify(
    first: Annotated[Path, typer.Argument(help="Model directory of either layout.")],
    second: Annotated[Path, typer.Argument(help="Model directory to compare with it.")],
    logits: Annotated[
        bool, typer.Option("--logits", help="Compare what both compute in fp32, too.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest relative difference of logits.")
    ] = 1e-5,
) -> None:
    """Compare two checkpoints bitwise, quantised matrices as they are stored; exit code 1 if they
    differ, or hold NaN or infinity.

    A matrix that only one of them has quantised is widened to the dtype of the other. Where both
    are quantised, their lists of the base's unquantised modules and what they say of keys and
    values must be the same, too.
    """
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
    for clause in result.settings:
        print(f"settings of the quantisation differ: {clause}")
    print(result.parts)
    same = result.identical
    if logits:
        for name, (difference, tokens) in compare_logits(first, second).items():
            print(
                f"logits of {name}: largest relative difference {difference:.3g}, {tokens:.1%} of"
                " tokens the same"
            )
            same = same and difference <= tolerance
        # Called first, so that decoding is compared and printed even if logits differ.
        same = _decode_alike(first, second) and same
    raise typer.Exit(0 if same else 1)


def _decode_alike(first: Path, second: Path) -> bool:
    """Decode with both models and print how far they agree; True if all is the same or a model is
    too large to try."""
    from mtpkit.engine.compare import compare_decoding, lack_of_memory

    # Both are looked at before the first is decoded, which alone would say nothing.
    for directory in (first, second):
        if lack := lack_of_memory(directory):
            print(f"not decoded: {directory} {lack}")
            return True
    found = compare_decoding(first, second)
    lengths = " and ".join(f"{length:.2f}" for length in found.acceptance_lengths)
    print(
        f"decoding with K = {found.num_drafts}: {found.same_tokens:.1%} of tokens and"
        f" {found.same_drafts:.1%} of drafts the same, acceptance length {lengths}"
    )
    return found.identical


@app.command(cls=Command)
def lint(
    directory: Annotated[Path, typer.Argument(help="Model directory in the Hugging Face layout.")],
    server: Annotated[
        Literal["vllm", "sglang"] | None, typer.Option(help="Server to look for; default: both.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks of the server.")
    ] = 1,
) -> None:
    """Say whether vLLM 0.33 and SGLang 0.5.23 would load a directory and draft with its heads; exit
    code 2 if not."""
    from mtpkit.checkpoint.families.serving import VERSIONS
    from mtpkit.checkpoint.lint import lint as find

    asked = [server] if server else [*VERSIONS]
    findings = find(directory, server, tensor_parallel_size)
    for finding in findings:
        who = ", ".join(VERSIONS[name] for name in finding.servers if name in asked)
        print(f"{'fails' if finding.fatal else 'warning'} ({who}): {finding.text}")
    bad = {name for finding in findings if finding.fatal for name in finding.servers}
    for name in asked:
        verdict = (
            "would not load it, or draft wrongly"
            if name in bad
            else "should load it and draft with its heads"
        )
        print(f"{VERSIONS[name]} {verdict}")
    if bad.intersection(asked):
        raise UserError(f"{directory} cannot be served as it is: see what fails, above")
