"""The base's own answers to prompts, as data; `mtpkit.engine.regenerate` lets the base write them.

Answers are kept in a journal beside the output, `NAME.partial`: a line of settings, then a line per
prompt in the order in which they finish. A run that was stopped in any way continues from the
journal. The output appears when all prompts are done, complete and in the order of the prompts.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated

import numpy as np
from pydantic import Field

from mtpkit.config.checked import checked, from_file
from mtpkit.data.prompts import Prompt
from mtpkit.errors import UserError, listed, shown
from mtpkit.files import JsonObject, parse_json, staged_file

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
            # A second process would cut off the line that the first one is writing.
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
        # A journal without answers is worth nothing, and would only ask for the same settings.
        if not self._offsets:
            self.path.unlink(missing_ok=True)
        self._file.close()

    @property
    def done(self) -> set[int]:
        """Indices of the prompts that have an answer."""
        return set(self._offsets)

    def add(self, answer: Answer) -> None:
        """Append an answer, so that it survives the end of this process."""
        # Offsets instead of answers: the journal may be larger than the memory.
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
            # The process was killed in the middle of a write.
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


def digest(prompts: Sequence[Prompt]) -> str:
    """32 hexadecimal digits that depend on the prompts' tokens and their order."""
    content = hashlib.blake2b(digest_size=16)
    # Each prompt's length goes in too, so that tokens cannot move from one prompt to the next.
    for prompt in prompts:
        content.update(
            np.array([len(prompt.token_ids), *prompt.token_ids], dtype=np.int64).tobytes()
        )
    return content.hexdigest()
