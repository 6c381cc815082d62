"""What the routes of a server share: the engine, its names, and how much it takes in."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from mtpkit.engine import AsyncLLM, EngineDead, RequestOutput, SamplingParams
from mtpkit.engine.requests.prompts import encode, truncated
from mtpkit.server.answers.reader import AnswerStyle
from mtpkit.server.errors import ApiError
from mtpkit.server.metrics import Metrics

type Outputs = AsyncGenerator[tuple[int, RequestOutput]]
"""The number of a prompt, and its next output."""

_MOST_TOKENS = 2**31
"""More than any vocabulary has; tokenizers take no larger numbers."""
_MARK = re.compile("<.+>", re.DOTALL)
_PATIENCE = 5.0
"""Seconds for which the engine's statistics are waited for."""
_RETRY_AFTER = 1
"""Seconds after which clients are asked to try again."""


class Service:
    """An engine and what the routes know of it.

    Args:
        name: name of the model in requests and responses.
        root: the model as the user gave it.
        style: how the model writes its answers.
        max_open: most unfinished prompts; None: no limit.
        chat_template: template to be used instead of the tokenizer's.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        root: str,
        style: AnswerStyle,
        max_open: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.llm = llm
        self.name = name
        self.root = root
        self.style = style
        self.created = int(time.time())
        self.metrics = Metrics(name, llm.max_model_len)
        self._chat_template = chat_template
        self._max_open = max_open
        self._num_open = 0

    def check_model(self, asked: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: the model is not served here.
        """
        if asked is not None and asked != self.name:
            raise ApiError(404, f"there is no model {asked!a}, this is {self.name!a}", "model")

    def conversation(self, body: Any) -> dict[str, Any]:
        """The prompt of a request with the fields of `ConversationFields`."""
        names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt")
        prompt = {name: getattr(body, name) for name in (*names, "continue_final_message")}
        return prompt | {"chat_template": self._chat_template, "name": "messages"}

    async def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ApiError: numbers that are no token ids, or there is no tokenizer.
        """

        def decoded(tokenizer: Any) -> str:
            if tokenizer is None:
                raise ApiError(400, "the model has no tokenizer, so there is no text")
            if any(not 0 <= token < _MOST_TOKENS for token in token_ids):
                raise ApiError(400, "tokens are token ids, whole numbers of 0 or more", "tokens")
            return tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

        return await self.llm.with_tokenizer(decoded)

    async def prompt_text(self, output: RequestOutput) -> str:
        """The text of a prompt that was a text or token ids."""
        if output.prompt is not None:
            return output.prompt
        if self.llm.tokenizer is None:
            return ""
        return await self.decode(output.prompt_token_ids)

    async def marks(self) -> dict[str, int]:
        """Added tokens in angle brackets that texts show, by their texts."""

        def found(tokenizer: Any) -> dict[str, int]:
            added = getattr(tokenizer, "added_tokens_decoder", {})
            return {
                token.content: token_id
                for token_id, token in added.items()
                if _MARK.fullmatch(token.content) and not token.special
            }

        return await self.llm.with_tokenizer(found)

    async def token_text(self, token_id: int) -> str:
        """The text of one token, or its id where there is no tokenizer."""
        if self.llm.tokenizer is None:
            return f"token_id:{token_id}"
        return await self.decode([token_id])

    async def note_stats(self) -> None:
        """Note the engine's totals for the metrics; those before stay where it does not answer."""
        with suppress(EngineDead, TimeoutError):
            self.metrics.engine.stats = await asyncio.wait_for(self.llm.stats(), _PATIENCE)

    async def check_lengths(self, prompts: Sequence[dict[str, Any]], kept: int | None) -> None:
        """Refuse prompts of which one is too long, before the others are streamed.

        Args:
            kept: `SamplingParams.truncate_prompt_tokens`.

        Raises:
            ApiError: it leaves no room for output.
            UserError: a prompt that is none.
        """

        def lengths(tokenizer: Any) -> list[int]:
            encoded = (encode(one, tokenizer, one["name"]) for one in prompts)
            longest = self.llm.max_model_len
            return [len(truncated(one, kept, longest).token_ids) for one in encoded]

        most = self.llm.max_model_len - 1
        for prompt, length in zip(prompts, await self.llm.with_tokenizer(lengths), strict=True):
            if length > most:
                name = prompt["name"]
                raise ApiError(400, f"{name} has {length} tokens, more than {most}", "prompt")

    async def rendered(self, prompt: dict[str, Any]) -> str:
        """The text of a conversation."""
        encoded = await self.llm.with_tokenizer(partial(encode, prompt, name=prompt["name"]))
        return encoded.text or ""

    async def outputs(self, prompts: Sequence[Any], params: SamplingParams) -> Outputs:
        """Decode prompts at once; yield what comes, until all have ended.

        Raises:
            ApiError: there is no room for so many prompts, or decoding failed.
            UserError: a prompt cannot be served.
            EngineDead: the engine died.
        """
        count = len(prompts) * params.n
        self._check_room(count)
        self._num_open += count
        streams = [self._observed(prompt, params) for prompt in prompts]
        try:
            async with aclosing(_merged(streams)) as merged:
                async for index, output in merged:
                    for completion in output.outputs:
                        if completion.error is not None:
                            raise ApiError(400 if completion.refused else 500, completion.error)
                    yield index, output
        finally:
            self._num_open -= count

    def _check_room(self, count: int) -> None:
        if self._max_open is None or self._num_open + count <= self._max_open:
            return
        if count > self._max_open:
            raise ApiError(
                400, f"{count} prompts at once, but the server takes in {self._max_open}", "prompt"
            )
        raise ApiError(
            429,
            f"{self._num_open} prompts are unfinished, more than {self._max_open} with this"
            " request: try again later",
            headers={"Retry-After": str(_RETRY_AFTER)},
        )

    async def _observed(self, prompt: Any, params: SamplingParams) -> AsyncGenerator[RequestOutput]:
        """The outputs of one prompt, noted in the metrics."""
        timer = self.metrics.timer()
        try:
            async with aclosing(self.llm.generate(prompt, params)) as stream:
                async for output in stream:
                    timer.note(output)
                    yield output
        finally:
            timer.close()


async def _merged(streams: list[AsyncGenerator[RequestOutput]]) -> Outputs:
    """The outputs of all streams, each as soon as it is there."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return

    # One place: where nobody reads, outputs are joined in the streams.
    queue = asyncio.Queue[tuple[int, RequestOutput] | Exception](1)

    async def pump(index: int, stream: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(*pair)) for pair in enumerate(streams)]
    unfinished = len(streams)
    try:
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            unfinished -= item[1].finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
