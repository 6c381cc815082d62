"""`mtpkit chat`: a conversation with a model, in a terminal or through a pipe."""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.engine import COMMAND_DEFAULTS, LLMOptions, SamplingParams
from mtpkit.errors import MtpkitError, UserError, counted
from mtpkit.files import JsonObject

if TYPE_CHECKING:
    from mtpkit.engine import LLM

app = new_app()

_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "seed",
)
_ENGINE = (
    "model",
    "revision",
    "download_dir",
    "num_speculative_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "num_blocks",
    "speculative_token_tree",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "enforce_eager",
    *options.NUMBERS,
)
_DEFAULTS = replace(COMMAND_DEFAULTS, max_tokens=None)
"""Answers are as long as the model makes them."""


@app.command(cls=Command)
@options.takes_options
def chat(
    model: options.Model,
    system: Annotated[
        str | None, typer.Option(help="Text of a system message before the conversation.")
    ] = None,
    *,
    template: options.Template,
    sampling: Annotated[SamplingParams, options.Fields(only=_SAMPLING, defaults=_DEFAULTS)],
    engine: Annotated[LLMOptions, options.Fields(only=_ENGINE)],
) -> None:
    """Talk with a model: each line of stdin is a message, and its answer streams to stdout.

    The conversation so far is the context of each answer. In a terminal, Ctrl-C ends an answer, and
    Ctrl-D the conversation. A message that cannot be answered is named on stderr and forgotten; if
    stdin is no terminal, the exit code is then 1. By default an answer may take all the room that
    is left.
    """
    from mtpkit.checkpoint import open_directory
    from mtpkit.data.tokenizer import load_tokenizer
    from mtpkit.engine import LLM
    from mtpkit.engine.loading import located
    from mtpkit.platform import num_processes

    if num_processes() > 1:
        raise UserError("a chat runs in one process: start it without torchrun")
    # Before the weights are read, which can take minutes.
    engine = located(engine)
    tokenizer = load_tokenizer(open_directory(engine.model).companions)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template: add"
            " chat_template.jinja to it, or continue texts with mtpkit generate"
        )
    llm = LLM(**vars(replace(engine, tokenizer=tokenizer, max_num_seqs=1, warm_up=False)))
    terminal = sys.stdin.isatty()
    if terminal:
        print("Ctrl-C ends an answer, Ctrl-D the conversation", file=sys.stderr)
    messages = [{"role": "system", "content": system}] if system else []
    failed = 0
    for line in _lines(terminal):
        question = {"role": "user", "content": line}
        asked: JsonObject = {
            "messages": [*messages, question],
            "name": "the conversation",
            "chat_template_kwargs": template.chat_template_kwargs,
        }
        try:
            answer = _answer(llm, asked, sampling)
        except UserError as error:
            print(f"mtpkit: {error}", file=sys.stderr)
            failed += 1
            continue
        # An answer that was ended at once is none.
        if answer:
            messages += [question, {"role": "assistant", "content": answer}]
    if failed and not terminal:
        raise MtpkitError(f"{counted(failed, 'message')} could not be answered, named above")


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin that are not blank."""
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (arrow keys edit lines and find earlier ones)
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:  # drops what is typed, as in a shell
            print()
            continue
        except UnicodeError as error:
            raise UserError(f"stdin is not UTF-8 text: {error}; give it in UTF-8") from error
        if line.strip():
            yield line


def _answer(llm: "LLM", asked: JsonObject, sampling: SamplingParams) -> str:
    """Print an answer as it comes, and return it, or what there was of it when it was ended.

    Raises:
        UserError: the conversation cannot be answered.
    """
    text = ""
    with _interrupts() as ended, closing(cast(Any, llm.stream(asked, sampling))) as stream:
        for output in stream:
            new = output.outputs[0].text
            print(new[len(text) :], end="", flush=True)
            text = new
            if output.error is not None:
                print()
                raise UserError(output.error)
            if ended.is_set():
                break
    print(flush=True)
    return text


@contextmanager
def _interrupts() -> Iterator[Event]:
    """Note Ctrl-C, which must not stop the engine within a step; the second one does, which no step
    may outlast."""
    noted = Event()

    def note(*_: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
