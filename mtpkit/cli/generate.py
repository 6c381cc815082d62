"""`mtpkit generate`: text in, text out."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from tqdm import tqdm

from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.engine import COMMAND_DEFAULTS, NOT_OPTIONS, LLMOptions, SamplingParams
from mtpkit.errors import MtpkitError, UserError, counted
from mtpkit.files import JsonObject

if TYPE_CHECKING:
    from mtpkit.engine import LLM, CompletionOutput, EngineStats, Replicas, RequestOutput
    from mtpkit.engine.requests.stats import AcceptanceStats

app = new_app()

_HEADING = 60
"""Most characters of a prompt in its heading."""
_NOT_OPTIONS = (
    "seed",
    "warm_up",
    "synthetic_acceptance",
    "device",
    "logprobs_mode",
    "tokenizer",
)
"""Settings of the engine that are no options: `--seed` is that of the prompts."""


@app.command(cls=Command)
@options.takes_options
def generate(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; by default stdin is read.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=(
                'Text, one prompt per line, or .jsonl with {"prompt": ..}, {"prompt_token_ids":'
                ' [..]} or {"messages": [..]}; '
                '"checkpoint_at" beside it: tokens after which the prefix cache keeps a checkpoint.'
            )
        ),
    ] = None,
    *,
    chat: options.Chat = False,
    template: options.Template,
    sampling: Annotated[
        SamplingParams,
        options.Fields(
            without=tuple(name for name in NOT_OPTIONS if name != "n"),
            defaults=COMMAND_DEFAULTS,
        ),
    ],
    engine: Annotated[LLMOptions, options.Fields(without=_NOT_OPTIONS)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, in their order.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File for the outputs instead of stdout, written whole or not at all; it may exist."
            )
        ),
    ] = None,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes, each with the whole model and a GPU, that share out the prompts.",
        ),
    ] = 1,
    memory_plan: Annotated[
        bool,
        typer.Option(
            "--memory-plan", help="Print the memory plan, which is always printed on a GPU."
        ),
    ] = False,
) -> None:
    """Continue prompts and stream the outputs to stdout, each under a heading if there are several;
    statistics go to stderr.

    Exit code 1 when the logits of a prompt became NaN or infinite; the other prompts are still
    printed. To split a model over processes: torchrun --standalone --nproc-per-node 2
    infer/generate.py --tensor-parallel-size 2 ... --data-parallel-size distributes the prompts of a
    file over processes that each hold the whole model.
    """
    from mtpkit.bench.shapes import as_conversations, warn_of_raw_text
    from mtpkit.engine.loading import config_of, located, resolve_tree
    from mtpkit.engine.processes import gpus_of_replicas
    from mtpkit.engine.ranks import reports, run_on_first_rank
    from mtpkit.files import check_writable

    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if data_parallel_size > 1:
        gpus_of_replicas(engine, data_parallel_size)  # refused before anything is done
    if output is not None:
        check_writable(output, file=True)
    first = reports(engine.tensor_parallel_size, engine.pipeline_parallel_size)
    k = engine.num_speculative_tokens
    # Before stdin is read: a model that is not there, or a tree that it cannot serve, is refused.
    engine = located(engine)
    _, drafts = resolve_tree(engine, config_of(engine.model))
    # One rank reads for all: stdin can be read only once.
    read = run_on_first_rank(ranks, lambda: _prompts(prompt, prompts))
    given = as_conversations(read, chat, template.chat_template_kwargs)
    if len(given) < data_parallel_size:
        print(
            f"{counted(len(given), 'prompt')}: no more of {data_parallel_size} replicas are"
            " started",
            file=sys.stderr,
        )
    replicas = min(data_parallel_size, len(given))
    with (
        _decoder(engine, replicas, len(given) * sampling.n) as llm,
        _destination(output if first else None) as file,
    ):
        # A lone prompt that cannot be served is refused, one of several ends with an error.
        stream = llm.stream(given if len(given) > 1 else given[0], sampling)
        if memory_plan or llm.memory_plan.total:
            print(llm.memory_plan, file=sys.stderr)
        if not (llm.has_tokenizer or as_json):
            print(
                f"{model} has no tokenizer, so there is no text: --json prints token ids",
                file=sys.stderr,
            )
        warn_of_raw_text(given, llm.has_chat_template)
        printer = _InOrder([_heading(one) for one in given], sampling.n, as_json, file)
        # A terminal shows the outputs themselves.
        progress = tqdm(total=len(given), desc="prompts", disable=True if file.isatty() else None)
        with progress, printer.whole_lines():
            for one in stream:
                printer.update(one)
                progress.update(one.finished)
        print(
            _summary("auto" if k == "auto" else drafts, llm.stats(), printer.finish_reasons),
            file=sys.stderr,
        )
    if printer.failed:
        raise MtpkitError(
            f"{printer.failed} of {len(given)} prompts ended with an error, named above"
        )


@contextmanager
def _destination(output: Path | None) -> Iterator[TextIO]:
    """Open the place for outputs: stdout, or a file that appears once all outputs are written."""
    from mtpkit.files import staged_file

    if output is None:
        yield sys.stdout
        return
    with (
        staged_file(output) as staging,
        staging.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        yield file


@contextmanager
def _decoder(engine: LLMOptions, replicas: int, outputs: int) -> Iterator["LLM | Replicas"]:
    """Start what decodes so many outputs: one engine in this process, or several replicas in other
    processes."""
    from mtpkit.engine import LLM, Replicas

    # Few outputs need few of the graphs that could be captured.
    fewest = min(engine.max_num_seqs, -(-outputs // replicas))
    options = replace(engine, max_num_seqs=fewest, warm_up=False)
    if replicas == 1:
        yield LLM(**vars(options))
        return
    print(f"{replicas} replicas load {engine.model}", file=sys.stderr)
    with Replicas(options, replicas) as found:
        yield found


def _prompts(prompt: str | None, prompts: Path | None) -> list[JsonObject]:
    """Read the prompts from the one source given; each prompt gets a name for messages.

    Raises:
        UserError: two sources are given, or there is nothing to read.
    """
    from mtpkit.bench.shapes import read_prompts

    if prompt is not None and prompts is not None:
        raise UserError("a prompt and --prompts were both given: leave one out")
    if prompts is not None:
        return read_prompts(prompts)
    name = "the prompt" if prompt is not None else "the prompt on stdin"
    if prompt is None and sys.stdin.isatty():
        print("type the prompt, and Ctrl-D at the start of a line to end it", file=sys.stderr)
    try:
        text = sys.stdin.read() if prompt is None else prompt
        text.encode()  # if the terminal's encoding takes any byte, bad ones are read as surrogates
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error}; give it in UTF-8") from error
    if not text:
        raise UserError("the prompt is empty: give a text, --prompts, or text on stdin")
    return [{"prompt": text, "name": name}]


def _heading(prompt: JsonObject) -> str:
    """Heading of a prompt: its name and its beginning."""
    if "prompt_token_ids" in prompt:
        text = f"{len(prompt['prompt_token_ids'])} tokens"
    else:
        content = prompt["prompt"] if "prompt" in prompt else _last_content(prompt)
        text = " ".join(str(content).split())
    return f"== {prompt['name']}: {text if len(text) <= _HEADING else text[:_HEADING] + ' ...'}"


def _last_content(prompt: JsonObject) -> object:
    """What the last message of a conversation holds, which is not checked yet."""
    last = (prompt["messages"] or [""])[-1]
    return last.get("content", "") if isinstance(last, dict) else last


class _InOrder:
    """Prints outputs in the order of their prompts, whichever finishes first; the first unfinished
    one is streamed.

    Args:
        num_outputs: outputs of each prompt.
    """

    def __init__(
        self, headings: Sequence[str], num_outputs: int, as_json: bool, file: TextIO
    ) -> None:
        self._headings = headings if len(headings) > 1 or num_outputs > 1 else None
        """Printed before each text."""
        self._num_outputs = num_outputs
        self._outputs: list[RequestOutput | None] = [None] * len(headings)
        """The newest of each prompt."""
        self._completions: list[dict[int, CompletionOutput]] = [{} for _ in headings]
        """The newest of each output of each prompt."""
        self._as_json = as_json
        self._file = file
        self._current = 0
        """The prompt that is printed."""
        self._place = 0
        """The output of this prompt that is printed."""
        self._headed = False
        """Whether the heading of this output is printed."""
        self._shown = 0
        self.failed = 0
        """Prompts printed that ended with an error."""
        self.finish_reasons = Counter[str]()
        """How often each finish reason ended a prompt that is printed."""

    @contextmanager
    def whole_lines(self) -> Iterator[None]:
        """Context that ends a partly printed line if an error interrupts it, so that the error gets
        its own line."""
        try:
            yield
        except BaseException:
            if self._shown:
                print(file=self._file, flush=True)
            raise

    def update(self, output: "RequestOutput") -> None:
        """Store the newest state of a prompt and print whatever can be printed now."""
        # Requests are numbered in the order of their prompts.
        prompt = int(output.request_id)
        self._outputs[prompt] = output
        self._completions[prompt] |= {one.index: one for one in output.outputs}
        while self._current < len(self._outputs) and self._print_current():
            self._current += 1

    def _print_current(self) -> bool:
        """Print what is new of the current prompt; returns whether it has ended."""
        output = self._outputs[self._current]
        if output is None:
            return False
        completions = self._completions[self._current]
        if not self._as_json:
            self._print_texts(completions)
        if not output.finished:
            return False

        every = [completions[index] for index in sorted(completions)]
        if self._as_json:
            print(json.dumps(_record(output, every)), file=self._file, flush=True)
        self.finish_reasons.update(str(one.finish_reason) for one in every)
        errors = [one.error for one in every if one.error is not None]
        if errors:
            print(errors[0], file=sys.stderr)
            self.failed += 1
        self._place = 0
        return True

    def _print_texts(self, completions: "Mapping[int, CompletionOutput]") -> None:
        """Print the texts of the current prompt's outputs, up to the first one that still grows."""
        while (one := completions.get(self._place)) is not None:
            if self._headings and not self._headed:
                print(self._headings[self._current] + self._place_among_outputs, file=self._file)
            self._headed = True
            print(one.text[self._shown :], end="", file=self._file, flush=True)
            self._shown = len(one.text)
            if one.finish_reason is None:
                return
            print(file=self._file, flush=True)
            self._place += 1
            self._headed = False
            self._shown = 0

    @property
    def _place_among_outputs(self) -> str:
        """End of the heading of an output."""
        if self._num_outputs == 1:
            return ""
        return f" (output {self._place + 1} of {self._num_outputs})"


def _record(output: "RequestOutput", completions: "Sequence[CompletionOutput]") -> JsonObject:
    stats = output.stats
    texts = [_text_record(one) for one in completions]
    return {
        "index": int(output.request_id),
        "prompt": output.prompt,
        **(texts[0] if len(texts) == 1 else {"outputs": texts}),
        "num_cached_tokens": output.num_cached_tokens,
        "steps": stats.steps,
        "acceptance_length": stats.acceptance_length,
        "conditional_acceptance": stats.conditional_acceptance,
        **({"ranks_per_depth": stats.ranks_per_depth} if stats.ranks_per_depth else {}),
    }


def _text_record(completion: "CompletionOutput") -> JsonObject:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({"error": completion.error} if completion.error else {}),
    }


def _summary(k: int | str, stats: "EngineStats", finish_reasons: Counter[str]) -> str:
    line = (
        f"{stats.generated_tokens} tokens in {stats.seconds:.2f} s, {stats.tokens_per_s:.1f}"
        f" tokens/s, K = {k}"
    )
    line = f"{_ends(finish_reasons)}; {line}" if finish_reasons else line
    if stats.cached_tokens:
        line += (
            f", {stats.cached_tokens} of {stats.prompt_tokens} prompt tokens from the prefix cache"
        )
    if stats.returned_bytes:
        line += f", {stats.returned_bytes:.0f} bytes per step and request went back between stages"
    if k == 0:
        return line
    reached = zip(stats.conditional_acceptance, stats.acceptance.reached_per_depth, strict=True)
    rates = ", ".join(f"{rate:.0%}" if times else "-" for rate, times in reached)
    line += f", acceptance length {stats.acceptance_length:.2f}, conditional acceptance {rates}"
    return line + "".join(f"; {shares}" for shares in _rank_shares(stats.acceptance))


def _ends(finish_reasons: Counter[str]) -> str:
    """Say how the prompts ended: `finish reason: length`, or for several `finish reasons: length 2,
    stop 1`."""
    if finish_reasons.total() == 1:
        return f"finish reason: {next(iter(finish_reasons))}"
    return "finish reasons: " + ", ".join(
        f"{reason} {count}" for reason, count in sorted(finish_reasons.items())
    )


def _rank_shares(stats: "AcceptanceStats") -> list[str]:
    """Share of steps, for each depth of trees, in which the base chose the heads' best candidate,
    the second one, .."""
    return [
        f"depth {depth}: the base chose candidate "
        + ", ".join(f"{rank} in {share:.0%}" for rank, share in enumerate(shares, 1))
        for depth, (shares, reached) in enumerate(
            zip(stats.rank_shares, stats.reached_per_depth, strict=False), 1
        )
        if reached
    ]
