"""Reads the answers of one model as its chat template and the server's options say."""

from typing import Protocol

from mtpkit.server.answers.calls import CallReader
from mtpkit.server.answers.formats import FORMATS, ToolFormat, Tools, format_of
from mtpkit.server.answers.pieces import Content, Piece
from mtpkit.server.answers.reasoning import CLOSE, OPEN, ReasoningReader


class _Reader(Protocol):
    def read(self, text: str) -> list[Piece]: ...

    def end(self) -> list[Piece]: ...


class AnswerReader:
    """Takes one answer apart, whatever the parts in which its text comes.

    Args:
        reasoning: reads the whole text; None: all of it is content.
        calls: reads the content; None: there are no calls in it.
    """

    def __init__(self, reasoning: _Reader | None, calls: _Reader | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def read(self, text: str) -> list[Piece]:
        """What is sure after more text has come."""
        if self._reasoning is not None:
            return self._with_calls(self._reasoning.read(text))
        return self._with_calls([Content(text)] if text else [])

    def end(self) -> list[Piece]:
        """What was held back until the end."""
        pieces = self._with_calls(self._reasoning.end()) if self._reasoning else []
        return pieces + (self._calls.end() if self._calls else [])

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._calls.read(piece.text) if isinstance(piece, Content) else [piece]
        return found


def opens_reasoning(prompt: str) -> bool:
    """Whether the answer to a prompt begins with reasoning."""
    return prompt.rstrip().endswith(OPEN)


class AnswerStyle:
    """How a model writes its answers.

    Args:
        template: the chat template, which shows it.
        tool_parser: name of a format, "auto" for what the template shows, or "none".
        reasoning_parser: "think", "auto" for what the template shows, or "none".
    """

    def __init__(self, template: str, tool_parser: str, reasoning_parser: str) -> None:
        self.tools: ToolFormat | None = FORMATS.get(tool_parser)
        """The format of calls; None: calls are not read."""
        if tool_parser == "auto":
            self.tools = format_of(template)
        self.unknown = tool_parser == "auto" and self.tools is None
        """Whether the template shows no format of calls, although it should."""
        shown = reasoning_parser == "auto" and CLOSE in template
        self.reasons = reasoning_parser == "think" or shown
        """Whether reasoning is read."""

    def reader(self, prompt: str, tools: Tools, forced: bool = False) -> AnswerReader:
        """A reader for the answer to a prompt.

        Args:
            forced: the answer follows `forced_calls`.
        """
        reasoning = None
        if self.reasons:
            reasoning = ReasoningReader(opens_reasoning(prompt))
        calls = None
        if tools and self.tools is not None:
            calls = CallReader(self.tools, tools, forced)
        return AnswerReader(reasoning, calls)
