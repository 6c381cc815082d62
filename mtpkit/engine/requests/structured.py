"""Constraints of outputs, as requests give them."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator

from mtpkit.config.checked import checked

_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@checked("structured outputs")
class StructuredOutputsParams:
    """What the text of an output must be: exactly one of `json`, `json_object`, `regex`, `choice`
    and `grammar`. Names are vLLM's.

    Raises:
        UserError: none or several are given, or a value that cannot be right.
    """

    json: str | dict[str, Any] | None = Field(default=None, title="a JSON schema or None")
    """JSON schema that the text follows, as a dict or as text."""
    json_object: bool = False
    """The text is any JSON object."""
    regex: str | None = None
    """Regular expression that the whole text matches."""
    choice: Sequence[str] | None = Field(default=None, title="a list of texts or None")
    """Texts of which the output is one."""
    grammar: str | None = None
    """Grammar in Lark's notation, whose rule `start` the text follows."""
    disable_any_whitespace: bool = False
    """JSON has no spaces or line breaks between its parts."""
    start_after: str | None = None
    """Special or added token after which the constraint begins, such as `</think>`, which ends
    reasoning; until then the output is free. None: it begins with the output."""

    @field_validator("json")
    @classmethod
    def _check_json(cls, schema: str | dict[str, Any] | None) -> str | None:
        if schema is None:
            return None
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            return json.dumps(found)
        except (TypeError, ValueError):
            raise ValueError("must be a JSON schema, as a dict or as text") from None

    @field_validator("choice")
    @classmethod
    def _check_choice(cls, choice: Sequence[str] | None) -> tuple[str, ...] | None:
        if choice is not None and not all(choice):
            raise ValueError("must not have an empty text")
        if choice is not None and not choice:
            raise ValueError("must have at least one text")
        return None if choice is None else tuple(choice)

    def problems(self) -> list[str]:
        """Kinds of constraints that do not go together."""
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False)]
        if len(given) == 1:
            return []
        found = " and ".join(given) if given else "nothing"
        return [f"{found} is given, must be exactly one of {', '.join(_KINDS)}"]
