"""Where images come from: data URLs, files below a folder, and which http(s) URLs may be fetched."""

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from cluster.api.images.medium import UnreadImages
from cluster.api.images.opened import OpenedImage
from cluster.api.images.reader import ImageReader
from cluster.api.images.settings import ImageSettings
from cluster.api.images.source import check_remote, read_source
from cluster.errors import BadRequestError
from tests.unit.image_case import PAD, SMALL, as_file, data_url, image_at, noise

DATA = as_file(noise(8, 8))


def settings(**fields: Any) -> ImageSettings:
    return ImageSettings(token_id=PAD, geometry=SMALL, **fields)


@pytest.mark.parametrize(
    "url",
    [
        data_url(DATA),
        data_url(DATA, "image/jpeg"),  # the content counts
        data_url(DATA, ""),
        data_url(DATA, "image/png;charset=utf-8"),
        data_url(DATA).replace("data", "DATA", 1),
        "data:;base64," + base64.encodebytes(DATA).decode(),
        data_url(DATA).rstrip("="),
        data_url(DATA).replace("+", "%2B").replace("/", "%2F").replace("image%2F", "image/"),
    ],
)
def test_data_urls(url: str) -> None:
    assert read_source(image_at(url), settings(), {}) == DATA


def test_the_size_of_a_data_url_is_checked_before_it_is_decoded() -> None:
    exact = settings(max_image_bytes=3000)
    assert read_source(image_at(data_url(bytes(3000))), exact, {}) == bytes(3000)
    with pytest.raises(BadRequestError, match="max_image_bytes"):
        read_source(image_at("data:;base64," + "\udc00" * 9000), exact, {})


def test_files(tmp_path: Path) -> None:
    folder, other = tmp_path / "media", tmp_path / "other"
    folder.mkdir(), other.mkdir()
    (folder / "a b.png").write_bytes(DATA)
    (other / "c.png").write_bytes(DATA)
    (folder / "link.png").symlink_to(other / "c.png")
    (folder / "inside.png").symlink_to(folder / "a b.png")
    os.mkfifo(folder / "pipe")
    found = settings(allowed_folder=str(folder), max_image_bytes=len(DATA))
    for url in (f"file://{folder}/a%20b.png", f"file://localhost{folder}/inside.png"):
        assert read_source(image_at(url), found, {}) == DATA
    for name in ("no.png", "../other/c.png", "link.png", "pipe", "", "%00", "x" * 300):
        with pytest.raises(BadRequestError, match="no readable file below"):
            read_source(image_at(f"file://{folder}/{name}"), found, {})
    with pytest.raises(BadRequestError, match="file:///folder/name"):
        read_source(image_at(f"file://host{folder}/a.png"), found, {})
    with pytest.raises(BadRequestError, match="max_image_bytes"):
        small = settings(allowed_folder=str(folder), max_image_bytes=10)
        read_source(image_at(f"file://{folder}/inside.png"), small, {})


DOMAINS = ("images.example", "*.parts.example", "odd.example:8443", "[2001:db8::1]:8080")


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://images.example/a.png?b=c", True),
        ("http://images.example:80/a.png", True),
        ("HTTPS://IMAGES.EXAMPLE./a.png", True),
        ("https://images.example:8443/a.png", False),
        ("https://odd.example:8443/a.png", True),
        ("https://odd.example/a.png", False),
        ("https://a.b.parts.example/a.png", True),
        ("https://parts.example/a.png", False),
        ("https://notparts.example/a.png", False),
        ("https://images.example.evil/a.png", False),
        ("https://images.example@evil/a.png", False),
        ("https://user:word@images.example/a.png", False),
        ("http://[2001:DB8::1]:8080/a.png", True),
        ("http://[2001:db8::1]/a.png", False),
        ("https://evil\\@images.example/a.png", False),
        ("https://images.example\\.evil/a.png", False),
        ("https:///a.png", False),
        ("https://[::1/a.png", False),
        ("https://images.example:99999/a.png", False),
    ],
)
def test_hosts(url: str, allowed: bool) -> None:
    found = settings(allowed_domains=DOMAINS)
    if allowed:
        check_remote(url, found)
        return
    with pytest.raises(BadRequestError):
        check_remote(url, found)


def test_all_hosts_and_none() -> None:
    check_remote("https://anything.example/", settings(allowed_domains=("*",)))
    with pytest.raises(BadRequestError, match="allowed_media_domains"):
        check_remote("https://anything.example:22/", settings(allowed_domains=("*",)))
    with pytest.raises(BadRequestError, match="fetches no URLs"):
        check_remote("https://anything.example/", settings())


def test_an_event_loop_decodes_nothing_and_checks_what_it_can() -> None:
    here = ImageReader(settings(allowed_domains=("images.example",)))
    urls = [data_url(DATA), "https://images.example/a.png", "https://images.example/b.png"]
    media = [image_at(url, number) for number, url in enumerate(urls)]
    with pytest.raises(UnreadImages) as unread:
        here.open(media, {})
    assert unread.value.remote == media[1:]
    with pytest.raises(BadRequestError, match="image 1: this server fetches no URLs of 'evil'"):
        here.open([media[0], image_at("https://evil/a.png", 1)], {})
    with pytest.raises(UnreadImages):  # not even a data URL
        here.open(media[:1], {})
    there = ImageReader(here.settings, {urls[1]: DATA})
    with pytest.raises(UnreadImages):
        there.open(media, {})
    first, second = there.open(media[:2], {})
    assert isinstance(first, OpenedImage) and isinstance(second, OpenedImage)
    assert (first.num_tokens, second.num_tokens) == (1, 1)
    assert base64.b64decode(urls[0].partition(",")[2]) == second.data
