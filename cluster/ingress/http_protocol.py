"""uvicorn's HTTP connection with limits on what a client may keep waiting: its request's head, and its reading.

Only counts and timers; nothing here runs for a token. Knows nothing of what is asked or answered.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cluster.api.answer.events import error_body
from cluster.errors import BadRequestError

MAX_HEAD_BYTES = 64 * 1024


class HttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too slow or too long, or whose client stopped reading."""

    client_timeout_s = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a request at once."""
        super().connection_made(transport)
        self._in_message = False
        self._in_head = True
        self._head_bytes = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._stop_read_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A part of a request. The first one after an answer starts the clock: for the next head, or for the
        rest of a body that was refused early, which is read so that the client gets to see why.
        """
        if self.timeout_keep_alive_task is not None and self._read_timer is None:
            if not self._in_message:
                self._in_head, self._head_bytes = True, 0
            self._start_read_timer()
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES} bytes, the limit")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_message = self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is there; how long the body may take is up to who reads it."""
        self._in_head = False
        self._stop_read_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request is there."""
        self._in_message = False
        self._stop_read_timer()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed gets the envelope of all other errors."""
        self._in_head = False
        self._refuse(400, msg)

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self.client_timeout_s, self._is_late)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _is_late(self) -> None:
        self._read_timer = None
        if self._in_head and self._head_bytes:
            self._refuse(408, f"the headers did not arrive within {self.client_timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = error_body(BadRequestError(message, code="invalid_http"))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()


def limited_protocol(client_timeout_s: float) -> type[HttpProtocol]:
    """The class with its time limit; uvicorn makes an object of it for each connection."""
    return type("LimitedHttpProtocol", (HttpProtocol,), {"client_timeout_s": client_timeout_s})
