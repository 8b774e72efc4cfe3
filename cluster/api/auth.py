"""Pure ASGI middleware: answers 401 to requests without a valid API key. Has only the digests of keys.

All routes need a key except the routes in OPEN, so a new route is protected by default.
"""

import hmac
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.answer.events import error_body
from cluster.config.api_keys import digest
from cluster.errors import AuthenticationError

_PROBES = ("/live", "/ready", "/health", "/ping", "/load", "/metrics", "/ranks", "/version")
OPEN = frozenset(("/", "/docs", "/openapi.json", *_PROBES))
"""What probes, scrapers and browsers read without a key; nothing here shows or costs much."""
OPEN_PREFIX = "/web/"


class ApiKeyAuth:
    """Lets requests with `Authorization: Bearer KEY` pass."""

    def __init__(self, app: ASGIApp, digests: Iterable[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one HTTP request."""
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        if key is not None and self._is_known(key):
            await self._app(scope, receive, send)
            return
        problem = "the API key is wrong" if key else "an API key is missing"
        error = AuthenticationError(f"{problem}; send it as Authorization: Bearer KEY")
        answer = Response(
            error_body(error), error.status, {"www-authenticate": "Bearer"}, "application/json"
        )
        await answer(scope, receive, send)

    def _is_known(self, key: bytes) -> bool:
        """Compare with all digests, each in constant time, so that the time depends on no key."""
        found = False
        given = digest(key)
        for known in self._digests:
            found |= hmac.compare_digest(given, known)
        return found


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN or path.startswith(OPEN_PREFIX)


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None
