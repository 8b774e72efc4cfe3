"""A small HTTP/1.1 client for load generation: one keep-alive connection, bodies passed on as they arrive.

It calls the parser of uvicorn, httptools, and no HTTP client library, because the client shares its cores with the
server under test, and such a library takes more CPU time for a streamed chunk than the server for a token. Knows
nothing of OpenAI's formats.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

BodySink = Callable[[bytes, float], None]


class HttpError(Exception):
    """A request failed. The message is short, because errors are counted by message."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, from its base URL."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Parse a URL such as `http://host:8000`. A trailing `/v1` is removed, because every path starts with it."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url!r} is not of the form http://host:port")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), prefix, tls)


@dataclass
class Response:
    """A finished response. `body` is empty when a sink took it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Connection(asyncio.Protocol):
    """One connection, one request at a time; opened again when the server closed it."""

    def __init__(self, endpoint: Endpoint, headers: dict[str, str]):
        self._endpoint = endpoint
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        sink: BodySink | None = None,
    ) -> Response:
        """Send and read to the end of the body. `sink` gets the body of a 200 as it arrives.

        Raises HttpError or TimeoutError; the connection is closed then, and opened again next time.
        """
        endpoint = self._endpoint
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        head = (
            f"{method} {endpoint.prefix}{path} HTTP/1.1\r\nHost: {host}:{endpoint.port}\r\n"
            f"Accept: */*\r\nContent-Type: application/json\r\n{self._head}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        message = head.encode() + body
        if self._transport is not None and not self._transport.is_closing():
            try:
                return await self._exchange(message, timeout_s, sink)
            except HttpError:
                if self._heard:
                    raise
                # A server may close an idle connection at any time, also while the client sends a request on it.
        await self._connect(timeout_s)
        return await self._exchange(message, timeout_s, sink)

    async def _exchange(self, message: bytes, timeout_s: float, sink: BodySink | None) -> Response:
        if self._transport is None:  # closed as soon as it was open
            raise HttpError("connection closed")
        self._response = Response()
        self._sink = sink
        self._parser = HttpResponseParser(self)
        self._heard = self._in_body = False
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._transport.write(message)
        # Not wait_for: Python 3.11's loses a cancellation that comes with the last byte.
        timer = loop.call_later(timeout_s, self._expire)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _expire(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(TimeoutError())

    async def _connect(self, timeout_s: float) -> None:
        endpoint = self._endpoint
        context = ssl.create_default_context() if endpoint.tls else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: self, endpoint.host, endpoint.port, ssl=context
                )
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise HttpError(f"cannot connect: {error.strerror or error}") from error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop. The end of the connection completes a body without a length; else the request fails."""
        self._transport = None
        if self._done is None or self._done.done():
            return
        framed = self._response.headers.keys() & {"content-length", "transfer-encoding"}
        if self._in_body and not framed:
            self._done.set_result(self._response)
        else:
            self._done.set_exception(HttpError("connection closed"))

    def data_received(self, data: bytes) -> None:
        """Called by the loop with the bytes of one read."""
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            return  # after the end of a body: nothing that belongs to a request
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if not self._done.done():
                self._done.set_exception(HttpError("malformed response"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._response.status = self._parser.get_status_code()
        self._in_body = self._response.status != 100
        if self._response.status != 200:
            self._sink = None

    def on_body(self, data: bytes) -> None:
        """Called by the parser with the body of one chunk, or a part of it."""
        if self._sink is not None:
            self._sink(data, self._now)
        else:
            self._response.body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        assert self._done is not None
        if not self._in_body or self._done.done():
            return
        self._done.set_result(self._response)
        if not self._parser.should_keep_alive():
            self.close()
