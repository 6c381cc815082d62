"""`mtpkit data`: what a data set becomes when it is tokenised and packed."""

from pathlib import Path
from typing import Annotated

import typer

from mtpkit.cli.options import ListCommand

app = typer.Typer(add_completion=False)


@app.callback()
def data() -> None:
    """Look at training data."""


@app.command(cls=ListCommand)
def inspect(
    model: Annotated[Path, typer.Option(help="Directory of the model whose tokenizer is used.")],
    data: Annotated[list[str], typer.Option(help="Files, folders and globs of text, .jsonl and .parquet.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens in a packed sequence.")] = 1024,
    text_column: Annotated[str, typer.Option(help="Column with the text to learn.")] = "text",
    prompt_column: Annotated[str, typer.Option(help="Column with the prompt, which is masked out.")] = "prompt",
    response_column: Annotated[str, typer.Option(help="Column with the response to learn.")] = "response",
) -> None:
    """Tokenise and pack a data set and print its counts."""
    from rich.console import Console
    from rich.table import Table

    from mtpkit.data import Columns, build_dataset, load_tokenizer

    columns = Columns(text_column, prompt_column, response_column)
    dataset = build_dataset(data, load_tokenizer(model), sequence_length, columns)
    table = Table("", "count", title=f"packed to {sequence_length} tokens")
    table.columns[1].justify = "right"
    table.add_row("documents", f"{dataset.num_documents:,}")
    table.add_row("documents left out", f"{dataset.num_empty_documents:,}")
    table.add_row("tokens", f"{dataset.num_tokens:,}")
    table.add_row("packed sequences", f"{len(dataset):,}")
    table.add_row("fill ratio", f"{dataset.num_tokens / (len(dataset) * sequence_length):.1%}")
    table.add_row("masked share", f"{1 - dataset.num_target_tokens / dataset.num_tokens:.1%}")
    Console().print(table)
