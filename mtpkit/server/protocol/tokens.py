"""Bodies of /tokenize and /detokenize."""

from mtpkit.server.protocol.base import Body, RequestBody
from mtpkit.server.protocol.chat import ConversationFields


class TokenizeTextRequest(RequestBody):
    """A text to encode."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(RequestBody, ConversationFields):
    """A conversation to render and encode."""

    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Body):
    """The tokens of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(Body):
    """The text of token ids, special tokens included."""

    prompt: str
