"""/v1/completions: texts and token ids, continued."""

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from mtpkit.engine import CompletionOutput, RequestOutput, SamplingParams
from mtpkit.engine.requests.log_probs import Logprob
from mtpkit.server.chunks import PLACE, Template, chunk_json
from mtpkit.server.counting import Counter
from mtpkit.server.errors import RESPONSES, STREAM, ApiError
from mtpkit.server.events import answered, streamed
from mtpkit.server.log_probs import Positions, for_completion, of_prompt
from mtpkit.server.protocol.completions import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
)
from mtpkit.server.protocol.log_probs import CompletionLogProbs
from mtpkit.server.refusals import check_fields
from mtpkit.server.service import Service

router = APIRouter()


@router.post(
    "/v1/completions", responses={200: {"model": CompletionResponse, **STREAM}, **RESPONSES}
)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    check_fields(body)
    if not body.prompts:
        raise ApiError(400, "prompt is an empty list: give at least one prompt", "prompt")
    others: dict[str, Any] = {"logprobs": body.logprobs}
    if body.max_tokens is not None:
        # The engine makes at least one token, which nobody sees then.
        others["max_tokens"] = 1 if body.prompt_only else body.max_tokens
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        others["prompt_logprobs"] = body.logprobs
    params = body.sampling_params(**others)
    completion = _Completion(service, body, params, request.state.id)
    if body.stream:
        return await streamed(request, completion.chunks())
    return await answered(request, completion.whole())


class _Completion:
    """One request and its outputs."""

    def __init__(
        self, service: Service, body: CompletionRequest, params: SamplingParams, request_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        names = ["prompt"]
        if len(body.prompts) > 1:
            names = [f"prompt[{index}]" for index in range(len(body.prompts))]
        prompts: list[dict[str, Any]] = [
            {("prompt" if isinstance(prompt, str) else "prompt_token_ids"): prompt, "name": name}
            for name, prompt in zip(names, body.prompts, strict=True)
        ]
        self._prompts = prompts
        self._kept = params.truncate_prompt_tokens
        self._num_outputs = params.n
        self._offsets = dict[int, int]()
        """Characters of the tokens so far, for log-probabilities, of each choice that has begun."""
        self._of_prompts = dict[int, Positions]()
        """Log-probabilities of the tokens of each prompt."""
        self._templates = dict[int, Template]()
        self._outputs = service.outputs(prompts, params)

    async def whole(self) -> CompletionResponse:
        """The response with all outputs."""
        counter = Counter(outputs=not self._body.prompt_only)
        choices = list[CompletionChoice]()
        async for index, output in self._outputs:
            counter.note(index, output)
            choices += [await self._choice(index, output, one) for one in output.outputs]
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._service.name,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=counter.usage(),
        )

    async def chunks(self) -> AsyncGenerator[str]:
        """What is new, as it comes, and the usage last, in JSON."""
        if len(self._prompts) > 1:
            await self._service.check_lengths(self._prompts, self._kept)
        counter = Counter(outputs=not self._body.prompt_only)
        async for index, output in self._outputs:
            counter.note(index, output)
            for completion in output.outputs:
                place = self._place(index, completion)
                begun = place in self._offsets
                if begun and self._body.has_plain_chunks and completion.finish_reason is None:
                    yield self._template(place).render(completion.text)
                    continue
                chunk = self._chunk([await self._choice(index, output, completion)])
                if self._body.continuous_usage:
                    chunk.usage = counter.usage()
                yield chunk_json(chunk)
        if self._body.include_usage:
            chunk = self._chunk([])
            chunk.usage = counter.usage()
            yield chunk_json(chunk)

    def _template(self, place: int) -> Template:
        """What renders the chunks of a choice between its first and its last one."""
        if place not in self._templates:
            choice = CompletionChoice(
                index=place, text=PLACE, logprobs=None, finish_reason=None, stop_reason=None
            )
            self._templates[place] = Template(self._chunk([choice]))
        return self._templates[place]

    def _chunk(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._service.name,
            choices=choices,
        )

    def _place(self, index: int, completion: CompletionOutput) -> int:
        """Place of an output among those of all prompts."""
        return index * self._num_outputs + completion.index

    async def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        """What an output tells, after the prompt where that is asked for."""
        place = self._place(index, completion)
        first = place not in self._offsets
        self._offsets.setdefault(place, 0)
        echoed = first and bool(self._body.echo)
        if self._body.prompt_only:
            completion = _without_output(completion)
        text = completion.text
        if echoed:
            text = await self._service.prompt_text(output) + text
        choice = CompletionChoice(
            index=place,
            text=text,
            logprobs=None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if completion.logprobs is not None:
            choice.logprobs = await self._log_probs(index, place, output, completion, echoed)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = of_prompt(output)
        if self._body.return_token_ids:
            choice.token_ids = completion.token_ids
            if first:
                choice.prompt_token_ids = output.prompt_token_ids
        return choice

    async def _log_probs(
        self,
        index: int,
        place: int,
        output: RequestOutput,
        completion: CompletionOutput,
        echoed: bool,
    ) -> CompletionLogProbs:
        """The log-probabilities of what an output tells."""
        token_ids = completion.token_ids
        positions: Positions = completion.logprobs or []
        first_text = ""
        if output.prompt_logprobs:
            # In a stream, only the first output of a prompt has them.
            self._of_prompts[index] = output.prompt_logprobs
        if echoed:
            token_ids = [*output.prompt_token_ids, *token_ids]
            positions = [*self._of_prompts[index], *positions]
            first_text = await self._service.token_text(token_ids[0])
        offset = self._offsets[place]
        found = for_completion(token_ids, positions, offset, lambda _: first_text)
        self._offsets[place] += sum(map(len, found.tokens))
        return found


def _without_output(completion: CompletionOutput) -> CompletionOutput:
    """An output of which nobody wants the token that the engine made."""
    nothing = None if completion.logprobs is None else list[dict[int, Logprob]]()
    return replace(
        completion,
        token_ids=[],
        text="",
        logprobs=nothing,
        finish_reason="length",
        stop_reason=None,
    )
