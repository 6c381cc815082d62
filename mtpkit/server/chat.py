"""/v1/chat/completions: conversations, answered."""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from mtpkit.engine import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from mtpkit.server.answers.forced import forced_calls, read_tool
from mtpkit.server.answers.formats import ToolFormat
from mtpkit.server.answers.pieces import Call, Content, Reasoning
from mtpkit.server.answers.reader import AnswerReader, opens_reasoning
from mtpkit.server.answers.reasoning import CLOSE
from mtpkit.server.chunks import PLACE, Template, chunk_json
from mtpkit.server.counting import Counter
from mtpkit.server.errors import RESPONSES, STREAM, ApiError
from mtpkit.server.events import answered, streamed
from mtpkit.server.log_probs import for_chat, of_prompt
from mtpkit.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    Delta,
    FunctionCall,
    Message,
    ToolCall,
)
from mtpkit.server.protocol.log_probs import ChatLogProbs, PromptLogProbs
from mtpkit.server.refusals import check_fields
from mtpkit.server.service import Service

router = APIRouter()


@router.post(
    "/v1/chat/completions", responses={200: {"model": ChatResponse, **STREAM}, **RESPONSES}
)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    check_fields(body)
    if body.tools and body.tool_choice != "none" and service.style.unknown:
        raise ApiError(
            400,
            "the chat template shows no format of calls that is known: start the server with"
            " --tool-call-parser, or set tool_choice to 'none'",
            "tools",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    most = body.max_completion_tokens
    if most is None:
        most = body.max_tokens
    top = body.top_logprobs or 0 if body.logprobs else None
    params = body.sampling_params(max_tokens=most, logprobs=top)
    if body.tool_choice not in (None, "none", "auto"):
        marks = await service.marks()
        params = _with_forced_call(params, body, service.style.tools, marks)
    answer = _Answer(service, body, params, request.state.id)
    if body.stream:
        return await streamed(request, answer.chunks())
    return await answered(request, answer.whole())


def _with_forced_call(
    params: SamplingParams,
    body: ChatRequest,
    tool_format: ToolFormat | None,
    marks: Mapping[str, int],
) -> SamplingParams:
    """Constrain the answer to calls of tools.

    Args:
        marks: see `Notation`.

    Raises:
        ApiError: a wrong `tool_choice`, or one that cannot be followed.
        UserError: tools that cannot be called in this format.
    """
    named = body.named_tool
    if body.tool_choice != "required" and named is None:
        raise ApiError(
            400, "tool_choice must be 'auto', 'none', 'required', or name a function", "tool_choice"
        )
    if tool_format is None:
        raise ApiError(400, "tool_choice needs a format of calls: see --tool-call-parser", "tools")
    if params.structured_outputs is not None:
        raise ApiError(
            400,
            "tool_choice and structured outputs do not go together: leave one out",
            "tool_choice",
        )
    tools = [read_tool(tool) for tool in body.tools or ()]
    tools = [tool for tool in tools if named in (None, tool.name)]
    if not tools:
        raise ApiError(400, "tool_choice asks for a tool that is not among tools", "tool_choice")
    several = named is None and body.parallel_tool_calls is not False
    grammar = forced_calls(
        tool_format.begin, tool_format.end, tool_format.layout, tools, several, marks
    )
    constraint = StructuredOutputsParams(grammar=grammar)
    return replace(params, structured_outputs=constraint)


class _Answer:
    """One request and its output."""

    def __init__(
        self, service: Service, body: ChatRequest, params: SamplingParams, request_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._tools = [] if body.tool_choice == "none" else body.tools or []
        self._prompt = service.conversation(body) | {"tools": self._tools or None}
        self._forced = body.tool_choice not in (None, "none", "auto")
        """Whether the answer is calls and nothing else."""
        self._params = params
        self._choices = dict[int, _Choice]()
        self._templates = dict[tuple[int, str], Template]()

    async def whole(self) -> ChatResponse:
        """The response with the whole answers."""
        counter = Counter()
        choices = list[ChatChoice]()
        prompt_token_ids = list[int]()
        prompt_log_probs: PromptLogProbs | None = None
        async for index, output in self._outputs():
            counter.note(index, output)
            prompt_token_ids = output.prompt_token_ids
            prompt_log_probs = of_prompt(output)
            for completion in output.outputs:
                choice = self._choice(completion, output)
                answer = ChatChoice(
                    index=completion.index,
                    message=_message(choice.deltas(completion)),
                    logprobs=self._log_probs(completion),
                    finish_reason=choice.reason(completion),
                    stop_reason=completion.stop_reason,
                )
                if self._body.return_token_ids:
                    answer.token_ids = completion.token_ids
                choices.append(answer)
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._service.name,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=counter.usage(),
            prompt_token_ids=prompt_token_ids if self._body.return_token_ids else None,
            prompt_logprobs=prompt_log_probs,
        )

    async def chunks(self) -> AsyncGenerator[str]:
        """The role, what is new as it comes, the reason of the end, and the usage last, in JSON."""
        counter = Counter()
        async for index, output in self._outputs():
            counter.note(index, output)
            for completion in output.outputs:
                begun = completion.index in self._choices
                if begun and self._body.has_plain_chunks and completion.finish_reason is None:
                    for text in self._plain_chunks_of(completion):
                        yield text
                    continue
                for chunk in self._chunks_of(completion, output):
                    if self._body.continuous_usage:
                        chunk.usage = counter.usage()
                    yield chunk_json(chunk)
        if self._body.include_usage:
            chunk = self._chunk([])
            chunk.usage = counter.usage()
            yield chunk_json(chunk)

    def _plain_chunks_of(self, completion: CompletionOutput) -> Iterator[str]:
        """The chunks of what is new of an answer that has begun and goes on."""
        place = completion.index
        for delta in self._choices[place].deltas(completion):
            if delta.content is not None:
                yield self._template(place, "content").render(delta.content)
            elif delta.reasoning_content is not None:
                yield self._template(place, "reasoning_content").render(delta.reasoning_content)
            else:
                yield chunk_json(self._chunk([_part(place, delta)]))

    def _template(self, place: int, field: str) -> Template:
        """What renders the chunks of an answer with new text in a field."""
        if (place, field) not in self._templates:
            part = _part(place, Delta.model_validate({field: PLACE}))
            self._templates[place, field] = Template(self._chunk([part]))
        return self._templates[place, field]

    def _chunks_of(
        self, completion: CompletionOutput, output: RequestOutput
    ) -> Iterator[ChatChunk]:
        """The chunks of what is new of one answer."""
        place = completion.index
        if place not in self._choices:
            chunk = self._chunk([_part(place, Delta(role="assistant", content=""))])
            if self._body.return_token_ids:
                chunk.prompt_token_ids = output.prompt_token_ids
            yield chunk
        choice = self._choice(completion, output)
        deltas = choice.deltas(completion)
        token_ids = completion.token_ids if self._body.return_token_ids else []
        log_probs = self._log_probs(completion)
        # Tokens whose text is held back have a chunk, too.
        for delta in deltas or [Delta()] * bool(token_ids or log_probs):
            part = _part(place, delta)
            if token_ids:
                part.token_ids = token_ids
            part.logprobs = log_probs
            yield self._chunk([part])
            token_ids = []
            log_probs = None
        if completion.finish_reason is not None:
            part = _part(place, Delta(), choice.reason(completion))
            if completion.stop_reason is not None:
                part.stop_reason = completion.stop_reason
            yield self._chunk([part])

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """What the engine says. A constraint begins after the reasoning that the prompt opens."""
        params = self._params
        constraint = params.structured_outputs
        if constraint is not None and await self._begins_with_reasoning():
            constraint = replace(constraint, start_after=CLOSE)
            params = replace(params, structured_outputs=constraint)
        async with aclosing(self._service.outputs([self._prompt], params)) as outputs:
            async for pair in outputs:
                yield pair

    async def _begins_with_reasoning(self) -> bool:
        if not self._service.style.reasons:
            return False
        return opens_reasoning(await self._service.rendered(self._prompt))

    def _choice(self, completion: CompletionOutput, output: RequestOutput) -> "_Choice":
        """The state of an answer."""
        if completion.index not in self._choices:
            prompt = output.prompt or ""
            reader = self._service.style.reader(prompt, self._tools, self._forced)
            single = self._body.parallel_tool_calls is False
            named = self._body.named_tool is not None
            self._choices[completion.index] = _Choice(reader, single, named)
        return self._choices[completion.index]

    def _log_probs(self, completion: CompletionOutput) -> ChatLogProbs | None:
        if not completion.logprobs:
            return None
        return for_chat(completion, self._body.top_logprobs or 0)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._service.name,
            choices=choices,
        )


class _Choice:
    """One answer while it grows."""

    def __init__(self, reader: AnswerReader, single_call: bool, named: bool) -> None:
        self._reader = reader
        self._single_call = single_call
        self._named = named
        self._num_calls = 0

    def deltas(self, completion: CompletionOutput) -> list[Delta]:
        """What is new, as parts of an answer."""
        pieces = self._reader.read(completion.text)
        if completion.finish_reason is not None:
            pieces += self._reader.end()
        deltas = []
        for piece in pieces:
            match piece:
                case Reasoning():
                    deltas.append(Delta(reasoning_content=piece.text))
                case Content():
                    deltas.append(Delta(content=piece.text))
                case Call() if not (self._num_calls and self._single_call):
                    deltas.append(Delta(tool_calls=[self._tool_call(piece)]))
        return deltas

    def reason(self, completion: CompletionOutput) -> str | None:
        """Why the answer has ended. As in vLLM, a call that the client has named is no reason."""
        called = self._num_calls and completion.finish_reason == "stop" and not self._named
        return "tool_calls" if called else completion.finish_reason

    def _tool_call(self, call: Call) -> ToolCall:
        index = self._num_calls
        self._num_calls += 1
        return ToolCall(
            index=index,
            id=f"call_{uuid4().hex[:24]}",
            type="function",
            function=FunctionCall(name=call.name, arguments=call.arguments),
        )


def _part(index: int, delta: Delta, finish_reason: str | None = None) -> ChunkChoice:
    return ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)


def _message(deltas: list[Delta]) -> Message:
    """The message of all parts of an answer."""
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning_content or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    only_others = not content and bool(calls or reasoning)
    return Message(
        content=None if only_others else content,
        reasoning_content=reasoning or None,
        tool_calls=calls or None,
    )
