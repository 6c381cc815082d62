"""Bodies of /v1/chat/completions."""

from typing import Any, Literal

from pydantic import Field

from mtpkit.server.protocol.base import Body
from mtpkit.server.protocol.log_probs import ChatLogProbs, PromptLogProbs
from mtpkit.server.protocol.sampling import DecodingRequest
from mtpkit.server.protocol.usage import Usage


class ConversationFields(Body):
    """A conversation, and how the chat template renders it."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """Each has a role, and a content: a text, or parts of the type text."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Go on with the last message; needs `add_generation_prompt` false."""


class ChatRequest(DecodingRequest, ConversationFields):
    """A conversation to answer."""

    max_completion_tokens: int | None = None
    """Comes before `max_tokens`; by default as many as there is room for."""
    logprobs: bool | None = None
    """Send the log-probability of each token."""
    top_logprobs: int | None = None
    """Number of most probable tokens whose log-probabilities are sent, too; needs `logprobs`."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto"; "none", which leaves the tools out; "required": the answer is one or more calls; or
    the tool that must be called, `{"type": "function", "function": {"name": ..}}`."""

    @property
    def named_tool(self) -> str | None:
        """The name of the tool that must be called; None: `tool_choice` names none."""
        match self.tool_choice:
            case {"type": "function", "function": {"name": str() as name}}:
                return name
        return None

    parallel_tool_calls: bool | None = None
    """False: only the first call of an answer is sent."""


class FunctionCall(Body):
    """A function and its arguments."""

    name: str
    arguments: str
    """JSON of an object."""


class ToolCall(Body):
    """A call of a tool."""

    index: int
    """Place among the calls of the answer."""
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where the model only calls tools, or was cut off while it thought."""
    reasoning_content: str | None = None
    """What the model thought before it answered."""
    tool_calls: list[ToolCall] | None = None


class Delta(Body):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Body):
    """The answer to the conversation."""

    index: int = 0
    message: Message
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None
    """Why the answer has ended: "stop", "length" or "tool_calls"."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the output."""
    token_ids: list[int] | None = None


class ChatResponse(Body):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Seconds since 1970 at which the request came."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogProbs | None = None


class ChunkChoice(Body):
    """A part of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogProbs | None
    finish_reason: str | None
    """Null before the last chunk, whose delta is empty."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the output."""
    token_ids: list[int] | None = None


class ChatChunk(Body):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
