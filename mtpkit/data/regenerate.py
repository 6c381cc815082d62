"""The base's own answers to prompts, as data: heads learn best from text that the base itself would
write.

Answers are kept in a journal beside the output, `NAME.partial`: a line of settings, then a line per
prompt in the order in which they finish. A run that was stopped in any way continues from the
journal. The output appears when all prompts are done, complete and in the order of the prompts.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import Field as DataclassField
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Protocol

import numpy as np
from pydantic import Field

from mtpkit.config.checked import checked, from_file
from mtpkit.data.documents import describe
from mtpkit.data.prompts import Prompt
from mtpkit.errors import MtpkitError, UserError, listed, shown
from mtpkit.files import JsonObject, parse_json, staged_file

logger = logging.getLogger(__name__)

_REFRESH = 0.5
"""Seconds after which the count of tokens is shown again, whether or not an answer is finished."""


class Sampling(Protocol):
    """The part of `mtpkit.engine.SamplingParams` that is needed here: a dataclass with a field
    `seed`."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def stop_strings(self) -> tuple[str, ...]: ...


class Completion(Protocol):
    """The part of `mtpkit.engine.CompletionOutput` that is needed here."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...


class Output(Protocol):
    """The part of `mtpkit.engine.RequestOutput` that is needed here."""

    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> Sequence[Completion]: ...


class Stats(Protocol):
    """The part of `mtpkit.engine.EngineStats` that is needed here."""

    @property
    def generated_tokens(self) -> int: ...


class Engine[S: Sampling](Protocol):
    """The part of `mtpkit.engine.Engine` that is needed here, with its sampling parameters S."""

    def add_request(self, prompt_token_ids: Sequence[int], params: S, request_id: str) -> str:
        """Queue a request; UserError if it can never be served."""
        ...

    def step(self, finished_only: bool) -> Sequence[Output]:
        """Run one step; return the outputs of requests with new tokens, or only of those that are
        finished."""
        ...

    def stats(self) -> Stats:
        """Return totals over all requests so far."""
        ...


TokenIds = list[Annotated[int, Field(ge=0)]]


@checked("answer")
class Answer:
    """A line of the output; `mtpkit data prepare` reads it."""

    index: Annotated[int, Field(ge=0)]
    """Index of the prompt."""
    name: str
    """File and row that the prompt comes from."""
    prompt: str
    completion: str
    finish_reason: str
    """`stop`: ended at an end-of-sequence token or a stop string; `length`: cut off."""
    tokenizer: str
    """Fingerprint of the tokenizer that the token ids belong to."""
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    """The generated tokens, the end-of-sequence token included."""
    messages: list[JsonObject] | None = None
    """The conversation with the answer, if the prompt was a conversation."""
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    """Variables of the chat template that the prompt was rendered with, if there are any."""

    def to_json(self) -> str:
        """One line of JSON."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return json.dumps(values, ensure_ascii=False) + "\n"


def journal_settings(
    model: Path, prompts: Sequence[Prompt], params: Sampling, seed: int, dtype: str
) -> dict[str, object]:
    """All settings that the answers depend on.

    Args:
        params: `SamplingParams` of all prompts; their seed is not used.
    """
    sampling = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos")
    return {
        "model": str(model.resolve()),
        "prompts": f"{len(prompts)} of digest {digest(prompts)}",
        **{name: getattr(params, name) for name in sampling},
        "stop": params.stop_strings,
        "seed": seed,
        "dtype": dtype,
    }


class Journal:
    """A file of the finished answers, which only one process writes at a time.

    Args:
        output: path of the output; the journal is beside it.
        settings: all settings that the answers depend on.

    Raises:
        UserError: the existing journal has other settings, is damaged, or is being written by
            another process.
    """

    def __init__(self, output: Path, settings: Mapping[str, object]) -> None:
        self.output = output
        self.path = output.with_name(f"{output.name}.partial")
        if os.path.lexists(self.path) and not self.path.is_file():
            raise UserError(f"{self.path} is not a regular file; remove it, or name another output")
        self._file: IO[bytes] = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The settings as they are read back from JSON, with lists in place of tuples.
            self._offsets = self._recover(json.loads(json.dumps(settings)))
        except BlockingIOError as error:
            self._file.close()
            raise UserError(
                f"{self.path} is being written by another process; wait for it, or stop it"
            ) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._offsets:
            self.path.unlink(missing_ok=True)
        self._file.close()

    @property
    def done(self) -> set[int]:
        """Indices of the prompts that have an answer."""
        return set(self._offsets)

    def add(self, answer: Answer) -> None:
        """Append an answer, so that it survives the end of this process."""
        self._offsets[answer.index] = self._file.seek(0, os.SEEK_END)
        self._file.write(answer.to_json().encode())
        self._file.flush()

    def publish(self) -> None:
        """Write all answers in order to the output, which appears whole, and remove the journal."""
        with staged_file(self.output) as staging, staging.open("wb") as file:
            for index in sorted(self._offsets):
                self._file.seek(self._offsets[index])
                file.write(self._file.readline())
        self.path.unlink()

    def _recover(self, settings: Mapping[str, object]) -> dict[int, int]:
        """Byte offset of each answer. An incomplete last line is cut off; a journal without answers
        is begun again."""
        self._file.seek(0)
        whole = 0
        offsets: dict[int, int] = {}
        before: dict[str, object] = {}
        first = json.dumps(settings).encode() + b"\n"
        for number, line in enumerate(self._file, start=1):
            if number == 1 and not first.startswith(line[: len('{"model')]):
                raise UserError(
                    f"{self.path} holds no answers of this command; remove it, or name another"
                    " output"
                )
            if not line.endswith(b"\n"):
                break
            where = f"{self.path}:{number}"
            try:
                record = parse_json(line, where)
                if number == 1:
                    if not isinstance(record, dict) or set(record) != set(settings):
                        raise UserError(f"{where} must hold the settings {listed(settings)}")
                    before = record
                else:
                    index = from_file(Answer, record, where).index
                    if index in offsets:
                        raise UserError(
                            f"{where} has the index {shown(index)}, which is on an earlier line too"
                        )
                    offsets[index] = whole
            except UserError as error:
                raise UserError(f"{error}; remove the line, or the file to start again") from error
            whole += len(line)
        changed = [
            f"{key} was {before.get(key)!s:.80}, is {now!s:.80}"
            for key, now in settings.items()
            if before.get(key) != now
        ]
        if not offsets:
            whole = 0
        elif changed:
            raise UserError(
                f"{self.path} holds answers made with other settings:"
                f" {listed(changed, separator='; ')}; use the same settings, or remove the file"
            )
        self._file.truncate(whole)
        if not whole:
            self._file.write(first)
            self._file.flush()
        return offsets


def regenerate[S: Sampling](
    engine: Engine[S],
    prompts: Sequence[Prompt],
    params: S,
    journal: Journal,
    tokenizer: str,
    seed: int,
    in_flight: int,
    refused: Sequence[str] = (),
) -> int:
    """Answer all prompts that the journal has no answer to, with continuous batching and a progress
    bar.

    Each prompt has its own seed, so that its answer depends neither on other requests nor on
    interruptions, except for rounding differences between batches. A prompt that the engine cannot
    serve is left out, with a warning.

    Args:
        params: `SamplingParams` of all prompts; their seed is not used.
        tokenizer: fingerprint of the engine's tokenizer.
        in_flight: largest number of requests that the engine holds at once.
        refused: `describe` of the rows without a prompt, for the warning.

    Returns:
        The number of answers, which are in the output by then.

    Raises:
        UserError: no prompt can be served.
        MtpkitError: the engine failed on a prompt. The answers so far are kept.
    """
    from tqdm import tqdm

    done = journal.done
    if beyond := [index for index in done if index >= len(prompts)]:
        raise UserError(
            f"{journal.path} answers prompt {shown(max(beyond) + 1)}, but there are {len(prompts)};"
            " remove it to start again"
        )
    left_out = list(refused)
    waiting = iter([index for index in range(len(prompts)) if index not in done])
    open_requests = 0
    before = engine.stats().generated_tokens
    drawn = time.monotonic()
    # disable=None: silent where stderr is not a terminal.
    with tqdm(
        total=len(prompts), initial=len(done), desc="answering", unit=" prompts", disable=None
    ) as progress:
        while True:
            while open_requests < in_flight and (index := next(waiting, None)) is not None:
                own = replace(params, seed=_seed(seed, index))
                try:
                    engine.add_request(prompts[index].token_ids, own, str(index))
                    open_requests += 1
                except UserError as error:
                    left_out.append(describe(prompts[index].name, str(error)))
                    progress.update()
            if not open_requests:
                break
            answers = _answers(engine, prompts, journal, tokenizer)
            open_requests -= len(answers)
            tokens = engine.stats().generated_tokens - before
            elapsed = progress.format_dict["elapsed"]
            rate = f", {tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            progress.set_postfix_str(f"{tokens:,} tokens{rate}", refresh=False)
            progress.update(len(answers))
            if time.monotonic() > drawn + _REFRESH:  # long answers: no update for a while
                progress.refresh()
                drawn = time.monotonic()
    answered = len(journal.done)
    if not answered:
        raise UserError(f"no prompt can be served; the first: {left_out[0]}")
    if left_out:
        total = len(prompts) + len(refused)
        logger.warning("%d of %d prompts are left out: %s", len(left_out), total, listed(left_out))
    journal.publish()
    return answered


def _answers(
    engine: Engine, prompts: Sequence[Prompt], journal: Journal, tokenizer: str
) -> list[Answer]:
    """Take a step of the engine, and journal the answers that it finished."""
    answers = list[Answer]()
    failed = list[str]()
    for output in engine.step(finished_only=True):
        index = int(output.request_id)
        completion = output.outputs[0]
        prompt = prompts[index]
        if completion.finish_reason == "error":
            failed.append(f"{prompt.name}: {completion.error}")
            continue
        assert completion.finish_reason is not None, "steps return what is finished"
        messages = None
        if prompt.messages is not None:
            messages = [*prompt.messages, {"role": "assistant", "content": completion.text}]
        answer = Answer(
            index=index,
            name=prompt.name,
            prompt=prompt.text,
            completion=completion.text,
            finish_reason=completion.finish_reason,
            tokenizer=tokenizer,
            prompt_token_ids=prompt.token_ids,
            completion_token_ids=completion.token_ids,
            messages=messages,
            tools=prompt.tools,
            chat_template_kwargs=prompt.template_kwargs,
        )
        journal.add(answer)
        answers.append(answer)
    if failed:
        raise MtpkitError(f"{failed[0]}; the {len(journal.done)} answers so far are kept")
    return answers


def digest(prompts: Sequence[Prompt]) -> str:
    """32 hexadecimal digits that depend on the prompts' tokens and their order."""
    content = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        content.update(
            np.array([len(prompt.token_ids), *prompt.token_ids], dtype=np.int64).tobytes()
        )
    return content.hexdigest()


def _seed(seed: int, index: int) -> int:
    return int(
        np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )
