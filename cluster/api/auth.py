"""Access by API keys: a pure ASGI middleware, and the check of the routes of operators. Has only the digests of keys.

All routes need a key except the routes in OPEN, so a new route is protected by default.
"""

import hmac
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.error_format import error_response
from cluster.api.record import REQUEST_ID
from cluster.api.request.sender import Sender
from cluster.api.settings import ApiSettings
from cluster.config.api_keys import OPERATOR_VARIABLE, KeyDigests, digest
from cluster.errors import AuthenticationError, ForbiddenError

_PROBES = ("/live", "/ready", "/health", "/ping", "/load", "/metrics", "/ranks", "/version")
OPEN = frozenset(("/", "/docs", "/openapi.json", *_PROBES))
"""What probes, scrapers and browsers read without a key; nothing here shows or costs much."""
OPEN_PREFIX = "/web/"

_CALLER = "phalanx.caller"


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    digest   of its key; empty without an accepted key
    name     by which work is shared fairly: that of the key, or the address of a sender without a key
    """

    digest: bytes = b""
    is_operator: bool = False
    address: str = ""

    @property
    def name(self) -> str:
        """See above."""
        return self.digest.hex() or self.address


def caller_of(scope: Scope) -> Caller:
    """Return the sender of a request that has passed the middleware."""
    caller: Caller = scope[_CALLER]
    return caller


def sender_of(request: Request, settings: ApiSettings) -> Sender:
    """Return the sender as the preparation of its request sees it."""
    caller = caller_of(request.scope)
    return Sender(
        name=caller.name,
        key="" if caller.is_operator else caller.digest.hex(),
        salt=caller.digest.hex() if settings.separate_prefixes else "",
        routes=caller.is_operator or settings.client_routing,
        request_id=str(request.scope.get(REQUEST_ID, "")),
        headers=request.headers,
        receive=request.receive,
    )


def check_operator(scope: Scope, keys: KeyDigests) -> None:
    """Raise ForbiddenError or AuthenticationError unless the sender of a request is an operator."""
    caller = caller_of(scope)
    if not keys.operators:
        raise ForbiddenError(
            f"the routes of operators are off; set {OPERATOR_VARIABLE} where the server starts"
        )
    if caller.is_operator:
        return
    if caller.digest:
        raise ForbiddenError(f"this key is a client's; {OPERATOR_VARIABLE} of the server is needed")
    raise AuthenticationError("this route needs a key of operators, as Authorization: Bearer KEY")


class ApiKeyAuth:
    """Lets requests with `Authorization: Bearer KEY` or `x-api-key: KEY` pass, and notes their sender."""

    def __init__(self, app: ASGIApp, keys: KeyDigests) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one HTTP request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        keys = list(_keys(scope))
        scope[_CALLER] = caller = self._caller(keys, scope)
        if caller.digest or not self._keys.clients or _is_open(scope):
            await self._app(scope, receive, send)
            return
        problem = "the API key is wrong" if any(keys) else "an API key is missing"
        error = AuthenticationError(
            f"{problem}; send it as Authorization: Bearer KEY or as x-api-key: KEY"
        )
        await error_response(error, scope)(scope, receive, send)

    def _caller(self, keys: list[bytes], scope: Scope) -> Caller:
        """Return the sender by its best key."""
        given = [digest(key) for key in keys]
        for known, is_operator in ((self._keys.operators, True), (self._keys.clients, False)):
            for key in given:
                if _contains(known, key):
                    return Caller(key, is_operator)
        client = scope.get("client")
        return Caller(address=client[0] if client else "")


def _contains(known: tuple[bytes, ...], given: bytes) -> bool:
    """Compare with all digests, each in constant time, so that the time depends on no key."""
    found = False
    for one in known:
        found |= hmac.compare_digest(given, one)
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
