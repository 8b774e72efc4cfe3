"""uvicorn's HTTP connection with limits: of connections, of a request's head, and of a client that does not read.

Counters and timers only; no code here runs per token. Knows nothing of the content of requests and answers.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.api.answer.events import error_body
from cluster.errors import BadRequestError, OverloadedError, ServingError

MAX_HEAD_BYTES = 64 * 1024


class HttpProtocol(HttpToolsProtocol):
    """Closes a connection if the request's head is too slow or too long, or if the client does not read."""

    client_timeout_s = 60.0
    max_connections = 16384

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._in_message = False
        self._in_head = True
        self._head_bytes = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._start_read_timer()
        if len(self.connections) > self.max_connections:
            error = OverloadedError(f"{self.max_connections} connections are open, the limit")
            self._refuse(503, error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_read_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request. The first part after an answer starts the timer.

        After an early refusal the rest of the body is read too, because the client reads the answer only then.
        """
        if self.timeout_keep_alive_task is not None and self._read_timer is None:
            self._start_read_timer()
        if not self._in_message:
            self._in_head = True
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _bad(f"the headers have more than {MAX_HEAD_BYTES} bytes, the limit"))

    def on_message_begin(self) -> None:
        """Note that a request begins. Behind another one its first part does not count, because that may be a body."""
        self._in_message = self._in_head = True
        self._head_bytes = max(self._head_bytes, 1)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete, and the application limits the time of the body."""
        self._in_head, self._head_bytes = False, 0
        self._stop_read_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self._in_message = False
        self._stop_read_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with the error envelope."""
        self._in_head = False
        self._refuse(400, _bad(msg))

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self.client_timeout_s, self._is_late)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _is_late(self) -> None:
        self._read_timer = None
        if self._in_head and self._head_bytes:
            self._refuse(
                408, _bad(f"the headers did not arrive within {self.client_timeout_s:g} s")
            )
        else:
            self.transport.close()

    def _refuse(self, status: int, error: ServingError) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()


def _bad(message: str) -> BadRequestError:
    return BadRequestError(message, code="invalid_http")


def limited_protocol(client_timeout_s: float, max_connections: int) -> type[HttpProtocol]:
    """The class with its limits; uvicorn creates an object of it for each connection."""
    limits = {"client_timeout_s": client_timeout_s, "max_connections": max_connections}
    return type("LimitedHttpProtocol", (HttpProtocol,), limits)
