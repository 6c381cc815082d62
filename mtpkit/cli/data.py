"""`mtpkit data`: prepare training data, let the base write it, inspect it, and choose draft
vocabularies."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.data.options import DataOptions
from mtpkit.data.samples import Columns
from mtpkit.engine import NOT_OPTIONS, LLMOptions, SamplingParams

if TYPE_CHECKING:
    from mtpkit.data.dataset import PackedDataset, SourceCounts
    from mtpkit.data.tokenizer import Tokenizer

app = new_app()

TokenizerOf = Annotated[Path, typer.Option(help="Directory of the model whose tokenizer is used.")]
Sources = Annotated[
    list[str],
    typer.Option(
        help=(
            "Files, folders and globs of text, .jsonl, .csv and .parquet. Each is a source, called"
            " after its file or folder, or as name=path says."
        )
    ),
]
ColumnNames = Annotated[Columns, options.Fields(suffix="_column")]
Options = Annotated[DataOptions, options.Fields()]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="Jinja file to use in place of the tokenizer's chat template.")
]
_ENGINE = (
    "model",
    "revision",
    "download_dir",
    "num_speculative_tokens",
    "max_num_seqs",
    "max_model_len",
    "enable_prefix_caching",
    "prefix_cache_bytes",
    "draft_vocab",
    "enforce_eager",
    *options.NUMBERS,
)


@app.callback()
def data() -> None:
    """Prepare training data, let the base write it, and inspect it."""


@app.command(cls=Command)
@options.takes_options
def inspect(
    model: TokenizerOf,
    data: Sources,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a packed sequence; by default those of prepared data, else 1024."
        ),
    ] = None,
    *,
    columns: ColumnNames,
    options: Options,
    chat_template: ChatTemplate = None,
) -> None:
    """Print the counts of a data set, which is tokenised and packed for this, or of prepared
    data."""
    from mtpkit.data.build import build_dataset

    tokenizer = _tokenizer(model, chat_template)
    _show(build_dataset(data, tokenizer, sequence_length, columns, _vocab_size(model), options))


@app.command(cls=Command)
@options.takes_options
def prepare(
    model: TokenizerOf,
    data: Sources,
    output: Annotated[Path, typer.Option(help="Directory to write.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens in a packed sequence.")] = 1024,
    *,
    columns: ColumnNames,
    options: Options,
    chat_template: ChatTemplate = None,
    num_proc: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one per core.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace prepared data in the output.")
    ] = False,
) -> None:
    """Tokenise and pack data once, into a directory that training memory-maps: data.train=[OUTPUT].

    Each row is a conversation (messages and tools, ShareGPT's conversations, or Alpaca's
    instruction and output), a prompt with its response, or a text; a text file is one text. The
    chat template renders conversations. The assistant's messages are learnt; the template's
    generation markers show where they are, or else they are located in the rendered text. Samples
    without anything to learn are left out, named, and counted by reason. Documents that are longer
    than a sequence are split, or as --long-conversations says, and sequences are packed first-fit.

    The output is a data set in the format of the package datasets, with a manifest,
    mtpkit_data.json. Training with another tokenizer or sequence length refuses it.
    """
    from mtpkit.data.build import build_dataset
    from mtpkit.data.prepare import prepare as prepare_data
    from mtpkit.data.sources import MANIFEST
    from mtpkit.files import check_destination, staged_directory

    # Before anything is tokenised, which may take hours.
    check_destination(output, force, "prepared data", [MANIFEST])
    tokenizer = _tokenizer(model, chat_template)
    with staged_directory(output) as staging:
        prepare_data(
            data,
            tokenizer,
            sequence_length,
            staging,
            columns,
            num_proc,
            _vocab_size(model),
            options,
        )
    _show(build_dataset([output], tokenizer, sequence_length))
    # The setting is a list in YAML, where other characters need quotes.
    name = (
        str(output)
        if re.fullmatch(r"[\w./-]+", str(output))
        else "'" + str(output).replace("'", "''") + "'"
    )
    settings = [f"data.train=[{name}]", f"data.sequence_length={sequence_length}"]
    print(f"wrote {output}: train with {shlex.join(settings)}")


@app.command(cls=Command)
@options.takes_options
def regenerate(
    model: options.Model,
    data: Annotated[
        list[str], typer.Option(help="Files, folders and globs of text, .jsonl, .csv and .parquet.")
    ],
    output: Annotated[Path, typer.Option(help="File to write, .jsonl.")],
    prompt_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt that is cut from a text; only for texts."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only this many prompts, spread over all.")
    ] = None,
    turns: Annotated[
        Literal["last", "all"],
        typer.Option(help="Answers of a conversation to write again, each separately."),
    ] = "last",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")] = 0,
    *,
    sampling: Annotated[
        SamplingParams,
        options.Fields(
            without=(*NOT_OPTIONS, "seed"),
            defaults=SamplingParams(max_tokens=512),
        ),
    ],
    engine: Annotated[LLMOptions, options.Fields(only=_ENGINE)],
    columns: Annotated[
        Columns, options.Fields(only=("text", "prompt", "messages"), suffix="_column")
    ],
    rows: Annotated[
        DataOptions, options.Fields(only=("on_bad_row", "bad_rows_allowed", "chat_template_kwargs"))
    ],
    chat_template: ChatTemplate = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output that is there.")
    ] = False,
) -> None:
    """Let the base answer prompts: heads learn best from text that the base itself wrote.

    In rows with messages, the assistant's last answer (or, with --turns all, each answer) is
    written again from the messages before it. Rows with a prompt are continued. Texts are cut into
    prompts of --prompt-length tokens. Each row of the output has the prompt, the completion, their
    token ids, and the messages if the input has them. It is input for mtpkit data prepare.

    Finished answers are kept in OUTPUT.partial. After any interruption the same command continues
    from there, and draws the same random numbers for each prompt. OUTPUT appears when all answers
    are done, in the order of the prompts.
    """
    from mtpkit.checkpoint import open_directory
    from mtpkit.data.prompts import read_prompts
    from mtpkit.data.regenerate import Journal
    from mtpkit.data.tokenizer import fingerprint
    from mtpkit.engine import LLM
    from mtpkit.engine.loading import config_of, located, resolve_drafts
    from mtpkit.engine.regenerate import journal_settings
    from mtpkit.engine.regenerate import regenerate as answer_prompts
    from mtpkit.errors import counted
    from mtpkit.files import check_writable

    check_writable(output, file=True, replace=force)
    # refused before any data is read
    engine = located(engine)
    model = engine.model
    source = open_directory(model)
    resolve_drafts(config_of(source), engine.num_speculative_tokens)
    tokenizer = _tokenizer(source.companions, chat_template)
    prompts, refused = read_prompts(data, tokenizer, prompt_length, turns, columns, limit, rows)
    settings = journal_settings(model, prompts, sampling, seed, engine)
    with Journal(output, settings) as journal:
        if journal.done:
            print(f"{len(journal.done):,} of {len(prompts):,} prompts are answered already")
        try:
            llm = LLM(**vars(replace(engine, tokenizer=tokenizer)))
            own = fingerprint(tokenizer)
            count = answer_prompts(
                llm.engine, prompts, sampling, journal, own, seed, 2 * engine.max_num_seqs, refused
            )
        except KeyboardInterrupt:
            said = "no answer is finished yet: nothing is kept"
            if journal.done:
                kept = (
                    f"{len(journal.done):,} of {len(prompts):,} answers are kept in {journal.path}"
                )
                said = f"{kept}: the same command continues from there"
            print(said, file=sys.stderr)
            raise
    prepared = output.with_name(f"{output.stem}-prepared")
    command = [
        "mtpkit",
        "data",
        "prepare",
        "--model",
        source.companions,
        "--data",
        output,
        "--output",
        prepared,
    ]
    command += [] if chat_template is None else ["--chat-template", chat_template]
    print(
        f"wrote {output}: {counted(count, 'answer')}; prepare them with"
        f" {shlex.join(map(str, command))}"
    )


@app.command(cls=Command)
def cache(
    config: Annotated[
        Path,
        typer.Option(help="YAML file of settings of the training; see examples/train_tiny.yaml."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that replace the file's: cache=DIR"
        ),
    ] = None,
) -> None:
    """Write the base's final hidden states for all training sequences, to train heads without the
    base in memory.

    Training with cache=DIR in its settings writes missing states itself. This command writes them
    ahead of training; under torchrun it uses all processes. The states are stored in safetensors
    shards, in cache_dtype. By default this is the training's dtype, which leaves losses unchanged;
    float8_e4m3fn needs half the space of bfloat16. Sizes are printed before anything is written.
    After any interruption the same command continues with the missing shards.

    Training with another base, tokenizer, data, sequence length, dtype or cache_dtype refuses the
    cache.
    """
    import torch.distributed as dist

    from mtpkit.training.cache_write import write_cache
    from mtpkit.training.config.reading import load_config

    settings = load_config(config, overrides or ())
    write_cache(settings)
    if dist.get_rank() == 0:
        print(
            f"cache {settings.cache} is complete: train with"
            f" {shlex.quote(f'cache={settings.cache}')}"
        )


@app.command(cls=Command)
@options.takes_options
def draft_vocab(
    model: Annotated[
        Path, typer.Option(help="Directory of the model whose tokenizer and vocabulary are used.")
    ],
    data: Annotated[
        list[str], typer.Option(help="Files, folders and globs, and directories of prepared data.")
    ],
    output: Annotated[
        Path, typer.Option(help="JSON file to write; one that is there is replaced.")
    ],
    size: Annotated[int, typer.Option(help="Tokens to choose.")] = 32768,
    *,
    columns: ColumnNames,
    options: Options,
) -> None:
    """Choose the tokens that heads may draft: the most frequent tokens of a data set.

    With a draft vocabulary the heads score fewer tokens, so that drafting takes less time. The
    output stays the model's own: a token outside the vocabulary is never drafted, but the model can
    still choose it. Use data like the text that the model will write; the coverage printed is the
    share of the data's tokens that can be drafted. Tokens of prompts do not count; special tokens
    are always included.

    The file holds token_ids, vocab_size, coverage and files.
    """
    from mtpkit.checkpoint import open_directory
    from mtpkit.data.draft_vocab import build_draft_vocab
    from mtpkit.data.tokenizer import load_tokenizer
    from mtpkit.files import check_writable, write_file

    check_writable(output, file=True)
    source = open_directory(model)
    config = source.config
    tokenizer = load_tokenizer(source.companions)
    vocab = build_draft_vocab(
        data, tokenizer, config.vocab_size, size, config.eos_token_ids, columns, options
    )
    write_file(output, vocab.to_json())
    print(
        f"wrote {output}: {size:,} of {config.vocab_size:,} tokens, which cover"
        f" {vocab.coverage:.2%} of the data"
    )


def _tokenizer(directory: Path, chat_template: Path | None = None) -> "Tokenizer":
    from mtpkit.data.tokenizer import load_tokenizer
    from mtpkit.errors import UserError
    from mtpkit.files import read_text

    tokenizer = load_tokenizer(directory)
    if chat_template is not None:
        try:
            tokenizer.chat_template = read_text(chat_template)
        except UserError as error:
            raise UserError(f"chat template {error}; name a Jinja file") from error
    return tokenizer


def _vocab_size(directory: Path) -> int | None:
    """Vocabulary size of the model in a directory; None, with a warning, if it has no config that
    mtpkit can read."""
    from mtpkit.checkpoint import load_config
    from mtpkit.errors import UserError

    try:
        return load_config(directory).vocab_size
    except UserError as error:
        print(
            f"mtpkit: warning: token ids are not checked against the model's vocabulary: {error}",
            file=sys.stderr,
        )
        return None


def _show(dataset: "PackedDataset") -> None:
    """Print a table of the total counts and, if there are several sources, a table with one row per
    source."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    titles = [
        "documents",
        "documents left out",
        "tokens",
        "packed sequences",
        "fill ratio",
        "masked share",
    ]
    total = Table(
        "", Column("count", justify="right"), title=f"packed to {dataset.sequence_length} tokens"
    )
    for title, cell in zip(titles, _cells(dataset.counts, dataset.sequence_length), strict=True):
        total.add_row(title, cell)
    for title, cell in _report(dataset.counts, dataset.sequence_length):
        total.add_row(Text(title), cell)
    Console().print(total)
    if len(dataset.sources) > 1:
        # to fit 80 columns
        short = ["documents", "left out", "tokens", "sequences", "fill", "masked"]
        numbers = (Column(title, justify="right") for title in short)
        sources = Table(Column("source", overflow="fold"), *numbers, box=SIMPLE_HEAD)
        for name in dataset.sources:
            counts = [one for one in dataset.counts if one.name == name]
            sources.add_row(Text(name), *_cells(counts, dataset.sequence_length))
        Console().print(sources)


def _report(counts: "Sequence[SourceCounts]", sequence_length: int) -> list[tuple[str, str]]:
    """What was left out, by reason, and what else became of rows; only what there is."""
    reasons: Counter[str] = Counter()
    for one in counts:
        reasons.update(one.left_out_by_reason)
    others = {
        f"longer than {sequence_length} tokens": sum(one.num_long for one in counts),
        "empty answers": sum(one.num_empty_answers for one in counts),
    }
    rows = [(f"left out: {reason}", number) for reason, number in reasons.most_common()]
    return [(title, f"{number:,}") for title, number in [*rows, *others.items()] if number]


def _cells(counts: "list[SourceCounts]", sequence_length: int) -> list[str]:
    documents, left_out, tokens, sequences, targets = (
        sum(getattr(one, f"num_{name}") for one in counts)
        for name in ("documents", "left_out", "tokens", "sequences", "target_tokens")
    )
    fill = tokens / (sequences * sequence_length)
    return [
        *(f"{count:,}" for count in (documents, left_out, tokens, sequences)),
        f"{fill:.1%}",
        f"{1 - targets / tokens:.1%}",
    ]
