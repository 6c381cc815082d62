"""`mtpkit data`: what a data set becomes when it is tokenised and packed, and which tokens are frequent in it."""

from pathlib import Path
from typing import Annotated

import typer

from mtpkit.cli.options import ListCommand

app = typer.Typer(add_completion=False)

Data = Annotated[list[str], typer.Option(help="Files, folders and globs of text, .jsonl and .parquet.")]
TextColumn = Annotated[str, typer.Option(help="Column with the text to learn.")]
PromptColumn = Annotated[str, typer.Option(help="Column with the prompt, which is masked out.")]
ResponseColumn = Annotated[str, typer.Option(help="Column with the response to learn.")]


@app.callback()
def data() -> None:
    """Look at training data."""


@app.command(cls=ListCommand)
def inspect(
    model: Annotated[Path, typer.Option(help="Directory of the model whose tokenizer is used.")],
    data: Data,
    sequence_length: Annotated[int, typer.Option(help="Tokens in a packed sequence.")] = 1024,
    text_column: TextColumn = "text",
    prompt_column: PromptColumn = "prompt",
    response_column: ResponseColumn = "response",
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


@app.command(cls=ListCommand)
def draft_vocab(
    model: Annotated[Path, typer.Option(help="Directory of the model whose tokenizer and vocabulary are used.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="JSON file to write; one that is there is replaced.")],
    size: Annotated[int, typer.Option(help="Tokens to choose.")] = 32768,
    text_column: TextColumn = "text",
    prompt_column: PromptColumn = "prompt",
    response_column: ResponseColumn = "response",
) -> None:
    """Choose the tokens that drafts are made of: the most frequent ones of a data set.

    With a draft vocabulary the heads score fewer tokens, so that drafting takes less time. The output stays the
    model's own: a token that is not in it is never drafted, but still chosen by the model. Take data like what the
    model will write; the coverage printed is the share of its tokens that can be drafted. Tokens of prompts do not
    count, special tokens are always included.

    The file holds token_ids, vocab_size, coverage and files.
    """
    from mtpkit.checkpoint import find_companions, load_config
    from mtpkit.checkpoint.atomic import write_file
    from mtpkit.data import Columns, load_tokenizer
    from mtpkit.data.draft_vocab import build_draft_vocab
    from mtpkit.errors import UserError

    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(f"output {output} must be a file in a directory that exists")
    config = load_config(model)
    columns = Columns(text_column, prompt_column, response_column)
    tokenizer = load_tokenizer(find_companions(model))
    vocab = build_draft_vocab(data, tokenizer, config.vocab_size, size, config.eos_token_ids, columns)
    write_file(output, vocab.to_json())
    print(f"wrote {output}: {size:,} of {config.vocab_size:,} tokens, which cover {vocab.coverage:.2%} of the data")
