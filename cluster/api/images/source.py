"""Where the bytes of an image come from: a data URL, a file below one folder, or a URL that was fetched before."""

import base64
import binascii
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from cluster.api.images.settings import ImageSettings
from cluster.errors import BadRequestError

_SHOWN = 200  # characters of a URL in an error
REMOTE = ("http", "https")
_NETLOC = re.compile(r"([a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
INVALID = "invalid_image"
"""Code of errors of what an image is."""


class UnreadImages(ValueError):
    """Images of a body that cannot be read here: in an event loop, or before their URLs were fetched.

    urls   of the images that must be fetched, with the number of each image in the request
    """

    def __init__(self, urls: list[tuple[int, str]]) -> None:
        super().__init__(urls)
        self.urls = urls


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Raise errors of the client as errors of an image of the request, counted from 0."""
    try:
        yield
    except BadRequestError as error:
        message = f"image {number}: {error.message}"
        raise BadRequestError(message, param="messages", code=error.code) from None


def is_remote(url: str) -> bool:
    """Return whether a URL must be fetched."""
    return url[:8].lower().startswith(tuple(f"{scheme}://" for scheme in REMOTE))


def read_source(url: str, settings: ImageSettings, fetched: Mapping[str, bytes]) -> bytes:
    """Return the bytes of an image. Raises BadRequestError."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _of_data_url(url, settings.max_image_bytes)
    if scheme == "file":
        return _of_file(url, settings)
    if url in fetched:
        return fetched[url]
    raise BadRequestError(
        f"{url[:_SHOWN]!r} is no data URL, and no http(s) or file URL, which a server may allow"
    )


def check_remote(url: str, settings: ImageSettings) -> None:
    """Raise BadRequestError if a URL may not be fetched."""
    if not settings.allowed_domains:
        raise BadRequestError(
            "this server fetches no URLs (serve.allowed_media_domains); send a data URL"
        )
    place = _place_of(url)
    if not any(_matches(place, allowed.lower()) for allowed in settings.allowed_domains):
        raise BadRequestError(
            f"this server fetches no URLs of {place[:_SHOWN]!r} (serve.allowed_media_domains)"
        )


def check_size(num_bytes: int, settings: ImageSettings) -> None:
    """Raise BadRequestError if the file of an image is too large."""
    if num_bytes > settings.max_image_bytes:
        raise BadRequestError(
            f"it has {num_bytes} bytes, more than {settings.max_image_bytes} (serve.images.max_image_bytes)"
        )


def _place_of(url: str) -> str:
    """Return the host of a URL, and its port if it is not that of the scheme. Raises BadRequestError.

    A host has no other characters than these, so that no library reads it otherwise than this function.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        found = _NETLOC.fullmatch(parts.netloc.lower())
        if found is not None and scheme in REMOTE:
            host, port = found[1].rstrip("."), found[2]
            usual = "443" if scheme == "https" else "80"
            return host if port in (None, usual) else f"{host}:{port}"
    raise BadRequestError(f"{url[:_SHOWN]!r} does not have the form https://host/path")


def _matches(place: str, allowed: str) -> bool:
    """Return whether an entry of `allowed_domains` names a host; `*` names none with a port of its own."""
    if allowed == "*":
        return bool(place) and ":" not in place.rpartition("]")[2]
    return place.endswith(allowed[1:]) if allowed.startswith("*.") else place == allowed


def _of_data_url(url: str, max_bytes: int) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRequestError(
            "a data URL must have the form data:image/png;base64,... with the file in base64"
        )
    if len(text) * 3 // 4 > max_bytes + 3:
        raise BadRequestError(f"it has more than {max_bytes} bytes (serve.images.max_image_bytes)")
    if "%" in text:
        text = unquote_to_bytes(text).decode("ascii", "replace")
    try:
        data = base64.b64decode(text, altchars=None, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequestError("its data URL holds no valid base64") from None
    if not data:
        raise BadRequestError("its data URL is empty")
    return data


def _of_file(url: str, settings: ImageSettings) -> bytes:
    """Return a regular file below the allowed folder; links are followed before the check."""
    if settings.allowed_folder is None:
        raise BadRequestError(
            "this server reads no files (serve.allowed_media_folder); send a data URL"
        )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise BadRequestError("a file URL must have the form file:///folder/name")
    folder = Path(settings.allowed_folder).resolve()
    # One error for all files that cannot be read, so that no client finds out which files exist elsewhere.
    refused = BadRequestError(
        f"{url[:_SHOWN]!r} is no readable file below {settings.allowed_folder} (serve.allowed_media_folder)"
    )
    try:
        path = Path(unquote(parts.path)).resolve()
        if not path.is_relative_to(folder):
            raise refused
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise refused
            check_size(found.st_size, settings)
            return file.read(settings.max_image_bytes)
    except (OSError, ValueError) as error:
        if isinstance(error, BadRequestError):
            raise
        raise refused from None
