"""The built-in page at `/`: chat beside live bars of the ranks.

Serves the files of cluster/web from memory. Each file has an ETag of its content, which a browser compares at each
load, so that a new version shows at once. Knows nothing of the content.
"""

import hashlib
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.errors import NotFoundError

INDEX = "index.html"
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Everything the page needs comes from its own server, as files: no inline script or style runs,
# so text of a model that found its way into the markup could do nothing.
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def add_page_routes(app: FastAPI) -> None:
    """Serve the page at / and its files under /web/."""
    pages = {name: _Page(name, content) for name, content in _read_files().items()}

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return pages[INDEX].answer(request)

    @app.api_route("/web/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        if name not in pages or name == INDEX:
            raise NotFoundError(f"the page has no file {name[:100]!r}")
        return pages[name].answer(request)


class _Page:
    """One file with its headers."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        self._headers = {"etag": self._etag, "cache-control": "no-cache", **_SECURITY_HEADERS}
        self._typed_headers = {**self._headers, "content-type": media_type}

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has it. The HTTP server omits the body of a HEAD."""
        known = request.headers.get("if-none-match", "")
        if self._etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._typed_headers)


def _read_files() -> dict[str, bytes]:
    folder = files("cluster").joinpath("web")
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _MEDIA_TYPES
    }
