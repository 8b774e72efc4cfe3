"""Reads the bodies of requests, within limits of each and of all together. Knows nothing of their content."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from cluster.api.settings import ApiSettings
from cluster.errors import (
    BodyTooLargeError,
    ClientTimeoutError,
    ContentTypeError,
    OverloadedError,
)

_SLOW_S = 5.0
_JOINED_HERE = 4 * 1024 * 1024


@dataclass(eq=False)
class _Upload:
    """A body that arrives. timeout: ends its reading."""

    timeout: asyncio.Timeout
    started: float = field(default_factory=time.monotonic)
    num_bytes: int = 0


class Uploads:
    """The bodies of one ingress that arrive or are prepared; used in its event loop only."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._arriving: dict[_Upload, None] = {}  # the oldest first
        self.num_bytes = 0

    @asynccontextmanager
    async def body(self, request: Request, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Read the body, which counts among all bodies meanwhile. Raises a BadRequestError with the matching status.

        The content type must be JSON, because a web page cannot send that type to another origin without CORS. So no
        page in a browser can use a server on loopback. max_bytes: a lower limit than that of the settings
        """
        media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != "application/json" and not (
            media_type.startswith("application/") and media_type.endswith("+json")
        ):
            raise ContentTypeError(
                f"the body must be sent as Content-Type: application/json, got {media_type!r}"
            )
        upload = _Upload(asyncio.timeout(self._settings.client_timeout_s))
        self._arriving[upload] = None
        try:
            yield await self._read(request, upload, max_bytes or self._settings.max_request_bytes)
        finally:
            self._arriving.pop(upload, None)
            self.num_bytes -= upload.num_bytes

    async def _read(self, request: Request, upload: _Upload, max_bytes: int) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
            raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {max_bytes}")
        parts: list[bytes] = []
        size = 0
        try:
            async with upload.timeout:
                async for part in request.stream():
                    size += len(part)
                    if size > max_bytes:
                        raise BodyTooLargeError(
                            f"the body has more than {max_bytes} bytes, the limit"
                        )
                    self._take(upload, len(part))
                    parts.append(part)
        except TimeoutError:
            limit = self._settings.client_timeout_s
            late = f"the body did not arrive within {limit:g} s"
            if time.monotonic() - upload.started < limit:
                late = f"the body did not arrive within {_SLOW_S:g} s, and others need its memory"
            raise ClientTimeoutError(late) from None
        del self._arriving[upload]
        if size > _JOINED_HERE:
            return await asyncio.to_thread(b"".join, parts)  # which holds no interpreter lock
        return b"".join(parts)

    def _take(self, upload: _Upload, num_bytes: int) -> None:
        """Count bytes that have arrived. Where all bodies together have too many, the oldest slow upload ends.

        Raises TimeoutError for an upload that has ended so, because it may read on before its timeout ends it.
        """
        if upload not in self._arriving:
            raise TimeoutError
        limit = self._settings.max_upload_bytes
        while self.num_bytes + num_bytes > limit:
            slow = next(iter(self._arriving))
            if slow is upload or time.monotonic() - slow.started < _SLOW_S:
                raise OverloadedError(
                    f"the bodies of other requests have {self.num_bytes} of {limit} bytes; try again later"
                )
            if not slow.timeout.expired():
                slow.timeout.reschedule(asyncio.get_running_loop().time())
            del self._arriving[slow]
            self.num_bytes -= slow.num_bytes
            slow.num_bytes = 0
        upload.num_bytes += num_bytes
        self.num_bytes += num_bytes
