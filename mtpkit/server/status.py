"""What a server says of itself: its model, version, health and metrics."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from mtpkit import __version__
from mtpkit.server.errors import RESPONSES
from mtpkit.server.metrics import TEXT
from mtpkit.server.protocol.models import Model, ModelList, Version
from mtpkit.server.service import Service

router = APIRouter()


@router.get("/v1/models", responses=RESPONSES)
async def models(request: Request) -> ModelList:
    """The served model."""
    service: Service = request.app.state.service
    model = Model(
        id=service.name,
        created=service.created,
        root=service.root,
        max_model_len=service.llm.max_model_len,
    )
    return ModelList(data=[model])


@router.get("/version")
async def version() -> Version:
    """mtpkit's version."""
    return Version(version=__version__)


@router.get("/ping", response_class=Response, responses=RESPONSES)
@router.post("/ping", response_class=Response, responses=RESPONSES)
@router.get("/health", response_class=Response, responses=RESPONSES)
async def health(request: Request) -> Response:
    """Status 200 while requests can be served."""
    service: Service = request.app.state.service
    await service.llm.check_health()
    return Response()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    service: Service = request.app.state.service
    await service.note_stats()
    return Response(service.metrics.text(), media_type=TEXT)
