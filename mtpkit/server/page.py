"""The live page at `/`: one file without anything from elsewhere, which reads `/metrics` and
`/health` in the browser."""

from pathlib import Path

from fastapi import APIRouter, Response

router = APIRouter()

_PAGE = Path(__file__).with_name("page.html").read_bytes()
_HEADERS = {
    # Whatever a model is called, the page runs its own script alone and asks nobody but its server.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'"
    ),
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """A page for people, with the numbers of `/metrics`."""
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=_HEADERS)
