"""The built-in page at `/`: chat beside live bars of the ranks. Knows nothing of its content."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

INDEX = "index.html"
# Everything the page needs comes from its own server, as files: no inline script or style runs,
# so text of a model that found its way into the markup could do nothing.
_HEADERS = {
    "cache-control": "no-cache",  # a browser compares the ETag at each load, so a new version shows at once
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class _Page(StaticFiles):
    """The files of cluster/web."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the file, or 304 if the browser has it."""
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def add_page_routes(app: FastAPI) -> None:
    """Serve the page at / and its files under /web/."""
    page = _Page(packages=[("cluster", "web")])

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return await page.get_response(INDEX, request.scope)

    app.mount("/web", page)
