"""Prompts from a file."""

from pathlib import Path
from typing import Any

from mtpkit.errors import UserError
from mtpkit.files import parse_json, read_text

Prompt = str | list[int]
MOST_RANDOM_TOKENS = 2**28
"""Of all random prompts: they are lists of Python, some 10 GB."""


def too_many_tokens(prompt_len: int, batch_size: int, repeats: int) -> list[str]:
    """What is wrong with random prompts for a warm-up and so many repeats; nothing, or one clause."""
    count = prompt_len * batch_size * (repeats + 1)
    if count <= MOST_RANDOM_TOKENS:
        return []
    return [
        f"the random prompts have {count:,} tokens in all, must be at most {MOST_RANDOM_TOKENS:,}: lower prompt-len"
    ]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Texts or token ids, one a line, see `read_named_prompts`."""
    named = read_named_prompts(path, limit)
    return [prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"] for prompt in named]


def read_named_prompts(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Prompts of a file, one a line, as `LLM.generate` takes them: `prompt` or `prompt_token_ids`, and as their `name`
    file and line, which messages call them by. Lines of whitespace are skipped.

    A file that ends in .jsonl holds objects with `prompt` (text) or `prompt_token_ids` (integers); any other file is
    plain text.

    Args:
        limit: only so many, evenly spread over the file.

    Raises:
        UserError: a file that cannot be read, a line of another form, or no prompt at all.
    """
    try:
        lines = read_text(path).split("\n")  # other ends of lines may stand in a text
    except UserError as error:
        raise UserError(f"prompts file {error}; name a .jsonl or a text file") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"prompts file {path} holds no prompts; write one a line")
    if limit is not None and limit < len(numbered):
        numbered = [numbered[index * len(numbered) // limit] for index in range(limit)]
    if path.suffix != ".jsonl":
        return [{"prompt": line, "name": f"{path}:{number}"} for number, line in numbered]
    return [{**_parse(line, f"{path}:{number}"), "name": f"{path}:{number}"} for number, line in numbered]


def _parse(line: str, where: str) -> dict[str, Any]:
    record: Any = parse_json(line, where)
    record = record if isinstance(record, dict) else {}
    text, token_ids = record.get("prompt"), record.get("prompt_token_ids")
    if isinstance(token_ids, list) and all(type(token) is int for token in token_ids):
        return {"prompt_token_ids": token_ids}
    if isinstance(text, str):
        return {"prompt": text}
    raise UserError(f'{where} must be an object with "prompt", a text, or "prompt_token_ids", a list of integers')
