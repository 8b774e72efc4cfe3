"""Fetches of images: what is followed, limits of time and size, and addresses that are not public."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from cluster.api.images.fetch import Fetcher, is_public
from cluster.api.images.settings import ImageSettings
from cluster.errors import BadRequestError, OverloadedError
from tests.unit.image_case import PAD, image_at
from tests.unit.video_case import VIDEOS, video_at

FILE = bytes(range(256)) * 8


@asynccontextmanager
async def host() -> AsyncIterator[tuple[int, list[str]]]:
    """A web server on 127.0.0.1: its port, and the paths that it was asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        port = request.url.port
        match request.path:
            case "/never":
                await asyncio.sleep(60)
            case "/around":
                raise web.HTTPFound("/around")
            case "/moved":
                raise web.HTTPFound("/a.png")
            case "/elsewhere":
                raise web.HTTPFound(f"http://localhost:{port}/a.png")
            case "/missing":
                raise web.HTTPNotFound
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(FILE)
            case "/squeezed":
                return web.Response(body=b"no gzip", headers={"content-encoding": "gzip"})
        return web.Response(body=FILE)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1], asked
    finally:
        await runner.cleanup()


def scene(test: Callable[[int, list[str]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), host() as (port, asked):
            await test(port, asked)

    asyncio.run(run())


def fetcher(port: int, *, public: bool = False, **limits: Any) -> Fetcher:
    domains = f"127.0.0.1:{port}", f"localhost:{port}"
    limits = {"fetch_timeout_s": 60, **limits}  # of a machine that is busy
    settings = ImageSettings(token_id=PAD, allowed_domains=domains, **limits)
    return Fetcher(settings) if public else Fetcher(settings, lambda address: True)


def test_files_are_held_while_they_are_used() -> None:
    async def test(port: int, asked: list[str]) -> None:
        found = fetcher(port)
        first, moved = (f"http://127.0.0.1:{port}/{name}" for name in ("a.png", "moved"))
        async with found.fetched(
            [image_at(first, 0), image_at(moved, 2), image_at(first, 3)]
        ) as files:
            assert files == {first: FILE, moved: FILE} and found.num_bytes == 2 * len(FILE)
        assert found.num_bytes == 0 and sorted(asked) == ["/a.png", "/a.png", "/moved"]
        async with found.fetched([]) as files:
            assert files == {}
        squeezed = f"http://127.0.0.1:{port}/squeezed"
        async with found.fetched([image_at(squeezed, 0)]) as files:
            assert (
                files[squeezed] == b"no gzip"
            )  # never unpacked, so no small answer is a large file

    scene(test)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "answers 404"),
        ("around", "redirects more than 3 times"),
        ("elsewhere", "redirects to another host"),
        ("endless", "max_image_bytes"),
    ],
)
def test_what_is_not_fetched(path: str, message: str) -> None:
    async def test(port: int, asked: list[str]) -> None:
        found = fetcher(port, max_image_bytes=10_000)
        good, bad = (f"http://127.0.0.1:{port}/{name}" for name in ("a.png", path))
        with pytest.raises(BadRequestError, match=message) as error:
            async with found.fetched([image_at(good, 0), image_at(bad, 4)]):
                pytest.fail("it was fetched")
        assert error.value.message.startswith("image 4: ") and error.value.param == "messages"
        assert found.num_bytes == 0

    scene(test)


def test_a_file_that_does_not_come_in_time() -> None:
    async def test(port: int, asked: list[str]) -> None:
        found = fetcher(port, fetch_timeout_s=0.1)
        with pytest.raises(BadRequestError, match=r"image 4: .* did not send it within 0\.1 s"):
            async with found.fetched([image_at(f"http://127.0.0.1:{port}/never", 4)]):
                pytest.fail("it was fetched")
        assert found.num_bytes == 0

    scene(test)


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def test(_port: int, asked: list[str]) -> None:
            with pytest.raises(BadRequestError, match="could not be fetched"):
                async with fetcher(port).fetched([image_at(f"http://127.0.0.1:{port}/a.png", 0)]):
                    pytest.fail("it was fetched")

        scene(test)


def test_addresses_are_checked_where_they_are_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to a public address first, and then to this machine, reaches nothing."""
    answers = iter(["93.184.215.14", "127.0.0.1"])

    async def test(port: int, asked: list[str]) -> None:
        loop = asyncio.get_running_loop()

        async def getaddrinfo(name: str, number: int, **_: Any) -> list[Any]:
            kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
            return [(*kind, (next(answers), port))]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        assert is_public((await loop.getaddrinfo("localhost", port))[0][4][0])
        found = fetcher(port, public=True)
        for name in ("localhost", "127.0.0.1"):
            with pytest.raises(BadRequestError, match="an address that is not public"):
                async with found.fetched([image_at(f"http://{name}:{port}/a.png", 0)]):
                    pytest.fail("it was fetched")
        assert asked == []

    scene(test)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:4700::6810:84e5", True),
        *((private, False) for private in ("10.1.2.3", "172.16.0.1", "192.168.1.1", "127.0.0.1")),
        *(
            (special, False)
            for special in ("169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1")
        ),
        *((private, False) for private in ("::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::")),
        ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        *((gateway, False) for gateway in ("64:ff9b::a00:1", "2002:a00:1::1", "2001::1")),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_a_video_has_a_limit_of_its_own() -> None:
    async def test(port: int, asked: list[str]) -> None:
        url = f"http://127.0.0.1:{port}/a.mp4"
        found = fetcher(port, videos=VIDEOS, max_image_bytes=len(FILE) - 1)
        async with found.fetched([video_at(url)]) as files:
            assert files == {url: FILE}
        small = replace(VIDEOS, max_video_bytes=len(FILE) - 1)
        with pytest.raises(BadRequestError, match=r"video 3: .*serve\.videos\.max_video_bytes"):
            async with fetcher(port, videos=small).fetched([video_at(url, 3)]):
                pytest.fail("it was fetched")

    scene(test)


def test_all_files_together_have_a_limit() -> None:
    async def test(port: int, asked: list[str]) -> None:
        found = fetcher(port, max_open_bytes=3 * len(FILE))
        urls = [image_at(f"http://127.0.0.1:{port}/{i}", i) for i in range(2)]
        async with found.fetched(urls):
            with pytest.raises(OverloadedError, match="try again later"):
                async with found.fetched(urls):
                    pytest.fail("it was fetched")
        async with found.fetched(urls):
            assert found.num_bytes == 2 * len(FILE)

    scene(test)
