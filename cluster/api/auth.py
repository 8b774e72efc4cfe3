"""Pure ASGI middleware: answers 401 to requests without a valid API key. Has only the digests of keys.

All routes need a key except the routes in OPEN, so a new route is protected by default.
"""

import hmac
from collections.abc import Iterable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.error_format import error_response
from cluster.config.api_keys import digest
from cluster.errors import AuthenticationError

_PROBES = ("/live", "/ready", "/health", "/ping", "/load", "/metrics", "/ranks", "/version")
OPEN = frozenset(("/", "/docs", "/openapi.json", *_PROBES))
"""What probes, scrapers and browsers read without a key; nothing here shows or costs much."""
OPEN_PREFIX = "/web/"


class ApiKeyAuth:
    """Lets requests with `Authorization: Bearer KEY` or `x-api-key: KEY` pass."""

    def __init__(self, app: ASGIApp, digests: Iterable[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one HTTP request."""
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        keys = list(_keys(scope))
        if any(self._is_known(key) for key in keys):
            await self._app(scope, receive, send)
            return
        problem = "the API key is wrong" if any(keys) else "an API key is missing"
        error = AuthenticationError(
            f"{problem}; send it as Authorization: Bearer KEY or as x-api-key: KEY"
        )
        answer = error_response(error, scope)
        answer.headers["www-authenticate"] = "Bearer"
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


def _keys(scope: Scope) -> Iterator[bytes]:
    """Yield the keys of a request. A client may send one in each header, as Claude Code does."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key":
            yield value.strip()
