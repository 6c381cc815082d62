"""`mtpkit generate`: text in, text out."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtpkit.cli import options
from mtpkit.cli.command import Command, new_app
from mtpkit.engine import EngineOptions
from mtpkit.errors import MtpkitError, UserError

if TYPE_CHECKING:
    from mtpkit.engine import EngineStats, RequestOutput

app = new_app()

_HEADING = 60
"""Characters of a prompt in its heading."""


@app.command(cls=Command)
def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; by default what stdin holds.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Text, one prompt a line, or .jsonl with {"prompt": ..} or {"prompt_token_ids": [..]}.'),
    ] = None,
    num_speculative_tokens: options.Drafts = None,
    max_tokens: options.MaxTokens = options.MAX_TOKENS,
    temperature: options.Temperature = options.TEMPERATURE,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be given again.")] = None,
    ignore_eos: options.IgnoreEos = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, in the prompts' order.")] = False,
    dtype: options.Dtype = "auto",
    block_size: options.BlockSize = EngineOptions.block_size,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = EngineOptions.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = EngineOptions.gpu_memory_utilization,
    state_rollback: options.StateRollback = EngineOptions.state_rollback,
    state_dtype: options.StateDtype = EngineOptions.state_dtype,
    draft_sampling: options.DraftSampling = False,
    draft_vocab: options.DraftVocab = None,
    enforce_eager: options.EnforceEager = False,
    memory_plan: Annotated[
        bool, typer.Option("--memory-plan", help="Print what the memory is divided into, as is always done on a GPU.")
    ] = False,
) -> None:
    """Continue prompts and stream what comes to stdout, under a heading each if there are several; statistics go to
    stderr.

    Exit code 1 when the logits of a prompt became NaN or infinite; the others are printed.
    """
    from mtpkit.engine import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    drafts = options.drafts_of(model, num_speculative_tokens)
    given = _prompts(prompt, prompts)
    llm = LLM(
        str(model),
        drafts,
        dtype=dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=min(max_num_seqs, len(given)),
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        state_rollback=state_rollback,
        state_dtype=state_dtype,
        draft_sampling=draft_sampling,
        draft_vocab=draft_vocab,
        enforce_eager=enforce_eager,
    )
    stream = llm.stream(given, params)
    if memory_plan or llm.memory_plan.total:
        print(llm.memory_plan, file=sys.stderr)
    if llm.tokenizer is None and not as_json:
        print(f"{model} has no tokenizer, so that there is no text: --json has token ids", file=sys.stderr)
    printer = _InOrder([_heading(one) for one in given], as_json)
    for output in stream:
        printer.update(output)
    print(_summary(drafts, llm.stats()), file=sys.stderr)
    if printer.failed:
        raise MtpkitError(f"{printer.failed} of {len(given)} prompts ended with an error, named above")


def _prompts(prompt: str | None, prompts: Path | None) -> list[dict[str, Any]]:
    """From the one place that was named, with names for messages.

    Raises:
        UserError: two places, or nothing to read.
    """
    from mtpkit.bench import read_named_prompts

    if prompt is not None and prompts is not None:
        raise UserError("a prompt and --prompts were both given: leave one out")
    if prompts is not None:
        return read_named_prompts(prompts)
    name = "the prompt" if prompt is not None else "the prompt on stdin"
    if prompt is None and sys.stdin.isatty():
        print("type the prompt, and Ctrl-D at the start of a line to end it", file=sys.stderr)
    try:
        text = sys.stdin.read() if prompt is None else prompt
        text.encode()  # where the terminal's encoding takes all bytes, some are kept as what no text has
    except UnicodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error}; give it in UTF-8") from error
    if not text:
        raise UserError("the prompt is empty: give a text, --prompts, or text on stdin")
    return [{"prompt": text, "name": name}]


def _heading(prompt: dict[str, Any]) -> str:
    """Where a prompt is from, and how it begins."""
    text = " ".join(prompt["prompt"].split()) if "prompt" in prompt else f"{len(prompt['prompt_token_ids'])} tokens"
    return f"== {prompt['name']}: {text if len(text) <= _HEADING else text[:_HEADING] + ' ...'}"


class _InOrder:
    """Prints outputs in the order of their prompts though they come as they are decoded; the first open one streams."""

    def __init__(self, headings: Sequence[str], as_json: bool) -> None:
        self._headings = headings if len(headings) > 1 and not as_json else None
        """Printed before each text."""
        self._outputs: list[RequestOutput | None] = [None] * len(headings)
        self._as_json = as_json
        self._current = 0
        self._headed = -1
        """The newest prompt whose heading is printed."""
        self._shown = 0
        self.failed = 0
        """Prompts printed that ended with an error."""

    def update(self, output: "RequestOutput") -> None:
        """Take up the newest state of a request and print what can be printed."""
        # Requests are numbered in the order of their prompts.
        self._outputs[int(output.request_id)] = output
        while self._current < len(self._outputs) and (current := self._outputs[self._current]) is not None:
            if self._headings and self._current != self._headed:
                print(self._headings[self._current])
                self._headed = self._current
            if not self._as_json:
                text = current.outputs[0].text
                print(text[self._shown :], end="", flush=True)
                self._shown = len(text)
            if not current.finished:
                return
            print(json.dumps(_record(current)) if self._as_json else "", flush=True)
            if current.error is not None:
                print(current.error, file=sys.stderr)
                self.failed += 1
            self._current, self._shown = self._current + 1, 0


def _record(output: "RequestOutput") -> dict[str, Any]:
    completion, stats = output.outputs[0], output.stats
    return {
        "index": int(output.request_id),
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({"error": completion.error} if completion.error else {}),
        "steps": stats.steps,
        "acceptance_length": stats.acceptance_length,
        "conditional_acceptance": stats.conditional_acceptance,
    }


def _summary(k: int | str, stats: "EngineStats") -> str:
    line = f"{stats.generated_tokens} tokens in {stats.seconds:.2f} s, {stats.tokens_per_s:.1f} tokens/s, K = {k}"
    if k == 0:
        return line
    reached = zip(stats.conditional_acceptance, stats.acceptance.reached_per_depth, strict=True)
    rates = ", ".join(f"{rate:.0%}" if times else "-" for rate, times in reached)
    return f"{line}, acceptance length {stats.acceptance_length:.2f}, conditional acceptance {rates}"
