"""Turn conversations into token ids and a mask of the assistant's tokens, with the tokenizer's chat template.

A template may mark the assistant's parts itself (`{% generation %}`). For other templates each assistant message is
located in the rendered text: it starts where the rendering of the conversation before it ends, generation prompt
included, and it ends where the rendering of the conversation including it ends. Some templates render a message
differently depending on what follows (reasoning is dropped from older turns, tools move before the last question), so
that these two renderings are not prefixes of the whole. In that case the message is replaced by another text, and the
part of the rendering that changes is the message's place.
"""

import copy
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from mtpkit.data.tokenizer import Tokenizer
from mtpkit.errors import UserError
from mtpkit.files import JsonObject

Messages = list[JsonObject]
Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SampleError(Exception):
    """The reason why a sample cannot be used; this sample is left out, and other samples are not affected."""


def require_template(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        UserError: the tokenizer has none.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template for data with messages; "
            "add chat_template.jinja to it, or name a file with --chat-template of mtpkit data prepare or regenerate"
        )


def render_prompt(tokenizer: Tokenizer, messages: Messages, tools: list[dict] | None) -> str:
    """Render a conversation up to the point where the assistant begins to answer.

    Raises:
        SampleError: the template refuses it.
    """
    messages = _with_parsed_arguments(messages)
    return _apply_template(tokenizer, messages, tools, tokenize=False, add_generation_prompt=True)


def encode_chat(
    tokenizer: Tokenizer, messages: Messages, tools: list[dict] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n] int32 of a whole conversation, and [n] bool, True for the tokens of the assistant.

    The assistant's tokens include the one that ends the turn, but nothing that the template adds after it.

    Raises:
        SampleError: the template refuses the conversation, or an assistant message is not found in the rendered text.
    """
    messages = _with_parsed_arguments(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise SampleError("no assistant message")
    template = tokenizer.get_chat_template(tools=tools)
    if _GENERATION.search(template) and tokenizer.is_fast:
        marks = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = _apply_template(tokenizer, messages, tools, **marks)
        return np.array(encoded["input_ids"], dtype=np.int32), np.array(encoded["assistant_masks"], dtype=bool)

    def render(some: Messages, add_generation_prompt: bool = False) -> str:
        return _apply_template(tokenizer, some, tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    return _encode(tokenizer, *assistant_spans(render, messages, _special_tokens(tokenizer)))


def assistant_spans(render: Callable[..., str], messages: Messages, special: list[str]) -> tuple[str, list[Span]]:
    """The rendered conversation, and (start, end) in characters of each assistant message, in order.

    Args:
        render: (messages, add_generation_prompt=False) -> text.
        special: tokens that may end a turn; such a token directly after a message belongs to it.

    Raises:
        SampleError: the same as for `encode_chat`.
    """
    whole = render(messages)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            after = spans[-1][1] if spans else 0
            span = _span_by_prefixes(render, messages, index, whole)
            if span is None:
                try:
                    span = _span_by_replacement(render, messages, index, whole, after)
                except SampleError:  # some templates refuse a tool's result without its call
                    span = _span_by_prefixes(render, messages, index, whole, header=False)
            if span is None or span[0] < after:
                raise SampleError(
                    f"message {index + 1}, the assistant's, is not found in what the chat template renders"
                )
            spans.append(_close(whole, *span, special))
    return whole, spans


def _span_by_prefixes(
    render: Callable[..., str], messages: Messages, index: int, whole: str, header: bool = True
) -> Span | None:
    """Find a span between two prefixes of the whole; `header`: only if the template has a generation prompt to skip."""
    try:
        before, upto = render(messages[:index], True), render(messages[: index + 1])
        if header and before == render(messages[:index]):
            return None
    except SampleError:  # some templates refuse a part of a conversation
        return None
    found = whole.startswith(before) and whole.startswith(upto) and len(before) <= len(upto)
    return (len(before), len(upto)) if found else None


def _span_by_replacement(
    render: Callable[..., str], messages: Messages, index: int, whole: str, after: int
) -> Span | None:
    """Find the span that changes when the message is replaced, extended to the left up to the generation prompt."""
    start, tail = len(whole), len(whole)
    # Two texts with different first and last letters: at most one of them can share such a letter with the message.
    for text in ("A-A", "B-B"):
        other = render([*messages[:index], {"role": "assistant", "content": text}, *messages[index + 1 :]])
        if other == whole or text not in other:
            return None
        start = min(start, _common(whole, other))
        tail = min(tail, _common(whole[::-1], other[::-1]))
    header = _generation_prompt(render, messages[:index])
    at = whole.rfind(header, after, start) if header else -1
    return (start if at < 0 else at + len(header)), max(start, len(whole) - tail)


def _common(left: str, right: str) -> int:
    """Length of the common prefix."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def _generation_prompt(render: Callable[..., str], messages: Messages) -> str:
    try:
        without, prompt = render(messages), render(messages, True)
    except SampleError:
        return ""
    return prompt[len(without) :] if prompt.startswith(without) else ""


def _close(whole: str, start: int, end: int, special: list[str]) -> Span:
    """End a span with the token that ends the turn: drop white space after it, or add this token if it comes next."""
    stripped = whole[start:end].rstrip()
    if any(stripped.endswith(token) for token in special):
        return start, start + len(stripped)
    following = next((token for token in special if whole.startswith(token, end)), "")
    return start, end + len(following)


def _special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Special tokens as text, the longest first, so that a token is not mistaken for one that is its prefix."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)


def _encode(tokenizer: Tokenizer, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the text, and a mask of the tokens that overlap a span."""
    if not tokenizer.is_fast:
        return _encode_in_parts(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return np.array(encoded["input_ids"], dtype=np.int32), mask


def _encode_in_parts(tokenizer: Tokenizer, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    """Encode the text inside and between spans separately, for tokenizers without character offsets."""
    token_ids: list[int] = []
    mask: list[bool] = []
    cuts = [0, *(cut for span in spans for cut in span), len(text)]
    for number, (start, end) in enumerate(pairwise(cuts)):
        part = tokenizer(text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
        token_ids += part
        mask += [bool(number % 2)] * len(part)
    return np.array(token_ids, dtype=np.int32), np.array(mask, dtype=bool)


def _apply_template(tokenizer: Tokenizer, messages: Messages, tools: list[dict] | None, **options: object) -> Any:
    """Render a conversation by the chat template, with the options of `apply_chat_template`."""
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except Exception as error:  # templates may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SampleError(f"the chat template refuses it: {reason}") from error


def _with_parsed_arguments(messages: Messages) -> Messages:
    """Parse the arguments of tool calls, which templates expect as objects; the OpenAI format has a JSON string."""
    messages = copy.deepcopy(messages)
    for call in (call for message in messages for call in message.get("tool_calls") or []):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"])
            except ValueError:
                continue  # invalid JSON that a model wrote stays as it is
            function["arguments"] = parsed if isinstance(parsed, dict) else function["arguments"]
    return messages
