"""Fetches images and videos of http(s) URLs, within limits of time, size and place. Knows no content of a file.

`check_remote` has checked the host of a URL. The address is checked where the socket for it is made, so a name that
resolves to another address the next time changes nothing.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import aiohttp

from cluster.api.images.medium import Medium, numbered
from cluster.api.images.settings import ImageSettings
from cluster.api.images.source import SizeLimit, check_remote, size_limit
from cluster.errors import BadRequestError, OverloadedError

_AT_ONCE, _OF_ONE_REQUEST = 64, 4  # fetches
_REDIRECTS = 3
_PART_BYTES = 64 * 1024
_SHOWN = 200
# IPv6 addresses that stand for IPv4 ones behind a gateway, which may be of any network.
_GATEWAYS = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)
_HEADERS = {"accept": "image/*, video/*", "accept-encoding": "identity", "user-agent": "phalanx"}


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif any(ip in gateway for gateway in _GATEWAYS):
            return False
    return ip.is_global and not ip.is_multicast


class Fetcher:
    """The fetches of one ingress; used in its event loop only.

    reachable   whether an address may be connected to
    """

    def __init__(
        self, settings: ImageSettings, reachable: Callable[[str], bool] = is_public
    ) -> None:
        self._settings = settings
        self._reachable = reachable
        self._places = asyncio.Semaphore(_AT_ONCE)
        self.num_bytes = 0
        """Bytes of all files that are held for requests in preparation."""

    @asynccontextmanager
    async def fetched(self, media: Sequence[Medium]) -> AsyncIterator[dict[str, bytes]]:
        """Hold the files of images and videos meanwhile, by their URLs. Raises BadRequestError.

        A URL that comes twice is fetched once.
        """
        first = {medium.url: medium for medium in reversed(media)}
        files: dict[str, list[bytes]] = {url: [] for url in first}
        try:
            if first:
                await self._fetch_all(list(first.values()), files)
            for parts in files.values():  # which a thread joins without the interpreter lock
                parts[:] = [await asyncio.to_thread(b"".join, parts)]
            yield {url: parts[0] for url, parts in files.items()}
        finally:
            self.num_bytes -= sum(sum(map(len, parts)) for parts in files.values())

    async def _fetch_all(self, media: list[Medium], files: dict[str, list[bytes]]) -> None:
        connector = aiohttp.TCPConnector(
            limit=_OF_ONE_REQUEST, socket_factory=self._socket, force_close=True
        )
        jar = aiohttp.DummyCookieJar()
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector, cookie_jar=jar, auto_decompress=False, headers=_HEADERS
                ) as session,
                asyncio.TaskGroup() as group,
            ):
                for medium in media:
                    group.create_task(self._fetch(session, medium, files[medium.url]))
        except BaseExceptionGroup as errors:  # the error of one cancels all; raise the first
            raise errors.exceptions[0] from None

    async def _fetch(
        self, session: aiohttp.ClientSession, medium: Medium, parts: list[bytes]
    ) -> None:
        limit, url = self._settings.fetch_timeout_s, medium.url
        most = size_limit(medium.kind, self._settings)
        with numbered(medium):
            try:
                async with self._places, asyncio.timeout(limit):
                    await self._follow(session, url, parts, most)
            except TimeoutError:
                raise BadRequestError(
                    f"{url[:_SHOWN]!r} did not send it within {limit:g} s (serve.images.fetch_timeout_s)"
                ) from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                if isinstance(error, BadRequestError):
                    raise
                raise BadRequestError(
                    f"{url[:_SHOWN]!r} could not be fetched: {str(error)[:_SHOWN] or type(error).__name__}"
                ) from None

    async def _follow(
        self, session: aiohttp.ClientSession, url: str, parts: list[bytes], most: SizeLimit
    ) -> None:
        """Fetch a URL; follow redirects within its host."""
        for _ in range(1 + _REDIRECTS):
            async with session.get(url, allow_redirects=False) as response:
                target = response.headers.get("location")
                if response.status in (301, 302, 303, 307, 308) and target:
                    url = self._redirected(url, target)
                    continue
                if response.status != 200:
                    raise BadRequestError(f"{url[:_SHOWN]!r} answers {response.status}")
                most.check(response.content_length or 0)
                async for part in response.content.iter_chunked(_PART_BYTES):
                    self._take(part, parts, most)
                return
        raise BadRequestError(f"{url[:_SHOWN]!r} redirects more than {_REDIRECTS} times")

    def _redirected(self, url: str, target: str) -> str:
        found = urljoin(url, target)
        before, after = urlsplit(url), urlsplit(found)
        if after.hostname != before.hostname or (before.scheme, after.scheme) == ("https", "http"):
            raise BadRequestError(f"{url[:_SHOWN]!r} redirects to another host, or away from https")
        check_remote(found, self._settings)
        return found

    def _take(self, part: bytes, parts: list[bytes], most: SizeLimit) -> None:
        """Add a part of a file that has arrived."""
        most.check(sum(map(len, parts)) + len(part))
        if self.num_bytes + len(part) > self._settings.max_open_bytes:
            raise OverloadedError(
                f"images and videos that were fetched have {self.num_bytes} of {self._settings.max_open_bytes} bytes; "
                "try again later"
            )
        self.num_bytes += len(part)
        parts.append(part)

    def _socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Return a socket for a connection to an address. Raises OSError if it may not be connected to."""
        family, kind, protocol, _, place = address
        if not self._reachable(str(place[0])):
            raise OSError(errno.EACCES, "its host has an address that is not public")
        return socket.socket(family, kind, protocol)
