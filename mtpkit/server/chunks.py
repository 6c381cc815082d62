"""Chunks of streams in JSON. Most of a stream's chunks differ in their text alone: the rest is
rendered once."""

from json.encoder import encode_basestring

from mtpkit.server.protocol.base import Body

PLACE = "\0"
"""Text in whose place a template has others."""
_PLACE_IN_JSON = '"\\u0000"'


def chunk_json(chunk: Body) -> str:
    """A chunk in JSON; what is not set is left out."""
    return chunk.model_dump_json(exclude_unset=True)


class Template:
    """Renders chunks that differ in one text.

    Args:
        chunk: one of them, with the text `PLACE`.
    """

    def __init__(self, chunk: Body) -> None:
        # No other text can hold the place's JSON: quotes inside of texts are escaped.
        self._before, self._after = chunk_json(chunk).split(_PLACE_IN_JSON)

    def render(self, text: str) -> str:
        """The chunk with a text, in JSON."""
        return f"{self._before}{encode_basestring(text)}{self._after}"
