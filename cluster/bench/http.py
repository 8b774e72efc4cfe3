"""A small HTTP/1.1 client for load generation: one keep-alive connection, bodies passed on as they arrive.

It replaces an HTTP library because the client shares its cores with the server under test, and a library takes
more CPU time for a streamed chunk than the server for a token. Knows nothing of OpenAI's formats.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

HEADER_END = b"\r\n\r\n"
MAX_HEADER_BYTES = 64 * 1024
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
        self._pending = b""
        self._heard = self._in_body = self._streaming = False
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
        if self._in_body and self._framing == "close":
            self._finish()
        else:
            self._done.set_exception(HttpError("connection closed"))

    def data_received(self, data: bytes) -> None:
        """Called by the loop with the bytes of one read."""
        now = time.perf_counter()
        if self._done is None or self._done.done():
            return  # after the end of a body: nothing that belongs to a request
        if self._streaming and not self._pending and self._give_whole_chunk(data, now):
            return
        self._heard = True
        try:
            if not self._in_body:
                data = self._read_head(self._pending + data)
                if not self._in_body:
                    return
            self._read_body(data, now)
        except (ValueError, HttpError) as error:
            kind = error if isinstance(error, HttpError) else HttpError("malformed response")
            self._done.set_exception(kind)

    def _read_head(self, data: bytes) -> bytes:
        """Parse status and headers if they are complete; return the bytes behind them, else b""."""
        head, end, rest = data.partition(HEADER_END)
        if not end:
            self._pending = data
            if len(data) > MAX_HEADER_BYTES:
                raise HttpError("malformed response")
            return b""
        status_line, *lines = head.decode("latin-1").split("\r\n")
        self._response.status = int(status_line.split(" ", 2)[1])
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._response.headers = headers
        self._pending = b""
        if self._response.status == 100:
            return self._read_head(rest)
        if self._response.status != 200:
            self._sink = None
        self._in_body = True
        self._left = int(headers.get("content-length", 0))
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._framing = "chunked"
            self._streaming = self._sink is not None
        else:
            self._framing = "length" if "content-length" in headers else "close"
        return rest

    def _read_body(self, data: bytes, now: float) -> None:
        if self._framing == "chunked":
            self._read_chunks(self._pending + data if self._pending else data, now)
            return
        if data:
            self._give(data, now)
        self._left -= len(data)
        if self._framing == "length" and self._left <= 0:
            self._finish()

    def _give_whole_chunk(self, data: bytes, now: float) -> bool:
        """Fast path for a read that is exactly one chunk, as nearly all reads of a stream are."""
        line_end = data.find(b"\r\n")
        try:
            size = int(data[:line_end], 16)
        except ValueError:
            return False
        if line_end < 0 or size <= 0 or len(data) != line_end + size + 4:
            return False
        assert self._sink is not None
        self._sink(data[line_end + 2 : -2], now)
        return True

    def _read_chunks(self, data: bytes, now: float) -> None:
        position = 0
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            size = int(data[position:line_end].split(b";", 1)[0], 16)
            start, end = line_end + 2, line_end + 2 + size
            if size == 0:
                if data.find(HEADER_END, line_end) < 0:
                    break
                self._finish()
                return
            if len(data) < end + 2:
                break
            self._give(data[start:end], now)
            position = end + 2
        self._pending = data[position:]

    def _give(self, data: bytes, now: float) -> None:
        if self._sink is not None:
            self._sink(data, now)
        else:
            self._response.body += data

    def _finish(self) -> None:
        assert self._done is not None
        self._done.set_result(self._response)
        if self._response.headers.get("connection", "").lower() == "close":
            with contextlib.suppress(RuntimeError):
                self.close()
