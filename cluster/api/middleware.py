"""Pure ASGI middleware: request ids and counts of answers. A streamed token does not pass it, see BODY_SEND."""

import re
import time
import uuid
from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.admission import BODY_SEND, STARTED
from cluster.api.error_format import is_messages_route
from cluster.api.record import REQUEST_ID
from cluster.metrics.metrics import IngressMetrics

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class RequestContext:
    """Echoes x-request-id, or generates one, and counts the answer under its route.

    Anthropic's clients read the id from request-id.
    """

    def __init__(self, app: ASGIApp, metrics: IngressMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap one HTTP request; anything else passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope[REQUEST_ID] = request_id.decode("ascii")
        names = [b"x-request-id", b"request-id"][: 1 + is_messages_route(scope)]
        ids = [(name, request_id) for name in names]
        arrived = time.perf_counter()

        def tagged_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *ids]
                scope[STARTED] = True
                scope[BODY_SEND] = send
                self._metrics.observe_http(_handler(scope), message["status"])
            return send(message)

        try:
            await self._app(scope, receive, tagged_send)
        finally:
            self._metrics.observe_http_end(_handler(scope), time.perf_counter() - arrived)


def _request_id(scope: Scope) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return uuid.uuid4().hex.encode("ascii")


def _handler(scope: Scope) -> str:
    """Return the pattern of the route, because a label by path would make a metric for every wrong path."""
    route: Any = scope.get("route")
    return getattr(route, "path", "none")
