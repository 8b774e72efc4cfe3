"""Where the bytes of an image or a video come from: a data URL, a file below one folder, or a URL fetched before."""

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from cluster.api.images.medium import MediaKind, Medium
from cluster.api.images.settings import ImageSettings
from cluster.errors import BadRequestError

_SHOWN = 200  # characters of a URL in an error
REMOTE = ("http", "https")
_NETLOC = re.compile(r"([a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
FRAME_LIST = "data:video/jpeg;base64,"
"""Begins a video as a list of images in base64, with commas between them."""


def is_remote(url: str) -> bool:
    """Return whether a URL must be fetched."""
    return url[:8].lower().startswith(tuple(f"{scheme}://" for scheme in REMOTE))


def read_source(medium: Medium, settings: ImageSettings, fetched: Mapping[str, bytes]) -> bytes:
    """Return the bytes of the file of an image or a video. Raises BadRequestError."""
    url, limit = medium.url, size_limit(medium.kind, settings)
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        found = _of_data_url(url, limit)
    elif scheme == "file":
        found = _of_file(url, settings, limit)
    elif url in fetched:
        found = fetched[url]
    else:
        raise BadRequestError(
            f"{url[:_SHOWN]!r} is no data URL, and no http(s) or file URL, which a server may allow"
        )
    limit.check(len(found))
    return found


def read_frames(medium: Medium, settings: ImageSettings, most: int) -> list[bytes]:
    """Return the files of at most `most` frames of a FRAME_LIST. Raises BadRequestError."""
    limit = size_limit(medium.kind, settings)
    texts = medium.url[len(FRAME_LIST) :].split(",", most + 1)
    if len(texts) > most:
        raise BadRequestError(f"it has more than {most} frames (serve.videos.max_frames)")
    limit.check(sum(map(len, texts)) * 3 // 4)
    return [_of_base64(text) for text in texts]


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


class SizeLimit(NamedTuple):
    """The most bytes of a file, and the setting that has this number."""

    max_bytes: int
    setting: str

    def check(self, num_bytes: int) -> None:
        """Raise BadRequestError if a file is too large."""
        if num_bytes > self.max_bytes:
            raise BadRequestError(
                f"it has {num_bytes} bytes, more than {self.max_bytes} ({self.setting})"
            )


def size_limit(kind: MediaKind, settings: ImageSettings) -> SizeLimit:
    """Return the limit of a file of this kind."""
    if kind == "video" and settings.videos is not None:
        return SizeLimit(settings.videos.max_video_bytes, "serve.videos.max_video_bytes")
    return SizeLimit(settings.max_image_bytes, "serve.images.max_image_bytes")


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


def _of_data_url(url: str, limit: SizeLimit) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRequestError(
            "a data URL must have the form data:image/png;base64,... with the file in base64"
        )
    if len(text) * 3 // 4 > limit.max_bytes + 3:
        raise BadRequestError(f"it has more than {limit.max_bytes} bytes ({limit.setting})")
    return _of_base64(text)


def _of_base64(text: str) -> bytes:
    """Return the bytes of base64 as browsers read it in data URLs: with line ends in it, and without `=` at its end."""
    if "%" in text:
        text = unquote_to_bytes(text).decode("ascii", "replace")
    text = "".join(text.split())
    text += "=" * (-len(text) % 4)
    try:
        data = base64.b64decode(text, altchars=None, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequestError("its data URL holds no valid base64") from None
    if not data:
        raise BadRequestError("its data URL is empty")
    return data


def _of_file(url: str, settings: ImageSettings, limit: SizeLimit) -> bytes:
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
            limit.check(found.st_size)
            return file.read(limit.max_bytes)
    except (OSError, ValueError) as error:
        if isinstance(error, BadRequestError):
            raise
        raise refused from None
