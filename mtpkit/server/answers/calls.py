"""Finds the calls of tools in texts that come in parts."""

from mtpkit.server.answers.formats import ToolFormat, Tools, WrongCall
from mtpkit.server.answers.pieces import Content, Piece, held_back


class CallReader:
    """Reads the content of an answer. White space beside calls belongs to no text; what stands
    between the markers but is no call remains text, markers included.

    Args:
        tools: the tools that may be called, whose schemas say how arguments are read.
        sure: calls are known to follow their schemas. What looks like the end of one but leaves no
            call is then part of an argument.
    """

    def __init__(self, tool_format: ToolFormat, tools: Tools, sure: bool = False) -> None:
        self._format = tool_format
        self._tools = tools
        self._sure = sure
        self._buffer = ""
        self._gap: str | None = None
        """White space before the call that is being read; None outside calls."""
        self._after_call = False
        """Whether nothing but white space has come since the last call."""

    def read(self, text: str) -> list[Piece]:
        """What is sure after more text has come."""
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            before = len(self._buffer)
            pieces += self._read_text() if self._gap is None else self._read_call()
            if len(self._buffer) == before:
                return pieces

    def end(self) -> list[Piece]:
        """What was held back; a call that has not ended is text."""
        rest = self._buffer
        if self._gap is not None:
            rest = self._gap + self._format.begin + rest
        elif self._after_call and not rest.strip():
            rest = ""
        self._buffer = ""
        return [Content(rest)] if rest else []

    def _read_text(self) -> list[Piece]:
        text, begun, rest = self._buffer.partition(self._format.begin)
        sure = len(text) if begun else len(text) - held_back(text, self._format.begin)
        told = text[:sure].rstrip()
        gap = text[len(told) :]
        if self._after_call:
            told = told.lstrip()
        self._after_call = self._after_call and not told
        if begun:
            self._gap = "" if self._after_call else gap
            self._buffer = rest
        else:
            self._buffer = gap
        return [Content(told)] if told else []

    def _read_call(self) -> list[Piece]:
        end = self._format.end
        place = self._buffer.find(end)
        while place >= 0:
            body = self._buffer[:place]
            try:
                calls: list[Piece] = [*self._format.read(body, self._tools)]
            except WrongCall:
                if self._sure:
                    place = self._buffer.find(end, place + 1)
                    continue
                self._after_call = False
                calls = [Content((self._gap or "") + self._format.begin + body + end)]
            else:
                self._after_call = True
            self._buffer = self._buffer[place + len(end) :]
            self._gap = None
            return calls
        return []
