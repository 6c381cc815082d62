"""Write the config.json, in the Hugging Face layout, of a model shape of `mtpkit bench` for the
other scripts to read.

Needs mtpkit. No weights are written: vLLM draws its own (`load_format="dummy"`), and so does
megatron_train.py.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from mtpkit.bench.sizes import SHAPES
from mtpkit.checkpoint.families import find_family


def main(
    directory: Annotated[Path, typer.Argument(help="Directory for config.json.")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "nemotron-h-8b",
    pattern: Annotated[str | None, typer.Option(help="Layers of the head; by default '*'.")] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence.")] = 8192,
) -> None:
    """Write DIRECTORY/config.json."""
    if model not in SHAPES:
        raise typer.BadParameter(f"{model} is none of {', '.join(SHAPES)}", param_hint="--model")
    changes: dict[str, str | int] = {"max_position_embeddings": max_model_len}
    config = SHAPES[model].replace(
        **changes, **({} if pattern is None else {"mtp_pattern": pattern})
    )
    written = find_family(config, "nemotron_h").config_to_hf(config) | {"torch_dtype": "bfloat16"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    print(directory / "config.json")


if __name__ == "__main__":
    typer.run(main)
