"""/tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter, Request, Response

from mtpkit.engine.requests.prompts import encode
from mtpkit.server.errors import RESPONSES, ApiError
from mtpkit.server.events import answered
from mtpkit.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from mtpkit.server.refusals import check_fields
from mtpkit.server.service import Service

router = APIRouter()


@router.post("/tokenize", responses={200: {"model": TokenizeResponse}, **RESPONSES})
async def tokenize(body: TokenizeTextRequest | TokenizeChatRequest, request: Request) -> Response:
    """Encode a text or a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    check_fields(body)
    return await answered(request, _tokenize(service, body))


async def _tokenize(
    service: Service, body: TokenizeTextRequest | TokenizeChatRequest
) -> TokenizeResponse:
    def encoded(tokenizer: Any) -> tuple[list[int], list[str]]:
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer, so texts cannot be encoded")
        if isinstance(body, TokenizeChatRequest):
            tokens = encode(service.conversation(body), tokenizer, "messages").token_ids
        elif body.add_special_tokens:
            tokens = encode(body.prompt, tokenizer, "prompt").token_ids
        else:
            tokens = tokenizer.encode(body.prompt, add_special_tokens=False)
        return list(tokens), tokenizer.convert_ids_to_tokens(tokens)

    tokens, texts = await service.llm.with_tokenizer(encoded)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.llm.max_model_len,
        tokens=tokens,
        token_strs=texts if body.return_token_strs else None,
    )


@router.post("/detokenize", responses={200: {"model": DetokenizeResponse}, **RESPONSES})
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Decode token ids."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    check_fields(body)
    return await answered(request, _detokenize(service, body))


async def _detokenize(service: Service, body: DetokenizeRequest) -> DetokenizeResponse:
    return DetokenizeResponse(prompt=await service.decode(body.tokens))
