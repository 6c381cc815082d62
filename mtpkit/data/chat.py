"""Turn conversations into token ids and a mask of the assistant's tokens, with the tokenizer's chat
template.

What is learnt of a message is what the assistant writes when it is served: the text after the
generation prompt, up to and including the token that ends the turn. A template may mark the
assistant's parts itself (`{% generation %}`). For other templates each message is located in the
rendered text. If the rendering of the conversation before the message, generation prompt included,
is a prefix of the whole, then the message starts after it. Some templates render a message
differently depending on what follows (reasoning is dropped from older turns, tools move before the
last question), so that it is no prefix. In that case the message is replaced by a text that occurs
nowhere else, and the part of the rendering that changes is the message's place.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mtpkit.data.conversations import is_learnt
from mtpkit.data.options import Loss
from mtpkit.data.tokenizer import Tokenizer
from mtpkit.errors import UserError
from mtpkit.files import JsonObject

Messages = list[JsonObject]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING = ("enable_thinking", "thinking")
"""Variables with which templates are told that the model is not to think."""
_REASONING = ("reasoning_content", "reasoning")
"""Entries of messages that hold reasoning."""
_MARKS = [chr(number) for number in range(0xE000, 0xE040)]
"""Characters for private use, which texts rarely have."""
_QUESTION = {"role": "user", "content": "x"}


class SampleError(Exception):
    """The reason why a sample cannot be used; other samples are not affected."""


class NothingToLearn(SampleError):
    """The sample is usable, but nothing of it is to be learnt."""


@dataclass(frozen=True)
class Turn:
    """The place of an assistant's message in a rendered conversation, in characters."""

    start: int
    end: int
    prompt: int = 0
    """Text up to here is a prompt for sure; a token that begins before it is not the
    assistant's."""
    closed: bool = True
    """Whether the text of the turn ends with the token that ends turns."""


def require_template(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        UserError: the tokenizer has none.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template for data with"
            " messages; add chat_template.jinja to it, or name a file with --chat-template of"
            " mtpkit data prepare or regenerate"
        )


def learnt_turns(messages: Messages, loss: Loss = "all_turns") -> list[int]:
    """Indices of the messages that are learnt: the assistant's, but no empty ones, and none that
    say otherwise.

    Raises:
        NothingToLearn: there are none.
    """
    answers = _answers(messages, loss)
    if not answers:
        raise NothingToLearn("no assistant message")
    full = [index for index in answers if not _is_empty(messages[index])]
    if not full:
        raise NothingToLearn("empty answer")
    learnt = [index for index in full if is_learnt(messages[index])]
    if not learnt:
        raise NothingToLearn("no message is to be learnt")
    return learnt


def empty_turns(messages: Messages, loss: Loss = "all_turns") -> list[int]:
    """Indices of the messages that are not learnt since they are empty."""
    return [index for index in _answers(messages, loss) if _is_empty(messages[index])]


def _answers(messages: Messages, loss: Loss) -> list[int]:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return answers[-1:] if loss == "last_turn" else answers


def _is_empty(message: JsonObject) -> bool:
    """Whether a message has neither text nor calls nor reasoning."""
    texts = (message.get(key) for key in ("content", *_REASONING))
    return not message.get("tool_calls") and not any(
        isinstance(text, str) and text.strip() for text in texts
    )


class Chat:
    """A tokenizer's chat template, and what is known of it after the first conversations.

    Args:
        template_kwargs: variables for the template, such as `enable_thinking`.
        template: a template, or the name of one of the tokenizer's; None: the tokenizer's own.

    Raises:
        UserError: no template is given, and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_kwargs: JsonObject | None = None,
        template: str | None = None,
    ) -> None:
        if template is None:
            require_template(tokenizer)
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        self._template = template
        self._closers: dict[str, str] = {}
        self._off: list[str] | None = None

    @cached_property
    def _special(self) -> list[str]:
        return _special_tokens(self._tokenizer)

    def prompt(
        self,
        messages: Messages,
        tools: list[JsonObject] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation up to the point where the assistant begins to answer.

        Args:
            add_generation_prompt: False: render the messages alone.
            continue_final_message: render the messages alone, and end inside the last one, so that
                the assistant goes on with it.

        Raises:
            SampleError: the template refuses it.
        """
        return self._accepted(messages, tools, add_generation_prompt, continue_final_message)[1]

    def encode(
        self,
        messages: Messages,
        tools: list[JsonObject] | None = None,
        loss: Loss = "all_turns",
        complete: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [n] int32 of a whole conversation, and [n] bool, True for the tokens that are
        learnt.

        The tokens of a turn include the one that ends it, but nothing that the template adds after
        it. If the template ends turns with the token that begins the next one, this token follows
        the last turn too.

        Args:
            complete: False: the last message was cut off, and no token that ends it is learnt.

        Raises:
            SampleError: the template refuses the conversation, or does not render the calls of a
                message that is learnt, or reasoning that is all it holds; or an assistant's message
                is not found in the rendered text.
            NothingToLearn: see `learnt_turns`.
        """
        learnt = learnt_turns(messages, loss)
        form, whole = self._accepted(messages, tools)
        if hidden := sorted({*learnt} & {*self._hidden_calls(form, tools)}):
            raise SampleError(
                f"the chat template does not render all calls of message {hidden[0] + 1}"
            )
        # Such a message would be learnt as an empty answer.
        if hidden := self._hidden_reasoning(form, tools, learnt):
            raise SampleError(
                f"the chat template does not render the reasoning of message {hidden[0] + 1}, which"
                " holds nothing else"
            )
        template = self._tokenizer.get_chat_template(self._template, tools)
        if not _GENERATION.search(template) or not self._tokenizer.is_fast or _has_nulls(form):
            turns = list(_Finder(self, form, tools, whole).turns(learnt))
            whole, turns = self._ended(whole, turns, form, learnt[-1], complete)
            return self._encode(whole, turns)
        marks = {
            "return_dict": True,
            "return_assistant_tokens_mask": True,
            "tokenizer_kwargs": {"verbose": False},
        }
        encoded = self._apply(form, tools, tokenize=True, **marks)
        token_ids = np.array(encoded["input_ids"], dtype=np.int32)
        mask = np.array(encoded["assistant_masks"], dtype=bool)
        try:
            turns = list(_Finder(self, form, tools, whole).turns(learnt))
        except SampleError:
            if not complete or len(learnt) < sum(
                message["role"] == "assistant" for message in messages
            ):
                raise
            return token_ids, mask
        if not complete:
            turns = self._ended(whole, turns, form, learnt[-1], complete)[1]
        return token_ids, mask & self._encode(whole, turns)[1]

    def render(
        self,
        messages: Messages,
        tools: list[JsonObject] | None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """Render messages as they are.

        Raises:
            SampleError: the template refuses them.
        """
        ends = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if not _has_nulls(messages):
            return self._apply(messages, tools, tokenize=False, **ends)
        from transformers.utils.chat_template_utils import render_jinja_template

        # Later versions of `apply_chat_template` drop contents of None, which some templates ask
        # for.
        with _refusals():
            rendered, _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(self._template, tools),
                **ends,
                **{**self._tokenizer.special_tokens_map, **self._kwargs},
            )
        return rendered[0]

    def closer(self, follower: str) -> str:
        """The special token that ends a turn before a message of the role `follower`, "" for none:
        that of the turn itself, or the first token of what follows; "" if there is none."""
        if follower not in self._closers:
            after = [{"role": follower, "content": "x"}] if follower else []
            answer = {"role": "assistant", "content": _MARKS[0]}
            tries = (
                self._token_after([_QUESTION, one, *after]) for one in (answer, _in_parts(answer))
            )
            found = next((token for token in tries if token is not None), None)
            if found is None:
                found = self.closer("") if follower else ""
            self._closers[follower] = found
        return self._closers[follower]

    def thoughtless(self) -> list[str]:
        """Generation prompts of the template for a model that is not to think, unless the user
        chose one."""
        if self._off is None:
            template = self._tokenizer.get_chat_template(self._template)
            names = [
                name
                for name in _THINKING
                if name in template and not self._kwargs.keys() & _THINKING
            ]
            self._off = []
            for name in names:
                chat = Chat(self._tokenizer, {**self._kwargs, name: False}, self._template)
                self._off.append(chat.header([_QUESTION], None))
        return self._off

    def header(self, messages: Messages, tools: list[JsonObject] | None) -> str:
        """What the template adds to the messages as a generation prompt."""
        try:
            without = self.render(messages, tools)
            prompt = self.render(messages, tools, True)
        except SampleError:
            return ""
        return prompt[len(without) :] if prompt.startswith(without) else ""

    def _token_after(self, messages: Messages) -> str | None:
        """The special token after the first of the `_MARKS`, "" if none ends a turn; None if it is
        not rendered."""
        try:
            text = self.render(messages, None)
        except SampleError:
            return None
        if _MARKS[0] not in text:
            return None
        after = text[text.rindex(_MARKS[0]) + 1 :].lstrip()
        token = next((token for token in self._special if after.startswith(token)), "")
        # The token that begins the assistant's next turn does not end this one.
        return "" if token and self.header([_QUESTION], None).lstrip().startswith(token) else token

    def _accepted(
        self,
        messages: Messages,
        tools: list[JsonObject] | None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> tuple[Messages, str]:
        """The first form of a conversation that the template renders in full, and its rendering.

        If none is rendered in full, it is the first with its contents, or else the first that is
        not refused.
        """
        refusal: SampleError | None = None
        without_calls: tuple[Messages, str] | None = None
        partly: tuple[Messages, str] | None = None
        for form in _forms(messages):
            try:
                text = self.render(form, tools, add_generation_prompt, continue_final_message)
            except SampleError as error:
                refusal = refusal or error
                continue
            if _shows_contents(form, text):
                if self._shows_calls(form, tools, text):
                    return form, text
                without_calls = without_calls or (form, text)
            partly = partly or (form, text)
        found = without_calls or partly
        if found is None:
            assert refusal is not None
            raise refusal
        return found

    def _shows_calls(self, form: Messages, tools: list[JsonObject] | None, text: str) -> bool:
        """Whether a rendering has all calls, and arguments in another notation than Python's."""
        functions = [
            call["function"] for call in _calls(form) if isinstance(call.get("function"), dict)
        ]
        if any(
            isinstance(one.get("arguments"), dict) and _is_repr(one["arguments"], text)
            for one in functions
        ):
            return False
        return not self._hidden_calls(form, tools)

    def _hidden_calls(self, form: Messages, tools: list[JsonObject] | None) -> list[int]:
        """Indices of the messages with calls that the template does not render."""
        places = [
            index
            for index, message in enumerate(form)
            for call in message.get("tool_calls", [])
            if isinstance(call.get("function"), dict)
        ]
        if not places:
            return []
        names = iter(range(len(places)))
        renamed = _with_calls(
            form, lambda function: {**function, "name": f"f-{next(names)}-{_MARKS[0]}"}
        )
        try:
            probe = self.render(renamed, tools)
        except SampleError:  # a template may look for the name among the tools
            return []
        return [
            index for number, index in enumerate(places) if f"f-{number}-{_MARKS[0]}" not in probe
        ]

    def _hidden_reasoning(
        self, form: Messages, tools: list[JsonObject] | None, learnt: list[int]
    ) -> list[int]:
        """Indices of the learnt messages that hold nothing but reasoning, which the template does
        not render."""
        alone = [
            index
            for index in learnt
            if not form[index]["content"] and not form[index].get("tool_calls")
        ]
        if not alone:
            return []
        marked = [
            (
                {**message, **{key: f"{_MARKS[0]}{index}." for key in _REASONING if key in message}}
                if index in alone
                else message
            )
            for index, message in enumerate(form)
        ]
        probe = self.render(marked, tools)
        return [index for index in alone if f"{_MARKS[0]}{index}." not in probe]

    def _ended(
        self, whole: str, turns: list[Turn], form: Messages, last: int, complete: bool
    ) -> tuple[str, list[Turn]]:
        """End the last message of a conversation as in serving, if it is learnt: with a token that
        the template only writes before another message, or without one if the message was cut
        off."""
        if last != len(form) - 1:
            return whole, turns
        *others, turn = turns
        if not complete:
            text = whole[turn.start : turn.end]
            token = next(
                (token for token in self._special if turn.closed and text.endswith(token)), ""
            )
            return whole, [*others, Turn(turn.start, turn.end - len(token), turn.prompt)]
        if turn.closed:
            return whole, turns
        token = self.closer("") or self.closer("tool" if form[last].get("tool_calls") else "user")
        return whole + token, [*others, Turn(turn.start, len(whole + token), turn.prompt)]

    def _encode(self, text: str, turns: list[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a text, and a mask of the tokens of turns."""
        if not self._tokenizer.is_fast:
            return self._encode_in_parts(text, turns)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask = np.zeros(len(offsets), dtype=bool)
        for turn in turns:
            begins = offsets[:, 0]
            ends = offsets[:, 1]
            mask |= (begins < turn.end) & (ends > turn.start) & (begins >= turn.prompt)
        return np.array(encoded["input_ids"], dtype=np.int32), mask

    def _encode_in_parts(self, text: str, turns: list[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """Encode the text inside and between turns separately, for tokenizers without character
        offsets."""
        token_ids: list[int] = []
        mask: list[bool] = []
        cuts = [0, *(cut for turn in turns for cut in (turn.start, turn.end)), len(text)]
        for number, (start, end) in enumerate(pairwise(cuts)):
            part = self._tokenizer(text[start:end], add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            token_ids += part
            mask += [bool(number % 2)] * len(part)
        return np.array(token_ids, dtype=np.int32), np.array(mask, dtype=bool)

    def _apply(self, messages: Messages, tools: list[JsonObject] | None, **options: object) -> Any:
        """Render a conversation by the chat template, with the options of `apply_chat_template`."""
        with _refusals():
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                **self._kwargs,
                **options,
            )


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what a template raises, which may be anything, into a `SampleError`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SampleError(f"the chat template refuses it: {reason}") from error


class _Finder:
    """Locates the assistant's messages of one conversation in its rendering."""

    def __init__(
        self, chat: Chat, messages: Messages, tools: list[JsonObject] | None, whole: str
    ) -> None:
        self._chat = chat
        self._messages = messages
        self._tools = tools
        self._whole = whole
        self._prefixes: dict[tuple[int, bool], str | None] = {}

    def turns(self, indices: list[int]) -> Iterator[Turn]:
        """Yield the turns of the messages at ascending indices.

        Raises:
            SampleError: a message is not found.
        """
        after = 0
        for index in indices:
            turn = self._find(index, after)
            if turn is None or turn.start < after:
                raise SampleError(
                    f"message {index + 1}, the assistant's, is not found in what the chat template"
                    " renders"
                )
            yield turn
            after = turn.end

    def _find(self, index: int, after: int) -> Turn | None:
        whole = self._whole
        header = self._header(index)
        prompt = self._prefix(index, True)
        served = len(prompt) if prompt is not None and whole.startswith(prompt) else None
        upto = self._prefix(index + 1)
        limit = len(upto) if upto is not None and whole.startswith(upto) else None
        if served is not None and header and limit is not None and served <= limit:
            return self._close(
                index, self._after_thoughtless(served, header, limit), limit, exact=True
            )
        try:
            found = self._replaced(index)
        except SampleError:  # some templates refuse a tool's result without its call
            found = None if served is None or limit is None else (served, limit)
        if found is None:
            return None
        start = found[0]
        end = max(found) if limit is None else limit
        if served is not None and (header or not whole[served:start].strip()):
            return self._close(index, self._after_thoughtless(served, header, end), end, exact=True)
        at = whole.rfind(header, after, start) if header else -1
        if at >= 0:
            start = self._after_thoughtless(at + len(header), header, end)
        return self._close(index, start, end, exact=False)

    def _prefix(self, count: int, add_generation_prompt: bool = False) -> str | None:
        """The rendering of the first messages; None if the template refuses them."""
        key = count, add_generation_prompt
        if key not in self._prefixes:
            try:
                self._prefixes[key] = self._chat.render(
                    self._messages[:count], self._tools, add_generation_prompt
                )
            except SampleError:
                self._prefixes[key] = None
        return self._prefixes[key]

    def _header(self, index: int) -> str:
        """The generation prompt after the messages before `index`."""
        without = self._prefix(index)
        prompt = self._prefix(index, True)
        if without is None or prompt is None or not prompt.startswith(without):
            return ""
        return prompt[len(without) :]

    def _replaced(self, index: int) -> tuple[int, int] | None:
        """Start and end of the text that changes when a message is replaced; None if the template
        drops messages."""
        text = next((mark for mark in _MARKS if mark not in self._whole), None)
        if text is None:
            return None
        message = _answer(text, self._messages)
        other = self._chat.render(
            [*self._messages[:index], message, *self._messages[index + 1 :]], self._tools
        )
        if text not in other:
            return None
        start = _common(self._whole, other)
        return start, len(self._whole) - _common(self._whole[::-1], other[::-1])

    def _after_thoughtless(self, start: int, header: str, limit: int) -> int:
        """Move a start past what the template would add to the prompt, `header`, of a model that is
        not to think."""
        for prompt in self._chat.thoughtless():
            end = start - len(header) + len(prompt)
            if start < end <= limit and self._whole.startswith(prompt, start - len(header)):
                return end
        return start

    def _close(self, index: int, start: int, end: int, exact: bool) -> Turn:
        """End a turn with the token that ends it, which stands in the text up to `end` or comes
        next."""
        prompt = start if exact else 0
        follower = self._messages[index + 1]["role"] if index + 1 < len(self._messages) else ""
        closer = self._chat.closer(follower)
        if not closer:
            return Turn(start, end, prompt, closed=False)
        at = self._whole.rfind(closer, start, end)
        if at < 0:
            following = self._whole[end:].lstrip()
            at = len(self._whole) - len(following) if following.startswith(closer) else -1
        return (
            Turn(start, at + len(closer), prompt)
            if at >= 0
            else Turn(start, end, prompt, closed=False)
        )


def _forms(messages: Messages) -> Iterator[Messages]:
    """Yield the forms of a conversation that templates expect, the most common first.

    The arguments of calls are objects, or JSON; a call without text has the content "", or None;
    contents are texts, or lists of parts.
    """
    given = [_normal(message) for message in messages]
    forms = [given]
    if _calls(given):
        forms = [_with_calls(given, _as_object), _with_calls(given, _as_json)]
        forms += [[_without_text(message) for message in form] for form in forms]
    seen: list[Messages] = []
    for form in [*forms, *([_in_parts(message) for message in form] for form in forms)]:
        if form not in seen:
            seen.append(form)
            yield form


def _normal(message: JsonObject) -> JsonObject:
    """A message with a text for content, and calls of functions in full; no calls rather than an
    empty list of them."""
    message = {**message, "content": message.get("content") or ""}
    calls = message.pop("tool_calls", None)
    return {**message, "tool_calls": [_normal_call(call) for call in calls]} if calls else message


def _normal_call(call: JsonObject) -> JsonObject:
    if "function" not in call and "name" in call:
        call = {"function": {key: call[key] for key in ("name", "arguments") if key in call}}
    if not isinstance(call.get("function"), dict):
        return call
    return {"type": "function", **call, "function": {"arguments": {}, **call["function"]}}


def _calls(messages: Messages) -> list[JsonObject]:
    return [call for message in messages for call in message.get("tool_calls", [])]


def _with_calls(messages: Messages, change: Callable[[JsonObject], JsonObject]) -> Messages:
    """Messages whose calls have changed functions."""

    def changed(call: JsonObject) -> JsonObject:
        function = call.get("function")
        return {**call, "function": change(function)} if isinstance(function, dict) else call

    return [
        (
            {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
        )
        for message in messages
    ]


def _as_object(function: JsonObject) -> JsonObject:
    """A function with its arguments as an object; JSON that a model wrote may be invalid, and stays
    as it is."""
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return function
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return function
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function


def _as_json(function: JsonObject) -> JsonObject:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return function
    return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _without_text(message: JsonObject) -> JsonObject:
    return (
        {**message, "content": None}
        if "tool_calls" in message and not message["content"]
        else message
    )


def _in_parts(message: JsonObject) -> JsonObject:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if content else message


def _answer(text: str, like: Messages) -> JsonObject:
    """An assistant's message, with its content in parts if those of `like` are."""
    message = {"role": "assistant", "content": text}
    return _in_parts(message) if any(isinstance(one["content"], list) for one in like) else message


def _has_nulls(messages: Messages) -> bool:
    return any(message["content"] is None for message in messages)


def _plain_content(message: JsonObject) -> str:
    content = message["content"]
    return content[0]["text"] if isinstance(content, list) else content or ""


def _shows_contents(form: Messages, text: str) -> bool:
    """Whether a rendering has any of the contents, if there are some."""
    contents = [content for message in form if (content := _plain_content(message).strip())]
    return not contents or any(content in text for content in contents)


def _is_repr(arguments: JsonObject, text: str) -> bool:
    """Whether a text has arguments as Python writes them, which is not how JSON does."""
    return bool(arguments) and repr(arguments) in text


def _common(left: str, right: str) -> int:
    """Length of the common prefix."""
    known = 0
    most = min(len(left), len(right))
    while known < most:
        middle = (known + most + 1) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def _special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Special tokens as text, the longest first, so that a token is not mistaken for one that is
    its prefix."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
